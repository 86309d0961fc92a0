"""The pins that one request holds in a store: taken while it runs, given back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mm_plugin.cache.store import Store
from mm_plugin.forking import new_lock


class Pins:
    """Entries of a store that a request keeps from being evicted. Final; safe to use from several threads.

    A step of the request may still run after the request has ended, after an error or a cancellation; it pins nothing any more.

    Args:
        store: gives the store where the entries are kept; asked only once something is pinned.

    >>> from mm_plugin.cache import MemoryStore
    >>> store = MemoryStore(100)
    >>> store.put(b"key", "value", 10)
    True
    >>> pins = Pins(lambda: store)
    >>> pins.take(b"key")
    >>> store.stats().pinned
    1
    >>> pins.release()
    >>> store.stats().pinned
    0
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._lock = new_lock()
        self._held: list[bytes] = []
        self._released = False

    def take(self, key: bytes) -> None:
        """Pin an entry, if it is there and the request has not ended."""
        if self._is_released() or not self._store().pin(key):
            return
        with self._lock:
            kept = not self._released
            if kept:
                self._held.append(key)
        if not kept:
            self._store().unpin(key)

    def _is_released(self) -> bool:
        with self._lock:
            return self._released

    def give_back(self, keys: Iterable[bytes]) -> None:
        """Unpin entries, each as often as it is named and pinned."""
        for key in keys:
            with self._lock:
                held = key in self._held
                if held:
                    self._held.remove(key)
            if held:
                self._store().unpin(key)

    def release(self) -> None:
        """Unpin everything; from now on nothing is pinned."""
        with self._lock:
            self._released = True
            held, self._held = self._held, []
        for key in held:
            self._store().unpin(key)
