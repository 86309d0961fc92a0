"""What a registry found, for tests."""

from __future__ import annotations

from mm_plugin import PluginRecord, Registry


def record_of(registry: Registry, name: str) -> PluginRecord:
    """The one record of a plugin."""
    (found,) = [record for record in registry.plugins if record.name == name]
    return found
