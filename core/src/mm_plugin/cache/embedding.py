"""Encoder output by identity, checked at every hit. Knows no model and no modality."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import msgspec

from mm_plugin.arrays import storage_bytes
from mm_plugin.cache.guarded import guard_store
from mm_plugin.cache.memory import MemoryStore
from mm_plugin.cache.store import Stats, Store
from mm_plugin.inputs.encoded import Encoded

_FIRST_SWEEP = 4_096  # remembered rows before those that are gone are forgotten


class EmbeddingCache:
    """Encoder rows by (identity, tokens, encoder version, dtype). Every hit is checked before it is used. Final.

    Args:
        capacity_bytes: most bytes that all rows may take together.
        store: where they go; a `MemoryStore` of that capacity where None.
    """

    def __init__(self, capacity_bytes: int, *, store: Store | None = None) -> None:
        self.store = MemoryStore(capacity_bytes) if store is None else guard_store(store)
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
        size = sum(map(storage_bytes, (encoded.embeddings, encoded.deepstack, encoded.kept)))
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
    rows = encoded.embeddings if isinstance(encoded, Encoded) else None
    shape = getattr(rows, "shape", None)
    return () if rows is None or shape is None or len(shape) != 2 else (*shape, rows.dtype, rows.device)
