"""What video and audio share: PyAV's containers opened on untrusted bytes, and its errors as ours. Decodes nothing.

Only well-known formats and codecs are opened: a playlist would name other files, and a rare decoder is an untested one. While a
container is opened no decoder runs, so whatever its streams claim, nothing of that size is allocated. What FFmpeg itself allocates
for a few bytes is bounded too: `container_headers` refuses headers that would cost it memory or time at once, and a file that takes
too long to read appears to FFmpeg to have ended.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import MediaError, UsageError
from mm_plugin.media.container_headers import MOST_PACKETS, check_head, without_tags
from mm_plugin.media.decoder_errors import decoding
from mm_plugin.media.header_budget import Budget

if TYPE_CHECKING:
    from types import ModuleType

_BUFFER = 1 << 15  # bytes that are read at once; after each piece the time is looked at
# CPU time of one thread: an ordinary file is opened in milliseconds, and a packet is read in a few microseconds.
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
    """The bytes as the file that FFmpeg reads; it ends early once the allowed time is used up."""

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
    """An encoded file whose header is checked for its cost to FFmpeg, once however often it is opened. Final.

    Attributes:
        data: of the file, without its ID3 tags.

    Raises:
        MediaError: its header promises more packets or tags than any video or audio has.
    """

    def __init__(self, data: bytes) -> None:
        budget = Budget()
        self.data = without_tags(data, budget)
        check_head(self.data, budget=budget)


@contextlib.contextmanager
def open_container(file: CheckedFile, formats: str) -> Iterator[Any]:
    """A container whose format is one of these, names of FFmpeg's demuxers separated by commas."""
    with _opened(file, formats) as (container, reader):
        reader.allow(float("inf"))  # from here on decoding takes as long as it takes
        yield container


@contextlib.contextmanager
def open_packets(file: CheckedFile, formats: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """As `open_container`, and every packet of all its streams, read within the time that packets take."""
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
            "the bytes are not video or audio of a supported format, or the header is corrupted", reason="format"
        ) from error
    with container:
        _check_time(reader)
        yield container, reader


def _packets(container: Any, reader: _Reader) -> Iterator[Any]:
    for count, packet in enumerate(container.demux()):
        if count > MOST_PACKETS:
            raise MediaError(f"expected at most {MOST_PACKETS} packets, got more", reason="packets")
        reader.allow(_PACKET_SECONDS)
        yield packet
    _check_time(reader)


def _check_time(reader: _Reader) -> None:
    if reader.spent:
        raise MediaError("the file's header takes too long to read", reason="head")


def av_decoding(path: str, what: str) -> AbstractContextManager[None]:
    """Turn what PyAV raises on corrupted input into a `MediaError`; see `decoder_errors.decoding`."""
    return decoding(path, what, errors=lambda: (*_DECODE_ERRORS, import_av().FFmpegError))
