"""What one step reads and writes, from offsets alone: plain data, printed and tested without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from mm_plugin.embed.admission import request_fault
from mm_plugin.errors import UsageError
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs, cut_span
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.items import Modality

# (request, item): indices of a request in the batch, and of an item in the request.
Place = tuple[int, int]


class Piece(msgspec.Struct, frozen=True):
    """Rows `rows_start:rows_end` of an item's embeddings, written from `out_start` on in the flat output of the step.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request.
        rows_start: first row of the item's embeddings, inclusive.
        rows_end: last row, exclusive.
        out_start: first index in the flat output.
        modality: the item's.
    """

    request: int
    item: int
    rows_start: int
    rows_end: int
    out_start: int
    modality: Modality

    @property
    def place(self) -> Place:
        """(request, item)."""
        return self.request, self.item

    @property
    def out_end(self) -> int:
        """Last index in the flat output, exclusive."""
        return self.out_start + self.rows_end - self.rows_start


class StepPlan(msgspec.Struct, frozen=True):
    """What one step reads and writes; plain data.

    Attributes:
        total: tokens in the step.
        text_runs: half-open intervals of the flat output that are text.
        pieces: what is written of items, in output order.
        unfinished: items that began before the end of this step and whose last row is after it.
        faults: by request, what is wrong with its inputs; its tokens are text to the plan, and its rows are zeros.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs
        >>> from mm_plugin.embed import plan_step
        >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 7)])
        >>> ids = np.zeros(10, np.int64)
        >>> inputs = MultimodalInputs(mm_items=[image], input_ids=ids, padded_input_ids=ids, token_modalities=ids)
        >>> plan = plan_step(ForwardBatch([inputs], [0], [4]))
        >>> plan.text_runs, [(piece.rows_start, piece.rows_end, piece.out_start) for piece in plan.pieces]
        (((0, 3),), [(0, 1, 3)])
    """

    total: int
    text_runs: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    unfinished: frozenset[Place]
    faults: Mapping[int, UsageError] = msgspec.field(default_factory=dict)

    def only(self, places: Collection[Place]) -> StepPlan:
        """The plan in which other items than these are text."""
        pieces = tuple(piece for piece in self.pieces if piece.place in places)
        return msgspec.structs.replace(self, text_runs=tuple(_between(pieces, self.total)), pieces=pieces)


def plan_step(batch: ForwardBatch) -> StepPlan:
    """Intersect every span of every item with its request's chunk.

    Inputs come from another process. A request whose spans overlap, or are not spans, is in `StepPlan.faults`, and so is one whose
    chunk cuts a span that must stay whole; the others go on.

    Raises:
        UsageError: the batch's lists do not fit together.
    """
    check_batch(batch)
    pieces: list[Piece] = []
    unfinished: set[Place] = set()
    faults: dict[int, UsageError] = {}
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.inputs(), batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        fault = None if inputs is None else request_fault(inputs) or _cut(inputs, prefix, prefix + extend)
        if fault is not None:
            faults[request] = fault
        elif inputs is not None:
            pieces += _pieces(request, inputs, prefix, prefix + extend, flat)
            unfinished |= {
                (request, index)
                for index, item in enumerate(inputs.mm_items)
                if item.offsets and item.offsets[0][0] < prefix + extend <= item.offsets[-1][1]
            }
        flat += extend
    return StepPlan(flat, tuple(_between(pieces, flat)), tuple(pieces), frozenset(unfinished), faults)


def _cut(inputs: MultimodalInputs, prefix: int, end: int) -> UsageError | None:
    """What is wrong with a chunk that cuts a span whose tokens attend to one another: some would miss what others need."""
    cut = (cut_span(inputs, prefix) or cut_span(inputs, end)) if prefix < end else None
    if cut is None:
        return None
    return UsageError(
        f"mm_items[{cut[2]}]: expected a chunk with all or none of the span ({cut[0]}, {cut[1]}), whose tokens attend to one "
        f"another, got tokens {prefix} to {end - 1}; ask MultimodalInputs.clip_chunk where a chunk may end",
        argument="batch",
    )


def _pieces(request: int, inputs: MultimodalInputs, prefix: int, end: int, flat: int) -> list[Piece]:
    """What the chunk `prefix:end` of a request, which begins at `flat` in the output, takes of its items."""
    spans: list[tuple[int, int, int, int]] = []
    for index, item in enumerate(inputs.mm_items):
        row = 0
        for start, last in item.offsets:
            first, stop = max(start, prefix), min(last + 1, end)
            if first < stop:
                spans.append((first, stop, index, row + first - start))
            row += last + 1 - start
    pieces = []
    for first, stop, index, row in sorted(spans):
        modality = inputs.mm_items[index].modality
        pieces.append(Piece(request, index, row, row + stop - first, flat + first - prefix, modality))
    return pieces


def _between(pieces: Iterable[Piece], total: int) -> Iterator[tuple[int, int]]:
    """The intervals of the output that no piece writes."""
    cursor = 0
    for piece in pieces:
        if piece.out_start > cursor:
            yield cursor, piece.out_start
        cursor = piece.out_end
    if total > cursor:
        yield cursor, total


def check_batch(batch: ForwardBatch) -> None:
    """Refuse a batch whose lists do not fit together.

    Raises:
        UsageError: the lists differ in length, an entry is not of the right kind, or a length is negative.
    """
    lengths = [len(batch.mm_inputs), len(batch.extend_prefix_lens), len(batch.extend_seq_lens)]
    if len(set(lengths)) != 1:
        raise UsageError(f"batch: expected one entry per request in each list, got {lengths}", argument="batch")
    for request, media in enumerate(batch.mm_inputs):
        if media is not None and not isinstance(media, RequestMedia | MultimodalInputs):
            raise UsageError(
                f"batch.mm_inputs[{request}]: expected a RequestMedia or None, got {type(media).__name__}",
                argument="batch",
            )
    for request, (prefix, extend) in enumerate(zip(batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)):
        if prefix < 0 or extend < 0:
            raise UsageError(
                f"batch: request {request}: expected lengths from 0, got prefix {prefix} and extend {extend}",
                argument="batch",
            )
