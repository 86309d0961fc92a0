"""One function over several items at the same time: results and errors in order, and no error that keeps its items alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor
from typing import Any

from mm_plugin.errors import MediaError


def run_each(executor: Executor, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What the function returned or raised for every item, in order; on the executor where there are several items.

    The calling thread takes part: it works on the last item that no thread has begun, so this ends even where every thread of
    the executor waits in such a call.
    """
    if len(items) <= 1:
        return [_attempt(function, item) for item in items]
    futures = [executor.submit(function, item) for item in items]
    found: list[Any] = [None] * len(items)
    mine = set()
    try:
        for index in reversed(range(len(items))):
            if futures[index].cancel():
                mine.add(index)
                found[index] = _attempt(function, items[index])
        for index in range(len(items)):
            if index not in mine:
                try:
                    found[index] = futures[index].result()
                except CancelledError:
                    raise  # the executor was closed
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
        return function(item)
    except CancelledError:
        raise
    except Exception as error:
        return error


def first_error(found: Sequence[Any]) -> Exception | None:
    """The first error in order."""
    return next((entry for entry in found if isinstance(entry, Exception)), None)


def renamed(error: Exception, path: str) -> Exception:
    """A media error of another request, or place, that was preparing the same media input, with the path that it has here."""
    if not isinstance(error, MediaError) or error.path in (None, path):
        return error
    message = error.message.replace(str(error.path), path, 1)
    copy = MediaError(message, path=path, reason=error.reason)
    copy.__cause__ = error
    return copy
