"""`PrometheusObserver`: counts what happens in a process. Labels are bounded: none holds a path, an identity or a message."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from mm_plugin.events import (
    DeviceSync,
    EncodeBatch,
    Event,
    FallbackUsed,
    ItemFailed,
    ItemKeyed,
    RequestFailed,
    RequestProcessed,
)

# Seconds; from a repeated image to a long video.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one collector registry. Final; made once for each, by `metrics_of`.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"mm_plugin_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"mm_plugin_{name}_seconds", what, labels, registry=registry, buckets=BUCKETS)

        self.requests = counter("requests", "Requests by result: ok, or the code of the error.", "plugin", "code")
        self.request_seconds = seconds("request", "Time to process a request.", "plugin")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of expanded prompts.", "plugin")
        self.items = counter("items", "Items, and whether the cache had them.", "plugin", "modality", "cached")
        self.item_tokens = counter("item_tokens", "Tokens that take an embedding.", "plugin", "modality")
        self.item_seconds = seconds("item", "Time spent on one media input.", "modality", "cached")
        self.encoder_calls = counter("encoder_calls", "Calls of encoders.", "modality")
        self.encoder_items = counter("encoder_items", "Items that encoders encoded.", "modality")
        self.encoder_tokens = counter("encoder_tokens", "Embeddings that encoders made.", "modality")
        self.encoder_seconds = seconds("encoder", "Time of one encoder call, on the host.", "modality")
        self.items_failed = counter("items_failed", "Items that could not be embedded.", "code")
        self.fallbacks = counter("fallbacks", "Models opened by a fallback plugin.", "plugin")
        self.device_syncs = counter("device_syncs", "Times that the host waited for the device.", "what")
        self.events = counter("events", "Events of every kind, those of other plugins too.", "event")


_METRICS: weakref.WeakKeyDictionary[CollectorRegistry, Metrics] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def metrics_of(registry: CollectorRegistry) -> Metrics:
    """The metrics of a collector registry, which takes each name once, however many observers count into it."""
    with _LOCK:
        if registry not in _METRICS:
            _METRICS[registry] = Metrics(registry)
        return _METRICS[registry]


class PrometheusObserver:
    """Counts events into a collector registry of `prometheus_client`. Final; thread-safe; an observer of mm-plugin.

    Args:
        registry: where the metrics are; several observers may share one.

    Example:
        >>> from mm_plugin.events import EncodeBatch, Observers
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> observers = Observers([PrometheusObserver(registry)])
        >>> observers.emit(EncodeBatch(modality="image", num_items=3, num_tokens=768, elapsed_ms=5.0))
        >>> registry.get_sample_value("mm_plugin_encoder_tokens_total", {"modality": "image"})
        768.0
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = metrics_of(registry)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self._metrics.events.labels(type(event).__name__).inc()
        count = _COUNTS.get(type(event))
        if count is not None:
            count(self._metrics, event)


def _processed(metrics: Metrics, event: RequestProcessed) -> None:
    metrics.requests.labels(event.plugin, "ok").inc()
    metrics.request_seconds.labels(event.plugin).observe(event.elapsed_ms / 1e3)
    metrics.prompt_tokens.labels(event.plugin).inc(event.num_prompt_tokens)


def _failed(metrics: Metrics, event: RequestFailed) -> None:
    metrics.requests.labels(event.plugin, event.code).inc()
    metrics.request_seconds.labels(event.plugin).observe(event.elapsed_ms / 1e3)


def _keyed(metrics: Metrics, event: ItemKeyed) -> None:
    cached = "true" if event.cached else "false"
    metrics.items.labels(event.plugin, event.modality, cached).inc()
    metrics.item_tokens.labels(event.plugin, event.modality).inc(event.num_tokens)
    metrics.item_seconds.labels(event.modality, cached).observe(event.elapsed_ms / 1e3)


def _encoded(metrics: Metrics, event: EncodeBatch) -> None:
    metrics.encoder_calls.labels(event.modality).inc()
    metrics.encoder_items.labels(event.modality).inc(event.num_items)
    metrics.encoder_tokens.labels(event.modality).inc(event.num_tokens)
    metrics.encoder_seconds.labels(event.modality).observe(event.elapsed_ms / 1e3)


_COUNTS: Mapping[type[Event], Callable[[Metrics, Any], None]] = {
    RequestProcessed: _processed,
    RequestFailed: _failed,
    ItemKeyed: _keyed,
    EncodeBatch: _encoded,
    ItemFailed: lambda metrics, event: metrics.items_failed.labels(event.code).inc(),
    FallbackUsed: lambda metrics, event: metrics.fallbacks.labels(event.plugin).inc(),
    DeviceSync: lambda metrics, event: metrics.device_syncs.labels(event.what).inc(),
}
