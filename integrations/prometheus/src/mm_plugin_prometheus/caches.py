"""What the caches hold and how often they were hit, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from mm_plugin import Registry
    from mm_plugin.cache import Stats

_COUNTED = ("hits", "misses", "joins", "evictions", "rejected", "mismatches", "errors")
_HELD = ("entries", "pinned", "bytes")


class _Caches(Collector):
    def __init__(self, caches: Mapping[str, Callable[[], Stats]]) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        stats = {name: read() for name, read in self._caches.items()}
        for field in _COUNTED:
            counter = CounterMetricFamily(f"mm_plugin_cache_{field}", f"Stats.{field} of each cache.", labels=["cache"])
            for name, found in stats.items():
                counter.add_metric([name], getattr(found, field))
            yield counter
        for field in _HELD:
            gauge = GaugeMetricFamily(f"mm_plugin_cache_{field}", f"Stats.{field} of each cache.", labels=["cache"])
            for name, found in stats.items():
                gauge.add_metric([name], getattr(found, field))
            yield gauge


def collect_caches(registry: Registry, into: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Report the caches of an mm-plugin registry: prepared items (`preprocess`) and embeddings (`embedding`).

    Args:
        registry: opened by `mm_plugin.discover`; it is kept alive until the reporting is ended.
        into: of `prometheus_client`.

    Returns:
        Ends the reporting; call it before another registry of the process is reported.

    Example:
        >>> from mm_plugin import discover
        >>> from prometheus_client import CollectorRegistry
        >>> metrics = CollectorRegistry()
        >>> with discover() as registry:
        ...     end = collect_caches(registry, metrics)
        ...     value = metrics.get_sample_value("mm_plugin_cache_entries", {"cache": "preprocess"})
        ...     end()
        >>> value
        0.0
    """
    caches = {
        "preprocess": registry.runtime.preprocess_cache.stats,
        "embedding": registry.embedding_cache.stats,
    }
    collector = _Caches(caches)
    into.register(collector)
    return lambda: into.unregister(collector)
