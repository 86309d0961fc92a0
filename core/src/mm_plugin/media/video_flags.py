"""Flags of encryption in the packets and containers of videos. Decodes nothing."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av.packet import Packet

_SYNC = 0x47
_TRANSPORT = 188  # bytes of a packet; some files have a time or a checksum between two
# The header of a packet of video in a program stream: two bits are always 10, the next two say how it is scrambled.
_PROGRAM = re.compile(rb"\x00\x00\x01[\xe0-\xef]..[\x90-\xbf]", re.DOTALL)


def is_encrypted(packet: Packet[Any]) -> bool:
    """Whether an MP4 sample is encrypted, in part at least.

    FFmpeg's description: six numbers, the last three being the bytes of the key's name and of the initialization vector, and the
    count of parts; then both, then the clear and the protected bytes of each part. Without parts, all of the sample is protected.
    """
    if not packet.has_sidedata("encryption_info"):
        return False
    from av.packet import PacketSideData

    info = bytes(PacketSideData.from_packet(packet, "encryption_info"))
    if len(info) < 24:
        return True
    name, vector, count = struct.unpack_from(">3I", info, 12)
    at = 24 + name + vector
    if not count or len(info) < at + 8 * count:
        return True
    return any(protected for _, protected in struct.iter_unpack(">II", info[at : at + 8 * count]))


def is_scrambled(container: str, data: bytes, stream: int) -> bool:
    """Whether packets of a transport or program stream say that their content is scrambled.

    Args:
        container: FFmpeg's name.
        data: the file.
        stream: number of the video in its container.
    """
    if container == "mpeg":
        return _PROGRAM.search(data) is not None
    stream_packets = _of_stream(data, stream) if container == "mpegts" else None
    if stream_packets is None:
        return False
    flags = stream_packets[0][:, 3]
    return bool(((flags & 0x10 != 0) & (flags & 0xC0 != 0)).any())


def is_cut(data: bytes, stream: int) -> bool:
    """Whether a transport stream ends before the last frame of this stream is known to be complete.

    A frame ends where its packet's length says, or else in a transport packet that is stuffed, but for the one frame in 184 that
    fills its packets. A decoder does not tell: it may not miss the few bytes that are missing.

    Source: ISO/IEC 13818-1, sections 2.4.3.2 to 2.4.3.7.
    """
    found = _of_stream(data, stream)
    if found is None:
        return False
    packets = found[0][found[0][:, 3] & 0x10 != 0]  # those with a payload
    begins = np.flatnonzero(packets[:, 1] & 0x40)
    if not len(begins) or found[1]:
        return found[1]
    payloads = [_payload(bytes(packet)) for packet in packets[begins[-1] :]]
    length = int.from_bytes(payloads[0][0][4:6], "big")
    if length:
        return sum(len(payload) for payload, _ in payloads) < 6 + length
    return not payloads[-1][1]


def _payload(packet: bytes) -> tuple[bytes, bool]:
    """The payload of a transport packet, and whether it is stuffed."""
    if not packet[3] & 0x20:
        return packet[4:_TRANSPORT], False
    length, flags = packet[4], packet[5]
    # Flags, two clocks, a countdown; then private data and an extension, which say how long they are.
    needed = 1 + 6 * bool(flags & 0x10) + 6 * bool(flags & 0x08) + bool(flags & 0x04)
    for bit in (0x02, 0x01):
        if flags & bit:
            needed += 1 + packet[min(5 + needed, len(packet) - 1)]
    return packet[5 + length : _TRANSPORT], length != needed


def _of_stream(data: bytes, stream: int) -> tuple[np.ndarray, bool] | None:
    """The packets of one stream, and whether the file ends within one that continues a frame; None where there are no packets.

    Shape:
        returns [count, 188] uint8.
    """
    found = _layout(data)
    if found is None:
        return None
    start, size = found
    count, rest = divmod(len(data) - start, size)
    if rest >= _TRANSPORT:  # what comes after a packet is missing, not the packet
        count, rest = count + 1, 0
    padded = np.zeros(count * size, np.uint8)
    held = min(len(data) - start, count * size)
    padded[:held] = np.frombuffer(data, np.uint8, held, start)
    packets = padded.reshape(count, size)[:, :_TRANSPORT]
    numbers = (packets[:, 1].astype(np.int32) & 0x1F) << 8 | packets[:, 2]
    head = data[start + count * size :][:3]
    cut = rest >= 3 and head[0] == _SYNC and (head[1] & 0x1F) << 8 | head[2] == stream and not head[1] & 0x40
    return packets[(packets[:, 0] == _SYNC) & (numbers == stream)], bool(cut)


def _layout(data: bytes) -> tuple[int, int] | None:
    """Where the first transport packet begins, and from one to the next, bytes."""
    for size in (_TRANSPORT, 192, 204):
        for start in range(min(size, len(data))):
            if all(data[at] == _SYNC for at in range(start, min(start + 5 * size, len(data)), size)):
                return start, size
    return None
