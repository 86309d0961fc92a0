"""A config -> exactly one plugin and spec, or one error that explains every candidate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from mm_plugin.errors import NoModelError, UsageError
from mm_plugin.registry.claims import ARCHITECTURES, FALLBACK, MODEL_TYPES, ClaimGroup
from mm_plugin.registry.loading import load
from mm_plugin.registry.plugin import Plugin

if TYPE_CHECKING:
    from mm_plugin.events import FallbackUsed
    from mm_plugin.registry.discovery import Catalog
    from mm_plugin.runtime import Runtime
    from mm_plugin.spec import ModelSpec

logger = logging.getLogger("mm_plugin")

FallbackUse = Literal["unclaimed", "always", "never"]
# (group, name) pairs, in the order in which they are tried.
Asked = Sequence[tuple[ClaimGroup, str]]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller decides itself about which plugin serves a config.

    Attributes:
        architecture: tried in place of the config's own.
        plugin: name of the plugin to use; settles a conflict.
        fallback: when the fallback serves a model; see `Registry.resolve`.

    Raises:
        UsageError: `fallback` is another word.
    """

    architecture: str | None = None
    plugin: str | None = None
    fallback: FallbackUse = "unclaimed"

    def __post_init__(self) -> None:
        known = get_args(FallbackUse)
        if self.fallback not in known:
            raise UsageError(
                f"fallback: expected one of {', '.join(known)}, got {self.fallback!r}", argument="fallback"
            )


def resolve(catalog: Catalog, runtime: Runtime, config: Any, choice: Choice) -> tuple[Plugin, ModelSpec]:
    """The one plugin and spec that serve a config; where it is the fallback, that is logged and an event is emitted.

    Args:
        catalog: the installed plugins; the one that serves it is imported.
        runtime: whose observers receive the event.
        config: a checkpoint folder, a config as a mapping, or a `PretrainedConfig`.
        choice: what the caller decides itself.

    Raises:
        NoModelError: nothing serves it.
        UsageError: `config` is something else.
        PluginLoadError: with `strict`, when the plugin is broken.
    """
    asked = _asked(config, choice.architecture)
    plugin, spec, used = _serving(catalog, asked, choice)
    if used is not None:
        logger.warning("mm-plugin: the fallback %s serves %s: %s", plugin.label, used.asked, used.why)
        runtime.observers.emit(used)
    return plugin, spec


def _asked(config: Any, architecture: str | None) -> Asked:
    """The names by which a config can be served."""
    if architecture is not None:
        if not isinstance(architecture, str):
            raise UsageError(
                f"architecture: expected a string, got {type(architecture).__name__}", argument="architecture"
            )
        return [(ARCHITECTURES, architecture)]
    if isinstance(config, str | Path) or hasattr(config, "__fspath__"):
        from mm_plugin.checkpoint import Checkpoint

        config = Checkpoint.open(config).config
    if isinstance(config, Mapping):
        architectures, model_type = config.get("architectures"), config.get("model_type")
    elif hasattr(config, "architectures") or hasattr(config, "model_type"):
        architectures, model_type = getattr(config, "architectures", None), getattr(config, "model_type", None)
    else:
        raise UsageError(
            f"config: expected a checkpoint folder, a mapping or a PretrainedConfig, got {type(config).__name__}",
            argument="config",
        )
    if architectures:
        if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
            raise UsageError(
                f"config.architectures: expected a list of strings, got {type(architectures).__name__}",
                argument="config",
            )
        return [(ARCHITECTURES, name) for name in architectures]
    return [(MODEL_TYPES, model_type)] if isinstance(model_type, str) and model_type else []


def _serving(catalog: Catalog, asked: Asked, choice: Choice) -> tuple[Plugin, ModelSpec, FallbackUsed | None]:
    """The plugin and the spec that serve what is asked for, and the event to emit where it is the fallback."""
    refused: NoModelError | None = None
    for group, name in asked:
        try:
            plugin = _claimant(catalog, group, name, choice.plugin, asked)
        except NoModelError as error:
            if choice.fallback != "always":
                raise
            refused = refused or error
            continue
        if plugin is not None:
            return plugin, _spec_for(plugin, group, name), None
    if asked and choice.fallback != "never":
        plugin = _fallback(catalog, choice.plugin, asked)
        if plugin is not None:
            return plugin, plugin.specs[0], _fallback_used(plugin, asked, choice, refused)
    raise refused or _no_model(catalog, asked, "no installed plugin claims it")


def _claimant(catalog: Catalog, group: ClaimGroup, name: str, chosen: str | None, asked: Asked) -> Plugin | None:
    """The plugin that claims a name; None if no plugin does."""
    candidates = catalog.claimants(group, name)
    if chosen is not None:
        candidates = [plugin for plugin in candidates if plugin.name == chosen]
    if not candidates:
        return None
    enabled = [plugin for plugin in candidates if plugin.enabled]
    if len(enabled) > 1:
        claimants = " and ".join(plugin.label for plugin in enabled)
        raise _no_model(catalog, asked, f"{name} is claimed by {claimants}")
    # Where the others that claim it are disabled, or the caller chose, no conflict is left about this claim.
    if not enabled or not load(catalog, enabled[0], chosen=True):
        broken = (enabled or candidates)[0]
        raise _no_model(catalog, asked, broken.record().summary()) from (broken.load_error() if enabled else None)
    return enabled[0]


def _spec_for(plugin: Plugin, group: ClaimGroup, name: str) -> ModelSpec:
    assert group.spec_field is not None
    return next(spec for spec in plugin.specs if name in getattr(spec, group.spec_field))


def _fallback(catalog: Catalog, chosen: str | None, asked: Asked) -> Plugin | None:
    """The fallback; None if there is none, or if the caller chose another plugin."""
    enabled = [
        plugin
        for plugin in catalog.plugins
        if FALLBACK.kind in plugin.claims and plugin.enabled and chosen in (None, plugin.name)
    ]
    if not enabled:
        return None
    if len(enabled) > 1:
        labels = ", ".join(plugin.label for plugin in enabled)
        raise _no_model(catalog, asked, f"more than one fallback is installed: {labels}")
    if not load(catalog, enabled[0], chosen=True):
        raise _no_model(catalog, asked, enabled[0].record().summary())
    return enabled[0]


def _fallback_used(plugin: Plugin, asked: Asked, choice: Choice, refused: NoModelError | None) -> FallbackUsed:
    from mm_plugin.events import FallbackUsed

    why = "no installed plugin claims it" if choice.plugin is None else "the caller chose it"
    if refused is not None:
        why = f"fallback='always', and the plugin that claims it cannot serve: {refused.message.splitlines()[0]}"
    return FallbackUsed(asked=", ".join(name for _, name in asked), plugin=plugin.name, why=why)


def _no_model(catalog: Catalog, asked: Asked, why: str) -> NoModelError:
    names = tuple(name for _, name in asked)
    records = catalog.records()
    served = (*catalog.served(ARCHITECTURES), *catalog.served(MODEL_TYPES))
    lines = [
        f"no model for {', '.join(names) or 'a config without architectures and model_type'}: {why}",
        f"served: {', '.join(served) or 'nothing'}",
    ]
    lines += [f"plugin {record.summary()}" for record in records] or ["no plugin is installed"]
    lines += [f"note: {notice}" for notice in catalog.notices]
    return NoModelError("\n  ".join(lines), asked=names, records=records, served=served)
