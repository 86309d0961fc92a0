"""The unit of work that may leave the process: a media input to prepare, and what became of it. Knows no author's code."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from mm_plugin.arrays import storage_bytes
from mm_plugin.errors import PluginError, RequestError, UsageError
from mm_plugin.events import MediaNote
from mm_plugin.foreign import class_name, is_interruption, words
from mm_plugin.items import Modality, MultimodalDataItem, MultimodalInputFormat, are_notes
from mm_plugin.media.source import MediaSource
from mm_plugin.placeholders import Replacement


class ModelRef(msgspec.Struct, frozen=True):
    """Which model a task is for: what a worker passes to `Registry.load_processor`, once for all tasks of the model.

    Attributes:
        checkpoint: folder or hub id.
        plugin: name of the plugin that serves it.
        architecture: the architecture that it is served as, or None for the checkpoint's own.
        fallback: as for `Registry.resolve`.
        options: options given at load.

    >>> ModelRef("/models/a", "qwen2_vl", options={"resize": "pillow"}).arguments()["plugin"]
    'qwen2_vl'
    """

    checkpoint: str
    plugin: str
    architecture: str | None = None
    fallback: str = "unclaimed"
    options: Mapping[str, Any] = {}

    def __hash__(self) -> int:
        return hash((self.checkpoint, self.plugin, self.architecture, self.fallback))  # options may hold lists

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Registry.load_processor`, the checkpoint among them."""
        named = {name: getattr(self, name) for name in ("checkpoint", "plugin", "architecture", "fallback")}
        return {**named, **self.options}


class PrepareTask(msgspec.Struct, frozen=True, eq=False):
    """One media input to prepare, with everything that a worker needs. It can be pickled.

    Attributes:
        model: the model that it is prepared for.
        modality: what it is.
        path: where it stands in its request, such as `images[2]`; errors name it.
        source: the media input, not decoded yet.
        size: its size, as the author's `layout` got it.
        options: the author's `Options`, all resolved.
        fields: what `layout` returned.
        replacement: the tokens that stand for it.
        salt: separates tenants.
        notes: what `sample` and `layout` said of it.
    """

    model: ModelRef
    modality: Modality
    path: str
    source: MediaSource
    size: Any
    options: Any
    fields: Mapping[str, Any]
    replacement: Replacement
    salt: str | bytes | None = None
    notes: tuple[str, ...] = ()


class JointTask(msgspec.Struct, frozen=True, eq=False):
    """A whole request that must be prepared together. It can be pickled.

    Attributes:
        model: the model that it is prepared for.
        text: the prompt with its placeholders.
        rendered: the text is a rendered chat template and has its special tokens already.
        sources: the media inputs by modality, in order, each with its size.
        options: the author's `Options`, all resolved.
        salt: separates tenants.
    """

    model: ModelRef
    text: str
    rendered: bool
    sources: Mapping[Modality, Sequence[tuple[MediaSource, Any]]]
    options: Any
    salt: str | bytes | None = None


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """One prepared media input, as the preprocess cache keeps it; shared by every request that repeats it.

    Attributes:
        fields: the model fields.
        replacement: the tokens that stand for it.
        feature: what the encoder reads.
        identity: 32 bytes.
        format: in which form it came.
        embeddings: embeddings that came with it, in place of the feature.
        seconds: how long the preparation took.
        notes: those of its task, and what decoding it added.
    """

    fields: Mapping[str, Any]
    replacement: Replacement
    feature: Any
    identity: bytes
    format: MultimodalInputFormat = MultimodalInputFormat.NORMAL
    embeddings: Any = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps alive: of whole arrays and storages, also where it holds a view of them."""
        held = (self.feature, self.embeddings, self.replacement.ids, self.replacement.is_embed, *self.fields.values())
        return sum(map(storage_bytes, held)) + sum(map(len, self.notes))

    def is_complete(self) -> bool:
        """See `Result.is_complete`."""
        identity = isinstance(self.identity, bytes) and len(self.identity) == 32
        made = self.feature is not None or self.embeddings is not None
        return identity and made and are_notes(self.notes) and isinstance(self.seconds, numbers.Real)


def is_prepared(value: Any) -> bool:
    """Whether a value is a `Prepared` with every part."""
    if not isinstance(value, Prepared) or not value.is_complete():
        return False
    return isinstance(value.replacement, Replacement) and isinstance(value.fields, Mapping)


class JointPrepared(msgspec.Struct, frozen=True, eq=False):
    """What a `JointTask` became.

    Attributes:
        ids: [N] int64, the expanded prompt.
        items: one for each modality, with spans and identity.
        seconds: how long the preparation took.
        notes: what is served otherwise than asked, of each media input and of all media of a modality together.
    """

    ids: np.ndarray
    items: Sequence[MultimodalDataItem]
    seconds: float
    notes: Sequence[MediaNote] = ()

    def is_complete(self) -> bool:
        """See `Result.is_complete`."""
        ids = isinstance(self.ids, np.ndarray) and self.ids.ndim == 1 and self.ids.dtype == np.int64
        items = isinstance(self.items, list | tuple) and all(
            isinstance(item, MultimodalDataItem) for item in self.items
        )
        notes = isinstance(self.notes, list | tuple) and all(isinstance(note, MediaNote) for note in self.notes)
        timed = isinstance(self.seconds, float)
        return ids and items and timed and notes and all(are_notes(item.notes) for item in self.items)


class Result(Protocol):
    """What a task becomes."""

    def is_complete(self) -> bool:
        """Whether every part is there, and of its type."""


class Preparer(Protocol):
    """Prepares tasks: in threads of this process, in other processes, or on another machine."""

    def prepare(self, tasks: Sequence[PrepareTask | JointTask]) -> list[Any]:
        """A `Prepared` (a `JointPrepared` for a `JointTask`) or the task's error for each task, in order.

        A task that fails leaves the others as they are. What is raised is a fault of the preparer itself. Of a `Prepared`, the
        feature, its identity, the seconds and the notes are used; fields and replacement are the task's own.
        """


# What may stand in place of what a task becomes.
_TASK_ERRORS = (RequestError, PluginError, UsageError, MemoryError)


def prepare_all(preparer: Preparer, tasks: Sequence[PrepareTask | JointTask], kind: type[Result]) -> list[Any]:
    """What a preparer makes of tasks, checked: of `kind` each, or the task's own error.

    Args:
        preparer: the caller's, or the core's own.
        tasks: at least one.
        kind: what a task becomes; its `is_complete` says whether one can be used.

    Raises:
        UsageError: the preparer itself fails, or returns anything else.
    """
    try:
        found = list(preparer.prepare(tasks))
    except (UsageError, MemoryError):
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        name = class_name(preparer)
        raise UsageError(f"preparer: {name} failed: {words(error)}", argument="preparer") from error
    good = [isinstance(one, _TASK_ERRORS) or (isinstance(one, kind) and one.is_complete()) for one in found]
    if len(found) != len(tasks) or not all(good):
        kinds = sorted({type(one).__name__ for one, fine in zip(found, good, strict=True) if not fine})
        raise UsageError(
            f"preparer: expected a complete {kind.__name__} or a request's or plugin's error for each of {len(tasks)} tasks, "
            f"got {len(found)}, of which these cannot be used: {', '.join(kinds) or 'none'}",
            argument="preparer",
        )
    try:
        return found
    finally:
        del found  # an error among them leads to this frame, which must not lead back
