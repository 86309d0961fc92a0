"""Everything that a plugin's specs name, imported and checked ahead of use: for diagnosis, never while serving."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mm_plugin.errors import PluginLoadError
from mm_plugin.registry.loading import REFERENCES, load_named, load_reference, record_failure

if TYPE_CHECKING:
    from mm_plugin.registry.discovery import Catalog
    from mm_plugin.registry.plugin import Plugin
    from mm_plugin.registry.records import PluginRecord


def check_plugin(catalog: Catalog, name: str) -> PluginRecord:
    """Import one plugin and everything that its specs name, and return its record.

    Args:
        catalog: the installed plugins, `Registry.catalog`.
        name: the plugin's name.

    Raises:
        UsageError: no installed plugin has this name.
        PluginLoadError: with `strict`, when it is broken.
    """
    with catalog.lock:
        plugin = load_named(catalog, name)
        if plugin.state == "loaded":
            began = time.perf_counter()
            try:
                _load_references(plugin)
            except PluginLoadError as error:
                record_failure(plugin, "classes", error.__cause__ or error, time.perf_counter() - began)
                if catalog.settings.strict:
                    raise plugin.load_error() from error
            else:
                elapsed = plugin.facts["elapsed_ms"] + (time.perf_counter() - began) * 1e3
                plugin.facts["elapsed_ms"] = round(elapsed, 3)
        return plugin.record()


def _load_references(plugin: Plugin) -> None:
    for spec in plugin.specs:
        for field in REFERENCES:
            # `padding` may be the name of a rule in place of a reference.
            if ":" in (getattr(spec, field) or ""):
                load_reference(plugin, spec, field)
