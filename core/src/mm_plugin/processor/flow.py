"""The order of the stages, written once as generators; a synchronous and an asynchronous driver run them.

A flow yields what it needs done (`Call`, `Each`) and goes on with the result; after an error it is closed. It does nothing heavy
itself, since the asynchronous driver runs it on the event loop. What it holds is given back on the executor, and on the thread of
the event loop only after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from mm_plugin.cache.pins import Pins
from mm_plugin.errors import UsageError
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media.sources import is_remote
from mm_plugin.processor import joint
from mm_plugin.processor.arguments import Arguments
from mm_plugin.processor.commands import Call, Each
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.fetching import fetch_async, fetch_item
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import FirstError, run_each
from mm_plugin.processor.request import PreparedRequest, ReadItem, ReadRequest
from mm_plugin.processor.stages.finish import finish
from mm_plugin.processor.stages.measure import measure
from mm_plugin.processor.stages.overflow import fit
from mm_plugin.processor.stages.prepare import prepare
from mm_plugin.processor.stages.read import read
from mm_plugin.settings import Settings
from mm_plugin.tasks import Preparer

# URLs of one request that are fetched and not yet opened: what waits unseen is bounded, and the first are seen first.
_MOST_FETCHES = 16

Flow = Generator[Call | Each, Any, Any]


def itemwise(
    model: OpenModel,
    preparer: Preparer,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> Generator[Call | Each, Any, MultimodalProcessorOutput]:
    """A request whose media inputs are prepared and cached one by one: read, measure, fit, prepare, finish."""
    pins = Pins(lambda: model.runtime.preprocess_cache.store)
    try:
        request = yield Call(partial(read, model, prompt, media, arguments, options), "reading the prompt")
        prepared = yield from prepared_items(model, preparer, pins, request)
        output: MultimodalProcessorOutput = yield Call(partial(_finish, model, pins, prepared), "finishing")
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
) -> Generator[Call | Each, Any, PreparedRequest]:
    """The stages between reading and finishing, which a media input by itself goes through too."""
    facts = request.facts
    measured = yield Each(partial(measure, model, facts, pins), request.items, facts.intake, "measuring")
    fitted = yield Call(partial(fit, model, pins, request, tuple(measured)), "fitting the request to its limits")
    del request, measured
    prepared: PreparedRequest = yield Call(partial(prepare, model, pins, preparer, fitted), "preparing")
    return prepared


def jointly(
    model: OpenModel,
    preparer: Preparer,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> Generator[Call | Each, Any, MultimodalProcessorOutput]:
    """A request whose media inputs are prepared together; nothing of it is cached."""
    joint.check_joint_arguments(model, arguments)
    if (yield Call(partial(joint.has_no_media, model, prompt, media, arguments), "reading the prompt")):
        output = yield from itemwise(model, preparer, prompt, media, arguments, options)
        return output
    request = yield Call(partial(joint.read_jointly, model, prompt, media, arguments, options), "reading the prompt")
    intake = request.facts.intake
    measured = yield Each(partial(joint.measure_jointly, model, request), request.items, intake, "measuring")
    task = yield Call(partial(joint.task_of, model, request, measured), "fitting the request to its limits")
    del request, measured
    limit = arguments.max_prompt_tokens
    joint_output: MultimodalProcessorOutput = yield Call(
        partial(joint.finish_jointly, model, preparer, task, limit), "preparing"
    )
    return joint_output


# -------------------------------------------------------------------- drivers


def run(flow: Flow, executor: Executor, settings: Settings, deadline: Deadline) -> Any:
    """Run a flow in the calling thread; several items are worked on by the executor at the same time."""
    with contextlib.closing(flow):
        try:
            command = next(flow)
            while True:
                command = flow.send(_perform(command, executor, settings, deadline))
        except StopIteration as stop:
            return stop.value


def _perform(command: Call | Each, executor: Executor, settings: Settings, deadline: Deadline) -> Any:
    if isinstance(command, Call):
        return _called(command, deadline)
    first, each = FirstError(), command

    def work(place: tuple[int, ReadItem]) -> Any:
        index, item = place

        def one() -> Any:
            fetched = fetch_item(item, settings, _counted(each, first, index, item), deadline)
            return _on_item(each, fetched, deadline)

        return first.attempt(index, one)

    found = run_each(executor, work, list(enumerate(command.items)))
    first.reraise()
    return _all(found)


def _called(command: Call, deadline: Deadline) -> Any:
    if not command.doing:
        return command.function()
    with deadline.running(command.doing, is_stage=True):
        return command.function()


def _on_item(command: Each, item: ReadItem, deadline: Deadline) -> Any:
    with deadline.running(f"{command.doing} {item.path}"):
        return command.function(item)


def _counted(command: Each, first: FirstError, index: int, item: ReadItem) -> Callable[[int], None]:
    """Counts what arrives of a URL, and ends its fetching once an item before it has failed."""

    def arrived(count: int) -> None:
        first.check(index)
        command.intake.add_bytes(item.path, count)

    return arrived


async def run_async(flow: Flow, executor: Executor, settings: Settings, deadline: Deadline) -> Any:
    """Run a flow with nothing heavy on the event loop's thread."""

    async def perform(command: Call | Each) -> Any:
        if isinstance(command, Call):
            return await _submit(executor, _called, command, deadline)
        return await _each_async(command, executor, settings, deadline)

    try:
        command = next(flow)
        while True:
            command = flow.send(await perform(command))
    except StopIteration as stop:
        return stop.value
    except Exception:
        with contextlib.suppress(UsageError):  # an executor that takes no work: this thread closes the flow below
            await _submit(executor, flow.close)
        raise
    finally:
        with contextlib.suppress(ValueError):  # cancelled while the executor closes it
            flow.close()


def _submit(executor: Executor, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


async def _each_async(command: Each, executor: Executor, settings: Settings, deadline: Deadline) -> list[Any]:
    loop, first = asyncio.get_running_loop(), FirstError()
    fetches: dict[int, asyncio.Task[ReadItem]] = {}
    places = asyncio.Semaphore(_MOST_FETCHES)

    async def fetched(index: int, item: ReadItem) -> ReadItem:
        first.check(index)
        counted = _counted(command, first, index, item)
        fetches[index] = loop.create_task(fetch_async(item, settings, counted, deadline))
        try:
            return await fetches[index]
        finally:
            del fetches[index]

    async def worked(index: int, item: ReadItem) -> Any:
        return await _submit(executor, first.attempt, index, partial(_on_item, command, item, deadline))

    async def one(index: int, item: ReadItem) -> Any:
        found = None
        try:
            if is_remote(item.value):
                async with places:
                    found = await worked(index, await fetched(index, item))
            else:
                found = await worked(index, item)
        except asyncio.CancelledError:
            if not first.is_after(index):
                raise  # the whole request is cancelled
        except Exception as error:
            first.record(index, error)
        for place, fetch in fetches.items():
            if first.is_after(place):
                fetch.cancel()
        return found

    # All end before an error is raised, so that it is the first in order, as in `run`.
    found = await asyncio.gather(*(one(*place) for place in enumerate(command.items)), return_exceptions=True)
    first.reraise()
    return _all(found)


def _all(found: list[Any]) -> list[Any]:
    """What was found for every item, or the first error in order."""
    error: BaseException | None = next((entry for entry in found if isinstance(entry, BaseException)), None)
    if error is None:
        return found
    try:
        raise error
    finally:
        del error, found  # an error that holds the frame that holds it would keep every media input alive
