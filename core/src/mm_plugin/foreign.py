"""Code that is not the core's: what may be caught of it, and its exceptions in words. Knows no plugin and no error of ours.

Around every call into foreign code stands the same frame:

    try:
        return function()
    except BaseException as error:
        if is_interruption(error):
            raise
        raise Fault(f"it failed: {words(error)}") from error

`BaseException`, because extensions written in Rust raise bare ones when they panic, and plugins call `sys.exit`. What a signal
handler raised, and what cancels a task, only passes through foreign code, and goes on to whoever meant it.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar

Returned = TypeVar("Returned")

_LONGEST = 2_000  # characters of a message
_LONGEST_VALUE = 80  # characters of a value
_MOST_OF_HANDLER = 5  # arguments of a handler: a number and a frame, `self`, and what a `functools.partial` binds


class BareExceptionError(Exception):
    """Stands for an exception of foreign code that is not an `Exception`, which ends threads and event loops; that is its cause."""


def words(error: BaseException) -> str:
    """An exception in words, its class and its message: the one way to say what foreign code raised.

    The text of an exception is foreign code too: whatever reading it raises, and however long it is, this returns a plain text.

    Example:
        >>> words(ValueError("too small")), words(ValueError())
        ('ValueError: too small', 'ValueError')
    """
    if isinstance(error, BareExceptionError) and error.__cause__ is not None:
        error = error.__cause__
    text = text_of(error)
    return f"{class_name(error)}: {text}" if text else class_name(error)


def trace_of(error: BaseException) -> str:
    """Where a stranger's error was raised, and its words, as a log can write them: bounded, and without lone surrogates."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-20))
    return f"{frames}{words(error)}".encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """The message of an exception alone; empty where it has none or cannot be read."""
    try:
        # A slice of a subclass of `str` is a plain text.
        text = str.__getitem__(str(error), slice(_LONGEST + 1))
    except BaseException as fault:
        if is_interruption(fault):
            raise
        return ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def class_name(value: object) -> str:
    """The name of a value's class, which neither the class nor its metaclass can answer otherwise."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def shown(value: object) -> str:
    """A foreign value in a message: its start as `repr` writes it, or the name of its class where that fails."""
    try:
        return str.__getitem__(repr(value), slice(_LONGEST_VALUE))
    except BaseException as fault:
        if is_interruption(fault):
            raise
        return class_name(value)


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is meant for somebody further up, not a fault of the foreign code that it came through.

    That is a `KeyboardInterrupt`, whatever a signal handler raised, and a `CancelledError` in a task that was cancelled.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, asyncio.CancelledError):
        return is_task_cancelled()
    return _is_of_handler(error)


def is_task_cancelled() -> bool:
    """Whether somebody cancelled the task that runs, rather than the work that it waits for."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0


def _is_of_handler(error: BaseException) -> bool:
    """Whether an exception was raised by a signal handler or below it, which only the main thread runs."""
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    if trace is None or threading.current_thread() is not threading.main_thread():
        return False
    codes, is_bare = _handler_codes(), not isinstance(error, Exception)
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in codes or (is_bare and _has_own_caller(frame)):
            return True
        trace = trace.tb_next
    return False


def _has_own_caller(frame: types.FrameType) -> bool:
    """Whether a frame was called with the frame below it, as a handler is; it may have taken itself off before it raised."""
    code = frame.f_code
    count = code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)
    if not 1 <= count <= _MOST_OF_HANDLER or frame.f_back is None:
        return False
    # The variable after all arguments is *args.
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]
    given = [frame.f_locals.get(name) for name in names]
    return any(value is frame.f_back or (type(value) is tuple and frame.f_back in value) for value in given)


def _handler_codes() -> set[Any]:
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while hasattr(handler, "func"):  # functools.partial
            handler = handler.func
        for function in (handler, getattr(handler, "__func__", None), vars(type(handler)).get("__call__")):
            if isinstance(function, types.FunctionType):
                codes.add(function.__code__)
    return codes


def contain(function: Callable[..., Returned], *arguments: Any, **named: Any) -> Returned:
    """Call a function that runs foreign code, and let nothing out but interruptions and `Exception`s.

    Args:
        function: called once.
        *arguments: for it.
        **named: for it.

    Raises:
        BareExceptionError: in place of an exception that is not an `Exception`.
    """
    try:
        return function(*arguments, **named)
    except Exception:
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        raise BareExceptionError(words(error)) from error


def let_go(error: BaseException) -> None:
    """Take from an exception what it keeps alive: the frames that it came through, and other exceptions with theirs.

    Args:
        error: changed in place, whatever its class makes of assignments.
    """
    traceback.clear_frames(BaseException.__dict__["__traceback__"].__get__(error))
    for name in ("__traceback__", "__context__", "__cause__"):
        BaseException.__dict__[name].__set__(error, None)


def quietly(function: Callable[[], Returned], otherwise: Returned) -> Returned:
    """What a function returns, or another value where it raises; for foreign values that may not answer."""
    try:
        return function()
    except BaseException as error:
        if is_interruption(error):
            raise
        return otherwise
