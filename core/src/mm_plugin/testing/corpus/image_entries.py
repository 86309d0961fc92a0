"""Odd images: every format and mode that people send, what breaks elsewhere, and what must be refused."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, features

from mm_plugin.items import Modality
from mm_plugin.testing.corpus.entries import CorpusEntry, refuses, shows
from mm_plugin.testing.corpus.formats import (
    PNG,
    apng,
    bmp,
    bmp_rows,
    box,
    chunk,
    exif,
    gif,
    icon,
    icon_bitmap,
    noise,
    png,
    tiff,
    wav,
    with_segment,
)

WHITE = np.full(3, 255, dtype=np.uint8)
# 16 x 24 pixels, each of another color: for formats that keep every level.
FINE = (np.arange(16 * 24 * 3) * 37 % 251).astype(np.uint8).reshape(16, 24, 3)
# Two rows and three columns of flat squares, 8 pixels wide as the blocks of JPEG: for formats that keep levels nearly.
_COLORS = np.array(
    [[[200, 60, 60], [60, 180, 60], [60, 60, 200]], [[190, 190, 60], [120, 120, 120], [235, 235, 235]]], np.uint8
)
BLOCKS = _COLORS.repeat(8, axis=0).repeat(8, axis=1)
GRAY = (np.arange(16 * 24) * 7 % 256).astype(np.uint8).reshape(16, 24)
_LOSSY = 4  # levels

# How a viewer shows what is stored, by Exif orientation. Source: Exif 2.3, section 4.6.4, tag 274.
SEEN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}
_refuses = functools.partial(refuses, Modality.IMAGE)


def images() -> Iterator[CorpusEntry]:
    """Every odd image, equal bytes each time; formats are left out whose libraries Pillow was built without."""
    always = (_jpeg, _png, _png_odd, _gif, _bmp, _icon, _netpbm, _pil, _arrays, _broken, _bombs, _foreign)
    optional = {"webp": (_webp, _webp_bombs), "libtiff": (_tiff,), "jpg_2000": (_jpeg2000,), "avif": (_avif,)}
    for family in always:
        yield from family()
    for feature, families in optional.items():
        if features.check(feature):
            for family in families:
                yield from family()


def _saved(pixels: np.ndarray | Image.Image, format: str, **options: Any) -> bytes:
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _rgb(gray: np.ndarray) -> np.ndarray:
    return np.repeat(gray[:, :, None], 3, axis=2)


def _over_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """RGB levels before a white background, alpha [height, width] of 0 to 255."""
    share = alpha[:, :, None].astype(np.float64) / 255
    return np.rint(pixels * share + 255 * (1 - share)).astype(np.uint8)


def _inks(pixels: np.ndarray) -> Image.Image:
    """RGB as cyan, magenta, yellow and a black of 40."""
    # (255 - ink) * (255 - black) / 255 is the light that is left
    light = np.minimum(255, np.rint(pixels.astype(np.float64) * 255 / 215))
    planes = np.concatenate([255 - light, np.full((*pixels.shape[:2], 1), 40)], axis=2).astype(np.uint8)
    return Image.frombytes("CMYK", (pixels.shape[1], pixels.shape[0]), planes.tobytes())


def _printed(pixels: np.ndarray) -> np.ndarray:
    """What `_inks` shows: brighter than 215 is impossible under that much black."""
    found: np.ndarray = np.minimum(np.uint8(215), pixels)
    return found


def _ycc(pixels: np.ndarray) -> np.ndarray:
    """JFIF's luma and chroma of RGB. Source: JFIF 1.02, page 3."""
    red, green, blue = np.moveaxis(pixels.astype(np.float64), -1, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    found: np.ndarray = np.rint(np.stack([luma, 128 + (blue - luma) / 1.772, 128 + (red - luma) / 1.402], axis=-1))
    return found


# ---------------------------------------------------------------- JPEG

_APP0, _APP1, _APP14, _COMMENT = 0xE0, 0xE1, 0xEE, 0xFE


def _jpg(pixels: np.ndarray | Image.Image = BLOCKS, **options: Any) -> bytes:
    return _saved(pixels, "JPEG", **{"quality": 95, "subsampling": 0, **options})


def _turned(orientation: int, **options: Any) -> bytes:
    return with_segment(_jpg(), _APP1, b"Exif\0\0" + exif(orientation, **options))


def _jpeg() -> Iterator[CorpusEntry]:
    plain = _jpg()
    for orientation, seen in SEEN.items():
        yield shows(f"jpeg/orientation {orientation}", _turned(orientation), seen(BLOCKS), _LOSSY)
    yield shows("jpeg/orientation 6 in big-endian Exif", _turned(6, order=">"), SEEN[6](BLOCKS), _LOSSY)
    yield shows("jpeg/orientation 6 as a long", _turned(6, kind=4), SEEN[6](BLOCKS), _LOSSY)
    yield shows(
        "jpeg/thumbnail of another orientation", _turned(6, thumbnail=3), SEEN[6](BLOCKS), _LOSSY, "only IFD0 counts"
    )
    for orientation in (0, 9, 65535):
        yield shows(f"jpeg/orientation {orientation}, which is invalid", _turned(orientation), BLOCKS, _LOSSY)
    for name, block in {
        "empty": b"",
        "cut": exif(6)[:11],
        "garbage": b"garbage garbage garbage",
        "pointing outside": b"II*\0\xff\xff\xff\x7f",
        "pointing at itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    }.items():
        yield shows(f"jpeg/broken Exif, {name}", with_segment(plain, _APP1, b"Exif\0\0" + block), BLOCKS, _LOSSY)
    yield shows("jpeg/gray", _jpg(BLOCKS[:, :, 0]), _rgb(BLOCKS[:, :, 0]), _LOSSY)
    yield shows("jpeg/progressive", _jpg(progressive=True), BLOCKS, _LOSSY)
    yield shows("jpeg/optimized, with restarts", _jpg(optimize=True, restart_marker_blocks=1), BLOCKS, _LOSSY)
    wide = np.full((15, 33, 3), (90, 140, 200), np.uint8)
    yield shows("jpeg/odd sides, chroma halved", _jpg(wide, subsampling=2), wide, _LOSSY)
    one = np.full((1, 1, 3), 77, np.uint8)
    yield shows("jpeg/one pixel", _jpg(one), one, _LOSSY)
    yield shows("jpeg/stored as RGB", _jpg(keep_rgb=True), BLOCKS, _LOSSY, "three components without luma")
    inverted = _jpg(_inks(BLOCKS))
    yield shows("jpeg/CMYK, inverted as Adobe does", inverted, _printed(BLOCKS), _LOSSY + 2)
    at = inverted.index(b"\xff\xee")
    length = 2 + int.from_bytes(inverted[at + 2 : at + 4], "big")
    yield shows(
        "jpeg/CMYK without Adobe's segment", inverted[:at] + inverted[at + length :], _printed(BLOCKS), _LOSSY + 2,
        "programs that write no segment invert all the same, and every viewer takes it so",
    )  # fmt: skip
    # Adobe's transform 2 says that the first three of four components are luma and chroma.
    ycck = np.concatenate([255 - _ycc(255 - BLOCKS), np.zeros((16, 24, 1))], axis=2).astype(np.uint8)
    stored = _jpg(Image.frombytes("CMYK", (24, 16), ycck.tobytes()))
    last = stored.index(b"\xff\xee") + 15  # of the segment: the transform
    yield shows("jpeg/YCCK", stored[:last] + b"\x02" + stored[last + 1 :], BLOCKS, _LOSSY + 2)
    other = Image.fromarray(255 - BLOCKS)
    album = _saved(Image.fromarray(BLOCKS), "MPO", quality=95, subsampling=0, save_all=True, append_images=[other])
    yield shows("jpeg/MPO, the first of two", album, BLOCKS, _LOSSY)
    yield shows("jpeg/something after its end", plain + b"PK\x03\x04" + noise(500, 1), BLOCKS, _LOSSY)
    yield shows("jpeg/two, one after the other", plain + _jpg(255 - BLOCKS), BLOCKS, _LOSSY)
    yield shows("jpeg/comment of 60,000 bytes", with_segment(plain, _COMMENT, b"x" * 60_000), BLOCKS, _LOSSY)
    head = plain.index(b"\xff\xc0") + 5  # height and width
    gray = _jpg(np.full((16, 24, 3), 128, np.uint8))
    at = gray.index(b"\xff\xc0") + 5
    taller = gray[:at] + struct.pack(">H", 160) + gray[at + 2 :]
    filled = np.full((160, 24, 3), 128, np.uint8)
    yield shows("jpeg/header taller than its contents", taller, filled, 80, "gray or nearly, as every viewer fills it")
    yield _refuses("jpeg/12 bits", plain[: head - 1] + b"\x0c" + plain[head:], "broken", "format")
    yield _refuses("jpeg/height 0", plain[:head] + b"\0\0" + plain[head + 2 :], "broken", "format", "empty")


# ---------------------------------------------------------------- PNG


def _png() -> Iterator[CorpusEntry]:
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    steps = np.arange(16, dtype=np.uint8).reshape(1, 16, 1)
    palette = [level for place in range(16) for level in (place * 16, 255 - place * 16, 7)]
    table = np.array(palette, np.uint8).reshape(16, 3)
    for interlaced in (False, True):
        how = ", interlaced" if interlaced else ""
        make = functools.partial(png, interlaced=interlaced)
        yield shows(f"png/RGB{how}", make(FINE), FINE)
        yield shows(f"png/gray{how}", make(GRAY[:, :, None]), _rgb(GRAY))
        yield shows(
            f"png/RGBA{how}", make(np.dstack([FINE, alpha])), _over_white(FINE, alpha), 1, "colors below show through"
        )
        yield shows(f"png/LA{how}", make(np.dstack([GRAY, alpha])), _over_white(_rgb(GRAY), alpha), 1)
        for bits in (1, 2, 4):
            levels = (np.arange(9 * 13) % (1 << bits)).astype(np.uint8).reshape(9, 13, 1)
            full = _rgb((levels[:, :, 0] * (255 // ((1 << bits) - 1))).astype(np.uint8))
            yield shows(f"png/gray of {bits} bits{how}", make(levels, bits=bits), full)
            seen = full.copy()
            seen[levels[:, :, 0] == 1] = WHITE
            yield shows(
                f"png/gray of {bits} bits, level 1 transparent{how}",
                make(levels, bits=bits, transparent=struct.pack(">H", 1)), seen, encoded_only=bits > 1,
            )  # fmt: skip
            yield shows(
                f"png/palette of {bits} bits{how}",
                make(levels, bits=bits, palette=palette[: 3 << bits]), table[levels[:, :, 0]],
            )  # fmt: skip
        wide = (np.arange(10 * 7 * 3) * 1543 % 65536).reshape(10, 7, 3)
        narrow = np.rint(wide / 257).astype(np.uint8)
        yield shows(f"png/gray of 16 bits{how}", make(wide[:, :, :1], bits=16), _rgb(narrow[:, :, 0]))
        yield shows(f"png/RGB of 16 bits{how}", make(wide, bits=16), narrow, 1, "Pillow keeps the upper byte")
        yield shows(
            f"png/RGBA of 16 bits{how}", make(np.dstack([wide, wide[:, :, :1]]), bits=16),
            _over_white(narrow, narrow[:, :, 0]), 3,
        )  # fmt: skip
        yield shows(
            f"png/LA of 16 bits{how}", make(wide[:, :, :2], bits=16),
            _over_white(_rgb(narrow[:, :, 0]), narrow[:, :, 1]), 3,
        )  # fmt: skip
        seen = narrow.copy()
        seen[3, 4] = WHITE
        yield shows(
            f"png/RGB of 16 bits, one color transparent{how}",
            make(wide, bits=16, transparent=struct.pack(">3H", *(int(level) for level in wide[3, 4]))), seen, 1,
            encoded_only=True,
        )  # fmt: skip
        gray = _rgb(narrow[:, :, 0])
        gray[wide[:, :, 0] == wide[3, 4, 0]] = WHITE
        yield shows(
            f"png/gray of 16 bits, one level transparent{how}",
            make(wide[:, :, :1], bits=16, transparent=struct.pack(">H", int(wide[3, 4, 0]))), gray,
        )  # fmt: skip
    seen = FINE.copy()
    seen[(FINE[5, 6] == FINE).all(axis=2)] = WHITE
    yield shows(
        "png/RGB, one color transparent",
        png(FINE, transparent=struct.pack(">3H", *(int(level) for level in FINE[5, 6]))), seen,
    )  # fmt: skip
    gray = _rgb(GRAY)
    gray[GRAY == 7] = WHITE
    yield shows("png/gray, one level transparent", png(GRAY[:, :, None], transparent=b"\0\x07"), gray)
    see = np.array([0, 255, 128, *([255] * 13)], np.uint8)
    yield shows(
        "png/palette with a table of alpha", png(steps, palette=palette, transparent=bytes(see)),
        _over_white(table[steps[:, :, 0]], see[steps[:, :, 0]]), 1,
    )  # fmt: skip
    hidden = table[steps[:, :, 0]].copy()
    hidden[0, 0] = WHITE
    yield shows("png/palette with a short table of alpha", png(steps, palette=palette, transparent=b"\0"), hidden)


def _png_odd() -> Iterator[CorpusEntry]:
    first, second = FINE, 255 - FINE
    yield shows("png/animated, the first frame", apng([first, second]), first)
    yield shows(
        "png/animated, with an image of its own", apng([second, second], default=first), first,
        note="what is shown where no animation is known",
    )  # fmt: skip
    turn = exif(6)
    yield shows("png/Exif before the pixels", png(FINE, early=chunk(b"eXIf", turn)), SEEN[6](FINE))
    yield shows("png/Exif after the pixels", png(FINE, late=chunk(b"eXIf", turn)), SEEN[6](FINE))
    sheer = np.dstack([FINE, np.zeros((16, 24), np.uint8)])
    sheer[:8, :, 3] = 255
    yield shows(
        "png/turned and transparent", png(sheer, early=chunk(b"eXIf", turn)), SEEN[6](_over_white(FINE, sheer[:, :, 3]))
    )
    for height, width in ((1, 1), (1, 300), (300, 1)):
        line = np.arange(height * width * 3).astype(np.uint8).reshape(height, width, 3)
        yield shows(f"png/{height} x {width}", png(line), line)
    small = (np.arange(3 * 3 * 3) * 9).astype(np.uint8).reshape(3, 3, 3)
    yield shows("png/3 x 3, interlaced", png(small, interlaced=True), small, note="some passes are empty")
    gamma = chunk(b"gAMA", struct.pack(">I", 100_000)) + chunk(b"pHYs", struct.pack(">2IB", 1, 2, 0))
    yield shows("png/gamma and unequal sides of a pixel", png(FINE, early=gamma), FINE, note="levels are as stored")
    yield shows("png/something after its end", png(FINE) + noise(300, 2), FINE)
    yield shows("png/a chunk that nobody knows", png(FINE, early=chunk(b"zoOo", b"x" * 99)), FINE)
    raw = png(FINE)
    at = raw.index(b"IDAT")
    length = int.from_bytes(raw[at - 4 : at], "big")
    body = raw[at + 4 : at + 4 + length]
    parts = b"".join(chunk(b"IDAT", body[place : place + 7]) for place in range(0, length, 7))
    yield shows("png/pixels in many chunks", raw[: at - 4] + parts + raw[at + 8 + length :], FINE)
    yield shows("png/header shorter than its contents", png(FINE, size=(9, 24)), FINE[:9])
    padded = np.concatenate([FINE, np.zeros((984, 24, 3), np.uint8)])[:999]
    yield shows(
        "png/header taller than its contents", png(FINE, size=(999, 24)), padded, note="dark, as Pillow fills it"
    )
    yield _refuses("png/height 0", png(FINE, size=(0, 24)), "broken", "empty", "format")
    yield _refuses("png/without its header", PNG + raw[33:], "broken", "format")
    yield _refuses("png/header with a wrong checksum", raw[:29] + b"\0\0\0\0" + raw[33:], "broken", "format")
    yield _refuses("png/palette missing", png(GRAY[:, :, None]).replace(_ihdr(0), _ihdr(3)), "broken", "format")
    bomb = zlib.compress(b"\0" * 30_000_000, 1)
    yield _refuses(
        "png/text that unpacks to 30 MB", png(FINE, early=chunk(b"zTXt", b"a\0\0" + bomb)), "broken", "format"
    )
    yield _refuses(
        "png/color profile that unpacks to 30 MB", png(FINE, early=chunk(b"iCCP", b"a\0\0" + bomb)), "broken"
    )


def _ihdr(color: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">2I5B", 24, 16, 8, color, 0, 0, 0))


# ---------------------------------------------------------------- GIF and WebP


def _gif() -> Iterator[CorpusEntry]:
    palette = [level for place in range(128) for level in (place * 2, 255 - place, place)]
    table = np.array(palette, np.uint8).reshape(128, 3)
    indices = (np.arange(16 * 24) * 5 % 128).reshape(16, 24)
    size = (16, 24)
    plain = table[indices]
    yield shows("gif/plain", gif([(0, 0, indices)], palette, size=size), plain)
    yield shows("gif/of 1987", gif([(0, 0, indices)], palette, size=size, version=b"87a"), plain)
    yield shows("gif/interlaced", gif([(0, 0, indices)], palette, size=size, interlaced=True), plain)
    yield shows("gif/palette of its frame", gif([(0, 0, indices)], palette[::-1], size=size, local=palette), plain)
    hidden = plain.copy()
    hidden[indices == 5] = WHITE
    yield shows("gif/transparent", gif([(0, 0, indices)], palette, size=size, transparent=5), hidden)
    two = [(0, 0, indices), (0, 0, (indices + 1) % 128)]
    yield shows("gif/animated, the first frame", gif(two, palette, size=size), plain)
    yield shows("gif/animated and transparent", gif(two, palette, size=size, transparent=5), hidden)
    inner = np.full((16, 24, 3), 255, np.uint8)
    inner[4:12, 6:18] = hidden[:8, :12]
    yield shows(
        "gif/transparent frame within its screen",
        gif([(4, 6, indices[:8, :12])], palette, size=size, transparent=5), inner,
    )  # fmt: skip
    whole = gif([(0, 0, indices)], palette, size=size)
    yield shows("gif/without its end", whole[:-1], plain)
    yield shows("gif/something after its end", whole + b"PK\x03\x04" * 9, plain)
    yield shows("gif/comments", whole[:397] + b"\x21\xfe\x05hello\0" * 20 + whole[397:], plain)
    yield _refuses("gif/without frames", gif([], palette, size=size), "broken", "format")
    yield _refuses("gif/cut", whole[:-120], "broken")
    yield _refuses(
        "gif/screen of no size", gif([(0, 0, indices)], palette, size=(0, 0))[:397], "broken", "format", "empty"
    )


def _webp() -> Iterator[CorpusEntry]:
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    exact = {"lossless": True, "exact": True}
    yield shows("webp/lossless", _saved(FINE, "WEBP", **exact), FINE)
    flat = np.full((16, 24, 3), (90, 140, 200), np.uint8)
    yield shows("webp/lossy, flat", _saved(flat, "WEBP", quality=95), flat, _LOSSY)
    yield shows("webp/transparent", _saved(sheer, "WEBP", **exact), _over_white(FINE, alpha), 1)
    for orientation in (3, 6):
        turned = _saved(FINE, "WEBP", exif=b"Exif\0\0" + exif(orientation), **exact)
        yield shows(f"webp/orientation {orientation}", turned, SEEN[orientation](FINE))
    frames = [Image.fromarray(255 - FINE)]
    moving = _saved(Image.fromarray(FINE), "WEBP", save_all=True, append_images=frames, duration=50, **exact)
    yield shows("webp/animated, the first frame", moving, FINE)
    frames = [Image.fromarray(np.dstack([255 - FINE, alpha]))]
    moving = _saved(Image.fromarray(sheer), "WEBP", save_all=True, append_images=frames, duration=50, **exact)
    yield shows("webp/animated and transparent", moving, _over_white(FINE, alpha), 1)
    yield _refuses("webp/cut", _saved(FINE, "WEBP", **exact)[:120], "broken", "format")


# ---------------------------------------------------------------- TIFF

_WIDTH, _HEIGHT, _BITS, _PACKING, _KIND, _TURN, _SAMPLES, _ROWS = 256, 257, 258, 259, 262, 274, 277, 278
_TILE_WIDTH, _TILE_HEIGHT, _EXTRA, _FORMAT, _MAP = 322, 323, 338, 339, 320


def _tags(pixels: np.ndarray) -> dict[int, Any]:
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    return {
        _WIDTH: width,
        _HEIGHT: height,
        _BITS: [8 * pixels.itemsize] * channels,
        _PACKING: 1,
        _KIND: 1 if channels == 1 else 2,
        _SAMPLES: channels,
        _ROWS: height,
    }


def _tiff() -> Iterator[CorpusEntry]:
    plain = _tags(FINE)
    yield shows("tiff/little-endian", tiff(FINE.tobytes(), plain), FINE)
    yield shows("tiff/big-endian", tiff(FINE.tobytes(), plain, order=">"), FINE)
    for orientation, seen in SEEN.items():
        yield shows(f"tiff/orientation {orientation}", tiff(FINE.tobytes(), {**plain, _TURN: orientation}), seen(FINE))
    other = (255 - FINE).tobytes()
    yield shows("tiff/two pages", tiff(FINE.tobytes(), plain, pages=[(other, plain)]), FINE)
    strips = [FINE[row : row + 5].tobytes() for row in range(0, 16, 5)]
    yield shows("tiff/strips", tiff(strips, {**plain, _ROWS: 5}), FINE)
    padded = np.zeros((16, 32, 3), np.uint8)
    padded[:, :24] = FINE
    tiles = {**{tag: value for tag, value in plain.items() if tag != _ROWS}, _TILE_WIDTH: 16, _TILE_HEIGHT: 16}
    pieces = [np.ascontiguousarray(padded[:, left : left + 16]).tobytes() for left in (0, 16)]
    yield shows("tiff/tiles", tiff(pieces, tiles), FINE)
    packed = [zlib.compress(piece) for piece in pieces]
    yield shows("tiff/tiles, deflated", tiff(packed, {**tiles, _PACKING: 8}), FINE)
    for packing in ("tiff_lzw", "packbits", "tiff_adobe_deflate"):
        yield shows(f"tiff/{packing.removeprefix('tiff_')}", _saved(FINE, "TIFF", compression=packing), FINE)
    yield shows(
        "tiff/JPEG inside", _saved(BLOCKS, "TIFF", compression="jpeg", quality=95), BLOCKS, 70, "chroma is halved"
    )
    wide = (np.arange(10 * 7) * 947 % 65536).astype(np.uint16).reshape(10, 7)
    narrow = _rgb(np.rint(wide / 257).astype(np.uint8))
    for order, name in (("<", "little"), (">", "big")):
        data = tiff(wide.astype(f"{order}u2").tobytes(), _tags(wide), order=order)
        yield shows(f"tiff/gray of 16 bits, {name}-endian", data, narrow)
        data = tiff(wide.astype(f"{order}u2").tobytes(), {**_tags(wide), _TURN: 6}, order=order)
        yield shows(f"tiff/gray of 16 bits, {name}-endian, turned", data, SEEN[6](narrow))
    deep = (np.arange(10 * 7 * 3) * 1543 % 65536).astype(np.uint16).reshape(10, 7, 3)
    data = tiff(deep.astype("<u2").tobytes(), _tags(deep))
    yield shows("tiff/RGB of 16 bits", data, np.rint(deep / 257).astype(np.uint8), 1, "Pillow keeps the upper byte")
    yield shows("tiff/gray", tiff(GRAY.tobytes(), _tags(GRAY)), _rgb(GRAY))
    yield shows("tiff/gray, 0 is white", tiff(GRAY.tobytes(), {**_tags(GRAY), _KIND: 0}), _rgb(255 - GRAY))
    bilevel = (np.arange(9 * 13) % 3 == 0).reshape(9, 13)
    data = tiff(np.packbits(bilevel, axis=1).tobytes(), {**_tags(bilevel), _BITS: 1})
    yield shows("tiff/one bit", data, _rgb((bilevel * 255).astype(np.uint8)))
    table = (np.arange(3 * 256) * 29 % 256).astype(np.uint8)  # all reds, then greens, then blues
    colors = table.reshape(3, 256).T
    data = tiff(GRAY.tobytes(), {**_tags(GRAY), _KIND: 3, _MAP: [int(level) * 257 for level in table]})
    yield shows("tiff/palette", data, colors[GRAY])
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    data = tiff(sheer.tobytes(), {**_tags(sheer), _EXTRA: 2})
    yield shows("tiff/RGBA", data, _over_white(FINE, alpha), 1)
    mixed = np.rint(FINE * (alpha[:, :, None] / 255)).astype(np.uint8)
    sheer = np.dstack([mixed, alpha])
    front = mixed + (255.0 - alpha[:, :, None])
    data = tiff(sheer.tobytes(), {**_tags(sheer), _EXTRA: 1})
    yield shows("tiff/RGBA, multiplied before", data, np.minimum(255, front).astype(np.uint8), 2)
    inks = np.array(_inks(FINE))
    yield shows("tiff/CMYK", tiff(inks.tobytes(), {**_tags(inks), _KIND: 5}), _printed(FINE), 2)
    levels = np.linspace(0, 1, 70, dtype=np.float32).reshape(10, 7)
    data = tiff(levels.tobytes(), {**_tags(levels), _FORMAT: 3})
    yield _refuses("tiff/floats", data, "mode", note="floats have no scale by which to show them")
    long = (np.arange(70, dtype=np.uint32) * 50_000_000).reshape(10, 7)
    yield _refuses(
        "tiff/gray of 32 bits", tiff(long.tobytes(), {**_tags(long), _FORMAT: 2}), "mode", "broken", "format"
    )
    yield _refuses("tiff/pixels beyond its end", tiff(FINE.tobytes()[:99], plain), "broken")
    yield _refuses("tiff/directory beyond its end", b"II*\0\xff\xff\xff\x7f" + b"\0" * 40, "broken", "format")
    yield _refuses("tiff/without tags", b"II*\0\x08\0\0\0\0\0\0\0\0\0", "broken", "format")
    yield _refuses("tiff/width 0", tiff(FINE.tobytes(), {**plain, _WIDTH: 0}), "broken", "format", "empty")


# ---------------------------------------------------------------- BMP and ICO


def _bmp() -> Iterator[CorpusEntry]:
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
    yield shows("bmp/32 bits with alpha", sheer, _over_white(FINE, alpha), 1)
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
    yield _refuses("bmp/cut", write(bmp_rows(mirror), bits=24)[:-300], "broken")
    yield _refuses("bmp/width 0", bmp(b"", bits=24, height=16, width=0), "broken", "empty", "format")
    yield _refuses(
        "bmp/negative width",
        bmp(bmp_rows(mirror), bits=24, height=16, width=-24),
        "broken",
        "empty",
        "max_image_pixels",
    )


def _icon() -> Iterator[CorpusEntry]:
    square = FINE[:16, :16]
    alpha = (np.arange(256) * 3 % 256).astype(np.uint8).reshape(16, 16)
    sheer = _over_white(square, alpha)
    yield shows("ico/PNG inside", icon([(16, 16, png(np.dstack([square, alpha])))]), sheer, 1)
    mask = (np.arange(256) % 5 == 0).reshape(16, 16)
    masked = square.copy()
    masked[mask] = WHITE
    yield shows("ico/bitmap inside", icon([(16, 16, icon_bitmap(square, mask))]), masked)
    small = icon_bitmap(square[:8, :8], np.zeros((8, 8), bool))
    yield shows("ico/two sizes, the largest", icon([(8, 8, small), (16, 16, icon_bitmap(square, mask))]), masked)
    yield _refuses("ico/without images", icon([]), "broken", "format")
    yield _refuses("ico/images beyond its end", icon([(16, 16, b"")]), "broken", "format")
    yield _refuses(
        "ico/thousands of images declared", icon([])[:4] + b"\xff\xff" + b"\0" * 64, "broken", "format", "empty"
    )
    big = _head_only(30_000, 30_000)
    yield _refuses("ico/PNG inside that claims 30000 x 30000", icon([(16, 16, big)]), "max_image_pixels")
    wide = struct.pack("<IiiHHIIiiII", 40, 30_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    yield _refuses("ico/bitmap inside that claims 30000 x 30000", icon([(16, 16, wide)]), "max_image_pixels")


# ---------------------------------------------------------------- other formats


def _head_only(height: int, width: int) -> bytes:
    """A PNG of hardly any bytes that promises so many pixels."""
    return (
        PNG + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(b"\0"))
    )


def _netpbm() -> Iterator[CorpusEntry]:
    yield shows("ppm/8 bits", b"P6 24 16 255\n" + FINE.tobytes(), FINE)
    wide = (np.arange(10 * 7 * 3) * 1543 % 65536).reshape(10, 7, 3)
    narrow = np.rint(wide / 257).astype(np.uint8)
    yield shows("ppm/16 bits", b"P6 7 10 65535\n" + wide.astype(">u2").tobytes(), narrow, 1)
    yield shows("pgm/8 bits", b"P5 24 16 255\n" + GRAY.tobytes(), _rgb(GRAY))
    yield shows("pgm/16 bits", b"P5 7 10 65535\n" + wide[:, :, 0].astype(">u2").tobytes(), _rgb(narrow[:, :, 0]), 1)
    ten = np.arange(70).reshape(10, 7) * 14 % 1001
    data = b"P5 7 10 1000\n" + ten.astype(">u2").tobytes()
    yield shows("pgm/levels up to 1000", data, _rgb(np.rint(ten * 255 / 1000).astype(np.uint8)), 1)
    yield shows(
        "pgm/as text, with comments", b"P2 # a comment\n3 1\n15\n0 5 15\n", _rgb(np.array([[0, 85, 255]], np.uint8))
    )
    bilevel = (np.arange(9 * 13) % 3 == 0).reshape(9, 13)
    shown = _rgb(np.where(bilevel, 0, 255).astype(np.uint8))
    yield shows("pbm/one bit", b"P4 13 9\n" + np.packbits(bilevel, axis=1).tobytes(), shown)
    yield _refuses("pfm/floats", b"Pf 2 1 -1.0\n" + struct.pack("<2f", 0.5, 1.0), "mode", "format")
    yield _refuses("ppm/cut", b"P6 24 16 255\n" + FINE.tobytes()[:-9], "broken")


def _jpeg2000() -> Iterator[CorpusEntry]:
    wide = (np.arange(10 * 7) * 1543 * 3 % 65536).reshape(10, 7)
    narrow = np.rint(wide / 257).astype(np.uint8)
    yield shows("jpeg2000/lossless", _saved(FINE, "JPEG2000", irreversible=False), FINE)
    yield shows("jpeg2000/bare codestream", _saved(FINE, "JPEG2000", irreversible=False, no_jp2=True), FINE)
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    yield shows("jpeg2000/transparent", _saved(sheer, "JPEG2000", irreversible=False), _over_white(FINE, alpha), 1)
    deep = Image.frombytes("I;16", (7, 10), wide.astype("<u2").tobytes())
    yield shows("jpeg2000/gray of 16 bits", _saved(deep, "JPEG2000", irreversible=False), _rgb(narrow))
    yield _refuses("jpeg2000/cut", _saved(FINE, "JPEG2000", irreversible=False)[:-400], "broken")
    limit = "max_image_pixels"
    j2k = _saved(FINE, "JPEG2000", irreversible=False)
    size = j2k.index(b"\xff\x4f\xff\x51") + 8  # width, height, offsets, tile width, tile height
    large = j2k[:size] + struct.pack(">6I", 60_000, 60_000, 0, 0, 60_000, 60_000) + j2k[size + 24 :]
    yield _refuses("bomb/jpeg2000 whose codestream is larger than its header", large, limit)
    head = j2k.index(b"ihdr") + 4
    yield _refuses("bomb/jpeg2000", j2k[:head] + struct.pack(">2I", 60_000, 60_000) + j2k[head + 8 :], limit)
    j2k = _saved(FINE, "JPEG2000", irreversible=False, no_jp2=True)
    size = j2k.index(b"\xff\x4f\xff\x51") + 8
    many = j2k[:size] + struct.pack(">8I", 255, 255, 0, 0, 1, 1, 0, 0) + j2k[size + 32 :]
    yield _refuses("bomb/jpeg2000 of 65025 tiles", many, "broken", note="a decoder keeps kilobytes for each")


def _avif() -> Iterator[CorpusEntry]:
    avif = {"quality": 100, "subsampling": "4:4:4", "speed": 10, "max_threads": 1}
    yield shows("avif/nearly lossless", _saved(BLOCKS, "AVIF", **avif), BLOCKS, _LOSSY)
    flat = np.dstack([BLOCKS, np.full((16, 24), 255, np.uint8)])
    flat[:, :8, 3] = 0
    yield shows("avif/transparent", _saved(flat, "AVIF", **avif), _over_white(BLOCKS, flat[:, :, 3]), _LOSSY)
    for orientation in (3, 5, 6, 8):
        turned = _saved(BLOCKS, "AVIF", exif=b"Exif\0\0" + exif(orientation), **avif)
        yield shows(f"avif/orientation {orientation}", turned, SEEN[orientation](BLOCKS), _LOSSY)
    frames = [Image.fromarray(255 - BLOCKS)]
    moving = _timeless(
        _saved(Image.fromarray(BLOCKS), "AVIF", save_all=True, append_images=frames, duration=50, **avif)
    )
    yield shows("avif/animated, the first frame", moving, BLOCKS, _LOSSY)
    yield _refuses("avif/cut", _saved(BLOCKS, "AVIF", **avif)[:-100], "broken", "format")
    limit = "max_image_pixels"
    yield _refuses("bomb/avif whose image is larger than its header", _small_head(), limit)
    plain = _saved(BLOCKS, "AVIF", speed=10, max_threads=1)
    ispe = plain.index(b"ispe") + 8
    yield _refuses("bomb/avif", plain[:ispe] + struct.pack(">2I", 16_000, 16_000) + plain[ispe + 8 :], limit, "broken")


def _timeless(data: bytes) -> bytes:
    """A movie without the times at which it and its tracks were made and changed."""
    for kind in (b"mvhd", b"tkhd", b"mdhd"):
        at = data.find(kind)
        while at >= 0:
            size = 16 if data[at + 4] else 8  # by the box's version
            data = data[: at + 8] + bytes(size) + data[at + 8 + size :]
            at = data.find(kind, at + 4)
    return data


def _pil() -> Iterator[CorpusEntry]:
    image = Image.fromarray(FINE)
    yield shows("PIL/RGB", image, FINE)
    yield shows("PIL/L", Image.fromarray(GRAY), _rgb(GRAY))
    yield shows("PIL/1", Image.fromarray(GRAY > 99), _rgb(np.where(GRAY > 99, 255, 0).astype(np.uint8)))
    turned = Image.fromarray(FINE)
    turned.info["exif"] = b"Exif\0\0" + exif(6)
    yield shows("PIL/made here, with Exif", turned, SEEN[6](FINE))
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = Image.fromarray(np.dstack([FINE, alpha]))
    yield shows("PIL/RGBA", sheer, _over_white(FINE, alpha), 1)
    yield shows("PIL/RGBa", sheer.convert("RGBa"), _over_white(FINE, alpha), 2, "multiplied before")
    gray = Image.fromarray(np.dstack([GRAY, alpha]))
    yield shows("PIL/LA", gray, _over_white(_rgb(GRAY), alpha), 1)
    yield shows("PIL/CMYK", _inks(FINE), _printed(FINE), 2)
    ycc = Image.frombytes("YCbCr", (24, 16), _ycc(BLOCKS).astype(np.uint8).tobytes())
    yield shows("PIL/YCbCr", ycc, BLOCKS, 2)
    wide = (np.arange(10 * 7) * 947 % 65536).astype(np.uint16).reshape(10, 7)
    narrow = _rgb(np.rint(wide / 257).astype(np.uint8))
    for mode, kind in (("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")):
        yield shows(f"PIL/{mode}", Image.frombytes(mode, (7, 10), wide.astype(kind).tobytes()), narrow)
    yield _refuses("PIL/F", Image.new("F", (3, 2)), "mode")
    yield _refuses("PIL/I of 32 bits", Image.new("I", (3, 2), 70_000), "mode")
    yield _refuses("PIL/no pixels", Image.new("RGB", (0, 5)), "empty")
    yield _refuses("PIL/of a cut file", Image.open(io.BytesIO(_jpg(FINE)[:-128])), "broken")


def _arrays() -> Iterator[CorpusEntry]:
    yield shows("numpy/height, width, 3", FINE, FINE)
    yield shows("numpy/a mirrored view", FINE[:, ::-1], FINE[:, ::-1])
    yield shows("numpy/3 x 3 x 3", FINE[:3, :3], FINE[:3, :3], note="channels last, not guessed from the shape")
    yield shows("numpy/read only", np.frombuffer(FINE.tobytes(), np.uint8).reshape(FINE.shape), FINE)
    for name, array in {
        "channels first": np.ascontiguousarray(np.moveaxis(FINE, -1, 0)),
        "gray": GRAY,
        "RGBA": np.zeros((4, 4, 4), np.uint8),
        "floats": np.zeros((4, 4, 3), np.float32),
        "16 bits": np.zeros((4, 4, 3), np.uint16),
        "no pixels": np.zeros((0, 4, 3), np.uint8),
        "a batch": np.zeros((1, 4, 4, 3), np.uint8),
        "objects": np.full((4, 4, 3), None),
    }.items():
        yield _refuses(f"numpy/{name}", array, "array")
    try:
        import torch
    except ImportError:  # the corpus itself needs none
        return
    first = torch.from_numpy(FINE).permute(2, 0, 1)
    yield shows("torch/3, height, width", first, FINE)
    yield shows("torch/contiguous", first.contiguous(), FINE)
    for name, tensor in {
        "channels last": torch.from_numpy(FINE),
        "floats": first.float(),
        "sparse": first.float().to_sparse(),
        "no pixels": first[:, :0],
        "without memory": torch.empty((3, 5, 4), dtype=torch.uint8, device="meta"),
    }.items():
        yield _refuses(f"torch/{name}", tensor, "array")


# ---------------------------------------------------------------- what must be refused


def _broken() -> Iterator[CorpusEntry]:
    jpeg = _jpg(FINE)
    yield _refuses("broken/empty", b"", "empty")
    yield _refuses("broken/one byte", b"\xff", "format")
    yield _refuses("broken/random", noise(1000, 0), "format")
    yield _refuses("broken/zeros", bytes(5000), "format")
    yield _refuses("broken/jpeg without its last 128 bytes", jpeg[:-128], "broken")
    yield _refuses("broken/half a jpeg", jpeg[: len(jpeg) // 2], "broken", "format")
    yield _refuses("broken/head of a jpeg alone", jpeg[:4], "format", "broken")
    yield _refuses("broken/png without its last 40 bytes", png(FINE)[:-40], "broken")
    yield _refuses("broken/signature of a png alone", PNG, "format", "broken")
    text = "an ordinary sentence, longer than forty characters, and no path"
    yield _refuses("broken/text", text.encode(), "format")
    for name, value in {
        "None": None,
        "a number": 3,
        "a list of bytes": [jpeg],
        "a dict": {"image": jpeg},
        "an open file": io.BytesIO(jpeg),
        "a class": Image.Image,
    }.items():
        yield _refuses(f"type/{name}", value, "type")
    for name, url in {
        "no comma": "data:image/png",
        "no comma, base64": "data:image/png;base64",
        "cut base64": "data:image/png;base64,A",
        "no base64": "data:image/png;base64,!!!!",
        "of another scheme": "ftp://example.org/a.png",
        "a file of another machine": "file://elsewhere/a.png",
    }.items():
        yield _refuses(f"url/{name}", url, "url")
    yield _refuses("url/empty", "data:,", "empty")
    yield _refuses("path/missing", "there/is/no/such.png", "path")


def _bombs() -> Iterator[CorpusEntry]:
    limit = "max_image_pixels"
    yield _refuses("bomb/png of 30000 x 30000", _head_only(30_000, 30_000), limit)
    yield _refuses("bomb/png of the largest sides", _head_only(2**31 - 1, 2**31 - 1), limit, "broken")
    yield _refuses("bomb/png just over the limit", _head_only(10_000, 9_000), limit)
    packer = zlib.compressobj(1)
    flat = b"".join(packer.compress(bytes(3 * 12_000 + 1)) for _ in range(12_000)) + packer.flush()
    ihdr = chunk(b"IHDR", struct.pack(">2I5B", 12_000, 12_000, 8, 2, 0, 0, 0))
    yield _refuses(
        "bomb/png of 432 MB that is all there", PNG + ihdr + chunk(b"IDAT", flat) + chunk(b"IEND", b""), limit
    )
    jpeg = _jpg()
    at = jpeg.index(b"\xff\xc0") + 5
    yield _refuses("bomb/jpeg", jpeg[:at] + struct.pack(">2H", 65_500, 65_500) + jpeg[at + 4 :], limit)
    yield _refuses("bomb/gif", gif([(0, 0, np.zeros((1, 1), int))], [0] * 384, size=(65_535, 65_535)), limit)
    yield _refuses("bomb/gif whose frame is larger than its screen", _large_frame(), limit, "broken")
    yield _refuses("bomb/bmp", bmp(b"", height=2**30, width=2**30, bits=24), limit)
    lengths = bmp(b"\xff\0" * 9, height=30_000, width=30_000, bits=8, compression=1, palette=bytes(1024))
    yield _refuses("bomb/bmp of run lengths", lengths, limit)
    tags = {**_tags(FINE), _WIDTH: 100_000, _HEIGHT: 100_000}
    yield _refuses("bomb/tiff", tiff(b"", tags), limit)
    tiles = {**_tags(FINE), _TILE_WIDTH: 65_536, _TILE_HEIGHT: 65_536, _PACKING: 8}
    yield _refuses("bomb/tiff with a tile of 65536 x 65536", tiff(zlib.compress(bytes(999)), tiles), limit)
    tiles = {**tiles, _TILE_WIDTH: 16_384, _TILE_HEIGHT: 16_384}
    yield _refuses("bomb/tiff with a tile of 16384 x 16384", tiff(zlib.compress(bytes(999)), tiles), limit)
    yield _refuses("bomb/ppm", b"P6 100000 100000 255\n", limit)


def _webp_bombs() -> Iterator[CorpusEntry]:
    limit = "max_image_pixels"
    yield _refuses("bomb/webp whose canvas is 16384 x 16384", _large_canvas(16_384), limit)
    yield _refuses("bomb/webp whose canvas is 9500 x 9500", _large_canvas(9_500), limit)
    lossless = _saved(FINE, "WEBP", lossless=True)
    at = lossless.index(b"VP8L") + 9  # 14 bits of width - 1, as many of height - 1
    large = lossless[:at] + struct.pack("<I", 16_383 | 16_383 << 14 | 1 << 28) + lossless[at + 4 :]
    yield _refuses("bomb/webp of 16384 x 16384, lossless", large, limit)


def _large_frame() -> bytes:
    """A frame of 65535 x 65535 on a screen of 16 x 24."""
    plain = gif([(0, 0, np.zeros((1, 1), int))], [0] * 384, size=(16, 24))
    at = plain.index(b"\x2c", 397) + 5
    return plain[:at] + struct.pack("<2H", 65_535, 65_535) + plain[at + 4 :]


def _small_head() -> bytes:
    """An AVIF of 9500 x 9500 whose header says 16 x 24. Source: AV1 specification, section 5.5.1."""
    avif = _saved(BLOCKS, "AVIF", speed=10, max_threads=1)
    ispe = avif.index(b"ispe") + 8
    avif = avif[:ispe] + struct.pack(">2I", 24, 16) + avif[ispe + 8 :]
    at = avif.index(b"mdat") + 6  # after a temporal delimiter: the sequence header's kind and length
    length = avif[at + 1]
    # Profile 0, a still image, a short header, level 0, then 16 bits of each side minus 1.
    bits = f"000{1}{1}00000{15:04b}{15:04b}{9499:016b}{9499:016b}".ljust(8 * length, "0")
    return avif[: at + 2] + int(bits, 2).to_bytes(length, "big") + avif[at + 2 + length :]


def _large_canvas(side: int) -> bytes:
    frames = [Image.fromarray(255 - FINE)]
    moving = _saved(Image.fromarray(FINE), "WEBP", save_all=True, append_images=frames, duration=50, lossless=True)
    at = moving.index(b"VP8X") + 12  # 24 bits of width - 1, as many of height - 1
    claimed = (side - 1).to_bytes(3, "little")
    return moving[:at] + claimed + claimed + moving[at + 6 :]


def _foreign() -> Iterator[CorpusEntry]:
    heic = box(b"ftyp", b"heic\0\0\0\0mif1heic") + box(b"meta", bytes(40))
    yield _refuses("heic/no opener", heic, "format", note="the message names pillow-heif; with its opener it is read")
    yield _refuses("foreign/svg", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "format")
    yield _refuses(
        "foreign/html", b"<!doctype html><title>404</title>", "format", note="what servers send for a lost image"
    )
    yield _refuses("foreign/json", b'{"error": "not found"}', "format")
    yield _refuses("foreign/pdf", b"%PDF-1.7\n1 0 obj\n", "format")
    yield _refuses("foreign/zip", b"PK\x03\x04" + bytes(99), "format")
    yield _refuses("foreign/audio", wav(bytes(99), rate=8000), "format")
    yield _refuses("foreign/mp4", box(b"ftyp", b"isom\0\0\0\0isom") + box(b"mdat", bytes(99)), "format")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/etc/passwd) run\n"
    yield _refuses("foreign/eps", eps, "format", note="it would run a program")
    yield _refuses("foreign/icns", _saved(Image.new("RGB", (32, 32)), "ICNS"), "format", note="images within an image")
    yield _refuses("foreign/psd", b"8BPS\0\x01" + bytes(60), "format")
    yield _refuses("foreign/tga", _saved(FINE, "TGA"), "format")
    script = gif([(0, 0, np.zeros((2, 2), int))], [9] * 384, size=(2, 2)) + b"*/=1;alert(1)//"
    yield shows("polyglot/gif and script", script, np.full((2, 2, 3), 9, np.uint8))
    both = png(FINE, early=chunk(b"teXt", b"%PDF-1.7\n")) + b"PK\x05\x06" + bytes(18)
    yield shows("polyglot/png, pdf and zip", both, FINE)
