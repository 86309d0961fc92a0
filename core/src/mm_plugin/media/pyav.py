"""What videos and audio inputs share: PyAV's containers opened on untrusted bytes, and its errors as ours. Decodes nothing.

Only well-known formats and codecs are opened: a playlist would name other files, and a rare decoder is an untested one. While a
container is opened no decoder runs, so whatever its streams claim, nothing of that size is allocated. What FFmpeg itself makes of
a few bytes is bounded too: `heads` refuses heads that would cost it memory or time at one go, and a video that goes on costing
time while it is read is told that its file has ended.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import MediaError, UsageError
from mm_plugin.media.container_headers import MOST_PACKETS, check_head, without_tags

if TYPE_CHECKING:
    from types import ModuleType

_BUFFER = 1 << 15  # bytes that are read at once; after each piece the time is looked at
# Of one thread's time: an ordinary file is opened in milliseconds, and a packet is read in a few microseconds.
_OPEN_SECONDS = 1.0
_PACKET_SECONDS = 5e-5
# What hostile files make FFmpeg and PyAV raise, beside FFmpegError: some of PyAV's own errors are these too.
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


class _Reader:
    """The bytes as the file that FFmpeg reads; it ends early once the time allowed is used up."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.seek, self.tell = self._file.seek, self._file.tell
        self._end = time.thread_time() + _OPEN_SECONDS
        self.spent = False

    def read(self, size: int) -> bytes:
        self.spent = self.spent or time.thread_time() > self._end
        return b"" if self.spent else self._file.read(size)

    def allow(self, seconds: float) -> None:
        self._end += seconds


class CheckedFile:
    """An encoded file whose head costs FFmpeg no more than it may, looked through once however often it is opened. Final.

    Attributes:
        data: of the file, without its ID3 tags.

    Raises:
        MediaError: it promises more packets or tags than any video or audio has.
    """

    def __init__(self, data: bytes) -> None:
        self.data = without_tags(data)
        check_head(self.data)


@contextlib.contextmanager
def open_container(file: CheckedFile, formats: str) -> Iterator[Any]:
    """A container whose format is one of these, names of FFmpeg's demuxers separated by commas."""
    with _opened(file, formats) as (container, reader):
        reader.allow(float("inf"))  # from here on decoding takes as long as it takes
        yield container


@contextlib.contextmanager
def open_packets(file: CheckedFile, formats: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """As `open_container`, and every packet of the file, of all its streams; they may cost no more time than packets do."""
    with _opened(file, formats) as (container, reader):
        yield container, _packets(container, reader)


@contextlib.contextmanager
def _opened(file: CheckedFile, formats: str) -> Iterator[tuple[Any, _Reader]]:
    av = import_av()
    options = {
        "format_whitelist": formats,
        "codec_whitelist": "none",
        "protocol_whitelist": "none",
        "ignore_chapters": "1",
    }
    reader = _Reader(file.data)
    try:
        container = av.open(reader, options=options, metadata_errors="replace", buffer_size=_BUFFER)
    except (*_DECODE_ERRORS, av.FFmpegError) as error:
        _check_time(reader)
        raise MediaError(
            "the bytes are no video or audio of a known format, or their head is broken", reason="format"
        ) from error
    with container:
        _check_time(reader)
        yield container, reader


def _packets(container: Any, reader: _Reader) -> Iterator[Any]:
    for count, packet in enumerate(container.demux()):
        if count > MOST_PACKETS:
            raise MediaError(f"the file has more than {MOST_PACKETS} packets", reason="packets")
        reader.allow(_PACKET_SECONDS)
        yield packet
    _check_time(reader)


def _check_time(reader: _Reader) -> None:
    if reader.spent:
        raise MediaError("the file's head takes too long to read", reason="head")


@contextlib.contextmanager
def decoding(path: str, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises into one error that names the media input, without a byte of it."""
    try:
        yield
    except MediaError as error:
        if error.path is not None:
            raise
        raise MediaError(f"{path}: {error.message}", path=path, reason=error.reason) from None
    except (*_DECODE_ERRORS, import_av().FFmpegError) as error:
        raise MediaError(
            f"{path}: the {what} is broken ({type(error).__name__})", path=path, reason="broken"
        ) from error
