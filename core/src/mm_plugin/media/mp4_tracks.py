"""What an MP4 file says of one track: its orientation and its encryption. Decodes nothing.

Source: ISO/IEC 14496-12, sections 8.2.2, 8.3.2 and 8.12; ISO/IEC 23001-7, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from mm_plugin.media.isobmff import boxes, number

_IDENTITY = b"".join(value.to_bytes(4, "big") for value in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
_MEDIA = (b"mdia", b"minf", b"stbl", b"stsd")
# Schemes of which a reader knows whether each sample is encrypted.
_COMMON = (b"cenc", b"cbc1", b"cens", b"cbcs", b"piff")
_VISUAL_ENTRY = 78  # bytes of a sample entry before its boxes


def is_upright(data: bytes, track: int) -> bool:
    """Whether neither the movie nor this track of it is turned, mirrored or scaled."""
    found = False
    for start, end in _content(data, 0, len(data), b"moov"):
        for kind, first, last in boxes(data, start, end):
            if kind == b"mvhd" and not _has_identity(data, first, last, 36):
                return False
            if kind == b"trak" and (header := _header(data, first, last, track)):
                found = _has_identity(data, *header, 40)
                if not found:
                    return False
    return found


def is_locked(data: bytes, track: int) -> bool:
    """Whether a track is encrypted by a scheme that says so for the whole track."""
    for start, end in _content(data, 0, len(data), b"moov"):
        for first, last in _content(data, start, end, b"trak"):
            if not _header(data, first, last, track):
                continue
            entries = [(first, last)]
            for kind in _MEDIA:
                entries = [inner for at, stop in entries for inner in _content(data, at, stop, kind)]
            if any(_locks(data, at + 8, stop) for at, stop in entries):
                return True
    return False


def has_encrypted_video(data: bytes) -> bool:
    """Whether an image track of the file is declared as encrypted; for a file that cannot be opened."""
    for start, end in _content(data, 0, len(data), b"moov"):
        entries = [(start, end)]
        for kind in (b"trak", *_MEDIA):
            entries = [inner for at, stop in entries for inner in _content(data, at, stop, kind)]
        if any(kind in (b"encv", b"drmi") for at, stop in entries for kind, _, _ in boxes(data, at + 8, stop)):
            return True
    return False


def _locks(data: bytes, start: int, end: int) -> bool:
    for kind, first, last in boxes(data, start, end):
        if kind == b"drmi":
            return True
        if kind == b"encv":
            for at, stop in _content(data, first + _VISUAL_ENTRY, last, b"sinf"):
                schemes = [data[begin + 4 : begin + 8] for begin, _ in _content(data, at, stop, b"schm")]
                if schemes and schemes[0] not in _COMMON:
                    return True
    return False


def _header(data: bytes, start: int, end: int, track: int) -> tuple[int, int] | None:
    """The header of a track, if it is the one with this number."""
    for first, last in _content(data, start, end, b"tkhd"):
        if number(data, first + (20 if data[first : first + 1] == b"\1" else 12)) == track:
            return first, last
    return None


def _has_identity(data: bytes, start: int, end: int, offset: int) -> bool:
    """Whether the matrix at an offset of version 0, which version 1 moves by 12 bytes, leaves everything where it is."""
    at = start + offset + (12 if data[start : start + 1] == b"\1" else 0)
    return at + len(_IDENTITY) <= end and data.startswith(_IDENTITY, at)


def _content(data: bytes, start: int, end: int, kind: bytes) -> Iterator[tuple[int, int]]:
    return ((first, last) for found, first, last in boxes(data, start, end) if found == kind)
