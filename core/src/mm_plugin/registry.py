"""Entry points -> records -> exactly one model, or one error that explains every candidate. The only door to plugins.

What a plugin offers is read from metadata; its code is imported when something that it claims is asked for. Each plugin is
registered in a plugin manager of its own, so a plugin that fails half-way leaves nothing behind and can touch no other.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import importlib_metadata
import msgspec

from mm_plugin.errors import (
    EncoderError,
    MMPluginError,
    NoModelError,
    PluginError,
    PluginLoadError,
    ProcessorError,
    SpecError,
    UsageError,
)
from mm_plugin.runtime import Runtime
from mm_plugin.settings import Settings, unknown_variables

if TYPE_CHECKING:
    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.cache.store import Store
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.encoder.base import Encoder
    from mm_plugin.events import FallbackUsed, Observers
    from mm_plugin.identity.digests import Digests
    from mm_plugin.processor.processor import Processor
    from mm_plugin.spec import ModelSpec
    from mm_plugin.tasks import Preparer

logger = logging.getLogger("mm_plugin")

PLUGINS = "mm_plugin"
ARCHITECTURES = "mm_plugin.architectures"
MODEL_TYPES = "mm_plugin.model_types"
FALLBACK = "mm_plugin.fallback"
STORES = "mm_plugin.stores"
OBSERVERS = "mm_plugin.observers"
DIGESTS = "mm_plugin.digests"
CLAIM_GROUPS = (ARCHITECTURES, MODEL_TYPES, FALLBACK, DIGESTS, STORES, OBSERVERS)
EXCLUSIVE_GROUPS = (ARCHITECTURES, MODEL_TYPES, DIGESTS, STORES, OBSERVERS)

FallbackUse = Literal["unclaimed", "always", "never"]
State = Literal["available", "loaded", "disabled", "failed", "conflict", "incompatible"]


class OpenedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin made of one checkpoint from which it learns what it serves (`ModelSpec.specialize`).

    Attributes:
        checkpoint: the folder.
        model: name of the spec that it made; None where it refused.
        notes: what it says of it, such as which code prepares media.
        error: why it refused.
    """

    checkpoint: str
    model: str | None = None
    notes: dict[str, str] = {}
    error: str | None = None


class PluginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one installed plugin: a snapshot, kept whatever happened to it.

    Attributes:
        name: its entry point's name in the group `mm_plugin`.
        distribution: the installed distribution.
        version: that distribution's version.
        entry_point: the hooks module.
        location: folder that holds it.
        claims: what it says it serves, by kind: `architectures`, `model_types`, `fallback`, `digests`, `stores`,
            `observers`.
        state: `available` (not asked for yet), `loaded`, `disabled`, `failed`, `conflict` or `incompatible`.
        stage: where it failed: `discover`, `requirements`, `import`, `hooks`, `register`, `spec` or `classes`.
        code: one word for the kind of fault.
        error_type: class of the exception.
        error: its message, or a sentence of ours.
        where: `file:line` of the last frame inside the plugin.
        missing: module or distribution that is not there.
        hint: one command, or one thing to do.
        report_to: where the plugin's authors take reports.
        traceback: the whole traceback as text.
        elapsed_ms: milliseconds that its import and registration took.
        opened: what it made of each checkpoint that was opened with it, where it learns from them what it serves.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    location: str
    claims: dict[str, tuple[str, ...]]
    state: State
    stage: str | None = None
    code: str | None = None
    error_type: str | None = None
    error: str | None = None
    where: str | None = None
    missing: str | None = None
    hint: str | None = None
    report_to: str | None = None
    traceback: str | None = None
    elapsed_ms: float | None = None
    opened: tuple[OpenedModel, ...] = ()

    def summary(self) -> str:
        """One line: who it is, what is wrong, what to do."""
        line = f"{self.name} ({self.distribution} {self.version}): {self.state}"
        if self.stage:
            line += f" at {self.stage}"
        if self.error:
            kind = f"{self.error_type}: " if self.error_type else ""
            line += f": {kind}{self.error}"
        if self.where:
            line += f" [{self.where}]"
        if self.hint:
            line += f" -> {self.hint}"
        return line


class _Refusal(Exception):
    """A fault found in a plugin, with what its record shall say. Never leaves this module."""

    def __init__(self, message: str, *, code: str, hint: str | None = None, missing: str | None = None) -> None:
        super().__init__(message)
        self.code, self.hint, self.missing = code, hint, missing


class _Plugin:
    """One plugin as the registry keeps it; `record` is what others see."""

    def __init__(self, name: str, module: str, dist: Any) -> None:
        self.name, self.module, self.dist = name, module, dist
        self.claims: dict[str, list[str]] = {}
        self.state: State = "available"
        self.facts: dict[str, Any] = {}
        self.specs: tuple[ModelSpec, ...] = ()
        self.services: dict[str, Mapping[str, Any]] = {}
        self.package: ModuleType | None = None
        self.opened: dict[str, OpenedModel] = {}

    # The distribution's name and version cost a file read each, so discovery never touches them.
    @property
    def distribution(self) -> str:
        return _quietly(lambda: str(self.dist.metadata["Name"] or "unknown"), "unknown")

    @property
    def version(self) -> str:
        return _quietly(lambda: str(self.dist.metadata["Version"] or "unknown"), "unknown")

    @property
    def label(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def owner(self) -> dict[str, str]:
        return {"plugin": self.name, "distribution": self.distribution, "version": self.version}

    def record(self) -> PluginRecord:
        return PluginRecord(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.module,
            location=_location(self.dist),
            claims={_kind(group): tuple(names) for group, names in sorted(self.claims.items())},
            state=self.state,
            report_to=_report_to(self.dist),
            opened=tuple(self.opened.values()),
            **self.facts,
        )

    def refuse(self, state: State, **facts: Any) -> None:
        self.state = state
        self.facts = facts


def discover(
    settings: Settings | None = None,
    *,
    executor: Executor | None = None,
    preprocess_store: Store | None = None,
    embedding_cache: EmbeddingCache | None = None,
    preparer: Preparer | None = None,
) -> Registry:
    """Read what the installed plugins claim, without importing any of them.

    Args:
        settings: limits and switches; read from the environment where None.
        executor: runs the item stage; the registry makes and closes its own where None.
        preprocess_store: keeps prepared items; made from the settings where None.
        embedding_cache: keeps encoder rows; made from the settings where None.
        preparer: prepares media inputs in place of threads of this process; it is not closed.

    Raises:
        UsageError: a setting cannot be read.
        PluginLoadError: with `strict`, when a claim is in conflict or belongs to no plugin.
    """
    notices: list[str] = []
    if settings is None:
        settings, notices = Settings.from_env(), unknown_variables(os.environ)
    return Registry(
        settings,
        notices=notices,
        executor=executor,
        preprocess_store=preprocess_store,
        embedding_cache=embedding_cache,
        preparer=preparer,
    )


class Registry:
    """The installed plugins, and the one executor and the caches that their processors share. Final.

    A context manager; leaving it closes what it made itself, not what was given.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        notices: Iterable[str] = (),
        executor: Executor | None = None,
        preprocess_store: Store | None = None,
        embedding_cache: EmbeddingCache | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        self.settings = settings
        self.notices: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self.runtime = Runtime(
            settings,
            executor=executor,
            preprocess_store=preprocess_store,
            embedding_cache=embedding_cache,
            services=self._services,
            make_store=self.make_store,
            preparer=preparer,
        )
        self._plugins: list[_Plugin] = []
        self._claims: dict[tuple[str, str], list[_Plugin]] = {}
        for notice in notices:
            self._notice(notice)
        self._discover()

    # ---------------------------------------------------------------- discovery

    def _discover(self) -> None:
        claims: list[Any] = []
        for entry in _entry_points(self._notice):
            if entry.group == PLUGINS:
                self._plugins.append(_Plugin(entry.name, entry.value, entry.dist))
            elif entry.group in CLAIM_GROUPS:
                claims.append(entry)
            elif entry.group.startswith(PLUGINS + "."):
                known = ", ".join(CLAIM_GROUPS)
                self._notice(f"{entry.name!r} is claimed in {entry.group!r}, which is no group; there are: {known}")
        by_module = {(id(plugin.dist), plugin.module): plugin for plugin in self._plugins}
        for entry in claims:
            plugin = by_module.get((id(entry.dist), entry.value))
            if plugin is None:
                # Somebody claims a model without a plugin behind it: a record of its own says so.
                plugin = _Plugin(entry.name, entry.value, entry.dist)
                plugin.refuse(
                    "failed",
                    stage="discover",
                    code="orphan_claim",
                    error=f"{entry.group} claims {entry.name!r} for {entry.value!r}, which no entry in the group "
                    f"{PLUGINS!r} of the same distribution names",
                    hint=f"add '{entry.name} = \"{entry.value}\"' to [project.entry-points.{PLUGINS}] and reinstall",
                )
                by_module[id(entry.dist), entry.value] = plugin
                self._plugins.append(plugin)
            plugin.claims.setdefault(entry.group, []).append(entry.name)
        self._plugins.sort(key=lambda plugin: (plugin.name, plugin.module))
        self._switch_off()
        self._find_conflicts()
        if self.settings.strict:
            for plugin in self._plugins:
                if plugin.state in ("conflict", "failed"):
                    raise self._load_error(plugin)
            if self.notices:
                raise UsageError("; ".join(self.notices), argument="settings")

    def _switch_off(self) -> None:
        """Apply the allow-list and the block-list; a name that matches nothing is reported."""
        for variable, names in (("MM_PLUGIN_ONLY", self.settings.only), ("MM_PLUGIN_DISABLED", self.settings.disabled)):
            known = {plugin.name for plugin in self._plugins}
            for name in names:
                if name not in known:
                    close = difflib.get_close_matches(name, sorted(known), n=1)
                    hint = (
                        f"did you mean {close[0]!r}?" if close else f"installed: {', '.join(sorted(known)) or 'none'}"
                    )
                    self._notice(f"{variable} names {name!r}, which no installed plugin has; {hint}")
        for plugin in self._plugins:
            listed = plugin.name in self.settings.disabled
            if listed or (self.settings.only and plugin.name not in self.settings.only):
                why = "is in MM_PLUGIN_DISABLED" if listed else "is not in MM_PLUGIN_ONLY"
                plugin.refuse(
                    "disabled",
                    stage="discover",
                    code="disabled",
                    error=f"{plugin.name} {why}",
                    hint=f"remove {plugin.name!r} from MM_PLUGIN_DISABLED"
                    if listed
                    else f"add {plugin.name!r} to MM_PLUGIN_ONLY",
                )

    def _find_conflicts(self) -> None:
        """Two plugins of one name, or with one claim, are a conflict that names both."""
        names: dict[str, list[_Plugin]] = {}
        for plugin in self._plugins:
            if plugin.state == "available":
                names.setdefault(plugin.name, []).append(plugin)
            for group, claimed in plugin.claims.items():
                for claim in claimed:
                    self._claims.setdefault((group, claim), []).append(plugin)
        for name, plugins in names.items():
            if len(plugins) > 1:
                self._mark_conflict(plugins, f"plugin name {name!r}", "name_conflict", "uninstall one of them")
        for (group, claim), plugins in self._claims.items():
            live = [plugin for plugin in plugins if plugin.state != "disabled"]
            if group in EXCLUSIVE_GROUPS and len(live) > 1:
                hint = f"MM_PLUGIN_DISABLED={live[-1].name}, or pass plugin={live[0].name!r}"
                self._mark_conflict(live, f"{_singular(group)} {claim!r}", "claim_conflict", hint)

    def _mark_conflict(self, plugins: Sequence[_Plugin], what: str, code: str, hint: str) -> None:
        for plugin in plugins:
            if plugin.state != "available":
                continue
            others = ", ".join(other.label for other in plugins if other is not plugin)
            plugin.refuse(
                "conflict",
                stage="discover",
                code=code,
                error=f"{plugin.name} claims {what}, also claimed by {others}",
                hint=hint,
            )
        logger.warning("mm-plugin: %s is claimed by %s; %s", what, " and ".join(p.label for p in plugins), hint)

    def _notice(self, text: str) -> None:
        self.notices = (*self.notices, text)
        logger.warning("mm-plugin: %s", text)

    # ---------------------------------------------------------------- what others see

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """A record for every installed plugin, broken or not."""
        with self._lock:
            return tuple(plugin.record() for plugin in self._plugins)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every architecture that exactly one enabled, unbroken plugin claims, sorted."""
        return self._served(ARCHITECTURES)

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every model type that exactly one enabled, unbroken plugin claims, sorted."""
        return self._served(MODEL_TYPES)

    def _served(self, group: str) -> tuple[str, ...]:
        def serves(plugins: Sequence[_Plugin]) -> bool:
            live = [plugin for plugin in plugins if plugin.state != "disabled"]
            usable = live and (live[0].state in ("available", "loaded") or live[0].facts["code"] == "claim_conflict")
            return len(live) == 1 and bool(usable)

        return tuple(sorted(name for (kind, name), found in self._claims.items() if kind == group and serves(found)))

    def fingerprint(self) -> str:
        """A digest of which plugins are installed and enabled; processes compare it to know that they serve the same set."""
        facts = [
            (record.name, record.distribution, record.version, record.entry_point, record.claims)
            for record in self.plugins
            if record.state != "disabled"
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def load_plugin(self, name: str) -> PluginRecord:
        """Import one plugin by name and return its record; a broken one is a record, not an error.

        Raises:
            UsageError: no installed plugin has this name.
            PluginLoadError: with `strict`, when it is broken.
        """
        with self._lock:
            plugins = [plugin for plugin in self._plugins if plugin.name == name]
            if not plugins:
                known = ", ".join(sorted({plugin.name for plugin in self._plugins})) or "none"
                raise UsageError(f"no plugin {name!r} is installed; installed: {known}", argument="name")
            for plugin in plugins:
                self._load(plugin, chosen=len(plugins) == 1)
            return plugins[0].record()

    def check_plugin(self, name: str, bases: Mapping[str, type | None]) -> PluginRecord:
        """Import one plugin and what its specs name, and return its record; for diagnosis, never for serving.

        Args:
            name: the plugin's name.
            bases: by field of `ModelSpec`, the class that what it names must subclass, or None for a function.

        Raises:
            UsageError: no installed plugin has this name.
            PluginLoadError: with `strict`, when it is broken.
        """
        with self._lock:
            self.load_plugin(name)
            plugin = next(plugin for plugin in self._plugins if plugin.name == name)
            if plugin.state == "loaded":
                began = time.perf_counter()
                try:
                    for spec in plugin.specs:
                        for field, base in bases.items():
                            # `padding` may be the name of a rule in place of a reference.
                            if ":" in (getattr(spec, field) or ""):
                                self._load_class(plugin, spec, field, base)
                except PluginLoadError as error:
                    self._record_failure(plugin, "classes", error.__cause__ or error, time.perf_counter() - began)
                    if self.settings.strict:
                        raise self._load_error(plugin) from error
                else:
                    elapsed = plugin.facts["elapsed_ms"] + (time.perf_counter() - began) * 1e3
                    plugin.facts["elapsed_ms"] = round(elapsed, 3)
            return plugin.record()

    # ---------------------------------------------------------------- loading

    def _load(self, plugin: _Plugin, *, chosen: bool = False) -> bool:
        """Import and register a plugin once. Returns whether it is loaded; its record says why not."""
        with self._lock:
            if plugin.state == "loaded":
                return True
            settled = chosen and plugin.facts.get("code") == "claim_conflict"
            if plugin.state != "available" and not settled:
                if self.settings.strict and plugin.state in ("failed", "incompatible"):
                    raise self._load_error(plugin)
                return False
            began = time.perf_counter()
            before = set(sys.modules)
            stage = "requirements"
            try:
                _check_requirements(plugin.dist)
                stage = "import"
                module = importlib.import_module(plugin.module)
                stage = "hooks"
                manager = _checked_manager(module)
                stage = "register"
                specs, services = _call_hooks(manager)
                stage = "spec"
                _check_claims(plugin, specs, services)
            except KeyboardInterrupt:
                _forget_modules(plugin.module, before)
                raise
            except BaseException as error:
                _forget_modules(plugin.module, before)
                self._record_failure(plugin, stage, error, time.perf_counter() - began)
                if self.settings.strict:
                    raise self._load_error(plugin) from error
                return False
            plugin.package = module
            plugin.specs, plugin.services = specs, services
            plugin.state = "loaded"
            plugin.facts = {"elapsed_ms": round((time.perf_counter() - began) * 1e3, 3)}
            return True

    def _record_failure(self, plugin: _Plugin, stage: str, error: BaseException, seconds: float) -> None:
        code, hint, missing = "import_error", None, None
        if isinstance(error, _Refusal):
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
        plugin.refuse(
            "incompatible" if stage == "requirements" else "failed",
            stage=stage,
            code=code,
            error_type=None if isinstance(error, _Refusal) else type(error).__name__,
            error=_said(error),
            where=_where(error, plugin.module),
            missing=missing,
            hint=hint or f"mm-plugin doctor {plugin.name}",
            traceback=None if isinstance(error, _Refusal) else _format(error),
            elapsed_ms=round(seconds * 1e3, 3),
        )
        record = plugin.record()
        logger.warning("mm-plugin: %s", record.summary().replace("\n", " "))
        logger.debug("mm-plugin: traceback of %s\n%s", plugin.name, record.traceback)

    def _load_error(self, plugin: _Plugin) -> PluginLoadError:
        record = plugin.record()
        return PluginLoadError(record.summary(), record=record, **plugin.owner)

    # ---------------------------------------------------------------- resolving

    def resolve(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | Any,
        *,
        architecture: str | None = None,
        plugin: str | None = None,
        fallback: FallbackUse = "unclaimed",
    ) -> ModelSpec:
        """The one model that serves a config.

        The top-level `architectures` are tried in order; only where they are absent or empty is the top-level `model_type`
        tried. Nested configs are never read. What no installed plugin claims goes to the fallback, where there is one; what
        such a plugin learns from a checkpoint (`ModelSpec.specialize`) is not known here.

        Args:
            config: a checkpoint folder, a config as a mapping, or a `PretrainedConfig`.
            architecture: try this in place of the config's own.
            plugin: name of the plugin to use; settles a conflict.
            fallback: when the fallback serves a model: `unclaimed`, where no installed plugin claims it; `always`, also where
                every plugin that claims it is disabled, broken or in conflict; or `never`.

        Raises:
            NoModelError: nothing serves it; carries the record of every plugin.
            UsageError: `config` is none of these, or `fallback` is no such word.
            PluginLoadError: with `strict`, when the plugin is broken.
        """
        return self._resolve(config, architecture, plugin, fallback)[1]

    def _resolve(
        self, config: Any, architecture: str | None, chosen: str | None, fallback: str
    ) -> tuple[_Plugin, ModelSpec]:
        if fallback not in get_args(FallbackUse):
            known = ", ".join(get_args(FallbackUse))
            raise UsageError(f"fallback={fallback!r} is none of {known}", argument="fallback")
        asked = _asked(config, architecture)
        with self._lock:
            plugin, spec, used = self._serving(asked, chosen, fallback)
        if used is not None:
            # Not while the lock is held: the runtime takes its own lock first and this one after it.
            logger.warning("mm-plugin: the fallback %s serves %s: %s", plugin.label, used.asked, used.why)
            self.observers.emit(used)
        return plugin, spec

    def _serving(
        self, asked: Sequence[tuple[str, str]], chosen: str | None, fallback: str
    ) -> tuple[_Plugin, ModelSpec, FallbackUsed | None]:
        """The plugin and the spec that serve what is asked for, and the event to emit where it is the fallback."""
        from mm_plugin.events import FallbackUsed

        refused: NoModelError | None = None
        for group, name in asked:
            try:
                plugin = self._claimant(group, name, chosen, asked)
            except NoModelError as error:
                if fallback != "always":
                    raise
                refused = refused or error
                continue
            if plugin is not None:
                return plugin, _spec_for(plugin, group, name), None
        if asked and fallback != "never":
            why = "no installed plugin claims it" if chosen is None else "the caller chose it"
            if refused is not None:
                why = f"fallback='always', and what claims it cannot serve: {refused.message.splitlines()[0]}"
            plugin = self._fallback(chosen, asked)
            if plugin is not None:
                names = ", ".join(name for _, name in asked)
                return plugin, plugin.specs[0], FallbackUsed(asked=names, plugin=plugin.name, why=why)
        raise refused or self._no_model(asked, "no installed plugin claims it")

    def _claimant(self, group: str, name: str, chosen: str | None, asked: Sequence[tuple[str, str]]) -> _Plugin | None:
        candidates = self._claims.get((group, name), [])
        if chosen is not None:
            candidates = [plugin for plugin in candidates if plugin.name == chosen]
        if not candidates:
            return None
        live = [plugin for plugin in candidates if plugin.state != "disabled"]
        if len(live) > 1:
            raise self._no_model(asked, f"{name} is claimed by {' and '.join(plugin.label for plugin in live)}")
        # Where the others that claim it are disabled, or the caller chose, no conflict is left about this claim.
        if not live or not self._load(live[0], chosen=True):
            broken = (live or candidates)[0]
            raise self._no_model(asked, broken.record().summary()) from (self._load_error(broken) if live else None)
        return live[0]

    def _fallback(self, chosen: str | None, asked: Sequence[tuple[str, str]]) -> _Plugin | None:
        live = [
            plugin
            for plugin in self._plugins
            if FALLBACK in plugin.claims and plugin.state != "disabled" and chosen in (None, plugin.name)
        ]
        if not live:
            return None
        if len(live) > 1:
            raise self._no_model(asked, f"more than one fallback is installed: {', '.join(p.label for p in live)}")
        if not self._load(live[0], chosen=True):
            raise self._no_model(asked, live[0].record().summary())
        return live[0]

    def _no_model(self, asked: Sequence[tuple[str, str]], why: str) -> NoModelError:
        names = tuple(name for _, name in asked)
        records = tuple(plugin.record() for plugin in self._plugins)
        served = (*self.architectures, *self.model_types)
        lines = [
            f"no model for {', '.join(names) or 'a config without architectures and model_type'}: {why}",
            f"served: {', '.join(served) or 'nothing'}",
        ]
        lines += [f"plugin {record.summary()}" for record in records] or ["no plugin is installed"]
        lines += [f"note: {notice}" for notice in self.notices]
        return NoModelError("\n  ".join(lines), asked=names, records=records, served=served)

    # ---------------------------------------------------------------- models

    def load_processor(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        architecture: str | None = None,
        plugin: str | None = None,
        fallback: FallbackUse = "unclaimed",
        **options: Any,
    ) -> Processor:
        """Open a checkpoint's processor.

        Args:
            checkpoint: a folder or a hub id.
            architecture: serve it as this, in place of what its config says.
            plugin: name of the plugin to use; settles a conflict.
            fallback: as for `resolve`.
            **options: options of the plugin's `Options`, fixed from now on; they win over the checkpoint's.

        Raises:
            NoModelError: nothing serves it.
            UsageError: the checkpoint cannot be read, or an option is unknown or wrong.
            ProcessorError: the plugin's processor could not be built.
        """
        from mm_plugin.processor.model import ModelProcessor
        from mm_plugin.processor.processor import Processor
        from mm_plugin.tasks import ModelRef

        opened, found, spec = self._open(checkpoint, architecture, plugin, fallback)
        cls = self._load_class(found, spec, "processor", ModelProcessor)
        if spec.tokenizer is not None:
            opened = opened.with_tokenizer(self._load_class(found, spec, "tokenizer", None))
        with _attributed(found, ProcessorError, f"the processor of {spec.name} could not be opened"):
            ref = ModelRef(opened.source, found.name, architecture, fallback, options)
            return Processor(cls, spec, opened, self.runtime, options, owner=found.owner, ref=ref)

    def load_encoder(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        architecture: str | None = None,
        plugin: str | None = None,
        fallback: FallbackUse = "unclaimed",
        device: Any = "cpu",
        dtype: Any = None,
    ) -> Encoder:
        """Open a checkpoint's encoder alone, without its language model.

        Args:
            checkpoint: a folder or a hub id.
            architecture: serve it as this.
            plugin: name of the plugin to use.
            fallback: as for `resolve`.
            device: torch device for the weights.
            dtype: torch dtype, or None for the checkpoint's own.

        Raises:
            NoModelError: nothing serves it.
            UsageError: the checkpoint cannot be read.
            EncoderError: the plugin's encoder could not be built.
        """
        from mm_plugin.encoder.base import Encoder

        _check_placement(device, dtype)
        opened, found, spec = self._open(checkpoint, architecture, plugin, fallback)
        cls = self._load_class(found, spec, "encoder", Encoder)
        embed = self._load_class(found, spec, "embed", None) if spec.embed is not None else None
        with _attributed(found, EncoderError, f"the encoder of {spec.name} could not be opened"):
            encoder: Encoder = cls.load(opened, device, dtype)
            # An encoder that reads its weights by other means is told apart by all of the checkpoint's.
            weights = opened.fingerprint(opened.tensors_read or None)
            encoder.bind(
                version=f"{spec.name}:{spec.output_version}:{weights}",
                device=device,
                owner=found.owner,
                observers=self.observers,
                embed=embed,
            )
            return encoder

    def load_declared(self, name: str, field: str, base: type) -> Any:
        """The class that the specs of a plugin name in a field, the first that names one; None where none does.

        Args:
            name: the plugin's name.
            field: of `ModelSpec`, such as `demo`.
            base: what the class must subclass.

        Raises:
            UsageError: no such plugin.
            PluginLoadError: the plugin or the class cannot be imported.
        """
        with self._lock:
            self.load_plugin(name)
            found = next(plugin for plugin in self._plugins if plugin.name == name)
            if found.state != "loaded":
                raise self._load_error(found)
            spec = next((spec for spec in found.specs if getattr(spec, field) is not None), None)
        return None if spec is None else self._load_class(found, spec, field, base)

    def _open(
        self, checkpoint: Any, architecture: str | None, chosen: str | None, fallback: str
    ) -> tuple[Checkpoint, _Plugin, ModelSpec]:
        from mm_plugin.checkpoint import Checkpoint

        self.runtime.check_open()
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
        plugin, spec = self._resolve(opened.config, architecture, chosen, fallback)
        if spec.specialize is not None:
            spec, opened = self._specialize(plugin, spec, opened)
        return opened, plugin, spec

    def _specialize(self, plugin: _Plugin, spec: ModelSpec, opened: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
        """What a plugin that learns from a checkpoint makes of it, kept in its record; so is why it refuses."""
        from mm_plugin.checkpoint import Checkpoint
        from mm_plugin.spec import ModelSpec

        place = str(opened.folder)
        known = opened.specialization_of(spec)
        if known is not None:
            with self._lock:
                plugin.opened[place] = OpenedModel(checkpoint=place, model=known[0].name, notes=dict(known[0].notes))
            return known[0], opened
        make = self._load_class(plugin, spec, "specialize", None)
        try:
            with _attributed(plugin, PluginLoadError, f"{spec.specialize} failed on {place}"):
                made = make(spec, opened)
            good = isinstance(made, tuple) and [type(part) for part in made[:2]] == [ModelSpec, Checkpoint]
            if not good or len(made) != 3 or made[0].specialize is not None:
                raise PluginLoadError(
                    f"{plugin.label}: {spec.specialize} must return (ModelSpec, Checkpoint, state), the spec without specialize",
                    **plugin.owner,
                )
        except MMPluginError as error:
            with self._lock:
                plugin.opened[place] = OpenedModel(checkpoint=place, error=error.message)
            raise
        special: ModelSpec = made[0]
        checkpoint: Checkpoint = made[1].specialized(special, made[2], base=spec)
        with self._lock:
            plugin.opened[place] = OpenedModel(checkpoint=place, model=special.name, notes=dict(special.notes))
        return special, checkpoint

    def _load_class(self, plugin: _Plugin, spec: ModelSpec, field: str, base: type | None) -> Any:
        """The class (a function where `base` is None) that a spec names, with the plugin to blame where it cannot be had."""
        with _attributed(
            plugin, PluginLoadError, f"{spec.name} names {field} {getattr(spec, field)!r}, which cannot be loaded"
        ):
            cls = spec.load(field)
        if base is None and callable(cls):
            return cls
        if base is None or not (isinstance(cls, type) and issubclass(cls, base)):
            expected = "be callable" if base is None else f"be a subclass of mm_plugin's {base.__name__}"
            raise PluginLoadError(
                f"{plugin.label}: {field} {getattr(spec, field)!r} must {expected}",
                **plugin.owner,
            )
        return cls

    # ---------------------------------------------------------------- what processors share

    @property
    def observers(self) -> Observers:
        """Those who hear events; the plugins that claim observers are imported when this is first read."""
        return self.runtime.observers

    @property
    def digests(self) -> Digests:
        """What hashes on each kind of device; the plugins that claim digests are imported when this is first read."""
        return self.runtime.digests

    def _services(self, kind: str) -> dict[str, Any]:
        """Every service of a kind that one enabled, unbroken plugin offers, by name."""
        wanted = f"{PLUGINS}.{kind}"
        found: dict[str, Any] = {}
        for group, name in sorted(self._claims):
            if group == wanted:
                live = [plugin for plugin in self._claims[group, name] if plugin.state != "disabled"]
                if len(live) == 1 and self._load(live[0], chosen=True):
                    found[name] = live[0].services[group][name]
        return found

    @property
    def executor(self) -> Executor:
        """Runs the item stage."""
        return self.runtime.executor

    @property
    def preprocess_store(self) -> Store:
        """Keeps prepared items, by source key."""
        return self.runtime.preprocess_store

    @property
    def embedding_cache(self) -> EmbeddingCache:
        """Keeps encoder rows; pass it to `embed_mm_inputs`."""
        return self.runtime.embedding_cache

    def make_store(self, name: str, capacity_bytes: int) -> Store:
        """A new store of a kind: `memory`, or one that a plugin claims in the group `mm_plugin.stores`.

        Raises:
            UsageError: no such kind; the message names those there are.
            PluginLoadError: the plugin that claims it is broken.
        """
        from mm_plugin.cache.memory import MemoryStore
        from mm_plugin.cache.store import Store

        if name == "memory":
            return MemoryStore(capacity_bytes)
        with self._lock:
            live = [plugin for plugin in self._claims.get((STORES, name), []) if plugin.state != "disabled"]
            if not live:
                known = ", ".join(["memory", *self._served(STORES)])
                raise UsageError(f"no store {name!r}; there are: {known}", argument="store")
            if len(live) > 1 or not self._load(live[0], chosen=True):
                raise self._load_error(live[0])
        with _attributed(live[0], PluginLoadError, f"store {name!r} could not be made"):
            store = live[0].services[STORES][name](capacity_bytes)
        if not isinstance(store, Store):
            raise PluginLoadError(f"{live[0].label}: store {name!r} is no mm_plugin.cache.store.Store", **live[0].owner)
        return store

    def close(self) -> None:
        """Stop the executor and close the caches that the registry made itself. Calling it twice is harmless."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -------------------------------------------------------------------- entry points


def _entry_points(notice: Callable[[str], None]) -> Iterable[Any]:
    """All entry points of all installed distributions, the first of a name on the path winning."""
    try:
        return list(importlib_metadata.entry_points())
    except Exception:
        # One distribution with unreadable metadata must not hide the others: read them one by one.
        found: list[Any] = []
        seen: set[str] = set()
        for dist in importlib_metadata.distributions():
            try:
                name = _normalized(str(dist.metadata["Name"]))
                if name not in seen:
                    seen.add(name)
                    found.extend(dist.entry_points)
            except Exception as error:
                notice(
                    f"distribution {_name(dist)} in {_location(dist)} has unreadable metadata "
                    f"({type(error).__name__}: {error}); it is left out"
                )
        return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _kind(group: str) -> str:
    return group.removeprefix(PLUGINS + ".")


def _singular(group: str) -> str:
    return _kind(group).replace("_", " ").removesuffix("s")


def _quietly(read: Callable[[], str], default: str) -> str:
    try:
        return read()
    except Exception:
        return default


def _name(dist: Any) -> str:
    return _quietly(lambda: str(dist.name), "without a name")


def _location(dist: Any) -> str:
    return _quietly(lambda: str(dist.locate_file("")), "unknown")


def _report_to(dist: Any) -> str | None:
    """Where the authors take reports: an issue tracker, a home page, or an address."""
    try:
        urls = dict(entry.split(",", 1) for entry in dist.metadata.get_all("Project-URL") or () if "," in entry)
    except Exception:
        return None
    urls = {label.strip().lower(): url.strip() for label, url in urls.items()}
    for word in ("issue", "bug", "tracker", "support", "home", "source", "repo"):
        for label, url in urls.items():
            if word in label:
                return str(url)
    for name in ("Home-page", "Author-email", "Maintainer-email", "Author"):
        value = dist.metadata.get(name)
        if value:
            return str(value)
    return None


# -------------------------------------------------------------------- checks of one plugin


def _check_requirements(dist: Any) -> None:
    """Compare the distribution's requirements with what is installed, before anything is imported."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise _Refusal(f"requirement {text!r} cannot be read: {error}", code="requirement_invalid") from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        command = f"pip install '{wanted}'"
        try:
            version = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            raise _Refusal(
                f"needs {wanted}, which is not installed",
                code="requirement_missing",
                hint=command,
                missing=requirement.name,
            ) from None
        if not requirement.specifier.contains(version, prereleases=True):
            raise _Refusal(
                f"needs {wanted}, found {version}", code="requirement_unmet", hint=command, missing=requirement.name
            )


def _checked_manager(module: ModuleType) -> Any:
    """A plugin manager with this module alone in it; a hook that does not exist is refused with the nearest that does."""
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
            raise _Refusal(f"{name} is not marked with @mm_plugin.hookimpl", code="unmarked_hook")
        if marked and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"rename {name} to {close[0]}" if close else f"use one of: {', '.join(known)}"
            raise _Refusal(f"{name} is no hook of mm_plugin", code="unknown_hook", hint=hint)
    try:
        manager.register(module)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _Refusal(str(error).replace("\n", " "), code="hook_signature") from error
    if not manager.get_hookcallers(module):
        raise _Refusal(f"it implements no hook; there are: {', '.join(known)}", code="no_hook")
    return manager


def _call_hooks(manager: Any) -> tuple[tuple[ModelSpec, ...], dict[str, Mapping[str, Any]]]:
    """What the module declares: model specs, and services by group."""
    from mm_plugin.spec import ModelSpec

    specs: list[ModelSpec] = []
    for returned in manager.hook.mm_register_models():
        for spec in [returned] if isinstance(returned, ModelSpec) else returned:
            if not isinstance(spec, ModelSpec):
                raise _Refusal(
                    f"mm_register_models returned a {type(spec).__name__}; it must return ModelSpec", code="bad_spec"
                )
            specs.append(spec)
    services: dict[str, Mapping[str, Any]] = {}
    hooks = {
        DIGESTS: manager.hook.mm_register_digests,
        STORES: manager.hook.mm_register_stores,
        OBSERVERS: manager.hook.mm_register_observers,
    }
    for group, hook in hooks.items():
        merged: dict[str, Any] = {}
        for returned in hook():
            if not isinstance(returned, Mapping) or not all(callable(value) for value in returned.values()):
                raise _Refusal(f"{hook.name} must return a mapping from name to callable", code="bad_service")
            merged.update(returned)
        services[group] = merged
    return tuple(specs), services


def _check_claims(plugin: _Plugin, specs: Sequence[ModelSpec], services: Mapping[str, Mapping[str, Any]]) -> None:
    """What the code declares must be what the metadata claims, both ways."""
    declared = {
        ARCHITECTURES: [name for spec in specs for name in spec.architectures],
        MODEL_TYPES: [name for spec in specs for name in spec.model_types],
        **{group: list(names) for group, names in services.items()},
    }
    for group, names in declared.items():
        claimed = plugin.claims.get(group, [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise _Refusal(f"{_singular(group)} {twice[0]!r} is in more than one ModelSpec", code="claim_mismatch")
        unserved, unclaimed = sorted(set(claimed) - set(names)), sorted(set(names) - set(claimed))
        if unserved:
            raise _Refusal(
                f"the metadata claims {_singular(group)} {unserved[0]!r}, the code declares {sorted(names) or 'none'}",
                code="claim_mismatch",
                hint=f"declare it, or remove it from the entry points in {group!r} and reinstall",
            )
        if unclaimed:
            raise _Refusal(
                f"the code declares {_singular(group)} {unclaimed[0]!r}, which the metadata does not claim",
                code="claim_mismatch",
                hint=f"add it to the entry points in {group!r} and reinstall",
            )
    if FALLBACK in plugin.claims and len(specs) != 1:
        raise _Refusal(f"a fallback declares exactly one ModelSpec, found {len(specs)}", code="claim_mismatch")


def _spec_for(plugin: _Plugin, group: str, name: str) -> ModelSpec:
    attribute = "architectures" if group == ARCHITECTURES else "model_types"
    return next(spec for spec in plugin.specs if name in getattr(spec, attribute))


# -------------------------------------------------------------------- faults


@contextlib.contextmanager
def _attributed(plugin: _Plugin, kind: type[PluginError], what: str) -> Any:
    """Turn whatever plugin code raises into an error that names the plugin; errors of ours that name their fault pass."""
    try:
        yield
    except (UsageError, PluginError):
        raise
    except MMPluginError as error:
        raise kind(f"{plugin.label}: {what}: {error.message}", **plugin.owner) from error
    except (Exception, SystemExit) as error:
        where = _where(error, plugin.module)
        place = f" [{where}]" if where else ""
        raise kind(f"{plugin.label}: {what}: {type(error).__name__}: {_said(error)}{place}", **plugin.owner) from error


def _forget_modules(module: str, before: set[str]) -> None:
    """Remove what a failed import left of the plugin's own package, so that a later try starts again."""
    package = module.partition(".")[0]
    for name in set(sys.modules) - before:
        if name == package or name.startswith(package + "."):
            del sys.modules[name]


def _said(error: BaseException) -> str:
    """An exception's message, or its class where it has none or cannot say it: its code is the plugin's too."""
    return _quietly(lambda: str(error), "") or type(error).__name__


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _where(error: BaseException, module: str) -> str | None:
    """`file:line` of the last frame inside the plugin's package, which is where its author has to look."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    package = module.partition(".")[0]
    last = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(package + "."):
            last = f"{frame.f_code.co_filename}:{line}"
    return last


def _hint_for_missing(plugin: _Plugin, name: str | None) -> str:
    top = (name or "").partition(".")[0]
    if not top or top == plugin.module.partition(".")[0]:
        return f"pip install --force-reinstall {plugin.distribution}"
    return f"pip install {top}"


# -------------------------------------------------------------------- configs


def _asked(config: Any, architecture: str | None) -> list[tuple[str, str]]:
    """What a config asks for: (group, name) pairs, in the order in which they are tried."""
    if architecture is not None:
        if not isinstance(architecture, str):
            raise UsageError("architecture must be a name", argument="architecture")
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
            f"a config is a folder, a mapping or a PretrainedConfig, not {type(config).__name__}", argument="config"
        )
    if architectures:
        if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
            raise UsageError("config.architectures must be a list of names", argument="config")
        return [(ARCHITECTURES, name) for name in architectures]
    return [(MODEL_TYPES, model_type)] if isinstance(model_type, str) and model_type else []


def _check_placement(device: Any, dtype: Any) -> None:
    """A device that is there, and a dtype that is one: what else fails when weights are loaded is the plugin's."""
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise UsageError(f"device {device!r} cannot be used: {error}", argument="device") from error
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype must be a floating-point torch dtype, not {dtype!r}", argument="dtype")
