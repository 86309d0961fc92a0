"""Which tracks of a container are encrypted. FFmpeg would decode what is encrypted as noise. Decodes nothing.

A mark counts where it says that the bytes of a frame are encrypted; a license or a key in the header encrypts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mm_plugin.media.ebml import elements

if TYPE_CHECKING:
    from av.container import InputContainer

# Objects of a protected ASF file. Source: Advanced Systems Format specification, sections 3.14 and 3.15.
_ASF_ENCRYPTION = (
    bytes.fromhex("FBB3112223BDD211B4B700A0C955FC6E"),
    bytes.fromhex("14E68A292226174CB935DAE07EE9289C"),
)
_TS_PACKET = 188
_SYNC = 0x47
# Audio packets of a program stream: their start code, their length, and their first flags.
_PS_AUDIO = re.compile(rb"\x00\x00\x01[\xbd\xc0-\xdf]..([\x80-\xbf])", re.DOTALL)
_PS_LOOKED_AT = 1 << 23  # bytes; the flags are the same all along


def is_encrypted(packet: Any) -> bool:
    """Whether any byte of a packet of an MP4 file is encrypted.

    Source: FFmpeg's AVEncryptionInfo as side data: scheme, blocks to encrypt, blocks to skip, then the number of bytes of the
    key's id, those of the vector, and the number of ranges; then these, each range as its clear and its encrypted bytes.
    """
    if not packet.has_sidedata("encryption_info"):
        return False
    info = bytes(packet.get_sidedata("encryption_info"))
    key, vector, ranges = (int.from_bytes(info[at : at + 4], "big") for at in (12, 16, 20))
    if not ranges:
        return True
    table = np.frombuffer(info, ">u4", offset=24 + key + vector, count=2 * ranges)
    return bool(table[1::2].any())


def encrypted_tracks(container: InputContainer, data: bytes) -> set[int]:
    """Which audio tracks a header says are encrypted, from 0 among them. In MP4 each packet says so: `is_encrypted`.

    Args:
        container: opened.
        data: the file.
    """
    name, streams = container.format.name, container.streams.audio
    if name == "mpegts":
        scrambled = _scrambled_pids(data)
        return {place for place, stream in enumerate(streams) if stream.id in scrambled}
    if name == "matroska,webm":
        return {place for place, marked in enumerate(_matroska_audio(data)) if marked}
    marked = (
        (name == "asf" and any(mark in data[: 1 << 20] for mark in _ASF_ENCRYPTION))
        or (name == "mpeg" and _is_scrambled_program(data))
        or (name == "flv" and _is_filtered(data))
    )
    return set(range(len(streams))) if marked else set()


def _scrambled_pids(data: bytes) -> set[int]:
    """The streams of a transport stream with packets whose payload is scrambled. Source: ISO/IEC 13818-1, section 2.4.3.2."""
    for size in (_TS_PACKET, _TS_PACKET + 4, _TS_PACKET + 16):
        start = next(
            (at for at in range(min(size, len(data))) if data[at : at + 5 * size : size] == bytes([_SYNC]) * 5), None
        )
        if start is not None:
            break
    else:
        return set()
    packets = np.frombuffer(data, np.uint8, offset=start, count=(len(data) - start) // size * size).reshape(-1, size)
    scrambled = packets[(packets[:, 0] == _SYNC) & (packets[:, 3] & 0x80 > 0) & (packets[:, 3] & 0x10 > 0)]
    return set(np.unique((scrambled[:, 1].astype(int) & 0x1F) << 8 | scrambled[:, 2]).tolist())


def _is_scrambled_program(data: bytes) -> bool:
    """Whether packets of a program stream are scrambled. Source: ISO/IEC 13818-1, section 2.4.3.6."""
    flags = [found[1][0] for found in _PS_AUDIO.finditer(data, 0, _PS_LOOKED_AT)]
    # One that looks so may lie within other data.
    return 8 * len([flag for flag in flags if flag & 0x30]) > len(flags)


def _is_filtered(data: bytes) -> bool:
    """Whether the audio of an FLV file is encrypted. Source: Adobe Flash Video file format 10.1, annex E.4.1."""
    at = 9 + 4
    while at + 11 <= len(data):
        if data[at] & 0x1F == 8:
            return bool(data[at] & 0x20)
        at += 11 + 4 + int.from_bytes(data[at + 1 : at + 4], "big")
    return False


def _matroska_audio(data: bytes) -> Iterator[bool]:
    """For each audio track whether its frames are encrypted. Source: RFC 9559, section 5.1.4."""
    at = data.find(b"\x16\x54\xae\x6b")
    for kind, start, end in elements(data, max(at, 0), len(data)):
        if kind != 0x1654AE6B:
            return
        for entry, first, last in elements(data, start, end):
            if entry == 0xAE:
                inside = list(elements(data, first, last))
                if any(k == 0x83 and data[s:e] == b"\2" for k, s, e in inside):
                    yield _is_encrypted_entry(data, inside)
        return


def _is_encrypted_entry(data: bytes, inside: list[tuple[int, int, int]]) -> bool:
    encodings = (part for kind, start, end in inside if kind == 0x6D80 for part in elements(data, start, end))
    return any(
        inner == 0x5033 and data[s:e].lstrip(b"\0") == b"\1"
        for kind, start, end in encodings
        if kind == 0x6240
        for inner, s, e in elements(data, start, end)
    )
