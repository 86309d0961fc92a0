"""Token ids + slots + replacements -> expanded ids, offsets, cache ids and token modalities. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mm_plugin.errors import SpanError
from mm_plugin.items import MultimodalDataItem, Offset, checked_spans
from mm_plugin.sentinels import lay_sentinels


class Replacement(msgspec.Struct, frozen=True, eq=False):
    """The tokens that stand for one media input in the expanded prompt.

    Attributes:
        ids: [n] int64.
        is_embed: [n] bool, True where a token takes a row of the encoder; None where all do.
    """

    ids: np.ndarray
    is_embed: np.ndarray | None = None

    @classmethod
    def repeat(cls, token: int, count: int) -> Replacement:
        """`count` times one token, each taking a row; however many, they take no memory."""
        return cls(np.broadcast_to(np.int64(token), count))

    @property
    def num_rows(self) -> int:
        """Tokens that take a row."""
        return len(self.ids) if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def runs(self) -> list[Offset]:
        """Runs of tokens that take rows, both ends inclusive, counted from the replacement's start."""
        if self.is_embed is None:
            return [(0, len(self.ids) - 1)] if len(self.ids) else []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.is_embed, [False]]).astype(np.int8)))
        return [(int(start), int(end) - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


class Slot(msgspec.Struct, frozen=True):
    """Where one media input stands in the unexpanded ids: the half-open interval `start:end` is replaced."""

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
            raise SpanError(f"after index {cursor} no further media input stands in the expanded ids")
        start, _, group, length = min(found)
        taken[group] += 1
        order.append(group)
        cursor = start + length
    return order


def pad_by_offsets(ids: np.ndarray, items: Sequence[MultimodalDataItem]) -> np.ndarray:
    """Cache ids: each item's sentinels over its recorded spans, beginning again in each span.

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


def token_modalities_of(items: Sequence[MultimodalDataItem], seq: int) -> np.ndarray:
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
