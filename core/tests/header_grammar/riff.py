"""Matroska; RIFF: WAV, AVI, WebP; AIFF."""

from __future__ import annotations

import struct

from header_grammar.images import tiff
from header_grammar.pieces import Pieces


def vint(p: Pieces, true: int) -> bytes:
    value = p.size(true, 56)
    if p.flag(p.level):
        return p.pick(b"\x01\xff\xff\xff\xff\xff\xff\xff", b"\xff", b"\x00")  # type: ignore[no-any-return]
    length = 8 if value >= 1 << 28 else 4
    return ((1 << (7 * length)) | value).to_bytes(length, "big")


def element(p: Pieces, identity: int, body: bytes) -> bytes:
    return identity.to_bytes((identity.bit_length() + 7) // 8, "big") + vint(p, len(body)) + body


def unsigned(p: Pieces, identity: int, bits: int = 32) -> bytes:
    return element(p, identity, p.big(bits))


def matroska(p: Pieces) -> bytes:
    kind = p.pick(
        b"V_VP8",
        b"V_VP9",
        b"V_MPEG4/ISO/AVC",
        b"V_UNCOMPRESSED",
        b"A_OPUS",
        b"A_VORBIS",
        b"A_PCM/INT/LIT",
        b"V_MJPEG",
        p.data(12),
    )
    video = p.join(
        lambda: unsigned(p, 0xB0),
        lambda: unsigned(p, 0xBA),
        lambda: unsigned(p, 0x54B0),
        lambda: element(p, 0x55B0, p.data()),
    )
    audio = p.join(
        lambda: element(p, 0xB5, struct.pack(">d", p.pick(0.0, 48e3, float("nan"), 1e300, -1.0))),
        lambda: unsigned(p, 0x9F),
        lambda: unsigned(p, 0x6264),
    )
    entry = element(
        p,
        0xAE,
        p.join(
            lambda: unsigned(p, 0xD7, 8),
            lambda: unsigned(p, 0x73C5),
            lambda: element(p, 0x83, bytes([p.pick(1, 2, 17, p.number(8))])),
            lambda: element(p, 0x86, kind),
            lambda: element(p, 0x63A2, p.data(300)),
            lambda: element(p, 0xE0, video),
            lambda: element(p, 0xE1, audio),
            lambda: unsigned(p, 0x23E383, 64),
            lambda: element(p, 0x6D80, element(p, 0x6240, element(p, 0x5034, p.data()))),
        ),
    )
    block = element(p, 0xA3, bytes([0x81]) + p.big(16) + bytes([p.pick(0x80, 0, 2, 4, 6, p.number(8))]) + p.data(200))
    cluster = element(p, 0x1F43B675, unsigned(p, 0xE7, 64) + block * max(1, p.times()))
    cues = element(
        p,
        0x1C53BB6B,
        element(p, 0xBB, unsigned(p, 0xB3, 64) + element(p, 0xB7, unsigned(p, 0xF7, 8) + unsigned(p, 0xF1, 64)))
        * max(1, p.times()),
    )
    deep = b""
    for _ in range(p.times() * 3):
        deep = element(p, p.pick(0x67C8, 0x1254C367, 0xAE, 0xB6), deep)[:5000]
    segment = p.join(
        lambda: element(
            p,
            0x1549A966,
            unsigned(p, 0x2AD7B1, 64) + element(p, 0x4489, struct.pack(">d", p.pick(0.0, 1e3, 1e308, float("inf")))),
        ),
        lambda: element(p, 0x1654AE6B, entry * max(1, p.times() % 40)),
        lambda: element(
            p, 0x114D9B74, element(p, 0x4DBB, element(p, 0x53AB, p.data(6)) + unsigned(p, 0x53AC, 64)) * p.times()
        ),
        lambda: cluster * max(1, p.times() % 30),
        lambda: cues,
        lambda: element(p, 0x1254C367, deep),
        lambda: element(p, 0xEC, p.data(300)) * p.times(),
    )
    head = element(p, 0x4282, p.pick(b"webm", b"matroska", p.data(9))) + unsigned(p, 0x42F2, 8) + unsigned(p, 0x42F3, 8)
    return element(p, 0x1A45DFA3, head) + element(p, 0x18538067, segment)


# ------------------------------------------------------------------ RIFF: WAV, AVI, WebP; AIFF, Wave64


def chunk(p: Pieces, kind: bytes, body: bytes) -> bytes:
    return kind + p.size(len(body), 32).to_bytes(4, "little") + body + bytes(len(body) % 2)


def riff(p: Pieces, form: bytes, body: bytes) -> bytes:
    return (
        p.pick(b"RIFF", b"RIFF", b"RIFF", b"RF64", b"RIFX")
        + p.size(len(body) + 4, 32).to_bytes(4, "little")
        + form
        + body
    )  # type: ignore[no-any-return]


def wav(p: Pieces) -> bytes:
    tag = p.pick(1, 3, 6, 7, 0x11, 0x55, 0xFFFE, p.number(16))
    kind = struct.pack(
        "<HHIIHH", tag, p.number(16), p.number(32), p.number(32), p.number(16), p.pick(8, 16, 24, 32, p.number(16))
    )
    tags = b"".join(chunk(p, p.pick(b"INAM", b"ICMT", b"IART"), p.data(8)) for _ in range(p.times() * p.pick(1, 40)))
    body = p.join(
        lambda: chunk(p, b"ds64", p.data(40)),
        lambda: chunk(p, b"fmt ", kind + p.data(30)),
        lambda: chunk(p, p.pick(b"fact", b"bext", b"cue ", b"smpl", b"id3 "), p.data(700)) * max(1, p.times()),
        lambda: chunk(p, b"LIST", b"INFO" + tags),
        lambda: chunk(p, b"data", p.data(400)),
    )
    return riff(p, b"WAVE", body)


def avi(p: Pieces) -> bytes:
    def stream() -> bytes:
        head = (
            p.pick(b"vids", b"auds", b"vids")
            + p.pick(b"MJPG", b"H264", b"DIB ", b"XVID")
            + b"".join(p.little(32) for _ in range(12))
        )
        form = struct.pack(
            "<IiiHH4sIiiII",
            40,
            p.side() % (1 << 31),
            p.side() % (1 << 31),
            1,
            24,
            p.pick(b"MJPG", b"H264", bytes(4)),
            0,
            0,
            0,
            0,
            0,
        )
        return chunk(
            p,
            b"LIST",
            b"strl"
            + chunk(p, b"strh", head)
            + chunk(p, b"strf", form)
            + chunk(p, p.pick(b"indx", b"strn", b"JUNK"), p.data(100)),
        )

    index = b"".join(
        p.pick(b"00dc", b"01wb") + p.little(32) + p.little(32) + p.little(32) for _ in range(p.times() * p.pick(1, 50))
    )
    body = p.join(
        lambda: chunk(
            p,
            b"LIST",
            b"hdrl"
            + chunk(p, b"avih", b"".join(p.little(32) for _ in range(14)))
            + b"".join(stream() for _ in range(p.times() % 20)),
        ),
        lambda: chunk(
            p, b"LIST", b"movi" + chunk(p, p.pick(b"00dc", b"00db", b"01wb", b"ix00"), p.data(200)) * max(1, p.times())
        ),
        lambda: chunk(p, b"idx1", index),
    )
    return riff(p, b"AVI ", body)


def webp(p: Pieces) -> bytes:
    def frame() -> bytes:
        lossy = b"\x10\x02\x00\x9d\x01\x2a" + struct.pack("<HH", p.side() & 0x3FFF, p.side() & 0x3FFF) + p.data(100)
        return chunk(p, *p.pick((b"VP8 ", lossy), (b"VP8L", b"\x2f" + p.random.randbytes(4) + p.data(100))))

    anim = chunk(p, b"ANMF", p.random.randbytes(6) + struct.pack("<I", p.number(24))[:3] * 3 + b"\0" + frame())
    body = p.join(
        lambda: chunk(p, b"VP8X", bytes([p.number(8), 0, 0, 0]) + struct.pack("<I", p.side() & 0xFFFFFF)[:3] * 2),
        lambda: chunk(p, b"ANIM", p.data(7)),
        lambda: anim * p.times(),
        frame,
        lambda: chunk(p, p.pick(b"EXIF", b"XMP ", b"ICCP", b"ALPH"), tiff(p) if p.flag(0.3) else p.data(300)),
    )
    return riff(p, b"WEBP", body)


def aiff(p: Pieces) -> bytes:
    rate = p.pick(b"\x40\x0e\xac\x44" + bytes(6), p.random.randbytes(10), bytes(10))
    parts = [(b"COMM", p.big(16) + p.big(32) + p.big(16) + rate), (b"SSND", p.big(32) + p.big(32) + p.data(200))]
    body = b"".join(
        kind + struct.pack(">I", p.size(len(data), 32)) + data for kind, data in parts * max(1, p.times() % 5)
    )
    return b"FORM" + struct.pack(">I", p.size(len(body) + 4, 32)) + p.pick(b"AIFF", b"AIFC") + body
