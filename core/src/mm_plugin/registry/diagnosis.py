"""Everything that a plugin's specs name, imported and checked ahead of use: for diagnosis, never while serving."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mm_plugin.errors import PluginLoadError
from mm_plugin.registry.contracts import CONTRACTS
from mm_plugin.registry.loading import load_named, load_reference, record_failure
from mm_plugin.runtime import waiting

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
    plugin = load_named(catalog, name)
    with waiting(plugin.importing, catalog.closed):
        if plugin.state == "loaded":
            began = time.perf_counter()
            errors = _faulty_references(plugin)
            seconds = time.perf_counter() - began
            if errors:
                first, *others = errors
                record_failure(catalog, plugin, "classes", first.__cause__ or first, seconds)
                said = [plugin.facts["error"], *(error.message.removeprefix(f"{plugin.label}: ") for error in others)]
                plugin.facts["error"] = "; ".join(said)
                if catalog.settings.strict:
                    raise plugin.load_error() from first
            else:
                plugin.facts["elapsed_ms"] = round(plugin.facts["elapsed_ms"] + seconds * 1e3, 3)
        return plugin.record()


def _faulty_references(plugin: Plugin) -> list[PluginLoadError]:
    """Load everything that the specs name; the errors of what cannot be used."""
    errors: list[PluginLoadError] = []
    for spec in plugin.specs:
        for field in CONTRACTS:
            # `padding` may be the name of a rule in place of a reference.
            if ":" in (getattr(spec, field) or ""):
                try:
                    load_reference(plugin, spec, field)
                except PluginLoadError as error:
                    errors.append(error)
    return errors
