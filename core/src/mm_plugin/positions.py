"""Spans + grids -> position ids (M-RoPE), extended after generation and sliced for chunks. Integers only, no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mm_plugin.errors import SpanError


def mrope_positions(
    spans: Sequence[tuple[int, int]],
    grids: Sequence[tuple[int, int, int]],
    *,
    seq: int,
    times: Sequence[np.ndarray | None] | None = None,
) -> tuple[np.ndarray, int]:
    """Three position ids per token: (t, h, w) inside a vision span, three equal values on text.

    A vision span starts at the next free position; after it, text goes on from the maximum over all three axes plus one.

    Args:
        spans: (start, end) of each vision item, inclusive, in the expanded prompt; in prompt order.
        grids: merged tokens per item along (t, h, w).
        seq: length of the expanded prompt, tokens.
        times: per item None, or its [t] time indices counted from the item's start, in positions; 0, 1, 2, ... where None.

    Shape:
        returns ids [3, seq] int64 on the CPU, and delta, a Python int in positions: what is added to the index of a token
        after the prompt to get its position.

    Raises:
        SpanError: a span's length differs from t * h * w, spans overlap or leave the prompt, or the counts differ.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    if len(spans) != len(grids) or (times is not None and len(times) != len(spans)):
        raise SpanError(f"{len(spans)} spans, {len(grids)} grids")
    ids = np.empty((3, seq), dtype=np.int64)
    cursor, free = 0, 0  # next token to fill, next position to give
    for index, ((start, last), (t, h, w)) in enumerate(zip(spans, grids, strict=True)):
        end = last + 1
        if start < cursor or end > seq:
            raise SpanError(f"span {index} ({start}, {last}) overlaps the one before or leaves the {seq} tokens")
        if min(t, h, w) < 1 or end - start != t * h * w:
            raise SpanError(f"span {index} has {end - start} tokens, its grid {t} x {h} x {w} has {t * h * w}")
        ids[:, cursor:start] = np.arange(free, free + start - cursor, dtype=np.int64)
        free += start - cursor
        steps = np.arange(t, dtype=np.int64) if times is None or times[index] is None else np.asarray(times[index])
        if steps.shape != (t,):
            raise SpanError(f"span {index} has {t} time steps, {steps.size} times were given")
        # A row of `ids` is contiguous, so a slice of it can be filled through a reshaped view.
        ids[0, start:end].reshape(t, h * w)[:] = (free + steps)[:, None]
        ids[1, start:end].reshape(t, h, w)[:] = np.arange(free, free + h, dtype=np.int64)[:, None]
        ids[2, start:end].reshape(t * h, w)[:] = np.arange(free, free + w, dtype=np.int64)
        free += max(int(steps.max()) + 1, h, w)
        cursor = end
    ids[:, cursor:] = np.arange(free, free + seq - cursor, dtype=np.int64)
    free += seq - cursor
    return ids, free - seq


def extend_positions(positions: np.ndarray, delta: int, length: int) -> np.ndarray:
    """The position ids of a prompt and of what was generated after it.

    Generated tokens are text: three equal values, counted on from the maximum over all axes, which is what `delta` says even
    where the prompt ends in a vision span.

    Args:
        positions: [3, seq] int64 of the prompt.
        delta: as `mrope_positions` returned it.
        length: tokens in all, at least seq.

    Shape:
        returns [3, length] int64, a new array.

    Raises:
        SpanError: `length` is shorter than the prompt.
    """
    seq = positions.shape[1]
    if length < seq:
        raise SpanError(f"{length} tokens are fewer than the prompt's {seq}")
    out = np.empty((3, length), dtype=np.int64)
    out[:, :seq] = positions
    out[:, seq:] = np.arange(seq + delta, length + delta, dtype=np.int64)
    return out


def slice_positions(positions: np.ndarray, delta: int, prefix_len: int, extend_len: int) -> np.ndarray:
    """The position ids of one chunk, which may reach past the prompt into generated tokens.

    Args:
        positions: [3, seq] int64 of the prompt.
        delta: as `mrope_positions` returned it.
        prefix_len: tokens before the chunk.
        extend_len: tokens in the chunk.

    Shape:
        returns [3, extend_len] int64, a new array.
    """
    end = prefix_len + extend_len
    seq = positions.shape[1]
    inside = positions[:, prefix_len : min(end, seq)]
    if end <= seq:
        return inside.copy()
    first = max(prefix_len, seq)
    tail = np.broadcast_to(np.arange(first + delta, end + delta, dtype=np.int64), (3, end - first))
    return np.concatenate([inside, tail], axis=1)
