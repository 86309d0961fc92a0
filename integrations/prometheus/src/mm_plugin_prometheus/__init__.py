"""Prometheus metrics of mm-plugin. Installed, it observes every registry of the process; see the README for each metric."""

from mm_plugin_prometheus.caches import collect_caches
from mm_plugin_prometheus.observer import PrometheusObserver

__version__ = "0.1.0"
__all__ = ["PrometheusObserver", "collect_caches"]
