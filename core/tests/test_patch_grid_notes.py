"""What the family of patch grids says where an option's number cannot be had: frames, areas of images, budgets of videos."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin import SampledVideo, Sampling, Size, VideoSize
from mm_plugin.families.patch_grid import PatchGridProcessor, PatchGridVideoOptions, PatchGridVideos, sample_evenly
from mm_plugin.families.patch_grid.options import (
    ChannelValues,
    FrameCount,
    FrameRuleName,
    FrameSizeRuleName,
    ImagePixels,
    PatchCount,
    ResizeRuleName,
    VideoPixels,
)
from mm_plugin.items import Modality


class Options(PatchGridVideoOptions, frozen=True, kw_only=True):
    """Numbers near those of the released models; 28 pixels along a side of a token."""

    min_pixels: ImagePixels = 56 * 56
    max_pixels: ImagePixels = 1_003_520
    resize: ResizeRuleName = "torch"
    patch_size: PatchCount = 14
    merge_size: PatchCount = 2
    temporal_patch_size: PatchCount = 2
    image_mean: ChannelValues = (0.5, 0.5, 0.5)
    image_std: ChannelValues = (0.5, 0.5, 0.5)
    min_frames: FrameCount = 4
    max_frames: FrameCount = 768
    frame_rule: FrameRuleName = "qwen"
    video_min_pixels: VideoPixels = 128 * 28 * 28
    video_max_pixels: VideoPixels = 768 * 28 * 28
    video_total_pixels: VideoPixels = 20_000_000
    frame_size_rule: FrameSizeRuleName = "qwen"


class Grids(PatchGridProcessor, PatchGridVideos):
    """A model of the family whose videos have a grid alone."""

    Options = Options

    def sample(self, size, options):  # type: ignore[no-untyped-def]
        return sample_evenly(size, options, fps=2.0)

    def video_fields(self, size, options):  # type: ignore[no-untyped-def]
        return {}

    def check_video_fields(self, fields):  # type: ignore[no-untyped-def]
        return None


GRIDS = Grids(None, type("Folder", (), {"config": {}})(), None, None, Options())  # type: ignore[arg-type]
SPACING = "groups of 2 (temporal_patch_size)"


@pytest.mark.parametrize(
    ("frames", "fps", "asked", "count", "said"),
    [
        # More than there are, of an even and an odd number of frames, and of one that is less than a group.
        (24, 24.0, {"num_frames": 64}, 24, ["num_frames=64", "24 frames are", "has 24 frames at 24 per second"]),
        (25, 24.0, {"num_frames": 64}, 24, ["num_frames=64", "24 frames are", "has 25 frames", SPACING]),
        (1, 24.0, {"num_frames": 2}, 1, ["num_frames=2", "1 frame are", "has 1 frame "]),
        (10, 29.97, {"num_frames": 1000}, 10, ["has 10 frames at 29.97 per second"]),
        # More than another option allows.
        (1000, 30.0, {"num_frames": 64, "max_frames": 16}, 16, ["num_frames=64", "16 frames", "max_frames=16"]),
        (1000, 30.0, {"num_frames": 64, "max_frames": 17}, 16, ["max_frames=17", SPACING]),
        (20, 30.0, {"num_frames": 64, "max_frames": 16}, 16, ["max_frames=16"]),
        # No whole number of groups: 5 rounds to 4 and 7 to 8 (half to even), and one group is the least.
        (100, 30.0, {"num_frames": 5}, 4, ["num_frames=5", "4 frames", SPACING]),
        (100, 30.0, {"num_frames": 7}, 8, ["num_frames=7", "8 frames", SPACING]),
        (100, 30.0, {"num_frames": 1}, 2, ["num_frames=1", "2 frames", SPACING]),
        # A rate above the video's own, or cut off by a bound.
        (60, 30.0, {"fps": 60.0}, 60, ["fps=60", "60 frames", "has 60 frames at 30 per second"]),
        (3000, 30.0, {"fps": 2.0, "max_frames": 32}, 32, ["fps=2", "32 frames", "max_frames=32"]),
        (30, 30.0, {"fps": 1.0, "min_frames": 8}, 8, ["fps=1", "8 frames", "min_frames=8"]),
        # As asked, or nothing was asked.
        (100, 30.0, {"num_frames": 8}, 8, None),
        (24, 24.0, {"num_frames": 24}, 24, None),
        (300, 30.0, {"fps": 2.0}, 20, None),
        (310, 30.0, {"fps": 2.0}, 20, None),  # 20.67 frames: groups alone round the rate
        (3, 30.0, {}, 2, None),
        (100_000, 30.0, {}, 768, None),
    ],
)
def test_frames_that_an_option_asks_for_and_a_video_does_not_give(
    frames: int, fps: float, asked: dict[str, float], count: int, said: list[str] | None
) -> None:
    sampling = sample_evenly(VideoSize(64, 64, frames, fps), Options(**asked), fps=2.0)
    assert len(sampling.indices) == count
    assert len(sampling.notes) == (said is not None)
    for part in said or ():
        assert part in sampling.notes[0]


@settings(max_examples=300)
@given(
    st.integers(1, 300),
    st.integers(1, 400),
    st.integers(1, 64),
    st.integers(2, 400),
    st.integers(1, 3),
    st.sampled_from(["qwen", "transformers"]),
)
def test_a_number_of_frames_is_noted_exactly_where_another_is_used(
    frames: int, asked: int, least: int, most: int, multiple: int, rule: str
) -> None:
    options = Options(
        num_frames=asked,
        min_frames=least,
        max_frames=max(most, multiple),
        temporal_patch_size=multiple,
        frame_rule=rule,  # type: ignore[arg-type]
    )
    sampling = sample_evenly(VideoSize(64, 64, frames, 30.0), options, fps=2.0)
    assert len(sampling.notes) == (len(sampling.indices) != asked)


@pytest.mark.parametrize(
    ("height", "width", "asked", "said"),
    [
        # sqrt(2800 * 15 / 7840) = 2.31 and 2800 / 2.31 / 28 = 43.2: 43 x 28 = 1204 pixels high, and 28 wide, the least.
        (2800, 15, {"max_pixels": 7840}, ["max_pixels=7840 was asked, 33712 pixels", "1204 x 28 pixels"]),
        (15, 2800, {"max_pixels": 7840}, ["max_pixels=7840 was asked, 33712 pixels", "28 x 1204 pixels"]),
        # No multiple of 28 x 28 pixels lies between two bounds that are equal.
        (
            100,
            100,
            {"min_pixels": 8000, "max_pixels": 8000},
            ["min_pixels=8000 was asked, 7056 pixels", "84 x 84 pixels"],
        ),
        (84, 84, {"min_pixels": 7057, "max_pixels": 7200}, ["max_pixels=7200 was asked, 12544 pixels", "112 x 112"]),
        (200, 300, {}, None),
        (4000, 3000, {}, None),
        (3, 4, {}, None),
    ],
)
def test_areas_that_an_option_bounds_and_no_grid_has(
    height: int, width: int, asked: dict[str, int], said: list[str] | None
) -> None:
    fields = GRIDS.layout(Modality.IMAGE, Size(height, width), Options(**asked), None)
    assert len(fields.notes) == (said is not None)
    for part in said or ():
        assert part in fields.notes[0]


def pixels(grid: np.ndarray) -> int:
    """Of one image or frame."""
    _, rows, columns = grid[0].tolist()
    return int(rows * 14 * columns * 14)


@settings(max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 200_000), st.integers(0, 200_000), st.integers(1, 40))
def test_an_area_is_noted_exactly_where_it_is_out_of_bounds(
    height: int, width: int, least: int, more: int, frames: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    most = least + more
    fields = GRIDS.layout(Modality.IMAGE, Size(height, width), Options(min_pixels=least, max_pixels=most), None)
    area = pixels(fields["image_grid_thw"])
    assert [note.partition("=")[0] for note in fields.notes] == ["min_pixels"] * (area < least) + ["max_pixels"] * (
        area > most
    )
    options = Options(video_min_pixels=least, video_max_pixels=most, video_total_pixels=most)
    whole = VideoSize(height, width, frames, 30.0)
    video = SampledVideo.of(whole, Sampling.of(whole, np.arange(frames)))
    fields = GRIDS.layout(Modality.VIDEO, video, options, None)
    area = pixels(fields["video_grid_thw"])
    total = area * -(-frames // 2)
    assert [note.partition("=")[0] for note in fields.notes] == (
        ["video_min_pixels"] * (area < least)
        + ["video_max_pixels"] * (area > most)
        + ["video_total_pixels"] * (total > most)
    )


def test_a_budget_of_a_whole_video_that_its_smallest_frames_pass() -> None:
    # 32 frames in 16 temporal patches of at least 128 x 28 x 28 = 100352 pixels: 1605632 and no fewer.
    whole = VideoSize(480, 640, 32, 30.0)
    video = SampledVideo.of(whole, Sampling.of(whole, np.arange(32)))
    for rule, expected in (("qwen", 1), ("transformers", 0)):
        options = Options(video_total_pixels=1_000_000, frame_size_rule=rule)  # type: ignore[arg-type]
        notes = GRIDS.layout(Modality.VIDEO, video, options, None).notes
        assert len([note for note in notes if note.startswith("video_total_pixels=1000000 was asked")]) == expected
