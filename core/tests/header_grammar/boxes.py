"""ISO base media: MP4, QuickTime, HEIF, AVIF, JP2."""

from __future__ import annotations

import struct

from header_grammar.pieces import Pieces


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
    markers = b"".join(
        b"\xff" + bytes([p.pick(0x52, 0x5C, 0x64, 0x53)]) + struct.pack(">H", p.number(8) + 2) + p.data()
        for _ in range(p.times())
    )
    start = struct.pack(">HIBB", p.number(16), p.number(32), p.number(8), p.number(8))
    return (
        b"\xff\x4f\xff\x51"
        + struct.pack(">H", p.size(len(size) + 2, 16))
        + size
        + markers
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
