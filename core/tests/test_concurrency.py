"""Many clients at once: every answer is the one that a lone client gets, and no entry stays pinned when they have left."""

from __future__ import annotations

import asyncio
import functools
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image
from toy import Toy, toy_spec

from mm_plugin.errors import MMPluginError, ProcessorError
from mm_plugin.events import Event, ItemKeyed
from mm_plugin.inputs import MultimodalProcessorOutput
from mm_plugin.media import DecodedMedia
from mm_plugin.processor import ModelProcessor, flow


class Processor(Toy):
    """Two rows for each image where there are more than two."""

    crowded = 2


SPEC = toy_spec(name="busy")
Open = Callable[..., ModelProcessor]


@pytest.fixture
def open_busy(open_words: Open) -> Open:
    def make(cls: type[ModelProcessor] = Processor, cache_bytes: int = 1 << 24) -> ModelProcessor:
        return open_words(cls, SPEC, preprocess_cache_bytes=cache_bytes)

    return make


@functools.cache
def maze(index: int) -> bytes:
    """Images of one size that differ in a single level."""
    pixels = np.random.default_rng(5).integers(0, 200, (8, 8, 3), dtype=np.uint8)
    pixels[index % 8, index // 8, 1] ^= 1
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def assert_same(left: MultimodalProcessorOutput, right: MultimodalProcessorOutput) -> None:
    for name in ("input_ids", "padded_input_ids", "token_modalities"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert [item.identity for item in left.mm_items] == [item.identity for item in right.mm_items]
    assert [item.offsets for item in left.mm_items] == [item.offsets for item in right.mm_items]
    for one, other in zip(left.mm_items, right.mm_items, strict=True):
        assert np.array_equal(one.feature, other.feature)


Plan = tuple[list[int], dict[str, Any]]


def plans(count: int) -> list[Plan]:
    """Requests of one to four of twelve similar images, some with another option or another tenant."""
    random = np.random.default_rng(11)
    return [
        (
            random.integers(0, 12, int(random.integers(1, 5))).tolist(),
            [{}, {"tone": 1}, {"salt": "tenant"}, {"max_prompt_tokens": 8, "on_overflow": "drop_oldest"}][
                int(random.integers(0, 4))
            ],
        )
        for _ in range(count)
    ]


def prompt(plan: Plan) -> str:
    return "word " + "<image> " * len(plan[0])


PLANS = plans(192)
CACHES = {"off": 0, "tiny": 1500, "on": 1 << 24}


@pytest.fixture
def expected(open_busy: Open) -> list[MultimodalProcessorOutput]:
    """What a lone client gets without a cache."""
    alone = open_busy(cache_bytes=0)
    return [alone.process(prompt(plan), [maze(index) for index in plan[0]], **plan[1]) for plan in PLANS]


def test_the_images_and_answers_are_different_enough_to_be_mixed_up(
    expected: list[MultimodalProcessorOutput],
) -> None:
    assert len({maze(index) for index in range(12)}) == 12
    assert len({item.identity for output in expected for item in output.mm_items}) > 36
    assert len({output.padded_input_ids.tobytes() for output in expected}) > 96


@pytest.mark.case("3.11")
@pytest.mark.parametrize("cache", CACHES)
def test_32_threads_get_token_for_token_what_one_gets(
    open_busy: Open, expected: list[MultimodalProcessorOutput], cache: str
) -> None:
    processor = open_busy(cache_bytes=CACHES[cache])
    meeting = threading.Barrier(32)

    def client(number: int) -> list[tuple[int, MultimodalProcessorOutput]]:
        meeting.wait(20)
        mine = range(number, len(PLANS), 32)
        return [
            (at, processor.process(prompt(PLANS[at]), [maze(index) for index in PLANS[at][0]], **PLANS[at][1]))
            for at in mine
        ]

    with ThreadPoolExecutor(32) as pool:
        answers = dict(answer for part in pool.map(client, range(32)) for answer in part)
    assert sorted(answers) == list(range(len(PLANS)))
    for at, output in answers.items():
        assert_same(output, expected[at])
        assert output.dropped == expected[at].dropped
    judge_stats(processor, cache)


@pytest.mark.case("3.11")
@pytest.mark.parametrize("cache", CACHES)
def test_32_clients_on_an_event_loop_get_token_for_token_what_one_gets(
    open_busy: Open, expected: list[MultimodalProcessorOutput], cache: str
) -> None:
    processor = open_busy(cache_bytes=CACHES[cache])

    async def client(number: int) -> None:
        for at in range(number, len(PLANS), 32):
            media = [maze(index) for index in PLANS[at][0]]
            output = await processor.process_async(prompt(PLANS[at]), media, **PLANS[at][1])
            assert_same(output, expected[at])

    async def run() -> None:
        await asyncio.gather(*(client(number) for number in range(32)))

    asyncio.run(run())
    judge_stats(processor, cache)


@pytest.mark.case("3.11")
def test_threads_and_an_event_loop_together_get_what_one_gets(
    open_busy: Open, expected: list[MultimodalProcessorOutput], events: list[Event]
) -> None:
    processor = open_busy()
    events.clear()
    some = range(64)

    async def clients() -> list[MultimodalProcessorOutput]:
        return await asyncio.gather(
            *(
                processor.process_async(prompt(PLANS[at]), [maze(index) for index in PLANS[at][0]], **PLANS[at][1])
                for at in some
            )
        )

    with ThreadPoolExecutor(16) as pool:
        threads = [
            pool.submit(processor.process, prompt(PLANS[at]), [maze(index) for index in PLANS[at][0]], **PLANS[at][1])
            for at in some
        ]
        looped = asyncio.run(clients())
        for at, output, future in zip(some, looped, threads, strict=True):
            assert_same(output, expected[at])
            assert_same(future.result(30), expected[at])
    judge_stats(processor, "on")
    keyed = [event for event in events if isinstance(event, ItemKeyed)]
    assert len(keyed) == 2 * sum(len(expected[at].mm_items) for at in some)


def judge_stats(processor: ModelProcessor, cache: str) -> None:
    stats = processor.cache_stats
    assert stats.pinned == 0
    assert stats.bytes <= CACHES[cache]
    if cache == "on":
        # Each was computed once: 12 images, alone or in company, by option and tenant.
        assert stats.misses == stats.entries <= 12 * 2 * 3
        assert stats.hits + stats.joins > stats.misses
    if cache == "off":
        assert stats.entries == 0
    if cache == "tiny":
        assert stats.evictions + stats.rejected > 0


# ------------------------------------------------------------------ pins


class Held(Processor):
    """Waits in `prepare` until its gate is open."""

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
        (gate,) = GATES
        gate.begun.release()
        assert gate.release.wait(20)
        if gate.error is not None and gate.fails(decoded.pixels):
            raise gate.error
        return super().prepare(decoded, layout, options)


class Gate:
    """Where `Held` waits, and whether it fails then."""

    def __init__(self, error: Exception | None = None, fails: Callable[[np.ndarray], bool] = lambda _: True) -> None:
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        self.error, self.fails = error, fails


GATES: list[Gate] = []


@pytest.fixture
def gate() -> Iterator[Gate]:
    GATES.append(Gate())
    yield GATES[0]
    GATES.pop().release.set()


def settle(processor: ModelProcessor, computed: int) -> None:
    """Wait until as many entries have been computed and kept, and the steps that did it have ended."""
    waiting = threading.Event()
    for _ in range(2000):
        if processor.cache_stats.entries >= computed:
            break
        waiting.wait(0.005)
    waiting.wait(0.1)  # what follows the computation: the pin that must not be


def test_a_request_keeps_what_it_found_until_it_ends(open_busy: Open, gate: Gate) -> None:
    gate.release.set()
    processor = open_busy(Held, cache_bytes=600)  # an image takes 8 x 8 x 3 x 2 bytes and its replacement 8 x 8
    processor.process("<image>", [maze(0)])
    assert (processor.cache_stats.entries, processor.cache_stats.pinned) == (1, 0)
    gate.release.clear()
    gate.begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(processor.process, "<image> <image>", [maze(0), maze(1)])
        assert gate.begun.acquire(timeout=10)
        assert processor.cache_stats.pinned == 1
        assert not processor._runtime.preprocess_store.put(b"intruder", 1, 400)  # it would have to go for this
        gate.release.set()
        assert len(future.result(10).mm_items) == 2
    stats = processor.cache_stats
    assert (stats.pinned, stats.evictions) == (0, 0)
    assert processor._runtime.preprocess_store.put(b"intruder", 1, 400)


def test_what_a_request_computed_is_pinned_until_it_ends(open_busy: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    processor = open_busy()
    original = flow.finish

    def finish(model: Any, request: Any) -> Any:
        seen.append(processor.cache_stats.pinned)
        return original(model, request)

    monkeypatch.setattr(flow, "finish", finish)
    for _ in range(2):
        processor.process("<image> <image>", [maze(0), maze(1)])
        asyncio.run(processor.process_async("<image> <image>", [maze(0), maze(0)]))
    assert seen == [2, 1, 2, 1]
    assert processor.cache_stats.pinned == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_an_error_leaves_no_pin_after(open_busy: Open, gate: Gate, asynchronous: bool, last: bool) -> None:
    broken = np.asarray(Image.open(io.BytesIO(maze(3))))
    gate.error, gate.fails = ValueError("broken"), lambda pixels: bool(np.array_equal(pixels, broken))
    gate.release.set()
    processor = open_busy(Held)
    processor.process("<image>", [maze(0)])
    media = [maze(0), maze(3)] if last else [maze(3), maze(0)]
    ask = (
        (lambda: asyncio.run(processor.process_async("<image> <image>", media)))
        if asynchronous
        else (lambda: processor.process("<image> <image>", media))
    )
    with pytest.raises(ProcessorError, match="broken"):
        ask()
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_item_beside_one_that_fails_is_finished_kept_and_not_pinned(open_busy: Open, asynchronous: bool) -> None:
    release, begun = threading.Event(), threading.Event()

    class Uneven(Processor):
        """Fails on the first of its images while the second is still being prepared."""

        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            if decoded.pixels.shape[0] == 3:
                assert begun.wait(10)
                threading.Timer(0.1, release.set).start()
                raise ValueError("broken")
            begun.set()
            assert release.wait(10)
            return super().prepare(decoded, layout, options)

    processor = open_busy(Uneven)
    media = [np.zeros((3, 3, 3), np.uint8), np.zeros((4, 4, 3), np.uint8)]
    process = (lambda *given: asyncio.run(processor.process_async(*given))) if asynchronous else processor.process
    with pytest.raises(ProcessorError, match="broken"):
        process("<image> <image>", media)
    assert (processor.cache_stats.entries, processor.cache_stats.pinned) == (1, 0)


def test_cancelling_a_request_leaves_no_pin_after(open_busy: Open, gate: Gate) -> None:
    processor = open_busy(Held)
    gate.release.set()
    processor.process("<image>", [maze(0)])
    gate.release.clear()
    gate.begun = threading.Semaphore(0)

    async def run() -> None:
        task = asyncio.ensure_future(processor.process_async("<image> <image>", [maze(0), maze(1)]))
        while not gate.begun.acquire(blocking=False):
            await asyncio.sleep(0.005)
        assert processor.cache_stats.pinned == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert processor.cache_stats.pinned == 0
        gate.release.set()

    asyncio.run(run())
    settle(processor, 2)
    assert (processor.cache_stats.entries, processor.cache_stats.pinned) == (2, 0)


# ------------------------------------------------------------------ one computation


def test_requests_in_threads_and_on_the_loop_prepare_one_image_once_and_one_may_leave(
    open_busy: Open, gate: Gate, events: list[Event]
) -> None:
    processor = open_busy(Held)

    async def run() -> list[Any]:
        tasks = [asyncio.ensure_future(processor.process_async("<image>", [maze(0)])) for _ in range(2)]
        while processor.cache_stats.joins < 5:
            await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.sleep(0)
        gate.release.set()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(processor.process, "<image>", [maze(0)]) for _ in range(4)]
        assert gate.begun.acquire(timeout=10)
        left, stayed = asyncio.run(run())
        outputs = [stayed, *(future.result(20) for future in threads)]
    assert isinstance(left, asyncio.CancelledError)
    assert not gate.begun.acquire(blocking=False)  # nobody else came to prepare it
    for output in outputs:
        assert_same(output, outputs[0])
        assert output.mm_items[0].feature is outputs[0].mm_items[0].feature
    stats = processor.cache_stats
    assert (stats.misses, stats.joins, stats.pinned) == (1, 5, 0)


def test_a_failure_is_reported_to_all_who_wait_and_the_next_request_tries_again(open_busy: Open, gate: Gate) -> None:
    processor = open_busy(Held)
    gate.error = ValueError("broken")

    def ask() -> str:
        try:
            processor.process("<image>", [maze(0)])
        except MMPluginError as error:
            return error.code
        return "none"

    waiting = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask) for _ in range(4)]
        for _ in range(2000):
            if processor.cache_stats.joins == 3:
                break
            waiting.wait(0.005)
        gate.release.set()
        assert [future.result(10) for future in futures] == ["processor"] * 4
    gate.error = None
    assert len(processor.process("<image>", [maze(0)]).mm_items) == 1
    stats = processor.cache_stats
    assert (stats.misses, stats.joins, stats.entries, stats.pinned) == (2, 3, 1, 0)
