"""Pruned video: which rows of an item's embeddings are kept is decided on the device; how many is host arithmetic.

`mm_plugin.transforms.retained_video_tokens` gives the count, which is the item's span, and the rate is a field of the item, so
part of its identity. `mrope_positions(pruned=...)` lays out the prompt; an encoder calls `prune_video` and returns
`Encoded(embeddings, kept=kept)`; `place_kept_positions` completes the positions of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mm_plugin.embed.plan import plan_step
from mm_plugin.errors import SpanError
from mm_plugin.events import DeviceSync, Observers
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.items import MultimodalDataItem


def prune_video(embeddings: torch.Tensor, grid: tuple[int, int, int], total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the rows that differ most from the same place one frame earlier; the first frame is kept first.

    Args:
        embeddings: [t * h * w, hidden], floating point.
        grid: merged tokens along (t, h, w).
        total: rows to keep, from `retained_video_tokens`.

    Shape:
        returns the kept embeddings [total, hidden], and the int64 indices [total] of their rows, ascending; both on the device of
        `embeddings`.

    Raises:
        SpanError: there are fewer rows than `total`, or another number than the grid has.

    Source: Efficient Video Sampling, arXiv:2510.14624.
    """
    t, h, w = grid
    count = embeddings.shape[0]
    if count != t * h * w or not 0 < total <= count:
        raise SpanError(
            f"expected {t * h * w} rows for a {t} x {h} x {w} video, of which {total} are kept; got {count}"
        )
    frames = embeddings.float().reshape(t, h * w, -1)
    similarity = torch.nn.functional.cosine_similarity(frames[1:], frames[:-1], dim=-1)  # [t - 1, h * w]
    # More than any difference of two frames, which is at most 2.
    first = torch.full((1, h * w), 4.0, device=embeddings.device)
    difference = torch.cat([first, 1 - similarity]).flatten()  # [t * h * w]
    order = torch.argsort(difference, descending=True, stable=True)[:total]
    kept = torch.sort(order).values
    return embeddings.index_select(0, kept), kept


def kept_positions(kept: torch.Tensor, grid: tuple[int, int, int], *, first: int) -> torch.Tensor:
    """M-RoPE positions of kept rows, without a read-back.

    Args:
        kept: [n] int64 indices into the t * h * w rows.
        grid: merged tokens along (t, h, w).
        first: the position at which the video begins.

    Shape:
        returns [3, n] int64 on the device of `kept`.
    """
    _, h, w = grid
    frame = torch.div(kept, h * w, rounding_mode="floor")
    inside = kept - frame * (h * w)
    row = torch.div(inside, w, rounding_mode="floor")
    return torch.stack([frame, row, inside - row * w]) + first


def place_kept_positions(
    positions: torch.Tensor,
    batch: ForwardBatch,
    kept: Mapping[tuple[int, int], torch.Tensor],
    grid_of: Callable[[MultimodalDataItem], tuple[int, int, int]],
) -> None:
    """Write the positions of kept rows into those of a step, on the device.

    Args:
        positions: [3, total] int64 of the step, on the device of `kept`; changed in place. The columns of a pruned span hold
            the position at which it starts, as `mrope_positions(pruned=...)` leaves them.
        batch: what the step extends.
        kept: `EmbedOutput.kept`.
        grid_of: merged tokens of an item along (t, h, w).
    """
    inputs = batch.inputs()
    for piece in plan_step(batch).pieces:
        indices, of_request = kept.get(piece.place), inputs[piece.request]
        if indices is not None and of_request is not None:
            grid = grid_of(of_request.mm_items[piece.item])
            columns = slice(piece.out_start, piece.out_end)
            positions[:, columns] += kept_positions(indices[piece.rows_start : piece.rows_end], grid, first=0)


def kept_per_frame(kept: torch.Tensor, grid: tuple[int, int, int], observers: Observers | None = None) -> list[int]:
    """How many rows of each frame were kept, for models that write a timestamp before each frame.

    The one function here that reads back from the device; each read is emitted as an event.

    Args:
        kept: [n] int64 indices into the t * h * w rows.
        grid: merged tokens along (t, h, w).
        observers: hear of the read-back.
    """
    t, h, w = grid
    if observers is not None:
        observers.emit(DeviceSync(what="rows per frame of a pruned video"))
    counts: list[int] = torch.bincount(torch.div(kept, h * w, rounding_mode="floor"), minlength=t).tolist()
    return counts
