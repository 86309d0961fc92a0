"""A plugin's store whose faults are misses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import Any

import msgspec

from mm_plugin.cache.memory import MemoryStore
from mm_plugin.cache.store import Stats, Store

logger = logging.getLogger("mm_plugin")


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


def guard_store(store: Store) -> Store:
    """The store, with its faults kept from requests unless it is the core's own."""
    return store if isinstance(store, MemoryStore | GuardedStore) else GuardedStore(store)
