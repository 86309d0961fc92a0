"""What a step returns, and its rows: embeddings copied into the text embeddings by intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.embed.plan import Piece, Place, StepPlan
from mm_plugin.embed.text import indices
from mm_plugin.errors import MMPluginError
from mm_plugin.inputs.encoded import Encoded

if TYPE_CHECKING:
    import torch

    from mm_plugin.inputs.batch import ForwardBatch


class FailedItem(msgspec.Struct, frozen=True, eq=False):
    """An item that could not be embedded: its rows are zeros, and its request should be aborted.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request; None for a request that fails as a whole: its ids or spans cannot be used, or the
            model's own embed routine fails on it although it has no items in the step.
        error: what went wrong.
    """

    request: int
    item: int | None
    error: MMPluginError


class EmbedOutput(msgspec.Struct, frozen=True, eq=False):
    """What a step's language model reads.

    Attributes:
        input_embeds: [total, hidden], of the text embeddings' dtype and device.
        deepstack: None, or (embeddings [n_layers, n_rows, hidden], int64 indices [n_rows] in the flat output), same device.
        failed: items that failed; empty in a good step.
        finite: with `check_finite`, a bool tensor without dimensions on the device, false where an embedding of an item is not
            finite; read it after the step. None without.
        kept: for pruned media, by (request, item), the int64 indices of the rows that were kept, on the device.
        extra: what the model's own embed routine (`ModelSpec.embed`) returned beside `input_embeds`; None without one.

    Example:
        >>> import torch
        >>> from mm_plugin import ForwardBatch, embed_mm_inputs
        >>> output = embed_mm_inputs(torch.tensor([3, 1]), ForwardBatch([None], [0], [2]), torch.nn.Embedding(8, 4), {})
        >>> tuple(output.input_embeds.shape), output.failed, output.extra
        ((2, 4), (), None)
    """

    input_embeds: Any
    deepstack: tuple[Any, Any] | None
    failed: tuple[FailedItem, ...]
    finite: Any = None
    kept: Mapping[Place, Any] = msgspec.field(default_factory=dict)
    extra: Any = None

    @property
    def failed_requests(self) -> frozenset[int]:
        """Indices of the requests that failed: to be aborted, and nothing of this step that is theirs goes into a prefix cache."""
        return frozenset(entry.request for entry in self.failed)


class RoutineOutput(msgspec.Struct, frozen=True, eq=False):
    """What was embedded of a step, by the core or by a model's own routine.

    Attributes:
        input_embeds: [total, hidden].
        extra: what a routine returned beside it.
        is_own: whether a model's own routine made it.
        failed: by request, the fault of a routine on it.
    """

    input_embeds: Any
    extra: Any = None
    is_own: bool = False
    failed: Mapping[int, MMPluginError] = msgspec.field(default_factory=dict)


def replace_rows(out: torch.Tensor, plan: StepPlan, found: Mapping[Place, Encoded]) -> None:
    """Copy each item's embeddings over its rows; zeros over the rows of an item that has none.

    Args:
        out: [total, hidden], changed in place.
        plan: what the step writes.
        found: embeddings by item.
    """
    for piece in plan.pieces:
        encoded = found.get(piece.place)
        if encoded is None:
            out[piece.out_start : piece.out_end].zero_()
        else:
            out[piece.out_start : piece.out_end].copy_(encoded.embeddings[piece.rows_start : piece.rows_end])


def zero_rows(out: torch.Tensor, pieces: Iterable[Piece]) -> None:
    """Write zeros over the rows of these pieces.

    Args:
        out: [total, hidden], changed in place.
        pieces: of the step's plan.
    """
    for piece in pieces:
        out[piece.out_start : piece.out_end].zero_()


def zero_requests(out: torch.Tensor, plan: StepPlan, batch: ForwardBatch) -> None:
    """Write zeros over the rows of requests whose inputs are not what a step can rely on.

    Args:
        out: [total, hidden], changed in place.
        plan: what the step writes.
        batch: what is extended.
    """
    if plan.faults:
        ends = [0, *accumulate(batch.extend_seq_lens)]
        for request in plan.faults:
            out[ends[request] : ends[request + 1]].zero_()


def deepstack_rows(plan: StepPlan, found: Mapping[Place, Encoded], device: Any) -> tuple[Any, Any] | None:
    """The step's deepstack embeddings, and where they belong; None where no item has any.

    Shape:
        returns [n_layers, n_rows, hidden] and int64 [n_rows], on `device`.
    """
    import torch

    stacked, runs = [], []
    for piece in plan.pieces:
        encoded = found.get(piece.place)
        if encoded is not None and encoded.deepstack is not None:
            stacked.append(encoded.deepstack[:, piece.rows_start : piece.rows_end])
            runs.append((piece.out_start, piece.out_end))
    if not stacked:
        return None
    return torch.cat(stacked, dim=1), indices(runs).to(device, non_blocking=True)


def all_finite(tensors: Iterable[torch.Tensor], device: Any) -> torch.Tensor:
    """Whether all values are finite.

    Shape:
        returns a bool tensor without dimensions on `device`, which nothing here waits for.
    """
    import torch

    flags = [torch.isfinite(part).all() for part in {id(part): part for part in tensors}.values()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=device)
