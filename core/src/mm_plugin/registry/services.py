"""Services: what the core and the plugins offer by name, of each kind in the claim table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mm_plugin.errors import PluginLoadError, UsageError
from mm_plugin.registry.claims import CLAIM_GROUPS, STORES, ClaimGroup
from mm_plugin.registry.contracts import import_reference
from mm_plugin.registry.loading import load
from mm_plugin.registry.plugin import translate_errors

if TYPE_CHECKING:
    from mm_plugin.cache.store import Store
    from mm_plugin.registry.discovery import Catalog


def services_of(catalog: Catalog, kind: str) -> dict[str, Any]:
    """Every service of a kind, by name: the core's own, and those that one enabled, working plugin offers.

    Args:
        catalog: the installed plugins; those that claim this kind are imported.
        kind: a kind in the claim table, such as `observers`.

    Raises:
        PluginLoadError: with `strict`, when a plugin that claims one is broken.
    """
    group = CLAIM_GROUPS[kind]
    found: dict[str, Any] = {}
    for name in catalog.claimed(group):
        enabled = [plugin for plugin in catalog.claimants(group, name) if plugin.enabled]
        if len(enabled) == 1 and load(catalog, enabled[0], chosen=True):
            found[name] = enabled[0].services[kind][name]
    return found | {name: import_reference(reference) for name, reference in group.built_in.items()}


def make_service(catalog: Catalog, group: ClaimGroup, name: str, *arguments: Any) -> Any:
    """What the factory of a service makes.

    Args:
        catalog: the installed plugins; the one that claims the name is imported.
        group: a row of the claim table with `makes`.
        name: the service.
        *arguments: for the factory.

    Raises:
        UsageError: there is no such service; the message lists those there are.
        PluginLoadError: the plugin that claims it is broken or in conflict, or its factory fails.
    """
    assert group.makes is not None
    if name in group.built_in:
        return import_reference(group.built_in[name])(*arguments)
    enabled = [plugin for plugin in catalog.claimants(group, name) if plugin.enabled]
    hidden = [plugin for plugin in catalog.claimants(group, name) if plugin.state == "shadowed"]
    if not enabled and hidden:
        raise hidden[0].load_error()
    if not enabled:
        known = ", ".join([*group.built_in, *catalog.served(group)])
        raise UsageError(f"unknown {group.noun} {name!r}; known: {known}", argument=group.noun)
    plugin = enabled[0]
    if len(enabled) > 1 or not load(catalog, plugin, chosen=True):
        raise plugin.load_error()
    with translate_errors(plugin, PluginLoadError, f"{group.noun} {name!r} could not be made"):
        made = plugin.services[group.kind][name](*arguments)
    if not isinstance(made, import_reference(group.makes)):
        expected = group.makes.replace(":", ".")
        raise PluginLoadError(
            f"{plugin.label}: {group.noun} {name!r} must be a {expected}, got {type(made).__name__}", **plugin.owner
        )
    return made


def make_store(catalog: Catalog, name: str, capacity_bytes: int) -> Store:
    """A new store: `memory`, or one that a plugin claims in the group `mm_plugin.stores`.

    Args:
        catalog: the installed plugins.
        name: of the store.
        capacity_bytes: the most that its entries may take, bytes.

    Raises:
        UsageError, PluginLoadError: as for `make_service`.
    """
    store: Store = make_service(catalog, STORES, name, capacity_bytes)
    return store
