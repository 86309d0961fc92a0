"""`Store`, where a cache keeps its entries, and what it counts. Values are opaque, their sizes are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import msgspec


class Stats(msgspec.Struct, kw_only=True):
    """What a store and the cache in front of it did so far. All are counts but `bytes`.

    Attributes:
        hits: answers that were there.
        misses: answers that had to be computed.
        joins: callers that waited for another's computation.
        evictions: entries that went to make layer.
        rejected: entries larger than the whole store.
        mismatches: entries that did not fit what was asked for, and were dropped.
        errors: faults of a plugin's store.
        entries: entries there are now.
        pinned: entries of them that are in use now.
        bytes: bytes they take now.
    """

    hits: int = 0
    misses: int = 0
    joins: int = 0
    evictions: int = 0
    rejected: int = 0
    mismatches: int = 0
    errors: int = 0
    entries: int = 0
    pinned: int = 0
    bytes: int = 0


class Store(ABC):
    """Where a cache keeps its entries. Abstract: plugins offer others in the group `mm_plugin.stores`.

    All methods may be called from any thread.
    """

    @abstractmethod
    def get(self, key: Hashable) -> Any | None:
        """The value, now the most recently used; None where there is none."""

    @abstractmethod
    def put(self, key: Hashable, value: Any, num_bytes: int) -> bool:
        """Keep a value, in place of an older one of this key; others may go. False where it cannot be kept."""

    @abstractmethod
    def delete(self, key: Hashable) -> None:
        """Drop an entry, if it is there."""

    @abstractmethod
    def pin(self, key: Hashable) -> bool:
        """Keep an entry from being evicted until it is unpinned as often as it was pinned. False where it is not there."""

    @abstractmethod
    def unpin(self, key: Hashable) -> None:
        """Take one pin back."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all entries."""

    @abstractmethod
    def stats(self) -> Stats:
        """A copy of what happened so far."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the store is not used again."""
