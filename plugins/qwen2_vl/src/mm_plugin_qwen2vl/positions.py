"""M-RoPE positions of Qwen2-VL, whose time axis counts temporal patches. A scheduler calls it without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.families.patch_grid import grid_positions
from mm_plugin.items import MultimodalDataItem


def positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],  # noqa: ARG001 - no option of this model chooses a rule
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt; see `grid_positions`.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    return grid_positions(items, seq=seq, config=config)
