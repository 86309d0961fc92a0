"""Counts what the header of an MP4 file makes FFmpeg allocate. Judges nothing else.

FFmpeg makes an entry for each sample that a table claims, copies them for each edit, and keeps something for every track in each
fragment. Tables are searched byte by byte, since FFmpeg reads a corrupted tree too; only media data is left out, where FFmpeg never
looks for tables unless an index sends it there.

Source: ISO/IEC 14496-12, section 8; QuickTime File Format, "Metadata".
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.media.header_budget import MOST_PRODUCT, MOST_TAGS, Budget, refuse
from mm_plugin.media.isobmff import boxes, find_boxes, number

# Each table with a count: where the count stands after the kind, and the bytes of its smallest entry.
_TABLES = {
    b"stts": (8, 8), b"ctts": (8, 8), b"stsc": (8, 12), b"stss": (8, 4), b"stps": (8, 4), b"stco": (8, 4), b"co64": (8, 8),
    b"elst": (8, 12), b"dref": (8, 8), b"keys": (8, 8), b"sbgp": (12, 8), b"saio": (8, 4), b"tfra": (16, 11),
}  # fmt: skip
# What lists the items of images in HEIF, of which no video has any; their counts have other places in each version.
_ITEMS = (b"iinf", b"iloc", b"ipma")
_MOST_ITEMS = 4096
_INDEXED = (b"sidx", b"mfra", b"cmov")  # with these FFmpeg reads where they say
_NOT_AUDIO = {b"vide", b"subp", b"clcp"}
_FEW_EDITS = 4
_MOST_TRACKS = 1000  # FFmpeg's own limit


class _Layout(NamedTuple):
    """Where to look for tables.

    Attributes:
        heads: ranges outside of media data.
        tracks: ranges of the tracks, ascending.
    """

    heads: list[tuple[int, int]]
    tracks: list[tuple[int, int]]


def check_mp4(data: bytes, most_packets: int, budget: Budget) -> None:
    """Refuse a header that promises too much.

    Raises:
        MediaError: it does.
    """
    layout = _layout(data, budget)
    for kind in (*_TABLES, *_ITEMS):
        for at in _found(data, layout, kind, budget):
            _check_table(data, kind, at, budget)
    _check_samples(data, layout, most_packets, budget)
    _check_fragments(data, layout, budget)
    _check_tags(data, layout, budget)
    if any(_found(data, layout, b"cmov", budget)):
        raise MediaError("compressed MP4 headers (cmov) are unsupported", reason="head")


def _layout(data: bytes, budget: Budget) -> _Layout:
    heads: list[tuple[int, int]] = []
    tracks: list[tuple[int, int]] = []
    at = 0
    for kind, start, end in boxes(data, 0, len(data)):
        budget.take()
        if kind == b"mdat":
            heads.append((at, start))
            at = end
        elif kind == b"moov":
            for child, first, last in boxes(data, start, end):
                budget.take()
                if child == b"trak":
                    tracks.append((first, last))
    heads = [*heads, (at, len(data))]
    if any(data.find(kind, start, end) >= 0 for kind in _INDEXED for start, end in heads):
        heads = [(0, len(data))]
    if len(tracks) > _MOST_TRACKS:
        raise refuse("tracks")
    return _Layout(heads, sorted(tracks))


def _found(data: bytes, layout: _Layout, kind: bytes, budget: Budget) -> Iterator[int]:
    for start, end in layout.heads:
        for at in find_boxes(data, kind, start, end):
            budget.take()
            yield at


def _check_table(data: bytes, kind: bytes, at: int, budget: Budget) -> None:
    left = max(len(data) - at, 0)
    if kind in _TABLES:
        place, size = _TABLES[kind]
        budget.hold(number(data, at + place), size, left, "entries")
        return
    version = data[at + 4] if at + 4 < len(data) else 0
    place = 8 if kind != b"iloc" else 10
    wide = version >= 2 if kind == b"iloc" else version >= 1 or kind == b"ipma"
    count = int.from_bytes(data[at + place : at + place + (4 if wide else 2)], "big")
    if count > _MOST_ITEMS:
        raise refuse("items")


# ---------------------------------------------------------------- samples


def _check_samples(data: bytes, layout: _Layout, most_packets: int, budget: Budget) -> None:
    """The samples of all tables, and those of each track once more for every edit."""
    total = sum(number(data, at + 8) for at in _found(data, layout, b"trun", budget))
    samples: dict[int | None, int] = {}
    for kind in (b"stsz", b"stz2"):
        for at in _found(data, layout, kind, budget):
            place = _track_of(layout, at)
            samples[place] = samples.get(place, 0) + number(data, at + 12)
    for place, claimed in samples.items():
        if place is not None and claimed > most_packets // 4:
            joined = _joined(data, layout.tracks[place], most_packets, budget)
            samples[place] = claimed if joined is None else joined
    if total + sum(samples.values()) > most_packets:
        raise refuse("packets")
    edits: dict[int | None, int] = {}
    for at in _found(data, layout, b"elst", budget):
        place = _track_of(layout, at)
        edits[place] = edits.get(place, 0) + number(data, at + 8)
    copies = sum(count * samples.get(place, 0) for place, count in edits.items() if count > _FEW_EDITS)
    if copies > MOST_PRODUCT:
        raise refuse("edited samples")


def _track_of(layout: _Layout, at: int) -> int | None:
    place = bisect.bisect_right(layout.tracks, at, key=lambda track: track[0]) - 1
    return place if place >= 0 and at < layout.tracks[place][1] else None


_ONE = b"\0\0\0\1"


def _joined(data: bytes, track: tuple[int, int], most_packets: int, budget: Budget) -> int | None:
    """Entries that FFmpeg makes for a track of audio samples, which it joins by chunk; None where it makes one for each."""
    alone = _Layout([track], [])
    kinds = {data[at + 12 : at + 16] for at in _found(data, alone, b"hdlr", budget)}
    times = [data[at + 8 : at + 20] for at in _found(data, alone, b"stts", budget)]
    if b"soun" not in kinds or kinds & _NOT_AUDIO or len(times) != 1 or times[0][:4] != _ONE or times[0][8:] != _ONE:
        return None
    chunks = sum(number(data, at + 8) for kind in (b"stco", b"co64") for at in _found(data, alone, kind, budget))
    largest = 0
    for at in _found(data, alone, b"stsc", budget):
        count = min(number(data, at + 8), max(len(data) - at - 12, 0) // 12, most_packets)
        table = np.frombuffer(data, ">u4", offset=at + 12, count=3 * count) if count else np.zeros(0, ">u4")
        largest = max(largest, int(table[1::3].max(initial=0)))
    return chunks * (largest // 160 + 1)  # it joins at least as many


# ---------------------------------------------------------------- fragments and tags


def _check_fragments(data: bytes, layout: _Layout, budget: Budget) -> None:
    """FFmpeg keeps an entry for every track in each fragment that a file has, or that an index names."""
    fragments = sum(1 for _ in _found(data, layout, b"moof", budget))
    for at in _found(data, layout, b"sidx", budget):
        long = 8 if at + 4 < len(data) and data[at + 4] else 0  # version 1 has times and offsets of 64 bits
        count = number(data, at + 24 + long) & 0xFFFF
        budget.hold(count, 12, len(data) - at, "references")
        fragments += count
    fragments += sum(number(data, at + 16) for at in _found(data, layout, b"tfra", budget))
    if fragments * max(len(layout.tracks), 1) > MOST_PRODUCT // 4:
        raise refuse("fragments")


def _check_tags(data: bytes, layout: _Layout, budget: Budget) -> None:
    """Tags are compared with one another, and the header of a key is stored again for each key."""
    tags = sum(1 for _ in _found(data, layout, b"pssh", budget))
    for kind in (b"ilst", b"udta"):
        for at in _found(data, layout, kind, budget):
            end = min(at - 4 + number(data, at - 4), len(data)) if at >= 4 else at
            for _ in boxes(data, at + 4, end):
                budget.take()
                tags += 1
    if tags > MOST_TAGS:
        raise refuse("tags")
