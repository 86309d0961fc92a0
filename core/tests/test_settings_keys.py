"""Keys of a checkpoint's settings: an option, known to change nothing, or refused when the model opens, with file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest

from mm_plugin import BaseOptions, Checkpoint, Modality, OptionScope, UsageError
from mm_plugin.families.patch_grid import PatchGridVideoOptions
from mm_plugin.processor import any_value, check_settings

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


class Options(BaseOptions, frozen=True, kw_only=True):
    side: Annotated[int, OptionScope.checkpoint("image", "video")] = 1
    rate: Annotated[int, OptionScope.request("video")] = 2
    gain: Annotated[int, OptionScope.request("audio")] = 3
    min_pixels: Annotated[int, OptionScope.request("image")] = 4
    max_pixels: Annotated[int, OptionScope.request("image")] = 5

    def settings_without_effect(self, modality: Modality) -> Mapping[str, Any]:
        return {
            "do_resize": True,
            "resample": 3,
            "crop_size": any_value,
            "even": lambda value: value % 2 == 0,
            "size.height": 7,
            **({"only_video": any_value} if modality is VIDEO else {}),
        }


class Plain(BaseOptions, frozen=True, kw_only=True):
    side: Annotated[int, OptionScope.checkpoint("image")] = 1


def opened(folder: Path, **files: Any) -> Checkpoint:
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint.open(folder)


def read(folder: Path, settings: Any, *modalities: Modality, options: Any = Options, **given: Any) -> Any:
    checkpoint = opened(folder, preprocessor_config=settings)
    return options.from_checkpoint(checkpoint, modalities or (IMAGE,), given)


def refused(folder: Path, settings: Any, key: str, *modalities: Modality, options: Any = Options) -> str:
    with pytest.raises(UsageError) as caught:
        read(folder, settings, *modalities, options=options)
    assert caught.value.argument == "checkpoint"
    assert caught.value.message.startswith(f"{folder}/preprocessor_config.json: ")
    assert key in caught.value.message
    return caught.value.message


HARMLESS = [
    "image_processor_type", "video_processor_type", "feature_extractor_type", "any_type", "processor_class", "auto_map",
    "transformers_version", "_name_or_path", "_valid_processor_keys", "return_tensors", "data_format", "input_data_format",
    "device", "disable_grouping", "video_metadata", "return_metadata",
]  # fmt: skip


@pytest.mark.parametrize("key", HARMLESS)
@pytest.mark.parametrize("value", ["x", 5, {"a": 1}, False], ids=str)
def test_what_libraries_write_beside_the_numbers_changes_nothing(tmp_path: Path, key: str, value: Any) -> None:
    assert read(tmp_path, {"side": 9, key: value}, options=Plain).side == 9


@pytest.mark.parametrize(
    "key",
    ["do_normalize", "resample", "do_resize", "image_size", "crop_size", "type", "class", "tokenizer", "Side", "side "],
)
@pytest.mark.parametrize("value", [True, False, 0, 2, "", [], {}], ids=str)
def test_any_other_key_is_refused_whatever_its_value(tmp_path: Path, key: str, value: Any) -> None:
    assert "unknown key" in refused(tmp_path, {"side": 9, key: value}, key, options=Plain)
    assert read(tmp_path, {"side": 9, key: None}, options=Plain).side == 9


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("do_resize", [True], [False, 1, "true", [True]]),
        ("resample", [3], [2, 3.0, True, "3"]),
        ("crop_size", [True, 0, {"height": 1}], []),
        ("even", [0, 2, 10], [1, 3, "2", [], {}]),
    ],
)
def test_an_author_says_which_values_change_nothing(tmp_path: Path, key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert read(tmp_path, {"side": 9, key: value}).side == 9
    for value in bad:
        refused(tmp_path, {"side": 9, key: value}, f"{key} ")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({"shortest_edge": 2, "longest_edge": 3}, (2, 3)),
        ({"min_pixels": 2, "max_pixels": 3}, (2, 3)),
        ({"shortest_edge": 2, "longest_edge": None}, (2, 5)),
        ({"height": None}, (4, 5)),
        ({"height": 7}, (4, 5)),
        ({}, (4, 5)),
        (None, (4, 5)),
    ],
    ids=str,
)
def test_sizes_are_limits_of_pixels(tmp_path: Path, size: Any, expected: tuple[int, int]) -> None:
    found = read(tmp_path, {"size": size})
    assert (found.min_pixels, found.max_pixels) == expected


@pytest.mark.parametrize(
    ("size", "key"),
    [
        ({"shortest_edge": 2, "width": 3}, "size.width"),
        ({"height": 8}, "size.height"),
        ({"max_height": 8}, "size.max_height"),
        (224, "size"),
        ([1, 2], "size"),
    ],
    ids=str,
)
def test_other_sizes_are_refused(tmp_path: Path, size: Any, key: str) -> None:
    refused(tmp_path, {"size": size}, key)


def test_edges_are_refused_by_their_own_name_where_a_model_has_no_limits_of_pixels(tmp_path: Path) -> None:
    refused(tmp_path, {"side": 1, "size": {"shortest_edge": 224}}, "unknown key size.shortest_edge", options=Plain)
    refused(tmp_path, {"side": 1, "min_pixels": 224}, "unknown key min_pixels", options=Plain)


def test_an_option_may_be_a_size(tmp_path: Path) -> None:
    class Sized(BaseOptions, frozen=True, kw_only=True):
        size: Annotated[dict[str, int], OptionScope.checkpoint("image")]

    assert read(tmp_path, {"size": {"shortest_edge": 224}}, options=Sized).size == {"shortest_edge": 224}


def test_modalities_that_share_a_file_share_its_keys(tmp_path: Path) -> None:
    found = read(tmp_path, {"side": 9, "rate": 8, "min_pixels": 1, "only_video": 1}, IMAGE, VIDEO)
    assert (found.side, found.rate, found.min_pixels) == (9, 8, 1)
    # Of the images alone it is an option that has no effect, and a declaration of videos does not count.
    assert read(tmp_path, {"side": 9, "rate": 8}, IMAGE).rate == 2
    refused(tmp_path, {"only_video": 1}, "only_video", IMAGE)


def test_a_file_of_the_videos_own_has_the_keys_of_videos(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path, preprocessor_config={"min_pixels": 1}, video_preprocessor_config={"rate": 8, "only_video": 1}
    )
    assert Options.from_checkpoint(checkpoint, (IMAGE, VIDEO)).rate == 8
    for name, file in (("rate", "preprocessor"), ("min_pixels", "video_preprocessor")):
        checkpoint = opened(
            tmp_path,
            preprocessor_config={"side": 1} | ({name: 1} if file == "preprocessor" else {}),
            video_preprocessor_config={"side": 1} | ({name: 1} if file == "video_preprocessor" else {}),
        )
        with pytest.raises(UsageError, match=rf"/{file}_config\.json: unknown key {name}"):
            Options.from_checkpoint(checkpoint, (IMAGE, VIDEO))


@pytest.mark.parametrize("section", ["image_processor", "video_processor", "feature_extractor"])
def test_sections_are_named_with_their_file(tmp_path: Path, section: str) -> None:
    parts = {"image_processor": {"side": 1}, "video_processor": {"side": 1}, "feature_extractor": {"gain": 1}}
    checkpoint = opened(tmp_path, processor_config={**parts, "processor_class": "X", "chat_template": "y"})
    assert Options.from_checkpoint(checkpoint, tuple(Modality)).gain == 1
    parts[section]["strange"] = 1
    checkpoint = opened(tmp_path, processor_config=parts)
    with pytest.raises(UsageError, match=rf"/processor_config\.json: {section}: unknown key strange"):
        Options.from_checkpoint(checkpoint, tuple(Modality))


def test_settings_that_an_author_reads_elsewhere_are_his(tmp_path: Path) -> None:
    class Elsewhere(Options, frozen=True, kw_only=True):
        @classmethod
        def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> Mapping[str, Any]:
            return {"side": 6, "theirs": 1}

    assert Elsewhere.from_checkpoint(opened(tmp_path), (IMAGE,)).side == 6
    assert read(tmp_path, {"do_normalize": False}, options=Elsewhere).side == 6

    class Amended(Options, frozen=True, kw_only=True):
        @classmethod
        def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> Mapping[str, Any]:
            return {**super().read_settings(checkpoint, modality), "side": 6}

    refused(tmp_path, {"do_normalize": False}, "do_normalize", options=Amended)


def test_keys_that_are_no_text_cannot_break_the_check() -> None:
    with pytest.raises(UsageError, match=r"unknown key size\.x"):
        check_settings({"size": {"x": 1}}, known=(), without_effect={}, source="a", reader="b")


# ---------------------------------------------------------------- limits of frames in a file of the videos' own


class Grid(PatchGridVideoOptions, frozen=True, kw_only=True):
    min_pixels: Annotated[int, OptionScope.request("image")] = 3136
    max_pixels: Annotated[int, OptionScope.request("image")] = 1_003_520
    resize: Annotated[str, OptionScope.load("image")] = "torch"
    min_frames: Annotated[int, OptionScope.request("video")] = 4
    max_frames: Annotated[int, OptionScope.request("video")] = 768
    frame_rule: Annotated[str, OptionScope.load("video")] = "qwen"
    video_min_pixels: Annotated[int, OptionScope.request("video")] = 100_352
    video_max_pixels: Annotated[int, OptionScope.request("video")] = 602_112
    video_total_pixels: Annotated[int, OptionScope.request("video")] = 90_316_800
    frame_size_rule: Annotated[str, OptionScope.load("video")] = "qwen"
    patch_size: Annotated[int, OptionScope.checkpoint("image", "video")] = 14
    merge_size: Annotated[int, OptionScope.checkpoint("image", "video")] = 2
    temporal_patch_size: Annotated[int, OptionScope.checkpoint("image", "video")] = 2
    image_mean: Annotated[tuple[float, ...], OptionScope.checkpoint("image", "video")] = (0.5, 0.5, 0.5)
    image_std: Annotated[tuple[float, ...], OptionScope.checkpoint("image", "video")] = (0.5, 0.5, 0.5)


def grid(folder: Path, video: Any, **given: Any) -> Grid:
    checkpoint = opened(folder, preprocessor_config={"min_pixels": 3136}, video_preprocessor_config=video)
    found: Grid = Grid.from_checkpoint(checkpoint, (IMAGE, VIDEO), given)
    return found


def spellings(least: int, most: int) -> list[dict[str, Any]]:
    return [
        {"min_pixels": least, "max_pixels": most},
        {"size": {"shortest_edge": least, "longest_edge": most}},
        {"size": {"min_pixels": least, "max_pixels": most}},
        {"min_pixels": least, "max_pixels": most, "size": {"shortest_edge": least, "longest_edge": most}},
    ]


@pytest.mark.parametrize("video", spellings(3136, 12_845_056), ids=str)
def test_limits_of_frames_that_the_training_codes_rule_does_not_reach_change_nothing(
    tmp_path: Path, video: dict[str, Any]
) -> None:
    found = grid(tmp_path, video)
    assert (found.video_min_pixels, found.video_max_pixels, found.min_pixels) == (100_352, 602_112, 3136)
    with pytest.raises(UsageError, match="cannot be followed by Grid"):
        grid(tmp_path, video, frame_size_rule="transformers")  # which would follow the file
    limits = {"video_min_pixels": 3136, "video_max_pixels": 12_845_056}
    assert grid(tmp_path, video, frame_size_rule="transformers", **limits).video_max_pixels == 12_845_056


@pytest.mark.parametrize("video", [*spellings(3136, 300_000), *spellings(200_000, 602_112)], ids=str)
def test_limits_of_frames_that_would_be_reached_are_refused_until_the_server_decides(
    tmp_path: Path, video: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"video_preprocessor_config\.json: .*cannot be followed by Grid"):
        grid(tmp_path, video)
    assert grid(tmp_path, video, video_min_pixels=200_000, video_max_pixels=300_000).video_max_pixels == 300_000


@pytest.mark.parametrize(
    ("video", "good"),
    [
        (
            {
                "do_center_crop": False,
                "crop_size": None,
                "do_pad": False,
                "size_divisor": None,
                "do_sample_frames": False,
            },
            True,
        ),
        ({"default_to_square": True, "do_sample_frames": True, "return_metadata": False}, True),
        ({"do_center_crop": True}, False),
        ({"do_pad": True}, False),
        ({"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}, True),
        ({"do_normalize": False}, False),
        ({"resample": 2}, False),
        ({"num_frames": 8, "min_frames": 2, "max_frames": 64}, True),
        ({"max_pixels": "many"}, False),
        ({"size": {"height": 224, "width": 224}}, False),
        ({"cap_pixels_per_frame": True}, True),
        ({"spatial_merge": 2}, False),
    ],
    ids=str,
)
def test_steps_of_videos(tmp_path: Path, video: dict[str, Any], good: bool) -> None:
    if good:
        grid(tmp_path, video)
    else:
        with pytest.raises(UsageError):
            grid(tmp_path, video)


def test_the_librarys_rule_without_its_budget_is_not_served_as_with_it(tmp_path: Path) -> None:
    grid(tmp_path, {"cap_pixels_per_frame": False}, frame_size_rule="transformers")
    with pytest.raises(UsageError, match="cap_pixels_per_frame must be false for Grid, got true"):
        grid(tmp_path, {"cap_pixels_per_frame": True}, frame_size_rule="transformers")
