"""Entry points -> `Catalog`: the installed plugins and their claims, from metadata alone. Imports no plugin."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from mm_plugin.errors import UsageError
from mm_plugin.forking import new_rlock
from mm_plugin.registry.claims import CLAIM_GROUPS, PLUGINS, ClaimGroup, group_of, is_claim
from mm_plugin.registry.distributions import Distribution, Entry, find_distributions
from mm_plugin.registry.plugin import Plugin

if TYPE_CHECKING:
    from mm_plugin.registry.records import PluginRecord
    from mm_plugin.settings import Settings

logger = logging.getLogger("mm_plugin")

# A conflict names no more plugins than this: its text would grow with the square of their number.
_MOST_NAMED = 8


class Catalog:
    """The installed plugins, their claims, and notices: what the modules of this package share. Final.

    Example:
        >>> from mm_plugin.settings import Settings
        >>> catalog = read_catalog(Settings())
        >>> [record.name for record in catalog.records() if record.state == "loaded"]
        []

    Attributes:
        settings: which plugins are enabled, and whether the first fault is raised.
        lock: held for moments, while the state of a plugin is read or changed; no code of a plugin runs under it, and nothing
            that takes another lock.
        closed: set when the registry is closed; whoever waits for an import then waits no longer.
        plugins: every installed plugin, sorted by name.
        notices: faults that belong to no plugin, one line each.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lock = new_rlock()
        self.closed = threading.Event()
        self.plugins: list[Plugin] = []
        self.notices: tuple[str, ...] = ()
        self._claims: dict[tuple[str, str], list[Plugin]] = {}

    def records(self) -> tuple[PluginRecord, ...]:
        """A record for every installed plugin, broken or not."""
        with self.lock:
            return tuple(plugin.record() for plugin in self.plugins)

    def named(self, name: str) -> list[Plugin]:
        """The plugins of a name; several are a conflict.

        Raises:
            UsageError: there is none.
        """
        plugins = [plugin for plugin in self.plugins if plugin.name == name]
        plugins = [plugin for plugin in plugins if plugin.state != "shadowed"] or plugins
        if not plugins:
            known = ", ".join(sorted({plugin.name for plugin in self.plugins})) or "none"
            raise UsageError(f"no plugin {name!r} is installed; installed: {known}", argument="name")
        return plugins

    def claimants(self, group: ClaimGroup, name: str) -> list[Plugin]:
        """Every plugin that claims a name, disabled ones too."""
        return self._claims.get((group.kind, name), [])

    def claimed(self, group: ClaimGroup) -> list[str]:
        """Every name that is claimed in a group, sorted."""
        return sorted(name for kind, name in self._claims if kind == group.kind)

    def served(self, group: ClaimGroup) -> tuple[str, ...]:
        """The names with exactly one enabled claimant, unless it is known to be broken, sorted."""

        def serves(plugins: Sequence[Plugin]) -> bool:
            enabled = [plugin for plugin in plugins if plugin.enabled]
            return len(enabled) == 1 and (enabled[0].state in ("available", "loaded") or enabled[0].disputed)

        return tuple(name for name in self.claimed(group) if serves(self.claimants(group, name)))

    def fingerprint(self) -> str:
        """A digest of which plugins are installed and enabled, 64 hexadecimal digits."""
        facts = [
            (record.name, record.distribution, record.version, record.entry_point, record.claims)
            for record in self.records()
            if record.state != "disabled"
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def notice(self, text: str) -> None:
        """Keep a notice, and log it."""
        self.notices = (*self.notices, text)
        logger.warning("mm-plugin: %s", text)

    def add(self, plugins: Iterable[Plugin]) -> None:
        """Add plugins with their claims."""
        self.plugins = sorted([*self.plugins, *plugins], key=lambda plugin: (plugin.name, plugin.module))
        self._claims = {}
        locks: dict[str, threading.RLock] = {}
        for plugin in self.plugins:
            plugin.importing = locks.setdefault(plugin.package, plugin.importing)
            for kind, names in plugin.claims.items():
                for name in names:
                    self._claims.setdefault((kind, name), []).append(plugin)

    def shared(self) -> list[tuple[ClaimGroup, str, list[Plugin]]]:
        """The exclusive claims that more than one enabled plugin makes: group, name, plugins."""
        found = []
        for (kind, name), plugins in self._claims.items():
            enabled = [plugin for plugin in plugins if plugin.enabled]
            if CLAIM_GROUPS[kind].exclusive and len(enabled) > 1:
                found.append((CLAIM_GROUPS[kind], name, enabled))
        return found


def read_catalog(settings: Settings, notices: Iterable[str] = ()) -> Catalog:
    """Read what the installed plugins claim.

    Args:
        settings: which plugins are enabled.
        notices: what was found before, such as unknown environment variables.

    Raises:
        PluginLoadError: with `strict`, when a claim is in conflict or belongs to no plugin.
        UsageError: with `strict`, when there is a notice.
    """
    catalog = Catalog(settings)
    for notice in notices:
        catalog.notice(notice)
    catalog.add(_read_plugins(catalog))
    _apply_settings(catalog)
    _find_conflicts(catalog)
    if settings.strict:
        for plugin in catalog.plugins:
            if plugin.state in ("conflict", "failed", "shadowed"):
                raise plugin.load_error()
        if catalog.notices:
            raise UsageError("; ".join(catalog.notices), argument="settings")
    return catalog


# -------------------------------------------------------------------- metadata


def _read_plugins(catalog: Catalog) -> list[Plugin]:
    """The plugins of every distribution on the path, with their claims; hidden ones with what they alone claim."""
    plugins: list[Plugin] = []
    known: dict[str, set[tuple[str, str]]] = {}
    for dist in find_distributions(lambda group: group == PLUGINS or is_claim(group), catalog.notice):
        seen = known.setdefault(dist.key, set())
        found = _plugins_of(catalog, dist)
        if dist.hidden_by is not None:
            found = [plugin for plugin in found if _hides_something(plugin, seen)]
        seen.update((entry.group, entry.name) for entry in dist.entries)
        for plugin in found:
            if dist.hidden_by is not None:
                _shadow(plugin, dist.hidden_by)
            elif dist.unreadable is not None:
                error = (
                    f"the entry points of {plugin.distribution} in {dist.location} cannot be read: {dist.unreadable}"
                )
                hint = f"pip install --force-reinstall {plugin.distribution}"
                plugin.refuse("failed", stage="discover", code="unreadable_metadata", error=error, hint=hint)
        plugins += found
    return plugins


def _hides_something(plugin: Plugin, seen: AbstractSet[tuple[str, str]]) -> bool:
    """Whether a plugin of a hidden distribution claims what no other one of its name does; it keeps those claims alone."""
    claims = {
        kind: [name for name in names if (CLAIM_GROUPS[kind].entry_points, name) not in seen]
        for kind, names in plugin.claims.items()
    }
    plugin.claims = {kind: names for kind, names in claims.items() if names}
    return bool(plugin.claims) or (PLUGINS, plugin.name) not in seen


def _plugins_of(catalog: Catalog, dist: Distribution) -> list[Plugin]:
    """A plugin for each entry point in the group of plugins, with the claims of its distribution for the same module."""
    plugins: list[Plugin] = []
    claims: list[tuple[ClaimGroup, Entry]] = []
    for entry in dist.entries:
        if entry.group == PLUGINS:
            plugins.append(Plugin(entry.name, entry.value, dist))
        elif (group := group_of(entry.group)) is not None:
            claims.append((group, entry))
        elif dist.hidden_by is None:
            known = ", ".join(row.entry_points for row in CLAIM_GROUPS.values())
            catalog.notice(
                f"{entry.name!r} is claimed in the unknown entry-point group {entry.group!r}; known: {known}"
            )
    by_module = {plugin.module: plugin for plugin in plugins}
    for group, entry in claims:
        plugin = by_module.get(entry.value)
        if plugin is None:
            plugin = by_module[entry.value] = _orphan(group, entry, dist)
            plugins.append(plugin)
        plugin.claims.setdefault(group.kind, []).append(entry.name)
    return plugins


def _orphan(group: ClaimGroup, entry: Entry, dist: Distribution) -> Plugin:
    """A claim without a plugin, as a broken plugin of its own."""
    plugin = Plugin(entry.name, entry.value, dist)
    plugin.refuse(
        "failed",
        stage="discover",
        code="orphan_claim",
        error=f"{group.entry_points} claims {entry.name!r} for {entry.value!r}, but its distribution has no entry point for "
        f"this module in the group {PLUGINS!r}",
        hint=f"add '{entry.name} = \"{entry.value}\"' to [project.entry-points.{PLUGINS}] and reinstall",
    )
    return plugin


def _shadow(plugin: Plugin, by: Distribution) -> None:
    """Take a plugin out of use whose distribution another one of the same name hides, and log it."""
    plugin.refuse(
        "shadowed",
        stage="discover",
        code="shadowed",
        error=f"{plugin.distribution} {plugin.version} in {plugin.dist.location} is hidden by {by.name} {by.version}, which is "
        f"earlier on the path and does not claim the same: {by.place}",
        hint=f"remove {by.place}, or reinstall {by.name} there",
    )
    logger.warning("mm-plugin: %s", plugin.record().summary())


# -------------------------------------------------------------------- disabled plugins and conflicts


def _apply_settings(catalog: Catalog) -> None:
    """Apply the allow-list and the block-list; a name that matches no plugin is a notice."""
    settings = catalog.settings
    known = sorted({plugin.name for plugin in catalog.plugins})
    for variable, names in (("MM_PLUGIN_ONLY", settings.only), ("MM_PLUGIN_DISABLED", settings.disabled)):
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"installed: {', '.join(known) or 'none'}"
                catalog.notice(f"{variable} names {name!r}, but no plugin of this name is installed; {hint}")
    for plugin in catalog.plugins:
        if plugin.name in settings.disabled:
            _disable(plugin, "is in MM_PLUGIN_DISABLED", f"remove {plugin.name!r} from MM_PLUGIN_DISABLED")
        elif settings.only and plugin.name not in settings.only:
            _disable(plugin, "is not in MM_PLUGIN_ONLY", f"add {plugin.name!r} to MM_PLUGIN_ONLY")


def _disable(plugin: Plugin, why: str, hint: str) -> None:
    plugin.refuse("disabled", stage="discover", code="disabled", error=f"{plugin.name} {why}", hint=hint)


def _find_conflicts(catalog: Catalog) -> None:
    """Mark plugins that share a name or an exclusive claim; the conflict names each of them."""
    names: dict[str, list[Plugin]] = {}
    for plugin in catalog.plugins:
        if plugin.state == "available":
            names.setdefault(plugin.name, []).append(plugin)
    for name, plugins in names.items():
        if len(plugins) > 1:
            _mark_conflict(plugins, f"plugin name {name!r}", "name_conflict", "uninstall one of them")
    for group, name, plugins in catalog.shared():
        hint = f"MM_PLUGIN_DISABLED={plugins[-1].name}, or pass plugin={plugins[0].name!r}"
        _mark_conflict(plugins, f"{group.noun} {name!r}", "claim_conflict", hint)


def _mark_conflict(plugins: Sequence[Plugin], what: str, code: str, hint: str) -> None:
    labels = [plugin.label for plugin in plugins]
    for index, plugin in enumerate(plugins):
        if plugin.state == "available":
            # One more than is shown, since the plugin itself is left out.
            others = labels[: _MOST_NAMED + 1]
            others = others[:index] + others[index + 1 :] if index <= _MOST_NAMED else others[:-1]
            error = f"{plugin.name} claims {what}, also claimed by {_listed(others, len(labels) - 1)}"
            plugin.refuse("conflict", stage="discover", code=code, error=error, hint=hint)
    logger.warning(
        "mm-plugin: %s is claimed by %s; %s", what, _listed(labels[:_MOST_NAMED], len(labels), " and "), hint
    )


def _listed(labels: Sequence[str], count: int, comma: str = ", ") -> str:
    """Some of so many, and how many others there are."""
    more = [f"{count - len(labels)} others"] if count > len(labels) else []
    return comma.join([*labels, *more])
