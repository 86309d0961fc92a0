"""Embeddings by key, checked at every hit. Knows no model and no modality."""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Any

import msgspec

from mm_plugin.cache.guarded import guard_store
from mm_plugin.cache.held import HeldEmbeddings
from mm_plugin.cache.keys import embedding_key, encoder_key
from mm_plugin.cache.memory import MemoryStore
from mm_plugin.cache.store import Stats, Store
from mm_plugin.forking import new_lock
from mm_plugin.inputs.encoded import Encoded


class EmbeddingCache:
    """Embeddings by `embedding_key`. Every hit is checked before it is used. Final; safe to use from several threads.

    Two tiers: a store, and then the embeddings that some request still holds although the store evicted them.

    Args:
        capacity_bytes: most bytes that all embeddings may take together; not used where a store is given.
        store: keeps `Encoded` values; a `MemoryStore` of that capacity where None.

    Attributes:
        store: the store, guarded if a plugin made it.

    Example:
        >>> import torch
        >>> from mm_plugin.cache import EmbeddingCache
        >>> from mm_plugin.inputs import Encoded
        >>> cache = EmbeddingCache(1 << 20)
        >>> embeddings = torch.zeros(4, 8)
        >>> cache.put(b"key", Encoded(embeddings))
        True
        >>> fit = {"hidden": 8, "dtype": embeddings.dtype, "device": embeddings.device}
        >>> cache.get(b"key", num_tokens=4, **fit).embeddings is embeddings
        True
        >>> cache.get(b"key", num_tokens=5, **fit) is None  # another number of embeddings was expected
        True
        >>> cache.stats().hits, cache.stats().misses, cache.stats().mismatches
        (1, 1, 1)
    """

    def __init__(self, capacity_bytes: int, *, store: Store | None = None) -> None:
        self.store = MemoryStore(capacity_bytes) if store is None else guard_store(store)
        # The core's own store keeps the facts that were read when embeddings were put: asking a tensor for its shape takes
        # longer than finding it. A plugin's store is not believed: what it returns is examined.
        self._keeps_facts = isinstance(self.store, MemoryStore)
        self._held = HeldEmbeddings()
        self._lock = new_lock()
        self._hits = _Tally()
        self._misses = self._mismatches = self._joins = 0

    def get(self, key: bytes, *, num_tokens: int, hidden: int | None, dtype: Any, device: Any) -> Encoded | None:
        """Embeddings that fit, or None. An entry that does not fit is dropped, and counted as a mismatch and a miss.

        Args:
            key: from `embedding_key`.
            num_tokens: embeddings that there must be.
            hidden: width that they must have; None for any.
            dtype: torch dtype that they must have.
            device: torch device on which they must lie.
        """
        facts = (num_tokens, hidden, dtype, device)
        entry = self.store.get(key)
        if entry is None:
            found: Any = self._held.get(key)
            fits = found is not None and found.fits(*facts)
        elif self._keeps_facts and type(entry) is tuple and len(entry) == 2:
            found, known = entry
            fits = known == facts or (hidden is None and (*known[:1], None, *known[2:]) == facts)
        else:
            found, fits = entry, not self._keeps_facts and isinstance(entry, Encoded) and entry.fits(*facts)
        if fits:
            self._hits.add()
            return found  # type: ignore[no-any-return]
        with self._lock:
            self._misses += 1
            self._mismatches += entry is not None
        if entry is not None:
            self.store.delete(key)
        return None

    def put(self, key: bytes, encoded: Encoded) -> bool:
        """Keep embeddings; False where the store does not, in which case they are found while somebody holds them."""
        size = encoded.embeddings.untyped_storage().nbytes()
        for extra in (encoded.deepstack, encoded.kept):
            if extra is not None:
                size += extra.untyped_storage().nbytes()
        self._held.add(key, encoded)
        return self.store.put(key, (encoded, _facts(encoded)) if self._keeps_facts else encoded, size)

    def items(self, version: str, dtype: Any) -> Container[bytes]:
        """What is here of one encoder: the `item_key` of an item is `in` it, without a lookup being counted.

        Args:
            version: of the encoder.
            dtype: torch dtype of the embeddings.

        Example:
            >>> import torch
            >>> from mm_plugin.cache import EmbeddingCache, embedding_key, encoder_key
            >>> cache = EmbeddingCache(1 << 20)
            >>> kept = cache.put(embedding_key(bytes(32), encoder_key("v", "torch.float32")), Encoded(torch.zeros(2, 4)))
            >>> bytes(32) in cache.items("v", torch.float32), bytes(32) in cache.items("v", torch.float16)
            (True, False)
        """
        return _Items(self.store, self._held, encoder_key(version, str(dtype)))

    def joined(self, count: int) -> None:
        """Count items of one step that share the embeddings of another."""
        with self._lock:
            self._joins += count

    def invalidate(self) -> None:
        """Drop all embeddings: the weights changed."""
        self._held.clear()
        self.store.clear()

    def stats(self) -> Stats:
        """Lookups of this cache, with what its store says of evictions, errors, entries, pins and bytes."""
        stats = self.store.stats()
        with self._lock:
            return msgspec.structs.replace(
                stats, hits=self._hits.read(), misses=self._misses, mismatches=self._mismatches, joins=self._joins
            )


class _Items(Container[bytes]):
    """The items whose embeddings by one encoder are kept or held."""

    def __init__(self, store: Store, held: HeldEmbeddings, encoder: bytes) -> None:
        self._store, self._held, self._encoder = store, held, encoder

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, bytes):
            return False
        key = embedding_key(item, self._encoder)
        if self._store.pin(key):  # a lookup that is not counted
            self._store.unpin(key)
            return True
        return self._held.get(key) is not None


class _Tally:
    """A counter that takes no lock to add to: a lock would cost a third of a hit."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """What was added; one reader at a time. Reading adds one itself."""
        self._reads += 1
        return self.add() - self._reads + 1


def _facts(encoded: Encoded) -> tuple[Any, ...]:
    """What embeddings must fit in: number, width, dtype, device."""
    rows = encoded.embeddings
    return (*rows.shape, rows.dtype, rows.device)
