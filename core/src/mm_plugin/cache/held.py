"""Embeddings that some request still holds, whatever a store evicted. Keeps none of them alive itself."""

from __future__ import annotations

import weakref

from mm_plugin.forking import new_lock
from mm_plugin.inputs.encoded import Encoded

_FIRST_SWEEP = 4_096  # entries before those that are gone are removed


class HeldEmbeddings:
    """Weak references to embeddings, by key: found as long as somebody holds them. Final; safe to use from several threads.

    Example:
        >>> from mm_plugin.cache import HeldEmbeddings
        >>> from mm_plugin.inputs import Encoded
        >>> held = HeldEmbeddings()
        >>> embeddings = Encoded(embeddings=None)
        >>> held.add(b"key", embeddings)
        >>> held.get(b"key") is embeddings
        True
        >>> del embeddings
        >>> held.get(b"key") is None
        True
    """

    def __init__(self) -> None:
        # Plain references, swept now and then: a WeakValueDictionary takes four times as long to write. A lookup or a write is
        # one operation on the dict, and takes no lock.
        self._references: dict[bytes, weakref.ref[Encoded]] = {}
        self._sweep_at = _FIRST_SWEEP
        self._sweeping = new_lock()

    def get(self, key: bytes) -> Encoded | None:
        """The embeddings, if somebody holds them."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def add(self, key: bytes, embeddings: Encoded) -> None:
        """Remember embeddings in place of others of this key."""
        self._references[key] = weakref.ref(embeddings)
        if len(self._references) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the entries that are gone, one by one: others are written meanwhile."""
        with self._sweeping:
            for key, reference in list(self._references.items()):
                if reference() is None:
                    removed = self._references.pop(key, reference)
                    if removed is not reference and removed() is not None:  # written since
                        self._references.setdefault(key, removed)
            self._sweep_at = 2 * len(self._references) + _FIRST_SWEEP

    def clear(self) -> None:
        """Forget all."""
        with self._sweeping:  # or a sweep could put one back
            self._references.clear()

    def __len__(self) -> int:
        """Entries, with those that are gone and not yet swept."""
        return len(self._references)
