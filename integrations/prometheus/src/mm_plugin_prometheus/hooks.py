"""The declarations of this plugin."""

from __future__ import annotations

from collections.abc import Mapping

from mm_plugin import hookimpl
from mm_plugin.events import Observer


@hookimpl
def mm_register_observers() -> Mapping[str, Observer]:
    """One observer, into the default collector registry of `prometheus_client`."""
    from prometheus_client import REGISTRY

    from mm_plugin_prometheus.observer import PrometheusObserver

    return {"prometheus": PrometheusObserver(REGISTRY)}
