"""Files that strangers named or made: only regular ones are opened, and none from outside its folder. Knows no format."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# POSIX: a FIFO that took a file's place must not make the opening wait, nor a terminal become the process's own.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


def check_regular(file: str | os.PathLike[str]) -> None:
    """Refuse what is not a regular file: reading a FIFO waits for its writer, and a device may never end.

    Raises:
        OSError: it is a folder, FIFO, device or socket, or cannot be examined.
    """
    _check_mode(Path(file).stat().st_mode)


def open_regular(file: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a regular file to read it, without waiting.

    Args:
        file: where it is.
        follow: whether its last part may be a symbolic link; False where the path was resolved before.

    Raises:
        OSError: it is not a regular file, or cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a.txt"
        ...     _ = file.write_bytes(b"text")
        ...     with open_regular(file) as opened:
        ...         opened.read()
        b'text'
    """
    check_regular(file)  # before it is opened: opening some devices has effects
    descriptor = os.open(file, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        _check_mode(os.fstat(descriptor).st_mode)  # again, of what was opened
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_mode(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a regular file, got a folder, FIFO, device or socket")


def special_file(folder: Path) -> Path | None:
    """The first FIFO, device or socket in a folder, links followed; None where there is none."""
    for entry in sorted(folder.iterdir()):
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link that leads nowhere
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return entry
    return None


def is_within(folder: Path, name: str) -> bool:
    """Whether a name stays in a folder, as text and once links are resolved.

    A link may lead into the cache of the hub, where a snapshot's files are links to `models--<id>/blobs/<hash>`.

    Args:
        folder: where the name is from.
        name: relative to it; nothing has to exist.
    """
    if not name or "\0" in name or "\\" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        return False
    try:
        file = (folder / name).resolve()
        inside = file.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a loop of links
        return False
    *_, repository, blobs, _ = ("", "", *file.parts)
    return inside or (blobs == "blobs" and repository.startswith(("models--", "datasets--", "spaces--")))
