"""Boxes of the ISO base media file format: MP4, MOV, AVIF and JPEG 2000 files. Reads sizes and kinds, and judges nothing.

Source: ISO/IEC 14496-12, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

_HEADER = 8  # bytes: size and kind
_LONG_HEADER = 16  # with a size of 64 bits
_SMALLEST = 12  # bytes of a box with anything to read in it
_WORDS = (b"keys",)
_MOST_BRANDS = 1024  # that are looked at; files have a handful


def boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the content of each box side by side, cut at `end`; stops at a size that no reader accepts.

    Args:
        data: the file.
        start: of the first box, bytes.
        end: of what holds the boxes, bytes.
    """
    while start + _HEADER <= end:
        size, kind, header = number(data, start), data[start + 4 : start + 8], _HEADER
        if size == 1 and start + _LONG_HEADER <= end:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), _LONG_HEADER
        elif size == 0:
            size = end - start
        if size < header:
            return
        yield kind, min(start + header, end), min(start + size, end)
        start += size


def find_boxes(data: bytes, kind: bytes, start: int, end: int) -> Iterator[int]:
    """Offsets of a kind's four bytes wherever they may be those of a box, whether or not the tree of boxes is intact.

    Readers cut a box that is larger than what holds it, so its size may be anything. What is left out is a kind that people write
    as a word, in a text.
    """
    at = data.find(kind, start, end)
    while at >= 0:
        size = number(data, at - 4) if at >= 4 else 0
        is_text = (
            size > len(data)
            and kind in _WORDS
            and data[at - 4 : at].isascii()
            and data[at - 4 : at].decode().isprintable()
        )
        if size in (0, 1) or (size >= _SMALLEST and not is_text):
            yield at
        at = data.find(kind, at + 1, end)


def brands_of(data: bytes) -> list[bytes]:
    r"""The brands of a file that begins with an `ftyp` box: the major one, then those that it is compatible with.

    >>> brands_of(b"\0\0\0\x18ftypmif1\0\0\0\0avifmiaf")
    [b'mif1', b'avif', b'miaf']
    """
    for kind, start, end in boxes(data, 0, len(data)):
        if kind == b"ftyp":
            others = data[start + 8 : min(end, start + 8 + 4 * _MOST_BRANDS)]
            return [data[start : start + 4], *(others[at : at + 4] for at in range(0, len(others) - 3, 4))]
        break
    return [b""]


def with_major_brand(data: bytes, brand: bytes) -> bytes:
    """A file that begins with an `ftyp` box, with another brand in front; no box changes its place."""
    _, start, end = next(boxes(data, 0, len(data)))
    major, version, others = data[start : start + 4], data[start + 4 : start + 8], data[start + 8 : end]
    size, header = end.to_bytes(4, "big"), data[4:8]
    rest = data[end:]
    if start == _LONG_HEADER:  # a short header leaves eight bytes for two brands
        return b"".join((size, header, brand, version, major, brand, others, rest))
    # A brand that only the first place had gives way.
    return b"".join((size, header, brand, version, others, rest))


def number(data: bytes, at: int) -> int:
    """The unsigned 32-bit number at an offset, big-endian."""
    return int.from_bytes(data[at : at + 4], "big")
