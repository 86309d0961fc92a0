"""`Registry`: what a server calls to find and open models. A facade over a catalog and a runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mm_plugin.registry.claims import ARCHITECTURES, MODEL_TYPES
from mm_plugin.registry.discovery import read_catalog
from mm_plugin.registry.loading import load_named
from mm_plugin.registry.opening import load_declared, open_encoder, open_positions, open_processor
from mm_plugin.registry.resolution import Choice, FallbackUse, resolve
from mm_plugin.registry.services import make_store, services_of
from mm_plugin.runtime import CLOSE_SECONDS, Runtime
from mm_plugin.settings import Settings, unknown_variables

if TYPE_CHECKING:
    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.cache.store import Store
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.encoder.base import Encoder
    from mm_plugin.events import Observers
    from mm_plugin.identity.digests import Digests
    from mm_plugin.processor.processor import Processor
    from mm_plugin.registry.positions import ModelPositions
    from mm_plugin.registry.records import PluginRecord
    from mm_plugin.spec import ModelSpec
    from mm_plugin.tasks import Preparer


def discover(
    settings: Settings | None = None,
    *,
    executor: Executor | None = None,
    preprocess_store: Store | None = None,
    embedding_cache: EmbeddingCache | None = None,
    preparer: Preparer | None = None,
) -> Registry:
    """Read what the installed plugins claim, without importing any of them.

    Example:
        >>> with discover() as registry:
        ...     [record.name for record in registry.plugins if record.state == "loaded"]
        []

    Args:
        settings: limits and switches; read from the environment where None.
        executor: runs the per-item stages, in this process; where None, threads of the registry's own.
        preprocess_store: keeps prepared items; where None, made as the settings say.
        embedding_cache: keeps encoder output; where None, made as the settings say.
        preparer: prepares media inputs, in other processes for example; where None, threads of `executor`. It is not closed.

    Raises:
        UsageError: a setting cannot be read, or `executor` runs its work in other processes.
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
    """The installed plugins, and the executor and the caches that their models share. Final; safe to use from several threads.

    Made by `discover`. A context manager; leaving it closes what it made, not what it was given.

    Example:
        >>> with Registry(Settings(threads=2)) as registry:
        ...     registry.resolve({"architectures": ["NoPluginServesThis"]}, fallback="never")
        Traceback (most recent call last):
        mm_plugin.errors.NoModelError: no model for NoPluginServesThis: no installed plugin claims it
        ...

    Args:
        settings: limits and switches.
        notices: faults found before, which belong to no plugin.
        executor: as for `discover`.
        preprocess_store: as for `discover`.
        embedding_cache: as for `discover`.
        preparer: as for `discover`.

    Attributes:
        settings: limits and switches.
        catalog: the installed plugins and their claims.
        runtime: the executor, the caches and the observers that opened models share.
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
        self.catalog = read_catalog(settings, notices)
        self.runtime = Runtime(
            settings,
            executor=executor,
            preprocess_store=preprocess_store,
            embedding_cache=embedding_cache,
            services=partial(services_of, self.catalog),
            make_store=self.make_store,
            preparer=preparer,
        )

    # ---------------------------------------------------------------- what is installed

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """A record for every installed plugin, broken or not."""
        return self.catalog.records()

    @property
    def notices(self) -> tuple[str, ...]:
        """Faults that belong to no plugin, such as a setting that names a plugin that is not installed."""
        return self.catalog.notices

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every architecture with exactly one enabled claimant, unless it is known to be broken, sorted."""
        return self.catalog.served(ARCHITECTURES)

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every model type with exactly one enabled claimant, unless it is known to be broken, sorted."""
        return self.catalog.served(MODEL_TYPES)

    def fingerprint(self) -> str:
        """A digest of which plugins are installed and enabled; processes compare it to know that they serve the same set."""
        return self.catalog.fingerprint()

    def load_plugin(self, name: str) -> PluginRecord:
        """Import one plugin by name and return its record; a broken one is a record, not an error.

        Raises:
            UsageError: no installed plugin has this name.
            PluginLoadError: with `strict`, when it is broken.
        """
        plugin = load_named(self.catalog, name)
        with self.catalog.lock:
            return plugin.record()

    def load_declared(self, name: str, field: str) -> Any:
        """The class that the specs of a plugin name in a field, the first that names one; None where none does.

        Args:
            name: the plugin's name.
            field: a field of `ModelSpec` that names a class or function, such as `demo`.

        Raises:
            UsageError: no such plugin.
            PluginLoadError: the plugin or the class cannot be imported, or the class is of another kind.
        """
        return load_declared(self.catalog, name, field)

    # ---------------------------------------------------------------- models

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
        tried. Nested configs are never read. What no installed plugin claims goes to the fallback, where there is one; the
        spec that such a plugin makes for a checkpoint (`ModelSpec.specialize`) is not known here.

        Args:
            config: a checkpoint folder, a config as a mapping, or a `PretrainedConfig`.
            architecture: try this in place of the config's own.
            plugin: name of the plugin to use; settles a conflict.
            fallback: when the fallback serves a model: `unclaimed`, where no installed plugin claims it; `always`, also where
                every plugin that claims it is disabled, broken, shadowed or in conflict; or `never`.

        Raises:
            NoModelError: nothing serves it; carries the record of every plugin.
            UsageError: `config` or `fallback` is something else.
            PluginLoadError: with `strict`, when the plugin is broken.
        """
        choice = Choice(architecture=architecture, plugin=plugin, fallback=fallback)
        return resolve(self.catalog, self.runtime, config, choice)[1]

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
            checkpoint: a folder or a hub id, or an open checkpoint.
            architecture: serve it as this, in place of what its config says.
            plugin: name of the plugin to use; settles a conflict.
            fallback: as for `resolve`.
            **options: options of the plugin's `Options`, fixed from now on; they take precedence over the checkpoint's.

        Raises:
            NoModelError: nothing serves it.
            UsageError: the checkpoint cannot be read, or an option is unknown or wrong.
            PluginLoadError: the plugin's class cannot be imported.
            ProcessorError: the plugin's processor could not be built.
        """
        choice = Choice(architecture=architecture, plugin=plugin, fallback=fallback)
        return open_processor(self.catalog, self.runtime, checkpoint, choice, options)

    def load_positions(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        architecture: str | None = None,
        plugin: str | None = None,
        fallback: FallbackUse = "unclaimed",
        **options: Any,
    ) -> ModelPositions:
        """Open what a scheduler asks of a checkpoint's model: positions, embeddings of an item's fields, token ids.

        Neither torch nor transformers is imported, unless the plugin's processor imports them, or its own tokenizer, where
        that adds tokens that the checkpoint's files lack.

        Args:
            checkpoint: a folder or a hub id, or an open checkpoint; it must have a tokenizer.json.
            architecture: serve it as this, in place of what its config says.
            plugin: name of the plugin to use; settles a conflict.
            fallback: as for `resolve`.
            **options: options given to `load_processor`.

        Raises:
            NoModelError, UsageError, PluginLoadError, ProcessorError: as for `load_processor`.
        """
        choice = Choice(architecture=architecture, plugin=plugin, fallback=fallback)
        return open_positions(self.catalog, self.runtime, checkpoint, choice, options)

    def load_encoder(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        architecture: str | None = None,
        plugin: str | None = None,
        fallback: FallbackUse = "unclaimed",
        device: Any = "cpu",
        dtype: Any = None,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    ) -> Encoder:
        """Open a checkpoint's encoder alone, without its language model.

        Args:
            checkpoint: a folder or a hub id, or an open checkpoint.
            architecture: serve it as this, in place of what its config says.
            plugin: name of the plugin to use; settles a conflict.
            fallback: as for `resolve`.
            device: torch device for the weights.
            dtype: torch dtype, or None for the checkpoint's own.
            tensors: the checkpoint's tensors by their names there, or pairs of both, for an engine that has read them: the
                encoder's own, or more. No weights are read from files then; those of this device and dtype are shared, not copied.

        Raises:
            NoModelError: nothing serves it.
            UsageError: the checkpoint, the device, the dtype or the tensors cannot be used.
            PluginLoadError: the plugin's class cannot be imported.
            EncoderError: the plugin's encoder could not be built.
        """
        choice = Choice(architecture=architecture, plugin=plugin, fallback=fallback)
        return open_encoder(self.catalog, self.runtime, checkpoint, choice, device=device, dtype=dtype, tensors=tensors)

    # ---------------------------------------------------------------- what opened models share

    @property
    def observers(self) -> Observers:
        """Receive every event; the plugins that claim observers are imported when this is first read."""
        return self.runtime.observers

    @property
    def digests(self) -> Digests:
        """Hash on each kind of device; the plugins that claim digests are imported when this is first read."""
        return self.runtime.digests

    @property
    def executor(self) -> Executor:
        """Runs the per-item stages."""
        return self.runtime.executor

    @property
    def preprocess_store(self) -> Store:
        """Keeps prepared items by source key."""
        return self.runtime.preprocess_store

    @property
    def embedding_cache(self) -> EmbeddingCache:
        """Keeps encoder output; pass it to `embed_mm_inputs`."""
        return self.runtime.embedding_cache

    def make_store(self, name: str, capacity_bytes: int) -> Store:
        """A new store: `memory`, or one that a plugin claims in the group `mm_plugin.stores`. It is not closed with the registry.

        Args:
            name: of the store.
            capacity_bytes: the most that its entries may take, bytes.

        Raises:
            UsageError: there is no such store; the message lists those there are.
            PluginLoadError: the plugin that claims it is broken, or its store cannot be made.
        """
        return make_store(self.catalog, name, capacity_bytes)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Stop the executor and close the caches that the registry made itself. Calling it twice is harmless.

        What does not end in time, such as the preparation of an item that hangs, is left running and logged. Whoever waits for the
        import of a plugin gets a `UsageError`.

        Args:
            timeout: most seconds that it takes.
        """
        self.catalog.closed.set()
        self.runtime.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
