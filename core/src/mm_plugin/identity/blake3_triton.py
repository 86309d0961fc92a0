"""BLAKE3 of device tensors where they lie, many in a launch, with the same 32 bytes as the CPU library. Needs triton.

One launch hashes every 1,024-byte chunk of every buffer; then one launch for each level of the trees merges neighbors, an odd
last node going up as it is. Any number of buffers takes 1 + ceil(log2(chunks of the longest)) launches, and only the digests come
back to the host.

Source: BLAKE3 specification, version 20211102, sections 2.1 to 2.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

CHUNK = 1024
# Lanes of one program. The interpreter pays by the operation, not by the lane, so it gets one large program.
_BLOCK = 128
_INTERPRETED_BLOCK = 1 << 15


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter, length, flags,
):  # fmt: skip
    """One compression in every lane; all words are uint32. `tl.add` with False is an addition that wraps."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    zero = h0 ^ h0
    v8, v9, v10, v11 = zero | 0x6A09E667, zero | 0xBB67AE85, zero | 0x3C6EF372, zero | 0xA54FF53A
    # A counter of more than 32 bits would be a buffer of four terabytes.
    v12, v13, v14, v15 = counter, zero, length, flags
    for _ in tl.static_range(7):
        v0 = tl.add(tl.add(v0, v4, False), m0, False)
        v12 ^= v0
        v12 = (v12 >> 16) | (v12 << 16)
        v8 = tl.add(v8, v12, False)
        v4 ^= v8
        v4 = (v4 >> 12) | (v4 << 20)
        v0 = tl.add(tl.add(v0, v4, False), m1, False)
        v12 ^= v0
        v12 = (v12 >> 8) | (v12 << 24)
        v8 = tl.add(v8, v12, False)
        v4 ^= v8
        v4 = (v4 >> 7) | (v4 << 25)
        v1 = tl.add(tl.add(v1, v5, False), m2, False)
        v13 ^= v1
        v13 = (v13 >> 16) | (v13 << 16)
        v9 = tl.add(v9, v13, False)
        v5 ^= v9
        v5 = (v5 >> 12) | (v5 << 20)
        v1 = tl.add(tl.add(v1, v5, False), m3, False)
        v13 ^= v1
        v13 = (v13 >> 8) | (v13 << 24)
        v9 = tl.add(v9, v13, False)
        v5 ^= v9
        v5 = (v5 >> 7) | (v5 << 25)
        v2 = tl.add(tl.add(v2, v6, False), m4, False)
        v14 ^= v2
        v14 = (v14 >> 16) | (v14 << 16)
        v10 = tl.add(v10, v14, False)
        v6 ^= v10
        v6 = (v6 >> 12) | (v6 << 20)
        v2 = tl.add(tl.add(v2, v6, False), m5, False)
        v14 ^= v2
        v14 = (v14 >> 8) | (v14 << 24)
        v10 = tl.add(v10, v14, False)
        v6 ^= v10
        v6 = (v6 >> 7) | (v6 << 25)
        v3 = tl.add(tl.add(v3, v7, False), m6, False)
        v15 ^= v3
        v15 = (v15 >> 16) | (v15 << 16)
        v11 = tl.add(v11, v15, False)
        v7 ^= v11
        v7 = (v7 >> 12) | (v7 << 20)
        v3 = tl.add(tl.add(v3, v7, False), m7, False)
        v15 ^= v3
        v15 = (v15 >> 8) | (v15 << 24)
        v11 = tl.add(v11, v15, False)
        v7 ^= v11
        v7 = (v7 >> 7) | (v7 << 25)
        v0 = tl.add(tl.add(v0, v5, False), m8, False)
        v15 ^= v0
        v15 = (v15 >> 16) | (v15 << 16)
        v10 = tl.add(v10, v15, False)
        v5 ^= v10
        v5 = (v5 >> 12) | (v5 << 20)
        v0 = tl.add(tl.add(v0, v5, False), m9, False)
        v15 ^= v0
        v15 = (v15 >> 8) | (v15 << 24)
        v10 = tl.add(v10, v15, False)
        v5 ^= v10
        v5 = (v5 >> 7) | (v5 << 25)
        v1 = tl.add(tl.add(v1, v6, False), m10, False)
        v12 ^= v1
        v12 = (v12 >> 16) | (v12 << 16)
        v11 = tl.add(v11, v12, False)
        v6 ^= v11
        v6 = (v6 >> 12) | (v6 << 20)
        v1 = tl.add(tl.add(v1, v6, False), m11, False)
        v12 ^= v1
        v12 = (v12 >> 8) | (v12 << 24)
        v11 = tl.add(v11, v12, False)
        v6 ^= v11
        v6 = (v6 >> 7) | (v6 << 25)
        v2 = tl.add(tl.add(v2, v7, False), m12, False)
        v13 ^= v2
        v13 = (v13 >> 16) | (v13 << 16)
        v8 = tl.add(v8, v13, False)
        v7 ^= v8
        v7 = (v7 >> 12) | (v7 << 20)
        v2 = tl.add(tl.add(v2, v7, False), m13, False)
        v13 ^= v2
        v13 = (v13 >> 8) | (v13 << 24)
        v8 = tl.add(v8, v13, False)
        v7 ^= v8
        v7 = (v7 >> 7) | (v7 << 25)
        v3 = tl.add(tl.add(v3, v4, False), m14, False)
        v14 ^= v3
        v14 = (v14 >> 16) | (v14 << 16)
        v9 = tl.add(v9, v14, False)
        v4 ^= v9
        v4 = (v4 >> 12) | (v4 << 20)
        v3 = tl.add(tl.add(v3, v4, False), m15, False)
        v14 ^= v3
        v14 = (v14 >> 8) | (v14 << 24)
        v9 = tl.add(v9, v14, False)
        v4 ^= v9
        v4 = (v4 >> 7) | (v4 << 25)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _store(out, at, mask, h0, h1, h2, h3, h4, h5, h6, h7):
    """Eight words of each lane to row `at` of [n, 8]."""
    tl.store(out + at * 8 + 0, h0, mask)
    tl.store(out + at * 8 + 1, h1, mask)
    tl.store(out + at * 8 + 2, h2, mask)
    tl.store(out + at * 8 + 3, h3, mask)
    tl.store(out + at * 8 + 4, h4, mask)
    tl.store(out + at * 8 + 5, h5, mask)
    tl.store(out + at * 8 + 6, h6, mask)
    tl.store(out + at * 8 + 7, h7, mask)


@triton.jit
def _word(address, offset, length, mask, WORDS: tl.constexpr):
    """The little-endian word at `offset` of each lane's bytes; zero past its end."""
    if WORDS:
        pointer = (address + offset).to(tl.pointer_type(tl.uint32))
        word = tl.load(pointer, mask & (offset < length), other=0)
    else:
        pointer = (address + offset).to(tl.pointer_type(tl.uint8))
        word = tl.load(pointer, mask & (offset < length), other=0).to(tl.uint32)
        word |= tl.load(pointer + 1, mask & (offset + 1 < length), other=0).to(tl.uint32) << 8
        word |= tl.load(pointer + 2, mask & (offset + 2 < length), other=0).to(tl.uint32) << 16
        word |= tl.load(pointer + 3, mask & (offset + 3 < length), other=0).to(tl.uint32) << 24
    return word


@triton.jit
def hash_chunks(owner, base, size, first, out, n_chunks, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Chaining values of chunks; the digest itself where a buffer has one chunk.

    Args:
        owner: [n_chunks] int32, the buffer of each chunk.
        base: [n_buffers] int64, address of each buffer.
        size: [n_buffers] int64, its bytes.
        first: [n_buffers] int64, index of its first chunk.
        out: [n_chunks, 8] uint32.
        n_chunks: how many.
        BLOCK: lanes of a program.
        WORDS: whether all addresses and sizes are multiples of 4.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n_chunks
    buffer = tl.load(owner + lane, mask, other=0)
    index = lane.to(tl.int64) - tl.load(first + buffer, mask, other=0)
    total = tl.load(size + buffer, mask, other=0)
    address = tl.load(base + buffer, mask, other=0) + index * 1024
    length = tl.minimum(total - index * 1024, 1024)
    counter = index.to(tl.uint32)
    single = total <= 1024
    zero = counter ^ counter
    h0, h1, h2, h3 = zero | 0x6A09E667, zero | 0xBB67AE85, zero | 0x3C6EF372, zero | 0xA54FF53A
    h4, h5, h6, h7 = zero | 0x510E527F, zero | 0x9B05688C, zero | 0x1F83D9AB, zero | 0x5BE0CD19
    for block in range(16):
        at = block * 64
        # An empty buffer still has one block, of no bytes.
        live = mask & ((at < length) | ((block == 0) & (length == 0)))
        last = at + 64 >= length
        flags = zero | tl.where(last, tl.where(single, 10, 2), 0).to(tl.uint32)
        flags |= tl.where(block == 0, 1, 0).to(tl.uint32)
        used = tl.minimum(tl.maximum(length - at, 0), 64).to(tl.uint32)
        g0, g1, g2, g3, g4, g5, g6, g7 = _compress(
            h0, h1, h2, h3, h4, h5, h6, h7,
            _word(address, at + 0, length, live, WORDS), _word(address, at + 4, length, live, WORDS),
            _word(address, at + 8, length, live, WORDS), _word(address, at + 12, length, live, WORDS),
            _word(address, at + 16, length, live, WORDS), _word(address, at + 20, length, live, WORDS),
            _word(address, at + 24, length, live, WORDS), _word(address, at + 28, length, live, WORDS),
            _word(address, at + 32, length, live, WORDS), _word(address, at + 36, length, live, WORDS),
            _word(address, at + 40, length, live, WORDS), _word(address, at + 44, length, live, WORDS),
            _word(address, at + 48, length, live, WORDS), _word(address, at + 52, length, live, WORDS),
            _word(address, at + 56, length, live, WORDS), _word(address, at + 60, length, live, WORDS),
            counter, used, flags,
        )  # fmt: skip
        h0, h1 = tl.where(live, g0, h0), tl.where(live, g1, h1)
        h2, h3 = tl.where(live, g2, h2), tl.where(live, g3, h3)
        h4, h5 = tl.where(live, g4, h4), tl.where(live, g5, h5)
        h6, h7 = tl.where(live, g6, h6), tl.where(live, g7, h7)
    _store(out, lane, mask, h0, h1, h2, h3, h4, h5, h6, h7)


@triton.jit
def merge_level(nodes, left, right, root, out, n_nodes, BLOCK: tl.constexpr):
    """One level of all trees: node `left` and node `right` make a parent; `right` -1 carries `left` up as it is.

    Args:
        nodes: [n, 8] uint32, the level below.
        left: [n_nodes] int32.
        right: [n_nodes] int32.
        root: [n_nodes] int32, 1 for the last parent of a tree.
        out: [n_nodes, 8] uint32.
        n_nodes: how many.
        BLOCK: lanes of a program.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n_nodes
    a = nodes + tl.load(left + lane, mask, other=0).to(tl.int64) * 8
    partner = tl.load(right + lane, mask, other=-1)
    pair = mask & (partner >= 0)
    b = nodes + tl.maximum(partner, 0).to(tl.int64) * 8
    m0, m1, m2, m3 = tl.load(a, mask), tl.load(a + 1, mask), tl.load(a + 2, mask), tl.load(a + 3, mask)
    m4, m5, m6, m7 = tl.load(a + 4, mask), tl.load(a + 5, mask), tl.load(a + 6, mask), tl.load(a + 7, mask)
    zero = m0 ^ m0
    flags = zero | tl.where(tl.load(root + lane, mask, other=0) > 0, 12, 4).to(tl.uint32)
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        zero | 0x6A09E667, zero | 0xBB67AE85, zero | 0x3C6EF372, zero | 0xA54FF53A,
        zero | 0x510E527F, zero | 0x9B05688C, zero | 0x1F83D9AB, zero | 0x5BE0CD19,
        m0, m1, m2, m3, m4, m5, m6, m7,
        tl.load(b, pair, other=0), tl.load(b + 1, pair, other=0), tl.load(b + 2, pair, other=0),
        tl.load(b + 3, pair, other=0), tl.load(b + 4, pair, other=0), tl.load(b + 5, pair, other=0),
        tl.load(b + 6, pair, other=0), tl.load(b + 7, pair, other=0),
        zero, zero | 64, flags,
    )  # fmt: skip
    _store(
        out, lane, mask,
        tl.where(pair, h0, m0), tl.where(pair, h1, m1), tl.where(pair, h2, m2), tl.where(pair, h3, m3),
        tl.where(pair, h4, m4), tl.where(pair, h5, m5), tl.where(pair, h6, m6), tl.where(pair, h7, m7),
    )  # fmt: skip


def is_interpreted() -> bool:
    """Whether triton runs these kernels on the CPU (`TRITON_INTERPRET=1` when this module was imported)."""
    return not isinstance(hash_chunks, triton.JITFunction)


def digest_buffers(buffers: Sequence[torch.Tensor]) -> list[bytes]:
    """BLAKE3-256 of the raw bytes of tensors on one device, in place.

    Args:
        buffers: contiguous tensors of any dtype and shape, all on one CUDA device (on the CPU where triton is interpreted).

    Returns:
        32 bytes for each.
    """
    if not buffers:
        return []
    device = buffers[0].device
    # Triton launches on the current device, which need not be the one where the buffers lie.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _digest_buffers(buffers, device)


def _digest_buffers(buffers: Sequence[torch.Tensor], device: torch.device) -> list[bytes]:
    sizes = np.array([buffer.numel() * buffer.element_size() for buffer in buffers], dtype=np.int64)
    addresses = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.int64)
    counts = np.maximum(1, -(-sizes // CHUNK))  # an empty buffer has one chunk of no bytes
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    words = bool(((addresses | sizes) % 4 == 0).all())
    total = int(counts.sum())
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    nodes = torch.empty((total, 8), dtype=torch.uint32, device=device)
    block = _block(total)
    hash_chunks[(triton.cdiv(total, block),)](
        _send(owner, device), _send(addresses, device), _send(sizes, device), _send(first, device),
        nodes, total, BLOCK=block, WORDS=words,
    )  # fmt: skip
    while int(counts.max()) > 1:
        left, right, root, counts = _level(counts)
        above = torch.empty((len(left), 8), dtype=torch.uint32, device=device)
        block = _block(len(left))
        merge_level[(triton.cdiv(len(left), block),)](
            nodes, _send(left, device), _send(right, device), _send(root, device), above, len(left), BLOCK=block
        )
        nodes = above
    rows = nodes.cpu().numpy().astype("<u4")
    return [row.tobytes() for row in rows]


def _level(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which nodes merge: left, right (-1 for none) and root flag of each parent, and the parents of each tree."""
    parents = (counts + 1) // 2
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    tree = np.repeat(np.arange(len(counts)), parents)
    rank = np.arange(int(parents.sum())) - np.repeat(np.concatenate([[0], np.cumsum(parents)[:-1]]), parents)
    left = start[tree] + 2 * rank
    alone = 2 * rank + 1 >= counts[tree]
    right = np.where(alone, -1, left + 1)
    root = (counts[tree] == 2).astype(np.int32)
    return left.astype(np.int32), right.astype(np.int32), root, parents


def _block(lanes: int) -> int:
    if is_interpreted():
        return min(_INTERPRETED_BLOCK, triton.next_power_of_2(lanes))
    return _BLOCK


def _send(table: np.ndarray, device: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device, non_blocking=True)
