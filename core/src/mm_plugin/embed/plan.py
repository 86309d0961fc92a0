"""What one step reads and writes, from offsets alone: plain data, printed and tested without torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.structs import ForwardBatch, MultimodalInputs


class Piece(msgspec.Struct, frozen=True):
    """Rows `rows_start:rows_end` of an item go to `out_start` and after in the flat output of the step.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request.
        rows_start: first row of the item, inclusive.
        rows_end: last row, exclusive.
        out_start: first index in the flat output.
    """

    request: int
    item: int
    rows_start: int
    rows_end: int
    out_start: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step reads and writes; plain data.

    Attributes:
        total: tokens in the step.
        text_runs: half-open intervals of the flat output that are text.
        pieces: rows of items, in output order.
        unfinished: (request, item) of those that began before the end of this step and whose last row lies after it.
    """

    total: int
    text_runs: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    unfinished: frozenset[tuple[int, int]]


def plan_step(batch: ForwardBatch) -> StepPlan:
    """Intersect every span of every item with its request's chunk.

    Raises:
        UsageError: the batch's lists differ in length, or a length is negative.
    """
    _check(batch)
    pieces: list[Piece] = []
    unfinished: set[tuple[int, int]] = set()
    text: list[tuple[int, int]] = []
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        end = prefix + extend
        spans: list[tuple[int, int, int, int]] = []
        for index, item in enumerate(inputs.mm_items if inputs is not None else ()):
            row = 0
            for start, last in item.offsets:
                first, stop = max(start, prefix), min(last + 1, end)
                if first < stop:
                    spans.append((first, stop, index, row + first - start))
                row += last + 1 - start
            if item.offsets and item.offsets[0][0] < end <= item.offsets[-1][1]:
                unfinished.add((request, index))
        spans.sort()
        cursor = prefix
        for first, stop, index, row in spans:
            if first < cursor:
                raise UsageError(
                    f"request {request}: item {index}'s span at {first} overlaps another", argument="batch"
                )
            if first > cursor:
                text.append((flat + cursor - prefix, flat + first - prefix))
            pieces.append(Piece(request, index, row, row + stop - first, flat + first - prefix))
            cursor = stop
        if end > cursor:
            text.append((flat + cursor - prefix, flat + end - prefix))
        flat += extend
    return StepPlan(flat, tuple(_merged(text)), tuple(pieces), frozenset(unfinished))


def _check(batch: ForwardBatch) -> None:
    lengths = {len(batch.mm_inputs), len(batch.extend_prefix_lens), len(batch.extend_seq_lens)}
    if len(lengths) != 1:
        raise UsageError(
            f"the batch's lists have {sorted(lengths)} entries; there must be one per request", argument="batch"
        )
    for request, (prefix, extend) in enumerate(zip(batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)):
        if prefix < 0 or extend < 0:
            raise UsageError(
                f"request {request}: prefix {prefix} and extend {extend} must not be negative", argument="batch"
            )


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of neighbouring requests that touch, as one."""
    out: list[tuple[int, int]] = []
    for start, end in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


class SeparatePart(msgspec.Struct, frozen=True, eq=False):
    """A step of a model whose encoder part is separate (cross-attention): its ids and lengths without that part.

    Attributes:
        input_ids: [total] int64, the flat extends of the text alone.
        extend_prefix_lens: per request, text tokens that are computed already.
        extend_seq_lens: per request, text tokens that this step computes.
        encoder_lens: per request, tokens of its encoder part.
        encoder_cached: per request, whether its encoder part is computed already (or there is none).
    """

    input_ids: np.ndarray
    extend_prefix_lens: list[int]
    extend_seq_lens: list[int]
    encoder_lens: list[int]
    encoder_cached: list[bool]


def encoder_len(inputs: MultimodalInputs | None) -> int:
    """Tokens of a request's separate encoder part: its media, which must stand together at the start of the prompt.

    Raises:
        SpanError: they do not.
    """
    spans = sorted(span for item in inputs.mm_items for span in item.offsets) if inputs is not None else []
    cursor = 0
    for start, end in spans:
        if start != cursor:
            raise SpanError(
                f"a separate encoder part leads the prompt; a span begins at {start}, where {cursor} was expected"
            )
        cursor = end + 1
    return cursor


def strip_encoder_part(input_ids: np.ndarray, batch: ForwardBatch) -> SeparatePart:
    """Take the encoder part out of a step of a model that attends to it apart from the text.

    Args:
        input_ids: [total] int64, the flat extends; never changed.
        batch: what is extended, encoder parts included.

    Raises:
        SpanError: a prefix, or a step, cuts an encoder part in two; or its media do not lead the prompt.
        UsageError: ids and batch differ in length, or the batch's lists do.
    """
    _check(batch)
    if len(input_ids) != sum(batch.extend_seq_lens):
        raise UsageError(
            f"input_ids has {len(input_ids)} ids, the batch extends {sum(batch.extend_seq_lens)}", argument="input_ids"
        )
    kept: list[np.ndarray] = []
    prefixes, extends, lens, cached = [], [], [], []
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        length = encoder_len(inputs)
        done = prefix >= length
        if not done and (prefix > 0 or 0 < extend < length):  # a request that stands still cuts nothing
            raise SpanError(
                f"request {request}: its encoder part has {length} tokens, a step from {prefix} to {prefix + extend} cuts it in two"
            )
        skipped = 0 if done else min(length, extend)
        kept.append(np.asarray(input_ids[flat + skipped : flat + extend], dtype=np.int64))
        prefixes.append(prefix - length if done else 0)
        extends.append(extend - skipped)
        lens.append(length)
        cached.append(done)
        flat += extend
    ids = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    return SeparatePart(ids, prefixes, extends, lens, cached)
