"""Which packets of a video stream hold a frame that is displayed, by codec. Decodes nothing.

A packet is not a frame: some hold only parameters or messages, a frame that is never displayed, half a frame, or nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from mm_plugin.media.nal import Bits, H264Packets, Held, HevcPackets

_FRAME = Held(1)
_NOTHING = Held(0, image=False)
_HIDDEN = Held(0)
_UNKNOWN = Held(None)
_VOP = b"\0\0\1\xb6"


class Packets(Protocol):
    """Reads the packets of one stream in the order in which they are stored.

    Attributes:
        waits: whether the last frame is known to lack a part that is still to come.
    """

    @property
    def waits(self) -> bool:
        """See the attributes."""

    def read(self, data: bytes) -> Held:
        """What a packet holds."""


class _Plain:
    """Packets that are read one by one."""

    waits = False

    def __init__(self, read: Callable[[bytes], Held]) -> None:
        self._read = read

    def read(self, data: bytes) -> Held:
        return self._read(data)


def packets_of(codec: str, extradata: bytes) -> Packets:
    """The reader of a codec's packets.

    Args:
        codec: FFmpeg's name.
        extradata: the stream's header; may be empty.
    """
    if codec == "h264":
        return H264Packets(extradata)
    if codec == "hevc":
        return HevcPackets(extradata)
    if codec == "mpeg4":
        return _Mpeg4Packets(extradata)
    return _Plain(_READERS.get(codec, lambda data: _FRAME))  # noqa: ARG005


def _vp8(data: bytes) -> Held:
    """Source: RFC 6386, section 9.1."""
    return _FRAME if data[0] & 0x10 else _HIDDEN


def _vp9(data: bytes) -> Held:
    """Source: VP9 Bitstream & Decoding Process Specification, sections 6.2 and Annex B."""
    sizes = [len(data)]
    marker = data[-1]
    if marker & 0xE0 == 0xC0:
        count, width = (marker & 7) + 1, (marker >> 3 & 3) + 1
        index = 2 + count * width
        if len(data) >= index and data[-index] == marker:
            starts = range(len(data) - index + 1, len(data) - 1, width)
            sizes = [int.from_bytes(data[at : at + width], "little") for at in starts]
    shown = at = 0
    for size in sizes:
        shown += size > 0 and at < len(data) and _shows_vp9(data[at])
        at += size
    return (_HIDDEN, _FRAME)[shown] if shown < 2 else _UNKNOWN


def _shows_vp9(first: int) -> bool:
    if first >> 6 != 2:
        return True  # not a frame's header; the decoder says what is wrong
    rest = first & (7 if first >> 4 & 3 == 3 else 15)
    bits = 3 if first >> 4 & 3 == 3 else 4
    if rest >> bits - 1:
        return True  # shows a frame that was stored before
    return bool(rest >> bits - 3 & 1)


def _av1(data: bytes) -> Held:
    """Source: AV1 Bitstream & Decoding Process Specification, section 5.3."""
    at = 0
    while at < len(data):
        kind, extended, sized = data[at] >> 3 & 15, data[at] & 4, data[at] & 2
        if kind in (3, 6, 7):  # the header of a frame
            return _FRAME
        at += 2 if extended else 1
        if not sized:
            break
        size = shift = 0
        while at < len(data):
            size, shift, at = size | (data[at] & 127) << shift, shift + 7, at + 1
            if data[at - 1] < 128:
                break
        at += size
    return _NOTHING


def _mpeg12(data: bytes) -> Held:
    """A packet without the start code of an image holds only headers."""
    return _FRAME if b"\0\0\1\0" in data else _NOTHING


class _Mpeg4Packets:
    """Reads the packets of one MPEG-4 stream.

    Source: ISO/IEC 14496-2:2004, sections 6.2.3 and 6.2.5.
    """

    waits = False

    def __init__(self, extradata: bytes) -> None:
        self._time_bits: int | None = None
        self._parameters(extradata)

    def read(self, data: bytes) -> Held:
        self._parameters(data)
        found = data.find(_VOP)
        if found < 0:
            return _FRAME if data[:2] == b"\0\0" and data[2:3] >= b"\x80" else _NOTHING  # a short header, as of H.263
        if data.find(_VOP, found + 4) >= 0 or self._time_bits is None:
            return _UNKNOWN
        try:
            bits = Bits(data[found + 4 : found + 20])
            bits.take(2)
            while bits.take(1):
                pass
            bits.take(self._time_bits + 2)
            # One that is not coded leaves the last frame where it is; the decoder may display that again at the end.
            return _FRAME if bits.take(1) else _UNKNOWN
        except ValueError:
            return _UNKNOWN

    def _parameters(self, data: bytes) -> None:
        """Remember how many bits a time has, where the header of a layer says so."""
        at = data.find(b"\0\0\1")
        while at >= 0:
            if data[at + 3 : at + 4] and 0x20 <= data[at + 3] <= 0x2F:
                with contextlib.suppress(ValueError):
                    self._time_bits = max((_resolution(Bits(data[at + 4 : at + 64])) - 1).bit_length(), 1)
            elif data[at + 3 : at + 4] == b"\xb6":
                return
            at = data.find(b"\0\0\1", at + 3)


def _resolution(bits: Bits) -> int:
    """Ticks per second, from the header of a layer."""
    bits.take(9)
    version = 1
    if bits.take(1):
        version = bits.take(4)
        bits.take(3)
    if bits.take(4) == 15:
        bits.take(16)
    if bits.take(1):
        bits.take(3)
        if bits.take(1):
            bits.take(79)
    if bits.take(2) == 3 and version != 1:
        bits.take(4)
    bits.take(1)
    return bits.take(16)


def _gif(data: bytes) -> Held:
    """Whether an image comes before the packet ends, and whether its data is terminated.

    Source: GIF89a specification, sections 17 to 26.
    """
    at = 0
    if data.startswith((b"GIF87a", b"GIF89a")):
        at = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    while at < len(data):
        if data[at] == 0x21:
            at, _ = _blocks(data, at + 2)
        elif data[at] == 0x2C:
            packed = data[at + 9] if at + 9 < len(data) else 0
            _, terminated = _blocks(data, at + 11 + (3 << (packed & 7) + 1 if packed & 0x80 else 0))
            return _FRAME._replace(whole=terminated)
        else:
            at += 1
    return _NOTHING


def _blocks(data: bytes, at: int) -> tuple[int, bool]:
    """Where a list of blocks ends, and whether it is terminated."""
    while at < len(data):
        if not data[at]:
            return at + 1, True
        at += 1 + data[at]
    return at, False


_READERS: dict[str, Callable[[bytes], Held]] = {
    "vp8": _vp8,
    "vp9": _vp9,
    "av1": _av1,
    "mpeg1video": _mpeg12,
    "mpeg2video": _mpeg12,
    "gif": _gif,
}
