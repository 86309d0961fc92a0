"""What clips and sounds share: PyAV's containers opened on untrusted bytes, and its errors as ours. Decodes nothing.

Only well-known formats and codecs are opened: a playlist would name other files, and a rare decoder is an untested one. While a
container is opened no decoder runs, so whatever its streams claim, nothing of that size is allocated.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import MediaError, UsageError

if TYPE_CHECKING:
    from types import ModuleType

_BUFFER = 1 << 18  # bytes that are read at once
# What PyAV raises on hostile files: its own errors are also OSErrors, ValueErrors and others, by what went wrong.
_DECODE_ERRORS = (OSError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, MemoryError)


def import_av() -> ModuleType:
    """PyAV, which is an extra.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "video and audio need PyAV: pip install 'mm-plugin[video]'", argument="mm-plugin[video]"
        ) from error
    return av


@contextlib.contextmanager
def open_container(data: bytes, formats: str) -> Iterator[Any]:
    """A container whose format is one of these, names of FFmpeg's demuxers separated by commas."""
    av = import_av()
    options = {"format_whitelist": formats, "codec_whitelist": "none", "protocol_whitelist": "none"}
    try:
        container = av.open(io.BytesIO(data), options=options, metadata_errors="replace", buffer_size=_BUFFER)
    except _DECODE_ERRORS as error:
        raise MediaError(
            "the bytes are no clip or sound of a known format, or their head is broken", reason="format"
        ) from error
    with container:
        yield container


@contextlib.contextmanager
def decoding(path: str, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises into one error that names the medium, without a byte of it."""
    try:
        yield
    except MediaError as error:
        if error.path is not None:
            raise
        raise MediaError(f"{path}: {error.message}", path=path, reason=error.reason) from None
    except _DECODE_ERRORS as error:
        raise MediaError(
            f"{path}: the {what} is broken ({type(error).__name__})", path=path, reason="broken"
        ) from error
