"""Options beside a part over patch grids, compared with what the published utility of the models made of the same part.

The numbers are qwen-vl-utils 0.0.14's: its own functions for sizes, numbers of frames and ranges of time, over a video of which the
decoder was replaced by its number of frames and its rate. `h` and `w` are pixels, `n` frames, `fps` frames per second.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mm_plugin import Modality, RequestError, SampledVideo, Size, VideoSize, WithOptions
from mm_plugin.errors import SizeError
from mm_plugin.families.patch_grid import PatchGridVideoOptions, sample_evenly
from mm_plugin.families.patch_grid.processor import _image_grid, _video_grid
from mm_plugin.processor.item_options import ItemOptions
from mm_plugin.processor.options import option_scopes
from mm_plugin.transforms import frame_budget, frame_range, sample_frames

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "qwen_vl_utils.json").read_text())
FACTOR = 28


class Options(PatchGridVideoOptions, frozen=True, kw_only=True):
    min_pixels: int = 4 * FACTOR**2
    max_pixels: int = 16_384 * FACTOR**2
    resize: str = "torch"
    min_frames: int = 4
    max_frames: int = 768
    frame_rule: str = "qwen"
    video_min_pixels: int = 128 * FACTOR**2
    video_max_pixels: int = 768 * FACTOR**2
    video_total_pixels: int = 115_200 * FACTOR**2
    frame_size_rule: str = "qwen"
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


SCOPES = option_scopes(PatchGridVideoOptions)
USUAL = Options()


def resolve(part: dict[str, Any], modality: Modality, usual: Options = USUAL) -> Options:
    spec: Any = SimpleNamespace(name="grid", modalities=(Modality.IMAGE, Modality.VIDEO))
    options: Options = ItemOptions(Options, "Author", spec, SCOPES, {}).resolve(
        WithOptions(None, **part), modality, "part", usual
    )
    return options


def sides(grid: np.ndarray) -> list[int]:
    return [int(side) * 14 for side in grid[0, 1:]]


def frames_of(case: dict[str, Any], options: Options) -> Any:
    return sample_evenly(VideoSize(case["h"], case["w"], case["n"], case["fps"]), options, fps=2.0)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["kind"] == "image" and "size" in case], ids=lambda case: str(case["part"])
)
def test_an_image_has_the_size_that_the_utility_gives_it(case: dict[str, Any]) -> None:
    options = resolve(case["part"], Modality.IMAGE)
    assert sides(_image_grid(Size(case["h"], case["w"]), options)) == case["size"]


@pytest.mark.parametrize("case", [case for case in CASES if "indices" in case], ids=lambda case: str(case["part"]))
def test_a_video_has_the_frames_and_the_size_that_the_utility_gives_it(case: dict[str, Any]) -> None:
    options = resolve(case["part"], Modality.VIDEO)
    sampling = frames_of(case, options)
    assert sampling.indices.tolist() == case["indices"]
    assert sampling.fps == pytest.approx(case["sample_fps"], rel=1e-12)
    assert sampling.timestamps.tolist() == [index / case["fps"] for index in case["indices"]]
    size = SampledVideo.of(VideoSize(case["h"], case["w"], case["n"], case["fps"]), sampling)
    assert sides(_video_grid(size, options)) == case["size"]


@pytest.mark.parametrize("case", [case for case in CASES if "error" in case], ids=lambda case: str(case["part"]))
def test_a_part_that_the_utility_refuses_is_refused(case: dict[str, Any]) -> None:
    modality = Modality[case["kind"].upper()]
    if case["error"] == "area":
        with pytest.raises(RequestError, match="min_pixels must be at most"):
            resolve(case["part"], modality)
        return
    with pytest.raises((SizeError, RequestError)) as caught:
        frames_of(case, resolve(case["part"], modality))
    assert "expected at least two frames from" in str(caught.value) or "video_min_pixels must be at most" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, (0, 100)),
        (2.0, None, (20, 80)),
        (2.01, None, (21, 79)),
        (None, 2.0, (0, 21)),
        (None, 2.09, (0, 21)),
        (0.0, 10.0, (0, 100)),
        (-3.0, 99.0, (0, 100)),
        (2.0, 2.1, (20, 2)),
        (9.8, None, (98, 2)),
    ],
)
def test_a_range_begins_not_before_its_start_and_ends_not_after_its_end(
    start: float | None, end: float | None, expected: tuple[int, int]
) -> None:
    assert frame_range(100, 10.0, start=start, end=end) == expected


@pytest.mark.parametrize(
    ("start", "end"), [(5.0, 5.0), (5.0, 4.0), (9.9, None), (10.0, None), (None, 0.0), (None, -1.0), (99.0, 99.5)]
)
def test_a_range_of_fewer_than_two_frames_is_refused(start: float | None, end: float | None) -> None:
    with pytest.raises(SizeError, match="choose another start or end"):
        frame_range(100, 10.0, start=start, end=end)


@pytest.mark.parametrize("rule", ["qwen", "transformers"])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_frames_of_a_part_stay_within_it(rule: Any, first: int) -> None:
    for total in range(1, 40):
        bounds = {"min_frames": 4, "max_frames": 12, "multiple": 2, "rule": rule}
        found = sample_frames(total, 10.0, fps=4.0, first=first, **bounds)
        assert found.dtype == np.int64
        assert found.min() >= first
        assert found.max() < first + total
        assert len(found) == len(sample_frames(total, 10.0, fps=4.0, **bounds))


def test_halves_round_to_even_frames_of_the_whole_video() -> None:
    # 1 + 0.5 rounds to 2, while 0.5 alone rounds to 0.
    bounds = {"fps": 1.0, "num_frames": 2, "min_frames": 1, "max_frames": 9, "multiple": 1}
    assert sample_frames(4, 1.0, first=1, **{**bounds, "num_frames": 3}).tolist() == [1, 2, 4]
    assert sample_frames(4, 1.0, **{**bounds, "num_frames": 3}).tolist() == [0, 2, 3]


@pytest.mark.parametrize("name", ["video_start", "video_end"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, [1]], ids=str)
def test_a_time_is_a_finite_number(name: str, value: Any) -> None:
    with pytest.raises(RequestError):
        resolve({name: value}, Modality.VIDEO)


@pytest.mark.parametrize(
    "part", [{"resized_height": 56}, {"resized_width": 56}, {"resized_height": 14, "resized_width": 56}], ids=str
)
def test_a_size_needs_both_sides_and_a_token_for_each(part: dict[str, Any]) -> None:
    for modality in (Modality.IMAGE, Modality.VIDEO):
        with pytest.raises(RequestError, match="resized_height"):
            resolve(part, modality)


def test_an_image_of_a_given_size_is_held_to_the_models_limits() -> None:
    # 560 x 840 is over 100 tokens of 28 x 28 pixels: sides shrink by sqrt(560 * 840 / 78400) = 2.449.
    usual = Options(max_pixels=100 * FACTOR**2)
    options = resolve({"resized_height": 560, "resized_width": 840}, Modality.IMAGE, usual)
    assert sides(_image_grid(Size(10, 10), options)) == [224, 336]
    options = resolve({"resized_height": 56, "resized_width": 56}, Modality.IMAGE, Options(min_pixels=16 * FACTOR**2))
    assert sides(_image_grid(Size(10, 10), options)) == [112, 112]


def test_the_librarys_rule_holds_frames_of_a_given_size_to_its_own_limits() -> None:
    part = {"resized_height": 56, "resized_width": 56}  # 4 tokens; the library's least are 128
    size = SampledVideo(64, 64, np.arange(4), np.arange(4.0), 1.0)
    assert sides(_video_grid(size, resolve(part, Modality.VIDEO))) == [56, 56]
    options = resolve(part, Modality.VIDEO, Options(frame_size_rule="transformers"))
    assert sides(_video_grid(size, options)) == [336, 336]  # 56 * sqrt(100352 / 3136) = 316.8, up to whole tokens


@pytest.mark.parametrize(
    ("usual", "part", "expected"),
    [
        ({"fps": 1.0}, {"nframes": 4}, {"fps": None, "num_frames": 4, "max_frames": 768}),
        ({"max_frames": 8}, {"nframes": 10, "max_frames": 4}, {"num_frames": 10, "max_frames": 11}),
        ({"num_frames": 4}, {"fps": 3.0}, {"fps": 3.0, "num_frames": None}),
        ({"num_frames": 4}, {"fps": 3}, {"fps": 3.0, "num_frames": None}),
        ({"fps": 1.0}, {"max_frames": 6}, {"fps": 1.0, "num_frames": None, "max_frames": 6}),
        ({}, {"max_pixels": 50_000, "min_pixels": 10_000}, {"video_max_pixels": 50_000, "video_min_pixels": 10_000}),
        ({}, {"max_pixels": 5_000_000}, {"video_max_pixels": 768 * FACTOR**2}),
        ({}, {"video_max_pixels": 5_000_000}, {"video_max_pixels": 5_000_000}),
        (
            {"resized_height": 56, "resized_width": 56},
            {"max_pixels": 200_000},
            {"resized_height": None, "resized_width": None},
        ),
        (
            {"resized_height": 56, "resized_width": 56},
            {"resized_width": 84},
            {"resized_height": 56, "resized_width": 84},
        ),
        ({"resized_height": 56, "resized_width": 56}, {"fps": 1.0}, {"resized_height": 56, "resized_width": 56}),
        ({}, {"total_pixels": 9_000_000}, {"video_total_pixels": 9_000_000, "video_max_pixels": 768 * FACTOR**2}),
    ],
    ids=str,
)
def test_options_of_a_part_displace_those_of_the_request(
    usual: dict[str, Any], part: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = resolve(part, Modality.VIDEO, Options(**usual))
    assert {name: getattr(options, name) for name in expected} == expected


def test_a_rate_and_a_number_of_frames_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="fps and num_frames exclude each other"):
        resolve({"fps": 1.0, "nframes": 4}, Modality.VIDEO)


def test_a_frame_is_never_over_its_own_limit() -> None:
    # The share of the whole is lifted above the least, and the limit of one frame comes last.
    share = {"temporal_patch_size": 2, "total_pixels": 1000, "min_pixels": 1000}
    assert frame_budget(8, max_pixels=1020, **share) == 1020
    assert frame_budget(8, max_pixels=9000, **share) == 1050
