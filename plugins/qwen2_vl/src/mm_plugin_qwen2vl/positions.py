"""M-RoPE positions of Qwen2-VL. Integers only: a scheduler calls it without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.positions import mrope_positions


def positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],  # noqa: ARG001 - none of this model's options chooses a rule
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt. Time goes on by one for each temporal patch of a video.

    Args:
        items: with offsets and `image_grid_thw` or `video_grid_thw`, in patches.
        seq: length of the expanded prompt, tokens.
        config: the checkpoint's config.json.
        options: the options given at load, by name; not used here.

    Shape:
        returns ids [3, seq] int64, and delta, a Python int in positions.

    Raises:
        SpanError: a span does not fit its grid.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    merge = int(config.get("vision_config", {}).get("spatial_merge_size", 2))
    spans, grids = [], []
    for item in items:
        grid = item.video_grid_thw if item.modality is Modality.VIDEO else item.image_grid_thw
        t, h, w = np.asarray(grid).reshape(3).tolist()
        spans += item.offsets
        grids.append((t, h // merge, w // merge))
    return mrope_positions(spans, grids, seq=seq)
