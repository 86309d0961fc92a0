"""Odd TIFF, BMP, ICO, Netpbm, JPEG 2000 and AVIF files that are read. Refuses none."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from mm_plugin.testing.corpus.entries import CorpusEntry, shows
from mm_plugin.testing.corpus.formats import (
    bmp,
    bmp_rows,
    exif,
    icon,
    icon_bitmap,
    png,
    tiff,
)
from mm_plugin.testing.corpus.image_content import (
    BITS,
    BLOCKS,
    EXTRA,
    FINE,
    FORMAT,
    GRAY,
    HEIGHT,
    KIND,
    LOSSY,
    MAP,
    PACKING,
    ROWS,
    SAMPLES,
    SEEN,
    TILE_HEIGHT,
    TILE_WIDTH,
    TURN,
    WHITE,
    WIDTH,
    gray_to_rgb,
    head_only,
    over_white,
    printed_inks,
    refuses_image,
    saved,
    to_inks,
)


def tiff_tags(pixels: np.ndarray) -> dict[int, Any]:
    """The tags of a plain TIFF."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    return {
        WIDTH: width,
        HEIGHT: height,
        BITS: [8 * pixels.itemsize] * channels,
        PACKING: 1,
        KIND: 1 if channels == 1 else 2,
        SAMPLES: channels,
        ROWS: height,
    }


def tiff_entries() -> Iterator[CorpusEntry]:
    """Entries: tiff."""
    plain = tiff_tags(FINE)
    yield shows("tiff/little-endian", tiff(FINE.tobytes(), plain), FINE)
    yield shows("tiff/big-endian", tiff(FINE.tobytes(), plain, order=">"), FINE)
    for orientation, seen in SEEN.items():
        yield shows(f"tiff/orientation {orientation}", tiff(FINE.tobytes(), {**plain, TURN: orientation}), seen(FINE))
    other = (255 - FINE).tobytes()
    yield shows("tiff/two pages", tiff(FINE.tobytes(), plain, pages=[(other, plain)]), FINE)
    strips = [FINE[row : row + 5].tobytes() for row in range(0, 16, 5)]
    yield shows("tiff/strips", tiff(strips, {**plain, ROWS: 5}), FINE)
    padded = np.zeros((16, 32, 3), np.uint8)
    padded[:, :24] = FINE
    tiles = {**{tag: value for tag, value in plain.items() if tag != ROWS}, TILE_WIDTH: 16, TILE_HEIGHT: 16}
    pieces = [np.ascontiguousarray(padded[:, left : left + 16]).tobytes() for left in (0, 16)]
    yield shows("tiff/tiles", tiff(pieces, tiles), FINE)
    packed = [zlib.compress(piece) for piece in pieces]
    yield shows("tiff/tiles, deflated", tiff(packed, {**tiles, PACKING: 8}), FINE)
    for packing in ("tiff_lzw", "packbits", "tiff_adobe_deflate"):
        yield shows(f"tiff/{packing.removeprefix('tiff_')}", saved(FINE, "TIFF", compression=packing), FINE)
    yield shows(
        "tiff/JPEG inside", saved(BLOCKS, "TIFF", compression="jpeg", quality=95), BLOCKS, 70, "chroma is halved"
    )
    wide = (np.arange(10 * 7) * 947 % 65536).astype(np.uint16).reshape(10, 7)
    narrow = gray_to_rgb(np.rint(wide / 257).astype(np.uint8))
    for order, name in (("<", "little"), (">", "big")):
        data = tiff(wide.astype(f"{order}u2").tobytes(), tiff_tags(wide), order=order)
        yield shows(f"tiff/gray of 16 bits, {name}-endian", data, narrow)
        data = tiff(wide.astype(f"{order}u2").tobytes(), {**tiff_tags(wide), TURN: 6}, order=order)
        yield shows(f"tiff/gray of 16 bits, {name}-endian, turned", data, SEEN[6](narrow))
    deep = (np.arange(10 * 7 * 3) * 1543 % 65536).astype(np.uint16).reshape(10, 7, 3)
    data = tiff(deep.astype("<u2").tobytes(), tiff_tags(deep))
    yield shows("tiff/RGB of 16 bits", data, np.rint(deep / 257).astype(np.uint8), 1, "Pillow keeps the upper byte")
    yield shows("tiff/gray", tiff(GRAY.tobytes(), tiff_tags(GRAY)), gray_to_rgb(GRAY))
    yield shows("tiff/gray, 0 is white", tiff(GRAY.tobytes(), {**tiff_tags(GRAY), KIND: 0}), gray_to_rgb(255 - GRAY))
    bilevel = (np.arange(9 * 13) % 3 == 0).reshape(9, 13)
    data = tiff(np.packbits(bilevel, axis=1).tobytes(), {**tiff_tags(bilevel), BITS: 1})
    yield shows("tiff/one bit", data, gray_to_rgb((bilevel * 255).astype(np.uint8)))
    table = (np.arange(3 * 256) * 29 % 256).astype(np.uint8)  # all reds, then greens, then blues
    colors = table.reshape(3, 256).T
    data = tiff(GRAY.tobytes(), {**tiff_tags(GRAY), KIND: 3, MAP: [int(level) * 257 for level in table]})
    yield shows("tiff/palette", data, colors[GRAY])
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    data = tiff(sheer.tobytes(), {**tiff_tags(sheer), EXTRA: 2})
    yield shows("tiff/RGBA", data, over_white(FINE, alpha), 1)
    mixed = np.rint(FINE * (alpha[:, :, None] / 255)).astype(np.uint8)
    sheer = np.dstack([mixed, alpha])
    front = mixed + (255.0 - alpha[:, :, None])
    data = tiff(sheer.tobytes(), {**tiff_tags(sheer), EXTRA: 1})
    yield shows("tiff/RGBA, multiplied before", data, np.minimum(255, front).astype(np.uint8), 2)
    inks = np.array(to_inks(FINE))
    yield shows("tiff/CMYK", tiff(inks.tobytes(), {**tiff_tags(inks), KIND: 5}), printed_inks(FINE), 2)
    levels = np.linspace(0, 1, 70, dtype=np.float32).reshape(10, 7)
    data = tiff(levels.tobytes(), {**tiff_tags(levels), FORMAT: 3})
    yield refuses_image("tiff/floats", data, "mode", note="floats have no scale by which to show them")
    long = (np.arange(70, dtype=np.uint32) * 50_000_000).reshape(10, 7)
    yield refuses_image(
        "tiff/gray of 32 bits", tiff(long.tobytes(), {**tiff_tags(long), FORMAT: 2}), "mode", "broken", "format"
    )
    yield refuses_image("tiff/pixels beyond its end", tiff(FINE.tobytes()[:99], plain), "broken")
    yield refuses_image("tiff/directory beyond its end", b"II*\0\xff\xff\xff\x7f" + b"\0" * 40, "broken", "format")
    yield refuses_image("tiff/without tags", b"II*\0\x08\0\0\0\0\0\0\0\0\0", "broken", "format")
    yield refuses_image("tiff/width 0", tiff(FINE.tobytes(), {**plain, WIDTH: 0}), "broken", "format", "empty")


def bmp_entries() -> Iterator[CorpusEntry]:
    """Entries: bmp."""
    mirror = FINE[:, :, ::-1]  # blue, green, red
    write = functools.partial(bmp, height=16, width=24)
    yield shows("bmp/24 bits", write(bmp_rows(mirror), bits=24), FINE)
    yield shows("bmp/24 bits, from the top down", bmp(bmp_rows(mirror[::-1]), bits=24, height=-16, width=24), FINE)
    odd = mirror[:7, :5]
    yield shows("bmp/24 bits, odd width", bmp(bmp_rows(odd), bits=24, height=7, width=5), FINE[:7, :5])
    rest = np.dstack([mirror, np.zeros((16, 24), np.uint8)])
    yield shows("bmp/32 bits, the fourth unused", write(bmp_rows(rest), bits=32), FINE)
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    sheer = write(bmp_rows(np.dstack([mirror, alpha])), bits=32, compression=3, head=108, masks=masks)
    yield shows("bmp/32 bits with alpha", sheer, over_white(FINE, alpha), 1)
    palette = np.arange(256, dtype=np.uint8)
    shades = np.stack([palette, 255 - palette, palette // 2, palette * 0], axis=1)
    seen = shades[:, [2, 1, 0]]
    paint = GRAY.astype(np.uint8)
    yield shows("bmp/palette", write(bmp_rows(paint[:, :, None]), bits=8, palette=shades.tobytes()), seen[paint])
    bilevel = (np.arange(9 * 13) % 3 == 0).reshape(9, 13)
    two = bytes([1, 2, 3, 0, 250, 251, 252, 0])
    data = bmp(bmp_rows(np.packbits(bilevel, axis=1)[:, :, None]), bits=1, palette=two, height=9, width=13)
    yield shows("bmp/one bit", data, np.where(bilevel[:, :, None], [252, 251, 250], [3, 2, 1]).astype(np.uint8))
    flat = np.repeat(np.arange(6, dtype=np.uint8) * 40, 4).reshape(1, 24).repeat(16, axis=0)
    run = b"".join(bytes([4, level]) for level in flat[0, ::4]) + b"\0\0"
    data = write(run * 16 + b"\0\x01", bits=8, compression=1, palette=shades.tobytes())
    yield shows("bmp/run lengths", data, seen[flat])
    half = np.repeat(np.arange(6, dtype=np.uint8), 4).reshape(1, 24).repeat(16, axis=0)
    run = b"".join(bytes([4, level * 17]) for level in half[0, ::4]) + b"\0\0"
    data = write(run * 16 + b"\0\x01", bits=4, compression=2, palette=shades.tobytes()[:64])
    yield shows("bmp/run lengths of 4 bits", data, seen[half])
    fives = FINE >> 3
    words = (fives[:, :, 0].astype("<u2") << 10) | (fives[:, :, 1].astype("<u2") << 5) | fives[:, :, 2]
    yield shows(
        "bmp/16 bits", write(words[::-1].astype("<u2").tobytes(), bits=16),
        np.rint(fives * (255 / 31)).astype(np.uint8), 1,
    )  # fmt: skip
    yield shows("bmp/of OS/2", write(bmp_rows(mirror), bits=24, head=12), FINE)
    yield refuses_image("bmp/cut", write(bmp_rows(mirror), bits=24)[:-300], "broken")
    yield refuses_image("bmp/width 0", bmp(b"", bits=24, height=16, width=0), "broken", "empty", "format")
    yield refuses_image(
        "bmp/negative width",
        bmp(bmp_rows(mirror), bits=24, height=16, width=-24),
        "broken",
        "empty",
        "max_image_pixels",
    )


def icon_entries() -> Iterator[CorpusEntry]:
    """Entries: icon."""
    square = FINE[:16, :16]
    alpha = (np.arange(256) * 3 % 256).astype(np.uint8).reshape(16, 16)
    sheer = over_white(square, alpha)
    yield shows("ico/PNG inside", icon([(16, 16, png(np.dstack([square, alpha])))]), sheer, 1)
    mask = (np.arange(256) % 5 == 0).reshape(16, 16)
    masked = square.copy()
    masked[mask] = WHITE
    yield shows("ico/bitmap inside", icon([(16, 16, icon_bitmap(square, mask))]), masked)
    small = icon_bitmap(square[:8, :8], np.zeros((8, 8), bool))
    yield shows("ico/two sizes, the largest", icon([(8, 8, small), (16, 16, icon_bitmap(square, mask))]), masked)
    yield refuses_image("ico/without images", icon([]), "broken", "format")
    yield refuses_image("ico/images beyond its end", icon([(16, 16, b"")]), "broken", "format")
    yield refuses_image(
        "ico/thousands of images declared", icon([])[:4] + b"\xff\xff" + b"\0" * 64, "broken", "format", "empty"
    )
    big = head_only(30_000, 30_000)
    yield refuses_image("ico/PNG inside that claims 30000 x 30000", icon([(16, 16, big)]), "max_image_pixels")
    wide = struct.pack("<IiiHHIIiiII", 40, 30_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    yield refuses_image("ico/bitmap inside that claims 30000 x 30000", icon([(16, 16, wide)]), "max_image_pixels")


def netpbm_entries() -> Iterator[CorpusEntry]:
    """Entries: netpbm."""
    yield shows("ppm/8 bits", b"P6 24 16 255\n" + FINE.tobytes(), FINE)
    wide = (np.arange(10 * 7 * 3) * 1543 % 65536).reshape(10, 7, 3)
    narrow = np.rint(wide / 257).astype(np.uint8)
    yield shows("ppm/16 bits", b"P6 7 10 65535\n" + wide.astype(">u2").tobytes(), narrow, 1)
    yield shows("pgm/8 bits", b"P5 24 16 255\n" + GRAY.tobytes(), gray_to_rgb(GRAY))
    yield shows(
        "pgm/16 bits", b"P5 7 10 65535\n" + wide[:, :, 0].astype(">u2").tobytes(), gray_to_rgb(narrow[:, :, 0]), 1
    )
    ten = np.arange(70).reshape(10, 7) * 14 % 1001
    data = b"P5 7 10 1000\n" + ten.astype(">u2").tobytes()
    yield shows("pgm/levels up to 1000", data, gray_to_rgb(np.rint(ten * 255 / 1000).astype(np.uint8)), 1)
    yield shows(
        "pgm/as text, with comments",
        b"P2 # a comment\n3 1\n15\n0 5 15\n",
        gray_to_rgb(np.array([[0, 85, 255]], np.uint8)),
    )
    bilevel = (np.arange(9 * 13) % 3 == 0).reshape(9, 13)
    shown = gray_to_rgb(np.where(bilevel, 0, 255).astype(np.uint8))
    yield shows("pbm/one bit", b"P4 13 9\n" + np.packbits(bilevel, axis=1).tobytes(), shown)
    yield refuses_image("pfm/floats", b"Pf 2 1 -1.0\n" + struct.pack("<2f", 0.5, 1.0), "mode", "format")
    yield refuses_image("ppm/cut", b"P6 24 16 255\n" + FINE.tobytes()[:-9], "broken")


def jpeg2000_entries() -> Iterator[CorpusEntry]:
    """Entries: jpeg2000."""
    wide = (np.arange(10 * 7) * 1543 * 3 % 65536).reshape(10, 7)
    narrow = np.rint(wide / 257).astype(np.uint8)
    yield shows("jpeg2000/lossless", saved(FINE, "JPEG2000", irreversible=False), FINE)
    yield shows("jpeg2000/bare codestream", saved(FINE, "JPEG2000", irreversible=False, no_jp2=True), FINE)
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    yield shows("jpeg2000/transparent", saved(sheer, "JPEG2000", irreversible=False), over_white(FINE, alpha), 1)
    deep = Image.frombytes("I;16", (7, 10), wide.astype("<u2").tobytes())
    yield shows("jpeg2000/gray of 16 bits", saved(deep, "JPEG2000", irreversible=False), gray_to_rgb(narrow))
    yield refuses_image("jpeg2000/cut", saved(FINE, "JPEG2000", irreversible=False)[:-400], "broken")
    limit = "max_image_pixels"
    j2k = saved(FINE, "JPEG2000", irreversible=False)
    size = j2k.index(b"\xff\x4f\xff\x51") + 8  # width, height, offsets, tile width, tile height
    large = j2k[:size] + struct.pack(">6I", 60_000, 60_000, 0, 0, 60_000, 60_000) + j2k[size + 24 :]
    yield refuses_image("bomb/jpeg2000 whose codestream is larger than its header", large, limit)
    head = j2k.index(b"ihdr") + 4
    yield refuses_image("bomb/jpeg2000", j2k[:head] + struct.pack(">2I", 60_000, 60_000) + j2k[head + 8 :], limit)
    j2k = saved(FINE, "JPEG2000", irreversible=False, no_jp2=True)
    size = j2k.index(b"\xff\x4f\xff\x51") + 8
    many = j2k[:size] + struct.pack(">8I", 255, 255, 0, 0, 1, 1, 0, 0) + j2k[size + 32 :]
    yield refuses_image("bomb/jpeg2000 of 65025 tiles", many, "broken", note="a decoder keeps kilobytes for each")


def avif_entries() -> Iterator[CorpusEntry]:
    """Entries: avif."""
    avif = {"quality": 100, "subsampling": "4:4:4", "speed": 10, "max_threads": 1}
    yield shows("avif/nearly lossless", saved(BLOCKS, "AVIF", **avif), BLOCKS, LOSSY)
    flat = np.dstack([BLOCKS, np.full((16, 24), 255, np.uint8)])
    flat[:, :8, 3] = 0
    yield shows("avif/transparent", saved(flat, "AVIF", **avif), over_white(BLOCKS, flat[:, :, 3]), LOSSY)
    for orientation in (3, 5, 6, 8):
        turned = saved(BLOCKS, "AVIF", exif=b"Exif\0\0" + exif(orientation), **avif)
        yield shows(f"avif/orientation {orientation}", turned, SEEN[orientation](BLOCKS), LOSSY)
    frames = [Image.fromarray(255 - BLOCKS)]
    moving = _timeless(saved(Image.fromarray(BLOCKS), "AVIF", save_all=True, append_images=frames, duration=50, **avif))
    yield shows("avif/animated, the first frame", moving, BLOCKS, LOSSY)
    yield refuses_image("avif/cut", saved(BLOCKS, "AVIF", **avif)[:-100], "broken", "format")
    limit = "max_image_pixels"
    yield refuses_image("bomb/avif whose image is larger than its header", _small_head(), limit)
    plain = saved(BLOCKS, "AVIF", speed=10, max_threads=1)
    ispe = plain.index(b"ispe") + 8
    yield refuses_image(
        "bomb/avif", plain[:ispe] + struct.pack(">2I", 16_000, 16_000) + plain[ispe + 8 :], limit, "broken"
    )


def _timeless(data: bytes) -> bytes:
    """A movie without the times at which it and its tracks were made and changed."""
    for kind in (b"mvhd", b"tkhd", b"mdhd"):
        at = data.find(kind)
        while at >= 0:
            size = 16 if data[at + 4] else 8  # by the box's version
            data = data[: at + 8] + bytes(size) + data[at + 8 + size :]
            at = data.find(kind, at + 4)
    return data


def _small_head() -> bytes:
    """An AVIF of 9500 x 9500 whose header says 16 x 24. Source: AV1 specification, section 5.5.1."""
    avif = saved(BLOCKS, "AVIF", speed=10, max_threads=1)
    ispe = avif.index(b"ispe") + 8
    avif = avif[:ispe] + struct.pack(">2I", 24, 16) + avif[ispe + 8 :]
    at = avif.index(b"mdat") + 6  # after a temporal delimiter: the sequence header's kind and length
    length = avif[at + 1]
    # Profile 0, a still image, a short header, level 0, then 16 bits of each side minus 1.
    bits = f"000{1}{1}00000{15:04b}{15:04b}{9499:016b}{9499:016b}".ljust(8 * length, "0")
    return avif[: at + 2] + int(bits, 2).to_bytes(length, "big") + avif[at + 2 + length :]
