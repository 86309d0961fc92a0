"""Stores and caches: order, bytes, one computation for all who ask, checked hits."""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.cache import ComputeCache, EmbeddingCache, MemoryStore, Store
from mm_plugin.inputs import Encoded

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


def test_closing_lets_go_of_everything() -> None:
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


def test_threads_and_an_event_loop_share_one_computation_and_who_leaves_takes_nobody_along() -> None:
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
        told = asyncio.run(run())
        assert first.result(10) == ([7], False)
        assert [future.result(10) for future in threads] == [([7], True)] * 3
    assert isinstance(told[1], asyncio.CancelledError)
    assert [told[0], *told[2:]] == [([7], True)] * 3
    assert calls == [1]
    stats = cache.stats()
    assert (stats.misses, stats.joins, stats.entries) == (1, 7, 1)


def test_an_owner_that_is_cancelled_still_serves_who_waits() -> None:
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
def test_a_failure_is_told_to_all_who_wait_and_is_not_kept(error: BaseException) -> None:
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


def test_a_size_that_cannot_be_told_is_a_failure_too() -> None:
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


def test_the_oldest_rows_make_room() -> None:
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


def test_an_interrupted_computation_is_begun_anew_by_who_waited() -> None:
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
