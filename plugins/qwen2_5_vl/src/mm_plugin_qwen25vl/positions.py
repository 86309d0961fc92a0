"""M-RoPE positions of Qwen2.5-VL, whose time axis counts seconds. A scheduler calls it without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.errors import SpanError
from mm_plugin.families.patch_grid import grid_positions
from mm_plugin.items import MultimodalDataItem

# Where a config has no `tokens_per_second`; released ones say 2.
TOKENS_PER_SECOND = 4


def positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],  # noqa: ARG001 - no option of this model chooses a rule
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt; see `grid_positions`. A video's time is in seconds, scaled.

    Raises:
        SpanError: a span does not fit its grid, or a video has no `second_per_grid_ts`.

    Source: Qwen2.5-VL, arXiv:2502.13923, section 2.1.2; arithmetic of the released code: (step x seconds) x tokens per second in
    float32, then truncated.
    """

    def times(item: MultimodalDataItem, steps: int) -> np.ndarray:
        seconds = item.get("second_per_grid_ts")
        if seconds is None:
            raise SpanError("a video has no second_per_grid_ts, so its time axis is unknown")
        return time_positions(steps, np.asarray(seconds).reshape(()), positions_per_second(config))

    return grid_positions(items, seq=seq, config=config, video_times=times)


def positions_per_second(config: Mapping[str, Any]) -> float:
    """How many positions a second of video takes along time."""
    return float(config.get("vision_config", {}).get("tokens_per_second", TOKENS_PER_SECOND))


def time_positions(steps: int, seconds: Any, rate: float) -> np.ndarray:
    """The position of each temporal patch along time, counted from the video's start: [steps] int64.

    Args:
        steps: temporal patches.
        seconds: from one temporal patch to the next.
        rate: positions per second.
    """
    return ((np.arange(steps, dtype=np.float32) * np.float32(seconds)) * np.float32(rate)).astype(np.int64)
