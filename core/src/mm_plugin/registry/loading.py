"""Imports a plugin, checks it, and records why it cannot be used. With `hookspecs` the only importer of pluggy.

Each plugin is registered in a plugin manager of its own, and what a failed import left is removed, so that a broken plugin
leaves nothing in the process and cannot affect another.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import importlib_metadata

from mm_plugin.errors import PluginLoadError, SpecError
from mm_plugin.foreign import class_name, is_interruption, text_of
from mm_plugin.metadata import broken_metadata, in_words
from mm_plugin.registry.claims import CLAIM_GROUPS, check_claims
from mm_plugin.registry.contracts import contract_faults
from mm_plugin.registry.plugin import Plugin, translate_errors
from mm_plugin.registry.records import Refusal
from mm_plugin.runtime import waiting

if TYPE_CHECKING:
    from types import ModuleType

    from mm_plugin.registry.discovery import Catalog
    from mm_plugin.spec import ModelSpec

logger = logging.getLogger("mm_plugin")


# -------------------------------------------------------------------- one plugin


def load(catalog: Catalog, plugin: Plugin, *, chosen: bool = False) -> bool:
    """Import and register a plugin once.

    Args:
        catalog: the installed plugins.
        plugin: one of them.
        chosen: the caller chose this plugin, so that another one with the same claim does not matter.

    Returns:
        Whether it is loaded; its record says why not.

    Raises:
        PluginLoadError: with `strict`, when it is broken.
    """
    known = _known(catalog, plugin, chosen)
    if known is not None:
        return known
    with waiting(plugin.importing, catalog.closed):
        # Another thread may have imported it in the meantime.
        known = _known(catalog, plugin, chosen)
        return _import(catalog, plugin) if known is None else known


def _known(catalog: Catalog, plugin: Plugin, chosen: bool) -> bool | None:
    """Whether a plugin is loaded; None where it can be imported and was not yet.

    Raises:
        PluginLoadError: with `strict`, when it is broken.
    """
    with catalog.lock:
        if plugin.state == "loaded":
            return True
        if plugin.state == "available" or (chosen and plugin.disputed):
            return None
        if catalog.settings.strict and plugin.state in ("failed", "incompatible"):
            raise plugin.load_error()
        return False


def _import(catalog: Catalog, plugin: Plugin) -> bool:
    """Import and register a plugin, under its own lock; whether it is loaded now."""
    began, before = time.perf_counter(), set(sys.modules)
    stage = "requirements"
    try:
        _check_requirements(plugin.dist.found)
        stage = "import"
        module = importlib.import_module(plugin.module)
        stage = "hooks"
        manager = _checked_manager(module)
        stage = "register"
        specs, services = _declared_models(manager), _declared_services(manager)
        stage = "spec"
        check_claims(plugin.claims, specs, services)
    except BaseException as error:
        _forget_modules(plugin, before)
        if is_interruption(error):
            raise
        record_failure(catalog, plugin, stage, error, time.perf_counter() - began)
        if catalog.settings.strict:
            raise plugin.load_error() from error
        return False
    with catalog.lock:
        plugin.specs, plugin.services = specs, services
        plugin.state, plugin.facts = "loaded", {"elapsed_ms": round((time.perf_counter() - began) * 1e3, 3)}
    return True


def load_named(catalog: Catalog, name: str) -> Plugin:
    """Import a plugin by name; of several, which are a conflict, the first is returned.

    Raises:
        UsageError: no installed plugin has this name.
        PluginLoadError: with `strict`, when it is broken.
    """
    plugins = catalog.named(name)
    for plugin in plugins:
        load(catalog, plugin, chosen=len(plugins) == 1)
    return plugins[0]


def load_reference(plugin: Plugin, spec: ModelSpec, field: str) -> Any:
    """The class or function that a field of a spec names; the one place that decides what it must be.

    Args:
        plugin: whose spec it is.
        spec: the declaration.
        field: a key of `CONTRACTS`, whose value is not None in the spec.

    Raises:
        PluginLoadError: it cannot be imported, or is not what the core can call; the message says all that is wrong with it.
    """
    reference = getattr(spec, field)
    with translate_errors(plugin, PluginLoadError, f"{spec.name} names {field} {reference!r}, which cannot be loaded"):
        found = spec.load(field)
    with translate_errors(plugin, PluginLoadError, f"{field} {reference!r} cannot be examined"):
        faults = contract_faults(spec, field, found)
    if faults:
        raise PluginLoadError(f"{plugin.label}: {field} {reference!r} {'; '.join(faults)}", **plugin.owner)
    return found


def record_failure(catalog: Catalog, plugin: Plugin, stage: str, error: BaseException, seconds: float) -> None:
    """Take a plugin out of use and log one line; the traceback goes into its record and the debug log.

    Args:
        catalog: the installed plugins.
        plugin: one of them.
        stage: where it failed, as in `PluginRecord.stage`.
        error: the exception.
        seconds: time spent until then.
    """
    code, hint, missing = _diagnose(plugin, stage, error)
    found_by_us = isinstance(error, Refusal)
    facts = {
        "stage": stage,
        "code": code,
        "error_type": None if found_by_us else class_name(error),
        "error": (text_of(error) or class_name(error)) + in_words(error),
        "where": plugin.where(error),
        "missing": missing,
        "hint": hint or f"mm-plugin doctor {plugin.name}",
        "traceback": None if found_by_us else "".join(traceback.format_exception(error)),
        "elapsed_ms": round(seconds * 1e3, 3),
    }
    with catalog.lock:
        plugin.refuse("incompatible" if stage == "requirements" else "failed", **facts)
        record = plugin.record()
    logger.warning("mm-plugin: %s", record.summary().replace("\n", " "))
    logger.debug("mm-plugin: traceback of %s\n%s", plugin.name, record.traceback)


def _diagnose(plugin: Plugin, stage: str, error: BaseException) -> tuple[str, str | None, str | None]:
    """(code, hint, missing module or distribution) of what went wrong."""
    code, hint, missing = "import_error", None, None
    broken = broken_metadata(error)
    if broken is not None:
        code, hint = "unreadable_metadata", f"pip install --force-reinstall {broken.name}"
    elif isinstance(error, Refusal):
        code, hint, missing = error.code, error.hint, error.missing
    elif isinstance(error, SystemExit):
        code = "exit_at_import"
    elif isinstance(error, ModuleNotFoundError) and stage in ("import", "classes"):
        code, missing = "missing_module", error.name
        hint = _hint_for_missing(plugin, error.name)
    elif isinstance(error, SpecError):
        code = "bad_spec"
    elif stage == "classes":
        code = "class_error"
    elif stage == "register":
        code = "hook_error"
    return code, hint, missing


def _hint_for_missing(plugin: Plugin, module: str | None) -> str:
    if not module or plugin.holds(module):
        return f"pip install --force-reinstall {plugin.distribution}"
    return f"pip install {module.partition('.')[0]}"


# -------------------------------------------------------------------- its import and its checks


def _forget_modules(plugin: Plugin, before: set[str]) -> None:
    """Remove what a failed import left of the plugin's own package, so that a later import starts from the beginning."""
    for name in set(sys.modules) - before:
        if plugin.holds(name):
            del sys.modules[name]


def _check_requirements(dist: Any) -> None:
    """Compare the distribution's requirements with what is installed, before anything is imported."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Refusal(f"requirement {text!r} is invalid: {error}", code="requirement_invalid") from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        command = f"pip install '{wanted}'"
        try:
            version = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            raise Refusal(
                f"needs {wanted}, which is not installed",
                code="requirement_missing",
                hint=command,
                missing=requirement.name,
            ) from None
        if not requirement.specifier.contains(version, prereleases=True):
            raise Refusal(
                f"needs {wanted}, found {version}", code="requirement_unmet", hint=command, missing=requirement.name
            )


def _checked_manager(module: ModuleType) -> Any:
    """A plugin manager with this module alone in it; an unknown hook is refused with the most similar name that exists."""
    import pluggy

    from mm_plugin import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    known = sorted(name for name in vars(hookspecs) if name.startswith("mm_register_"))
    for name, value in sorted(vars(module).items()):
        if not inspect.isroutine(value):
            continue
        marked = getattr(value, f"{hookspecs.PROJECT}_impl", None) is not None
        if name in known and not marked:
            raise Refusal(f"{name} is not marked with @mm_plugin.hookimpl", code="unmarked_hook")
        if marked and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"rename {name} to {close[0]}" if close else f"use one of: {', '.join(known)}"
            raise Refusal(f"mm_plugin has no hook {name!r}", code="unknown_hook", hint=hint)
    try:
        manager.register(module)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise Refusal(str(error).replace("\n", " "), code="hook_signature") from error
    if not manager.get_hookcallers(module):
        raise Refusal(f"it implements none of the hooks: {', '.join(known)}", code="no_hook")
    return manager


def _declared_models(manager: Any) -> tuple[ModelSpec, ...]:
    from mm_plugin.spec import ModelSpec

    specs: list[ModelSpec] = []
    for returned in manager.hook.mm_register_models():
        for spec in [returned] if isinstance(returned, ModelSpec) else returned:
            if not isinstance(spec, ModelSpec):
                raise Refusal(
                    f"mm_register_models returned a {type(spec).__name__}; it must return ModelSpec", code="bad_spec"
                )
            specs.append(spec)
    return tuple(specs)


def _declared_services(manager: Any) -> dict[str, Mapping[str, Any]]:
    services: dict[str, Mapping[str, Any]] = {}
    for group in CLAIM_GROUPS.values():
        if group.hook is None:
            continue
        merged: dict[str, Any] = {}
        for returned in getattr(manager.hook, group.hook)():
            if not isinstance(returned, Mapping) or not all(callable(value) for value in returned.values()):
                raise Refusal(f"{group.hook} must return a mapping from name to callable", code="bad_service")
            merged.update(returned)
        services[group.kind] = merged
    return services
