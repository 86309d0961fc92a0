"""TIFF files of any layout, for tests. Source: TIFF 6.0."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SHORT, LONG, RATIONAL = 3, 4, 5
_CODES = {1: "B", 2: "B", SHORT: "H", LONG: "I", RATIONAL: "I", 8: "h", 9: "i", 11: "f", 12: "d"}
Entry = tuple[int, int, Sequence[int]]


def tiff(
    samples: Any,
    *,
    bits: int = 8,
    photometric: int = 1,
    planar: int = 1,
    compression: int = 1,
    predictor: int = 1,
    sample_format: int | None = None,
    extra: Sequence[int] = (),
    little: bool = True,
    palette: Any = None,
    tile: tuple[int, int] | None = None,
    rows: int | None = None,
    fill_order: int = 1,
    tags: Sequence[Entry] = (),
    offset: int = 8,
) -> bytes:
    """A file of one directory, which begins at `offset`: [height, width] or [height, width, samples] whole numbers, packed.

    `compression` is 1 (none), 8 (deflate) or 32773 (PackBits, of literal runs). `tags` are (tag, type, values) beside the
    others, or in their place; a fraction is two values.
    """
    array = np.asarray(samples)
    array = array[:, :, None] if array.ndim == 2 else array
    height, width, count = array.shape
    planes = [array] if planar == 1 else [array[:, :, index : index + 1] for index in range(count)]
    blocks = [
        _compressed(_packed(block, bits, little, predictor), compression, fill_order)
        for plane in planes
        for block in _blocks(plane, tile, rows or height)
    ]
    places: list[Entry]
    if tile is None:
        places = [(273, LONG, [0] * len(blocks)), (278, LONG, [rows or height])]
        places.append((279, LONG, [*map(len, blocks)]))
    else:
        places = [(322, LONG, [tile[1]]), (323, LONG, [tile[0]]), (324, LONG, [0] * len(blocks))]
        places.append((325, LONG, [*map(len, blocks)]))
    entries: list[Entry] = [
        (256, LONG, [width]),
        (257, LONG, [height]),
        (258, SHORT, [bits] * count),
        (259, SHORT, [compression]),
        (262, SHORT, [photometric]),
        (277, SHORT, [count]),
        (284, SHORT, [planar]),
        *places,
    ]
    entries = [entry for entry in entries if entry[0] not in {tag for tag, _, _ in tags}] + [*tags]
    optional: list[tuple[int, Sequence[int] | None]] = [
        (266, [2] if fill_order == 2 else None),
        (317, [predictor] if predictor > 1 else None),
        (320, None if palette is None else [*map(int, np.asarray(palette).T.reshape(-1))]),
        (338, extra or None),
        (339, None if sample_format is None else [sample_format] * count),
    ]
    entries += [(tag, SHORT, values) for tag, values in optional if values is not None]
    return _file(entries, blocks, little, offset)


def _blocks(plane: np.ndarray, tile: tuple[int, int] | None, rows: int) -> list[np.ndarray]:
    height, width, _ = plane.shape
    if tile is None:
        return [plane[top : top + rows] for top in range(0, height, rows)]
    padded = np.pad(plane, ((0, -height % tile[0]), (0, -width % tile[1]), (0, 0)))
    return [
        padded[top : top + tile[0], left : left + tile[1]]
        for top in range(0, height, tile[0])
        for left in range(0, width, tile[1])
    ]


def _packed(block: np.ndarray, bits: int, little: bool, predictor: int) -> bytes:
    values = block.astype(np.int64)
    if predictor == 2:
        values = np.concatenate([values[:, :1], np.diff(values, axis=1)], axis=1)
    values = (values & ((1 << bits) - 1)).reshape(len(values), -1)
    if bits in (8, 16, 32):
        return values.astype(f"{'<' if little else '>'}u{bits // 8}").tobytes()
    single = values[:, :, None] >> np.arange(bits - 1, -1, -1) & 1
    return np.packbits(single.reshape(len(values), -1).astype(np.uint8), axis=1).tobytes()


def _compressed(data: bytes, compression: int, fill_order: int) -> bytes:
    if compression == 8:
        data = zlib.compress(data)
    elif compression == 32773:
        runs = [data[at : at + 128] for at in range(0, len(data), 128)]
        data = b"".join(bytes([len(run) - 1]) + run for run in runs)
    return bytes(int(f"{byte:08b}"[::-1], 2) for byte in data) if fill_order == 2 else data


def _file(entries: list[Entry], blocks: list[bytes], little: bool, offset: int) -> bytes:
    order = "<" if little else ">"
    directory = offset + 2 + 12 * len(entries) + 4
    codes = {tag: f"{order}{len(values)}{_CODES[kind]}" for tag, kind, values in entries}
    places, end = {}, directory
    for tag in sorted(codes):
        size = struct.calcsize(codes[tag])
        if size > 4:
            places[tag] = end
            end += size + size % 2
    starts = []
    for block in blocks:
        starts.append(end)
        end += len(block) + len(block) % 2
    out = bytearray(end)
    out[:8] = (b"II*\0" if little else b"MM\0*") + struct.pack(order + "I", offset)
    struct.pack_into(order + "H", out, offset, len(entries))
    for index, (tag, kind, given) in enumerate(sorted(entries)):
        values = starts if tag in (273, 324) else given
        at = offset + 2 + 12 * index
        struct.pack_into(order + "HHI", out, at, tag, kind, len(values) // (2 if kind == RATIONAL else 1))
        if tag in places:
            struct.pack_into(order + "I", out, at + 8, places[tag])
        struct.pack_into(codes[tag], out, places.get(tag, at + 8), *values)
    for start, block in zip(starts, blocks, strict=True):
        out[start : start + len(block)] = block
    return bytes(out)


def linked(first: bytes, second: bytes, little: bool = True) -> bytes:
    """Two files of one directory each as one of two: the second's directory follows the first's. The second is moved."""
    order = "<" if little else ">"
    (at,) = struct.unpack_from(order + "I", first, 4)
    (count,) = struct.unpack_from(order + "H", first, at)
    head = bytearray(first)
    struct.pack_into(order + "I", head, at + 2 + 12 * count, struct.unpack_from(order + "I", second, 4)[0])
    return bytes(head) + second[len(first) :]
