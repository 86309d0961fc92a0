"""Refuses headers of a few bytes that would make FFmpeg allocate gigabytes or compute for minutes. Judges nothing else.

FFmpeg makes an entry for each sample that a table claims, and compares each tag with all others. Whether a file can be played is
left to FFmpeg.
"""

from __future__ import annotations

import re

from mm_plugin.errors import MediaError
from mm_plugin.media.isobmff import boxes, find_boxes, number
from mm_plugin.media.limits import check_packets
from mm_plugin.settings import Settings

_JOINED = 1 << 18  # samples of audio in a track from which on it is looked up whether FFmpeg joins them
_MOST_TAGS = 4096  # measured: FFmpeg takes 0.1 s for this many, and time grows with the square
# Elements of Matroska that are lists, with the bytes allowed for each: tags and chapters are compared with one another, entries
# of the index are sorted by insertion (measured: 0.4 s for this many), and tracks take a kilobyte each.
_MATROSKA = {
    b"\x12\x54\xc3\x67": 1 << 16,
    b"\x10\x43\xa7\x70": 1 << 16,
    b"\x1c\x53\xbb\x6b": 1 << 19,
    b"\x16\x54\xae\x6b": 1 << 20,
}
_EBML = b"\x1a\x45\xdf\xa3"
# The first child of such an element; without it, image data would be mistaken for one.
_CHILDREN = (b"\x73\x73", b"\x45\xb9", b"\xbb", b"\xae", b"\xec", b"\xbf")
# How lists of tags in Ogg begin. A packet that continues in another page has at least 255 bytes in its first, so these are whole.
_COMMENTS = (b"\x03vorbis", b"\x81theora", b"OpusTags")
_LONGEST_NAME = 240
# Other codecs in Ogg, whose lists of tags have no magic bytes.
_OTHER_OGG = (
    b"\x7fFLAC",
    b"Speex   ",
    b"OVP80",
    b"CELT    ",
    b"\x80daala",
    b"\x01video",
    b"\x01audio",
    b"\x01Direct Show",
)


# A chunk of WAV or AIFF that holds an ID3 tag.
_ID3_CHUNK = re.compile(rb"(?:ID3|id3) (?=....ID3)", re.DOTALL)


def without_tags(data: bytes) -> bytes:
    """The file without its ID3 tags, which FFmpeg reads completely, comparing each tag with all others."""
    at = 0
    while data.startswith(b"ID3", at) and len(data) >= at + 10:
        size = 0
        for part in data[at + 6 : at + 10]:
            size = size << 7 | part & 0x7F
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    data = data[at:] if at else data
    if data.startswith((b"RIFF", b"RF64", b"FORM", b"riff")) and (b"ID3 " in data or b"id3 " in data):
        data = _ID3_CHUNK.sub(b"junk", data)
    return data


def check_head(data: bytes, path: str, settings: Settings) -> None:
    """Refuse a file whose header costs too much.

    Args:
        data: the file.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        LimitError: the header promises more packets than `max_media_packets`.
        MediaError: the header promises more tags or entries than any video or audio has.
    """
    if data.startswith(_EBML):
        _check_matroska(data)
    elif data.startswith(b"OggS"):
        _check_ogg(data)
    elif data.startswith(b"fLaC"):
        _check_flac(data)
    elif b"moov" in data:
        check_packets(path, _mp4_packets(data), settings)


def _refuse(what: str) -> MediaError:
    return MediaError(f"the file's header promises more {what} than any video or audio has", reason="head")


# ---------------------------------------------------------------- MP4


def _mp4_packets(data: bytes) -> int:
    """Count the samples for which FFmpeg makes an entry, in every table of samples.

    Tables are searched byte by byte, since FFmpeg reads a corrupted tree too; only the media data of a file without fragments is
    left out, where FFmpeg never looks for tables.
    """
    heads, tracks = _mp4_heads(data)
    if any(data.find(kind, start, end) >= 0 for kind in (b"moof", b"sidx", b"mfra", b"cmov") for start, end in heads):
        heads = [(0, len(data))]
    total = 0
    for start, end in heads:
        for at in find_boxes(data, b"trun", start, end):
            total += number(data, at + 8)
        for kind in (b"stsz", b"stz2"):
            for at in find_boxes(data, kind, start, end):
                total += _samples(data, number(data, at + 12), next((t for t in tracks if t[0] <= at < t[1]), None))
        if any(find_boxes(data, b"cmov", start, end)):
            raise MediaError("compressed MP4 headers (cmov) are unsupported", reason="head")
    return total


_ONE = b"\0\0\0\1"
_NOT_AUDIO = {b"vide", b"subp", b"clcp"}


def _samples(data: bytes, claimed: int, track: tuple[int, int] | None) -> int:
    """Entries that FFmpeg makes for a table of samples: fewer for audio samples, which it joins by chunk."""
    if track is None or claimed <= _JOINED:
        return claimed
    kinds = {data[at + 12 : at + 16] for at in find_boxes(data, b"hdlr", *track)}
    times = [data[at + 8 : at + 20] for at in find_boxes(data, b"stts", *track)]
    if b"soun" not in kinds or kinds & _NOT_AUDIO or len(times) != 1 or times[0][:4] != _ONE or times[0][8:] != _ONE:
        return claimed
    chunks = sum(number(data, at + 8) for kind in (b"stco", b"co64") for at in find_boxes(data, kind, *track))
    joined = 0
    for at in find_boxes(data, b"stsc", *track):
        count = min(number(data, at + 8), (len(data) - at) // 12)
        joined = max([joined, *(number(data, at + 16 + 12 * place) for place in range(count))])
    return chunks * (joined // 160 + 1)  # it joins at least as many


def _mp4_heads(data: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The ranges outside of media data at the top of the tree, and the range of each track."""
    heads: list[tuple[int, int]] = []
    tracks: list[tuple[int, int]] = []
    at = 0
    for kind, start, end in boxes(data, 0, len(data)):
        if kind == b"mdat":
            heads.append((at, start))
            at = end
        elif kind == b"moov":
            tracks += [(first, last) for child, first, last in boxes(data, start, end) if child == b"trak"]
    return [*heads, (at, len(data))], tracks


# ---------------------------------------------------------------- Matroska


def _check_matroska(data: bytes) -> None:
    for kind, most in _MATROSKA.items():
        total, at = 0, data.find(kind)
        while at >= 0:
            size, start = _variable(data, at + len(kind))
            if data.startswith(_CHILDREN, start):
                total += min(size, len(data) - start)
            at = data.find(kind, at + 1)
        if total > most:
            raise _refuse("entries")


def _variable(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    first = data[at] if at < len(data) else 1
    length = 9 - first.bit_length()
    value = int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
    return value, at + length


# ---------------------------------------------------------------- Vorbis comments


def _check_ogg(data: bytes) -> None:
    if any(magic in data for magic in _OTHER_OGG):
        raise MediaError("unsupported codec in Ogg; supported are Vorbis, Opus and Theora", reason="codec")
    for magic in _COMMENTS:
        at = data.find(magic)
        while at >= 0:
            _check_comments(data, at + len(magic))
            at = data.find(magic, at + 1)


def _check_flac(data: bytes) -> None:
    at, last = 4, False
    while not last and at + 4 <= len(data):
        last = data[at] >= 0x80
        if data[at] & 0x7F == 4:
            _check_comments(data, at + 4)
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "big")


def _check_comments(data: bytes, at: int) -> None:
    """A list of tags: the name of its writer, then their number."""
    name = int.from_bytes(data[at : at + 4], "little")
    if name > _LONGEST_NAME or int.from_bytes(data[at + 4 + name : at + 8 + name], "little") > _MOST_TAGS:
        raise _refuse("tags")
