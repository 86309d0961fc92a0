"""Tasks prepared in threads of this process: decode, prepare, identify."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor
from typing import Any

from mm_plugin.identity.framing import feature_digest, feature_digests
from mm_plugin.identity.keys import item_identity
from mm_plugin.items import MultimodalInputFormat
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.processor.mixins import PreparesBatches
from mm_plugin.processor.opened import OpenModel
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
            from mm_plugin.processor.joint import prepare_jointly

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


def run_each(executor: Executor, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What the function returned or raised for every item, in order; on the executor where there are several items.

    The calling thread takes part: it works on the last item that no thread has begun, so this ends even where every thread of
    the executor waits in such a call.
    """
    if len(items) <= 1:
        return [_attempt(function, item) for item in items]
    futures = [executor.submit(function, item) for item in items]
    found: list[Any] = [None] * len(items)
    mine = set()
    try:
        for index in reversed(range(len(items))):
            if futures[index].cancel():
                mine.add(index)
                found[index] = _attempt(function, items[index])
        for index in range(len(items)):
            if index not in mine:
                try:
                    found[index] = futures[index].result()
                except CancelledError:
                    raise  # the executor was closed
                except Exception as error:
                    found[index] = error
        return found
    finally:
        while futures:
            futures.pop().cancel()
        # An error that was raised in this thread leads to this frame, which must not lead back: it would keep all media alive.
        del found


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except CancelledError:
        raise
    except Exception as error:
        return error


def first_error(found: Sequence[Any]) -> Exception | None:
    """The first error in order."""
    return next((entry for entry in found if isinstance(entry, Exception)), None)


def renamed(error: Exception, path: str) -> Exception:
    """A media error of another request, or place, that was preparing the same media input, with the path that it has here."""
    from mm_plugin.errors import MediaError

    if not isinstance(error, MediaError) or error.path in (None, path):
        return error
    message = error.message.replace(str(error.path), path, 1)
    copy = MediaError(message, path=path, reason=error.reason)
    copy.__cause__ = error
    return copy
