"""What a runtime owns, makes when it is first read, and closes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from mm_plugin import Settings, UsageError
from mm_plugin.cache import EmbeddingCache, MemoryStore, Store
from mm_plugin.events import FallbackUsed
from mm_plugin.runtime import Runtime

EVENT = FallbackUsed(asked="a", plugin="b", why="c")


class Closing(MemoryStore):
    """A store that says when it is closed."""

    def __init__(self, capacity_bytes: int, log: list[Any]) -> None:
        super().__init__(capacity_bytes)
        self.capacity, self.log = capacity_bytes, log

    def close(self) -> None:
        self.log.append(self.capacity)
        if self.capacity == 13:
            raise OSError("cannot be closed")


def test_nothing_is_made_or_asked_for_until_it_is_read() -> None:
    asked: list[Any] = []

    def services(kind: str) -> Mapping[str, Any]:
        asked.append(kind)
        return {}

    def make_store(name: str, capacity_bytes: int) -> Store:
        asked.append((name, capacity_bytes))
        return MemoryStore(capacity_bytes)

    before = threading.active_count()
    settings = Settings(preprocess_store="kept", preprocess_cache_bytes=11, embedding_cache_bytes=12)
    with Runtime(settings, services=services, make_store=make_store) as runtime:
        assert asked == []
        assert runtime.preprocess_cache is runtime.preprocess_cache
        assert runtime.preprocess_cache.store is runtime.preprocess_store
        assert asked == [("kept", 11)]
        assert runtime.embedding_cache is runtime.embedding_cache
        assert asked == [("kept", 11), ("memory", 12)]
        assert runtime.observers is runtime.observers
        assert runtime.digests is runtime.digests
        assert asked[2:] == ["observers", "digests"]
        assert runtime.caller_hashes is runtime.caller_hashes
        assert len(asked) == 4
        assert threading.active_count() == before


def test_observers_are_the_services_of_that_kind() -> None:
    heard: list[Any] = []
    runtime = Runtime(Settings(), services=lambda kind: {"test": heard.append} if kind == "observers" else {})
    runtime.observers.emit(EVENT)
    assert heard == [EVENT]


def test_without_a_maker_there_are_stores_in_memory_alone() -> None:
    assert isinstance(Runtime(Settings()).preprocess_store, MemoryStore)
    with pytest.raises(UsageError, match="expected 'memory', got 'kept'"):
        Runtime(Settings(preprocess_store="kept")).preprocess_store  # noqa: B018


def test_what_was_given_is_used_and_left_open() -> None:
    log: list[Any] = []
    store = Closing(11, log)
    rows = EmbeddingCache(12, store=Closing(12, log))
    with ThreadPoolExecutor(1) as pool:
        with Runtime(Settings(), executor=pool, preprocess_store=store, embedding_cache=rows) as runtime:
            assert (runtime.executor.inner, runtime.preprocess_store, runtime.embedding_cache) == (pool, store, rows)
        assert pool.submit(int, "3").result() == 3
    assert log == []


def test_the_threads_end_first_and_then_all_is_released_in_the_order_of_its_making() -> None:
    log: list[Any] = []
    settings = Settings(preprocess_cache_bytes=13, embedding_cache_bytes=12, threads=1)
    runtime = Runtime(settings, make_store=lambda name, size: Closing(size, log))
    started = threading.Event()

    def work() -> None:
        started.set()
        time.sleep(0.1)
        log.append("work")

    runtime.own(lambda: log.append("own"))
    assert runtime.embedding_cache.store is not runtime.preprocess_store
    pool = runtime.executor
    pool.submit(work)
    assert started.wait(10)
    runtime.close()
    runtime.close()
    # The store of 13 bytes cannot be closed, which keeps nothing else open.
    assert log == ["work", "own", 12, 13]
    with pytest.raises(UsageError, match="after shutdown"):
        pool.submit(int, "3")


def test_a_closed_runtime_makes_and_owns_nothing_new() -> None:
    runtime = Runtime(Settings())
    assert not runtime.closed.is_set()
    runtime.check_open()
    runtime.close()
    assert runtime.closed.is_set()
    for name in ("executor", "preprocess_store", "preprocess_cache", "embedding_cache"):
        with pytest.raises(UsageError, match="closed"):
            getattr(runtime, name)
    for refuse in (runtime.check_open, lambda: runtime.own(lambda: None)):
        with pytest.raises(UsageError, match="closed"):
            refuse()


def test_an_executor_of_processes_is_refused() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(UsageError, match="use threads") as caught:
        Runtime(Settings(), executor=pool)
    assert caught.value.argument == "executor"


def test_the_table_of_callers_hashes_holds_as_many_as_the_settings_say() -> None:
    hashes = Runtime(Settings(max_caller_hashes=2)).caller_hashes
    for name in (b"a", b"b", b"c"):
        assert hashes.bind([(name, b"content", "images[0]")]) is None
    assert hashes.bind([(b"c", b"other", "images[1]")]) == "images[1]"
    assert hashes.bind([(b"a", b"other", "images[1]")]) is None
