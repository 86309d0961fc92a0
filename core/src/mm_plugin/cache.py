"""Byte-accounted, single-flight, thread-safe stores. Knows no model and no modality; values are opaque, their sizes are told."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec

from mm_plugin.structs import Encoded

logger = logging.getLogger("mm_plugin")


_FIRST_SWEEP = 4_096  # remembered rows before those that are gone are forgotten


class Stats(msgspec.Struct, kw_only=True):
    """What a store and the cache in front of it did so far. All are counts but `bytes`.

    Attributes:
        hits: answers that were there.
        misses: answers that had to be computed.
        joins: callers that waited for another's computation.
        evictions: entries that went to make room.
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


class MemoryStore(Store):
    """Least recently used entries go first; in this process's memory. Final.

    Args:
        capacity_bytes: most bytes that all entries may take together; 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, tuple[Any, int]] = {}  # the oldest first
        self._pins: dict[Hashable, int] = {}
        self._stats = Stats()

    def get(self, key: Hashable) -> Any | None:
        """See `Store.get`."""
        with self._lock:
            # Out and in again makes it the youngest; a plain dict does it twice as fast as an OrderedDict moves it.
            entry = self._entries.pop(key, None)
            if entry is None:
                self._stats.misses += 1
                return None
            self._stats.hits += 1
            self._entries[key] = entry
            return entry[0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> bool:
        """See `Store.put`."""
        with self._lock:
            self._drop(key)
            if num_bytes > self.capacity_bytes or not self._make_room(num_bytes):
                self._stats.rejected += 1
                return False
            self._entries[key] = (value, num_bytes)
            self._stats.bytes += num_bytes
            return True

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the oldest entries that nobody uses; nothing where even that would not do."""
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

    def pin(self, key: Hashable) -> bool:
        """See `Store.pin`."""
        with self._lock:
            if key not in self._entries:
                return False
            self._pins[key] = self._pins.get(key, 0) + 1
            return True

    def unpin(self, key: Hashable) -> None:
        """See `Store.unpin`."""
        with self._lock:
            left = self._pins.pop(key, 0) - 1
            if left > 0:
                self._pins[key] = left

    def delete(self, key: Hashable) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._stats.bytes -= entry[1]

    def clear(self) -> None:
        """See `Store.clear`."""
        with self._lock:
            self._entries.clear()  # pins stay: who took one gives it back, and must not give back another's
            self._stats.bytes = 0

    def stats(self) -> Stats:
        """See `Store.stats`."""
        with self._lock:
            pinned = sum(key in self._entries for key in self._pins)
            return msgspec.structs.replace(self._stats, entries=len(self._entries), pinned=pinned)

    def close(self) -> None:
        """See `Store.close`."""
        self.clear()


class GuardedStore(Store):
    """A plugin's store, of which a fault is a miss: counted, logged once, and no request's problem. Final.

    Args:
        inner: the plugin's.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._errors = 0

    def _ask(self, method: str, otherwise: Any, *arguments: Any) -> Any:
        try:
            return getattr(self._inner, method)(*arguments)
        except (Exception, SystemExit) as error:
            with self._lock:
                self._errors += 1
                first = self._errors == 1
            if first:
                name = type(self._inner).__name__
                logger.warning(
                    "mm-plugin: store %s failed in %s (%s); it is a miss", name, method, type(error).__name__
                )
            return otherwise

    def get(self, key: Hashable) -> Any | None:
        """See `Store.get`."""
        return self._ask("get", None, key)

    def put(self, key: Hashable, value: Any, num_bytes: int) -> bool:
        """See `Store.put`."""
        return bool(self._ask("put", False, key, value, num_bytes))

    def delete(self, key: Hashable) -> None:
        """See `Store.delete`."""
        self._ask("delete", None, key)

    def pin(self, key: Hashable) -> bool:
        """See `Store.pin`."""
        return bool(self._ask("pin", False, key))

    def unpin(self, key: Hashable) -> None:
        """See `Store.unpin`."""
        self._ask("unpin", None, key)

    def clear(self) -> None:
        """See `Store.clear`."""
        self._ask("clear", None)

    def stats(self) -> Stats:
        """See `Store.stats`; with the faults."""
        told = self._ask("stats", None)
        return msgspec.structs.replace(told if isinstance(told, Stats) else Stats(), errors=self._errors)

    def close(self) -> None:
        """See `Store.close`."""
        self._ask("close", None)


def guarded(store: Store) -> Store:
    """The store, with its faults kept from requests unless it is the core's own."""
    return store if isinstance(store, MemoryStore | GuardedStore) else GuardedStore(store)


class ComputeCache:
    """A store whose missing entries are computed, each once however many ask at the same time. Final.

    A failure is told to all who waited for it, and is not kept.

    Args:
        store: where the values go.
    """

    def __init__(self, store: Store) -> None:
        self.store = guarded(store)
        self._lock = threading.Lock()
        self._flights: dict[Hashable, Future[Any]] = {}
        self._hits = self._misses = self._joins = 0

    def get(self, key: Hashable) -> Any | None:
        """The value if it is there; counted only if it is, since a caller that goes on to compute it is counted then."""
        value = self.store.get(key)
        if value is not None:
            with self._lock:
                self._hits += 1
        return value

    def get_or_compute(
        self, key: Hashable, compute: Callable[[], Any], num_bytes: Callable[[Any], int]
    ) -> tuple[Any, bool]:
        """The value of a key, and whether this caller did not have to compute it.

        Whatever `compute` raises comes through, here and to every caller that waited.

        Args:
            key: names the value.
            compute: makes it; runs in the calling thread.
            num_bytes: its size, bytes.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                if flight is None:
                    value = self.store.get(key)
                    if value is not None:
                        self._hits += 1
                        return value, True
                    self._misses += 1
                    own: Future[Any] = Future()
                    self._flights[key] = own
                    break
                self._joins += 1
            try:
                return flight.result(), True
            except CancelledError:
                continue  # who computed it was interrupted, which is nobody else's concern
        try:
            value = compute()
            self.store.put(key, value, num_bytes(value))
        except BaseException as error:
            self._land(key)
            if isinstance(error, Exception):
                own.set_exception(error)
            else:
                own.cancel()
            raise
        self._land(key)
        own.set_result(value)
        return value, False

    def _land(self, key: Hashable) -> None:
        with self._lock:
            del self._flights[key]

    def stats(self) -> Stats:
        """What the store and its callers did so far."""
        with self._lock:
            return msgspec.structs.replace(self.store.stats(), hits=self._hits, misses=self._misses, joins=self._joins)


class EmbeddingCache:
    """Encoder rows by (identity, tokens, encoder version, dtype). Every hit is checked before it is used. Final.

    Args:
        capacity_bytes: most bytes that all rows may take together.
        store: where they go; a `MemoryStore` of that capacity where None.
    """

    def __init__(self, capacity_bytes: int, *, store: Store | None = None) -> None:
        self.store = MemoryStore(capacity_bytes) if store is None else guarded(store)
        self._own = isinstance(self.store, MemoryStore)
        # Rows that were put and that somebody still holds, though the store may have let them go. Plain references, swept now
        # and then: a WeakValueDictionary takes four times as long to write.
        self._held: dict[Hashable, weakref.ref[Encoded]] = {}
        self._sweep_at = _FIRST_SWEEP
        self._lock = threading.Lock()
        self._mismatches = self._joins = self._rescued = 0

    def get(self, key: Hashable, *, num_tokens: int, hidden: int, dtype: Any, device: Any) -> Encoded | None:
        """Rows that fit, or None. Rows that do not fit what is asked for are dropped, counted, and a miss.

        Args:
            key: names the rows.
            num_tokens: rows that there must be.
            hidden: width that they must have.
            dtype: torch dtype that they must have.
            device: torch device on which they must lie.
        """
        facts = (num_tokens, hidden, dtype, device)
        found = self.store.get(key)
        if found is None:
            return self._remembered(key, facts)
        if type(found) is tuple and found:
            # The core's own store keeps the facts that were read when rows were put: asking a tensor for its shape takes longer
            # than finding it. A plugin's store is not believed: its rows are looked at themselves.
            known = found[1:] if self._own else _facts(found[0])
            if known == facts:
                return found[0]  # type: ignore[no-any-return]
        with self._lock:
            self._mismatches += 1
        self.store.delete(key)
        return None

    def _remembered(self, key: Hashable, facts: tuple[Any, ...]) -> Encoded | None:
        """Rows that the store let go and somebody still holds, if they fit; the store has counted a miss for this hit."""
        reference = self._held.get(key)
        held = None if reference is None else reference()
        if held is None or _facts(held) != facts:
            return None
        with self._lock:
            self._rescued += 1
        return held

    def put(self, key: Hashable, encoded: Encoded) -> bool:
        """Keep rows; False where they are larger than the whole cache."""
        size = encoded.rows.untyped_storage().nbytes()
        for extra in (encoded.deepstack, encoded.kept):
            if extra is not None:
                size += extra.untyped_storage().nbytes()
        self._held[key] = weakref.ref(encoded)
        if len(self._held) > self._sweep_at:
            self._sweep()
        return self.store.put(key, (encoded, *_facts(encoded)), size)

    def _sweep(self) -> None:
        with self._lock:
            self._held = {key: held for key, held in list(self._held.items()) if held() is not None}
            self._sweep_at = 2 * len(self._held) + _FIRST_SWEEP

    def joined(self, count: int) -> None:
        """Count items of one step that share the rows of another."""
        with self._lock:
            self._joins += count

    def invalidate(self) -> None:
        """Drop all rows: the weights changed."""
        self._held.clear()
        self.store.clear()

    def stats(self) -> Stats:
        """What the store and its callers did so far; a mismatch is a miss."""
        told = self.store.stats()
        wrong = self._mismatches - self._rescued  # hits of the store that were none, less misses of it that were hits
        return msgspec.structs.replace(
            told,
            hits=told.hits - wrong,
            misses=told.misses + wrong,
            mismatches=self._mismatches,
            joins=self._joins,
        )


def _facts(encoded: Any) -> tuple[Any, ...]:
    """What rows must fit in: rows, width, dtype, device; nothing where it is no rows."""
    rows = encoded.rows if isinstance(encoded, Encoded) else None
    shape = getattr(rows, "shape", None)
    return () if rows is None or shape is None or len(shape) != 2 else (*shape, rows.dtype, rows.device)
