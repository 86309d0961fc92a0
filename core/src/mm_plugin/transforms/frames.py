"""Which frames of a video are sampled, how many pixels each may have, and how many tokens pruning keeps."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from mm_plugin.errors import SizeError

FrameRule = Literal["qwen", "transformers"]


def sample_frames(
    total: int,
    rate: float,
    *,
    fps: float,
    num_frames: int | None = None,
    min_frames: int,
    max_frames: int,
    multiple: int,
    rule: FrameRule = "qwen",
    first: int = 0,
) -> np.ndarray:
    """Which frames of a video are looked at: so many that a second has `fps` of them, or `num_frames`, spread over the video.

    The count is a multiple of `multiple`, at least `min_frames` and at most `max_frames`, which wins; `num_frames` stands above
    `min_frames`. A video never gives more frames than it has, and one that is shorter than `multiple` gives all of them.

    Args:
        total: frames in the video, or in the part of it that is looked at.
        rate: frames per second in the video.
        fps: frames per second that are wanted; not read where `num_frames` is given.
        num_frames: frames that are wanted.
        min_frames: fewest frames; rounded up to the multiple.
        max_frames: most frames; rounded down to the multiple.
        multiple: frames in a temporal patch.
        rule: `qwen` spreads them from the first frame to the last, as the released models were trained; `transformers` begins
            each of equal parts of the video with one.
        first: index of the first frame that is looked at.

    Shape:
        returns [n] int64, ascending.

    Raises:
        SizeError: a number is not positive, or the bounds leave no count.

    Source: qwen-vl-utils@0.0.14, its smart_nframes and spacing; transformers@5.24, Qwen2VLVideoProcessor.sample_frames.
    """
    least, most = math.ceil(min_frames / multiple) * multiple, max_frames // multiple * multiple
    if total < 1 or not rate > 0 or not fps > 0 or (num_frames is not None and num_frames < 1):
        raise SizeError(
            f"{total} frames at {rate} per second cannot be sampled at {fps} per second, or by {num_frames}"
        )
    if min_frames < 1 or most < 1:
        raise SizeError(f"expected a multiple of {multiple} between {min_frames} and {max_frames} frames, found none")
    if total < multiple:
        return np.arange(first, first + total, dtype=np.int64)
    most = min(most, total // multiple * multiple)
    if num_frames is None:
        count = math.floor(min(max(total / rate * fps, least), most, total) / multiple) * multiple
    else:
        count = min(max(round(num_frames / multiple) * multiple, multiple), most)
    import torch

    # Torch's own spacing is part of both rules: its float32 decides which frame is nearest in a long video.
    if rule == "transformers":
        indices: np.ndarray = (
            first + torch.arange(0, total, total / count)[:count].long().numpy()
        )  # may be one too many
    else:
        # Halves round to even numbers, so where the part begins decides too.
        indices = torch.linspace(first, first + total - 1, count).round().long().numpy()
    return indices


def frame_range(total: int, rate: float, *, start: float | None, end: float | None) -> tuple[int, int]:
    """The frames between two times of a video, which are counted as if they were spaced evenly.

    A time outside of the video stands for its begin or end.

    Args:
        total: frames in the video.
        rate: frames per second in the video.
        start: seconds; the first frame that is not before it is the first of the range. The video's begin where None.
        end: seconds; the last frame that is not after it is the last of the range. The video's end where None.

    Returns:
        Index of the first frame, and number of frames.

    Raises:
        SizeError: fewer than two frames are between them.

    Source: qwen-vl-utils@0.0.14, calculate_video_frame_range.

    Examples:
        >>> frame_range(100, 10.0, start=2.0, end=4.5)
        (20, 26)
    """
    if start is None and end is None:
        return 0, total
    duration = total / rate
    first = 0 if start is None else math.ceil(max(0.0, min(start, duration)) * rate)
    last = total - 1 if end is None else min(math.floor(max(0.0, min(end, duration)) * rate), total - 1)
    if first >= last:
        raise SizeError(
            f"expected at least two frames from {start or 0} to {duration if end is None else end} seconds, of a video of "
            f"{total} frames and {duration:.2f} seconds; choose another start or end"
        )
    return first, last - first + 1


def frame_budget(
    frames: int, *, min_pixels: int, max_pixels: int, total_pixels: int | None, temporal_patch_size: int
) -> int:
    """Most pixels of one frame, where a whole video has a budget too: an even share of it, within `max_pixels`.

    Args:
        frames: in the video, after sampling.
        min_pixels: of one frame.
        max_pixels: of one frame.
        total_pixels: of all temporal patches; no budget where None.
        temporal_patch_size: frames in a temporal patch, which count as one.

    Returns:
        Pixels.

    Source: qwen-vl-utils@0.0.14, fetch_video; transformers@5.24, Qwen2VLVideoProcessor with `cap_pixels_per_frame`.
    """
    if total_pixels is None:
        return max_pixels
    return min(max_pixels, max(total_pixels * temporal_patch_size // frames, int(min_pixels * 1.05)))


def retained_video_tokens(grid: tuple[int, int, int], rate: float) -> int:
    """How many tokens of a video are kept when a share of them is pruned: at least one frame's, whatever the rate.

    A function of numbers that the host knows, so that a span has its length before any frame is encoded.

    Args:
        grid: merged tokens along (t, h, w).
        rate: share that is pruned, from 0 to 1 exclusive.

    Raises:
        SizeError: the rate is outside of that, or a side is not positive.

    Source: Efficient Video Sampling, arXiv:2510.14624; the rounding of vLLM@0.33.
    """
    t, h, w = grid
    if not 0 <= rate < 1 or min(grid) < 1:
        raise SizeError(f"a video of {t} x {h} x {w} tokens cannot be pruned by {rate}")
    return max(h * w, int(t * h * w * (1 - rate)))
