"""What a registry owns and closes, and what another process sees of it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mm_plugin import (
    Registry,
    Settings,
    UsageError,
)
from mm_plugin.cache import EmbeddingCache, MemoryStore

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}


def test_close_stops_what_the_registry_made(open_registry: Any) -> None:
    with open_registry(threads=1) as registry:
        pool = registry.executor
        assert pool.submit(int, "3").result() == 3
        store, rows = registry.preprocess_store, registry.embedding_cache
        assert isinstance(store, MemoryStore)
        assert store is not rows.store
        for kept in (store, rows.store):
            kept.put("key", "value", 1)
        assert (pool, store, rows) == (registry.executor, registry.preprocess_store, registry.embedding_cache)
    with pytest.raises(UsageError, match="after shutdown"):
        pool.submit(int, "3")
    assert (store.stats().entries, rows.store.stats().entries) == (0, 0)
    with pytest.raises(UsageError, match="closed"):
        registry.load_processor("anything")


def test_close_leaves_what_was_given(open_registry: Any) -> None:
    store, rows = MemoryStore(100), EmbeddingCache(100)
    with ThreadPoolExecutor(1) as pool:
        resources = {"executor": pool, "preprocess_store": store, "embedding_cache": rows}
        with open_registry(resources=resources) as registry:
            assert (registry.executor.inner, registry.preprocess_store, registry.embedding_cache) == (pool, store, rows)
            store.put("key", "value", 1)
            rows.store.put("key", "value", 1)
        assert pool.submit(int, "3").result() == 3
        assert store.get("key") == "value"
        assert rows.store.get("key") == "value"


def test_a_registry_has_as_many_threads_as_the_settings_say(open_registry: Any) -> None:
    barrier = threading.Barrier(3, timeout=10)
    registry = open_registry(threads=3)
    waits = [registry.executor.submit(barrier.wait) for _ in range(3)]
    assert sorted(wait.result() for wait in waits) == [0, 1, 2]


def report(settings: Settings, queue: Any) -> None:
    """What a spawned process finds by itself."""
    with Registry(settings) as registry:
        spec = registry.resolve(ASKED)
        found = {record.name: (record.distribution, record.state) for record in registry.plugins}
        queue.put((spec.name, registry.architectures, registry.fingerprint(), found))


@pytest.mark.case("6.5")
def test_a_spawned_process_sees_what_its_parent_sees(site: Any, open_registry: Any, fresh: Callable[..., Any]) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    site.install("off-one", plugin="off", architectures=["Off"])
    registry = open_registry(disabled=["off"])
    spec = registry.resolve(ASKED)
    expected = {record.name: (record.distribution, record.state) for record in registry.plugins}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=report, args=(registry.settings, queue))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert found == (spec.name, registry.architectures, registry.fingerprint(), expected)
    assert expected["off"] == ("off-one", "disabled")


def test_a_closed_registry_makes_nothing_new(open_registry: Callable[..., Any]) -> None:
    registry = open_registry()
    registry.close()
    for name in ("executor", "preprocess_store", "embedding_cache"):
        with pytest.raises(UsageError, match="closed"):
            getattr(registry, name)
