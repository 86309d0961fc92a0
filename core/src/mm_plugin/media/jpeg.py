"""JPEG files that end without their end marker: decoded where every pixel is there, which every other viewer does too.

Source: ITU-T T.81, annexes B, F and G.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # none of those that stand within the data of a scan
_SCAN, _END, _RESERVED, _RESTART = 0xDA, 0xD9, 0x01, 0xD0
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL, _PROGRESSIVE = (0xC0, 0xC1), 0xC2  # with Huffman codes; data of arithmetic codes may end in implied zeros
_COEFFICIENTS = 64
_MOST_SEGMENTS = 4096  # that are followed; encoders write some dozens
# Bits in place of those that might be missing, from the first ones on unlike each other.
_BITS = tuple(
    bytes(pair * 64) for pair in ((0xB6, 0x4D), (0x29, 0xD2), (0x6C, 0x13), (0xDB, 0x9A), (0x05, 0xF3), (0xF2, 0x60))
)


def load_jpeg(image: Image.Image, data: bytes) -> Image.Image:
    """A JPEG with its pixels loaded: the image itself, or one of the same file with the end marker that it lacks.

    Whether a pixel is missing is seen by what would take its place: if the image is the same whatever bits follow the file, each
    bit that it needs is there.

    Args:
        image: opened from the file.
        data: the file.

    Raises:
        OSError: the file is truncated.
    """
    try:
        image.load()
    except OSError:
        start = _last_scan(data)
        if start is None:
            raise
        data = data.rstrip(b"\xff")  # half of the marker may be there
        whole = _decoded(data)
        if not all(
            np.array_equal(np.asarray(whole), np.asarray(_decoded(data + tail))) for tail in _tails(data, start)
        ):
            raise
        return whole
    return image


def precision_of(data: bytes) -> int | None:
    """Bits of a sample, as the first frame's header says; None where no header is found."""
    for kind, start, end in itertools.islice(segments(data), _MOST_SEGMENTS):
        if kind in _FRAMES and end > start:
            return data[start]
    return None


def _tails(data: bytes, start: int) -> Iterator[bytes]:
    """What might follow the data of the scan that starts there: bits, and after them intervals of bits, if the scan has any."""
    last = max((data.rfind(bytes((0xFF, _RESTART + number)), start), number) for number in range(8))
    expected = last[1] + 1 if last[0] >= 0 else 0
    for bits in _BITS:
        yield bits + b"".join(bytes((0xFF, _RESTART + (expected + step) % 8)) + bits for step in range(8))


def _decoded(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data + b"\xff\xd9"), formats=("JPEG",))
    image.load()
    return image


class _Scan(NamedTuple):
    """What one scan has of its components' coefficients; `low` is the lowest bit."""

    components: bytes
    first: int
    last: int
    low: int


def _last_scan(data: bytes) -> int | None:
    """Where the data of the last scan begins, if no marker follows it and no coefficient is without a scan; None otherwise."""
    frame, scans, begins = None, [], None
    for kind, start, end in itertools.islice(segments(data), _MOST_SEGMENTS):
        if kind in _SEQUENTIAL or kind == _PROGRESSIVE:
            frame = kind, data[start + 6 : end : 3]
        elif kind == _SCAN:
            count = data[start] if start < end else 0
            choice = data[start + 1 + 2 * count : end]
            if len(choice) != 3:
                return None
            scans.append(_Scan(data[start + 1 : start + 1 + 2 * count : 2], choice[0], choice[1], choice[2] & 15))
            begins = end
    if frame is None or begins is None or _MARKER.search(data, begins) is not None or not _covers(*frame, scans):
        return None
    return begins


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, start, end) of the content of each marker segment up to the end marker; stops where the file does."""
    at = 2
    while (found := _MARKER.search(data, at)) is not None:
        kind, start = data[found.end() - 1], found.end() + 2
        if kind == _END:
            yield kind, found.end(), found.end()
        if kind == _END or start > len(data):
            return
        if kind == _RESERVED:
            at = found.end()
            continue
        at = found.end() + int.from_bytes(data[found.end() : start], "big")
        if at < start or at > len(data):
            return
        yield kind, start, at


def _covers(kind: int, components: bytes, scans: list[_Scan]) -> bool:
    """Whether the scans have every bit of every coefficient."""
    for component in components:
        mine = [scan for scan in scans if component in scan.components]
        if kind != _PROGRESSIVE:
            if not mine:
                return False
            continue
        lowest = [15] * _COEFFICIENTS
        for scan in mine:
            for place in range(scan.first, min(scan.last, _COEFFICIENTS - 1) + 1):
                lowest[place] = scan.low
        if any(lowest):
            return False
    return bool(components)
