"""When a request must be done: nothing of it is begun after that, and the error says what was running then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from mm_plugin.errors import DeadlineError
from mm_plugin.forking import new_lock
from mm_plugin.settings import Settings

_MOST_NAMED = 4  # in a message


class _Work(msgspec.Struct, eq=False):
    what: str
    is_stage: bool
    began: float
    ended: float | None = None


class Deadline:
    """The time at which a request must be done, and what it has been doing. Final; thread-safe.

    Args:
        at: seconds of `time.monotonic()`; None for no deadline.

    Example:
        >>> deadline = Deadline(time.monotonic() + 60)
        >>> with deadline.running("measuring images[0]"):
        ...     deadline.remaining() > 59
        True
        >>> with Deadline(0.0).running("measuring images[0]"):
        ...     pass
        Traceback (most recent call last):
        mm_plugin.errors.DeadlineError: request: its deadline had passed before anything was begun; allow more time
    """

    def __init__(self, at: float | None = None) -> None:
        self._at = at
        self._lock = new_lock()
        self._works: list[_Work] = []

    def remaining(self) -> float | None:
        """Seconds until then, below 0 afterwards; None without a deadline."""
        return None if self._at is None else self._at - time.monotonic()

    def check(self) -> None:
        """Refuse to go on after the deadline.

        Raises:
            DeadlineError: it has passed.
        """
        if self._at is not None and time.monotonic() >= self._at:
            raise self._error(self._at)

    @contextlib.contextmanager
    def running(self, what: str, *, is_stage: bool = False) -> Iterator[None]:
        """Note that something runs; what is under way at the deadline may end.

        Args:
            what: for the error, such as "measuring images[0]".
            is_stage: whether it is a stage of the request, which is named only where no part of it was running.

        Raises:
            DeadlineError: the deadline has passed, so that this must not begin.
        """
        self.check()
        if self._at is None:
            yield
            return
        work = _Work(what, is_stage, time.monotonic())
        with self._lock:
            self._works.append(work)
        try:
            yield
        finally:
            work.ended = time.monotonic()

    def for_fetch(self, settings: Settings) -> Settings:
        """The settings, with no more time for a URL than there is."""
        left = self.remaining()
        if left is None or left >= settings.fetch_seconds:
            return settings
        return msgspec.structs.replace(settings, fetch_seconds=max(left, 0.001))

    def _error(self, at: float) -> DeadlineError:
        with self._lock:
            works = [work for work in self._works if work.began < at and (work.ended is None or work.ended >= at)]
        then = [work.what for work in works if not work.is_stage] or [work.what for work in works]
        named = ", ".join(then[:_MOST_NAMED]) + (f" and {len(then) - _MOST_NAMED} more" if then[_MOST_NAMED:] else "")
        found = f"passed while this was running: {named}" if then else "had passed before anything was begun"
        if self._works and not then:
            found = "passed between two steps"
        return DeadlineError(f"request: its deadline {found}; allow more time", path=None, running=tuple(then))
