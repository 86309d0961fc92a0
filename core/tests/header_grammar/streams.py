"""Ogg, FLAC, MPEG audio, FLV, MPEG streams."""

from __future__ import annotations

import struct

from header_grammar.pieces import Pieces


def ogg(p: Pieces) -> bytes:
    def page(number: int, body: bytes, first: bool) -> bytes:
        lacing = [255] * (len(body) // 255) + [len(body) % 255]
        count = p.size(len(lacing), 8)
        head = (
            b"OggS"
            + bytes([0, 2 if first else p.number(3)])
            + p.little(64)
            + p.pick(b"\1\0\0\0", p.little(32))
            + struct.pack("<I", number)
        )
        rest = bytes([count & 0xFF]) + bytes(lacing) + body
        check = crc_of_ogg(head + bytes(4) + rest) if not p.flag(p.level) else p.number(32)
        return head + struct.pack("<I", check) + rest

    first = p.pick(
        b"OpusHead\x01" + bytes([p.number(8)]) + p.little(16) + p.little(32) + p.little(16) + b"\0",
        b"\x01vorbis" + p.little(32) + bytes([p.number(8)]) + p.little(32) + p.random.randbytes(13),
        b"\x7fFLAC\x01\0" + p.big(16) + b"fLaC" + flac_info(p),
        b"\x80theora\x03\x02\x01" + p.random.randbytes(32),
        b"Speex   " + p.random.randbytes(72),
    )
    comment = p.pick(b"OpusTags", b"\x03vorbis", b"\x81theora") + p.little(32) + p.data(9) + p.little(32) + p.data(200)
    pages = [first, comment, p.data(250)] + [p.data(200) for _ in range(p.times() * p.pick(1, 1, 30))]
    return b"".join(page(number, body, number == 0) for number, body in enumerate(pages))


def crc_of_ogg(data: bytes) -> int:
    register = 0
    for byte in data:
        register ^= byte << 24
        for _ in range(8):
            register = ((register << 1) ^ 0x04C11DB7 if register & 0x80000000 else register << 1) & 0xFFFFFFFF
    return register


def flac_info(p: Pieces) -> bytes:
    packed = (p.pick(44100, p.number(20)) << 44) | (p.number(3) << 41) | (p.pick(15, p.number(5)) << 36) | p.number(36)
    return (
        b"\0"
        + struct.pack(">I", 34)[1:]
        + p.big(16)
        + p.big(16)
        + p.big(24)
        + p.big(24)
        + packed.to_bytes(8, "big")
        + bytes(16)
    )


def flac(p: Pieces) -> bytes:
    def block(last: bool) -> bytes:
        body = p.data(200)
        return (
            bytes([p.pick(1, 2, 3, 4, 5, 6, 127) | (128 if last else 0)])
            + struct.pack(">I", p.size(len(body), 24))[1:]
            + body
        )

    blocks = b"".join(block(False) for _ in range(p.times() * p.pick(1, 1, 20))) + block(True)
    return b"fLaC" + flac_info(p) + blocks + b"\xff\xf8" + p.random.randbytes(8) + p.data(200)


def mpeg_audio(p: Pieces) -> bytes:
    tag = (
        b"ID3"
        + bytes([p.pick(2, 3, 4), 0, p.number(8)])
        + p.random.choice([bytes(4), b"\x7f\x7f\x7f\x7f", bytes([0, 0, 1, 0])])
    )
    frames = b"".join(p.pick(b"TIT2", b"APIC", b"COMM") + p.big(32) + bytes(2) + p.data(40) for _ in range(p.times()))
    head = p.pick(
        b"\xff\xfb\x90\x00",
        b"\xff\xf1\x50\x80\x02\x1f\xfc",
        b"\xff\xfb" + p.random.randbytes(2),
        b"\xff\xf1" + p.random.randbytes(5),
    )
    return (tag + frames if p.flag() else b"") + (head + p.data(420)) * max(1, p.times())


def flv(p: Pieces) -> bytes:
    def tag() -> bytes:
        body = p.data(100)
        return (
            bytes([p.pick(8, 9, 18, p.number(8))])
            + struct.pack(">I", p.size(len(body), 24))[1:]
            + p.big(32)
            + bytes(3)
            + body
            + struct.pack(">I", p.size(len(body) + 11, 32))
        )

    return (
        b"FLV\x01"
        + bytes([p.pick(1, 4, 5)])
        + struct.pack(">I", p.size(9, 32))
        + bytes(4)
        + b"".join(tag() for _ in range(p.times() * 3))
    )


def mpeg_streams(p: Pieces) -> bytes:
    if p.flag():
        return b"".join(transport_packet(p) for _ in range(5 + p.times()))
    units = b"".join(
        b"\0\0\1" + bytes([p.pick(0xBA, 0xBB, 0xE0, 0xC0, 0xB3, 0xBC)]) + p.big(16) + p.data(80)
        for _ in range(p.times() * 3)
    )
    return b"\0\0\1\xba" + p.random.randbytes(10) + units


def transport_packet(p: Pieces) -> bytes:
    return b"\x47" + p.pick(b"\x40\x00\x10", b"\x41\x00\x30", p.random.randbytes(3)) + p.random.randbytes(184)
