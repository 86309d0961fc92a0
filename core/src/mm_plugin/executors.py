"""`GuardedExecutor`: an executor of the server, whose faults are reported as the server's and whose threads nothing ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from mm_plugin.errors import UsageError
from mm_plugin.foreign import class_name, contain, is_interruption, words


class GuardedExecutor(Executor):
    """An executor that takes work or says why not. Final; thread-safe.

    What work raises that is not an `Exception` comes as a `BareExceptionError`: a pool hands any exception on, and an event loop
    that meets a `SystemExit` ends.

    Args:
        inner: runs the work in threads of this process.

    Attributes:
        inner: as given.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> executor = GuardedExecutor(ThreadPoolExecutor(1))
        >>> executor.submit(sum, [1, 2]).result()
        3
        >>> executor.inner.shutdown()
        >>> executor.submit(sum, [1, 2])
        Traceback (most recent call last):
        mm_plugin.errors.UsageError: executor: expected one that takes work, got RuntimeError: cannot schedule new futures after ...
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._process = os.getpid()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """See `Executor.submit`.

        Raises:
            UsageError: the executor was shut down, lost its threads in a fork, or fails.
        """
        if os.getpid() != self._process and _lost_threads(self.inner):
            raise UsageError(
                "executor: expected one of this process, got one whose threads stayed in the parent of a fork; make the registry, "
                "or the executor that it is lent, after the fork",
                argument="executor",
            )
        try:
            future = self.inner.submit(contain, function, *arguments, **named)
        except BaseException as error:
            if is_interruption(error):
                raise
            raise executor_fault(error) from error
        if not isinstance(future, Future):
            raise executor_fault(TypeError(f"submit returned a {class_name(future)}, not a concurrent.futures.Future"))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        self.inner.shutdown(wait=wait, cancel_futures=cancel_futures)


def _lost_threads(executor: Executor) -> bool:
    """Whether threads of a pool have ended although it was not shut down; it waits for them, and starts no others."""
    threads = getattr(executor, "_threads", ()) if isinstance(executor, ThreadPoolExecutor) else ()
    return any(not thread.is_alive() for thread in threads)


def executor_fault(error: BaseException) -> UsageError:
    """The server's error for an executor that takes no work, or dropped what it had taken."""
    return UsageError(
        f"executor: expected one that takes work, got {words(error)}; keep it open until the registry is closed",
        argument="executor",
    )
