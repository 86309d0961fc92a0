"""A request's deadline: nothing is begun after it, and the error says what was running."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import toy
from test_request_limits import BOTH, FakeHosts, processed
from toy import Toy, toy_spec

from mm_plugin.errors import DeadlineError, MediaError, RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media import ImageSource
from mm_plugin.processor import PreparesBatches, ProcessesJointly, Processor
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.parallel import FirstError

STEP = 0.25  # seconds that the slow stage takes for one image
THREADS = 4  # of the executor of the tests


class Slow(Toy):
    """Every image takes its time in one stage; when each began is kept."""

    stage = "prepare"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.began: list[float] = []

    def _wait(self, stage: str) -> None:
        if stage == self.stage:
            self.began.append(time.monotonic())
            time.sleep(STEP)

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> dict[str, Any]:
        self._wait("layout")
        return super().layout(modality, size, options, context)

    def prepare(self, decoded: Any, layout: Mapping[str, Any], options: Any) -> Any:
        self._wait("prepare")
        return super().prepare(decoded, layout, options)


class SlowLayout(Slow):
    stage = "layout"


class SlowContext(Slow):
    stage = "context"

    def context(self, counts: Mapping[Modality, int]) -> Any:
        self._wait("context")
        return super().context(counts)


class SlowBatches(PreparesBatches, Slow):
    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> Sequence[Any]:
        self._wait("prepare")
        return [Toy.prepare(self, one, layout, options) for one, layout in zip(decoded, layouts, strict=True)]


@pytest.fixture
def open_slow(open_words: Callable[..., Any]) -> Callable[..., Processor]:
    return lambda cls=Slow, **named: open_words(cls, toy_spec(), ("<image>",), **named)


def images(count: int) -> list[bytes]:
    return [toy.png(seed, 4, 5) for seed in range(count)]


@BOTH
@pytest.mark.parametrize(
    ("cls", "doing"),
    [(Slow, "preparing images["), (SlowLayout, "measuring images[")],
    ids=["prepare", "layout"],
)
def test_nothing_is_begun_after_it_and_the_error_says_what_was_running(
    open_slow: Callable[..., Any], how: str, cls: Any, doing: str
) -> None:
    processor = open_slow(cls)
    count = 4 * THREADS
    at = time.monotonic() + 1.5 * STEP
    with pytest.raises(DeadlineError) as caught:
        processed(processor, how, "<image>" * count, images(count), deadline=at)
    assert time.monotonic() < at + 4 * STEP
    began = processor.model.began
    assert 0 < len(began) < count
    assert max(began) < at + STEP / 3  # the third round would begin half a step after it
    assert caught.value.code == "deadline"
    assert caught.value.running
    assert all(what.startswith(doing) for what in caught.value.running)
    assert caught.value.running[0] in str(caught.value)
    # What was prepared in time is kept, and the next request is served.
    assert len(processed(processor, how, "<image>" * count, images(count)).mm_items) == count
    assert processor._runtime.preprocess_cache.store.stats().pinned == 0


@BOTH
def test_a_deadline_that_passed_before_begins_nothing(
    open_slow: Callable[..., Any], how: str, decodes: list[str]
) -> None:
    processor = open_slow()
    for at in (time.monotonic(), 0, -1.5):
        with pytest.raises(DeadlineError, match="before anything was begun") as caught:
            processed(processor, how, "<image>", images(1), deadline=at)
        assert caught.value.running == ()
    assert not decodes
    assert not processor.model.began


@BOTH
def test_one_that_is_far_away_changes_nothing(open_slow: Callable[..., Any], how: str) -> None:
    processor = open_slow()
    plain = processed(processor, how, "<image>" * 2, images(2))
    found = processed(processor, how, "<image>" * 2, images(2), deadline=time.monotonic() + 60)
    assert found.input_ids.tolist() == plain.input_ids.tolist()
    assert [item.identity for item in found.mm_items] == [item.identity for item in plain.mm_items]


@BOTH
def test_what_ends_late_is_returned(open_slow: Callable[..., Any], how: str) -> None:
    """The last step had begun in time, so its result is there."""

    class LastStep(Slow):
        def prepare(self, decoded: Any, layout: Mapping[str, Any], options: Any) -> Any:
            return Toy.prepare(self, decoded, layout, options)

    processor = open_slow(LastStep)
    plain = processor._opened.report

    def slow(*arguments: Any, **named: Any) -> None:
        time.sleep(max(0.0, at - time.monotonic()) + 0.02)
        plain(*arguments, **named)

    processor._opened.report = slow
    at = time.monotonic() + 1
    assert processed(processor, how, "<image>", images(1), deadline=at).mm_items
    assert time.monotonic() > at


@BOTH
def test_the_prompt_is_a_step_too(open_slow: Callable[..., Any], how: str) -> None:
    with pytest.raises(DeadlineError) as caught:
        processed(open_slow(SlowContext), how, "<image>", images(1), deadline=time.monotonic() + STEP / 2)
    assert caught.value.running == ("reading the prompt",)


@BOTH
def test_batches_end_where_they_are(open_slow: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ImageSource.decode

    def decode(self: ImageSource, *size: Any, **arguments: Any) -> Any:
        time.sleep(STEP)
        return plain(self, *size, **arguments)

    monkeypatch.setattr(ImageSource, "decode", decode)
    processor = open_slow(SlowBatches)
    with pytest.raises(DeadlineError) as caught:
        processed(processor, how, "<image>" * 3, images(3), deadline=time.monotonic() + STEP / 2)
    assert not processor.model.began
    assert sorted(caught.value.running) == [f"decoding images[{index}]" for index in range(3)]


def test_one_media_input_by_itself(open_slow: Callable[..., Any]) -> None:
    processor = open_slow(SlowLayout)
    with pytest.raises(DeadlineError) as caught:
        processor.prepare_item("image", images(1)[0], deadline=time.monotonic() + STEP / 2)
    assert caught.value.running == ("measuring images[0]",)
    with pytest.raises(DeadlineError):
        processor.prepare_item("image", images(1)[0], deadline=0.0)


@BOTH
def test_a_fetch_ends_at_the_deadline(open_slow: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = FakeHosts(monkeypatch)
    hosts.bodies = {"http://h/0": toy.png(0, 4, 5), "http://h/1": toy.png(1, 60, 60)}
    hosts.piece, hosts.wait = 100, 0.05
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        processed(open_slow(), how, "<image>" * 2, list(hosts.bodies), deadline=began + 0.3)
    assert time.monotonic() - began < 0.3 + 0.4
    assert "fetching images[1]" in (caught.value.running or ())
    assert all(settings.fetch_seconds <= 0.3 for settings in hosts.settings)
    hosts.wait = 0.0
    assert processed(open_slow(), how, "<image>" * 2, list(hosts.bodies), deadline=time.monotonic() + 60).mm_items
    assert hosts.settings[-1].fetch_seconds == 10.0


def test_a_fault_before_the_deadline_x(open_slow: Callable[..., Any]) -> None:
    with pytest.raises(MediaError, match=r"images\[0\]"):
        open_slow().process("<image>" * 2, [b"junk", images(1)[0]], deadline=time.monotonic() + 60)


def test_one_request_s_deadline_is_not_another_s(
    open_slow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for an image that another prepares gets it, whatever becomes of the other."""
    plain, entered = ImageSource.decode, threading.Event()

    def decode(self: ImageSource, *size: Any, **arguments: Any) -> Any:
        entered.set()
        time.sleep(max(0.0, at - time.monotonic()) + 0.05)
        return plain(self, *size, **arguments)

    monkeypatch.setattr(ImageSource, "decode", decode)
    processor, data, at = open_slow(), images(1), time.monotonic() + 1
    with ThreadPoolExecutor(2) as threads:
        hasty = threads.submit(processor.process, "<image>", data, deadline=at)
        assert entered.wait(5)
        patient = threads.submit(processor.process, "<image>", data)
        assert len(patient.result(10).mm_items) == 1
        assert isinstance(hasty.exception(10), DeadlineError)
    stats = processor.cache_stats
    assert stats.pinned == 0


class SlowTogether(ProcessesJointly, Slow):
    def is_joint(self) -> bool:
        return True

    def prepare_jointly(self, text: str, media: Any, options: Any, *, rendered: bool) -> Any:
        raise AssertionError("begun after the deadline")


@BOTH
def test_a_request_that_is_prepared_together(
    open_slow: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ImageSource.decode

    def decode(self: ImageSource, *size: Any, **arguments: Any) -> Any:
        time.sleep(STEP)
        return plain(self, *size, **arguments)

    monkeypatch.setattr(ImageSource, "decode", decode)
    with pytest.raises(DeadlineError) as caught:
        processed(open_slow(SlowTogether), how, "<image>" * 2, images(2), deadline=time.monotonic() + STEP / 2)
    assert sorted(caught.value.running) == ["decoding images[0]", "decoding images[1]"]


class Recording:
    """A preparer of the server's own, which knows no deadline."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.calls = processor, 0

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        self.calls += 1
        return list(self.processor.prepare_tasks(tasks))


@BOTH
def test_a_preparer_of_the_server_s_own_is_called_in_time_or_not_at_all(
    open_slow: Callable[..., Any], how: str
) -> None:
    processor = open_slow(SlowLayout)
    processor._preparer = preparer = Recording(processor)
    with pytest.raises(DeadlineError):
        processed(processor, how, "<image>", images(1), deadline=time.monotonic() + STEP / 2)
    assert preparer.calls == 0
    assert processed(processor, how, "<image>", images(1), deadline=time.monotonic() + 60).mm_items
    assert preparer.calls == 1


@BOTH
@pytest.mark.parametrize("wrong", ["soon", float("nan"), float("inf"), True, b"1", [1.0]], ids=repr)
def test_what_is_no_time_is_refused(open_slow: Callable[..., Any], how: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match="deadline") as caught:
        processed(open_slow(), how, "<image>", images(1), deadline=wrong)
    assert caught.value.argument == "deadline"


def test_a_cancelled_request_is_cancelled_and_not_late(open_slow: Callable[..., Any]) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(open_slow().process_async("<image>" * 8, images(8), deadline=time.monotonic() + 60))
        await asyncio.sleep(STEP / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_the_error_names_what_ran_at_the_deadline_alone() -> None:
    deadline = Deadline(time.monotonic() + 0.05)
    with deadline.running("early"):
        pass
    with deadline.running("late"):
        time.sleep(0.07)
    with pytest.raises(DeadlineError) as caught, deadline.running("never"):
        pytest.fail("begun")
    assert caught.value.running == ("late",)
    assert (deadline.remaining() or 0) < 0
    assert issubclass(DeadlineError, RequestError)
    many = Deadline(time.monotonic() + 0.05)
    threads = [threading.Thread(target=_run, args=(many, f"images[{index}]")) for index in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(DeadlineError, match="and 3 more") as caught:
        many.check()
    assert len(caught.value.running or ()) == 7


def _run(deadline: Deadline, what: str) -> None:
    with deadline.running(what):
        time.sleep(0.1)


def test_between_two_steps_nothing_is_named() -> None:
    deadline = Deadline(time.monotonic() + 0.03)
    with deadline.running("early"):
        pass
    time.sleep(0.05)
    with pytest.raises(DeadlineError, match="between two steps") as caught:
        deadline.check()
    assert caught.value.running == ()


def test_the_first_error_in_order() -> None:
    first = FirstError()
    assert first.attempt(2, lambda: 5) == 5
    assert first.attempt(3, lambda: int("x")) is None
    assert first.attempt(4, lambda: pytest.fail("begun")) is None
    assert first.attempt(1, lambda: np.zeros(2) + np.zeros(3)) is None
    assert first.attempt(2, lambda: pytest.fail("begun")) is None
    assert first.attempt(0, lambda: 7) == 7
    with pytest.raises(ValueError, match="shapes"):
        first.reraise()
    first.reraise()
