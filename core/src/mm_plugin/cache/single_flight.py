"""A cache whose missing entries are computed once, however many callers ask for them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec

from mm_plugin.cache.guarded import guard_store
from mm_plugin.cache.store import Stats, Store
from mm_plugin.errors import DeadlineError
from mm_plugin.forking import new_lock, on_fork


class _Flight(Future[Any]):
    """A computation under way, which other callers may wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class ComputeCache:
    """A cache whose missing entries are computed, each once however many callers ask at the same time. Final; thread-safe.

    An error reaches every caller that waited for it, and is not kept. The store is never called while a lock is held.

    Args:
        store: keeps the values.
        is_value: whether a value can be used; what a plugin's store returns in the place of one is a miss.

    Attributes:
        store: the store, guarded if a plugin made it.

    Example:
        >>> from mm_plugin.cache import ComputeCache, MemoryStore
        >>> cache = ComputeCache(MemoryStore(100))
        >>> cache.get_or_compute(b"key", lambda: "value", num_bytes=len)
        ('value', False)
        >>> cache.get_or_compute(b"key", lambda: "never made", num_bytes=len)
        ('value', True)
        >>> cache.get_or_compute_many([b"key", b"other"], lambda indices: [f"value {i}" for i in indices], len)
        [('value', True), ('value 1', False)]
    """

    def __init__(self, store: Store, is_value: Callable[[Any], bool] | None = None) -> None:
        self.store = guard_store(store, is_value)
        self._lock = new_lock()
        self._flights: dict[bytes, _Flight] = {}
        self._hits = self._misses = self._joins = 0
        on_fork(self)

    def after_fork(self) -> None:
        """Forget in a forked child what threads of its parent compute: they never land here."""
        self._flights.clear()

    def get(self, key: bytes) -> Any | None:
        """The value if it is there. Only a hit is counted: a caller that goes on to compute the value is counted then."""
        value = self.store.get(key)
        if value is not None:
            with self._lock:
                self._hits += 1
        return value

    def get_or_compute(
        self, key: bytes, compute: Callable[[], Any], num_bytes: Callable[[Any], int]
    ) -> tuple[Any, bool]:
        """The value of a key, and whether this caller did not have to compute it.

        Whatever `compute` raises comes through, here and to every caller that waited.

        Args:
            key: names the value.
            compute: makes it; runs in the calling thread.
            num_bytes: its size, bytes.
        """
        ((value, cached),) = self.get_or_compute_many([key], lambda _: [compute()], num_bytes)
        if isinstance(value, Exception):
            try:
                raise value
            finally:
                del value  # this frame is in its traceback; a cycle would keep media inputs alive
        return value, cached

    def get_or_compute_many(
        self, keys: Sequence[bytes], compute: Callable[[list[int]], Sequence[Any]], num_bytes: Callable[[Any], int]
    ) -> list[tuple[Any, bool]]:
        """For each key its value, or the `Exception` in its place, and whether this caller did not have to compute it.

        All missing keys that no other caller computes are computed in one call; those of other callers are waited for
        afterwards, so callers with overlapping keys never wait for one another in a circle. A key that fails does so alone.

        Args:
            keys: name the values; one may stand several times.
            compute: given indices of missing keys, makes a value or an `Exception` for each, in this order; runs in the
                calling thread. If it raises, all of these keys fail with that, and it comes through here. It must not ask this
                cache for keys that another caller may be computing.
            num_bytes: the size of a value, bytes.
        """
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        answers: dict[bytes, tuple[Any, bool]] = {}
        pending: Iterable[bytes] = first
        self._count(joins=len(keys) - len(first))
        while pending:
            own, others = self._claim(pending)
            answers |= self._fly(own, lambda missing: compute([first[key] for key in missing]), num_bytes)
            answers |= {key: outcome for key, flight in others.items() if (outcome := _outcome(flight)) is not None}
            # Where the computing caller was interrupted, which concerns nobody else, the key is claimed again.
            pending = [key for key in others if key not in answers]
        try:
            return [(answers[key][0], answers[key][1] or first[key] != index) for index, key in enumerate(keys)]
        finally:
            answers.clear()  # the traceback of an error among them leads to this frame, which must not lead back

    def _claim(self, keys: Iterable[bytes]) -> tuple[dict[bytes, _Flight], dict[bytes, _Flight]]:
        """Flights of keys that are this caller's to compute, and of those that others compute."""
        own: dict[bytes, _Flight] = {}
        others: dict[bytes, _Flight] = {}
        with self._lock:
            for key in keys:
                flight = self._flights.get(key)
                if flight is None:
                    own[key] = self._flights[key] = _Flight()
                elif flight.thread == threading.get_ident():
                    # Further up this very stack, from where a store or a computation came back: waiting would never end.
                    own[key] = _Flight()
                else:
                    others[key] = flight
            self._joins += len(others)
        return own, others

    def _fly(
        self,
        own: dict[bytes, _Flight],
        compute: Callable[[list[bytes]], Sequence[Any]],
        num_bytes: Callable[[Any], int],
    ) -> dict[bytes, tuple[Any, bool]]:
        """Find or compute the values of claimed keys, and pass each on to those who wait for it."""
        if not own:
            return {}
        answers: dict[bytes, tuple[Any, bool]] = {}
        value = made = None
        try:
            keys = list(own)
            for key, value in zip(keys, self.store.get_many(keys), strict=True):
                if value is not None:
                    answers[key] = value, True
                    self._land(key, own.pop(key), value)
            missing = list(own)
            self._count(hits=len(answers), misses=len(missing))
            made = compute(missing) if missing else ()
            if len(made) != len(missing):
                raise ValueError(f"compute: expected a value for each of {len(missing)} keys, got {len(made)}")
            for key, value in zip(missing, made, strict=True):
                answers[key] = self._keep(key, value, num_bytes), False
                self._land(key, own.pop(key), answers[key][0])
        except BaseException as error:
            while own:  # to the end: a flight holds the error, whose traceback holds this frame
                self._land(*own.popitem(), error)
            raise
        try:
            return answers
        finally:
            del answers, made, value  # as above

    def _keep(self, key: bytes, value: Any, num_bytes: Callable[[Any], int]) -> Any:
        """The value, kept by the store, or the exception that stands in its place."""
        if not isinstance(value, Exception):
            try:
                self.store.put(key, value, num_bytes(value))
            except Exception as error:
                return error
        return value

    def _land(self, key: bytes, flight: _Flight, outcome: Any) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
        if isinstance(outcome, DeadlineError):
            flight.cancel()  # the time of one caller: those who wait claim the key again
        elif isinstance(outcome, Exception):
            flight.set_exception(outcome)
        elif isinstance(outcome, BaseException):
            flight.cancel()
        else:
            flight.set_result(outcome)

    def _count(self, *, hits: int = 0, misses: int = 0, joins: int = 0) -> None:
        with self._lock:
            self._hits += hits
            self._misses += misses
            self._joins += joins

    def stats(self) -> Stats:
        """Lookups of this cache, with what its store says of evictions, errors, entries, pins and bytes."""
        stats = self.store.stats()
        with self._lock:
            return msgspec.structs.replace(stats, hits=self._hits, misses=self._misses, joins=self._joins)


def _outcome(flight: _Flight) -> tuple[Any, bool] | None:
    """The value or exception that another caller's flight ends with; None where that caller was interrupted."""
    try:
        error = flight.exception()  # not raised here: it would hold this frame
    except CancelledError:
        return None
    return (flight.result() if error is None else error), True
