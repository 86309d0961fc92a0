"""Text embeddings of one step, looked up without a device sync. Knows no item's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mm_plugin.arrays import is_dense
from mm_plugin.errors import UsageError

if TYPE_CHECKING:
    import torch

    from mm_plugin.embed.plan import StepPlan
    from mm_plugin.inputs.batch import ForwardBatch

# Up to this many runs of text take a lookup each; more are looked up together, unless the runs are so long on average that a lookup
# each saves more, which spares a copy of all rows. Measured on two cores: the costs meet near here.
_FEW_RUNS = 64
_LONG_RUN = 32 << 10  # bytes; on other devices a launch for each run costs more than any copy


def embed_text(
    input_ids: torch.Tensor, plan: StepPlan, embedding: Any, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[total, hidden] with every text run filled; rows of items are left unset.

    Args:
        input_ids: [total] int32 or int64; ids of items are not looked at.
        plan: what the step writes.
        embedding: an `nn.Embedding`, or any callable from ids [n] to [n, hidden].
        out: [at least total, hidden], whose first rows are filled and returned; a new tensor where None.

    Raises:
        UsageError: the embedding returned another number of rows, or `out` does not fit them.
    """
    import torch

    runs = plan.text_runs
    if type(embedding) is torch.nn.Embedding and embedding.max_norm is None and not _is_altered(embedding):
        return _looked_up(input_ids, plan, embedding.weight, out)
    # Any other embedding (scaled, sharded, hooked) is called once, on the text alone.
    text = torch.cat([input_ids[start:end] for start, end in runs]) if runs else input_ids[:0]
    limit = getattr(embedding, "num_embeddings", None)
    rows: torch.Tensor = embedding(text.clamp(0, limit - 1) if isinstance(limit, int) else text)
    if rows.ndim != 2 or rows.shape[0] != text.numel():
        raise UsageError(
            f"input_embedding: expected [{text.numel()}, hidden] for {text.numel()} ids, got {list(rows.shape)}",
            argument="input_embedding",
        )
    out = _rows_of(out, plan.total, rows)
    cursor = 0
    for start, end in runs:
        out[start:end] = rows[cursor : cursor + end - start]
        cursor += end - start
    return out


def _rows_of(out: torch.Tensor | None, total: int, like: torch.Tensor) -> torch.Tensor:
    """The first `total` rows of `out`, or as many new ones, of the width, dtype and device of other rows.

    Raises:
        UsageError: `out` has not so many, or others.
    """
    import torch

    if out is None:
        return like.new_empty((total, like.shape[-1]))
    wanted = f"[at least {total}, {like.shape[-1]}] {like.dtype} on {like.device}"
    if not isinstance(out, torch.Tensor):
        raise UsageError(f"out: expected {wanted}, got {type(out).__name__}", argument="out")
    fits = out.ndim == 2 and len(out) >= total and out.shape[1] == like.shape[-1]
    if not fits or (out.dtype, out.device) != (like.dtype, like.device) or not is_dense(out):
        got = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise UsageError(f"out: expected {wanted}, got {got}", argument="out")
    return out.detach()[:total]


def _looked_up(
    input_ids: torch.Tensor, plan: StepPlan, weight: torch.Tensor, given: torch.Tensor | None
) -> torch.Tensor:
    import torch

    runs = plan.text_runs
    out = _rows_of(given, plan.total, weight)
    if not runs:
        return out
    # Cache ids hold sentinels, and an invalid id must not take the batch down: look up through a clamped copy.
    ids = input_ids.to(weight.device).clamp(0, weight.shape[0] - 1)
    if len(runs) <= _FEW_RUNS or (weight.device.type == "cpu" and _run_bytes(runs, weight) >= _LONG_RUN):
        for start, end in runs:
            torch.index_select(weight, 0, ids[start:end], out=out[start:end])
        return out
    where = indices(runs).to(weight.device, non_blocking=True)
    return out.index_copy_(0, where, weight.index_select(0, ids.index_select(0, where)))


def _run_bytes(runs: Sequence[tuple[int, int]], weight: torch.Tensor) -> float:
    """Bytes of the embeddings of a run of text, on average."""
    return sum(end - start for start, end in runs) * weight.shape[1] * weight.element_size() / len(runs)


def _is_altered(module: torch.nn.Module) -> bool:
    """Whether calling a module does more than its class says: it has hooks, or a `forward` of its own, as offloading sets."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - torch has no public way to ask
    return any(hooks) or "forward" in vars(module)


def indices(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """All integers of half-open intervals.

    Shape:
        returns [n] int64 on the CPU.
    """
    import numpy as np
    import torch

    return torch.from_numpy(np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in runs]))


def model_ids(input_ids: torch.Tensor, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
    """The ids of a step with the model's own ids where items are, whichever view of the ids came.

    Args:
        input_ids: [total] int32 or int64, model ids or cache ids; not changed.
        plan: what the step writes.
        batch: what is extended, with each request's model ids.

    Shape:
        returns [total], a new tensor of the same dtype and device.
    """
    import numpy as np
    import torch

    out = input_ids.clone()
    inputs = batch.inputs()
    starts = [0, *accumulate(batch.extend_seq_lens)]
    found: list[np.ndarray] = []
    for piece in plan.pieces:
        of_request = inputs[piece.request]
        assert of_request is not None  # a piece is of a request that has items
        first = batch.extend_prefix_lens[piece.request] + piece.out_start - starts[piece.request]
        found.append(of_request.input_ids[first : first + piece.out_end - piece.out_start])
    if not found:
        return out
    runs = [(piece.out_start, piece.out_end) for piece in plan.pieces]
    where, ids = indices(runs), torch.from_numpy(np.concatenate(found)).to(out.dtype)
    return out.index_copy_(0, where.to(out.device, non_blocking=True), ids.to(out.device, non_blocking=True))
