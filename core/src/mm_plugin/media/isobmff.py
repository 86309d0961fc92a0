"""Boxes of the ISO base media file format: MP4, MOV, AVIF and JPEG 2000 files. Reads sizes and kinds, and judges nothing.

Source: ISO/IEC 14496-12, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

_HEADER = 8  # bytes: size and kind
_LONG_HEADER = 16  # with a size of 64 bits


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
    """Offsets of a kind's four bytes wherever they may be those of a box, whether or not the tree of boxes is intact."""
    at = data.find(kind, start, end)
    while at >= 0:
        size = number(data, at - 4) if at >= 4 else 0
        if size in (0, 1) or 12 <= size <= len(data):
            yield at
        at = data.find(kind, at + 1, end)


def number(data: bytes, at: int) -> int:
    """The unsigned 32-bit number at an offset, big-endian."""
    return int.from_bytes(data[at : at + 4], "big")
