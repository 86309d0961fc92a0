"""Sentinels over the ids of a request that came without offsets. Runs in a scheduler: no torch, no processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mm_plugin.arrays import is_tensor
from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs.processed import MultimodalInputs, SpecialTokens
from mm_plugin.items import MultimodalDataItem
from mm_plugin.placeholders import Replacement, pad_by_offsets
from mm_plugin.sentinels import lay_sentinels
from mm_plugin.spec import ModelSpec


def pad_token_pairs(
    ids: np.ndarray,
    items: Sequence[MultimodalDataItem],
    pairs: Sequence[tuple[int, int]],
    *,
    data_start_token_ids: Sequence[int] | None = None,
) -> tuple[np.ndarray, list[int]]:
    """Cache ids for ids that came without offsets: sentinels between each start token and its end token.

    A pair whose start token is in `data_start_token_ids` begins the next item; every other pair belongs to the item that was
    begun last. A balanced pair with nothing inside is left as it is and still counts.

    Args:
        ids: [N] int64; neither changed nor returned.
        items: in prompt order, with sentinels.
        pairs: (start id, end id).
        data_start_token_ids: start ids that begin an item; all where None.

    Shape:
        returns [N] int64, a new array; and the index of each start token that begins an item.

    Raises:
        SpanError: pairs are unbalanced or nested, or a span belongs to no item.

    Source: SGLang@0.5.23 for balanced pairs, equal bit for bit; what it accepts silently is refused here.
    """
    out = np.array(ids, dtype=np.int64)
    starts = np.array(sorted({start for start, _ in pairs}), dtype=np.int64)
    ends = np.array(sorted({end for _, end in pairs}), dtype=np.int64)
    begins_item = set(starts.tolist() if data_start_token_ids is None else data_start_token_ids)
    closing = {start: {end for first, end in pairs if first == start} for start, _ in pairs}
    if np.intersect1d(starts, ends).size:
        raise SpanError(
            "token pairs: expected start tokens that are not end tokens; a token that is both leaves spans ambiguous"
        )
    is_edge = np.zeros(len(out), dtype=bool)
    for token in (*starts.tolist(), *ends.tolist()):  # a few comparisons are twice as fast as a set
        is_edge |= out == token
    edges = np.flatnonzero(is_edge)
    if len(edges) % 2:
        raise SpanError(f"expected as many end tokens as start tokens, got {len(edges)} in all: spans are unbalanced")
    index, begun = -1, []
    tokens = out[edges].reshape(-1, 2).tolist()
    for (left, right), (first, last) in zip(edges.reshape(-1, 2).tolist(), tokens, strict=True):
        if last not in closing.get(first, ()):
            raise SpanError(
                f"tokens {first} at {left} and {last} at {right} are not a pair: spans are unbalanced or nested"
            )
        if first in begins_item:
            index += 1
            begun.append(left)
        if index < 0 or index >= len(items):
            which = "before any item begins" if index < 0 else f"of item {index}, where there are {len(items)} items"
            raise SpanError(f"the span at {left} is {which}")
        lay_sentinels(out, left + 1, right, items[index].padding_values())
    return out, begun


def pad_runs(ids: np.ndarray, items: Sequence[MultimodalDataItem], token: int) -> np.ndarray:
    """Cache ids for ids that came without offsets: sentinels over each run of one placeholder, one run per item.

    Two items whose runs touch cannot be distinguished here, and are refused by the count; recorded offsets have no such limit.

    Shape:
        returns [N] int64, a new array.

    Raises:
        SpanError: there are more or fewer runs than items.
    """
    out = np.array(ids, dtype=np.int64)
    runs = Replacement(out, out == token).runs()
    if len(runs) != len(items):
        raise SpanError(f"expected {len(items)} runs of placeholder {token}, one per item, got {len(runs)}")
    for (start, end), item in zip(runs, items, strict=True):
        lay_sentinels(out, start, end + 1, item.padding_values())
    return out


def pad_input_ids(
    spec: ModelSpec, special_tokens: SpecialTokens, ids: np.ndarray, items: Sequence[MultimodalDataItem]
) -> np.ndarray:
    """Cache ids for a request that came without them, by the rule that the plugin declared in `ModelSpec.padding`.

    Args:
        spec: the model's declaration.
        special_tokens: the ids of its tokens.
        ids: [N] int64, expanded; neither changed nor returned.
        items: in prompt order, with sentinels.

    Shape:
        returns [N] int64, a new array.

    Raises:
        SpanError: ids and items do not fit together.
    """
    if all(item.offsets for item in items):
        return pad_by_offsets(ids, items)
    if spec.padding == "pairs":
        laid, begun = pad_token_pairs(ids, items, special_tokens.pairs)
        if len(begun) != len(items):
            raise SpanError(f"expected {len(items)} spans between start and end tokens, one per item, got {len(begun)}")
        return laid
    if spec.padding == "runs":
        unknown = [item.modality.argument for item in items if item.modality not in special_tokens.placeholders]
        if unknown:
            raise SpanError(f"{spec.name}: no placeholder is known for {unknown[0]}, so their runs cannot be found")
        out = np.array(ids, dtype=np.int64)
        for modality, token in special_tokens.placeholders.items():
            own = [item for item in items if item.modality is modality]
            out = pad_runs(out, own, token)
        return out
    if spec.padding == "offsets":
        raise SpanError(f"{spec.name}: expected recorded offsets on every item, got an item without")
    padded: np.ndarray = spec.load("padding")(np.array(ids, dtype=np.int64), items, special_tokens)
    return padded


def apply_padded_input_ids(origin: Any, received: Any, inputs: MultimodalInputs) -> bool:
    """Overwrite a request's model ids with its cache ids, where a scheduler keeps them.

    Args:
        origin: the ids that the scheduler keeps: a list, an `array`, a numpy array or a torch tensor; changed in place if all
            lengths agree, else left as they are.
        received: the model ids that came with the request.
        inputs: the request's media, with `padded_input_ids`.

    Returns:
        Whether the lengths agree.

    Raises:
        UsageError: the integers of `origin` are too narrow for sentinels.
    """
    padded = inputs.padded_input_ids
    if not len(origin) == len(received) == len(padded):
        return False
    kind = str(getattr(origin, "dtype", "")).removeprefix("torch.") or getattr(origin, "typecode", "q")
    if kind not in ("int64", "uint64", "q", "Q", "l", "L") or getattr(origin, "itemsize", 8) != 8:
        raise UsageError(f"origin: expected 64-bit integers, which can hold sentinels, got {kind!r}", argument="origin")
    if isinstance(origin, np.ndarray):
        origin[:] = padded
    elif is_tensor(origin):
        origin[:] = origin.new_tensor(padded)
    elif hasattr(origin, "typecode"):
        origin[:] = type(origin)(origin.typecode, padded.tolist())
    else:
        origin[:] = padded.tolist()
    return True
