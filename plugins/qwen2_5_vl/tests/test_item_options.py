"""Options beside a part of a chat message, through whole requests: tokens, source keys, positions, and the same from a server."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin import MediaError, Modality, RequestError, VideoFrames, WithOptions
from mm_plugin.testing.plugin_tests import moving_frames, png_of
from mm_plugin.testing.plugin_tests.media import video_file

IMAGE = png_of(
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (420, 560, 3), dtype=np.uint8))
)  # 15 x 20 tokens
VIDEO = video_file(72, 24)  # three seconds


def url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def image(**keys: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(IMAGE)}, **keys}


def video(**keys: Any) -> dict[str, Any]:
    return {"type": "video", "base64": base64.b64encode(VIDEO).decode(), **keys}


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({}, 15 * 20),
        ({"max_pixels": 78_400}, 8 * 11),  # 420 and 560 shrink by sqrt(235200 / 78400) = 1.732: 242 and 323
        ({"min_pixels": 940_800}, 30 * 40),
        ({"resized_height": 280, "resized_width": 140}, 10 * 5),
        ({"resized_height": 280, "resized_width": 140, "max_pixels": 3136}, 10 * 5),
        ({"detail": "low"}, 1 * 2),  # 3136 pixels: sides shrink by 8.66 to 48.5 and 64.7
        ({"detail": "auto"}, 15 * 20),
        ({"detail": "high"}, 15 * 20),
        ({"max_pixels": None, "detail": None}, 15 * 20),
    ],
    ids=str,
)
def test_options_of_an_image(processor: Any, keys: dict[str, Any], tokens: int) -> None:
    output = processor.process(said(image(**keys), image()))
    assert [item.num_tokens for item in output.mm_items] == [tokens, 300]
    same = processor.process(said({"type": "image"}, {"type": "image"}), [WithOptions(IMAGE, **keys), IMAGE])
    assert np.array_equal(output.padded_input_ids, same.padded_input_ids)
    assert np.array_equal(output.mrope_positions, same.mrope_positions)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"fps": 4}, {"fps": 4.0}),
        ({"nframes": 10}, {"num_frames": 10}),
        ({"min_frames": 10, "max_frames": 12, "fps": 1}, {"min_frames": 10, "max_frames": 12, "fps": 1.0}),
        ({"video_start": 1, "video_end": 2.5}, {"video_start": 1.0, "video_end": 2.5}),
        ({"min_pixels": 156_800}, {"video_min_pixels": 156_800}),
        ({"max_pixels": 110_000}, {"video_max_pixels": 110_000}),
        ({"total_pixels": 313_600}, {"video_total_pixels": 313_600}),
        ({"resized_height": 112, "resized_width": 168}, {"resized_height": 112, "resized_width": 168}),
    ],
    ids=str,
)
def test_names_of_the_models_utilities_are_the_options_of_a_request(
    processor: Any, keys: dict[str, Any], options: dict[str, Any]
) -> None:
    asked = processor.prepare_item("video", VIDEO, **options)
    (item,) = processor.process(said(video(**keys))).mm_items
    assert item.identity == asked.identity
    assert item.num_tokens == len(asked.replacement.ids)
    assert processor.prepare_item("video", WithOptions(VIDEO, **keys)).source_key == asked.source_key
    # Of two videos, one has them.
    pair = processor.process(said(video(), video(**keys))).mm_items
    assert [one.identity for one in pair] == [processor.prepare_item("video", VIDEO).identity, asked.identity]


def test_the_part_between_two_times_is_what_a_cut_of_those_frames_would_be(processor: Any) -> None:
    frames = moving_frames(40, 56, 84)
    whole = VideoFrames(frames, fps=10.0, sampled=False)
    cut = VideoFrames(frames[10:31], fps=10.0, sampled=False)  # of the times 1.0 to 3.0
    options = {"fps": 10.0, "max_frames": 20}
    found = processor.prepare_item("video", WithOptions(whole, video_start=1.0, video_end=3.0, **options))
    expected = processor.prepare_item("video", cut, **options)
    assert np.array_equal(found.feature, expected.feature)
    assert found.fields["second_per_grid_ts"] == expected.fields["second_per_grid_ts"] == 2 / (20 / 21 * 10)


@pytest.mark.parametrize(
    "keys",
    [
        {"video_start": 2.0, "video_end": 1.0},
        {"video_start": 3.0},
        {"video_end": 0.0},
        {"video_start": 1.0, "video_end": 1.0},
    ],
    ids=str,
)
def test_an_empty_range_is_the_clients_fault(processor: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(MediaError, match=r"^videos\[0\]: expected at least two frames from"):
        processor.process(said(video(**keys)))


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (image(fps=2), "fps"),
        (image(nframes=2), "nframes"),
        (image(patch_size=7), "patch_size"),
        (image(resize="pillow"), "resize"),
        (image(feature_format="float32"), "feature_format"),
        (image(max_pixel=5), "max_pixel"),
        (image(max_pixels="5"), "max_pixels"),
        (image(max_pixels=5.5), "max_pixels"),
        (image(max_pixels=1 << 40), "max_pixels"),
        (video(detail="low"), "detail"),
        (video(frame_rule="qwen"), "frame_rule"),
        (video(fps=0), "fps"),
        (video(fps=-1), "fps"),
        (video(nframes=0), "nframes"),
        (video(raw_fps=2), "raw_fps"),
        ({"type": "video", "video": [url(IMAGE)] * 2, "fps": 1, "nframes": 2}, "nframes"),
        ({"type": "video", "video": [url(IMAGE)] * 2, "fps": 1, "video_start": 0}, "video_start"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_every_other_key_is_refused_by_name(processor: Any, part: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as caught:
        processor.process(said(image(), part))
    assert caught.value.path == f"messages[0].content[1].{path}"
    assert caught.value.message.startswith(caught.value.path)


def test_options_are_within_the_limits_of_the_server(registry: Any, checkpoint: Any) -> None:
    processor = registry.load_processor(checkpoint)
    with pytest.raises(RequestError, match="max_item_tokens"):
        processor.process(said(image(min_pixels=1 << 27, max_pixels=1 << 27)))
    assert processor.count(Modality.IMAGE, (420, 560), resized_height=280, resized_width=140)[0] == 50
