"""Stores and caches: order, bytes, one computation for all who ask, checked hits."""

import asyncio
import gc
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.cache import (
    ComputeCache,
    EmbeddingCache,
    GuardedStore,
    HeldEmbeddings,
    MemoryStore,
    Stats,
    Store,
    embedding_key,
    encoder_key,
)
from mm_plugin.inputs import Encoded
from mm_plugin.items import ITEM_KEY_BYTES, Modality, MultimodalDataItem, item_key

# --- MemoryStore -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_entry_goes_first() -> None:
    store = MemoryStore(30)
    for key in (b"a", b"b", b"c"):
        assert store.put(key, key.decode().upper(), 10)
    assert store.get(b"a") == "A"
    store.put(b"b", "B2", 10)
    store.put(b"d", "D", 10)
    assert [store.get(key) for key in (b"a", b"b", b"c", b"d")] == ["A", "B2", None, "D"]
    assert store.stats().evictions == 1
    assert store.stats().bytes == 30


def test_an_entry_may_fill_the_store_and_no_more() -> None:
    store = MemoryStore(10)
    store.put(b"a", 1, 4)
    assert store.put(b"b", 2, 10)
    assert store.get(b"a") is None
    assert not store.put(b"c", 3, 11)
    assert store.get(b"b") == 2
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.evictions, stats.rejected) == (1, 10, 1, 1)


def test_a_rejected_value_leaves_no_older_one_of_its_key() -> None:
    store = MemoryStore(10)
    store.put(b"a", 1, 4)
    assert not store.put(b"a", 2, 11)
    assert store.get(b"a") is None
    assert store.stats().bytes == 0


def test_a_store_without_capacity_keeps_nothing() -> None:
    store = MemoryStore(0)
    assert not store.put(b"a", 1, 1)
    assert store.get(b"a") is None


def test_statistics_are_a_copy() -> None:
    store = MemoryStore(10)
    before = store.stats()
    store.put(b"a", 1, 4)
    assert (before.entries, before.bytes) == (0, 0)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 12)),
        st.tuples(st.just("get"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(operations, st.integers(0, 20))
def test_the_store_equals_a_plain_model_of_it(steps: list[tuple[str, int, int]], capacity: int) -> None:
    store = MemoryStore(capacity)
    model: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # from the least to the most recently used
    evictions = rejected = 0
    for number, (name, letter, size) in enumerate(steps):
        key = bytes([letter])
        if name == "put":
            model.pop(key, None)
            kept = size <= capacity
            if kept:
                while sum(entry[1] for entry in model.values()) + size > capacity:
                    del model[next(iter(model))]
                    evictions += 1
                model[key] = (f"value {number}", size)
            else:
                rejected += 1
            assert store.put(key, f"value {number}", size) is kept
        elif name == "get":
            if key in model:
                model.move_to_end(key)
            assert store.get(key) == model.get(key, (None,))[0]
        elif name == "delete":
            model.pop(key, None)
            store.delete(key)
        else:
            model.clear()
            store.clear()
        stats = store.stats()
        assert stats.bytes == sum(entry[1] for entry in model.values()) <= capacity
        assert (stats.entries, stats.evictions, stats.rejected) == (len(model), evictions, rejected)
    for key in map(bytes, zip(range(6))):
        assert store.get(key) == model.get(key, (None,))[0]


def test_bytes_stay_within_the_capacity_under_many_threads() -> None:
    store = MemoryStore(100)
    over: list[int] = []

    def work(seed: int) -> None:
        for step in range(300):
            size = (seed * 31 + step * 7) % 20
            key = bytes([size])
            store.put(key, size, size)
            found = store.get(key)
            if found not in (None, size) or store.stats().bytes > 100:
                over.append(key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert over == []
    assert store.stats().bytes == sum(size for size in range(20) if store.get(bytes([size])) is not None)


def test_closing_drops_everything() -> None:
    store = MemoryStore(10)
    store.put(b"a", 1, 4)
    store.close()
    assert store.get(b"a") is None
    assert (store.stats().entries, store.stats().bytes) == (0, 0)


def test_a_store_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Store()  # type: ignore[abstract]


# --- pins ----------------------------------------------------------------------------------------------------------------


def test_a_pinned_entry_is_never_evicted_and_an_unpinned_one_is_again() -> None:
    store = MemoryStore(30)
    for key in (b"a", b"b", b"c"):
        store.put(key, key.decode().upper(), 10)
    assert store.pin(b"a")
    assert store.put(b"d", "D", 20)  # b and c go, though a is the oldest
    assert [store.get(key) for key in (b"a", b"b", b"c", b"d")] == ["A", None, None, "D"]
    store.unpin(b"a")
    assert store.put(b"e", "E", 25)
    assert [store.get(key) for key in (b"a", b"d", b"e")] == [None, None, "E"]
    assert store.stats().evictions == 4


def test_an_entry_stays_pinned_until_it_is_unpinned_as_often_as_it_was_pinned() -> None:
    store = MemoryStore(10)
    store.put(b"a", 1, 10)
    assert store.pin(b"a")
    assert store.pin(b"a")
    store.unpin(b"a")
    assert not store.put(b"b", 2, 1)
    assert store.stats().pinned == 1
    store.unpin(b"a")
    assert store.stats().pinned == 0
    assert store.put(b"b", 2, 1)
    assert store.get(b"a") is None


def test_a_value_for_which_only_pinned_entries_could_go_is_rejected_and_nothing_goes() -> None:
    store = MemoryStore(30)
    for key in (b"a", b"b", b"c"):
        store.put(key, key.decode(), 10)
    store.pin(b"a")
    store.pin(b"c")
    assert not store.put(b"d", "d", 11)  # b alone would not do
    assert [store.get(key) for key in (b"a", b"b", b"c", b"d")] == ["a", "b", "c", None]
    stats = store.stats()
    assert (stats.rejected, stats.evictions, stats.entries, stats.pinned, stats.bytes) == (1, 0, 3, 2, 30)


def test_what_is_not_there_is_not_pinned_and_unpinning_it_is_harmless() -> None:
    store = MemoryStore(10)
    assert not store.pin(b"a")
    store.unpin(b"a")
    store.put(b"a", 1, 10)
    store.unpin(b"a")
    assert store.stats().pinned == 0
    assert store.pin(b"a")
    assert store.stats().pinned == 1


@pytest.mark.parametrize(
    "drop", [lambda store: store.delete(b"a"), lambda store: store.clear()], ids=["delete", "clear"]
)
def test_a_pin_of_a_dropped_entry_takes_no_other_callers_pin_with_it(drop: Any) -> None:
    store = MemoryStore(10)
    store.put(b"a", 1, 10)
    store.pin(b"a")  # the first caller's
    drop(store)
    assert store.get(b"a") is None
    assert (store.stats().pinned, store.stats().bytes) == (0, 0)
    store.put(b"a", 2, 10)
    store.pin(b"a")  # the second caller's
    store.unpin(b"a")  # the first caller ends
    assert not store.put(b"b", 3, 1)
    store.unpin(b"a")
    assert store.put(b"b", 3, 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "pin", "unpin", "delete"]), st.integers(0, 5), st.integers(0, 12)),
        max_size=60,
    )
)
def test_pins_equal_a_plain_model_of_them(steps: list[tuple[str, int, int]]) -> None:
    store, capacity = MemoryStore(20), 20
    model: OrderedDict[bytes, int] = OrderedDict()
    pins: dict[bytes, int] = {}
    for name, letter, size in steps:
        key = bytes([letter])
        if name == "put":
            model.pop(key, None)
            free = [old for old in model if not pins.get(old)]
            fixed = sum(model[old] for old in model if pins.get(old))
            fits = size <= capacity and fixed + size <= capacity
            while fits and sum(model.values()) + size > capacity:
                del model[free.pop(0)]
            if fits:
                model[key] = size
            assert store.put(key, (key, size), size) == fits
        elif name == "get":
            found = model.get(key)
            if found is not None:
                model.move_to_end(key)
            assert store.get(key) == (None if found is None else (key, found))
        elif name == "pin":
            assert store.pin(key) == (key in model)
            pins[key] = pins.get(key, 0) + (key in model)
        elif name == "unpin":
            store.unpin(key)
            pins[key] = max(0, pins.get(key, 0) - 1)
        else:
            store.delete(key)
            model.pop(key, None)
        stats = store.stats()
        assert (stats.entries, stats.bytes) == (len(model), sum(model.values()))
        assert stats.pinned == sum(bool(pins.get(old)) for old in model)


# --- ComputeCache ------------------------------------------------------------------------------------------------------


def wait_for_joins(cache: ComputeCache, count: int) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        if cache.stats().joins == count:
            return
        waiting.wait(0.005)
    pytest.fail(f"{cache.stats().joins} callers wait, not {count}")


def test_many_callers_of_one_key_compute_it_once() -> None:
    cache = ComputeCache(MemoryStore(100))
    calls: list[int] = []
    begun, release = threading.Event(), threading.Event()

    def compute() -> list[int]:
        calls.append(threading.get_ident())
        begun.set()
        assert release.wait(10)
        return [7]

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(cache.get_or_compute, b"key", compute, len)
        assert begun.wait(10)
        others = [pool.submit(cache.get_or_compute, b"key", compute, len) for _ in range(7)]
        wait_for_joins(cache, 7)
        release.set()
        results = [future.result(10) for future in (first, *others)]
    assert len(calls) == 1
    assert results[0] == ([7], False)
    assert results[1:] == [([7], True)] * 7
    assert all(value is results[0][0] for value, _ in results)
    assert cache.get_or_compute(b"key", compute, len) == ([7], True)
    stats = cache.stats()
    assert (stats.misses, stats.joins, stats.hits, stats.entries, stats.bytes) == (1, 7, 1, 1, 1)


def test_other_keys_are_computed_at_the_same_time() -> None:
    cache = ComputeCache(MemoryStore(100))
    meeting = threading.Barrier(3, timeout=10)
    with ThreadPoolExecutor(3) as pool:
        # Each waits inside its computation for the other two, which would never come if one kept them out.
        found = list(pool.map(lambda key: cache.get_or_compute(key, lambda: meeting.wait() >= 0, lambda _: 1), "abc"))
    assert found == [(True, False)] * 3


def test_threads_and_an_event_loop_share_one_computation_and_one_that_leaves_stops_no_other() -> None:
    cache = ComputeCache(MemoryStore(100))
    calls: list[int] = []
    begun, release = threading.Event(), threading.Event()

    def compute() -> list[int]:
        calls.append(1)
        begun.set()
        assert release.wait(10)
        return [7]

    def ask() -> tuple[list[int], bool]:
        return cache.get_or_compute(b"key", compute, len)

    with ThreadPoolExecutor(8) as pool:

        async def run() -> list[Any]:
            loop = asyncio.get_running_loop()
            waiters = [asyncio.ensure_future(loop.run_in_executor(pool, ask)) for _ in range(4)]
            while cache.stats().joins < 7:
                await asyncio.sleep(0.005)
            waiters[1].cancel()
            await asyncio.sleep(0)
            release.set()
            return await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 10)

        first = pool.submit(ask)
        assert begun.wait(10)
        threads = [pool.submit(ask) for _ in range(3)]
        outcomes = asyncio.run(run())
        assert first.result(10) == ([7], False)
        assert [future.result(10) for future in threads] == [([7], True)] * 3
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert [outcomes[0], *outcomes[2:]] == [([7], True)] * 3
    assert calls == [1]
    stats = cache.stats()
    assert (stats.misses, stats.joins, stats.entries) == (1, 7, 1)


def test_an_owner_that_is_cancelled_still_serves_those_who_wait() -> None:
    cache = ComputeCache(MemoryStore(100))
    begun, release = threading.Event(), threading.Event()

    def compute() -> str:
        begun.set()
        assert release.wait(10)
        return "value"

    with ThreadPoolExecutor(2) as pool:

        async def run() -> tuple[Any, Any]:
            loop = asyncio.get_running_loop()
            owner = loop.run_in_executor(pool, lambda: cache.get_or_compute(b"key", compute, len))
            while not begun.is_set():
                await asyncio.sleep(0.005)
            waiter = loop.run_in_executor(pool, lambda: cache.get_or_compute(b"key", compute, len))
            while cache.stats().joins < 1:
                await asyncio.sleep(0.005)
            owner.cancel()
            release.set()
            return await asyncio.wait_for(asyncio.gather(owner, waiter, return_exceptions=True), 10)

        cancelled, found = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert found == ("value", True)
    assert cache.get(b"key") == "value"


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_reaches_all_who_wait_and_is_not_kept(error: BaseException) -> None:
    cache = ComputeCache(MemoryStore(100))
    begun, release = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def compute() -> Any:
        begun.set()
        assert release.wait(10)
        raise error

    def ask() -> None:
        try:
            cache.get_or_compute(b"key", compute, lambda _: 1)
        except BaseException as raised:
            caught.append(raised)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    wait_for_joins(cache, 3)
    release.set()
    for thread in threads:
        thread.join(10)
    assert caught == [error] * 4
    assert cache.get(b"key") is None
    assert cache.get_or_compute(b"key", lambda: "now", lambda _: 1) == ("now", False)


def test_a_size_that_cannot_be_computed_is_a_failure_too() -> None:
    cache = ComputeCache(MemoryStore(100))
    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute(b"key", lambda: 1, lambda _: 1 // 0)
    assert cache.get_or_compute(b"key", lambda: 2, lambda _: 1) == (2, False)


def test_a_value_that_is_too_large_is_returned_and_computed_again() -> None:
    cache = ComputeCache(MemoryStore(10))
    for _ in range(2):
        assert cache.get_or_compute(b"key", lambda: "x", lambda _: 11) == ("x", False)
    stats = cache.stats()
    assert (stats.misses, stats.rejected, stats.entries) == (2, 2, 0)


def test_only_a_value_that_is_there_is_counted_by_get() -> None:
    cache = ComputeCache(MemoryStore(10))
    assert cache.get(b"key") is None
    cache.get_or_compute(b"key", lambda: "x", lambda _: 1)
    assert cache.get(b"key") == "x"
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (1, 1)


@pytest.mark.case("3.11")
def test_under_many_threads_every_key_keeps_its_own_value() -> None:
    cache = ComputeCache(MemoryStore(40))  # so that entries come and go all the time

    def work(seed: int) -> list[tuple[bytes, Any]]:
        found = []
        for step in range(300):
            key = bytes([(seed * 13 + step * 5) % 23])
            found.append((key, cache.get_or_compute(key, lambda key=key: ("value", key), lambda _: 10)[0]))
        return found

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for part in pool.map(work, range(8)) for answer in part]
    assert all(value == ("value", key) for key, value in answers)
    stats = cache.stats()
    assert stats.hits + stats.misses + stats.joins == len(answers) == 2400
    assert stats.bytes == 10 * stats.entries <= 40


# --- ComputeCache: the store is called without a lock ----------------------------------------------------------------------


class Blocking(MemoryStore):
    """One of its methods waits until it is released."""

    def __init__(self, method: str) -> None:
        super().__init__(1000)
        self.method, self.inside, self.release = method, threading.Event(), threading.Event()

    def _wait(self, method: str, key: bytes) -> None:
        if method == self.method and key == b"slow":
            self.inside.set()
            assert self.release.wait(10)

    def get(self, key: bytes) -> Any:
        self._wait("get", key)
        return super().get(key)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        self._wait("put", key)
        return super().put(key, value, num_bytes)

    def stats(self) -> Any:
        self._wait("stats", b"slow")
        return super().stats()


@pytest.mark.parametrize("method", ["get", "put", "stats"])
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_store_that_blocks_on_one_key_keeps_nobody_from_another(method: str, many: bool) -> None:
    store = Blocking(method)
    cache = ComputeCache(store)

    def ask(key: bytes) -> Any:
        if many:
            return cache.get_or_compute_many([key], lambda _: ["value"], len)[0]
        return cache.get_or_compute(key, lambda: "value", len)

    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(cache.stats if method == "stats" else lambda: ask(b"slow"))
        try:
            assert store.inside.wait(10)
            assert pool.submit(ask, b"other").result(10) == ("value", False)
            assert pool.submit(cache.get, b"other").result(10) == "value"
            if method != "stats":
                assert pool.submit(cache.stats).result(10).hits == 1
        finally:
            store.release.set()
        blocked.result(10)


class Reentrant(MemoryStore):
    """A store that calls the cache over it from each of its methods."""

    cache: ComputeCache
    depth = 0

    def _enter(self, key: bytes) -> None:
        if self.depth < 3:
            self.depth += 1
            try:
                self.cache.stats()
                self.cache.get(b"other")
                self.cache.get_or_compute(b"other", lambda: "other", len)
                self.cache.get_or_compute(key, lambda: "value", len)
                self.cache.get_or_compute_many([b"third", key], lambda found: ["value"] * len(found), len)
            finally:
                self.depth -= 1

    def get(self, key: bytes) -> Any:
        self._enter(key)
        return super().get(key)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        self._enter(key)
        return super().put(key, value, num_bytes)

    def stats(self) -> Any:
        if self.depth < 3:
            self.depth += 1
            self.cache.get(b"key")
            self.depth -= 1
        return super().stats()


def test_a_store_may_call_the_cache_that_asks_it() -> None:
    store = Reentrant(1000)
    store.cache = cache = ComputeCache(store)
    found: list[Any] = []

    def ask() -> None:
        found.append(cache.get_or_compute(b"key", lambda: "value", len)[0])
        found.append(cache.get_or_compute_many([b"a", b"b"], lambda indices: [str(index) for index in indices], len))
        found.append(cache.stats().entries)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert found[0] == "value"
    assert [value for value, _ in found[1]] == ["value", "value"]  # what the calls from inside computed
    assert cache._flights == {}


# --- ComputeCache: many keys ---------------------------------------------------------------------------------------------


def test_of_many_keys_each_missing_one_is_computed_once_and_in_one_call() -> None:
    cache = ComputeCache(MemoryStore(100))
    cache.get_or_compute(b"b", lambda: "B", len)
    calls: list[list[int]] = []

    def compute(indices: list[int]) -> list[str]:
        calls.append(indices)
        return [f"value {index}" for index in indices]

    found = cache.get_or_compute_many([b"a", b"b", b"a", b"c", b"b"], compute, len)
    assert found == [("value 0", False), ("B", True), ("value 0", True), ("value 3", False), ("B", True)]
    assert calls == [[0, 3]]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.joins) == (1, 3, 2)
    assert cache.get_or_compute_many([], compute, len) == []
    assert calls == [[0, 3]]


def test_many_keys_are_looked_up_in_one_call_of_the_store() -> None:
    asked: list[list[bytes]] = []

    class Counting(MemoryStore):
        def get_many(self, keys: Any) -> list[Any]:
            asked.append(list(keys))
            return super().get_many(keys)

    cache = ComputeCache(Counting(100))
    cache.get_or_compute_many([b"a", b"b", b"a"], lambda indices: ["x"] * len(indices), len)
    assert asked == [[b"a", b"b"]]


def test_a_key_that_fails_does_so_alone_and_is_not_kept() -> None:
    cache = ComputeCache(MemoryStore(100))
    error = ValueError("broken")
    found = cache.get_or_compute_many([b"a", b"b", b"c", b"b"], lambda _: ["A", error, "C"], len)
    assert found == [("A", False), (error, False), ("C", False), (error, True)]
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["A", None, "C"]
    with pytest.raises(ValueError, match="broken"):
        cache.get_or_compute(b"b", lambda: error, len)
    assert cache.get_or_compute_many([b"b"], lambda _: ["B"], len) == [("B", False)]


def test_a_size_of_one_of_many_that_cannot_be_computed_is_a_failure_of_that_key() -> None:
    cache = ComputeCache(MemoryStore(100))
    (first, _), (second, _) = cache.get_or_compute_many([b"a", b"b"], lambda _: [7, "B"], len)
    assert isinstance(first, TypeError)
    assert second == "B"
    assert cache._flights == {}


@pytest.mark.parametrize("wrong", [[], ["A"], ["A", "B", "C"]], ids=len)
def test_a_computation_that_gives_another_number_of_values_is_refused(wrong: list[str]) -> None:
    cache = ComputeCache(MemoryStore(100))
    with pytest.raises(ValueError, match="expected a value for each of 2 keys, got"):
        cache.get_or_compute_many([b"a", b"b"], lambda _: wrong, len)
    assert cache.stats().entries == 0
    assert cache.get_or_compute_many([b"a", b"b"], lambda _: ["A", "B"], len) == [("A", False), ("B", False)]


@pytest.mark.parametrize("error", [ValueError("all"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_computation_that_raises_fails_all_its_keys_and_no_other(error: BaseException) -> None:
    cache = ComputeCache(MemoryStore(100))
    cache.get_or_compute(b"there", lambda: "T", len)
    inside, release = threading.Event(), threading.Event()
    outcome: list[Any] = []

    def raising(_: list[int]) -> list[str]:
        inside.set()
        assert release.wait(10)
        raise error

    def run(keys: list[bytes], compute: Any) -> None:
        try:
            outcome.append(cache.get_or_compute_many(keys, compute, len))
        except BaseException as raised:
            outcome.append(raised)

    owner = threading.Thread(target=run, args=([b"there", b"a", b"b"], raising))
    owner.start()
    assert inside.wait(10)
    waiter = threading.Thread(target=run, args=([b"b", b"c", b"there"], lambda indices: ["mine"] * len(indices)))
    waiter.start()
    wait_for_joins(cache, 1)  # "there" has landed already, and is a hit
    release.set()
    owner.join(10)
    waiter.join(10)
    assert outcome[0] is error
    # An error is the waiter's too; an interrupt concerns only the caller that was interrupted.
    b = (error, True) if isinstance(error, Exception) else ("mine", False)
    assert outcome[1] == [b, ("mine", False), ("T", True)]
    assert cache._flights == {}


def test_a_caller_computes_its_own_keys_before_it_waits_for_others() -> None:
    cache = ComputeCache(MemoryStore(100))
    inside, release, own = threading.Event(), threading.Event(), threading.Event()

    def slow(_: list[int]) -> list[str]:
        inside.set()
        assert release.wait(10)
        return ["A"]

    def quick(indices: list[int]) -> list[str]:
        own.set()
        return [f"quick {index}" for index in indices]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_compute_many, [b"a"], slow, len)
        assert inside.wait(10)
        second = pool.submit(cache.get_or_compute_many, [b"a", b"b"], quick, len)
        assert own.wait(10)
        assert cache.get_or_compute(b"b", lambda: "late", len) == ("quick 1", True)
        release.set()
        assert first.result(10) == [("A", False)]
        assert second.result(10) == [("A", True), ("quick 1", False)]


def test_what_is_found_is_passed_on_before_the_rest_is_computed() -> None:
    cache = ComputeCache(MemoryStore(100))
    cache.get_or_compute(b"there", lambda: "T", len)
    inside, release = threading.Event(), threading.Event()

    def slow(_: list[int]) -> list[str]:
        inside.set()
        assert release.wait(10)
        return ["A"]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_compute_many, [b"there", b"a"], slow, len)
        assert inside.wait(10)
        assert pool.submit(cache.get_or_compute, b"there", lambda: "again", len).result(10) == ("T", True)
        release.set()
        first.result(10)


@pytest.mark.case("3.11")
@pytest.mark.parametrize("capacity", [0, 30, 1000])
def test_overlapping_keys_in_opposite_orders_end_and_are_computed_once_at_a_time(capacity: int) -> None:
    cache = ComputeCache(MemoryStore(capacity))
    keys = [bytes([index]) for index in range(6)]
    busy: set[bytes] = set()
    twice: list[bytes] = []
    lock = threading.Lock()

    def ask(seed: int) -> int:
        count = 0
        for turn in range(60):
            asked = [keys[(index * (1 + seed % 2 * 4) + turn + seed) % 6] for index in range(2 + (seed + turn) % 5)]

            def compute(indices: list[int], asked: list[bytes] = asked) -> list[Any]:
                mine = {asked[index] for index in indices}
                with lock:
                    twice.extend(busy & mine)
                    busy.update(mine)
                threading.Event().wait(0.0005)
                with lock:
                    busy.difference_update(mine)
                return [ValueError(asked[index]) if asked[index] == keys[5] else asked[index] for index in indices]

            for key, (value, _) in zip(asked, cache.get_or_compute_many(asked, compute, lambda _: 10), strict=True):
                assert value == key or (key == keys[5] and isinstance(value, ValueError))
            count += len(asked)
        return count

    pool = ThreadPoolExecutor(8)
    futures = [pool.submit(ask, seed) for seed in range(8)]
    asked = sum(future.result(60) for future in futures)
    pool.shutdown()
    assert twice == []
    stats = cache.stats()
    assert stats.hits + stats.misses + stats.joins == asked
    assert cache._flights == {}


class Content:
    """Stands for media that a failed request must not keep alive."""


@pytest.mark.parametrize("raising", [True, False], ids=["raised", "returned"])
def test_an_error_keeps_nothing_of_a_request_alive(raising: bool) -> None:
    cache = ComputeCache(MemoryStore(100))
    inside, release = threading.Event(), threading.Event()
    alive: list[weakref.ref[Content]] = []

    def ask(first: bool) -> None:
        content = Content()
        alive.append(weakref.ref(content))

        def compute() -> Any:
            assert content is not None
            if first:
                inside.set()
                assert release.wait(10)
            if raising:
                raise ValueError("broken")
            return ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            cache.get_or_compute(b"key", compute, len)

    gc.collect()
    gc.disable()
    try:
        owner = threading.Thread(target=ask, args=(True,))
        owner.start()
        assert inside.wait(10)
        waiter = threading.Thread(target=ask, args=(False,))
        waiter.start()
        wait_for_joins(cache, 1)
        release.set()
        owner.join(10)
        waiter.join(10)
        del owner, waiter
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


# --- EmbeddingCache ----------------------------------------------------------------------------------------------------

FIT: dict[str, Any] = {"num_tokens": 4, "hidden": 8, "dtype": torch.float32, "device": torch.device("cpu")}


def rows(tokens: int = 4, hidden: int = 8, dtype: torch.dtype = torch.float32) -> Encoded:
    return Encoded(torch.zeros(tokens, hidden, dtype=dtype))


def test_rows_that_fit_are_returned_as_they_are() -> None:
    cache = EmbeddingCache(1000)
    kept = rows()
    assert cache.get(b"key", **FIT) is None
    assert cache.put(b"key", kept)
    assert cache.get(b"key", **FIT) is kept
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.mismatches, stats.entries, stats.bytes) == (1, 1, 0, 1, 128)


@pytest.mark.case("3.4")
@pytest.mark.parametrize(
    "asked",
    [
        {"num_tokens": 3},
        {"num_tokens": 5},
        {"hidden": 7},
        {"num_tokens": 8, "hidden": 4},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"device": torch.device("meta")},
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_dropped_counted_and_a_miss(asked: dict[str, Any]) -> None:
    cache = EmbeddingCache(1000)
    cache.put(b"key", rows())
    assert cache.get(b"key", **(FIT | asked)) is None
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.mismatches, stats.entries, stats.bytes) == (0, 1, 1, 0, 0)
    assert cache.get(b"key", **FIT) is None
    assert cache.stats().mismatches == 1


@pytest.mark.case("3.4")
def test_rows_of_another_rank_or_no_rows_at_all_are_a_miss() -> None:
    store = MemoryStore(10_000)
    cache = EmbeddingCache(0, store=store)
    store.put(b"flat", Encoded(torch.zeros(32)), 1)
    store.put(b"foreign", torch.zeros(4, 8), 1)
    assert cache.get(b"flat", **FIT) is None
    assert cache.get(b"foreign", **FIT) is None
    assert cache.stats().mismatches == 2


def test_bytes_are_those_that_the_rows_keep_alive() -> None:
    cache = EmbeddingCache(100_000)
    whole = torch.zeros(100, 8)
    cache.put(b"slice", Encoded(whole[:4]))  # keeps all 100 rows
    assert cache.stats().bytes == 100 * 8 * 4
    cache.put(b"deep", Encoded(torch.zeros(4, 8), deepstack=torch.zeros(3, 4, 8)))
    assert cache.stats().bytes == 100 * 8 * 4 + 4 * 8 * 4 * (1 + 3)


def test_rows_larger_than_the_cache_are_not_kept() -> None:
    cache = EmbeddingCache(127)
    assert not cache.put(b"key", rows())
    assert cache.get(b"key", **FIT) is None
    assert cache.stats().rejected == 1


def test_the_oldest_rows_are_evicted() -> None:
    cache = EmbeddingCache(256)
    for key in (b"a", b"b"):
        cache.put(key, rows())
    assert cache.get(b"a", **FIT) is not None
    cache.put(b"c", rows())
    assert [cache.get(key, **FIT) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert cache.stats().evictions == 1


def test_new_weights_drop_all_rows() -> None:
    cache = EmbeddingCache(1000)
    cache.put(b"key", rows())
    cache.invalidate()
    assert cache.get(b"key", **FIT) is None
    assert cache.stats().bytes == 0


class Failing(Store):
    """A plugin's store of which everything fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def _fail(self, *_: Any) -> Any:
        raise self.error

    get = put = delete = pin = unpin = clear = stats = close = _fail  # type: ignore[assignment]


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(3), RuntimeError("no")])
def test_a_fault_of_a_plugins_store_is_a_miss(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    cache = ComputeCache(Failing(error))
    assert cache.get(b"key") is None
    assert cache.get_or_compute(b"key", lambda: "value", len) == ("value", False)
    rows = EmbeddingCache(100, store=Failing(error))
    fits = {"num_tokens": 2, "hidden": 3, "dtype": torch.float32, "device": torch.device("cpu")}
    assert rows.get(b"key", **fits) is None
    assert rows.put(b"key", Encoded(torch.zeros(2, 3))) is False
    rows.invalidate()
    assert cache.stats().errors >= 3
    assert rows.stats().errors >= 3
    warned = [entry for entry in caplog.records if "counted as a miss" in entry.getMessage()]
    assert len(warned) == 2  # once for each cache


def test_an_interrupted_computation_is_started_again_by_a_caller_that_waited() -> None:
    cache = ComputeCache(MemoryStore(100))
    inside, go = threading.Event(), threading.Event()

    def interrupted() -> str:
        inside.set()
        go.wait(10)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            cache.get_or_compute(b"key", interrupted, len)

    runner = threading.Thread(target=first)
    runner.start()
    inside.wait(10)
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(cache.get_or_compute(b"key", lambda: "mine", len)))
    waiter.start()
    go.set()
    runner.join(10)
    waiter.join(10)
    assert found == [("mine", False)]


def test_what_is_held_is_remembered_and_what_is_gone_is_forgotten() -> None:
    cache = EmbeddingCache(0)
    fits = {"num_tokens": 1, "hidden": 2, "dtype": torch.float32, "device": torch.device("cpu")}
    held = Encoded(torch.zeros(1, 2))
    assert cache.put(b"held", held) is False
    assert cache.get(b"held", **fits) is held
    assert cache.get(b"held", **(fits | {"hidden": 3})) is None
    for index in range(10_000):
        cache.put(index.to_bytes(4, "big"), Encoded(torch.zeros(1, 2)))
    assert cache.get((5).to_bytes(4, "big"), **fits) is None
    assert len(cache._held) < 5_000
    assert cache.get(b"held", **fits) is held
    assert (cache.stats().hits, cache.stats().misses) == (2, 2)  # of another width, and of rows that are gone
    cache.invalidate()
    assert cache.get(b"held", **fits) is None


# --- counters that are right whatever the store does -----------------------------------------------------------------------


class Miscounting(MemoryStore):
    """A plugin's store whose own counters are of no use."""

    def stats(self) -> Stats:
        return Stats(hits=500, misses=-3, joins=9, mismatches=4, entries=1, evictions=2)


STORES: dict[str, Any] = {
    "own": lambda: MemoryStore(1000),
    "failing": lambda: Failing(OSError("gone")),
    "guarded": lambda: GuardedStore(MemoryStore(1000)),
    "guarded failing": lambda: GuardedStore(Failing(OSError("gone"))),
    "miscounting": lambda: GuardedStore(Miscounting(1000)),
    "of a plugin": lambda: Plain(),
}


class Plain(Store):
    """A plugin's store that does as little as it must."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Any] = {}

    def get(self, key: bytes) -> Any:
        return self.entries.get(key)

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        self.entries[key] = value
        return True

    def delete(self, key: bytes) -> None:
        self.entries.pop(key, None)

    def pin(self, key: bytes) -> bool:
        return False

    def unpin(self, key: bytes) -> None:
        pass

    def clear(self) -> None:
        self.entries.clear()

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", STORES)
def test_lookups_of_embeddings_are_counted_as_their_caller_saw_them(name: str) -> None:
    cache, fails = EmbeddingCache(1000, store=STORES[name]()), "failing" in name
    assert cache.get(b"key", **FIT) is None
    held = rows()
    cache.put(b"key", held)
    assert cache.get(b"key", **FIT) is held  # of a store that is down too: somebody holds them
    assert cache.get(b"key", **FIT) is held
    assert cache.get(b"key", **FIT | {"hidden": 9}) is None
    assert cache.get(b"other", **FIT) is None
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (2, 3)
    assert stats.mismatches == (0 if fails else 1)  # nothing was found that could be of another width
    assert (stats.errors > 0) == fails
    cache.joined(3)
    cache.joined(2)
    assert cache.stats().joins == 5
    assert cache.stats().hits == 2  # reading a counter does not change it


@pytest.mark.parametrize("name", STORES)
def test_lookups_of_computed_values_are_counted_as_their_caller_saw_them(name: str) -> None:
    cache, fails = ComputeCache(STORES[name]()), "failing" in name
    for _ in range(3):
        assert cache.get_or_compute(b"key", lambda: "value", len) == ("value", cache.stats().hits > 0)
    cache.get(b"key")
    cache.get(b"other")
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.joins) == ((0, 3, 0) if fails else (3, 1, 0))


def test_embeddings_that_the_store_evicted_are_hits_while_somebody_holds_them() -> None:
    cache = EmbeddingCache(128)
    first, second = rows(), rows()
    cache.put(b"first", first)
    cache.put(b"second", second)  # evicts the other
    assert cache.store.get(b"first") is None
    assert cache.get(b"first", **FIT) is first
    del first
    assert cache.get(b"first", **FIT) is None
    assert (cache.stats().hits, cache.stats().misses, cache.stats().mismatches) == (1, 1, 0)


def test_no_lookup_is_lost_under_many_threads() -> None:
    cache = EmbeddingCache(128 * 4)
    kept = [rows() for _ in range(8)]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(seed: int) -> int:
        hits = 0
        for step in range(400):
            index = (seed * 3 + step) % 12
            found = cache.get(bytes([index]), **FIT)
            hits += found is not None
            if found is None and index < 8:
                cache.put(bytes([index]), kept[index])
        return hits

    try:
        with ThreadPoolExecutor(8) as pool:
            hits = sum(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(switching)
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (hits, 8 * 400 - hits)


def test_held_embeddings_stay_known_while_others_are_swept() -> None:
    held = HeldEmbeddings()

    def work(seed: int) -> bool:
        mine = [rows(1, 1) for _ in range(50)]
        for turn in range(200):
            for index, kept in enumerate(mine):
                held.add(bytes([seed, index]), kept)
                held.add(bytes([seed, index, turn]), rows(1, 1))  # gone at once
        return all(held.get(bytes([seed, index])) is kept for index, kept in enumerate(mine))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
    assert len(held) < 20_000
    held.clear()
    assert len(held) == 0


def test_held_embeddings_that_are_written_during_a_sweep_stay_known() -> None:
    held, written = HeldEmbeddings(), rows(1, 1)

    class Racing(dict[bytes, Any]):
        """Another thread writes an entry just before the sweep removes the one that was gone."""

        def pop(self, key: bytes, default: Any = None) -> Any:
            self[key] = weakref.ref(written)
            return super().pop(key, default)

    held._references, held._sweep_at = Racing(), 1
    held.add(b"key", rows(1, 1))  # gone at once
    held.add(b"other", rows(1, 1))
    assert held.get(b"key") is written


# --- keys ----------------------------------------------------------------------------------------------------------------


def framed(*parts: Any) -> bytes:
    """A list of text, bytes and whole numbers as docs/identity-and-caching.md says, written from the page alone."""

    def sized(data: bytes) -> bytes:
        return len(data).to_bytes(8, "big") + data

    out = b"l" + len(parts).to_bytes(8, "big")
    for part in parts:
        if isinstance(part, int):
            out += b"i+" + sized(part.to_bytes((part.bit_length() + 7) // 8, "big"))
        else:
            out += b"s" + sized(part.encode()) if isinstance(part, str) else b"b" + sized(part)
    return out


def item_of(**changes: Any) -> MultimodalDataItem:
    given: dict[str, Any] = {"modality": Modality.IMAGE, "offsets": [(2, 4), (7, 7)], "identity": b"i" * 32}
    return MultimodalDataItem(**given | changes)


def test_the_key_of_embeddings_follows_the_page() -> None:
    found = embedding_key(item_key(item_of()), encoder_key("weights", "torch.bfloat16"))
    item = blake3(framed("mm-plugin/item-embedding", 1, 1, b"i" * 32, 4)).digest()
    assert found == item + blake3(framed("mm-plugin/encoder", 1, "weights", "torch.bfloat16")).digest()
    assert len(item) == ITEM_KEY_BYTES
    hashed = item_of(identity=None, hash=258, modality=Modality.AUDIO)
    assert item_key(hashed) == blake3(framed("mm-plugin/item-embedding", 1, 3, 258, 4)).digest()


def test_whatever_could_change_embeddings_changes_their_key() -> None:
    items = [
        item_of(),
        item_of(modality=Modality.VIDEO),
        item_of(identity=b"j" * 32),
        item_of(identity=None, hash=int.from_bytes(b"i" * 8, "big")),
        item_of(identity=None, hash=7),
        item_of(identity=None, hash=0),
        item_of(offsets=[(2, 4)]),
    ]
    encoders = [("", "torch.float32"), ("v", "torch.float32"), ("v", "torch.bfloat16"), ("vtorch", ".float32")]
    keys = {embedding_key(item_key(item), encoder_key(*encoder)) for item in items for encoder in encoders}
    assert len(keys) == len(items) * len(encoders)
    assert item_key(item_of(offsets=[(0, 3)])) == item_key(item_of())  # where it stands does not matter
    changed = item_of()
    changed.set_identity(b"k" * 32)
    assert item_key(changed) == item_key(item_of(identity=b"k" * 32))  # nothing is remembered of what it was
