"""Every event is counted where the README says, and what a registry's caches hold is reported while it is asked for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mm_plugin import Settings, discover
from mm_plugin.events import (
    DeviceSync,
    EncodeBatch,
    Event,
    FallbackUsed,
    HashIgnored,
    ItemDropped,
    ItemFailed,
    ItemKeyed,
    RequestFailed,
    RequestProcessed,
)
from mm_plugin_prometheus import PrometheusObserver, collect_caches


def keyed(cached: bool, tokens: int) -> ItemKeyed:
    return ItemKeyed(
        plugin="toy",
        path="images[0]",
        modality="image",
        identity="ab" * 32,
        num_tokens=tokens,
        cached=cached,
        elapsed_ms=2.0,
    )


CASES: list[tuple[list[Event], dict[str, dict[str, str]], list[float]]] = [
    (
        [RequestProcessed(plugin="toy", num_prompt_tokens=70, num_items=2, elapsed_ms=4.0)] * 2,
        {
            "mm_plugin_requests_total": {"plugin": "toy", "code": "ok"},
            "mm_plugin_prompt_tokens_total": {"plugin": "toy"},
            "mm_plugin_request_seconds_sum": {"plugin": "toy"},
            "mm_plugin_request_seconds_count": {"plugin": "toy"},
        },
        [2, 140, 0.008, 2],
    ),
    (
        [RequestFailed(plugin="toy", code="media", path="images[0]", error="broken", elapsed_ms=1.0)],
        {
            "mm_plugin_requests_total": {"plugin": "toy", "code": "media"},
            "mm_plugin_request_seconds_count": {"plugin": "toy"},
        },
        [1, 1],
    ),
    (
        [keyed(False, 64), keyed(True, 64), keyed(True, 4)],
        {
            "mm_plugin_items_total": {"plugin": "toy", "modality": "image", "cached": "true"},
            "mm_plugin_item_tokens_total": {"plugin": "toy", "modality": "image"},
            "mm_plugin_item_seconds_count": {"modality": "image", "cached": "false"},
        },
        [2, 132, 1],
    ),
    (
        [EncodeBatch(modality="video", num_items=3, num_tokens=99, elapsed_ms=7.0)],
        {
            "mm_plugin_encoder_calls_total": {"modality": "video"},
            "mm_plugin_encoder_items_total": {"modality": "video"},
            "mm_plugin_encoder_tokens_total": {"modality": "video"},
            "mm_plugin_encoder_seconds_sum": {"modality": "video"},
        },
        [1, 3, 99, 0.007],
    ),
    (
        [ItemFailed(request=0, item=1, code="encoder", error="no")],
        {"mm_plugin_items_failed_total": {"code": "encoder"}},
        [1],
    ),
    ([FallbackUsed(asked="A", plugin="auto", why="x")], {"mm_plugin_fallbacks_total": {"plugin": "auto"}}, [1]),
    ([DeviceSync(what="rows")], {"mm_plugin_device_syncs_total": {"what": "rows"}}, [1]),
    (
        [ItemDropped(path="images[0]", why="x"), HashIgnored(path="mm_hashes", why="y")],
        {"mm_plugin_events_total": {"event": "ItemDropped"}},
        [1],
    ),
]


@pytest.mark.parametrize(("events", "samples", "values"), CASES, ids=range(len(CASES)))
def test_events_are_counted(events: list[Event], samples: dict[str, dict[str, str]], values: list[float]) -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for event in events:
        observer(event)
    assert [registry.get_sample_value(name, labels) for name, labels in samples.items()] == pytest.approx(values)
    total = sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "mm_plugin_events_total"
    )
    assert total == len(events)


def test_an_event_of_another_plugin_is_counted_by_its_name() -> None:
    class Cooled(Event, frozen=True, kw_only=True):
        degrees: int

    registry = CollectorRegistry()
    PrometheusObserver(registry)(Cooled(degrees=3))
    assert registry.get_sample_value("mm_plugin_events_total", {"event": "Cooled"}) == 1


def test_observers_of_one_collector_registry_share_its_metrics() -> None:
    registry = CollectorRegistry()
    observers = [PrometheusObserver(registry) for _ in range(3)]

    def work(observer: PrometheusObserver) -> None:
        for _ in range(500):
            observer(keyed(True, 2))

    threads = [threading.Thread(target=work, args=(observer,)) for observer in observers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    labels = {"plugin": "toy", "modality": "image"}
    assert registry.get_sample_value("mm_plugin_item_tokens_total", labels) == 3000


def test_no_label_holds_what_a_client_sent() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for events, _, _ in CASES:
        for event in events:
            observer(event)
    text = generate_latest(registry).decode()
    assert "images[0]" not in text
    assert "abab" not in text


def test_the_readme_lists_every_metric() -> None:
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    with discover(Settings()) as models:
        end = collect_caches(models, registry)
        names = {metric.name for metric in registry.collect()}
        end()
    # An installed wheel carries its README as the description.
    listed = (
        importlib.metadata.metadata("mm-plugin-prometheus").get_payload()
        or importlib.metadata.metadata("mm-plugin-prometheus")["Description"]
    )
    for name in names:
        short = name.replace("mm_plugin_cache", "")
        assert f"`{name}" in listed or f"`{short}_total`" in listed, name


def test_caches_are_read_when_they_are_asked_for() -> None:
    registry = CollectorRegistry()

    def bytes_held() -> Any:
        return registry.get_sample_value("mm_plugin_cache_bytes", {"cache": "preprocess"})

    with discover(Settings()) as models:
        end = collect_caches(models, registry)
        assert bytes_held() == 0
        models.preprocess_store.put(b"key", "value", 7)
        assert bytes_held() == 7
        assert registry.get_sample_value("mm_plugin_cache_hits_total", {"cache": "embedding"}) == 0
        end()
        assert bytes_held() is None
        collect_caches(models, registry)()  # once more, after the first was ended


CODE = """
import prometheus_client
from mm_plugin import discover
from mm_plugin.events import DeviceSync
for _ in range(2):
    with discover() as registry:
        registry.observers.emit(DeviceSync(what="rows"))
print(prometheus_client.REGISTRY.get_sample_value("mm_plugin_device_syncs_total", {"what": "rows"}))
"""


def test_it_is_found_by_every_registry_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("2.0", 0), done.stderr
