"""`Store`, where a cache keeps its entries, `ByteStore`, what another machine can keep, and `Stats`. Values are opaque here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Stats(msgspec.Struct, kw_only=True):
    """Counters of a cache or a store since it was made, and what it holds now.

    Attributes:
        hits: lookups that found a value.
        misses: lookups that did not.
        joins: callers that shared another caller's computation instead of starting their own.
        evictions: entries dropped to make room for others.
        rejected: values that were not kept: larger than the store, or than what is not pinned.
        mismatches: entries found under a key that did not fit the lookup; dropped, and counted as misses.
        errors: calls of a plugin's store or codec that failed; a failed lookup is a miss.
        entries: entries held now.
        pinned: entries of them that are pinned now.
        bytes: bytes of all entries now.
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
    """Keeps the entries of a cache, in this process. Abstract: plugins offer their own in the group `mm_plugin.stores`.

    Keys are bytes and name their value: two values of one key are interchangeable. `None` is not a value. All methods may be
    called from any thread and at any time, and no caller holds a lock of a cache meanwhile, so a store may block or call
    back into a cache.

    Example:
        >>> from mm_plugin.cache import Stats, Store
        >>> class DictStore(Store):
        ...     def __init__(self):
        ...         self.entries = {}
        ...     def get(self, key):
        ...         return self.entries.get(key)
        ...     def put(self, key, value, num_bytes):
        ...         self.entries[key] = value
        ...         return True
        ...     def delete(self, key):
        ...         self.entries.pop(key, None)
        ...     def pin(self, key):
        ...         return key in self.entries  # nothing is ever evicted
        ...     def unpin(self, key):
        ...         pass
        ...     def clear(self):
        ...         self.entries.clear()
        ...     def stats(self):
        ...         return Stats(entries=len(self.entries))
        ...     def close(self):
        ...         self.clear()
        >>> store = DictStore()
        >>> store.put(b"key", "value", 5), store.get(b"key"), store.get(b"other")
        (True, 'value', None)
    """

    @abstractmethod
    def get(self, key: bytes) -> Any | None:
        """The value, which becomes the most recently used; None where the key is unknown."""

    def get_many(self, keys: Sequence[bytes]) -> list[Any | None]:
        """The value of each key, None where it is unknown.

        A store that can look up many keys in one round trip overrides this.
        """
        return [self.get(key) for key in keys]

    @abstractmethod
    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """Keep a value in place of an older one of this key; other entries may be evicted. False where it was not kept.

        Args:
            key: names the value.
            value: anything but None.
            num_bytes: memory that the value keeps alive, bytes.
        """

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Drop an entry, if it is there."""

    @abstractmethod
    def pin(self, key: bytes) -> bool:
        """Keep an entry from being evicted until it is unpinned as often as it was pinned. False where it was not pinned.

        A pin saves a second computation; it does not keep a value alive that a caller already has.
        """

    @abstractmethod
    def unpin(self, key: bytes) -> None:
        """Take one pin back."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all entries."""

    @abstractmethod
    def stats(self) -> Stats:
        """A copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the store is not used again."""


class ByteStore(ABC):
    """Keeps bytes outside this process: a server, a disk, memory shared by processes. Abstract: plugins implement it.

    `EncodedStore` makes a `Store` of it. Entries may disappear at any time. All methods may be called from any thread and may
    raise anything: a failed call is counted and logged once, and is a miss.

    Example:
        >>> from mm_plugin.cache import ByteStore
        >>> class DictBytes(ByteStore):
        ...     def __init__(self):
        ...         self.entries = {}
        ...     def get_many(self, keys):
        ...         found = [self.entries.get(key) for key in keys]
        ...         return [None if data is None else memoryview(data) for data in found]
        ...     def put_many(self, entries, ttl):
        ...         self.entries.update((key, b"".join(parts)) for key, parts in entries.items())
        ...     def delete_many(self, keys):
        ...         for key in keys:
        ...             self.entries.pop(key, None)
        ...     def close(self):
        ...         self.entries.clear()
        >>> remote = DictBytes()
        >>> remote.put_many({b"key": [memoryview(b"va"), memoryview(b"lue")]}, ttl=None)
        >>> [None if data is None else bytes(data) for data in remote.get_many([b"key", b"other"])]
        [b'value', None]

        Values go into it through a codec:

        >>> from mm_plugin.cache import EncodedStore
        >>> class Text:
        ...     def encode(self, value):
        ...         return [memoryview(value.encode())]
        ...     def decode(self, data):
        ...         return str(data, "utf-8")
        >>> store = EncodedStore(remote, Text(), namespace=b"text/1/")
        >>> store.put(b"key", "value", 5), store.get(b"key"), bytes(remote.entries[b"text/1/key"])
        (True, 'value', b'value')
    """

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """The bytes of each key in one round trip, None where it is unknown.

        What a memoryview shows does not change as long as the memoryview lives.
        """

    @abstractmethod
    def put_many(self, entries: Mapping[bytes, Sequence[memoryview]], ttl: float | None) -> None:
        """Keep entries in place of older ones of their keys.

        Args:
            entries: for each key the parts of its value, which are written one after another; not used after the call.
            ttl: seconds for which the entries are wanted, or None for as long as there is space.
        """

    @abstractmethod
    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Drop entries, if they are there."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and memory; the store is not used again."""
