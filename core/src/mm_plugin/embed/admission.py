"""What a step may rely on of a request's inputs, which come from another process: checked before anything of them is read."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from mm_plugin.errors import UsageError
from mm_plugin.inputs.processed import MultimodalInputs
from mm_plugin.items import Attention, Modality, MultimodalDataItem, span_fault


def request_fault(inputs: MultimodalInputs) -> UsageError | None:
    """What is wrong with the ids or the spans of a request, so that no row of it has a place; None where all is well.

    Args:
        inputs: any values may stand in its fields.
    """
    for name in ("input_ids", "token_modalities"):
        if not is_ids(getattr(inputs, name)):
            return _fault(name, "an array [N] of integers", getattr(inputs, name))
    items: Any = inputs.mm_items
    if not isinstance(items, list | tuple):
        return _fault("mm_items", "a list", items)
    spans: list[tuple[int, int, int]] = []
    for index, item in enumerate(items):
        if not isinstance(item, MultimodalDataItem):
            return _fault(f"mm_items[{index}]", "a MultimodalDataItem", item)
        fault = form_fault(item, f"mm_items[{index}]")
        if fault is not None:
            return fault
        spans += [(start, end, index) for start, end in item.offsets]
    return _overlap(sorted(spans), len(inputs.input_ids))


def form_fault(item: MultimodalDataItem, name: str) -> UsageError | None:
    """What is wrong with what an item says of itself, so that nothing can be asked of it; None where all is well.

    Args:
        item: any values may stand in its fields.
        name: of the item, for the message.
    """
    modality: Any = item.modality
    if not isinstance(modality, Modality):
        return _fault(f"{name}.modality", "a Modality", modality)
    if not isinstance(item.attention, str) or item.attention not in get_args(Attention):
        return _fault(f"{name}.attention", f"one of {', '.join(get_args(Attention))}", item.attention)
    wrong = span_fault(item.offsets)
    return None if wrong is None else UsageError(f"{name}.offsets: {wrong}", argument="offsets")


def _overlap(spans: list[tuple[int, int, int]], seq: int) -> UsageError | None:
    last = -1
    for start, end, index in spans:
        if start <= last:
            return UsageError(
                f"mm_items[{index}].offsets: expected disjoint spans, got one at {start} that overlaps another that ends at {last}",
                argument="offsets",
            )
        last = end
    if last >= seq:
        return UsageError(
            f"mm_items[{spans[-1][2]}].offsets: expected spans within the {seq} ids of the request, got one that ends at {last}",
            argument="offsets",
        )
    return None


def _fault(name: str, expected: str, found: Any) -> UsageError:
    got = f"{list(found.shape)} {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
    return UsageError(f"{name}: expected {expected}, got {got}", argument=name)


def is_ids(value: Any) -> bool:
    """Whether it is an array [N] of integers."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def item_fault(item: MultimodalDataItem) -> UsageError | None:
    """What is wrong with the name of an item's content, so that its embeddings could be another's; None where all is well.

    Args:
        item: any values may stand in the fields that name it.
    """
    identity: Any = item.identity
    known: Any = item.hash
    data: Any = item.model_specific_data
    if item.pad_values is None or (identity is None and known is None):
        return UsageError("no identity is set; call set_identity or set_hash first", argument="identity")
    if identity is not None and not (isinstance(identity, bytes) and len(identity) == 32):
        got = f"{len(identity)} bytes" if isinstance(identity, bytes) else type(identity).__name__
        return UsageError(f"identity: expected 32 bytes, got {got}; call set_identity", argument="identity")
    if identity is None and not (type(known) is int and 0 <= known < 1 << 64):
        return UsageError(f"hash: expected 64 bits, got {type(known).__name__}; call set_hash", argument="hash")
    if not isinstance(data, dict):
        got = type(data).__name__
        return UsageError(f"model_specific_data: expected a dict, got {got}", argument="model_specific_data")
    return None
