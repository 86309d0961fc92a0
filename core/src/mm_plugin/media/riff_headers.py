"""Tags taken out of WAV, AVI and W64 files, and what the indexes of an AVI file make FFmpeg allocate. Judges nothing else.

FFmpeg reads every tag, and compares each with all others; nothing here asks for one. A chunk of tags gets the name of a chunk of
filling, so that no byte moves.

Source: Multimedia Programming Interface and Data Specifications 1.0, section 2; OpenDML AVI File Format Extensions 1.02, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mm_plugin.media.header_budget import MOST_PRODUCT, Budget, refuse

_RIFF = (b"RIFF", b"RF64", b"BW64", b"RIFX", b"FORM", b"riff")
# A chunk of tags: its name, and how its content begins.
_TAGS = ((b"ID3 ", b"ID3"), (b"id3 ", b"ID3"), (b"LIST", b"INFO"), (b"list", b"INFO"))
# The list of tags of W64, by its identifier of 16 bytes.
_W64_TAGS = bytes.fromhex("BC945F925A52D21186DC00C04F8EDB8A")
# Within samples, bytes that look like tags are samples, unless there are more of them than chance or a file in a file has.
_MOST_IN_SAMPLES = 1 << 16


def without_riff_tags(data: bytes, budget: Budget) -> bytes:
    """The file with its tags renamed.

    Args:
        data: the file.
        budget: of its header.
    """
    if not data.startswith(_RIFF):
        return data
    if data.startswith(b"riff"):
        return data.replace(_W64_TAGS, b"junk" + _W64_TAGS[4:]) if _W64_TAGS in data else data
    start, end = _samples(data, budget)
    found = list(_tags(data, budget))
    inside = sum(size for at, size in found if start <= at < end)
    renamed = [at for at, _ in found if not start <= at < end or inside > _MOST_IN_SAMPLES]
    if not renamed:
        return data
    parts: list[bytes | memoryview] = []
    view, last = memoryview(data), 0
    for at in sorted(renamed):
        parts += [view[last:at], b"junk"]
        last = at + 4
    return b"".join([*parts, view[last:]])


def _tags(data: bytes, budget: Budget) -> Iterator[tuple[int, int]]:
    """Where a chunk of tags begins, and its bytes."""
    for name, content in _TAGS:
        at = data.find(name)
        while at >= 0:
            budget.take()
            if data.startswith(content, at + 8):
                yield at, int.from_bytes(data[at + 4 : at + 8], "little")
            at = data.find(name, at + 4)


def _samples(data: bytes, budget: Budget) -> tuple[int, int]:
    """The range of the samples of a WAV file, whose length may be unknown: 0, or -1 where another chunk has it."""
    at = 12
    while at + 8 <= len(data) and data.startswith((b"WAVE",), 8):
        budget.take()
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data.startswith(b"data", at):
            return at + 8, len(data) if size in (0, 0xFFFFFFFF) else at + 8 + size
        at += 8 + size + size % 2
    return 0, 0


def check_avi(data: bytes, budget: Budget) -> None:
    """Refuse indexes of indexes that name the same entries again and again.

    Raises:
        MediaError: there are too many entries.
    """
    total, at = 0, data.find(b"indx")
    while at >= 0:
        budget.take()
        total += _entries(data, at + 8, budget)
        if total > MOST_PRODUCT:
            raise refuse("entries")
        at = data.find(b"indx", at + 4)


def _entries(data: bytes, at: int, budget: Budget) -> int:
    """Entries that FFmpeg makes of an index, whose content is at an offset."""
    kind, count = _index(data, at)
    if kind:
        return count
    count = min(count, max(len(data) - at - 24, 0) // 16)
    table = (
        np.frombuffer(data, "<u4", offset=at + 24, count=4 * count).reshape(-1, 4) if count else np.zeros((0, 4), "<u4")
    )
    offsets, times = np.unique(
        table[:, 0].astype(np.uint64) | table[:, 1].astype(np.uint64) << np.uint64(32), return_counts=True
    )
    budget.take(len(offsets))
    total = 0
    for offset, uses in zip(offsets.tolist(), times.tolist(), strict=True):
        inner, entries = _index(data, offset + 8)
        if not inner and entries and offset + 8 < len(data):
            raise refuse("levels of indexes")
        total += entries * uses
    return total


def _index(data: bytes, at: int) -> tuple[int, int]:
    """The kind of an index, 0 for one of indexes, and its entries, of which the file holds eight bytes and more for each."""
    kind = data[at + 3] if at + 3 < len(data) else 1
    return kind, min(int.from_bytes(data[at + 4 : at + 8], "little"), max(len(data) - at, 0) // 8)
