"""The sizes that the images within a file claim, where a decoder would allocate for them before Pillow reports a size.

Reads a few numbers at known places. What it cannot follow is left to the decoders, which refuse it or read nothing from there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mm_plugin.errors import MediaError
from mm_plugin.media.isobmff import boxes

ICO = b"\0\0\1\0"
PNG = b"\x89PNG\r\n\x1a\n"
PNG_HEAD = 33  # bytes of the signature and the first chunk, which says the size
J2K = b"\xff\x4f\xff\x51"  # start of a codestream, and of the segment that says its size
JP2 = b"\0\0\0\x0cjP  "
_MOST_TILES = (
    4096  # the decoder keeps 12 kB for each from the start, measured; 4096 of 256 x 256 are three times the usual limit
)
_SEQUENCE_HEADER = 1
_LONGEST_HEADER = 1024  # bytes; 32 operating points take fewer
# What is followed in one AVIF file; encoders write one piece for each item, and a handful of units.
_MOST_PIECES = 16_384
_MOST_UNITS = 65_536


def inner_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """(height, width), pixels, of every image within an icon, WebP, JPEG 2000 or AVIF file, as each image's own header says.

    Pillow decodes an image of an icon, and makes the canvas of a WebP, as it opens the file; the frames of JPEG 2000 and AVIF have
    sizes of their own, which their decoders allocate whatever the file's header says.

    Raises:
        MediaError: a JPEG 2000 image has so many tiles that those alone would take much memory, or an AVIF file has more pieces
            than are followed.
    """
    try:
        if data[:4] == ICO:
            yield from _icons(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            yield from _webp(data)
        elif data[4:8] == b"ftyp":
            yield from _avif(data)
        elif data[:4] == J2K:
            yield _codestream(data, 0)
        elif data[:8] == JP2:
            for kind, start, _ in boxes(data, 0, len(data)):
                if kind == b"jp2c":
                    yield _codestream(data, start)
    except (struct.error, IndexError, EOFError):
        return  # truncated: there is nothing after it that a decoder could read


def _icons(data: bytes) -> Iterator[tuple[int, int]]:
    for index in range(int.from_bytes(data[4:6], "little")):
        size, offset = struct.unpack_from("<II", data, 14 + 16 * index)
        inside = data[offset : offset + min(size, PNG_HEAD)]
        if inside.startswith(PNG):
            width, height = struct.unpack_from(">II", inside, 16)
        elif len(inside) >= 12 and inside[0] != 12:  # 12 is a header of OS/2, whose sides are small
            width, height = struct.unpack_from("<ii", inside, 4)
            height = abs(height) // 2  # a mask of the same size lies below the colors
        else:
            continue
        yield height, abs(width)


def _webp(data: bytes) -> Iterator[tuple[int, int]]:
    """Sizes of the canvas and of every frame. Source: RFC 9649, sections 2.5 to 2.7."""
    start = 12
    while start + 8 <= len(data):
        kind, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        body = start + 8
        if kind == b"VP8X":
            width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (body + 4, body + 7))
            yield height, width
        elif kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, body + 1)
            yield 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
        elif kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, body + 6)
            yield height & 0x3FFF, width & 0x3FFF
        # A frame of an animation is a header of 16 bytes, then chunks of its own.
        start = body + 16 if kind == b"ANMF" else body + size + size % 2


def _codestream(data: bytes, start: int) -> tuple[int, int]:
    """The size of a JPEG 2000 codestream. Source: ISO/IEC 15444-1, A.5.1."""
    right, bottom, left, top, width, height = struct.unpack_from(">6I", data, start + 8)
    if -(-right // max(1, width)) * -(-bottom // max(1, height)) > _MOST_TILES:
        raise MediaError(f"expected at most {_MOST_TILES} JPEG 2000 tiles, got more", reason="broken")
    return max(0, bottom - top), max(0, right - left)


# ---------------------------------------------------------------- AVIF


def _avif(data: bytes) -> Iterator[tuple[int, int]]:
    """Sizes of every AV1 image that is an item of the file, or the first sample of a track."""
    units = _Budget(_MOST_UNITS)
    for kind, start, end in boxes(data, 0, len(data)):
        if kind == b"meta":
            for item in _items(data, start + 4, end):
                yield from _av1(item, units)
        elif kind == b"moov":
            for sample in _first_samples(data, start, end):
                yield from _av1(sample, units)


class _Budget:
    """How much of a file is still followed; more is refused, since a decoder might continue where this stops."""

    def __init__(self, left: int) -> None:
        self._left = left

    def spend(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left < 0:
            raise MediaError("the AVIF file has too many pieces", reason="broken")


def _items(data: bytes, start: int, end: int) -> Iterator[memoryview]:
    """The data of each item of the file."""
    inside = {kind: (body, stop) for kind, body, stop in boxes(data, start, end)}
    if b"iloc" not in inside:
        return
    whole, pieces, copied = memoryview(data), _Budget(_MOST_PIECES), _Budget(2 * len(data))
    own = inside.get(b"idat", (0, 0))[0]
    for extents in _extents(data, own, *inside[b"iloc"], pieces):
        parts = [whole[offset : offset + length if length else None] for offset, length in extents]
        if len(parts) > 1:
            copied.spend(sum(map(len, parts)))
            parts = [memoryview(b"".join(parts))]
        yield from parts


def _extents(data: bytes, own: int, start: int, end: int, pieces: _Budget) -> Iterator[list[tuple[int, int]]]:
    """(offset, length) of each piece of each item; length 0 is up to the end. Source: ISO/IEC 14496-12, section 8.11.3."""
    reader = _Bits(data[start:end])
    version = reader.take(8)
    reader.take(24)
    offset_bits, length_bits, base_bits, index_bits = (8 * reader.take(4) for _ in range(4))
    wide = 32 if version == 2 else 16
    for _ in range(reader.take(wide)):
        pieces.spend()
        reader.take(wide)
        within = bool(version and reader.take(16) & 15 == 1)
        reader.take(16)
        base = reader.take(base_bits) + (own if within else 0)
        extents = []
        for _ in range(reader.take(16)):
            pieces.spend()
            if version:
                reader.take(index_bits)
            offset, length = base + reader.take(offset_bits), reader.take(length_bits)
            extents.append((offset, length))
        yield extents


def _first_samples(data: bytes, start: int, end: int) -> Iterator[memoryview]:
    """The first sample of each track. Source: ISO/IEC 14496-12, sections 8.7.3 and 8.7.5."""
    inside = list(boxes(data, start, end))
    table = {kind: body for kind, body, _ in inside}
    for kind, body, stop in inside:
        if kind in (b"trak", b"mdia", b"minf", b"stbl"):
            yield from _first_samples(data, body, stop)
        elif kind in (b"stco", b"co64"):
            (offset,) = struct.unpack_from(">I" if kind == b"stco" else ">Q", data, body + 8)
            size, _, first = struct.unpack_from(">3I", data, table[b"stsz"] + 4) if b"stsz" in table else (0, 0, 0)
            yield memoryview(data)[offset : offset + (size or first)]


def _av1(data: memoryview, units: _Budget) -> Iterator[tuple[int, int]]:
    """Sizes of all sequence headers in an AV1 stream; none in other data. Source: AV1 specification, sections 5.3 and 5.5."""
    at = 0
    while at < len(data) and not data[at] & 0x80:
        units.spend()
        kind, extended, sized = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] >> 1 & 1
        at += 1 + extended
        size = len(data) - at
        if sized:
            size, shift = 0, 0
            while shift < 56:
                byte = data[at]
                size |= (byte & 0x7F) << shift
                at, shift = at + 1, shift + 7
                if byte < 0x80:
                    break
        if kind == _SEQUENCE_HEADER:
            yield _sequence_size(_Bits(bytes(data[at : at + min(size, _LONGEST_HEADER)])))
        at += size


def _sequence_size(bits: _Bits) -> tuple[int, int]:
    bits.take(4)  # profile, whether it is a still image
    if bits.take(1):  # a short header
        bits.take(5)
    else:
        delay = 0
        if bits.take(1):  # timing
            bits.take(64)
            if bits.take(1):
                bits.exp_golomb()
            if bits.take(1):  # decoder model
                delay = bits.take(5) + 1
                bits.take(42)
        shown_later = bits.take(1)
        for _ in range(bits.take(5) + 1):  # operating points
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if delay and bits.take(1):
                bits.take(2 * delay + 1)
            if shown_later and bits.take(1):
                bits.take(4)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    width = bits.take(width_bits) + 1
    return bits.take(height_bits) + 1, width


class _Bits:
    """Bits of a header, the most significant first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> int:
        end = self._at + count
        if end > 8 * len(self._data):
            raise EOFError
        first, last = self._at // 8, -(-end // 8)
        word = int.from_bytes(self._data[first:last], "big")
        self._at = end
        return word >> (8 * last - end) & ((1 << count) - 1)

    def exp_golomb(self) -> int:
        zeros = 0
        while zeros < 32 and not self.take(1):
            zeros += 1
        return (1 << zeros) - 1 + self.take(zeros) if zeros < 32 else (1 << 32) - 1
