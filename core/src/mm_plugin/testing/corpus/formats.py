"""Files written byte by byte, where the usual libraries cannot write them or would not write them wrong. Reads nothing.

Sources: PNG (Third Edition), GIF89a, TIFF 6.0, Exif 2.3, the headers of Windows bitmaps, icons and RIFF WAVE.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PNG = b"\x89PNG\r\n\x1a\n"
# (first row, first column, row step, column step) of Adam7's passes.
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def noise(size: int, seed: int) -> bytes:
    """Bytes without any order, equal ones each time."""
    return np.random.default_rng(seed).bytes(size)


def chunk(kind: bytes, body: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _packed(rows: np.ndarray, bits: int) -> list[bytes]:
    """Samples [rows, samples] as the bytes of each row, the most significant first."""
    if bits >= 8:
        return [row.tobytes() for row in rows.astype(f">u{bits // 8}")]
    levels = (rows[:, :, None].astype(np.uint8) >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
    return [row.tobytes() for row in np.packbits(levels.reshape(len(rows), -1), axis=1)]


def png(
    levels: np.ndarray,
    *,
    bits: int = 8,
    interlaced: bool = False,
    palette: Sequence[int] = (),
    transparent: bytes = b"",
    early: bytes = b"",
    late: bytes = b"",
    size: tuple[int, int] | None = None,
) -> bytes:
    """A PNG file.

    Args:
        levels: [height, width, channels] of 1 (gray or palette), 2 (gray, alpha), 3 (RGB) or 4 (RGBA) channels.
        bits: of each level.
        interlaced: by Adam7.
        palette: RGB levels one after another.
        transparent: content of a tRNS chunk.
        early: chunks before the pixels.
        late: chunks after the pixels.
        size: (height, width) for the header where that must be wrong.
    """
    height, width, channels = levels.shape
    color = 3 if palette else {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    assert _CHANNELS[color] == channels
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    raw = b""
    for row, column, down, right in passes:
        part = levels[row::down, column::right]
        if part.size:
            raw += b"".join(b"\0" + line for line in _packed(part.reshape(part.shape[0], -1), bits))
    claimed = (height, width) if size is None else size
    head = struct.pack(">2I5B", claimed[1], claimed[0], bits, color, 0, 0, int(interlaced))
    tables = (chunk(b"PLTE", bytes(palette)) if palette else b"") + (
        chunk(b"tRNS", transparent) if transparent else b""
    )
    pixels = chunk(b"IDAT", zlib.compress(raw))
    return PNG + chunk(b"IHDR", head) + tables + early + pixels + late + chunk(b"IEND", b"")


def apng(frames: Sequence[np.ndarray], *, default: np.ndarray | None = None) -> bytes:
    """An animated PNG of RGB frames [height, width, 3]; `default` is shown by viewers that know no animation."""
    height, width, _ = frames[0].shape
    number = 0
    body = chunk(b"acTL", struct.pack(">2I", len(frames), 0))

    def rows(frame: np.ndarray) -> bytes:
        return zlib.compress(b"".join(b"\0" + row.tobytes() for row in frame))

    if default is not None:
        body += chunk(b"IDAT", rows(default))
    for place, frame in enumerate(frames):
        body += chunk(b"fcTL", struct.pack(">5I2H2B", number, width, height, 0, 0, 1, 10, 0, 0))
        number += 1
        if place or default is not None:
            body += chunk(b"fdAT", struct.pack(">I", number) + rows(frame))
            number += 1
        else:
            body += chunk(b"IDAT", rows(frame))
    return PNG + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)) + body + chunk(b"IEND", b"")


def exif(orientation: int, *, order: str = "<", kind: int = 3, thumbnail: int | None = None) -> bytes:
    """An Exif block from its byte order mark on: one field, and a second directory of another orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"

    def directory(value: int, after: int) -> bytes:
        body = struct.pack(f"{order}H", value) if kind == 3 else struct.pack(f"{order}I", value)
        return (
            struct.pack(f"{order}H", 1)
            + struct.pack(f"{order}HHI", 0x0112, kind, 1)
            + body.ljust(4, b"\0")
            + struct.pack(f"{order}I", after)
        )

    first = directory(orientation, 0 if thumbnail is None else 26)
    return mark + struct.pack(f"{order}I", 8) + first + (b"" if thumbnail is None else directory(thumbnail, 0))


def with_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    """A JPEG with one more segment after its start."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + jpeg[2:]


def bmp(
    rows: bytes,
    *,
    height: int,
    width: int,
    bits: int,
    compression: int = 0,
    palette: bytes = b"",
    masks: bytes = b"",
    head: int = 40,
) -> bytes:
    """A Windows bitmap; a negative height stores its rows from the top down."""
    if head == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        entries = len(palette) // 4
        info = struct.pack("<IiiHHIIiiII", head, width, height, 1, bits, compression, len(rows), 0, 0, entries, 0)
        info += masks
        info = info.ljust(max(head, len(info)), b"\0")
    start = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + info + palette + rows


def bmp_rows(pixels: np.ndarray) -> bytes:
    """Rows of a bitmap from the bottom up: [height, width, channels] levels, filled up to whole words."""
    stored = pixels[::-1]
    return b"".join(row.tobytes() + b"\0" * (-row.nbytes % 4) for row in stored)


def icon(images: Sequence[tuple[int, int, bytes]]) -> bytes:
    """An icon file of (width, height, content) as its directory lists them; a content is a PNG or a headless bitmap."""
    head, body = struct.pack("<3H", 0, 1, len(images)), b""
    start = len(head) + 16 * len(images)
    for width, height, content in images:
        place = start + len(body)
        bits = 32 if content.startswith(PNG) else 24
        head += struct.pack("<4B2H2I", width % 256, height % 256, 0, 0, 1, bits, len(content), place)
        body += content
    return head + body


def icon_bitmap(pixels: np.ndarray, mask: np.ndarray) -> bytes:
    """A bitmap as icons hold it: [height, width, 3] RGB as 24 bits, then one bit a pixel [height, width], true is see-through."""
    height, width, _ = pixels.shape
    info = struct.pack("<IiiHHIIiiII", 40, width, 2 * height, 1, 24, 0, 0, 0, 0, 0, 0)
    return info + bmp_rows(pixels[:, :, ::-1]) + bmp_rows(np.packbits(mask, axis=1)[:, :, None])


def gif(
    frames: Sequence[tuple[int, int, np.ndarray]],
    palette: Sequence[int],
    *,
    size: tuple[int, int],
    transparent: int | None = None,
    background: int = 0,
    local: Sequence[int] = (),
    interlaced: bool = False,
    version: bytes = b"89a",
) -> bytes:
    """A GIF of (top, left, indices [height, width] below 128) on a screen of (height, width).

    Pixels are stored uncompressed: with codes of eight bits, cleared before they would grow.
    """
    table = bytes(palette).ljust(3 * 128, b"\0")
    out = b"GIF" + version + struct.pack("<2H3B", size[1], size[0], 0xF6, background, 0) + table
    for top, left, indices in frames:
        if transparent is not None:
            out += b"\x21\xf9\x04" + struct.pack("<BHBB", 9, 10, transparent, 0)  # disposed to the background
        flags = (0x86 if local else 0) | (0x40 if interlaced else 0)
        height, width = indices.shape
        out += b"\x2c" + struct.pack("<4HB", left, top, width, height, flags)
        out += bytes(local).ljust(3 * 128, b"\0") if local else b""
        rows = indices
        if interlaced:
            rows = np.concatenate([indices[0::8], indices[4::8], indices[2::4], indices[1::2]])
        codes = rows.astype(np.uint8).tobytes()
        packed = b"".join(b"\x80" + codes[at : at + 100] for at in range(0, len(codes), 100)) + b"\x81"
        blocks = (packed[at : at + 255] for at in range(0, len(packed), 255))
        out += b"\x07" + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"
    return out + b"\x3b"


def tiff(
    strips: bytes | Sequence[bytes],
    tags: Mapping[int, Any],
    *,
    order: str = "<",
    pages: Sequence[tuple[bytes, Mapping[int, Any]]] = (),
) -> bytes:
    """A TIFF whose first page has these strips (or tiles, where tag 322 is given) and tags; shorts, longs and floats by value."""
    out = bytearray((b"II*\0" if order == "<" else b"MM\0*") + b"\0\0\0\0")
    link = 4
    for content, fields in [(strips, tags), *pages]:
        parts = [content] if isinstance(content, bytes) else list(content)
        places = []
        for part in parts:
            places.append(len(out))
            out += part + b"\0" * (len(part) % 2)
        data, counts = (324, 325) if 322 in fields else (273, 279)
        entries = dict(sorted({**fields, data: places, counts: [len(part) for part in parts]}.items()))
        body, tail = b"", b""
        start = len(out)
        spare = start + 2 + 12 * len(entries) + 4
        for tag, value in entries.items():
            values = list(value) if isinstance(value, list | tuple) else [value]
            kind, code = (4, "I") if tag in (data, counts) or max(values) > 0xFFFF else (3, "H")
            packed = struct.pack(f"{order}{len(values)}{code}", *values)
            if len(packed) > 4:
                packed, tail = struct.pack(f"{order}I", spare + len(tail)), tail + packed
            body += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
        struct.pack_into(f"{order}I", out, link, start)
        out += struct.pack(f"{order}H", len(entries)) + body
        link = len(out)
        out += b"\0\0\0\0" + tail
    return bytes(out)


def box(kind: bytes, *content: bytes) -> bytes:
    """One box of an ISO base media file (MP4, HEIF, AVIF, JP2)."""
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def wav(
    samples: bytes, *, rate: int, channels: int = 1, bits: int = 16, code: int = 1, claimed: int | None = None
) -> bytes:
    """A WAVE file: `code` 1 is integers, 3 floats; `claimed` is a wrong length for its header."""
    step = channels * bits // 8
    head = struct.pack("<HHIIHH", code, channels, rate, (rate * step) & 0xFFFFFFFF, step & 0xFFFF, bits)
    claimed = len(samples) if claimed is None else claimed
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", claimed) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def samples_of(values: np.ndarray, bits: int) -> bytes:
    """Whole numbers [num_samples, channels] as a WAVE file stores them: unsigned up to 8 bits, else little-endian."""
    if bits == 8:
        return (values + 128).astype(np.uint8).tobytes()
    wide = values.astype("<i8")
    return wide.view(np.uint8).reshape(*wide.shape, 8)[..., : bits // 8].tobytes()
