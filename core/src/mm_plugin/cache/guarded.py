"""Faults of plugins' stores and codecs: counted, logged once with their owner, and turned into misses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mm_plugin.cache.memory import MemoryStore
from mm_plugin.cache.store import Stats, Store
from mm_plugin.foreign import class_name, is_interruption
from mm_plugin.forking import new_lock

logger = logging.getLogger("mm_plugin")


class Faults:
    """Counts what went wrong in foreign code and logs the first fault with the name of its owner. Final."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Faults so far."""
        return self._count

    def add(self, kind: str, owner: object, method: str, error: BaseException) -> None:
        """Count a fault; the first of all is logged.

        Args:
            kind: `"store"` or `"codec"`.
            owner: the object whose method failed.
            method: its method.
            error: what it raised. Its message is not logged: it may hold data.
        """
        with self._lock:
            self._count += 1
            first = self._count == 1
        if first:
            name, raised = class_name(owner), class_name(error)
            logger.warning(
                "mm-plugin: %s %s failed in %s (%s); counted as a miss and logged once", kind, name, method, raised
            )


class GuardedStore(Store):
    """A plugin's store whose faults are misses: they are counted, logged once, and never reach a request. Final.

    Args:
        inner: the plugin's store.
        is_value: whether a value that the store returned can be used; what cannot is a fault.

    Example:
        >>> from mm_plugin.cache import GuardedStore, MemoryStore
        >>> class Broken(MemoryStore):
        ...     def get(self, key):
        ...         raise OSError("connection lost")
        >>> store = GuardedStore(Broken(100))
        >>> store.get(b"key") is None, store.stats().errors
        (True, 1)
    """

    def __init__(self, inner: Store, is_value: Callable[[Any], bool] | None = None) -> None:
        self._inner, self._is_value = inner, is_value
        self._faults = Faults()

    def _call(self, method: str, otherwise: Any, *arguments: Any) -> Any:
        try:
            return getattr(self._inner, method)(*arguments)
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self._inner, method, error)
            return otherwise

    def get(self, key: bytes) -> Any | None:
        """See `Store.get`."""
        return self._checked("get", self._call("get", None, key))

    def _checked(self, method: str, value: Any) -> Any | None:
        if value is None or self._is_value is None or self._is_value(value):
            return value
        self._faults.add("store", self._inner, method, TypeError("not a value that was put"))
        return None

    def get_many(self, keys: Sequence[bytes]) -> list[Any | None]:
        """See `Store.get_many`."""
        found = self._call("get_many", None, keys)
        if isinstance(found, list) and len(found) == len(keys):
            return [self._checked("get_many", value) for value in found]
        if found is not None:
            self._faults.add("store", self._inner, "get_many", TypeError("not a list with a value for each key"))
        return [None] * len(keys)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """See `Store.put`."""
        return bool(self._call("put", False, key, value, num_bytes))

    def delete(self, key: bytes) -> None:
        """See `Store.delete`."""
        self._call("delete", None, key)

    def pin(self, key: bytes) -> bool:
        """See `Store.pin`."""
        return bool(self._call("pin", False, key))

    def unpin(self, key: bytes) -> None:
        """See `Store.unpin`."""
        self._call("unpin", None, key)

    def clear(self) -> None:
        """See `Store.clear`."""
        self._call("clear", None)

    def stats(self) -> Stats:
        """See `Store.stats`; the faults are added to the store's own `errors`."""
        found = self._call("stats", None)
        stats = found if isinstance(found, Stats) else Stats()
        return msgspec.structs.replace(stats, errors=stats.errors + self._faults.count)

    def close(self) -> None:
        """See `Store.close`."""
        self._call("close", None)


def guard_store(store: Store, is_value: Callable[[Any], bool] | None = None) -> Store:
    """The store in a `GuardedStore`, unless it is the core's own `MemoryStore`, or a guarded one and no value is to be checked."""
    trusted = type(store) is MemoryStore or (isinstance(store, GuardedStore) and is_value is None)
    return store if trusted else GuardedStore(store, is_value)
