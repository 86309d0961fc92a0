"""A fast store in front of a slower one. Knows neither of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mm_plugin.cache.guarded import Faults, guard_store
from mm_plugin.cache.store import Stats, Store
from mm_plugin.foreign import is_interruption
from mm_plugin.forking import new_lock


class TieredStore(Store):
    """A fast store in front of a slower one. Final.

    A lookup asks the first store, then the second, and copies what it finds there into the first. A value is put into both,
    and pinned in the first only. A fault of either is a miss of that store.

    Args:
        first: the fast store, such as a `MemoryStore`.
        second: the slower one, such as an `EncodedStore`.
        num_bytes: the size of a value, bytes: a value found in the second store is put into the first with it.

    Attributes:
        first: the fast store, with counters of its own in `first.stats()`.
        second: the slower one, likewise.

    Example:
        >>> from mm_plugin.cache import MemoryStore, TieredStore
        >>> small, large = MemoryStore(5), MemoryStore(100)
        >>> store = TieredStore(small, large, num_bytes=len)
        >>> store.put(b"a", "first", 5), store.put(b"b", "other", 5)
        (True, True)
        >>> small.get(b"a") is None  # evicted there
        True
        >>> store.get(b"a"), small.get(b"a")
        ('first', 'first')
    """

    def __init__(self, first: Store, second: Store, *, num_bytes: Callable[[Any], int]) -> None:
        self.first, self.second = guard_store(first), guard_store(second)
        self._num_bytes, self._faults = num_bytes, Faults()
        self._lock = new_lock()
        self._hits = self._misses = self._rejected = 0
        self._drops = 0  # deletes and clears: what one of them dropped must not come back into the first store

    def get(self, key: bytes) -> Any | None:
        """See `Store.get`."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[Any | None]:
        """See `Store.get_many`; the second store is asked once, for all that the first does not have."""
        drops = self._drops
        values = self.first.get_many(keys)
        missing = [index for index, value in enumerate(values) if value is None]
        if missing:
            values = list(values)
            for index, value in zip(missing, self.second.get_many([keys[index] for index in missing]), strict=True):
                if value is not None:
                    values[index] = value
                    self._promote(keys[index], value, drops)
        misses = sum(value is None for value in values)
        with self._lock:
            self._hits += len(values) - misses
            self._misses += misses
        return values

    def _promote(self, key: bytes, value: Any, drops: int) -> None:
        try:
            size = self._num_bytes(value)
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self, "num_bytes", error)
            return
        self.first.put(key, value, size)
        if self._drops != drops:  # dropped meanwhile, perhaps before it came into the first store
            self.first.delete(key)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """See `Store.put`; True where either store keeps it."""
        kept = [store.put(key, value, num_bytes) for store in (self.first, self.second)]
        if not any(kept):
            with self._lock:
                self._rejected += 1
        return any(kept)

    def delete(self, key: bytes) -> None:
        """See `Store.delete`; from both."""
        self._note_drop()
        # The slower one first: while an entry is there, a lookup may copy it.
        self.second.delete(key)
        self.first.delete(key)

    def _note_drop(self) -> None:
        with self._lock:
            self._drops += 1

    def pin(self, key: bytes) -> bool:
        """See `Store.pin`; in the first store, so False where only the second has the entry."""
        return self.first.pin(key)

    def unpin(self, key: bytes) -> None:
        """See `Store.unpin`."""
        self.first.unpin(key)

    def clear(self) -> None:
        """See `Store.clear`; both."""
        self._note_drop()
        self.second.clear()
        self.first.clear()

    def stats(self) -> Stats:
        """Lookups that either or neither store answered, errors of both; evictions, entries, pins and bytes of the first."""
        first, second = self.first.stats(), self.second.stats()
        with self._lock:
            return msgspec.structs.replace(
                first,
                hits=self._hits,
                misses=self._misses,
                rejected=self._rejected,
                errors=first.errors + second.errors + self._faults.count,
            )

    def close(self) -> None:
        """See `Store.close`; both."""
        self.first.close()
        self.second.close()
