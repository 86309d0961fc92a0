"""How many pieces an image file is made of: markers, boxes, chunks, comments. Pillow reads each in Python, and some byte by byte.

A piece costs some microseconds, so a file of nothing but pieces would take minutes; images have a few hundred.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from mm_plugin.errors import MediaError
from mm_plugin.media.isobmff import boxes
from mm_plugin.media.jpeg import segments

MOST_PIECES = 65_536
_MOST_COMMENTS = 1024  # of a text image, which are looked for in every block that is read

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN, _MOST_SCANS = b"\xff\xda", 256
_FILL = b"\xff" * (MOST_PIECES + 1)
_START_OF_SCAN, _END_OF_IMAGE, _WITHOUT_CONTENT = 0xDA, 0xD9, frozenset({0x01, *range(0xD0, 0xD9)})
_TEXT_HEADER = re.compile(rb"P[1-6](?:(?:[ \t-\r]|#[^\r\n]*[\r\n])+\d+){2,3}[ \t-\r]?")
_NESTED = (b"jp2h", b"meta", b"iprp", b"ipco", b"moov", b"trak", b"mdia", b"minf", b"stbl")


def check_pieces(data: bytes) -> None:
    """Refuse an image file of more pieces than images have.

    Raises:
        MediaError: it has more than `MOST_PIECES`, or a JPEG has more scans than encoders write.
    """
    count = next((pieces for matches, pieces in _COUNTED.items() if data.startswith(matches)), None)
    if count is None and data[4:8] in (b"ftyp", b"jP  "):
        count = _boxes
    if count is not None and sum(itertools.islice(count(data), MOST_PIECES + 1)) > MOST_PIECES:
        raise MediaError(f"expected at most {MOST_PIECES} pieces of an image file, got more", reason="broken")


def _jpeg(data: bytes) -> Iterator[int]:
    """Marker segments up to the first scan, and the bytes between them."""
    if _FILL in data or data.count(_SCAN) > _MOST_SCANS:  # perhaps of what follows the image, such as a video
        found = list(itertools.islice(segments(data), MOST_PIECES + 1))
        if len(found) > MOST_PIECES:
            yield len(found)
        end = next((start for kind, start, _ in found if kind == _END_OF_IMAGE), len(data))
        if data.find(_FILL, 0, end) >= 0:  # of what it cannot read to an end, the decoder begins again with every block
            yield len(_FILL)
        if (
            sum(kind == _START_OF_SCAN for kind, _, _ in found) > _MOST_SCANS
        ):  # each is read for every block of the image
            raise MediaError(f"expected at most {_MOST_SCANS} scans of a JPEG, got more", reason="broken")
    at = 2
    while (marker := _MARKER.search(data, at)) is not None:
        yield 1 + marker.start() - at
        kind, at = data[marker.end() - 1], marker.end()
        if kind == _START_OF_SCAN:
            return
        if kind not in _WITHOUT_CONTENT:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    yield len(data) - at


def _png(data: bytes) -> Iterator[int]:
    at = 8
    while at + 12 <= len(data):
        yield 1
        if data[at + 4 : at + 8] == b"IEND":
            return
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _webp(data: bytes) -> Iterator[int]:
    at = 12
    while at + 8 <= len(data):
        yield 1
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + (16 if data[at : at + 4] == b"ANMF" else size + size % 2)


def _boxes(data: bytes) -> Iterator[int]:
    """Boxes side by side, and those within the boxes that hold a header."""
    ranges = [(0, len(data))]
    while ranges:
        start, end = ranges.pop()
        for kind, first, last in boxes(data, start, end):
            yield 1
            if kind in _NESTED:
                ranges.append((first + 4 if kind == b"meta" else first, last))


def _text(data: bytes) -> Iterator[int]:
    """Bytes of the header of a PPM, PGM or PBM, and the comments of one that is text as a whole."""
    header = _TEXT_HEADER.match(data[: MOST_PIECES + 1])
    yield len(data) if header is None else header.end()
    if data[1:2] in b"123" and data.count(b"#") > _MOST_COMMENTS:
        yield MOST_PIECES


_COUNTED: Mapping[bytes, Callable[[bytes], Iterator[int]]] = MappingProxyType(
    {
        b"\xff\xd8": _jpeg,
        b"\x89PNG\r\n\x1a\n": _png,
        b"RIFF": _webp,
        **{b"P%d" % kind: _text for kind in range(1, 7)},
    }
)
