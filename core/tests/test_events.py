"""Observers: which events they receive, in which order, and that none of them can break a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mm_plugin import events
from mm_plugin.events import (
    BatchRefused,
    DeviceSync,
    EncodeBatch,
    Event,
    FallbackUsed,
    HashIgnored,
    ItemDropped,
    ItemFailed,
    ItemKeyed,
    MediaNote,
    Observers,
    RequestFailed,
    RequestProcessed,
)

FALLBACK = FallbackUsed(asked="A", plugin="b", why="c")
EVENTS = [
    FALLBACK,
    EncodeBatch(modality="image", num_items=2, num_tokens=8, elapsed_ms=1.5),
    BatchRefused(plugin="p", call="image", num_items=2, error="e"),
    ItemFailed(request=0, item=1, code="encoder", error="it failed"),
    ItemKeyed(
        plugin="p", path="images[0]", modality="image", identity="ab", num_tokens=4, cached=False, elapsed_ms=0.5
    ),
    DeviceSync(what="rows per frame"),
    RequestProcessed(plugin="p", num_prompt_tokens=9, num_items=1, elapsed_ms=0.5),
    RequestFailed(plugin="p", code="media", path="images[0]", error="no", elapsed_ms=0.5),
    HashIgnored(path="mm_hashes", why="c"),
    ItemDropped(path="images[0]", why="c"),
    MediaNote(path="images[0]", modality="image", note="n"),
]


def test_every_observer_receives_every_event_in_the_order_of_adding() -> None:
    received: list[tuple[str, Event]] = []
    observers = Observers([lambda event: received.append(("first", event))])
    observers.add(lambda event: received.append(("second", event)))
    for event in EVENTS:
        observers.emit(event)
    assert received == [(name, event) for event in EVENTS for name in ("first", "second")]


def test_one_added_later_receives_only_what_comes_after() -> None:
    received: list[Event] = []
    observers = Observers()
    observers.emit(EVENTS[0])
    observers.add(received.append)
    observers.emit(EVENTS[1])
    assert received == [EVENTS[1]]


@pytest.mark.parametrize(
    "raised", [ValueError("x"), SystemExit(3), MemoryError()], ids=lambda error: type(error).__name__
)
def test_one_that_raises_is_removed_after_one_line_and_the_others_go_on(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def broken(event: Event) -> None:
        calls.append("broken")
        raise raised

    observers = Observers([lambda event: calls.append("before"), broken, lambda event: calls.append("after")])
    with caplog.at_level(logging.DEBUG, "mm_plugin"):
        observers.emit(FALLBACK)
        observers.emit(FALLBACK)
    assert calls == ["before", "broken", "after", "before", "after"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "broken" in caplog.text
    assert "Fallback" in caplog.text
    assert f"raise raised\n{type(raised).__name__}" in caplog.text


def test_one_that_raises_in_two_threads_at_once_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    barrier = threading.Barrier(2, timeout=10)

    def broken(event: Event) -> None:
        barrier.wait()
        raise ValueError("x")

    observers = Observers([broken])
    threads = [threading.Thread(target=observers.emit, args=(FALLBACK,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_keyboard_interrupt_passes_through() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([interrupted]).emit(FALLBACK)


def test_one_may_add_another_while_it_is_called() -> None:
    received: list[Event] = []
    observers = Observers()
    observers.add(lambda event: observers.add(received.append) if not received else None)
    observers.emit(EVENTS[0])
    observers.emit(EVENTS[1])
    assert received == [EVENTS[1]]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_says_its_kind_when_it_is_encoded(event: Event) -> None:
    written = msgspec.json.decode(msgspec.json.encode(event))
    assert written["type"] == type(event).__name__
    assert msgspec.json.decode(msgspec.json.encode(event), type=type(event)) == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_cannot_be_changed(event: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(event, event.__struct_fields__[0], "other")


def test_every_kind_of_event_is_tested_here() -> None:
    kinds: Callable[[Any], bool] = lambda value: isinstance(value, type) and issubclass(value, Event)  # noqa: E731
    assert {value for value in vars(events).values() if kinds(value)} == {Event, *map(type, EVENTS)}
