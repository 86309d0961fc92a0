"""Which frames of a video are sampled, how many pixels each may have, and how many tokens pruning keeps."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from mm_plugin.errors import SizeError

FrameRule = Literal["qwen", "transformers", "time"]


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
    timestamps: np.ndarray | None = None,
) -> np.ndarray:
    """Which frames of a video are looked at: so many that a second has `fps` of them, or `num_frames`, spread over the video.

    The count is a multiple of `multiple`, at least `min_frames` and at most `max_frames`, which wins; `num_frames` stands above
    `min_frames`. A video never gives more frames than it has, and one that is shorter than `multiple` gives all of them.

    Args:
        total: frames in the video.
        rate: frames per second in the video.
        fps: frames per second that are wanted; not read where `num_frames` is given.
        num_frames: frames that are wanted.
        min_frames: fewest frames; rounded up to the multiple.
        max_frames: most frames; rounded down to the multiple.
        multiple: frames in a temporal patch.
        rule: `qwen` spreads them from the first frame to the last, as the released models were trained; `transformers` begins
            each of equal parts of the video with one; `time` takes what is displayed at times that are spread evenly from the first
            frame to the last, so that one frame may be chosen again where a recording stands still.
        timestamps: when each frame is displayed, seconds, ascending; read by `time`, for which frames are evenly spaced where None.

    Shape:
        timestamps [total] float64; returns [n] int64, never descending.

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
        return np.arange(total, dtype=np.int64)
    most = min(most, total // multiple * multiple)
    if num_frames is None:
        count = math.floor(min(max(total / rate * fps, least), most, total) / multiple) * multiple
    else:
        count = min(max(round(num_frames / multiple) * multiple, multiple), most)
    if rule == "time":
        times = np.arange(total, dtype=np.float64) if timestamps is None else timestamps
        wanted = np.linspace(times[0], times[-1], count)
        # Evenly spaced frames may miss a wanted time by a rounding error.
        slack = (times[-1] - times[0]) * 1e-9
        shown: np.ndarray = np.searchsorted(times, wanted + slack, side="right").astype(np.int64) - 1
        return shown
    import torch

    # Torch's own spacing is part of both rules: its float32 decides which frame is nearest in a long video.
    if rule == "transformers":
        spaced = torch.arange(0, total, total / count)[:count]  # rounding can make one too many
    else:
        spaced = torch.linspace(0, total - 1, count).round()
    indices: np.ndarray = spaced.long().numpy()
    return indices


def frame_budget(
    frames: int, *, min_pixels: int, max_pixels: int, total_pixels: int | None, temporal_patch_size: int
) -> int:
    """Most pixels of one frame, where a whole video has a budget too: an even share of it, but always above the smallest frame.

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
    return max(min(max_pixels, total_pixels * temporal_patch_size // frames), int(min_pixels * 1.05))


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
