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
        is_embed: [n] bool, True where a token takes an embedding of the item; None where all do.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import Replacement
        >>> Replacement.repeat(9, 4).num_embeddings
        4
        >>> lines = Replacement(np.array([9, 9, 7, 9, 9, 7]), np.array([True, True, False] * 2))  # 7 ends a line
        >>> lines.num_embeddings, lines.runs()
        (4, [(0, 1), (3, 4)])
    """

    ids: np.ndarray
    is_embed: np.ndarray | None = None

    @classmethod
    def repeat(cls, token: int, count: int) -> Replacement:
        """One token `count` times, each taking an embedding; takes no memory, whatever the count."""
        return cls(np.broadcast_to(np.int64(token), count))

    @property
    def num_embeddings(self) -> int:
        """Tokens that take an embedding."""
        return len(self.ids) if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def runs(self) -> list[Offset]:
        """Runs of tokens that take embeddings, inclusive at both ends, counted from the replacement's start."""
        if self.is_embed is None:
            return [(0, len(self.ids) - 1)] if len(self.ids) else []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.is_embed, [False]]).astype(np.int8)))
        return [(int(start), int(end) - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


class Slot(msgspec.Struct, frozen=True):
    """The place of one media input in the unexpanded ids: the half-open interval `start:end` is replaced."""

    start: int
    end: int


class Expansion(msgspec.Struct, frozen=True, eq=False):
    """The expanded prompt.

    Attributes:
        ids: [N] int64.
        offsets: per slot, the runs in `ids` that take embeddings, inclusive at both ends.
        spans: per slot, the whole replacement in `ids`, half-open.
    """

    ids: np.ndarray
    offsets: list[list[Offset]]
    spans: list[tuple[int, int]]


def find_slots(ids: np.ndarray, token: int) -> list[Slot]:
    """A slot for each occurrence of a placeholder in unexpanded ids, for prompts whose caller vouches for the placeholders."""
    return [Slot(int(index), int(index) + 1) for index in np.flatnonzero(ids == token)]


def expand(ids: np.ndarray, slots: Sequence[Slot], replacements: Sequence[Replacement]) -> Expansion:
    """Put each replacement in its slot, and record which tokens take embeddings.

    Args:
        ids: [n] int64, unexpanded; neither changed nor returned.
        slots: in prompt order.
        replacements: one for each slot.

    Raises:
        SpanError: the counts differ, or slots overlap, are out of order or leave the ids.
    """
    if len(slots) != len(replacements):
        raise SpanError(
            f"expected one replacement per slot, got {len(slots)} slots and {len(replacements)} replacements"
        )
    last = 0
    for index, slot in enumerate(slots):
        if not last <= slot.start < slot.end <= len(ids):
            raise SpanError(
                f"slot {index} ({slot.start}:{slot.end}) overlaps the previous one or leaves the {len(ids)} ids"
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
        SpanError: a replacement is not found where its first token occurs next.
    """
    offsets: list[list[Offset]] = []
    spans: list[tuple[int, int]] = []
    cursor = 0
    for index, replacement in enumerate(replacements):
        if not len(replacement.ids):
            raise SpanError(f"item {index} has no tokens, so it cannot be found in expanded ids")
        found = np.flatnonzero(ids[cursor:] == replacement.ids[0])
        start = cursor + int(found[0]) if len(found) else -1
        end = start + len(replacement.ids)
        if start < 0 or not np.array_equal(ids[start:end], replacement.ids):
            found_there = f"other tokens at {start}" if start >= 0 else "no occurrence of its first token"
            raise SpanError(
                f"item {index}: expected its {len(replacement.ids)} tokens from index {cursor} on, found {found_there}"
            )
        offsets.append([(start + first, start + last) for first, last in replacement.runs()])
        spans.append((start, end))
        cursor = end
    return Expansion(ids.astype(np.int64, copy=True), offsets, spans)


def order_expanded(ids: np.ndarray, groups: Sequence[Sequence[Replacement]]) -> list[int]:
    """The order of replacements of several groups in expanded ids; within a group the order is known.

    Args:
        ids: [N] int64.
        groups: for each group, its replacements in prompt order.

    Returns:
        For each place in the order, the index of the group whose next replacement is there.

    Raises:
        SpanError: the next replacement of no group is found.
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
                    # Where two begin alike, the one that is there as a whole.
                    whole = np.array_equal(ids[start : start + len(wanted)], wanted)
                    found.append((start, not whole, group, len(wanted)))
        if not found:
            raise SpanError(f"expected another media input in the expanded ids, found none from index {cursor} on")
        start, _, group, length = min(found)
        taken[group] += 1
        order.append(group)
        cursor = start + length
    return order


def pad_by_offsets(ids: np.ndarray, items: Sequence[MultimodalDataItem]) -> np.ndarray:
    """Cache ids: each item's sentinels over its recorded spans, starting again in each span.

    Args:
        ids: [N] int64; neither changed nor returned.
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
    """`token_modalities`: 0 for text, else the value of the modality of the item whose span holds the token.

    Shape:
        returns [seq] int64.

    Raises:
        SpanError: a span overlaps another or leaves the sequence.
    """
    out = np.zeros(seq, dtype=np.int64)
    for start, end, item in checked_spans(items, seq):
        out[start : end + 1] = int(item.modality)
    return out
