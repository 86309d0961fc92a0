"""A lent executor that was shut down, before or during a request, is the server's fault and never an unasked cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image
from toy import PlainToy, png, toy_spec

from mm_plugin import DecodedMedia, MediaError, Modality, ModelProcessor, Processor, UsageError
from mm_plugin.cache import MemoryStore
from mm_plugin.runtime import Runtime
from mm_plugin.settings import Settings

Open = Callable[..., Processor]
WAIT = 10


@pytest.fixture
def open_lent(open_words: Open) -> Iterator[Callable[..., tuple[Processor, ThreadPoolExecutor]]]:
    pools: list[ThreadPoolExecutor] = []

    def make(cls: type[ModelProcessor], threads: int = 2, **lent: Any) -> tuple[Processor, ThreadPoolExecutor]:
        pools.append(ThreadPoolExecutor(threads))
        runtime = Runtime(Settings(), executor=pools[-1], **lent)
        return open_words(cls, toy_spec(Modality.IMAGE), runtime=runtime), pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()


def ask(processor: Processor, count: int, asynchronous: bool) -> Any:
    prompt, media = " ".join(["<image>"] * count), [png(index) for index in range(count)]
    if asynchronous:
        return asyncio.run(processor.process_async(prompt, media))
    return processor.process(prompt, media)


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize(("asynchronous", "count"), [(False, 2), (True, 0), (True, 1), (True, 2)])
def test_an_executor_that_was_shut_down_before_is_named(
    open_lent: Callable[..., Any], asynchronous: bool, count: int, cancel: bool
) -> None:
    processor, pool = open_lent(PlainToy)
    pool.shutdown(cancel_futures=cancel)
    with pytest.raises(UsageError, match=r"^executor: expected one that takes work, got ") as caught:
        ask(processor, count, asynchronous)
    assert caught.value.argument == "executor"
    assert processor.cache_stats.pinned == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("cancel", [False, True])
def test_an_executor_that_is_shut_down_during_a_request_ends_it(
    open_lent: Callable[..., Any], cancel: bool, asynchronous: bool
) -> None:
    """It ends with the server's error, or with its output where the calling thread could do the rest."""

    class Ends(PlainToy):
        def layout(self, *arguments: Any) -> dict[str, Any]:
            pool.shutdown(wait=False, cancel_futures=cancel)
            return super().layout(*arguments)

    processor, pool = open_lent(Ends, threads=1)
    found: list[str | None] = []
    try:
        ask(processor, 4, asynchronous)
    except UsageError as error:
        found = [error.argument]
    assert found in ([], ["executor"])
    assert processor.cache_stats.pinned == 0


def test_a_task_group_learns_of_it_and_does_not_take_it_for_a_cancellation(open_lent: Callable[..., Any]) -> None:
    processor, pool = open_lent(PlainToy)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(processor.process_async("<image>", [png()]))

    pool.shutdown()
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    (error,) = caught.value.exceptions
    assert isinstance(error, UsageError)


def test_a_task_that_is_cancelled_is_cancelled(open_lent: Callable[..., Any]) -> None:
    begun, release = threading.Event(), threading.Event()

    class Waits(PlainToy):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            begun.set()
            assert release.wait(WAIT)
            return super().prepare(decoded, layout, options)

    processor, _ = open_lent(Waits)

    async def main() -> None:
        task = asyncio.create_task(processor.process_async("<image>", [png()]))
        await asyncio.to_thread(begun.wait, WAIT)
        task.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            release.set()

    asyncio.run(main())


class Watched(MemoryStore):
    """Notes the threads that call it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.threads: set[int] = set()

    def pin(self, key: bytes) -> bool:
        self.threads.add(threading.get_ident())
        return super().pin(key)

    def unpin(self, key: bytes) -> None:
        self.threads.add(threading.get_ident())
        super().unpin(key)

    def get(self, key: bytes) -> Any:
        self.threads.add(threading.get_ident())
        return super().get(key)


@pytest.mark.parametrize("broken", [False, True])
def test_a_store_is_called_on_the_executor_alone(open_lent: Callable[..., Any], broken: bool) -> None:
    """A store may be a server somewhere: the event loop must not wait for it, after an error neither."""
    store = Watched()
    processor, _ = open_lent(PlainToy, preprocess_store=store)

    async def main() -> None:
        media: list[Any] = [png(), b"nothing" if broken else png(1)]
        for _ in range(2):
            try:
                await processor.process_async("<image> <image>", media)
            except MediaError:
                assert broken

    asyncio.run(main())
    assert store.threads
    assert threading.get_ident() not in store.threads
    assert store.stats().pinned == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("second", [b"nothing", "late"], ids=["cannot be opened", "cannot be prepared"])
def test_an_error_keeps_no_media_alive_until_the_collector_runs(
    open_lent: Callable[..., Any], asynchronous: bool, second: Any
) -> None:
    class Fails(PlainToy):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            if decoded.pixels.shape[0] == 5:
                raise ValueError("five")
            return super().prepare(decoded, layout, options)

    processor, pool = open_lent(Fails)
    last = Image.fromarray(np.zeros((5, 4, 3), np.uint8)) if second == "late" else second
    alive: list[Any] = []

    def media() -> list[Any]:
        image = Image.fromarray(np.zeros((3, 4, 3), np.uint8))
        alive.append(weakref.ref(image))
        return [image, last]

    async def main() -> None:
        failed = False
        try:
            if asynchronous:
                await processor.process_async("<image> <image>", media())
            else:
                processor.process("<image> <image>", media())
        except Exception:
            failed = True
        assert failed
        pool.shutdown()  # its threads have let go of what they ran
        assert alive[0]() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
