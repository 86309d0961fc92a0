"""What one step reads and writes, from offsets alone: plain data, printed and tested without torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mm_plugin.errors import UsageError
from mm_plugin.inputs import ForwardBatch


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
    check_batch(batch)
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


def check_batch(batch: ForwardBatch) -> None:
    """Refuse a batch whose lists differ in length, or that has a negative length.

    Raises:
        UsageError: it does.
    """
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
    """Runs of neighboring requests that touch, as one."""
    out: list[tuple[int, int]] = []
    for start, end in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out
