"""One function over several items at the same time: results and errors in order, and no error that keeps its items alive."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

from mm_plugin.errors import MMPluginError, UsageError
from mm_plugin.executors import executor_fault
from mm_plugin.foreign import contain, is_interruption
from mm_plugin.forking import new_lock

_PLACE = re.compile(r"\b(?:images|videos|audios)\[\d+\]")


def run_each(executor: Executor, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What the function returned or raised for every item, in order; on the executor where there are several items.

    The calling thread takes part: it works on the last item that no thread has begun, so this ends even where every thread of
    the executor waits in such a call.

    Raises:
        UsageError: the executor was shut down.
    """
    if len(items) <= 1:
        return [_attempt(function, item) for item in items]
    futures: list[Future[Any]] = []
    found: list[Any] = [None] * len(items)
    mine = set()
    try:
        futures += [executor.submit(function, item) for item in items]
        for index in reversed(range(len(items))):
            if futures[index].cancel():
                mine.add(index)
                found[index] = _attempt(function, items[index])
        for index in range(len(items)):
            if index not in mine:
                try:
                    found[index] = futures[index].result()
                except CancelledError as error:
                    raise executor_fault(error) from error
                except Exception as error:
                    found[index] = error
        return found
    finally:
        while futures:
            futures.pop().cancel()
        # An error that was raised in this thread leads to this frame, which must not lead back: it would keep all media alive.
        del found


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return contain(function, item)
    except Exception as error:
        if is_interruption(error):
            raise
        return error


class FirstError:
    """The first error in order of items that are worked on at the same time. Final; thread-safe.

    What stands after an item that failed can change nothing more, so it need not begin; errors of such items are let go of at
    once, with the media inputs that their tracebacks hold.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._index: int | None = None
        self._error: Exception | None = None

    def check(self, index: int) -> None:
        """Raise where an item before this one has failed; nobody sees that error."""
        if self.is_after(index):
            raise UsageError("an item before this one has failed")

    def attempt(self, index: int, work: Callable[[], Any]) -> Any:
        """What the work on one item returned; None where it failed, or an item before it has."""
        if self.is_after(index):
            return None
        try:
            return contain(work)
        except Exception as error:
            if is_interruption(error):
                raise
            self.record(index, error)
            return None

    def record(self, index: int, error: Exception) -> None:
        """Keep an error, unless that of an item before is known."""
        with self._lock:
            if self._index is None or index < self._index:
                self._index, self._error = index, error

    def reraise(self) -> None:
        """Raise the first error, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads to this frame

    def is_after(self, index: int) -> bool:
        """Whether an item before this one has failed."""
        with self._lock:
            return self._index is not None and index > self._index


def raise_first_error(found: list[Any]) -> None:
    """Raise the first error in order, if there is one; nothing else that was found stays alive with it.

    Args:
        found: what `run_each` returned; emptied where an error is raised, because the error leads to the frame that holds it.
    """
    error = next((entry for entry in found if isinstance(entry, Exception)), None)
    if error is not None:
        found.clear()
        try:
            raise error
        finally:
            del error  # its traceback leads to this frame


def for_request(error: Exception, path: str) -> Exception:
    """The error that another request, or place, got for the same media input, with the path that it has here.

    It is a copy, which leads to no frame of the other request.

    Args:
        error: raised while the other prepared the media input.
        path: where the media input stands in this request.
    """
    copied = copy.copy(error)
    if isinstance(copied, MMPluginError):
        place = _PLACE.search(getattr(copied, "path", None) or copied.message)
        if place is not None:
            copied.message = copied.message.replace(place[0], path)
            copied.args = (copied.message,)
            if getattr(copied, "path", None):
                copied.path = copied.path.replace(place[0], path)  # type: ignore[attr-defined]
    return copied
