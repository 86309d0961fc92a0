"""What a forked process has to make again: locks that a thread of its parent may have held. Knows no owner of one.

A child of `fork` has one thread, and its memory as it was: a lock that another thread held stays locked for ever. So every lock of
this package is made by `new_lock` or `new_rlock`, and an object that keeps threads, or what threads were about to finish, is
announced with `on_fork`.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

# The only state of the package that is the process's: what to make again in a child. It keeps nothing alive.
_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()
_OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()


class Forked(Protocol):
    """Something that a fork leaves half done."""

    def after_fork(self) -> None:
        """Called in the child, whose only thread this is, once all locks are free; must not raise."""


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it in the parent.

    Example:
        >>> with new_lock() as held:
        ...     held
        True
    """
    lock = threading.Lock()
    _LOCKS.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """As `new_lock`, for one that its holder may take again."""
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


def on_fork(owner: Forked) -> None:
    """Call `owner.after_fork` in every forked child, as long as the owner lives.

    Args:
        owner: is not kept alive.
    """
    _OWNERS.add(owner)


def _renew() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()  # noqa: SLF001 - what the standard library does with its own locks; there is no public way
    for owner in list(_OWNERS):
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
