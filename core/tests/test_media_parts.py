"""Media parts of chat messages: every form in which one may come, and every key that none may have."""

from __future__ import annotations

import base64
from pathlib import PurePath
from typing import Any

import pytest

from mm_plugin import Modality, PlaceholderError, VideoFrames, WithOptions
from mm_plugin.prompt.media_parts import read_media_part
from mm_plugin.prompt.messages import plain_message

PATH = "messages[2].content[1]"
OBJECTS = ("image_url", "video_url", "audio_url", "input_audio")
FORMS = [
    *[({"type": kind, kind: "x"}, kind, "x") for kind in ("image", "video", "audio")],
    *[({"type": kind, kind: b"x"}, kind, b"x") for kind in ("image", "video", "audio")],
    *[({"type": kind, "url": "x"}, kind, "x") for kind in ("image", "video", "audio")],
    *[({"type": kind, "path": "x"}, kind, PurePath("x")) for kind in ("image", "video", "audio")],
    *[({"type": kind, "path": "data:,x"}, kind, PurePath("data:,x")) for kind in ("image", "video", "audio")],
    *[({"type": kind, "base64": "eA=="}, kind, "data:;base64,eA==") for kind in ("image", "video", "audio")],
    *[({"type": kind, "base64": "DATA:a/b;base64,eA=="}, kind, "DATA:a/b;base64,eA==") for kind in ("image", "audio")],
    *[({"type": f"{kind}_url", f"{kind}_url": "x"}, kind, "x") for kind in ("image", "video", "audio")],
    *[({"type": f"{kind}_url", f"{kind}_url": {"url": "x"}}, kind, "x") for kind in ("image", "video", "audio")],
    *[({"type": kind, f"{kind}_url": {"url": "x"}}, kind, "x") for kind in ("image", "video", "audio")],
    ({"type": "image_url", "image": "x"}, "image", "x"),
    ({"type": "input_image", "image_url": "x"}, "image", "x"),
    ({"type": "input_image", "image_url": "x", "file_id": None}, "image", "x"),
    ({"type": "input_audio", "input_audio": {"data": "x"}}, "audio", "x"),
    ({"type": "image", "image": {"path": "x"}}, "image", PurePath("x")),
]
MODALITIES = {modality.name.lower(): modality for modality in Modality}


@pytest.mark.parametrize(("part", "kind", "value"), FORMS, ids=lambda part: str(part)[:60])
@pytest.mark.parametrize("nulls", [{}, {"detail": None, "max_pixels": None, "text": None, "anything": None}])
def test_a_part_has_its_content_under_one_of_several_keys(
    part: dict[str, Any], kind: str, value: Any, nulls: dict[str, Any]
) -> None:
    assert read_media_part(part | nulls, PATH) == (MODALITIES[kind], value)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_part_without_content_holds_a_place(kind: str) -> None:
    assert read_media_part({"type": kind}, PATH) == (MODALITIES[kind], None)
    assert read_media_part({"type": kind, kind: None, "url": None}, PATH) == (MODALITIES[kind], None)
    modality, place = read_media_part({"type": kind, "max_pixels": 9}, PATH)
    assert (modality, place.value, place.options, place.path) == (MODALITIES[kind], None, {"max_pixels": 9}, PATH)


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio", "input_image"])
@pytest.mark.parametrize("rest", [{}, {"url": None}, {"file": "x"}])
def test_other_types_without_content_are_refused_with_the_keys_that_they_could_have(
    kind: str, rest: dict[str, Any]
) -> None:
    with pytest.raises(
        PlaceholderError, match=rf"^messages\[2\]\.content\[1\]: expected the content .* {kind} under"
    ) as got:
        read_media_part({"type": kind, **rest}, PATH)
    assert got.value.path == PATH
    for key in ("url", "path", "base64", kind.replace("input_image", "image")):
        assert key in got.value.message


def test_stored_files_are_refused_as_such() -> None:
    with pytest.raises(PlaceholderError, match="stored files are not supported"):
        read_media_part({"type": "input_image", "file_id": "file-1"}, PATH)
    with pytest.raises(PlaceholderError, match="stored files are not supported"):
        read_media_part({"type": "image", "file_id": "file-1"}, PATH)


@pytest.mark.parametrize("kind", ["file", "input_file"])
def test_documents_are_refused_with_what_to_send_in_their_place(kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, "file": {"file_data": "x"}}]}
    with pytest.raises(PlaceholderError, match="documents are not media inputs; send their pages as images"):
        plain_message(message, 0, {modality: [] for modality in Modality})


def test_input_text_is_text() -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    assert plain_message(message, 0, {})["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("part", "path", "why"),
    [
        ({"type": "image", "image": "x", "url": "y"}, PATH, "under one key, got image and url"),
        ({"type": "image", "image": "x", "base64": "y", "path": "z"}, PATH, "got image and path and base64"),
        ({"type": "image_url", "image_url": {}}, f"{PATH}.image_url", "object with url or data, got an empty one"),
        ({"type": "image_url", "image_url": {"url": None}}, f"{PATH}.image_url", "url or data, got an empty one"),
        ({"type": "image_url", "image_url": {"url": "x", "data": "y"}}, f"{PATH}.image_url", "got data or url"),
        (
            {"type": "image_url", "image_url": {"url": "x", "max_pixels": 1}},
            f"{PATH}.image_url.max_pixels",
            "unknown key",
        ),
        ({"type": "video_url", "video_url": {"url": "x", "detail": "low"}}, f"{PATH}.video_url.detail", "unknown key"),
        ({"type": "image_url", "image_url": {"url": "x", "format": "png"}}, f"{PATH}.image_url.format", "unknown key"),
        ({"type": "image", "path": 3}, f"{PATH}.path", "path as text, got int"),
        ({"type": "image", "path": b"x"}, f"{PATH}.path", "path as text, got bytes"),
        ({"type": "image", "base64": b"x"}, f"{PATH}.base64", "base64 as text, got bytes"),
        ({"type": "image", "image": {"path": []}}, f"{PATH}.image.path", "path as text, got list"),
        (
            {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, "detail": "high"},
            f"{PATH}.detail",
            "one value, got another in image_url",
        ),
        ({"type": "video", "video": [b"x"], "fps": 1, "sample_fps": 2}, PATH, "two names for the rate"),
    ],
    ids=str,
)
def test_malformed_parts_are_refused_by_their_path(part: dict[str, Any], path: str, why: str) -> None:
    with pytest.raises(PlaceholderError) as caught:
        read_media_part(part, PATH)
    assert caught.value.path == path
    assert caught.value.message.startswith(path + ": ")
    assert why in caught.value.message


@pytest.mark.parametrize("times", [{"fps": 2}, {"sample_fps": 2}, {"timestamps": [0, 1]}, {}])
def test_a_list_is_frames_with_their_times(times: dict[str, Any]) -> None:
    _, found = read_media_part({"type": "video", "video": [b"a", b"b"], **times}, PATH)
    assert isinstance(found, VideoFrames)
    assert found.frames == [b"a", b"b"]
    assert (found.fps, found.timestamps) == (times.get("fps", times.get("sample_fps")), times.get("timestamps"))
    _, found = read_media_part({"type": "video", "video": [b"a", b"b"], **times, "max_pixels": 5}, PATH)
    assert isinstance(found, WithOptions)
    assert found.options == {"max_pixels": 5}


def test_options_stand_beside_the_content_and_detail_may_stand_inside() -> None:
    beside = read_media_part({"type": "input_image", "image_url": "x", "detail": "low", "max_pixels": 7}, PATH)[1]
    inside = read_media_part({"type": "image_url", "image_url": {"url": "x", "detail": "low"}, "max_pixels": 7}, PATH)[
        1
    ]
    for found in (beside, inside):
        assert (found.value, found.options, found.path) == ("x", {"detail": "low", "max_pixels": 7}, PATH)
    twice = {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, "detail": "low"}
    assert read_media_part(twice, PATH)[1].options == {"detail": "low"}


def test_a_declared_format_is_no_option() -> None:
    data = base64.b64encode(b"fLaC").decode()
    found = read_media_part({"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}, PATH)[1]
    assert (found.value, found.options, found.format, found.path) == (data, {}, "flac", PATH)
