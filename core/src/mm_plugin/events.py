"""What happened, as structs, and the observers that hear it. Knows nothing of causes; an observer cannot break a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

logger = logging.getLogger("mm_plugin")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all events."""


class ItemKeyed(Event, frozen=True, kw_only=True):
    """A media input got its identity. `cached`: prepared before, so nothing was decoded. `elapsed_ms`: of its item stage."""

    plugin: str
    path: str
    modality: str
    identity: str
    num_tokens: int
    cached: bool
    elapsed_ms: float


class EncodeBatch(Event, frozen=True, kw_only=True):
    """One encoder call over `num_items` items that take `num_tokens` rows. `elapsed_ms`: milliseconds, host side."""

    modality: str
    num_items: int
    num_tokens: int
    elapsed_ms: float


class ItemFailed(Event, frozen=True, kw_only=True):
    """An item could not be embedded; the request at `request` fails, the others go on. `item` is None where it has none."""

    request: int
    item: int | None
    code: str
    error: str


class HashIgnored(Event, frozen=True, kw_only=True):
    """A caller's hash at `path` was not used, because of `why`; the identity was computed."""

    path: str
    why: str


class ItemDropped(Event, frozen=True, kw_only=True):
    """The media input at `path` was left out of a prompt that was too long, because of `why`."""

    path: str
    why: str


class FallbackUsed(Event, frozen=True, kw_only=True):
    """The fallback `plugin` serves the models `asked`, because of `why`."""

    asked: str
    plugin: str
    why: str


class DeviceSync(Event, frozen=True, kw_only=True):
    """Something was read back from the device, for which the host waited."""

    what: str


Observer = Callable[[Event], None]


class Observers:
    """The observers of one registry. Final.

    Args:
        observers: callables that take one event. One that raises is dropped after one log line; the request goes on.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._lock = threading.Lock()
        self._observers: tuple[Observer, ...] = tuple(observers)

    def add(self, observer: Observer) -> None:
        """Hear events from now on."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def emit(self, event: Event) -> None:
        """Tell every observer, in the order in which they were added."""
        for observer in self._observers:
            try:
                observer(event)
            except (Exception, SystemExit):
                with self._lock:
                    left = tuple(other for other in self._observers if other is not observer)
                    dropped, self._observers = len(left) < len(self._observers), left
                if dropped:
                    logger.warning(
                        "observer %r failed on %s and is dropped", observer, type(event).__name__, exc_info=True
                    )
