"""H.264 and HEVC packets: which of them hold a frame, a field of one, or none, and what they say of orientation. Decodes nothing.

Source: ITU-T H.264 (2021), sections 7.3 and D.2.27; ITU-T H.265 (2021), sections 7.3, 8.1.3 and D.2.17.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mm_plugin.media.turns import Turn, flipped_and_rotated

_START = b"\0\0\1"
_DISPLAY_ORIENTATION = 47  # a supplemental message
# H.264
_SLICE, _PARTITION, _IDR, _SEI, _SPS, _PPS = 1, 2, 5, 6, 7, 8
_CHROMA_PROFILES = {100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135}
# HEVC
_HEVC_IMAGES = 32  # kinds below are parts of frames
_RASL = (8, 9)  # leading frames that refer to what comes before the key frame
_BROKEN_LINKS = (16, 17, 18)
_IDRS = (19, 20)
_CRA = 21
_ENDS = (36, 37)
_HEVC_SEI = 39


class Held(NamedTuple):
    """What a packet holds.

    Attributes:
        frames: how many frames are displayed because of it; None where only decoding can say.
        image: whether it holds any part of an image.
        turn: the orientation from its frame on; None where it says nothing of it.
        upright: whether an orientation that was said before ends here.
        whole: whether nothing of the image is known to be missing.
    """

    frames: int | None
    image: bool = True
    turn: Turn | None = None
    upright: bool = False
    whole: bool = True


class Bits:
    """Reads a payload bit by bit; raises `ValueError` at its end."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        """The next bits, as an unsigned number."""
        self._left -= count
        if self._left < 0:
            raise ValueError("the payload ends early")
        return self._value >> self._left & ((1 << count) - 1)

    def golomb(self) -> int:
        """An unsigned Exp-Golomb number of at most 32 bits."""
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 32:
                raise ValueError("a number of more than 32 bits")
        return (1 << zeros) - 1 + (self.take(zeros) if zeros else 0)

    def signed_golomb(self) -> int:
        """A signed Exp-Golomb number."""
        number = self.golomb()
        return (number + 1) // 2 if number % 2 else -(number // 2)


def units(data: bytes, length: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each NAL unit of a packet.

    Args:
        data: the packet.
        length: bytes of the number before each unit; 0 where start codes separate them.
    """
    if length and not _tiles(data, length):
        length = 0  # some files mix both forms
    if not length:
        at = data.find(_START)
        while at >= 0:
            following = data.find(_START, at + 3)
            yield at + 3, len(data) if following < 0 else following
            at = following
        return
    at = 0
    while at + length < len(data):
        start = at + length
        at = start + int.from_bytes(data[at:start], "big")
        yield start, min(at, len(data))


def _tiles(data: bytes, length: int) -> bool:
    """Whether numbers of bytes lead from one unit to the next; one that leads beyond the packet was cut."""
    if not data.startswith((b"\0\0\0\1", _START)):
        return True
    at = 0
    while at + length < len(data):
        at += length + int.from_bytes(data[at : at + length], "big")
    return at == len(data)


def payload(data: bytes, start: int, end: int) -> bytes:
    """The bytes of a unit without those that keep start codes out of it."""
    return data[start:end].replace(b"\0\0\3", b"\0\0")


class _Sequence(NamedTuple):
    """What a slice header needs of the parameters of a sequence."""

    frame_number_bits: int
    frames_only: bool
    separate_planes: bool


class H264Packets:
    """Reads the packets of one H.264 stream in the order in which they are stored. Final.

    Args:
        extradata: the stream's header; empty where parameters come in packets.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._images: dict[int, int] = {}  # image parameters -> sequence parameters
        self._length = 0
        self._first: tuple[bool, int] | None = None  # of a frame whose second field is still to come
        if extradata[:1] == b"\1" and len(extradata) > 6:
            self._length = (extradata[4] & 3) + 1
            self._read_header(extradata)
        else:
            for start, end in units(extradata, 0):
                self._parameters(extradata, start, end)

    @property
    def waits(self) -> bool:
        """Whether the second field of the last frame has not come."""
        return self._first is not None

    def read(self, data: bytes) -> Held:
        """What a packet holds."""
        turn, upright, slices, starts = None, False, False, 0
        fields: list[tuple[bool, int] | None] = []
        for start, end in units(data, self._length):
            if start >= end:
                continue
            kind = data[start] & 31
            if kind in (_SLICE, _PARTITION, _IDR):
                slices = True
                begins = start + 1 < end and data[start + 1] >= 0x80  # the first macroblock is number 0
                starts += begins
                if begins and not self._only_frames():
                    fields.append(self._field(data, start, end))
            elif kind in (_SPS, _PPS):
                self._parameters(data, start, end)
            elif kind == _SEI:
                turn, upright = _orientation(payload(data, start + 1, end), turn, upright)
        if not slices:
            return Held(0, image=False, turn=turn, upright=upright)
        if not fields:
            return Held(1 if starts <= 1 else None, turn=turn, upright=upright)
        return Held(self._count(fields), turn=turn, upright=upright)

    def _only_frames(self) -> bool:
        return bool(self._sequences) and all(one.frames_only for one in self._sequences.values())

    def _count(self, fields: list[tuple[bool, int] | None]) -> int | None:
        """Frames that begin with these fields (parity and frame number; None for a whole frame); None where they do not pair."""
        begun = 0
        for field in fields:
            if field is None:
                if self._first is not None or begun:
                    return None
                begun += 1
            elif self._first is None:
                begun += 1
                self._first = field
            elif self._first[0] != field[0] and self._first[1] == field[1]:
                self._first = None
            else:
                return None
        return begun if begun <= 1 else None

    def _field(self, data: bytes, start: int, end: int) -> tuple[bool, int] | None:
        """Whether a slice is of a bottom field, and the number of its frame; None for a slice of a whole frame."""
        try:
            bits = Bits(payload(data, start + 1, min(end, start + 32)))
            bits.golomb(), bits.golomb()
            sequence = self._sequences[self._images[bits.golomb()]]
            if sequence.separate_planes:
                bits.take(2)
            number = bits.take(sequence.frame_number_bits)
            return (bool(bits.take(1)), number) if not sequence.frames_only and bits.take(1) else None
        except (ValueError, KeyError):
            return None

    def _read_header(self, extradata: bytes) -> None:
        """The parameters that an `avcC` box holds: a count and a length for each."""
        at = 5
        for mask in (31, 255):
            count = extradata[at] & mask if at < len(extradata) else 0
            at += 1
            for _ in range(count):
                start = at + 2
                at = start + int.from_bytes(extradata[at:start], "big")
                self._parameters(extradata, start, min(at, len(extradata)))

    def _parameters(self, data: bytes, start: int, end: int) -> None:
        if start >= end or data[start] & 31 not in (_SPS, _PPS):
            return
        content = payload(data, start + 1, min(end, start + 1024))
        try:
            if data[start] & 31 == _PPS:
                bits = Bits(content)
                self._images[bits.golomb()] = bits.golomb()
            else:
                number, sequence = _sequence(content)
                self._sequences[number] = sequence
        except ValueError:
            return


def _sequence(content: bytes) -> tuple[int, _Sequence]:
    """The number of an H.264 sequence parameter set, and what slices need of it."""
    bits = Bits(content)
    profile = bits.take(8)
    bits.take(16)
    number = bits.golomb()
    separate = False
    if profile in _CHROMA_PROFILES:
        chroma = bits.golomb()
        separate = chroma == 3 and bool(bits.take(1))
        bits.golomb(), bits.golomb(), bits.take(1)
        if bits.take(1):
            _skip_scaling(bits, 8 if chroma != 3 else 12)
    frame_number_bits = bits.golomb() + 4
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.take(1), bits.golomb(), bits.golomb()
        for _ in range(min(bits.golomb(), 255)):
            bits.golomb()
    bits.golomb(), bits.take(1), bits.golomb(), bits.golomb()
    return number, _Sequence(frame_number_bits, bool(bits.take(1)), separate)


def _skip_scaling(bits: Bits, lists: int) -> None:
    for place in range(lists):
        if not bits.take(1):
            continue
        last = following = 8
        for _ in range(16 if place < 6 else 64):
            if following:
                following = (last + bits.signed_golomb()) % 256
            last = following or last


class HevcPackets:
    """Reads the packets of one HEVC stream in the order in which they are stored. Final.

    Args:
        extradata: the stream's header; empty where parameters come in packets.
    """

    waits = False

    def __init__(self, extradata: bytes) -> None:
        self._length = (extradata[21] & 3) + 1 if len(extradata) > 22 and not extradata.startswith(b"\0\0") else 0
        self._entered = False  # whether a key frame came since the stream, or a sequence in it, began
        self._drops = True  # whether leading frames that refer to what comes before the last key frame are dropped

    def read(self, data: bytes) -> Held:
        """What a packet holds."""
        turn, upright, starts, slices, ends, dropped = None, False, 0, False, False, False
        for start, end in units(data, self._length):
            if start + 2 >= end:
                ends = ends or (start < end and data[start] >> 1 & 63 in _ENDS)
                continue
            kind, layer = data[start] >> 1 & 63, (data[start] & 1) << 5 | data[start + 1] >> 3
            if layer:
                continue
            if kind < _HEVC_IMAGES:
                slices = True
                if data[start + 2] >= 0x80:  # the first slice of a frame
                    starts += 1
                    dropped = self._is_dropped(kind)
            elif kind in _ENDS:
                ends = True
            elif kind == _HEVC_SEI:
                turn, upright = _orientation(payload(data, start + 2, end), turn, upright)
        if ends:
            self._entered = False
        if not slices:
            return Held(0, image=False, turn=turn, upright=upright)
        count = 0 if dropped else 1
        return Held(count if starts <= 1 else None, turn=turn, upright=upright)

    def _is_dropped(self, kind: int) -> bool:
        """Whether a frame is not displayed; also remembers what the next need of a key frame."""
        if kind in _BROKEN_LINKS or kind in _IDRS:
            self._drops, self._entered = True, True
        elif kind == _CRA:
            self._drops, self._entered = not self._entered, True
        return kind in _RASL and self._drops


def _orientation(messages: bytes, turn: Turn | None, upright: bool) -> tuple[Turn | None, bool]:
    """What supplemental messages say of orientation, or what was known before."""
    at = 0
    while at + 2 <= len(messages) and messages[at] != 0x80:
        kind, at = _sum_of_bytes(messages, at)
        size, at = _sum_of_bytes(messages, at)
        if kind == _DISPLAY_ORIENTATION and size >= 1:
            if messages[at : at + 1] >= b"\x80":
                return None, True
            bits = int.from_bytes(messages[at : at + 3].ljust(3, b"\0"), "big")
            turn = flipped_and_rotated(bool(bits >> 22 & 1), bool(bits >> 21 & 1), (bits >> 5 & 0xFFFF) / 65536)
            upright = False
        at += size
    return turn, upright


def _sum_of_bytes(data: bytes, at: int) -> tuple[int, int]:
    """A number as bytes of 255 and a last one, and where it ends."""
    total = 0
    while at < len(data) and data[at] == 255:
        total, at = total + 255, at + 1
    return total + (data[at] if at < len(data) else 0), at + 1
