"""Tasks prepared in threads of this process: decode, prepare, identify."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mm_plugin.identity.framing import feature_digest, feature_digests
from mm_plugin.identity.keys import item_identity
from mm_plugin.items import MultimodalInputFormat
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.processor.joint import prepare_jointly
from mm_plugin.processor.mixins import PreparesBatches
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import run_each
from mm_plugin.tasks import JointTask, Prepared, PrepareTask


class ThreadPreparer:
    """Prepares the tasks of one open model on the registry's executor. Final; a `Preparer`.

    A worker in another process has one too: it opens the task's model and calls `Processor.prepare_tasks`.

    Args:
        model: the open model.
    """

    def __init__(self, model: OpenModel) -> None:
        self._model = model

    def prepare(self, tasks: Sequence[PrepareTask | JointTask]) -> list[Any]:
        """See `Preparer.prepare`; several tasks run at the same time."""
        batch = [task for task in tasks if isinstance(task, PrepareTask)]
        if len(batch) == len(tasks) > 1 and isinstance(self._model.author.model, PreparesBatches):
            return self._together(batch)
        return run_each(self._model.runtime.executor, self._one, tasks)

    def _one(self, task: PrepareTask | JointTask) -> Any:
        """A `Prepared`, or what a joint request became."""
        if isinstance(task, JointTask):
            return prepare_jointly(self._model, task)
        model, began = self._model, time.perf_counter()
        decoded = task.source.decode(task.size, background=task.options.background)
        arrays = MEDIA_KINDS[task.modality].arrays(decoded)
        feature = model.author.prepare(decoded, arrays, task.fields, task.options, task.path)
        with model.author.identified("prepare returned"):
            content = feature_digest(feature, model.runtime.digests)
        return self._identified(task, feature, content, time.perf_counter() - began)

    def _together(self, tasks: Sequence[PrepareTask]) -> list[Any]:
        """Decode each task's media input, and prepare those that could be decoded in one call of the author's."""
        model, began = self._model, time.perf_counter()

        def decode(task: PrepareTask) -> Any:
            return task.source.decode(task.size, background=task.options.background)

        found = run_each(model.runtime.executor, decode, tasks)
        good = [index for index, decoded in enumerate(found) if not isinstance(decoded, Exception)]
        try:
            features = (
                model.author.prepare_batch(
                    [found[index] for index in good], [tasks[index].fields for index in good], tasks[0].options
                )
                if good
                else []
            )
            with model.author.identified("prepare_batch returned"):
                contents = feature_digests(features, model.runtime.digests)
        except Exception as error:
            for index in good:
                found[index] = error
            try:
                return found
            finally:
                del found  # as in `run_each`
        seconds = (time.perf_counter() - began) / max(1, len(good))
        for index, feature, content in zip(good, features, contents, strict=True):
            found[index] = self._identified(tasks[index], feature, content, seconds)
        try:
            return found
        finally:
            del found  # as in `run_each`

    def _identified(self, task: PrepareTask, feature: Any, content: bytes, seconds: float) -> Prepared:
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
        return Prepared(task.fields, task.replacement, feature, identity, seconds=seconds)
