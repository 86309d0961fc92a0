"""Counts the tags in the headers of FLAC and Ogg files, which FFmpeg compares with one another. Judges nothing else.

Source: RFC 9639, section 8; RFC 3533, section 6; Vorbis I, section 5; RFC 7845, section 5.2.
"""

from __future__ import annotations

from mm_plugin.errors import MediaError
from mm_plugin.media.header_budget import MOST_TAGS, Budget, refuse

_LONGEST_NAME = 240
# How lists of tags begin that have a mark of their own. A packet that continues in another page has at least 255 bytes in its
# first, so the beginnings of lists are whole.
_COMMENTS = (b"\x03vorbis", b"\x81theora", b"OpusTags")
_FLAC = b"\x7fFLAC"
_OTHER_OGG = (b"Speex   ", b"OVP80", b"CELT    ", b"\x80daala", b"\x01video", b"\x01audio", b"\x01Direct Show")
_PAGE = 27  # bytes of its header, without the table of segments
_CONTINUED = 1  # flag


def check_ogg(data: bytes, budget: Budget) -> None:
    """Refuse lists of tags that cost too much, and codecs that are not opened.

    Raises:
        MediaError: there is one.
    """
    if any(magic in data for magic in _OTHER_OGG):
        raise MediaError("unsupported codec in Ogg; supported are Vorbis, Opus, FLAC and Theora", reason="codec")
    for magic in _COMMENTS:
        at = data.find(magic)
        while at >= 0:
            budget.take()
            check_comments(data, at + len(magic))
            at = data.find(magic, at + 1)
    if _FLAC in data:
        _check_unmarked(data, budget)


def _check_unmarked(data: bytes, budget: Budget) -> None:
    """The lists of FLAC, which have no mark: whatever begins so in a page of its headers is taken for one.

    Headers come before the first page that holds samples, which is the first with a position above 0.
    """
    headers: set[bytes] = set()
    at = data.find(b"OggS")
    while at >= 0:
        budget.take()
        serial, flags = data[at + 14 : at + 18], data[at + 5] if at + 5 < len(data) else 0
        start = at + _PAGE + (data[at + 26] if at + 26 < len(data) else 0)
        packets = _packets(data, at, start)
        if data.startswith(_FLAC, start):
            headers.add(serial)
            packets = packets[1:]
        elif flags & _CONTINUED:
            packets = packets[1:]
        if serial in headers:
            for packet, size in packets:
                budget.take()
                # A tag has four bytes and more.
                if size > 4 * MOST_TAGS and data[packet : packet + 1] in (b"\x04", b"\x84"):
                    check_comments(data, packet + 4)
            if int.from_bytes(data[at + 6 : at + 14], "little", signed=True) > 0:
                headers.discard(serial)
        at = data.find(b"OggS", at + 4)


def _packets(data: bytes, page: int, start: int) -> list[tuple[int, int]]:
    """Where the packets of a page begin, and their bytes; the last may continue in another page, and counts as long then."""
    found: list[tuple[int, int]] = []
    at = begin = start
    sizes = data[page + _PAGE : start]
    for size in sizes:
        at += size
        if size < 255:
            found.append((begin, at - begin))
            begin = at
    if sizes and sizes[-1] == 255:
        found.append((begin, len(data)))
    return found


def check_flac(data: bytes, budget: Budget) -> None:
    """Refuse lists of tags that cost too much.

    Raises:
        MediaError: there is one.
    """
    at, last = 4, False
    while not last and at + 4 <= len(data):
        budget.take()
        last = data[at] >= 0x80
        if data[at] & 0x7F == 4:
            check_comments(data, at + 4)
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "big")


def check_comments(data: bytes, at: int) -> None:
    """Refuse a list of tags that is too long: the name of its writer comes first, then their number.

    Raises:
        MediaError: it is.
    """
    name = int.from_bytes(data[at : at + 4], "little")
    if name > _LONGEST_NAME or int.from_bytes(data[at + 4 + name : at + 8 + name], "little") > MOST_TAGS:
        raise refuse("tags")
