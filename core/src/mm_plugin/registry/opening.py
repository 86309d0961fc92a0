"""A checkpoint -> an open processor or encoder, of the plugin that serves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import EncoderError, MMPluginError, PluginLoadError, ProcessorError, UsageError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.metadata import in_words
from mm_plugin.registry.loading import load_named, load_reference
from mm_plugin.registry.plugin import Plugin, translate_errors
from mm_plugin.registry.records import OpenedModel
from mm_plugin.registry.resolution import Choice, resolve

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.encoder.base import Encoder
    from mm_plugin.processor.processor import Processor
    from mm_plugin.registry.discovery import Catalog
    from mm_plugin.registry.positions import ModelPositions
    from mm_plugin.runtime import Runtime
    from mm_plugin.spec import ModelSpec

Source = str | os.PathLike[str]


def open_processor(
    catalog: Catalog, runtime: Runtime, source: Source | Checkpoint, choice: Choice, options: Mapping[str, Any]
) -> Processor:
    """A checkpoint's processor; see `Registry.load_processor`."""
    from mm_plugin.processor.processor import Processor
    from mm_plugin.tasks import ModelRef

    plugin, spec, checkpoint = _open(catalog, runtime, source, choice)
    cls = load_reference(plugin, spec, "processor")
    if spec.tokenizer is not None:
        checkpoint = checkpoint.with_tokenizer(load_reference(plugin, spec, "tokenizer"))
    ref = ModelRef(checkpoint.source, plugin.name, choice.architecture, choice.fallback, options)
    with translate_errors(plugin, ProcessorError, f"the processor of {spec.name} could not be opened"):
        return Processor(cls, spec, checkpoint, runtime, options, owner=plugin.owner, ref=ref)


def open_positions(
    catalog: Catalog, runtime: Runtime, source: Source | Checkpoint, choice: Choice, options: Mapping[str, Any]
) -> ModelPositions:
    """What a scheduler asks of a checkpoint's model; see `Registry.load_positions`."""
    from mm_plugin.registry.positions import ModelPositions, Vocabulary, has_tokens

    plugin, spec, checkpoint = _open(catalog, runtime, source, choice)
    cls = load_reference(plugin, spec, "processor")
    if spec.tokenizer is not None and not has_tokens(spec, checkpoint):
        checkpoint = checkpoint.with_tokenizer(load_reference(plugin, spec, "tokenizer"))
    else:
        checkpoint = checkpoint.with_tokenizer(Vocabulary)
    with translate_errors(plugin, ProcessorError, f"the positions of {spec.name} could not be opened"):
        return ModelPositions(cls, spec, checkpoint, runtime.settings, options, plugin.owner)


def open_encoder(
    catalog: Catalog,
    runtime: Runtime,
    source: Source | Checkpoint,
    choice: Choice,
    *,
    device: Any,
    dtype: Any,
    tensors: Any = None,
) -> Encoder:
    """A checkpoint's encoder; see `Registry.load_encoder`."""
    _check_placement(catalog, device, dtype)
    plugin, spec, checkpoint = _open(catalog, runtime, source, choice)
    cls = load_reference(plugin, spec, "encoder")
    embed = None if spec.embed is None else load_reference(plugin, spec, "embed")
    # Its own view of the checkpoint: only what this encoder reads tells its weights from others.
    checkpoint = checkpoint.view() if tensors is None else checkpoint.with_tensors(tensors)
    with translate_errors(plugin, EncoderError, f"the encoder of {spec.name} could not be opened"):
        encoder: Encoder = cls.load(checkpoint, device, dtype)
        _check_values(plugin, spec, encoder)
        # An encoder that reads its weights by other means is identified by all of the checkpoint's.
        weights = checkpoint.fingerprint(checkpoint.tensors_read or None)
        encoder.bind(
            version=f"{spec.name}:{spec.output_version}:{weights}",
            device=device,
            dtype=dtype,
            owner=plugin.owner,
            observers=runtime.observers,
            embed=embed,
            strict=runtime.settings.strict,
        )
        return encoder


def _check_values(plugin: Plugin, spec: ModelSpec, encoder: Encoder) -> None:
    """Refuse an encoder with tensors on the meta device, through which a look-up would read memory that nobody wrote."""
    from mm_plugin.encoder.loading import without_memory

    left = without_memory(encoder)
    if left:
        raise EncoderError(
            f"{plugin.label}: the encoder of {spec.name} has tensors without values, on the meta device: {', '.join(left[:8])}"
            f"{', ...' if len(left) > 8 else ''}; give them in Encoder.load",
            **plugin.owner,
        )


def load_declared(catalog: Catalog, name: str, field: str) -> Any:
    """The class that the specs of a plugin name in a field; see `Registry.load_declared`."""
    plugin = load_named(catalog, name)
    if plugin.state != "loaded":
        raise plugin.load_error()
    spec = next((spec for spec in plugin.specs if getattr(spec, field) is not None), None)
    return None if spec is None else load_reference(plugin, spec, field)


def _open(
    catalog: Catalog, runtime: Runtime, source: Source | Checkpoint, choice: Choice
) -> tuple[Plugin, ModelSpec, Checkpoint]:
    """The plugin that serves a checkpoint, with the spec for it."""
    from mm_plugin.checkpoint import Checkpoint

    runtime.check_open()
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    plugin, spec = resolve(catalog, runtime, checkpoint.config, choice)
    if spec.specialize is not None:
        spec, checkpoint = _specialized(catalog, plugin, spec, checkpoint)
    return plugin, spec, checkpoint


def _specialized(
    catalog: Catalog, plugin: Plugin, spec: ModelSpec, checkpoint: Checkpoint
) -> tuple[ModelSpec, Checkpoint]:
    """The spec that a plugin makes for a checkpoint, which the checkpoint then carries; the plugin's record names it.

    Where the plugin refuses the checkpoint, its record says why. A checkpoint that carries a specialization already is not
    specialized again.
    """
    folder = str(checkpoint.folder)

    def remember(opened: OpenedModel) -> None:
        with catalog.lock:
            plugin.opened[folder] = opened

    known = checkpoint.specialization_of(spec)
    if known is None:
        specialize = load_reference(plugin, spec, "specialize")
        try:
            made, opened, state = _specialize(plugin, spec, checkpoint, specialize)
        except MMPluginError as error:
            remember(OpenedModel(checkpoint=folder, error=error.message))
            raise
        checkpoint = opened.specialized(made, state, base=spec)
    else:
        made, _ = known
    remember(OpenedModel(checkpoint=folder, model=made.name, notes=dict(made.notes)))
    return made, checkpoint


def _specialize(
    plugin: Plugin, spec: ModelSpec, checkpoint: Checkpoint, specialize: Callable[[ModelSpec, Checkpoint], Any]
) -> tuple[ModelSpec, Checkpoint, Any]:
    """What `ModelSpec.specialize` returns, checked."""
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.spec import ModelSpec

    with translate_errors(plugin, PluginLoadError, f"{spec.specialize} failed on {checkpoint.folder}"):
        made = specialize(spec, checkpoint)
    good = isinstance(made, tuple) and len(made) == 3 and [type(part) for part in made[:2]] == [ModelSpec, Checkpoint]
    if not good or made[0].specialize is not None:
        raise PluginLoadError(
            f"{plugin.label}: {spec.specialize} must return (ModelSpec, Checkpoint, state), the spec without specialize",
            **plugin.owner,
        )
    return made[0], made[1], made[2]


def _imported_torch(catalog: Catalog) -> Any:
    """The module, which looks for plugins of its own when it is first imported; half of it stays imported where that fails."""
    try:
        import torch
    except BaseException as error:
        if is_interruption(error):
            raise
        notices = "".join(f"; {notice}" for notice in catalog.notices)
        raise UsageError(
            f"torch cannot be imported: {words(error)}{in_words(error)}{notices}", argument="torch"
        ) from error
    return torch


def _check_placement(catalog: Catalog, device: Any, dtype: Any) -> None:
    """A usable device and a floating-point dtype: anything else that fails while weights are loaded is the plugin's fault."""
    torch = _imported_torch(catalog)
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise UsageError(f"device: {device!r} cannot be used: {error}", argument="device") from error
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype: expected a floating-point torch dtype or None, got {dtype!r}", argument="dtype")
