"""The order of the stages, written once as generators; a synchronous and an asynchronous driver run them.

A flow yields what it needs done (`Call`, `Each`, `Fetch`) and goes on with the result; after an error it is closed. It does
nothing heavy itself, since the asynchronous driver runs it on the event loop. What it holds is given back on the executor, and on
the event loop's thread only after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import msgspec

from mm_plugin.cache.pins import Pins
from mm_plugin.errors import UsageError
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media.sources import is_remote
from mm_plugin.processor import joint
from mm_plugin.processor.arguments import Arguments
from mm_plugin.processor.commands import Call, Each, Fetch
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import executor_fault, run_each
from mm_plugin.processor.request import PreparedRequest, ReadItem, ReadRequest
from mm_plugin.processor.stages.finish import finish
from mm_plugin.processor.stages.measure import measure
from mm_plugin.processor.stages.overflow import fit
from mm_plugin.processor.stages.prepare import prepare
from mm_plugin.processor.stages.read import read
from mm_plugin.settings import Settings
from mm_plugin.tasks import Preparer

Flow = Generator[Call | Each | Fetch, Any, Any]


def itemwise(
    model: OpenModel,
    preparer: Preparer,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> Generator[Call | Each | Fetch, Any, MultimodalProcessorOutput]:
    """A request whose media inputs are prepared and cached one by one: read, measure, fit, prepare, finish."""
    pins = Pins(lambda: model.runtime.preprocess_cache.store)
    try:
        request = yield Call(partial(read, model, prompt, media, arguments, options))
        prepared = yield from prepared_items(model, preparer, pins, request)
        output: MultimodalProcessorOutput = yield Call(partial(_finish, model, pins, prepared))
        return output
    finally:
        pins.release()


def _finish(model: OpenModel, pins: Pins, prepared: PreparedRequest) -> MultimodalProcessorOutput:
    """The output; what the request held in the cache is given back in the same step."""
    try:
        return finish(model, prepared)
    finally:
        pins.release()


def prepared_items(
    model: OpenModel, preparer: Preparer, pins: Pins, request: ReadRequest
) -> Generator[Call | Each | Fetch, Any, PreparedRequest]:
    """The stages between reading and finishing, which a media input by itself goes through too."""
    if any(is_remote(item.value) for item in request.items):
        items = yield Fetch(request.items)
        request = msgspec.structs.replace(request, items=tuple(items))
    measured = yield Each(partial(measure, model, request.facts, pins), request.items)
    fitted = yield Call(partial(fit, model, pins, request, tuple(measured)))
    del request, measured
    prepared: PreparedRequest = yield Call(partial(prepare, model, pins, preparer, fitted))
    return prepared


def jointly(
    model: OpenModel,
    preparer: Preparer,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> Generator[Call | Each | Fetch, Any, MultimodalProcessorOutput]:
    """A request whose media inputs are prepared together; nothing of it is cached."""
    joint.check_joint_arguments(model, arguments)
    if (yield Call(partial(joint.has_no_media, model, prompt, media, arguments))):
        output = yield from itemwise(model, preparer, prompt, media, arguments, options)
        return output
    request = yield Call(partial(joint.read_jointly, model, prompt, media, arguments, options))
    if any(is_remote(item.value) for item in request.items):
        items = yield Fetch(request.items)
        request = msgspec.structs.replace(request, items=tuple(items))
    measured = yield Each(partial(joint.measure_jointly, model, request), request.items)
    task = yield Call(partial(joint.task_of, model, request, measured))
    del request, measured
    limit = arguments.max_prompt_tokens
    joint_output: MultimodalProcessorOutput = yield Call(partial(joint.finish_jointly, model, preparer, task, limit))
    return joint_output


# -------------------------------------------------------------------- drivers


def run(flow: Flow, executor: Executor) -> Any:
    """Run a flow in the calling thread; several items are worked on by the executor at the same time."""
    with contextlib.closing(flow):
        try:
            command = next(flow)
            while True:
                command = flow.send(_perform(command, executor))
        except StopIteration as stop:
            return stop.value


def _perform(command: Call | Each | Fetch, executor: Executor) -> Any:
    if isinstance(command, Call):
        return command.function()
    if isinstance(command, Fetch):
        return command.items  # a source reads its URL when it is opened
    return _all(run_each(executor, command.function, command.items))


async def run_async(flow: Flow, executor: Executor, settings: Settings) -> Any:
    """Run a flow with nothing heavy on the event loop's thread."""
    loop = asyncio.get_running_loop()

    def submit(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        try:
            return loop.run_in_executor(executor, function, *arguments)
        except RuntimeError as error:
            raise executor_fault(error) from error

    async def perform(command: Call | Each | Fetch) -> Any:
        if isinstance(command, Call):
            return await submit(command.function)
        if isinstance(command, Fetch):
            return await _fetched(command.items, settings)
        # Wait for all, so that the error raised is the first in order, as in `run`. No name holds the futures: an error that one
        # of them holds leads to this frame.
        return _all(
            await asyncio.gather(*(submit(command.function, item) for item in command.items), return_exceptions=True)
        )

    try:
        command = next(flow)
        while True:
            command = flow.send(await perform(command))
    except StopIteration as stop:
        return stop.value
    except Exception:
        with contextlib.suppress(UsageError):  # an executor that takes no work: this thread closes the flow below
            await submit(flow.close)
        raise
    finally:
        with contextlib.suppress(ValueError):  # cancelled while the executor closes it
            flow.close()


async def _fetched(items: Sequence[ReadItem], settings: Settings) -> list[ReadItem]:
    """URLs replaced by the bytes that they lead to, all fetched at the same time."""
    from mm_plugin.media.http import fetch_async

    async def one(item: ReadItem) -> ReadItem:
        if not is_remote(item.value):
            return item
        return msgspec.structs.replace(item, value=await fetch_async(item.value, item.path, settings))

    return _all(await asyncio.gather(*map(one, items), return_exceptions=True))


def _all(found: list[Any]) -> list[Any]:
    """What was found for every item, or the first error in order."""
    error: BaseException | None = next((entry for entry in found if isinstance(entry, BaseException)), None)
    if error is None:
        return found
    try:
        raise error
    finally:
        del error, found  # an error that holds the frame that holds it would keep every media input alive
