"""Fourth stage: what the cache does not have is prepared, once however many requests bring it at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from mm_plugin.cache.pins import Pins
from mm_plugin.identity.keys import deferred_identity
from mm_plugin.media.source import MediaValue, owned_value
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import for_request, raise_first_error
from mm_plugin.processor.request import FittedRequest, MeasuredItem, PreparedRequest, ReadyItem
from mm_plugin.tasks import Prepared, Preparer, PrepareTask, prepare_all


def prepare(model: OpenModel, pins: Pins, preparer: Preparer, request: FittedRequest) -> PreparedRequest:
    """Every item of the request with its feature and identity; the media inputs are let go of.

    Raises:
        MMPluginError: the error of the first item that failed, once all have ended.
    """
    if request.facts.arguments.prepare == "worker":
        return _deferred(model, request)
    missing = [item for item in request.items if item.prepared is None]
    found: dict[int, tuple[Any, bool]] = {}
    seconds = 0.0
    if missing:
        began = time.perf_counter()
        tasks = [_task(model, request, item) for item in missing]
        answers = model.runtime.preprocess_cache.get_or_compute_many(
            [item.key for item in missing],
            lambda indices: _made(preparer, [tasks[index] for index in indices]),
            lambda prepared: prepared.num_bytes,
        )
        tasks.clear()
        _raise_first(missing, answers)
        for item in missing:
            pins.take(item.key)
        seconds = time.perf_counter() - began
        found = {id(item): answer for item, answer in zip(missing, answers, strict=True)}
    ready = []
    for item in request.items:
        if item.prepared is None:
            prepared, joined = found[id(item)]
            # What was prepared for this request took its own time, any other the time that it was waited for.
            taken = seconds if joined else prepared.seconds
            ready.append(_ready(item, prepared, joined, item.seconds + taken))
        else:
            ready.append(_ready(item, item.prepared, item.cached, item.seconds))
    return PreparedRequest(request.facts, request.ids, request.slots, tuple(ready), request.dropped)


def _deferred(model: OpenModel, request: FittedRequest) -> PreparedRequest:
    """Every item with a task in place of a feature, and the identity of its source; one that came prepared is as it came."""
    ready = []
    for item in request.items:
        if item.prepared is not None:
            ready.append(_ready(item, item.prepared, item.cached, item.seconds))
            continue
        task = _task(model, request, item)
        # By value, since the caller may write to what it gave once it has the output.
        task = msgspec.structs.replace(task, source=MediaValue(item.path, owned_value(task.source.value())))
        spec = model.spec
        identity = deferred_identity(spec.name, spec.output_version, item.modality, item.key)
        prepared = Prepared(task.fields, item.replacement, None, identity, notes=item.notes)
        ready.append(msgspec.structs.replace(_ready(item, prepared, False, item.seconds), task=task))
    return PreparedRequest(request.facts, request.ids, request.slots, tuple(ready), request.dropped)


def _made(preparer: Preparer, tasks: Sequence[PrepareTask]) -> list[Any]:
    """What tasks became. Fields and replacement are those that the prompt was measured with, whoever prepared the feature."""
    return [
        one
        if isinstance(one, Exception)
        else msgspec.structs.replace(one, fields=task.fields, replacement=task.replacement, notes=tuple(one.notes))
        for task, one in zip(tasks, prepare_all(preparer, tasks, Prepared), strict=True)
    ]


def _raise_first(missing: Sequence[MeasuredItem], answers: list[tuple[Any, bool]]) -> None:
    """Raise the first error in order, as this request's; no other answer stays alive with it."""
    found = [
        for_request(value, item.path) if joined and isinstance(value, Exception) else value
        for item, (value, joined) in zip(missing, answers, strict=True)
    ]
    if any(isinstance(value, Exception) for value in found):
        answers.clear()
    raise_first_error(found)


def _task(model: OpenModel, request: FittedRequest, item: MeasuredItem) -> PrepareTask:
    assert item.source is not None
    assert item.fields is not None
    return PrepareTask(
        model.ref,
        item.modality,
        item.path,
        item.source,
        item.size,
        item.settings.options,
        item.fields,
        item.replacement,
        request.facts.arguments.salt,
        item.notes,
    )


def _ready(item: MeasuredItem, prepared: Prepared, cached: bool, seconds: float) -> ReadyItem:
    return ReadyItem(
        item.modality, item.path, item.settings, item.caller_hash, prepared, item.key, cached, item.claim, seconds
    )
