"""Observers and stores that plugins offer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from records import record_of

from mm_plugin import (
    PluginLoadError,
    UsageError,
)
from mm_plugin.cache import MemoryStore
from mm_plugin.events import FallbackUsed

HEADER = "from mm_plugin import Modality, ModelSpec, hookimpl\n"


# ---------------------------------------------------------------- observers


EVENT = FallbackUsed(asked="a", plugin="b", why="c")


def test_observers_of_plugins_hear_events_and_broken_ones_do_not_stop_them(
    site: Any, open_registry: Any, log: Any
) -> None:
    source = f"{HEADER}heard = []\n@hookimpl\ndef mm_register_observers():\n    return {{'seen': heard.append}}\n"
    site.install("watcher", source, observers=["seen"])
    site.install("blind", "raise OSError\n", observers=["unseen"])
    registry = open_registry()
    assert site.imports("watcher") == 0
    registry.observers.emit(EVENT)
    assert sys.modules["watcher.hooks"].heard == [EVENT]
    assert registry.observers is registry.observers
    assert record_of(registry, "blind").state == "failed"
    assert len([line for line in log("WARNING") if "blind" in line]) == 1


def test_a_disabled_observer_hears_nothing(site: Any, open_registry: Any) -> None:
    source = f"{HEADER}heard = []\n@hookimpl\ndef mm_register_observers():\n    return {{'seen': heard.append}}\n"
    site.install("watcher", source, observers=["seen"])
    open_registry(disabled=["watcher"]).observers.emit(EVENT)
    assert site.imports("watcher") == 0


def test_a_conflict_about_a_model_does_not_silence_the_plugin_s_observer(site: Any, open_registry: Any) -> None:
    services = "heard = []\n@hookimpl\ndef mm_register_observers():\n    return {'seen': heard.append}\n"
    site.install(
        "watcher", site.hooks({"architectures": ("A",)}, services=services), architectures=["A"], observers=["seen"]
    )
    site.install("dist-a", architectures=["A"])
    open_registry().observers.emit(EVENT)
    assert sys.modules["watcher.hooks"].heard == [EVENT]


def test_strict_raises_for_a_broken_observer_every_time(site: Any, open_registry: Any) -> None:
    site.install("watcher", "raise OSError\n", observers=["seen"])
    registry = open_registry(strict=True)
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="watcher"):
            registry.observers  # noqa: B018


# ---------------------------------------------------------------- stores


STORE = """
from mm_plugin import hookimpl
from mm_plugin.cache import MemoryStore, Stats, Store

log = []


class Kept(Store):
    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes

    def get(self, key):
        return None

    def put(self, key, value, num_bytes):
        log.append(("put", key))
        return True

    def delete(self, key):
        pass

    def pin(self, key):
        return False

    def unpin(self, key):
        pass

    def clear(self):
        pass

    def stats(self):
        return Stats()

    def close(self):
        log.append(("close", self.capacity_bytes))
        if self.capacity_bytes == 13:
            raise OSError("cannot be closed")


@hookimpl
def mm_register_stores():
    return {"kept": Kept, "torn": lambda size: 1 / 0, "odd": lambda size: {}}
"""


@pytest.fixture
def store_log(site: Any) -> Callable[[], list[Any]]:
    site.install("keeper", STORE, stores=["kept", "torn", "odd"])
    return lambda: sys.modules["keeper.hooks"].log


def test_a_store_of_a_plugin_is_made_by_name_and_closed_with_the_registry(
    store_log: Any, site: Any, open_registry: Any
) -> None:
    registry = open_registry(
        preprocess_store="kept", embedding_store="kept", preprocess_cache_bytes=11, embedding_cache_bytes=12
    )
    assert site.imports("keeper") == 0
    assert registry.preprocess_store.capacity_bytes == 11
    assert registry.preprocess_store is registry.preprocess_store
    assert registry.embedding_cache is registry.embedding_cache
    registry.close()
    registry.close()
    assert sorted(store_log()) == [("close", 11), ("close", 12)]


@pytest.mark.parametrize("setting", ["preprocess_store", "embedding_store"])
def test_each_cache_has_a_store_of_its_own_kind(setting: str, store_log: Any, open_registry: Any) -> None:
    registry = open_registry(**{setting: "kept"})
    prepared, embeddings = registry.preprocess_store, registry.embedding_cache.store
    assert isinstance(prepared, MemoryStore) == (setting == "embedding_store")
    assert isinstance(embeddings, MemoryStore) == (setting == "preprocess_store")


def test_a_store_that_cannot_be_made_names_the_plugin(store_log: Any, open_registry: Any) -> None:
    registry = open_registry()
    with pytest.raises(PluginLoadError, match=r"keeper \(keeper 1.0\).*ZeroDivisionError") as caught:
        registry.make_store("torn", 1)
    assert caught.value.plugin == "keeper"
    with pytest.raises(
        PluginLoadError, match=r"keeper \(keeper 1.0\).*must be a mm_plugin.cache.store.Store, got dict"
    ):
        registry.make_store("odd", 1)


def test_an_unknown_store_lists_those_there_are(store_log: Any, open_registry: Any) -> None:
    with pytest.raises(UsageError, match="unknown store 'lost'; known: memory, kept, odd, torn"):
        open_registry().make_store("lost", 1)
    with pytest.raises(UsageError, match=r"unknown store 'kept'; known: memory$"):
        open_registry(disabled=["keeper"]).make_store("kept", 1)


def test_a_store_of_a_broken_or_disputed_plugin_is_refused(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "raise OSError('lost')\n", stores=["lost"])
    site.install("keeper-1", STORE, stores=["kept", "torn", "odd"])
    site.install("keeper-2", STORE, stores=["kept", "torn", "odd"])
    registry = open_registry()
    with pytest.raises(PluginLoadError, match="lost"):
        registry.make_store("lost", 1)
    with pytest.raises(PluginLoadError, match=r"keeper-2 1\.0"):
        registry.make_store("kept", 1)


@pytest.mark.parametrize("first", ["executor", "preprocess_store"])
def test_the_executor_is_idle_before_a_store_is_closed(first: str, store_log: Any, open_registry: Any) -> None:
    registry = open_registry(preprocess_store="kept", preprocess_cache_bytes=11, threads=1)
    getattr(registry, first)
    store, started = registry.preprocess_store, threading.Event()

    def item() -> None:
        started.set()
        time.sleep(0.1)
        store.put("late", None, 1)

    registry.executor.submit(item)
    assert started.wait(10)
    registry.close()
    assert store_log() == [("put", "late"), ("close", 11)]


def test_a_store_that_cannot_be_closed_keeps_nothing_else_open(store_log: Any, open_registry: Any, log: Any) -> None:
    registry = open_registry(
        preprocess_store="kept", embedding_store="kept", preprocess_cache_bytes=13, embedding_cache_bytes=12
    )
    pool = registry.executor
    assert registry.embedding_cache is not registry.preprocess_store
    registry.close()
    assert sorted(store_log()) == [("close", 12), ("close", 13)]
    with pytest.raises(UsageError, match="after shutdown"):
        pool.submit(int, "3")
    assert len(log("WARNING")) == 1
