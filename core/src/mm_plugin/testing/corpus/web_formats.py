"""Odd JPEG, PNG, GIF and WebP files that are read. Refuses none."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from mm_plugin.testing.corpus.entries import CorpusEntry, shows
from mm_plugin.testing.corpus.formats import (
    PNG,
    apng,
    chunk,
    exif,
    gif,
    noise,
    png,
    with_segment,
)
from mm_plugin.testing.corpus.image_content import (
    APP1,
    BLOCKS,
    COMMENT,
    FINE,
    GRAY,
    LOSSY,
    SEEN,
    WHITE,
    gray_to_rgb,
    jpeg_bytes,
    over_white,
    printed_inks,
    refuses_image,
    saved,
    to_inks,
    to_ycc,
    turned,
)


def jpeg_entries() -> Iterator[CorpusEntry]:
    """Entries: jpeg."""
    plain = jpeg_bytes()
    for orientation, seen in SEEN.items():
        yield shows(f"jpeg/orientation {orientation}", turned(orientation), seen(BLOCKS), LOSSY)
    yield shows("jpeg/orientation 6 in big-endian Exif", turned(6, order=">"), SEEN[6](BLOCKS), LOSSY)
    yield shows("jpeg/orientation 6 as a long", turned(6, kind=4), SEEN[6](BLOCKS), LOSSY)
    yield shows(
        "jpeg/thumbnail of another orientation", turned(6, thumbnail=3), SEEN[6](BLOCKS), LOSSY, "only IFD0 counts"
    )
    for orientation in (0, 9, 65535):
        yield shows(f"jpeg/orientation {orientation}, which is invalid", turned(orientation), BLOCKS, LOSSY)
    for name, block in {
        "empty": b"",
        "cut": exif(6)[:11],
        "garbage": b"garbage garbage garbage",
        "pointing outside": b"II*\0\xff\xff\xff\x7f",
        "pointing at itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    }.items():
        yield shows(f"jpeg/broken Exif, {name}", with_segment(plain, APP1, b"Exif\0\0" + block), BLOCKS, LOSSY)
    yield shows("jpeg/gray", jpeg_bytes(BLOCKS[:, :, 0]), gray_to_rgb(BLOCKS[:, :, 0]), LOSSY)
    yield shows("jpeg/progressive", jpeg_bytes(progressive=True), BLOCKS, LOSSY)
    yield shows("jpeg/optimized, with restarts", jpeg_bytes(optimize=True, restart_marker_blocks=1), BLOCKS, LOSSY)
    wide = np.full((15, 33, 3), (90, 140, 200), np.uint8)
    yield shows("jpeg/odd sides, chroma halved", jpeg_bytes(wide, subsampling=2), wide, LOSSY)
    one = np.full((1, 1, 3), 77, np.uint8)
    yield shows("jpeg/one pixel", jpeg_bytes(one), one, LOSSY)
    yield shows("jpeg/stored as RGB", jpeg_bytes(keep_rgb=True), BLOCKS, LOSSY, "three components without luma")
    inverted = jpeg_bytes(to_inks(BLOCKS))
    yield shows("jpeg/CMYK, inverted as Adobe does", inverted, printed_inks(BLOCKS), LOSSY + 2)
    at = inverted.index(b"\xff\xee")
    length = 2 + int.from_bytes(inverted[at + 2 : at + 4], "big")
    yield shows(
        "jpeg/CMYK without Adobe's segment", inverted[:at] + inverted[at + length :], printed_inks(BLOCKS), LOSSY + 2,
        "programs that write no segment invert all the same, and every viewer takes it so",
    )  # fmt: skip
    # Adobe's transform 2 says that the first three of four components are luma and chroma.
    ycck = np.concatenate([255 - to_ycc(255 - BLOCKS), np.zeros((16, 24, 1))], axis=2).astype(np.uint8)
    stored = jpeg_bytes(Image.frombytes("CMYK", (24, 16), ycck.tobytes()))
    last = stored.index(b"\xff\xee") + 15  # of the segment: the transform
    yield shows("jpeg/YCCK", stored[:last] + b"\x02" + stored[last + 1 :], BLOCKS, LOSSY + 2)
    other = Image.fromarray(255 - BLOCKS)
    album = saved(Image.fromarray(BLOCKS), "MPO", quality=95, subsampling=0, save_all=True, append_images=[other])
    yield shows("jpeg/MPO, the first of two", album, BLOCKS, LOSSY)
    yield shows("jpeg/something after its end", plain + b"PK\x03\x04" + noise(500, 1), BLOCKS, LOSSY)
    yield shows("jpeg/two, one after the other", plain + jpeg_bytes(255 - BLOCKS), BLOCKS, LOSSY)
    yield shows("jpeg/comment of 60,000 bytes", with_segment(plain, COMMENT, b"x" * 60_000), BLOCKS, LOSSY)
    head = plain.index(b"\xff\xc0") + 5  # height and width
    gray = jpeg_bytes(np.full((16, 24, 3), 128, np.uint8))
    at = gray.index(b"\xff\xc0") + 5
    taller = gray[:at] + struct.pack(">H", 160) + gray[at + 2 :]
    filled = np.full((160, 24, 3), 128, np.uint8)
    yield shows("jpeg/header taller than its contents", taller, filled, 80, "gray or nearly, as every viewer fills it")
    yield refuses_image("jpeg/12 bits", plain[: head - 1] + b"\x0c" + plain[head:], "mode", "broken", "format")
    yield refuses_image("jpeg/height 0", plain[:head] + b"\0\0" + plain[head + 2 :], "broken", "format", "empty")


def png_entries() -> Iterator[CorpusEntry]:
    """Entries: png."""
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    steps = np.arange(16, dtype=np.uint8).reshape(1, 16, 1)
    palette = [level for place in range(16) for level in (place * 16, 255 - place * 16, 7)]
    table = np.array(palette, np.uint8).reshape(16, 3)
    for interlaced in (False, True):
        how = ", interlaced" if interlaced else ""
        make = functools.partial(png, interlaced=interlaced)
        yield shows(f"png/RGB{how}", make(FINE), FINE)
        yield shows(f"png/gray{how}", make(GRAY[:, :, None]), gray_to_rgb(GRAY))
        yield shows(
            f"png/RGBA{how}", make(np.dstack([FINE, alpha])), over_white(FINE, alpha), 1, "colors below show through"
        )
        yield shows(f"png/LA{how}", make(np.dstack([GRAY, alpha])), over_white(gray_to_rgb(GRAY), alpha), 1)
        for bits in (1, 2, 4):
            levels = (np.arange(9 * 13) % (1 << bits)).astype(np.uint8).reshape(9, 13, 1)
            full = gray_to_rgb((levels[:, :, 0] * (255 // ((1 << bits) - 1))).astype(np.uint8))
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
        yield shows(f"png/gray of 16 bits{how}", make(wide[:, :, :1], bits=16), gray_to_rgb(narrow[:, :, 0]))
        yield shows(f"png/RGB of 16 bits{how}", make(wide, bits=16), narrow, 1, "Pillow keeps the upper byte")
        yield shows(
            f"png/RGBA of 16 bits{how}", make(np.dstack([wide, wide[:, :, :1]]), bits=16),
            over_white(narrow, narrow[:, :, 0]), 3,
        )  # fmt: skip
        yield shows(
            f"png/LA of 16 bits{how}", make(wide[:, :, :2], bits=16),
            over_white(gray_to_rgb(narrow[:, :, 0]), narrow[:, :, 1]), 3,
        )  # fmt: skip
        seen = narrow.copy()
        seen[3, 4] = WHITE
        yield shows(
            f"png/RGB of 16 bits, one color transparent{how}",
            make(wide, bits=16, transparent=struct.pack(">3H", *(int(level) for level in wide[3, 4]))), seen, 1,
            encoded_only=True,
        )  # fmt: skip
        gray = gray_to_rgb(narrow[:, :, 0])
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
    gray = gray_to_rgb(GRAY)
    gray[GRAY == 7] = WHITE
    yield shows("png/gray, one level transparent", png(GRAY[:, :, None], transparent=b"\0\x07"), gray)
    see = np.array([0, 255, 128, *([255] * 13)], np.uint8)
    yield shows(
        "png/palette with a table of alpha", png(steps, palette=palette, transparent=bytes(see)),
        over_white(table[steps[:, :, 0]], see[steps[:, :, 0]]), 1,
    )  # fmt: skip
    hidden = table[steps[:, :, 0]].copy()
    hidden[0, 0] = WHITE
    yield shows("png/palette with a short table of alpha", png(steps, palette=palette, transparent=b"\0"), hidden)


def odd_png_entries() -> Iterator[CorpusEntry]:
    """Entries: odd png."""
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
        "png/turned and transparent", png(sheer, early=chunk(b"eXIf", turn)), SEEN[6](over_white(FINE, sheer[:, :, 3]))
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
    yield refuses_image("png/height 0", png(FINE, size=(0, 24)), "broken", "empty", "format")
    yield refuses_image("png/without its header", PNG + raw[33:], "broken", "format")
    yield refuses_image("png/header with a wrong checksum", raw[:29] + b"\0\0\0\0" + raw[33:], "broken", "format")
    yield refuses_image("png/palette missing", png(GRAY[:, :, None]).replace(_ihdr(0), _ihdr(3)), "broken", "format")
    bomb = zlib.compress(b"\0" * 30_000_000, 1)
    yield refuses_image(
        "png/text that unpacks to 30 MB", png(FINE, early=chunk(b"zTXt", b"a\0\0" + bomb)), "broken", "format"
    )
    yield refuses_image(
        "png/color profile that unpacks to 30 MB", png(FINE, early=chunk(b"iCCP", b"a\0\0" + bomb)), "broken"
    )


def _ihdr(color: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">2I5B", 24, 16, 8, color, 0, 0, 0))


def gif_entries() -> Iterator[CorpusEntry]:
    """Entries: gif."""
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
    yield refuses_image("gif/without frames", gif([], palette, size=size), "broken", "format")
    yield refuses_image("gif/cut", whole[:-120], "broken")
    yield refuses_image(
        "gif/screen of no size", gif([(0, 0, indices)], palette, size=(0, 0))[:397], "broken", "format", "empty"
    )


def webp_entries() -> Iterator[CorpusEntry]:
    """Entries: webp."""
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = np.dstack([FINE, alpha])
    exact = {"lossless": True, "exact": True}
    yield shows("webp/lossless", saved(FINE, "WEBP", **exact), FINE)
    flat = np.full((16, 24, 3), (90, 140, 200), np.uint8)
    yield shows("webp/lossy, flat", saved(flat, "WEBP", quality=95), flat, LOSSY)
    yield shows("webp/transparent", saved(sheer, "WEBP", **exact), over_white(FINE, alpha), 1)
    for orientation in (3, 6):
        turned = saved(FINE, "WEBP", exif=b"Exif\0\0" + exif(orientation), **exact)
        yield shows(f"webp/orientation {orientation}", turned, SEEN[orientation](FINE))
    frames = [Image.fromarray(255 - FINE)]
    moving = saved(Image.fromarray(FINE), "WEBP", save_all=True, append_images=frames, duration=50, **exact)
    yield shows("webp/animated, the first frame", moving, FINE)
    frames = [Image.fromarray(np.dstack([255 - FINE, alpha]))]
    moving = saved(Image.fromarray(sheer), "WEBP", save_all=True, append_images=frames, duration=50, **exact)
    yield shows("webp/animated and transparent", moving, over_white(FINE, alpha), 1)
    yield refuses_image("webp/cut", saved(FINE, "WEBP", **exact)[:120], "broken", "format")
