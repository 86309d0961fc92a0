"""Spans + grids -> position ids (M-RoPE), extended after generation and sliced for chunks. Integers only, no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mm_plugin.errors import SpanError

_SPARE = 1 << 16  # positions


def mrope_positions(
    spans: Sequence[tuple[int, int]],
    grids: Sequence[tuple[int, int, int]],
    *,
    seq: int,
    times: Sequence[np.ndarray | None] | None = None,
    pruned: Sequence[bool] | None = None,
) -> tuple[np.ndarray, int]:
    """Three position ids per token: (t, h, w) inside a vision span, three equal values on text.

    A vision span starts at the next free position; after it, text goes on from the maximum over all three axes plus one.

    Args:
        spans: (start, end) of each vision item, inclusive, in the expanded prompt; in prompt order.
        grids: merged tokens per item along (t, h, w).
        seq: length of the expanded prompt, tokens.
        pruned: per item, whether only some of its t * h * w rows were kept. Which, only the device knows: the columns of its span
            hold the position at which it starts, for `mm_plugin.embed.pruning.place_kept_positions` to write over.
        times: per item None, or its [t] time indices counted from the item's start, in positions; 0, 1, 2, ... where None.

    Shape:
        returns ids [3, seq] int64 on the CPU, and delta, a Python int in positions: what is added to the index of a token
        after the prompt to get its position.

    Raises:
        SpanError: a span's length differs from t * h * w, spans overlap or leave the prompt, or the counts differ.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    optional = [part for part in (times, pruned) if part is not None]
    if len(spans) != len(grids) or any(len(part) != len(spans) for part in optional):
        raise SpanError(f"expected one grid for each of {len(spans)} spans, got {len(grids)}")
    cursor = total = 0
    advances = []
    for index, ((start, last), (t, h, w)) in enumerate(zip(spans, grids, strict=True)):
        if start < cursor or last >= seq:
            raise SpanError(f"span {index} ({start}, {last}) overlaps the previous one or exceeds the {seq} tokens")
        tokens, some = last + 1 - start, pruned is not None and pruned[index]
        if min(t, h, w) < 1 or (tokens != t * h * w and not (some and 0 < tokens < t * h * w)):
            raise SpanError(
                f"span {index} must have {t * h * w} tokens for its grid {t} x {h} x {w}, got {last + 1 - start}"
            )
        given = None if times is None else times[index]
        advances.append(max(t, h, w) if given is None else _advance(index, given, (t, h, w)))
        total += start - cursor + advances[-1]
        cursor = last + 1
    total += seq - cursor
    ids = np.empty((3, seq), dtype=np.int64)
    # Every run below is a slice of one range; a video may leave out more positions than such a range should have.
    whole = np.arange(total, dtype=np.int64) if total <= 4 * seq + _SPARE else None

    def steps(first: int, count: int) -> np.ndarray:
        if whole is None:
            return np.arange(first, first + count, dtype=np.int64)
        return whole[first : first + count]

    cursor = free = 0  # next token to fill, next position to give
    for index, ((start, last), (t, h, w)) in enumerate(zip(spans, grids, strict=True)):
        end, text = last + 1, start - cursor
        ids[:, cursor:start] = steps(free, text)
        free += text
        given = None if times is None else times[index]
        if pruned is not None and pruned[index]:
            ids[:, start:end] = free
        else:
            span = ids[:, start:end].reshape(3, t, h, w)
            span[0] = (steps(free, t) if given is None else free + np.asarray(given))[:, None, None]
            span[1] = steps(free, h)[:, None]
            span[2] = steps(free, w)
        free += advances[index]
        cursor = end
    ids[:, cursor:] = steps(free, seq - cursor)
    return ids, total - seq


def _advance(index: int, times: np.ndarray, grid: tuple[int, int, int]) -> int:
    """Positions that a span with times of its own takes: the largest over its axes, plus one."""
    t, h, w = grid
    if np.shape(times) != (t,) or int(np.min(times)) < 0:
        raise SpanError(f"span {index} must have one time of at least 0 for each of {t} steps, got {np.size(times)}")
    return max(int(np.max(times)) + 1, h, w)


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
        raise SpanError(f"expected at least the prompt's {seq} tokens, got {length}")
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
    if prefix_len < 0 or extend_len < 0:
        raise SpanError(f"a chunk from {prefix_len} of {extend_len} tokens")
    end = prefix_len + extend_len
    seq = positions.shape[1]
    inside = positions[:, prefix_len : min(end, seq)]
    if end <= seq:
        return inside.copy()
    first = max(prefix_len, seq)
    tail = np.broadcast_to(np.arange(first + delta, end + delta, dtype=np.int64), (3, end - first))
    return np.concatenate([inside, tail], axis=1)


def batch_positions(
    positions: Sequence[np.ndarray | None],
    deltas: Sequence[int | None],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
) -> np.ndarray:
    """The position ids of one step over many requests, chunk after chunk; a decode step is a chunk of one token.

    Args:
        positions: per request [3, seq] int64, or None for a request without media, whose positions are its indices.
        deltas: per request, as `mrope_positions` returned it; None as above.
        prefix_lens: per request, tokens before the chunk.
        extend_lens: per request, tokens in the chunk.

    Shape:
        returns [3, total] int64.

    Raises:
        SpanError: the lists differ in length.
    """
    if not len(positions) == len(deltas) == len(prefix_lens) == len(extend_lens):
        raise SpanError("expected one table, delta, prefix length and extend length for each request")
    out = np.empty((3, sum(extend_lens)), dtype=np.int64)
    cursor = 0
    for table, delta, prefix, extend in zip(positions, deltas, prefix_lens, extend_lens, strict=True):
        chunk = slice(cursor, cursor + extend)
        if table is None:
            out[:, chunk] = np.arange(prefix, prefix + extend, dtype=np.int64)
        else:
            if delta is None:
                raise SpanError("expected a delta with every table of positions, got None")
            out[:, chunk] = slice_positions(table, delta, prefix, extend)
        cursor += extend
    return out
