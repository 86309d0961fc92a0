"""Elements of EBML: Matroska and WebM files. Reads ids and sizes, and judges nothing.

Source: RFC 8794, sections 4 to 6.
"""

from __future__ import annotations

from collections.abc import Iterator


def elements(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(id, start, end) of the content of each element side by side, cut at `end`; stops at what cannot be an element.

    Args:
        data: the file.
        start: of the first element, bytes.
        end: of what holds the elements, bytes.
    """
    end = min(end, len(data))
    while start < end:
        length = 9 - data[start].bit_length()
        if length > 4:
            return
        kind = int.from_bytes(data[start : start + length], "big")
        size, content = variable(data, start + length)
        if size is None:
            size = end - content
        if content > end:
            return
        yield kind, content, min(content + size, end)
        start = content + size


def variable(data: bytes, at: int) -> tuple[int | None, int]:
    """A number of variable length, and where it ends; None stands for an unknown size."""
    first = data[at] if at < len(data) else 1
    length = 9 - first.bit_length()
    if length > 8:
        return 0, at + 1
    ones = (1 << 7 * length) - 1
    value = int.from_bytes(data[at : at + length], "big") & ones
    return (None if value == ones else value), at + length
