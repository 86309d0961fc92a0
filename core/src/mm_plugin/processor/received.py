"""Tasks that came from another process, made ready here: media inputs opened with this process's limits, options made structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mm_plugin.items import Modality
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.source import MediaSource, MediaValue
from mm_plugin.processor.opened import OpenModel
from mm_plugin.tasks import JointTask, PrepareTask

Task = PrepareTask | JointTask


def received(model: OpenModel, task: Task) -> Task:
    """A task as the process that made it had it. One that never left it is returned as it is.

    Args:
        model: the open model.
        task: as `mm_plugin.wire` decodes one, or as a `Processor` made it.

    Raises:
        RequestError: a media input cannot be opened, or is above a limit of this process.
        UsageError: its options are not those of this model.
    """
    options: Any = task.options
    if isinstance(options, Mapping):
        options = model.table.received(options)
    if isinstance(task, JointTask):
        sources = {
            modality: [(_opened(model, modality, source), size) for source, size in entries]
            for modality, entries in task.sources.items()
        }
        return msgspec.structs.replace(task, sources=sources, options=options)
    return msgspec.structs.replace(task, source=_opened(model, task.modality, task.source), options=options)


def _opened(model: OpenModel, modality: Modality, source: Any) -> MediaSource:
    if not isinstance(source, MediaValue):
        found: MediaSource = source
        return found
    kind = MEDIA_KINDS[model.serves(modality)]
    return kind.open(source.media, path=source.path, settings=model.settings)
