"""Libraries that write to the process's standard error by themselves: libtiff reports what a file does wrong there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path


@functools.cache
def quiet_libtiff() -> None:
    """Keep libtiff from writing to standard error; Pillow raises what matters. Called once it is loaded; Linux alone."""
    with contextlib.suppress(OSError, AttributeError):
        for path in _loaded("libtiff"):
            library = ctypes.CDLL(path)
            for name in (
                "TIFFSetErrorHandler",
                "TIFFSetWarningHandler",
                "TIFFSetErrorHandlerExt",
                "TIFFSetWarningHandlerExt",
            ):
                function = getattr(library, name)
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
                function(None)


def _loaded(name: str) -> list[str]:
    """Paths of the shared libraries of a name that this process has loaded."""
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        paths = {
            line.split(None, 5)[5].rstrip("\n") for line in maps if f"/{name}" in line and len(line.split(None, 5)) > 5
        }
    return sorted(paths)
