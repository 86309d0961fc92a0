"""Refuses headers of a few bytes that would make FFmpeg allocate gigabytes or compute for minutes. Judges nothing else.

FFmpeg makes an entry for each sample that a table claims, keeps a structure for each piece of a header, and compares each tag with
all others. Whether a file can be played is left to FFmpeg. Each format has a module (`mp4_headers`, `matroska_headers`,
`riff_headers`, `xiph_headers`); what all share is `header_budget`. Formats with hardly a header (MPEG streams, frames of audio,
FLV, ASF, AU) are bounded by the time that FFmpeg may read: see `media.pyav`.
"""

from __future__ import annotations

from mm_plugin.media.header_budget import MOST_TAGS, Budget, refuse
from mm_plugin.media.matroska_headers import check_matroska
from mm_plugin.media.mp4_headers import check_mp4
from mm_plugin.media.riff_headers import check_avi, without_riff_tags
from mm_plugin.media.xiph_headers import check_flac, check_ogg

# Packets of one file, all streams together; measured: FFmpeg holds up to 100 bytes for each. Two hours at 120 frames per second
# are 864,000.
MOST_PACKETS = 1 << 20
_EBML = b"\x1a\x45\xdf\xa3"
# FFmpeg takes a file for MP4 where one of these names a box near its beginning; others are recognized by their first bytes.
_MP4_BOXES = (
    b"ftyp",
    b"moov",
    b"mdat",
    b"moof",
    b"styp",
    b"sidx",
    b"free",
    b"skip",
    b"wide",
    b"udta",
    b"pnot",
    b"uuid",
    b"junk",
)
_MP4_LOOKED_AT = 1 << 20
_APE = b"APETAGEX"
_APE_FOOTER = 32  # bytes, as many as its header
_ID3V1 = 128  # bytes


def without_tags(data: bytes, budget: Budget | None = None) -> bytes:
    """The file without its ID3 and APE tags and those of RIFF, which FFmpeg reads completely, comparing each tag with all others.

    Args:
        data: the file.
        budget: of its header.

    Raises:
        MediaError: it has more pieces than any video or audio has.
    """
    budget = Budget() if budget is None else budget
    at = 0
    while (end := _id3_end(data, at)) > at:
        budget.take()
        at = end
    data = data[at:] if at else data
    if (
        data[:1] == b"\xff" and data[1:2] and data[1] & 0xF6 == 0xF0
    ):  # frames of AAC, with tags of a broadcast among them
        return _without_inner_tags(data, budget)
    if data.startswith((b"wvpk", b"TTA1")):
        return _without_last_tags(data)
    return without_riff_tags(data, budget)


def _without_last_tags(data: bytes) -> bytes:
    """Without the ID3 tag of version 1 and the APE tag before it. Source: ID3 tag version 1; APE Tags Header, version 2.000."""
    end = len(data)
    if end > _ID3V1 and data.startswith(b"TAG", end - _ID3V1):
        end -= _ID3V1
    footer = data[end - _APE_FOOTER : end]
    if footer.startswith(_APE):
        size, flags = int.from_bytes(footer[12:16], "little"), int.from_bytes(footer[20:24], "little")
        end -= max(size, _APE_FOOTER) + (_APE_FOOTER if flags >> 31 else 0)
    return data[: max(end, len(_APE))] if end < len(data) else data


def _id3_end(data: bytes, at: int) -> int:
    """Where an ID3 tag ends that begins here; here, where none does."""
    if not data.startswith(b"ID3", at) or len(data) < at + 10:
        return at
    size = 0
    for part in data[at + 6 : at + 10]:
        size = size << 7 | part & 0x7F
    return at + 10 + size + (10 if data[at + 5] & 0x10 else 0)


def _without_inner_tags(data: bytes, budget: Budget) -> bytes:
    parts, last, at = [], 0, data.find(b"ID3")
    view = memoryview(data)
    while at >= 0:
        budget.take()
        head = data[at + 3 : at + 10]
        if len(head) == 7 and head[0] in (2, 3, 4) and head[1] != 0xFF and max(head[3:]) < 0x80:
            parts.append(view[last:at])
            last = _id3_end(data, at)
            at = data.find(b"ID3", last)
        else:
            at = data.find(b"ID3", at + 3)
    return b"".join([*parts, view[last:]]) if parts else data


def check_head(data: bytes, most_packets: int = MOST_PACKETS, budget: Budget | None = None) -> None:
    """Refuse a file whose header costs too much.

    Args:
        data: the file, without its tags.
        most_packets: of all its streams together.
        budget: of its header.

    Raises:
        MediaError: the header has more pieces, or promises more packets, tags or entries, than any video or audio has.
    """
    budget = Budget() if budget is None else budget
    if data.startswith(_EBML):
        check_matroska(data, budget)
    elif data.startswith(b"OggS"):
        check_ogg(data, budget)
    elif data.startswith(b"fLaC"):
        check_flac(data, budget)
    elif data.startswith(b"RIFF"):
        check_avi(data, budget)
    elif data.startswith(b"caff"):
        _check_caf(data, most_packets, budget)
    elif data.startswith(b"TTA1"):
        _check_tta(data, most_packets, budget)
    elif any(data.find(kind, 0, _MP4_LOOKED_AT) >= 0 for kind in _MP4_BOXES):
        check_mp4(data, most_packets, budget)


def _check_caf(data: bytes, most_packets: int, budget: Budget) -> None:
    """Source: Apple Core Audio Format Specification 1.0, "Packet Table Chunk" and "Information Chunk"."""
    for kind, most, size, what in ((b"pakt", most_packets, 8, "packets"), (b"info", MOST_TAGS, 4, "tags")):
        at = data.find(kind)
        while at >= 0:
            budget.take()
            if int.from_bytes(data[at + 12 : at + 12 + size], "big") > most and _fits(data, at):
                raise refuse(what)
            at = data.find(kind, at + 4)


def _fits(data: bytes, at: int) -> bool:
    """Whether a chunk may begin here, by its size: 64 bits, -1 where it is unknown."""
    return -1 <= int.from_bytes(data[at + 4 : at + 12], "big", signed=True) <= 1 << 32


def _check_tta(data: bytes, most_packets: int, budget: Budget) -> None:
    """Source: TTA1 format description: frames of 256/245 seconds, with the size of each in a table."""
    rate, samples = (int.from_bytes(data[at : at + 4], "little") for at in (10, 14))
    frames = -(-samples // max(256 * rate // 245, 1))
    budget.hold(frames, 4, len(data), "frames")
    if frames > most_packets:
        raise refuse("packets")
