"""A byte-accounted store in this process's memory that evicts the least recently used entries first."""

from __future__ import annotations

from typing import Any

import msgspec

from mm_plugin.cache.store import Stats, Store
from mm_plugin.forking import new_lock, on_fork


class MemoryStore(Store):
    """Keeps values as they are, in this process's memory; evicts the least recently used first. Final; thread-safe.

    Args:
        capacity_bytes: most bytes that all entries may take together; 0 keeps nothing.

    Example:
        >>> from mm_plugin.cache import MemoryStore
        >>> store = MemoryStore(10)
        >>> store.put(b"a", "first", 5), store.put(b"b", "second", 5), store.pin(b"a")
        (True, True, True)
        >>> store.put(b"c", "third", 5)  # b goes: a is older, and pinned
        True
        >>> store.get(b"a"), store.get(b"b"), store.get(b"c")
        ('first', None, 'third')
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = new_lock()
        self._entries: dict[bytes, tuple[Any, int]] = {}  # the oldest first
        self._pins: dict[bytes, int] = {}
        self._stats = Stats()
        on_fork(self)

    def after_fork(self) -> None:
        """Keep in a forked child what a thread of its parent may have been changing; whoever pinned is not there."""
        self._pins.clear()
        self._stats.bytes = sum(size for _, size in self._entries.values())

    def get(self, key: bytes) -> Any | None:
        """See `Store.get`."""
        with self._lock:
            # Taking it out and putting it back makes it the youngest, twice as fast as an OrderedDict moves it.
            entry = self._entries.pop(key, None)
            if entry is None:
                self._stats.misses += 1
                return None
            self._stats.hits += 1
            self._entries[key] = entry
            return entry[0]

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """See `Store.put`."""
        with self._lock:
            self._drop(key)
            if num_bytes > self.capacity_bytes or not self._make_space(num_bytes):
                self._stats.rejected += 1
                return False
            self._entries[key] = (value, num_bytes)
            self._stats.bytes += num_bytes
            return True

    def _make_space(self, num_bytes: int) -> bool:
        """Evict the oldest entries that are not pinned; none where even that would not be enough."""
        free = self.capacity_bytes - self._stats.bytes
        if free >= num_bytes:
            return True
        victims = []
        for key, (_, size) in self._entries.items():
            if free >= num_bytes:
                break
            if key not in self._pins:
                victims.append(key)
                free += size
        if free < num_bytes:
            return False
        for key in victims:
            self._drop(key)
            self._stats.evictions += 1
        return True

    def pin(self, key: bytes) -> bool:
        """See `Store.pin`."""
        with self._lock:
            if key not in self._entries:
                return False
            self._pins[key] = self._pins.get(key, 0) + 1
            return True

    def unpin(self, key: bytes) -> None:
        """See `Store.unpin`."""
        with self._lock:
            left = self._pins.pop(key, 0) - 1
            if left > 0:
                self._pins[key] = left

    def delete(self, key: bytes) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._stats.bytes -= entry[1]

    def clear(self) -> None:
        """See `Store.clear`."""
        with self._lock:
            self._entries.clear()  # pins stay: whoever took one will unpin, and must not take back another's
            self._stats.bytes = 0

    def stats(self) -> Stats:
        """See `Store.stats`."""
        with self._lock:
            pinned = sum(key in self._entries for key in self._pins)
            return msgspec.structs.replace(self._stats, entries=len(self._entries), pinned=pinned)

    def close(self) -> None:
        """See `Store.close`."""
        self.clear()
