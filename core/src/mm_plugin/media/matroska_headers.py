"""Counts what the header of a Matroska or WebM file makes FFmpeg allocate. Judges nothing else.

FFmpeg keeps a structure for each element of a list, which may have two bytes in the file: tags, chapters, cues, attachments,
tracks, additions to a block. Lists are searched byte by byte, since FFmpeg looks for the next known element in a corrupted file.

Source: RFC 9559, section 5.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mm_plugin.media.ebml import elements, variable
from mm_plugin.media.header_budget import MOST_TAGS, Budget, refuse


class _List(NamedTuple):
    """A kind of list.

    Attributes:
        kind: its bytes.
        child: an entry's id.
        most_bytes: of all lists of the kind; entries are within one another, or compared with one another (measured: 0.4 s for the
            cues that this admits).
        most: entries of all lists of the kind.
        what: the entries, for messages.
    """

    kind: bytes
    child: int
    most_bytes: int | None
    most: int
    what: str


_LISTS = (
    _List(b"\x12\x54\xc3\x67", 0x7373, 1 << 16, MOST_TAGS, "tags"),
    _List(b"\x10\x43\xa7\x70", 0x45B9, 1 << 16, MOST_TAGS, "chapters"),
    _List(b"\x1c\x53\xbb\x6b", 0xBB, 1 << 19, 1 << 17, "entries"),
    _List(b"\x16\x54\xae\x6b", 0xAE, 1 << 20, 256, "tracks"),
    _List(b"\x19\x41\xa4\x69", 0x61A7, None, 1000, "attachments"),
    _List(b"\x11\x4d\x9b\x74", 0x4DBB, 1 << 16, MOST_TAGS, "entries"),
)
# Additions of a block, whose size takes three bytes or more; shorter lists are of no consequence.
_ADDITIONS = re.compile(rb"\x75\xa1(?=[\x01-\x3f])")
_MOST_ADDITIONS = 1 << 16


def check_matroska(data: bytes, budget: Budget) -> None:
    """Refuse a header that promises too much.

    Raises:
        MediaError: it does.
    """
    for kind in _LISTS:
        total = count = 0
        for start, end in _found(data, kind.kind, budget):
            before = count
            for child, _, _ in elements(data, start, end):
                budget.take()
                count += child == kind.child
            total += end - start if count > before else 0  # without an entry, it is something else that looks so
            if count > kind.most or (kind.most_bytes is not None and total > kind.most_bytes):
                raise refuse(kind.what)
    for found in _ADDITIONS.finditer(data):
        budget.take()
        size, start = variable(data, found.end())
        for count, (child, _, _) in enumerate(elements(data, start, len(data) if size is None else start + size)):
            if child not in (0xA6, 0xEC, 0xBF):
                break
            if count > _MOST_ADDITIONS:
                raise refuse("additions of a block")


def _found(data: bytes, kind: bytes, budget: Budget) -> Iterator[tuple[int, int]]:
    """Where the content of such elements may be."""
    at = data.find(kind)
    while at >= 0:
        budget.take()
        size, start = variable(data, at + len(kind))
        yield start, len(data) if size is None else min(start + size, len(data))
        at = data.find(kind, at + 1)
