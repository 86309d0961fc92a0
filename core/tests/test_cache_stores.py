"""Stores over bytes and in tiers: what is shared, what a fault becomes, and that counters say what callers saw."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import PlainToy, png, toy_spec

from mm_plugin import Modality, Settings
from mm_plugin.cache import (
    ByteStore,
    ComputeCache,
    EmbeddingCache,
    EncodedStore,
    MemoryStore,
    Stats,
    Store,
    TieredStore,
)
from mm_plugin.inputs import Encoded
from mm_plugin.runtime import Runtime
from mm_plugin.tasks import Prepared


class MemoryBytes(ByteStore):
    """A byte store in this process's memory that records its calls."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, Any]] = []
        self.closed = False

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        self.calls.append(("get", list(keys)))
        found = [self.entries.get(key) for key in keys]
        return [None if data is None else memoryview(data) for data in found]

    def put_many(self, entries: Mapping[bytes, Sequence[memoryview]], ttl: float | None) -> None:
        self.calls.append(("put", ttl))
        self.entries.update((key, b"".join(parts)) for key, parts in entries.items())

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("delete", list(keys)))
        for key in keys:
            self.entries.pop(key, None)

    def close(self) -> None:
        self.closed = True


class Down(ByteStore):
    """A byte store that cannot be reached."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def _fail(self, *_: Any) -> Any:
        raise self.error

    get_many = put_many = delete_many = close = _fail  # type: ignore[assignment]


class Text:
    """Text in two parts; knows no empty text."""

    def encode(self, value: str) -> list[memoryview]:
        data = value.encode()
        return [memoryview(data)[:1], memoryview(data)[1:]]

    def decode(self, data: memoryview) -> str:
        if not data:
            raise ValueError("no text")
        return str(data, "utf-8")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- EncodedStore --------------------------------------------------------------------------------------------------------


def test_values_are_kept_as_bytes_and_shared_by_all_who_use_the_byte_store() -> None:
    remote = MemoryBytes()
    one, other = EncodedStore(remote, Text()), EncodedStore(remote, Text())
    assert one.put(b"key", "value", 100)
    assert remote.entries == {b"key": b"value"}
    assert other.get(b"key") == "value"
    assert other.get(b"else") is None
    assert (other.stats().hits, other.stats().misses) == (1, 1)
    assert one.stats() == Stats()


def test_many_keys_are_one_round_trip() -> None:
    remote = MemoryBytes()
    store = EncodedStore(remote, Text(), namespace=b"n/")
    store.put(b"a", "A", 1)
    store.put(b"c", "C", 1)
    remote.calls.clear()
    assert store.get_many([b"a", b"b", b"c"]) == ["A", None, "C"]
    assert remote.calls == [("get", [b"n/a", b"n/b", b"n/c"])]
    assert store.get_many([]) == []
    assert len(remote.calls) == 1
    assert (store.stats().hits, store.stats().misses) == (2, 1)


def test_namespaces_do_not_meet() -> None:
    remote = MemoryBytes()
    one, two = (EncodedStore(remote, Text(), namespace=name) for name in (b"text/1/", b"text/2/"))
    one.put(b"key", "value", 1)
    assert two.get(b"key") is None
    assert one.get(b"key") == "value"


@pytest.mark.parametrize("ttl", [None, 2.5])
def test_the_time_to_live_is_passed_on(ttl: float | None) -> None:
    remote = MemoryBytes()
    EncodedStore(remote, Text(), ttl=ttl).put(b"key", "value", 1)
    assert remote.calls == [("put", ttl)]


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe"], ids=["truncated", "corrupted"])
def test_what_cannot_be_decoded_is_a_counted_miss_and_deleted(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    remote = MemoryBytes()
    store = EncodedStore(remote, Text())
    remote.entries = {b"bad": damage, b"worse": damage, b"good": b"fine"}
    assert store.get_many([b"bad", b"good", b"worse"]) == [None, "fine", None]
    assert remote.entries == {b"good": b"fine"}
    assert (store.stats().hits, store.stats().misses, store.stats().errors) == (1, 2, 2)
    (warning,) = warnings_of(caplog)
    assert "codec Text failed in decode" in warning
    assert store.put(b"bad", "whole", 1)
    assert store.get(b"bad") == "whole"


def test_what_cannot_be_encoded_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    remote = MemoryBytes()
    store = EncodedStore(remote, Text())
    assert not store.put(b"key", 7, 1)
    assert remote.calls == []
    assert store.stats().errors == 1
    assert "codec Text failed in encode (AttributeError)" in warnings_of(caplog)[0]


@pytest.mark.parametrize("error", [OSError("lost"), SystemExit(3), TimeoutError()], ids=repr)
def test_a_byte_store_that_is_down_is_a_miss_and_never_raises(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    store = EncodedStore(Down(error), Text())
    assert store.get(b"key") is None
    assert store.get_many([b"key", b"other"]) == [None, None]
    assert not store.put(b"key", "value", 1)
    store.delete(b"key")
    store.clear()
    store.close()
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.errors) == (0, 3, 5)
    (warning,) = warnings_of(caplog)
    assert "store Down failed in get_many" in warning
    assert "lost" not in warning


def test_an_interrupt_passes_through() -> None:
    store = EncodedStore(Down(KeyboardInterrupt()), Text())
    with pytest.raises(KeyboardInterrupt):
        store.get(b"key")


@pytest.mark.parametrize("answers", [[], [None], None, [b"value", b"value", b"value"], [3, 4]], ids=repr)
def test_a_byte_store_that_answers_nonsense_is_a_miss(answers: Any) -> None:
    class Odd(MemoryBytes):
        def get_many(self, keys: Sequence[bytes]) -> Any:
            return answers

    store = EncodedStore(Odd(), Text())
    assert store.get_many([b"a", b"b"]) == [None, None]
    assert (store.stats().hits, store.stats().misses) == (0, 2)
    assert store.stats().errors >= 1


def test_a_remote_entry_cannot_be_pinned_and_what_was_found_outlives_it() -> None:
    remote = MemoryBytes()
    store = EncodedStore(remote, Text())
    store.put(b"key", "value", 1)
    assert not store.pin(b"key")
    found = store.get(b"key")
    remote.entries.clear()
    store.unpin(b"key")
    assert found == "value"
    assert store.stats().pinned == 0


def test_clearing_parts_from_the_others_and_takes_nothing_from_them() -> None:
    remote = MemoryBytes()
    cleared, other = EncodedStore(remote, Text()), EncodedStore(remote, Text())
    cleared.put(b"old", "before", 1)
    cleared.clear()
    assert cleared.get(b"old") is None
    assert other.get(b"old") == "before"
    cleared.put(b"new", "after", 1)
    other.put(b"new", "of the other", 1)
    assert cleared.get(b"new") == "after"
    other.clear()
    assert other.get(b"new") is None  # neither its own nor what the first put after its own clear


def test_deleting_is_for_all() -> None:
    remote = MemoryBytes()
    one, other = EncodedStore(remote, Text(), namespace=b"n"), EncodedStore(remote, Text(), namespace=b"n")
    one.put(b"key", "value", 1)
    other.delete(b"key")
    assert one.get(b"key") is None
    assert remote.entries == {}


def test_closing_closes_the_byte_store() -> None:
    remote = MemoryBytes()
    EncodedStore(remote, Text()).close()
    assert remote.closed


def test_what_one_process_computed_another_finds() -> None:
    remote = MemoryBytes()
    processes = [ComputeCache(EncodedStore(remote, Text())) for _ in range(2)]
    made: list[int] = []

    def compute(indices: list[int]) -> list[str]:
        made.extend(indices)
        return [f"value {index}" for index in indices]

    assert processes[0].get_or_compute_many([b"a", b"b"], compute, len) == [("value 0", False), ("value 1", False)]
    assert processes[1].get_or_compute_many([b"c", b"a", b"b"], compute, len) == [
        ("value 0", False),
        ("value 0", True),
        ("value 1", True),
    ]
    assert made == [0, 1, 0]


def test_bytes_are_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ByteStore()  # type: ignore[abstract]


# --- TieredStore ---------------------------------------------------------------------------------------------------------


def tiers(small: int = 10, large: int = 100) -> tuple[MemoryStore, MemoryStore, TieredStore]:
    first, second = MemoryStore(small), MemoryStore(large)
    return first, second, TieredStore(first, second, num_bytes=len)


def test_a_value_is_put_into_both_and_comes_back_into_the_first() -> None:
    first, second, store = tiers()
    assert store.put(b"a", "a" * 6, 6)
    assert store.put(b"b", "b" * 6, 6)  # evicts the other from the first
    assert (first.get(b"a"), second.get(b"a")) == (None, "a" * 6)
    assert store.get(b"a") == "a" * 6
    assert first.get(b"a") == "a" * 6
    assert first.stats().bytes == 6


def test_the_second_store_is_asked_once_and_only_for_what_the_first_does_not_have() -> None:
    remote = MemoryBytes()
    store = TieredStore(MemoryStore(100), EncodedStore(remote, Text()), num_bytes=len)
    store.put(b"here", "1", 1)
    EncodedStore(remote, Text()).put(b"there", "2", 1)
    remote.calls.clear()
    assert store.get_many([b"here", b"there", b"nowhere"]) == ["1", "2", None]
    assert remote.calls == [("get", [b"there", b"nowhere"])]
    assert store.get_many([b"here", b"there"]) == ["1", "2"]
    assert len(remote.calls) == 1


def test_counters_are_those_of_the_callers() -> None:
    first, _, store = tiers()
    store.put(b"a", "a" * 6, 6)
    store.put(b"b", "b" * 6, 6)
    assert [store.get(key) is not None for key in (b"b", b"a", b"c")] == [True, True, False]
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.rejected, stats.errors) == (2, 1, 0, 0)
    assert (stats.entries, stats.bytes, stats.evictions) == (1, 6, 2)  # of the first
    assert (first.stats().hits, first.stats().misses) == (1, 2)


def test_what_either_store_keeps_is_kept() -> None:
    _, _, store = tiers(small=2, large=6)
    assert store.put(b"large", "large", 5)
    assert store.get(b"large") == "large"
    assert not store.put(b"huge", "h" * 9, 9)
    assert store.stats().rejected == 1


def test_pins_are_the_first_stores() -> None:
    first, _, store = tiers()
    store.put(b"a", "a" * 6, 6)
    assert store.pin(b"a")
    assert store.put(b"b", "b" * 6, 6)  # finds no space in the first
    assert not store.pin(b"b")
    assert store.stats().pinned == 1
    assert first.get(b"a") is not None
    store.unpin(b"a")
    assert store.stats().pinned == 0


class Plugged(Store):
    """A plugin's store whose lookups and writes fail, and which counts wrongly."""

    def get(self, key: bytes) -> Any:
        raise OSError("down")

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        raise OSError("down")

    def delete(self, key: bytes) -> None:
        raise OSError("down")

    def pin(self, key: bytes) -> bool:
        raise OSError("down")

    def unpin(self, key: bytes) -> None:
        raise OSError("down")

    def clear(self) -> None:
        raise OSError("down")

    def stats(self) -> Stats:
        return Stats(hits=77, misses=88, entries=3)

    def close(self) -> None:
        raise OSError("down")


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_store_that_is_down_leaves_the_other(place: str) -> None:
    whole = MemoryStore(100)
    pair = (Plugged(), whole) if place == "first" else (whole, Plugged())
    store = TieredStore(*pair, num_bytes=len)
    assert store.put(b"key", "value", 5)
    assert store.get(b"key") == "value"
    assert store.get(b"other") is None
    store.delete(b"key")
    assert store.get(b"key") is None
    store.pin(b"key")
    store.clear()
    store.close()
    stats = store.stats()
    assert (stats.hits, stats.misses) == (1, 2)
    assert stats.errors >= 4


@pytest.mark.parametrize(
    "drop", [lambda store: store.delete(b"key"), lambda store: store.clear()], ids=["delete", "clear"]
)
def test_what_is_dropped_while_it_is_copied_does_not_come_back(drop: Callable[[Store], None]) -> None:
    class Slow(MemoryStore):
        """Its answer is on its way while another thread drops the entry."""

        def get(self, key: bytes) -> Any:
            found = super().get(key)
            if found is not None:
                thread = threading.Thread(target=drop, args=(store,))
                thread.start()
                thread.join(10)
            return found

    first, second = MemoryStore(100), Slow(100)
    store = TieredStore(first, second, num_bytes=len)
    second.put(b"key", "old", 3)
    assert store.get(b"key") == "old"  # it was asked for before
    assert first.get(b"key") is None
    assert store.get(b"key") is None


@pytest.mark.parametrize(
    "drop", [lambda store: store.delete(b"key"), lambda store: store.clear()], ids=["delete", "clear"]
)
def test_what_is_looked_up_between_the_two_stores_drops_does_not_come_back(drop: Callable[[Store], None]) -> None:
    class Slow(MemoryStore):
        """Another thread looks the entry up just before it is dropped here."""

        def _look(self) -> None:
            thread = threading.Thread(target=store.get, args=(b"key",))
            thread.start()
            thread.join(10)

        def delete(self, key: bytes) -> None:
            self._look()
            super().delete(key)

        def clear(self) -> None:
            self._look()
            super().clear()

    store = TieredStore(MemoryStore(100), Slow(100), num_bytes=len)
    store.put(b"key", "old", 3)
    drop(store)
    assert store.get(b"key") is None


def test_both_are_cleared_and_closed() -> None:
    first, second, store = tiers()
    store.put(b"key", "value", 5)
    store.clear()
    assert (first.stats().entries, second.stats().entries) == (0, 0)
    store.put(b"key", "value", 5)
    store.close()
    assert (first.stats().entries, second.stats().entries) == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "get_many", "delete", "clear", "pin"]), st.integers(0, 4)), max_size=50
    ),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_a_tiered_store_never_gives_what_was_replaced_or_dropped(
    steps: list[tuple[str, int]], small: int, large: int
) -> None:
    _, _, store = tiers(small, large)
    latest: dict[bytes, str] = {}
    lookups = 0
    for number, (name, index) in enumerate(steps):
        key = bytes([index])
        if name == "put":
            value = f"{number:0{index + 1}}"
            if store.put(key, value, len(value)):
                latest[key] = value
            else:
                latest.pop(key, None)
        elif name == "get":
            lookups += 1
            assert store.get(key) in (None, latest.get(key))
        elif name == "get_many":
            lookups += 5
            keys = [bytes([other]) for other in range(5)]
            assert all(found in (None, latest.get(key)) for key, found in zip(keys, store.get_many(keys), strict=True))
        elif name == "delete":
            store.delete(key)
            latest.pop(key, None)
        elif name == "clear":
            store.clear()
            latest.clear()
        else:
            store.pin(key)
    stats = store.stats()
    assert stats.hits + stats.misses == lookups
    assert stats.bytes <= small


# --- embeddings in a remote store ----------------------------------------------------------------------------------------


class Rows:
    """Embeddings as float32 with their shape."""

    def encode(self, value: Encoded) -> list[memoryview]:
        rows = value.embeddings.numpy()
        return [memoryview(bytes(rows.shape)), memoryview(rows.tobytes())]

    def decode(self, data: memoryview) -> Encoded:
        count, width = data[:2]
        return Encoded(torch.frombuffer(bytearray(data[2:]), dtype=torch.float32).reshape(count, width))


FIT: dict[str, Any] = {"num_tokens": 3, "hidden": 2, "dtype": torch.float32, "device": torch.device("cpu")}


@pytest.mark.parametrize("tiered", [False, True])
def test_embeddings_are_shared_by_workers_and_checked_at_every_hit(tiered: bool) -> None:
    remote = MemoryBytes()

    def worker() -> EmbeddingCache:
        store: Store = EncodedStore(remote, Rows(), namespace=b"rows/1/")
        if tiered:
            store = TieredStore(MemoryStore(1 << 10), store, num_bytes=lambda value: value.embeddings.nbytes)
        return EmbeddingCache(0, store=store)

    first, second = worker(), worker()
    embeddings = Encoded(torch.arange(6.0).reshape(3, 2))
    assert first.put(b"key", embeddings)
    assert torch.equal(second.get(b"key", **FIT).embeddings, embeddings.embeddings)
    assert second.get(b"key", **FIT | {"hidden": 3}) is None  # dropped, for all
    assert remote.entries == {}
    assert second.get(b"key", **FIT) is None
    stats = second.stats()
    assert (stats.hits, stats.misses, stats.mismatches, stats.errors) == (1, 2, 1, 0)


def test_corrupted_embeddings_are_a_miss_that_is_encoded_again() -> None:
    remote = MemoryBytes()
    cache = EmbeddingCache(0, store=EncodedStore(remote, Rows()))
    remote.entries[b"key"] = b"\x09\x09short"
    assert cache.get(b"key", **FIT) is None
    assert cache.put(b"key", Encoded(torch.ones(3, 2)))
    assert torch.equal(cache.get(b"key", **FIT).embeddings, torch.ones(3, 2))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.mismatches, stats.errors) == (1, 1, 0, 1)


WRONG = ["text", 5, np.zeros(2), Prepared({}, None, None, b"")]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["get", "get_many"])
@pytest.mark.parametrize("value", WRONG, ids=["text", "number", "array", "incomplete"])
def test_a_store_of_prepared_items_that_returns_anything_else_has_missed(
    open_words: Callable[..., Any], value: Any, method: str
) -> None:
    class Confused(MemoryStore):
        def get(self, key: bytes) -> Any:
            return value if method == "get" else super().get(key)

        def get_many(self, keys: Sequence[bytes]) -> list[Any]:
            return [value for _ in keys] if method == "get_many" else super().get_many(keys)

    with Runtime(Settings(threads=1), preprocess_store=Confused(1 << 20)) as runtime:
        processor = open_words(PlainToy, toy_spec(Modality.IMAGE), runtime=runtime)
        wanted = open_words(PlainToy, toy_spec(Modality.IMAGE)).process("<image>", [png()])
        for _ in range(2):
            output = processor.process("<image>", [png()])
            assert output.mm_items[0].identity == wanted.mm_items[0].identity
        assert processor.cache_stats.errors >= 1
