"""M-RoPE positions of Qwen2.5-VL, whose time axis counts seconds. A scheduler calls it without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.errors import SpanError
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.positions import mrope_positions

# What a config that says nothing means; released ones say 2.
TOKENS_PER_SECOND = 4


def positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],  # noqa: ARG001 - none of this model's options chooses a rule
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt. Along time they are the seconds from the video's start, scaled.

    Args:
        items: with offsets and `image_grid_thw` or `video_grid_thw`, in patches; videos with `second_per_grid_ts`, seconds.
        seq: length of the expanded prompt, tokens.
        config: the checkpoint's config.json.
        options: the options given at load, by name; not used here.

    Shape:
        returns ids [3, seq] int64, and delta, a Python int in positions.

    Raises:
        SpanError: a span does not fit its grid, or a video brings no seconds.

    Source: Qwen2.5-VL, arXiv:2502.13923, section 2.1.2; the arithmetic of the released code: (step x seconds) x tokens per second
    in float32, then cut to whole numbers.
    """
    vision = config.get("vision_config", {})
    merge = int(vision.get("spatial_merge_size", 2))
    rate = np.float32(vision.get("tokens_per_second", TOKENS_PER_SECOND))
    spans, grids = [], []
    times: list[np.ndarray | None] = []
    for item in items:
        is_video = item.modality is Modality.VIDEO
        t, h, w = np.asarray(item.video_grid_thw if is_video else item.image_grid_thw).reshape(3).tolist()
        spans += item.offsets
        grids.append((t, h // merge, w // merge))
        if not is_video:
            times.append(None)
            continue
        seconds = item.get("second_per_grid_ts")
        if seconds is None:
            raise SpanError("a video has no second_per_grid_ts, so its time axis is unknown")
        step = np.float32(np.asarray(seconds).reshape(()))
        times.append(((np.arange(t, dtype=np.float32) * step) * rate).astype(np.int64))
    return mrope_positions(spans, grids, seq=seq, times=times)
