"""Tasks prepared in threads of this process: decode, prepare, identify."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from mm_plugin.errors import PluginError, UsageError
from mm_plugin.events import BatchRefused
from mm_plugin.foreign import text_of
from mm_plugin.identity.framing import feature_digest, feature_digests
from mm_plugin.identity.keys import item_identity
from mm_plugin.items import MultimodalInputFormat, join_notes
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.processor.arguments import is_list
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.joint import prepare_jointly
from mm_plugin.processor.mixins import PreparesBatches
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import run_each
from mm_plugin.tasks import JointTask, ModelRef, Prepared, PrepareTask

logger = logging.getLogger("mm_plugin")


class ThreadPreparer:
    """Prepares the tasks of one open model on the registry's executor. Final; a `Preparer`.

    A worker in another process has one too: it opens the task's model and calls `Processor.prepare_tasks`.

    Args:
        model: the open model.
        deadline: of the request whose tasks these are; it does not travel with a task.
    """

    def __init__(self, model: OpenModel, deadline: Deadline | None = None) -> None:
        self._model, self._deadline = model, deadline or Deadline()

    def until(self, deadline: Deadline) -> ThreadPreparer:
        """The same for one request: nothing is begun after its deadline."""
        return ThreadPreparer(self._model, deadline)

    def prepare(self, tasks: Sequence[PrepareTask | JointTask]) -> list[Any]:
        """See `Preparer.prepare`; several tasks run at the same time."""
        batch = [task for task in tasks if isinstance(task, PrepareTask)]
        if len(batch) == len(tasks) > 1 and isinstance(self._model.author.model, PreparesBatches):
            return self._batched(batch)
        return run_each(self._model.runtime.executor, self._one, tasks)

    def _one(self, task: PrepareTask | JointTask) -> Any:
        """A `Prepared`, or what a joint request became."""
        if isinstance(task, JointTask):
            return prepare_jointly(self._model, task, self._deadline)
        began = time.perf_counter()
        return self._prepared(task, self._decode(task), began)

    def _decode(self, task: PrepareTask) -> Any:
        with self._deadline.running(f"decoding {task.path}"):
            return task.source.decode(task.size, background=task.options.background)

    def _prepared(self, task: PrepareTask, decoded: Any, began: float) -> Prepared:
        """One task by itself."""
        author = self._model.author
        arrays = MEDIA_KINDS[task.modality].arrays(decoded)
        with self._deadline.running(f"preparing {task.path}"):
            feature = author.prepare(decoded, arrays, task.fields, task.options, task.path)
        with author.identified("prepare returned"):
            content = feature_digest(feature, self._model.runtime.digests)
        return self._identified(task, decoded, feature, content, time.perf_counter() - began)

    # ---------------------------------------------------------------- several in one call of the author's

    def _batched(self, tasks: Sequence[PrepareTask]) -> list[Any]:
        """Decode each task's media input, and prepare those that could be decoded in one call for each set of options."""
        began = time.perf_counter()
        found = run_each(self._model.runtime.executor, self._decode, tasks)
        try:
            for group in _by_options(tasks, found):
                made = self._together([tasks[index] for index in group], [found[index] for index in group], began)
                for index in reversed(group):
                    found[index] = made.pop()
            return found
        finally:
            del found  # as in `run_each`

    def _together(self, tasks: Sequence[PrepareTask], decoded: Sequence[Any], began: float) -> list[Any]:
        """Tasks of equal options from one call, or each by itself where that fails: its error may be that of one alone."""
        executor = self._model.runtime.executor
        (batch,) = run_each(executor, lambda media: self._from_one_call(tasks, media, began), [decoded])
        try:
            if isinstance(batch, list):
                return batch
            alone: Any = run_each(
                executor, lambda pair: self._prepared(pair[0], pair[1], began), list(zip(tasks, decoded, strict=True))
            )
            if isinstance(batch, MemoryError) or any(isinstance(one, Exception) for one in alone):
                return list(alone)
            return self._disagreed(batch, alone)
        finally:
            batch = alone = None  # as in `run_each`

    def _disagreed(self, refused: Exception, alone: list[Any]) -> list[Any]:
        """What becomes of media inputs that `prepare_batch` refused together and `prepare` took one by one."""
        if isinstance(refused, PluginError):
            return [refused] * len(alone)  # the fault of `prepare_batch` itself
        runtime, author = self._model.runtime, self._model.author
        name, why = self._model.spec.name, text_of(refused)
        what = f"{author.name}.prepare_batch refused {len(alone)} media inputs together that prepare took one by one: {why}"
        runtime.observers.emit(BatchRefused(plugin=name, call="prepare_batch", num_items=len(alone), error=why))
        logger.warning("mm-plugin: %s: %s", name, what)
        return [author.fault(what)] * len(alone) if runtime.settings.strict else alone

    def _from_one_call(self, tasks: Sequence[PrepareTask], decoded: Sequence[Any], began: float) -> list[Prepared]:
        author = self._model.author
        with self._deadline.running(f"preparing {', '.join(task.path for task in tasks)}"):
            features = author.prepare_batch(
                decoded,
                [MEDIA_KINDS[task.modality].arrays(one) for task, one in zip(tasks, decoded, strict=True)],
                [task.fields for task in tasks],
                tasks[0].options,
            )
        with author.identified("prepare_batch returned"):
            contents = feature_digests(features, self._model.runtime.digests)
        seconds = (time.perf_counter() - began) / len(tasks)
        return [self._identified(*entry, seconds) for entry in zip(tasks, decoded, features, contents, strict=True)]

    def _identified(self, task: PrepareTask, decoded: Any, feature: Any, content: bytes, seconds: float) -> Prepared:
        """One task done. A video's frames are decoded while they are iterated, so its notes are complete only here."""
        spec = self._model.spec
        with self._model.author.identified("layout returned"):
            identity = item_identity(
                spec.name,
                spec.output_version,
                task.modality,
                MultimodalInputFormat.NORMAL.value,
                content,
                task.fields,
                salt=task.salt,
            )
        notes = join_notes(task.notes, decoded.notes)
        return Prepared(task.fields, task.replacement, feature, identity, seconds=seconds, notes=notes)


def check_tasks(wanted: ModelRef, tasks: Any) -> None:
    """Refuse all but a list of this model's tasks; its checkpoint may lie in another folder than where the tasks were made.

    Raises:
        UsageError: an entry is not a task, or it is one of another model.
    """
    for task in tasks if is_list(tasks) else [tasks]:
        model = getattr(task, "model", None) if isinstance(task, PrepareTask | JointTask) else None
        if not isinstance(model, ModelRef) or msgspec.structs.replace(model, checkpoint=wanted.checkpoint) != wanted:
            raise UsageError(f"tasks: expected tasks of {wanted}, got {model or type(task).__name__}", argument="tasks")


def _by_options(tasks: Sequence[PrepareTask], decoded: Sequence[Any]) -> list[list[int]]:
    """Indices of the tasks whose media inputs could be decoded, those of equal options together."""
    groups: list[list[int]] = []
    for index, (task, one) in enumerate(zip(tasks, decoded, strict=True)):
        if isinstance(one, Exception):
            continue
        group = next((found for found in groups if tasks[found[0]].options == task.options), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups
