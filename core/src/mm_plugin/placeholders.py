"""Token ids + slots + replacements -> expanded ids, offsets, cache ids, modality marks. Integers only, never text.

Spans are recorded while tokens are inserted. Nothing here looks for them afterwards, so a placeholder id that a user typed or a
model sampled is never taken for a medium.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.sentinels import lay_sentinels
from mm_plugin.spec import ModelSpec
from mm_plugin.structs import MultimodalDataItem, MultimodalInputs, Offset, SpecialTokens, checked_spans


class Replacement(msgspec.Struct, frozen=True, eq=False):
    """The tokens that stand for one medium in the expanded prompt.

    Attributes:
        ids: [n] int64.
        takes_row: [n] bool, True where a token takes a row of the encoder; None where all do.
    """

    ids: np.ndarray
    takes_row: np.ndarray | None = None

    @classmethod
    def repeat(cls, token: int, count: int) -> Replacement:
        """`count` times one token, each taking a row; however many, they take no memory."""
        return cls(np.broadcast_to(np.int64(token), count))

    @property
    def num_rows(self) -> int:
        """Tokens that take a row."""
        return len(self.ids) if self.takes_row is None else int(np.count_nonzero(self.takes_row))

    def runs(self) -> list[Offset]:
        """Runs of tokens that take rows, both ends inclusive, counted from the replacement's start."""
        if self.takes_row is None:
            return [(0, len(self.ids) - 1)] if len(self.ids) else []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.takes_row, [False]]).astype(np.int8)))
        return [(int(start), int(end) - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


class Slot(msgspec.Struct, frozen=True):
    """Where one medium stands in the unexpanded ids: the half-open interval `start:end` is replaced."""

    start: int
    end: int


class Expansion(msgspec.Struct, frozen=True, eq=False):
    """The expanded prompt.

    Attributes:
        ids: [N] int64.
        offsets: per slot, the runs that take rows, both ends inclusive, in `ids`.
        spans: per slot, the whole replacement, half-open, in `ids`.
    """

    ids: np.ndarray
    offsets: list[list[Offset]]
    spans: list[tuple[int, int]]


def find_slots(ids: np.ndarray, token: int) -> list[Slot]:
    """Every place of a placeholder in unexpanded ids. For prompts whose caller vouches for the placeholders."""
    return [Slot(int(index), int(index) + 1) for index in np.flatnonzero(ids == token)]


def expand(ids: np.ndarray, slots: Sequence[Slot], replacements: Sequence[Replacement]) -> Expansion:
    """Put each replacement in its slot, and record where its rows go.

    Args:
        ids: [n] int64, unexpanded; never changed, never returned.
        slots: in prompt order.
        replacements: one for each slot.

    Raises:
        SpanError: the counts differ, or slots overlap, are out of order or leave the ids.
    """
    if len(slots) != len(replacements):
        raise SpanError(f"{len(slots)} slots, {len(replacements)} replacements")
    last = 0
    for index, slot in enumerate(slots):
        if not last <= slot.start < slot.end <= len(ids):
            raise SpanError(
                f"slot {index} ({slot.start}:{slot.end}) overlaps the one before or leaves the {len(ids)} ids"
            )
        last = slot.end
    growth = sum(len(r.ids) - (s.end - s.start) for s, r in zip(slots, replacements, strict=True))
    out = np.empty(len(ids) + growth, dtype=np.int64)
    offsets: list[list[Offset]] = []
    spans: list[tuple[int, int]] = []
    read = write = 0
    for slot, replacement in zip(slots, replacements, strict=True):
        kept = slot.start - read
        out[write : write + kept] = ids[read : slot.start]
        write += kept
        end = write + len(replacement.ids)
        out[write:end] = replacement.ids
        offsets.append([(write + first, write + last) for first, last in replacement.runs()])
        spans.append((write, end))
        read, write = slot.end, end
    out[write:] = ids[read:]
    return Expansion(out, offsets, spans)


def match_expanded(ids: np.ndarray, replacements: Sequence[Replacement]) -> Expansion:
    """Find each replacement in ids that are expanded already, left to right.

    Args:
        ids: [N] int64; copied.
        replacements: in prompt order.

    Raises:
        SpanError: a replacement does not stand at the next place where its first token stands; `message` says which.
    """
    offsets: list[list[Offset]] = []
    spans: list[tuple[int, int]] = []
    cursor = 0
    for index, replacement in enumerate(replacements):
        if not len(replacement.ids):
            raise SpanError(f"item {index} stands for no tokens, so it cannot be found in expanded ids")
        found = np.flatnonzero(ids[cursor:] == replacement.ids[0])
        start = cursor + int(found[0]) if len(found) else -1
        end = start + len(replacement.ids)
        if start < 0 or not np.array_equal(ids[start:end], replacement.ids):
            where = f"the tokens at {start} differ" if start >= 0 else "its first token does not follow"
            raise SpanError(
                f"item {index} should stand for {len(replacement.ids)} tokens after index {cursor}, but {where}"
            )
        offsets.append([(start + first, start + last) for first, last in replacement.runs()])
        spans.append((start, end))
        cursor = end
    return Expansion(ids.astype(np.int64, copy=True), offsets, spans)


def order_expanded(ids: np.ndarray, groups: Sequence[Sequence[Replacement]]) -> list[int]:
    """In which order replacements of several groups stand in expanded ids; within a group the order is known.

    Args:
        ids: [N] int64.
        groups: replacements in order, a list for each group.

    Returns:
        The index of the group whose next replacement comes next, for each of all replacements.

    Raises:
        SpanError: no group's next replacement follows.
    """
    taken, order, cursor = [0] * len(groups), [], 0
    for _ in range(sum(map(len, groups))):
        found = []
        for group, replacements in enumerate(groups):
            if taken[group] < len(replacements):
                wanted = replacements[taken[group]].ids
                starts = np.flatnonzero(ids[cursor:] == wanted[0]) if len(wanted) else np.zeros(0, dtype=np.int64)
                if starts.size:
                    start = cursor + int(starts[0])
                    # Where two begin alike, the one that stands there whole.
                    whole = np.array_equal(ids[start : start + len(wanted)], wanted)
                    found.append((start, not whole, group, len(wanted)))
        if not found:
            raise SpanError(f"after index {cursor} no further medium stands in the expanded ids")
        start, _, group, length = min(found)
        taken[group] += 1
        order.append(group)
        cursor = start + length
    return order


def pad_by_offsets(ids: np.ndarray, items: Sequence[MultimodalDataItem]) -> np.ndarray:
    """Cache ids: each item's sentinels over its recorded spans, beginning anew in each span.

    Args:
        ids: [N] int64; never changed, never returned.
        items: with offsets and sentinels.

    Shape:
        returns [N] int64, a new array.

    Raises:
        SpanError: a span overlaps another or leaves the ids.
    """
    out = np.array(ids, dtype=np.int64)
    for start, end, item in checked_spans(items, len(out)):
        lay_sentinels(out, start, end + 1, item.padding_values())
    return out


def mark_modalities(items: Sequence[MultimodalDataItem], seq: int) -> np.ndarray:
    """`token_modalities`: 0 for text, else the modality of the item whose span the token is in.

    Shape:
        returns [seq] int64.

    Raises:
        SpanError: a span overlaps another or leaves the sequence.
    """
    out = np.zeros(seq, dtype=np.int64)
    for start, end, item in checked_spans(items, seq):
        out[start : end + 1] = int(item.modality)
    return out


def pad_token_pairs(
    ids: np.ndarray,
    items: Sequence[MultimodalDataItem],
    pairs: Sequence[tuple[int, int]],
    *,
    data_start_token_ids: Sequence[int] | None = None,
) -> tuple[np.ndarray, list[int]]:
    """Cache ids for ids that came without offsets: sentinels between each start token and its end token.

    A pair whose start token is in `data_start_token_ids` begins the next item; every other pair belongs to the item begun
    before. A balanced pair with nothing inside stays as it is and still counts.

    Args:
        ids: [N] int64; never changed, never returned.
        items: in prompt order, with sentinels.
        pairs: (start id, end id).
        data_start_token_ids: start ids that begin an item; all of them where None.

    Shape:
        returns [N] int64, a new array, and the index of each start token that begins an item.

    Raises:
        SpanError: pairs are unbalanced or nested, or a span belongs to no item.

    Source: SGLang@0.5.23 for balanced pairs, equal bit for bit; what it lets pass silently is refused here.
    """
    out = np.array(ids, dtype=np.int64)
    starts = np.array(sorted({start for start, _ in pairs}), dtype=np.int64)
    ends = np.array(sorted({end for _, end in pairs}), dtype=np.int64)
    begins_item = set(starts.tolist() if data_start_token_ids is None else data_start_token_ids)
    closing = {start: {end for first, end in pairs if first == start} for start, _ in pairs}
    if np.intersect1d(starts, ends).size:
        raise SpanError("a token both starts and ends a span; such spans have no unambiguous bounds")
    is_edge = np.zeros(len(out), dtype=bool)
    for token in (*starts.tolist(), *ends.tolist()):  # a few comparisons are twice as fast as a set
        is_edge |= out == token
    edges = np.flatnonzero(is_edge)
    if len(edges) % 2:
        raise SpanError(f"unbalanced: {len(edges)} start and end tokens")
    index, begun = -1, []
    tokens = out[edges].reshape(-1, 2).tolist()
    for (left, right), (first, last) in zip(edges.reshape(-1, 2).tolist(), tokens, strict=True):
        if last not in closing.get(first, ()):
            raise SpanError(
                f"tokens {first} at {left} and {last} at {right} are no pair: spans are unbalanced or nested"
            )
        if first in begins_item:
            index += 1
            begun.append(left)
        if index < 0 or index >= len(items):
            which = "before any item begins" if index < 0 else f"of item {index}, where there are {len(items)} items"
            raise SpanError(f"the span at {left} stands {which}")
        lay_sentinels(out, left + 1, right, items[index].padding_values())
    return out, begun


def pad_runs(ids: np.ndarray, items: Sequence[MultimodalDataItem], token: int) -> np.ndarray:
    """Cache ids for ids that came without offsets: sentinels over each run of one placeholder, a run an item.

    Two items whose runs touch cannot be told apart here, and are refused by the count; recorded offsets have no such limit.

    Shape:
        returns [N] int64, a new array.

    Raises:
        SpanError: there are more or fewer runs than items.
    """
    out = np.array(ids, dtype=np.int64)
    runs = Replacement(out, out == token).runs()
    if len(runs) != len(items):
        raise SpanError(f"{len(runs)} runs of placeholder {token}, {len(items)} items")
    for (start, end), item in zip(runs, items, strict=True):
        lay_sentinels(out, start, end + 1, item.padding_values())
    return out


def count_mm_tokens_in_extend(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], offsets: Sequence[Sequence[Offset]]
) -> int:
    """Rows that one step consumes.

    Args:
        prefix_lens: per request, tokens computed already.
        extend_lens: per request, tokens that the step computes.
        offsets: per request, the spans of all its items, both ends inclusive.
    """
    if not len(prefix_lens) == len(extend_lens) == len(offsets):
        raise SpanError(f"{len(prefix_lens)} prefixes, {len(extend_lens)} extends, {len(offsets)} lists of offsets")
    total = 0
    for prefix, extend, spans in zip(prefix_lens, extend_lens, offsets, strict=True):
        for start, end in spans:
            total += max(0, min(end + 1, prefix + extend) - max(start, prefix))
    return total


def pad_input_ids(
    spec: ModelSpec, special_tokens: SpecialTokens, ids: np.ndarray, items: Sequence[MultimodalDataItem]
) -> np.ndarray:
    """Cache ids for a request that came without them, by the rule that the plugin declared in `ModelSpec.padding`.

    Args:
        spec: the model's declaration.
        special_tokens: the ids of its tokens.
        ids: [N] int64, expanded; never changed, never returned.
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
            raise SpanError(f"{len(begun)} spans between start and end tokens, {len(items)} items")
        return laid
    if spec.padding == "runs":
        unknown = [item.modality.argument for item in items if item.modality not in special_tokens.placeholders]
        if unknown:
            raise SpanError(f"{spec.name} has no placeholder for {unknown[0]}, so their runs cannot be found")
        out = np.array(ids, dtype=np.int64)
        for modality, token in special_tokens.placeholders.items():
            own = [item for item in items if item.modality is modality]
            out = pad_runs(out, own, token)
        return out
    if spec.padding == "offsets":
        raise SpanError(f"{spec.name} pads by recorded offsets, and an item came without")
    padded: np.ndarray = spec.load("padding")(np.array(ids, dtype=np.int64), items, special_tokens)
    return padded


def apply_padded_input_ids(origin: Any, received: Any, inputs: MultimodalInputs) -> bool:
    """Put a request's cache ids in the place of its model ids, where a scheduler keeps them.

    Args:
        origin: the ids that the scheduler keeps: a list, an `array`, a numpy array or a torch tensor; changed in place where
            all lengths agree, else left alone.
        received: the model ids that came with the request.
        inputs: the request's media, with `padded_input_ids`.

    Returns:
        Whether the lengths agree.

    Raises:
        UsageError: `origin` has numbers that are too narrow for sentinels.
    """
    padded = inputs.padded_input_ids
    if not len(origin) == len(received) == len(padded):
        return False
    kind = str(getattr(origin, "dtype", "")).removeprefix("torch.") or getattr(origin, "typecode", "q")
    if kind not in ("int64", "uint64", "q", "Q", "l", "L") or getattr(origin, "itemsize", 8) != 8:
        raise UsageError(f"ids of type {kind!r} cannot hold sentinels: use 64-bit integers", argument="origin")
    if isinstance(origin, np.ndarray):
        origin[:] = padded
    elif hasattr(origin, "detach"):  # a torch tensor, without importing torch
        origin[:] = origin.new_tensor(padded)
    elif hasattr(origin, "typecode"):
        origin[:] = type(origin)(origin.typecode, padded.tolist())
    else:
        origin[:] = padded.tolist()
    return True
