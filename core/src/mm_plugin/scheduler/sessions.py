"""The inputs of a session's turns, one after another."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import as_ids
from mm_plugin.inputs import MultimodalInputs
from mm_plugin.items import MultimodalDataItem, Offset
from mm_plugin.positions import extend_positions


def merge(before: MultimodalInputs, after: MultimodalInputs, *, generated: Any = ()) -> MultimodalInputs:
    """The inputs of a session in which `after` follows `before` and what was generated in between.

    Offsets of `after` are shifted, its positions go on from the maximum over all axes, and the items are shared with both.

    Args:
        before: the session so far; left as it is.
        after: the new turn alone; left as it is.
        generated: ids that were generated in between.
    """
    between = as_ids(generated, what="generated")
    shift = len(before.padded_input_ids) + len(between)
    moved: list[MultimodalDataItem] = []
    for item in after.mm_items:
        offsets: list[Offset] = [(start + shift, end + shift) for start, end in item.offsets]
        moved.append(msgspec.structs.replace(item, offsets=offsets))
    positions, delta = _continued(before, after, shift)
    return MultimodalInputs(
        mm_items=[*before.mm_items, *moved],
        padded_input_ids=np.concatenate([before.padded_input_ids, between, after.padded_input_ids]),
        token_modalities=np.concatenate([before.token_modalities, np.zeros_like(between), after.token_modalities]),
        special_tokens=after.special_tokens,
        mrope_positions=positions,
        mrope_position_delta=delta,
        num_image_tokens=before.num_image_tokens + after.num_image_tokens,
        num_video_tokens=before.num_video_tokens + after.num_video_tokens,
        num_audio_tokens=before.num_audio_tokens + after.num_audio_tokens,
        num_dropped=before.num_dropped + after.num_dropped,
        held_rows={**before.held_rows, **after.held_rows},
    )


def _continued(before: MultimodalInputs, after: MultimodalInputs, shift: int) -> tuple[np.ndarray | None, int | None]:
    if before.mrope_positions is None and after.mrope_positions is None:
        return None, None
    (left, delta), (right, later) = _table(before), _table(after)
    so_far = extend_positions(left, delta, shift)
    first = shift + delta  # the position that comes next
    # What comes after both: `right.shape[1] + after's delta` positions on from `first`, less the index it stands at.
    return np.concatenate([so_far, right + first], axis=1), delta + later


def _table(inputs: MultimodalInputs) -> tuple[np.ndarray, int]:
    """A turn's positions; where it has none, as a turn of text alone may, they are its indices."""
    if inputs.mrope_positions is None:
        seq = len(inputs.padded_input_ids)
        return np.broadcast_to(np.arange(seq, dtype=np.int64), (3, seq)), 0
    return inputs.mrope_positions, inputs.mrope_position_delta or 0
