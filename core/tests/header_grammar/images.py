"""PNG, JPEG, GIF, bitmaps, icons, TIFF, PPM."""

from __future__ import annotations

import struct
import zlib

from header_grammar.pieces import Pieces


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

    def entry() -> bytes:
        sizes = p.size(len(inner), 32), p.size(start, 32)
        return struct.pack("<BBBBHHII", p.number(8), p.number(8), 0, 0, 1, 32, *sizes)

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
