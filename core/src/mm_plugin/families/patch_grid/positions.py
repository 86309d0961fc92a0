"""M-RoPE positions of prompts with patch grids, from the items' fields alone. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.positions import mrope_positions


def grid_positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    video_times: Callable[[MultimodalDataItem, int], np.ndarray] | None = None,
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt, by the grid of each item.

    Args:
        items: with offsets, and `image_grid_thw` or `video_grid_thw`, in patches.
        seq: length of the expanded prompt, tokens.
        config: the checkpoint's config.json; its `vision_config.spatial_merge_size` is patches along a side of a merged token.
        video_times: called with a video and its number of temporal patches, n; returns their [n] int64 positions along time,
            counted from the video's start. Where None, each temporal patch is one position after the one before it.

    Shape:
        returns ids [3, seq] int64 (time, height, width), and delta, a Python int in positions.

    Raises:
        SpanError: a span does not fit its grid.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    merge = int(config.get("vision_config", {}).get("spatial_merge_size", 2))
    spans, grids = [], []
    times: list[np.ndarray | None] = []
    for item in items:
        is_video = item.modality is Modality.VIDEO
        t, h, w = np.asarray(item.video_grid_thw if is_video else item.image_grid_thw).reshape(3).tolist()
        spans += item.offsets
        grids.append((t, h // merge, w // merge))
        times.append(video_times(item, t) if video_times is not None and is_video else None)
    return mrope_positions(spans, grids, seq=seq, times=times)
