"""Text embeddings of one step, looked up without a device sync. Knows no item's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import UsageError

if TYPE_CHECKING:
    import torch

    from mm_plugin.embed.plan import StepPlan
    from mm_plugin.inputs.batch import ForwardBatch

# Up to this many runs of text take a lookup each; more are looked up together. Measured on two cores: the costs meet near here.
_FEW_RUNS = 64


def embed_text(input_ids: torch.Tensor, plan: StepPlan, embedding: Any) -> torch.Tensor:
    """A new [total, hidden] with every text run filled; rows of items are left unset.

    Args:
        input_ids: [total] int32 or int64; ids of items are not looked at.
        plan: what the step writes.
        embedding: an `nn.Embedding`, or any callable from ids [n] to [n, hidden].

    Raises:
        UsageError: the embedding returned another number of rows.
    """
    import torch

    runs = plan.text_runs
    if type(embedding) is torch.nn.Embedding and embedding.max_norm is None and not _is_altered(embedding):
        return _looked_up(input_ids, plan, embedding.weight)
    # Any other embedding (scaled, sharded, hooked) is called once, on the text alone.
    text = torch.cat([input_ids[start:end] for start, end in runs]) if runs else input_ids[:0]
    limit = getattr(embedding, "num_embeddings", None)
    rows: torch.Tensor = embedding(text.clamp(0, limit - 1) if isinstance(limit, int) else text)
    if rows.ndim != 2 or rows.shape[0] != text.numel():
        raise UsageError(
            f"input_embedding: expected [{text.numel()}, hidden] for {text.numel()} ids, got {list(rows.shape)}",
            argument="input_embedding",
        )
    out = rows.new_empty((plan.total, rows.shape[-1]))
    cursor = 0
    for start, end in runs:
        out[start:end] = rows[cursor : cursor + end - start]
        cursor += end - start
    return out


def _looked_up(input_ids: torch.Tensor, plan: StepPlan, weight: torch.Tensor) -> torch.Tensor:
    import torch

    runs = plan.text_runs
    out = weight.new_empty((plan.total, weight.shape[1]))
    if not runs:
        return out
    # Cache ids hold sentinels, and an invalid id must not take the batch down: look up through a clamped copy.
    ids = input_ids.to(weight.device).clamp(0, weight.shape[0] - 1)
    if len(runs) <= _FEW_RUNS:
        for start, end in runs:
            torch.index_select(weight, 0, ids[start:end], out=out[start:end])
        return out
    where = indices(runs).to(weight.device, non_blocking=True)
    return out.index_copy_(0, where, weight.index_select(0, ids.index_select(0, where)))


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
