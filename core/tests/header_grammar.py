"""Files of every container that is opened, built from random pieces with hostile numbers. Imports neither torch nor a plugin.

`python header_grammar.py FIRST LAST` works on the files of these seeds, and prints a line of JSON before and after each.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mm_plugin.errors import RequestError
from mm_plugin.items import Modality
from mm_plugin.media import Sampling, VideoSize
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.settings import Settings

# Small decoded sizes, so that what a header costs stands out; all counts that headers claim are at their defaults.
SETTINGS = Settings(max_image_pixels=1 << 22, max_audio_seconds=60.0, max_media_bytes=1 << 22)
MOST_FRAMES = 4
Build = Callable[["Pieces"], bytes]


class Pieces:
    """Random numbers and bytes of one file, which is more or less hostile: the deeper a piece lies, the fewer faults may precede it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.level = self.random.choice([0.0, 0.01, 0.03, 0.1])

    def number(self, bits: int) -> int:
        """A whole number of so many bits: small, at an edge, or any."""
        chance = self.random.random()
        if chance < 0.45 or not self.flag(0.1 + 6 * self.level):
            return self.random.randrange(17)
        if chance < 0.7:
            edge = 1 << self.random.randrange(bits)
            return min((1 << bits) - 1, max(0, edge + self.random.randrange(-1, 2)))
        if chance < 0.85:
            return (1 << bits) - 1 - self.random.randrange(3)
        return self.random.randrange(1 << bits)

    def size(self, true: int, bits: int) -> int:
        """The size that a piece says it has: the true one, mostly."""
        return self.number(bits) if self.flag(self.level) else true

    def side(self) -> int:
        if not self.flag(0.1 + 3 * self.level):
            return self.random.choice([16, 64])
        return self.random.choice([0, 1, 2, 7, 1000, 4096, 65535, (1 << 31) - 1])

    def data(self, most: int = 64) -> bytes:
        return self.random.randbytes(self.random.randrange(max(1, most)))

    def flag(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def times(self) -> int:
        return self.random.choice([0, 1, 1, 1, 2, 3, 8, 200 if self.flag(0.1) else 4])

    def big(self, bits: int) -> bytes:
        return self.number(bits).to_bytes(bits // 8, "big")

    def little(self, bits: int) -> bytes:
        return self.number(bits).to_bytes(bits // 8, "little")

    def join(self, *makers: Callable[[], bytes]) -> bytes:
        """Pieces in order, in which some are missing, repeated, or out of place."""
        parts = [made() for made in makers]
        if self.flag(2 * self.level):
            self.random.shuffle(parts)
        if self.flag(2 * self.level):
            parts += [self.random.choice(parts)] * self.times()
        return b"".join(part for part in parts if not self.flag(self.level / 2))


# ------------------------------------------------------------------ ISO base media: MP4, QuickTime, HEIF, AVIF, JP2


def box(p: Pieces, kind: bytes, body: bytes) -> bytes:
    if p.flag(p.level):
        return struct.pack(">I4sQ", 1, kind, p.size(len(body) + 16, 64)) + body
    return struct.pack(">I4s", p.size(len(body) + 8, 32), kind) + body


def full(p: Pieces, kind: bytes, body: bytes) -> bytes:
    return box(p, kind, bytes([p.number(2)]) + p.big(24) + body)


def table(p: Pieces, kind: bytes, width: int) -> bytes:
    """A table that says how many entries it has."""
    count = p.times() if p.flag(0.9) else 2000
    rows = b"".join(p.big(32) if p.flag(0.7) else p.random.randbytes(4) for _ in range(count * width // 4))
    return full(p, kind, struct.pack(">I", p.size(count, 32)) + rows)


def sample_entry(p: Pieces) -> bytes:
    kind = p.pick(
        b"avc1",
        b"hev1",
        b"av01",
        b"vp09",
        b"mp4v",
        b"mp4a",
        b"Opus",
        b"sowt",
        b"jpeg",
        b"raw ",
        b"encv",
        p.data(5)[:4].ljust(4),
    )
    inner = box(p, p.pick(b"avcC", b"hvcC", b"esds", b"av1C", b"dOps", b"sinf", b"pasp", b"clap"), p.data())
    if kind in (b"mp4a", b"Opus", b"sowt"):
        return box(p, kind, bytes(6) + p.big(16) + bytes(8) + p.big(16) + p.big(16) + bytes(4) + p.big(32) + inner)
    visual = bytes(6) + p.big(16) + bytes(16) + struct.pack(">HH", p.side() & 0xFFFF, p.side() & 0xFFFF)
    return box(
        p,
        kind,
        visual + struct.pack(">IIIH", 0x480000, 0x480000, 0, 1) + bytes(32) + struct.pack(">Hh", 24, -1) + inner,
    )


def sample_tables(p: Pieces) -> bytes:
    sizes = full(
        p, b"stsz", p.big(32) + struct.pack(">I", p.size(2, 32)) + struct.pack(">II", p.number(32), p.number(16))
    )
    return box(
        p,
        b"stbl",
        p.join(
            lambda: full(p, b"stsd", struct.pack(">I", p.size(1, 32)) + sample_entry(p)),
            lambda: table(p, b"stts", 8),
            lambda: table(p, b"stsc", 12),
            lambda: sizes,
            lambda: table(p, p.pick(b"stco", b"co64"), 8),
            lambda: table(p, b"ctts", 8),
            lambda: table(p, b"stss", 4),
            lambda: table(p, p.pick(b"sbgp", b"sgpd", b"saiz", b"saio", b"sdtp"), 8),
        ),
    )


def track(p: Pieces) -> bytes:
    handler = p.pick(b"vide", b"soun", b"vide", b"soun", b"pict", b"text", b"meta")
    header = full(p, p.pick(b"vmhd", b"smhd"), bytes(8))
    media = p.join(
        lambda: full(p, b"mdhd", p.big(32) + p.big(32) + p.big(32) + p.big(32) + p.big(32)),
        lambda: full(p, b"hdlr", bytes(4) + handler + bytes(12) + p.data(8)),
        lambda: box(
            p, b"minf", p.join(lambda: header, lambda: box(p, b"dinf", table(p, b"dref", 12)), lambda: sample_tables(p))
        ),
    )
    return box(
        p,
        b"trak",
        p.join(
            lambda: full(p, b"tkhd", b"".join(p.big(32) for _ in range(20))),
            lambda: box(p, b"edts", table(p, b"elst", 12)),
            lambda: box(p, b"mdia", media),
            lambda: box(p, b"tref", p.data()),
        ),
    )


def movie(p: Pieces) -> bytes:
    tracks = [lambda: track(p) for _ in range(max(1, p.times() % 60))]
    return box(
        p,
        b"moov",
        p.join(
            lambda: full(p, b"mvhd", b"".join(p.big(32) for _ in range(24))),
            *tracks,
            lambda: box(p, b"mvex", full(p, b"trex", b"".join(p.big(32) for _ in range(5)))),
            lambda: box(p, b"udta", item_meta(p) if p.flag(0.3) else p.data()),
        ),
    )


def fragment(p: Pieces) -> bytes:
    run = full(p, b"trun", struct.pack(">I", p.number(32)) + b"".join(p.big(32) for _ in range(p.times())))
    head = full(p, b"tfhd", b"".join(p.big(32) for _ in range(4)))
    return box(p, b"moof", full(p, b"mfhd", p.big(32)) + box(p, b"traf", head + run * max(1, p.times() % 20)))


def mp4(p: Pieces) -> bytes:
    brand = p.pick(b"isom", b"mp42", b"qt  ", b"3gp4", b"M4A ", b"dash", b"heic", b"avif")
    return p.join(
        lambda: box(p, b"ftyp", brand + p.big(32) + brand * p.times()),
        lambda: movie(p),
        lambda: b"".join(fragment(p) for _ in range(p.times() % 9)),
        lambda: box(p, b"sidx", p.data(200)),
        lambda: box(p, b"mdat", p.data(500)),
    )


def item_meta(p: Pieces) -> bytes:
    items = p.pick(1, 2, 3, 300)
    version, sizes = p.pick(0, 1, 2), p.pick(0x44, 0x88, 0x48, 0x00, p.number(8))
    wide = (sizes >> 4) // 4 * 4 or 4
    places = b"".join(
        struct.pack(">HHH", number, 0, p.size(1, 16)) + p.number(8 * wide).to_bytes(wide, "big") * 2
        for number in range(1, items + 1)
    )
    infos = b"".join(
        full(p, b"infe", struct.pack(">HH4sB", number, 0, p.pick(b"hvc1", b"av01", b"grid", b"Exif"), 0))
        for number in range(items)
    )
    size = full(p, b"ispe", struct.pack(">II", p.side(), p.side()))
    shown = box(
        p,
        b"ipco",
        size * max(1, p.times() % 30) + box(p, p.pick(b"hvcC", b"av1C", b"irot", b"pixi", b"clap"), p.data()),
    )
    bound = full(
        p, b"ipma", struct.pack(">I", p.size(items, 32)) + b"".join(struct.pack(">HBB", n, 1, 1) for n in range(items))
    )
    location = bytes([version, 0, 0, 0, sizes & 0xFF, p.number(8)]) + struct.pack(">H", p.size(items, 16)) + places
    return full(
        p,
        b"meta",
        p.join(
            lambda: full(p, b"hdlr", bytes(4) + b"pict" + bytes(13)),
            lambda: full(p, b"pitm", p.big(16)),
            lambda: box(p, b"iloc", location),
            lambda: full(p, b"iinf", p.size(items, 16 if version == 0 else 32).to_bytes(4, "big")[-2:] + infos),
            lambda: box(p, b"iprp", shown + bound),
            lambda: full(p, b"iref", box(p, b"dimg", struct.pack(">HH", 1, p.number(16)) + p.data())),
        ),
    )


def heif(p: Pieces) -> bytes:
    brand = p.pick(b"heic", b"avif", b"mif1", b"msf1", b"avis", b"heix")
    return p.join(
        lambda: box(p, b"ftyp", brand + bytes(4) + brand), lambda: item_meta(p), lambda: box(p, b"mdat", p.data(300))
    )


def codestream(p: Pieces) -> bytes:
    parts = p.pick(1, 3, 4, p.number(14))
    size = struct.pack(">HIIIIIIII", 0, p.side(), p.side(), p.number(8), 0, p.side(), p.side(), 0, 0)
    size += struct.pack(">H", parts) + b"".join(
        bytes([p.pick(7, 15, p.number(8)), 1, 1]) for _ in range(min(parts, 200))
    )
    marks = b"".join(
        b"\xff" + bytes([p.pick(0x52, 0x5C, 0x64, 0x53)]) + struct.pack(">H", p.number(8) + 2) + p.data()
        for _ in range(p.times())
    )
    start = struct.pack(">HIBB", p.number(16), p.number(32), p.number(8), p.number(8))
    return (
        b"\xff\x4f\xff\x51"
        + struct.pack(">H", p.size(len(size) + 2, 16))
        + size
        + marks
        + b"\xff\x90"
        + struct.pack(">H", 10)
        + start
        + b"\xff\x93"
        + p.data()
        + b"\xff\xd9"
    )


def jp2(p: Pieces) -> bytes:
    if p.flag(0.3):
        return codestream(p)
    header = full(p, b"ihdr", b"")[:8] + struct.pack(
        ">IIHBBBB", p.side(), p.side(), p.pick(1, 3, p.number(16)), 7, 7, 0, 0
    )
    inside = p.join(
        lambda: header,
        lambda: box(p, b"colr", struct.pack(">BBBI", 1, 0, 0, 16)),
        lambda: box(p, p.pick(b"pclr", b"cmap", b"cdef", b"res "), p.data()),
    )
    return p.join(
        lambda: struct.pack(">I4sI", 12, b"jP  ", 0x0D0A870A),
        lambda: box(p, b"ftyp", b"jp2 \0\0\0\0jp2 "),
        lambda: box(p, b"jp2h", inside),
        lambda: box(p, p.pick(b"xml ", b"uuid", b"uinf"), p.data()) * max(1, p.times()),
        lambda: box(p, b"jp2c", codestream(p)),
    )


# ------------------------------------------------------------------ Matroska


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


# ------------------------------------------------------------------ Ogg, FLAC, MPEG audio, FLV, MPEG streams


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
        packet = lambda: (
            b"\x47" + p.pick(b"\x40\x00\x10", b"\x41\x00\x30", p.random.randbytes(3)) + p.random.randbytes(184)
        )
        return b"".join(packet() for _ in range(5 + p.times()))
    units = b"".join(
        b"\0\0\1" + bytes([p.pick(0xBA, 0xBB, 0xE0, 0xC0, 0xB3, 0xBC)]) + p.big(16) + p.data(80)
        for _ in range(p.times() * 3)
    )
    return b"\0\0\1\xba" + p.random.randbytes(10) + units


# ------------------------------------------------------------------ images


def png(p: Pieces) -> bytes:
    def part(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body) if not p.flag(p.level) else p.number(32)
        return struct.pack(">I", p.size(len(body), 32)) + kind + body + struct.pack(">I", check)

    width, height = p.side(), p.side()
    head = struct.pack(
        ">IIBBBBB",
        width,
        height,
        p.pick(1, 2, 4, 8, 16, p.number(8)),
        p.pick(0, 2, 3, 4, 6, p.number(8)),
        0,
        0,
        p.pick(0, 1, p.number(8)),
    )
    pixels = zlib.compress(bytes(p.pick(10, 4000, 100_000)))
    bomb = zlib.compress(bytes(p.pick(10, 8_000_000)))
    texts = p.pick(b"zTXt", b"iCCP", b"tEXt", b"iTXt")
    return b"\x89PNG\r\n\x1a\n" + p.join(
        lambda: part(b"IHDR", head),
        lambda: part(b"PLTE", p.data(800)),
        lambda: part(texts, b"a\0\0" + bomb) * max(1, p.times() % 20),
        lambda: part(p.pick(b"tRNS", b"gAMA", b"sRGB", b"pHYs", b"cICP"), p.data(20)) * p.times(),
        lambda: part(b"eXIf", tiff(p)),
        lambda: part(b"acTL", p.big(32) + p.big(32)),
        lambda: part(b"fcTL", b"".join(p.big(32) for _ in range(6)) + p.data(3)),
        lambda: part(b"IDAT", pixels) * max(1, p.times()),
        lambda: part(b"IEND", b""),
    )


def jpeg(p: Pieces) -> bytes:
    def mark(number: int, body: bytes) -> bytes:
        return b"\xff" * max(1, p.times() % 50) + bytes([number]) + struct.pack(">H", p.size(len(body) + 2, 16)) + body

    parts = p.pick(1, 3, 4, p.number(8))
    frame = struct.pack(">BHHB", p.pick(8, 12, p.number(8)), p.side() & 0xFFFF, p.side() & 0xFFFF, parts)
    frame += b"".join(bytes([n & 0xFF, p.pick(0x11, 0x22, 0x41, p.number(8)), 0]) for n in range(parts))
    scan = bytes([parts & 0xFF]) + b"".join(bytes([n & 0xFF, 0]) for n in range(parts)) + b"\0\x3f\0"
    return (
        b"\xff\xd8"
        + p.join(
            lambda: mark(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
            lambda: mark(0xE1, b"Exif\0\0" + tiff(p)),
            lambda: (
                mark(
                    p.pick(0xE2, 0xED, 0xEE, 0xFE),
                    p.pick(b"ICC_PROFILE\0\1\xff", b"MPF\0", b"Photoshop 3.0\0", b"") + p.data(300),
                )
                * max(1, p.times())
            ),
            lambda: mark(0xDB, b"\0" + bytes(range(1, 65))),
            lambda: mark(p.pick(0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA), frame),
            lambda: mark(0xC4, b"\0" + bytes([0, 1] + [0] * 14) + b"\5"),
            lambda: mark(0xDD, p.big(16)),
            lambda: mark(0xDA, scan) + p.data(300),
        )
        + p.pick(b"\xff\xd9", b"")
    )


def gif(p: Pieces) -> bytes:
    def blocks() -> bytes:
        return b"".join(bytes([len(part)]) + part for part in (p.data(60) for _ in range(p.times()))) + p.pick(
            b"\0", b"\0", b""
        )

    def image() -> bytes:
        sides = struct.pack("<HHHH", p.number(16), p.number(16), p.side() & 0xFFFF, p.side() & 0xFFFF)
        return b"\x2c" + sides + bytes([p.number(8)]) + bytes([p.pick(2, 8, p.number(8))]) + blocks()

    def extension() -> bytes:
        return b"\x21" + bytes([p.pick(0xF9, 0xFE, 0xFF, 0x01, p.number(8))]) + blocks()

    screen = struct.pack(
        "<HHBBB", p.side() & 0xFFFF, p.side() & 0xFFFF, p.pick(0x80, 0, 0xF7, p.number(8)), p.number(8), 0
    )
    return (
        p.pick(b"GIF89a", b"GIF87a")
        + screen
        + p.data(800)
        + b"".join(p.pick(image, extension)() for _ in range(p.times() * 2))
        + b"\x3b"
    )


def bitmap_header(p: Pieces) -> bytes:
    size = p.pick(12, 40, 40, 40, 52, 56, 64, 108, 124, p.number(32))
    if size == 12:
        return struct.pack("<IHHHH", 12, p.side() & 0xFFFF, p.side() & 0xFFFF, 1, p.pick(1, 4, 8, 24))
    rest = struct.pack(
        "<HHIIiiII",
        1,
        p.pick(1, 4, 8, 16, 24, 32, p.number(16)),
        p.pick(0, 1, 2, 3, 4, 5, p.number(32)),
        p.number(32),
        0,
        0,
        p.number(32),
        p.number(32),
    )
    height = p.side() * p.pick(1, 1, -1)
    return (
        struct.pack("<Iii", size, p.side() % (1 << 31), max(-(1 << 31), min((1 << 31) - 1, height)))
        + rest
        + p.data(min(size, 130))
    )


def bmp(p: Pieces) -> bytes:
    body = bitmap_header(p) + p.data(900)
    return b"BM" + struct.pack("<IHHI", p.size(len(body) + 14, 32), 0, 0, p.size(54, 32)) + body


def ico(p: Pieces) -> bytes:
    count = p.pick(1, 2, 5, 300)
    inner = p.pick(png(p), bitmap_header(p) + p.data(300))
    start = 6 + 16 * count
    entry = lambda: struct.pack(
        "<BBBBHHII", p.number(8), p.number(8), 0, 0, 1, 32, p.size(len(inner), 32), p.size(start, 32)
    )
    return struct.pack("<HHH", 0, p.pick(1, 1, 2), p.size(count, 16)) + b"".join(entry() for _ in range(count)) + inner


def tiff(p: Pieces) -> bytes:
    order, is_large = p.pick("<", ">"), p.flag(0.2)
    head = (b"II" if order == "<" else b"MM") + (
        struct.pack(order + "HHHQ", 43, 8, 0, 16) if is_large else struct.pack(order + "HI", 42, 8)
    )
    entry, word = ("HHQQ", "Q") if is_large else ("HHII", "I")
    bits = 64 if is_large else 32
    tags = [
        256,
        257,
        258,
        259,
        262,
        273,
        277,
        278,
        279,
        274,
        284,
        320,
        322,
        323,
        324,
        325,
        330,
        338,
        339,
        34665,
        34675,
        700,
        p.number(16),
    ]
    usual = {
        256: p.side(),
        257: p.side(),
        259: p.pick(1, 5, 7, 8, 32773, 34712, 50001),
        262: p.pick(0, 1, 2, 3, 5, 6),
        277: p.pick(1, 3, 4, p.number(16)),
        278: p.number(16),
        322: 16 * p.number(8),
        323: 16 * p.number(8),
    }

    def directory(following: int) -> bytes:
        chosen = sorted(p.random.sample(tags, p.random.randrange(4, len(tags))))
        rows = [
            struct.pack(
                order + entry,
                tag & 0xFFFF,
                p.pick(3, 4, 4, 16 if is_large else 1, p.number(16)),
                p.size(1, bits),
                usual.get(tag, p.number(bits)) & ((1 << bits) - 1),
            )
            for tag in chosen
        ]
        return (
            struct.pack(order + ("Q" if is_large else "H"), p.size(len(rows), 64 if is_large else 16))
            + b"".join(rows)
            + struct.pack(order + word, following)
        )

    body = b""
    for _ in range(max(1, p.times())):
        here = len(head) + len(body)
        body += directory(p.pick(0, 8, here, here + 300, p.number(bits)))
    return head + body + p.data(600)


def ppm(p: Pieces) -> bytes:
    words = [str(p.side()), str(p.side()), str(p.pick(1, 255, 65535, p.number(32)))]
    gap = p.pick(b" ", b"\n", b"\n# comment\n" * 1, b" " * 3000, b"#\n" * 500)
    return (
        p.pick(b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"Pf")
        + gap
        + gap.join(word.encode() for word in words)
        + b"\n"
        + p.data(400)
    )  # type: ignore[no-any-return]


BUILDERS: dict[str, Build] = {
    "mp4": mp4, "heif": heif, "jp2": jp2, "matroska": matroska, "wav": wav, "avi": avi, "webp": webp, "aiff": aiff, "ogg": ogg,
    "flac": flac, "mpeg audio": mpeg_audio, "flv": flv, "mpeg streams": mpeg_streams, "png": png, "jpeg": jpeg, "gif": gif, "bmp": bmp,
    "ico": ico, "tiff": tiff, "ppm": ppm,
}  # fmt: skip


def build(seed: int) -> tuple[str, bytes]:
    """The container of a seed, and its file."""
    p = Pieces(seed)
    name = list(BUILDERS)[seed % len(BUILDERS)]
    data = BUILDERS[name](p)
    if p.flag(2 * p.level):
        data = data[: p.random.randrange(len(data) + 1)]
    return name, data[: SETTINGS.max_media_bytes]


# ------------------------------------------------------------------ what becomes of them


class Rules:
    """A few frames of a video, and a usual rate of audio."""

    def sample(self, size: VideoSize) -> Sampling:
        chosen = np.unique(np.linspace(0, size.frames - 1, MOST_FRAMES).astype(np.int64))
        return Sampling(chosen, chosen / max(size.fps, 1e-6), 1.0)

    def sampling_rate(self) -> int:
        return 16_000


def serve(data: bytes, modality: Modality) -> str:
    """Open, measure and decode a file: `decoded`, or the reason why not."""
    try:
        source = MEDIA_KINDS[modality].open(data, path="media", settings=SETTINGS)
        decoded = source.decode(source.size(Rules()))
        if modality is Modality.VIDEO:
            for _ in decoded.frames:
                pass
    except RequestError as error:
        str(error).encode()
        return str(getattr(error, "reason", None) or getattr(error, "setting", None) or error.code)
    return "decoded"


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """A figure of this process, bytes: `VmHWM` is the peak since the last reset, `VmRSS` what is there now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for seed in range(first, last):
        name, data = build(seed)
        for modality in Modality:
            fact: dict[str, Any] = {"seed": seed, "container": name, "bytes": len(data), "modality": modality.name}
            print(json.dumps(fact), flush=True)
            reset_peak()
            before, began = memory("VmRSS"), time.process_time()
            try:
                fact["end"] = serve(data, modality)
            except BaseException as error:
                fact["wrong"] = f"{type(error).__name__}: {str(error)[:200]}"
            fact["seconds"] = round(time.process_time() - began, 3)
            fact["peak"] = memory("VmHWM") - before
            print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
