"""A `Store` over a `ByteStore` and a codec. Knows neither what the values are nor where the bytes go."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from mm_plugin.cache.guarded import Faults
from mm_plugin.cache.store import ByteStore, Stats, Store
from mm_plugin.foreign import is_interruption
from mm_plugin.forking import new_lock


class Codec(Protocol):
    """Turns values into bytes and back. Called from any thread; what it raises is counted and is a miss.

    Example:
        >>> class Text:
        ...     def encode(self, value):
        ...         return [memoryview(value.encode())]
        ...     def decode(self, data):
        ...         return str(data, "utf-8")
        >>> codec = Text()
        >>> codec.decode(codec.encode("value")[0])
        'value'
    """

    def encode(self, value: Any) -> Sequence[memoryview]:
        """The parts of a value, which are written one after another."""

    def decode(self, data: memoryview) -> Any:
        """The value of these bytes, which another version or another program may have written: check them.

        The value may keep and show `data`, which does not change.
        """


class EncodedStore(Store):
    """A `Store` whose values lie encoded in a `ByteStore`, which other processes may share. Final. `ByteStore` has an example.

    No method raises. A call of the byte store or of the codec that fails is counted in `errors`, and the first is logged. A
    failed lookup is a miss; an entry that cannot be decoded is deleted.

    `pin` always returns False: a remote entry cannot be kept from eviction, and the value that a lookup returned stays alive
    as long as the caller holds it. Put a `TieredStore` in front for pins that spare a second round trip.

    `clear` deletes nothing from the byte store, where other processes use the entries. From then on this store reads and
    writes under a prefix of its own, so it neither finds older entries nor shares new ones.

    Args:
        byte_store: keeps the bytes; closed with this store.
        codec: turns values into bytes and back.
        ttl: seconds for which entries are wanted, or None for as long as there is space.
        namespace: prefix of every key in the byte store, such as the name and version of the codec, so that processes with
            another codec do not meet these entries.
    """

    def __init__(
        self, byte_store: ByteStore, codec: Codec, *, ttl: float | None = None, namespace: bytes = b""
    ) -> None:
        self._byte_store, self._codec, self._ttl = byte_store, codec, ttl
        self._namespace = self._prefix = namespace
        self._faults = Faults()
        self._lock = new_lock()
        self._hits = self._misses = 0

    def get(self, key: bytes) -> Any | None:
        """See `Store.get`."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[Any | None]:
        """See `Store.get_many`; one round trip."""
        if not keys:
            return []
        prefix = self._prefix
        names = [prefix + key for key in keys]
        values = [self._decoded(name, data) for name, data in zip(names, self._fetch(names), strict=True)]
        hits = sum(value is not None for value in values)
        with self._lock:
            self._hits += hits
            self._misses += len(values) - hits
        return values

    def _fetch(self, names: Sequence[bytes]) -> list[Any]:
        try:
            found = list(self._byte_store.get_many(names))
            if len(found) != len(names):
                raise ValueError(f"expected {len(names)} answers, got {len(found)}")
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self._byte_store, "get_many", error)
            return [None] * len(names)
        return found

    def _decoded(self, name: bytes, data: Any) -> Any | None:
        if data is None:
            return None
        try:
            value = self._codec.decode(memoryview(data))
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("codec", self._codec, "decode", error)
            self._drop(name)
            return None
        return value

    def _drop(self, name: bytes) -> None:
        try:
            self._byte_store.delete_many([name])
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self._byte_store, "delete_many", error)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """See `Store.put`; `num_bytes` is not used, since the encoded value has a size of its own."""
        name = self._prefix + key
        try:
            parts = [memoryview(part) for part in self._codec.encode(value)]
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("codec", self._codec, "encode", error)
            return False
        try:
            self._byte_store.put_many({name: parts}, self._ttl)
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self._byte_store, "put_many", error)
            return False
        return True

    def delete(self, key: bytes) -> None:
        """See `Store.delete`; the entry goes for all who share the byte store."""
        self._drop(self._prefix + key)

    def pin(self, key: bytes) -> bool:
        """False: a remote entry cannot be pinned."""
        return False

    def unpin(self, key: bytes) -> None:
        """Nothing was pinned."""

    def clear(self) -> None:
        """Find no older entry again, and share no new one; the byte store keeps what it has."""
        self._prefix = self._namespace + secrets.token_bytes(16)

    def stats(self) -> Stats:
        """Hits, misses and errors; what the byte store holds is not known here."""
        with self._lock:
            return Stats(hits=self._hits, misses=self._misses, errors=self._faults.count)

    def close(self) -> None:
        """See `Store.close`; closes the byte store."""
        try:
            self._byte_store.close()
        except BaseException as error:
            if is_interruption(error):
                raise
            self._faults.add("store", self._byte_store, "close", error)
