"""A store whose missing entries are computed once, however many callers ask at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec

from mm_plugin.cache.guarded import guard_store
from mm_plugin.cache.store import Stats, Store


class ComputeCache:
    """A store whose missing entries are computed, each once however many ask at the same time. Final.

    A failure is told to all who waited for it, and is not kept.

    Args:
        store: where the values go.
    """

    def __init__(self, store: Store) -> None:
        self.store = guard_store(store)
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
