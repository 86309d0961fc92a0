"""Features of items that came with a task, made where the items are encoded. Knows no encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mm_plugin.embed.calls import FAILED, OK, EncoderCalls
from mm_plugin.errors import MMPluginError, UsageError
from mm_plugin.events import MediaNote
from mm_plugin.foreign import class_name, is_interruption, words
from mm_plugin.items import MultimodalDataItem
from mm_plugin.tasks import Prepared, PrepareTask, prepare_all

# `Processor.prepare_tasks`, or what does the same elsewhere.
Prepare = Callable[[Sequence[PrepareTask]], Sequence[Any]]


class _Calling:
    """A function as a `Preparer`."""

    def __init__(self, function: Prepare) -> None:
        self._function = function

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        return list(self._function(tasks))


def prepared_items(
    items: Sequence[MultimodalDataItem], prepare: Prepare | None, calls: EncoderCalls
) -> list[MultimodalDataItem | MMPluginError]:
    """The items with their features, those among them that came with a task prepared now; or the error of each.

    Args:
        items: copies, which are not changed.
        prepare: prepares tasks; None where the caller has nothing that could.
        calls: whose observers hear of what decoding adds to the notes of an item.
    """
    ready: list[Any] = list(items)
    waiting = [index for index, item in enumerate(items) if item.feature is None and item.task is not None]
    if not waiting:
        return ready
    for index, made in zip(waiting, _made([items[index].task for index in waiting], prepare), strict=True):
        # Ranks of a collective encoder must go on with the same items.
        worst = calls.agreed(OK if isinstance(made, Prepared) else FAILED, "the item could not be prepared")
        if not isinstance(made, Prepared):
            ready[index] = calls.failure(f"the item could not be prepared: {words(made)}", made)
            continue
        if worst != OK:
            other = "the item could not be prepared: another rank could not prepare it"
            ready[index] = worst if isinstance(worst, MMPluginError) else calls.failure(other, None)
            continue
        ready[index] = msgspec.structs.replace(items[index], feature=made.feature, task=None)
        if calls.observers is not None:
            path, modality = items[index].task.path, items[index].modality.argument
            for note in made.notes[len(items[index].task.notes) :]:
                calls.observers.emit(MediaNote(path=path, modality=modality, note=note))
    return ready


def _made(tasks: Sequence[Any], prepare: Prepare | None) -> Sequence[Any]:
    """A `Prepared` or an error for each task."""
    wrong = next((task for task in tasks if not isinstance(task, PrepareTask)), None)
    if wrong is not None:
        fault = UsageError(f"task: expected a PrepareTask, got a {class_name(wrong)}", argument="task")
        return [fault] * len(tasks)
    if prepare is None:
        what = "prepare: an item is to be prepared where it is encoded; pass prepare=processor.prepare_tasks"
        return [UsageError(what, argument="prepare")] * len(tasks)
    try:
        return prepare_all(_Calling(prepare), tasks, Prepared)
    except BaseException as error:
        if is_interruption(error):
            raise
        return [error] * len(tasks)
