"""Images that must be refused: corrupted files, bombs, and files of other formats."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from mm_plugin.testing.corpus.entries import CorpusEntry, shows
from mm_plugin.testing.corpus.formats import (
    PNG,
    bmp,
    box,
    chunk,
    gif,
    noise,
    png,
    tiff,
    wav,
)
from mm_plugin.testing.corpus.image_content import (
    FINE,
    HEIGHT,
    PACKING,
    TILE_HEIGHT,
    TILE_WIDTH,
    WIDTH,
    head_only,
    jpeg_bytes,
    refuses_image,
    saved,
)
from mm_plugin.testing.corpus.raster_formats import tiff_tags


def broken_entries() -> Iterator[CorpusEntry]:
    """Entries: broken."""
    jpeg = jpeg_bytes(FINE)
    yield refuses_image("broken/empty", b"", "empty")
    yield refuses_image("broken/one byte", b"\xff", "format")
    yield refuses_image("broken/random", noise(1000, 0), "format")
    yield refuses_image("broken/zeros", bytes(5000), "format")
    yield refuses_image("broken/jpeg without its last 128 bytes", jpeg[:-128], "broken")
    yield refuses_image("broken/half a jpeg", jpeg[: len(jpeg) // 2], "broken", "format")
    yield refuses_image("broken/head of a jpeg alone", jpeg[:4], "format", "broken")
    yield refuses_image("broken/png without its last 40 bytes", png(FINE)[:-40], "broken")
    yield refuses_image("broken/signature of a png alone", PNG, "format", "broken")
    text = "an ordinary sentence, longer than forty characters, and no path"
    yield refuses_image("broken/text", text.encode(), "format")
    for name, value in {
        "None": None,
        "a number": 3,
        "a list of bytes": [jpeg],
        "a dict": {"image": jpeg},
        "an open file": io.BytesIO(jpeg),
        "a class": Image.Image,
    }.items():
        yield refuses_image(f"type/{name}", value, "type")
    for name, url in {
        "no comma": "data:image/png",
        "no comma, base64": "data:image/png;base64",
        "cut base64": "data:image/png;base64,A",
        "no base64": "data:image/png;base64,!!!!",
        "of another scheme": "ftp://example.org/a.png",
        "a file of another machine": "file://elsewhere/a.png",
    }.items():
        yield refuses_image(f"url/{name}", url, "url")
    yield refuses_image("url/empty", "data:,", "empty")
    yield refuses_image("path/missing", "there/is/no/such.png", "path")


def bomb_entries() -> Iterator[CorpusEntry]:
    """Entries: bomb."""
    limit = "max_image_pixels"
    yield refuses_image("bomb/png of 30000 x 30000", head_only(30_000, 30_000), limit)
    yield refuses_image("bomb/png of the largest sides", head_only(2**31 - 1, 2**31 - 1), limit, "broken")
    yield refuses_image("bomb/png just over the limit", head_only(10_000, 9_000), limit)
    packer = zlib.compressobj(1)
    flat = b"".join(packer.compress(bytes(3 * 12_000 + 1)) for _ in range(12_000)) + packer.flush()
    ihdr = chunk(b"IHDR", struct.pack(">2I5B", 12_000, 12_000, 8, 2, 0, 0, 0))
    yield refuses_image(
        "bomb/png of 432 MB that is all there", PNG + ihdr + chunk(b"IDAT", flat) + chunk(b"IEND", b""), limit
    )
    jpeg = jpeg_bytes()
    at = jpeg.index(b"\xff\xc0") + 5
    yield refuses_image("bomb/jpeg", jpeg[:at] + struct.pack(">2H", 65_500, 65_500) + jpeg[at + 4 :], limit)
    yield refuses_image("bomb/gif", gif([(0, 0, np.zeros((1, 1), int))], [0] * 384, size=(65_535, 65_535)), limit)
    yield refuses_image("bomb/gif whose frame is larger than its screen", _large_frame(), limit, "broken")
    yield refuses_image("bomb/bmp", bmp(b"", height=2**30, width=2**30, bits=24), limit)
    lengths = bmp(b"\xff\0" * 9, height=30_000, width=30_000, bits=8, compression=1, palette=bytes(1024))
    yield refuses_image("bomb/bmp of run lengths", lengths, limit)
    tags = {**tiff_tags(FINE), WIDTH: 100_000, HEIGHT: 100_000}
    yield refuses_image("bomb/tiff", tiff(b"", tags), limit)
    tiles = {**tiff_tags(FINE), TILE_WIDTH: 65_536, TILE_HEIGHT: 65_536, PACKING: 8}
    yield refuses_image("bomb/tiff with a tile of 65536 x 65536", tiff(zlib.compress(bytes(999)), tiles), limit)
    tiles = {**tiles, TILE_WIDTH: 16_384, TILE_HEIGHT: 16_384}
    yield refuses_image("bomb/tiff with a tile of 16384 x 16384", tiff(zlib.compress(bytes(999)), tiles), limit)
    yield refuses_image("bomb/ppm", b"P6 100000 100000 255\n", limit)


def webp_bomb_entries() -> Iterator[CorpusEntry]:
    """Entries: webp bomb."""
    limit = "max_image_pixels"
    yield refuses_image("bomb/webp whose canvas is 16384 x 16384", _large_canvas(16_384), limit)
    yield refuses_image("bomb/webp whose canvas is 9500 x 9500", _large_canvas(9_500), limit)
    lossless = saved(FINE, "WEBP", lossless=True)
    at = lossless.index(b"VP8L") + 9  # 14 bits of width - 1, as many of height - 1
    large = lossless[:at] + struct.pack("<I", 16_383 | 16_383 << 14 | 1 << 28) + lossless[at + 4 :]
    yield refuses_image("bomb/webp of 16384 x 16384, lossless", large, limit)


def _large_frame() -> bytes:
    """A frame of 65535 x 65535 on a screen of 16 x 24."""
    plain = gif([(0, 0, np.zeros((1, 1), int))], [0] * 384, size=(16, 24))
    at = plain.index(b"\x2c", 397) + 5
    return plain[:at] + struct.pack("<2H", 65_535, 65_535) + plain[at + 4 :]


def _large_canvas(side: int) -> bytes:
    frames = [Image.fromarray(255 - FINE)]
    moving = saved(Image.fromarray(FINE), "WEBP", save_all=True, append_images=frames, duration=50, lossless=True)
    at = moving.index(b"VP8X") + 12  # 24 bits of width - 1, as many of height - 1
    claimed = (side - 1).to_bytes(3, "little")
    return moving[:at] + claimed + claimed + moving[at + 6 :]


def foreign_entries() -> Iterator[CorpusEntry]:
    """Entries: foreign."""
    heic = box(b"ftyp", b"heic\0\0\0\0mif1heic") + box(b"meta", bytes(40))
    yield refuses_image(
        "heic/no opener", heic, "format", note="the message names pillow-heif; with its opener it is read"
    )
    yield refuses_image("foreign/svg", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "format")
    yield refuses_image(
        "foreign/html", b"<!doctype html><title>404</title>", "format", note="what servers send for a lost image"
    )
    yield refuses_image("foreign/json", b'{"error": "not found"}', "format")
    yield refuses_image("foreign/pdf", b"%PDF-1.7\n1 0 obj\n", "format")
    yield refuses_image("foreign/zip", b"PK\x03\x04" + bytes(99), "format")
    yield refuses_image("foreign/audio", wav(bytes(99), rate=8000), "format")
    yield refuses_image("foreign/mp4", box(b"ftyp", b"isom\0\0\0\0isom") + box(b"mdat", bytes(99)), "format")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/etc/passwd) run\n"
    yield refuses_image("foreign/eps", eps, "format", note="it would run a program")
    yield refuses_image(
        "foreign/icns", saved(Image.new("RGB", (32, 32)), "ICNS"), "format", note="images within an image"
    )
    yield refuses_image("foreign/psd", b"8BPS\0\x01" + bytes(60), "format")
    yield refuses_image("foreign/tga", saved(FINE, "TGA"), "format")
    script = gif([(0, 0, np.zeros((2, 2), int))], [9] * 384, size=(2, 2)) + b"*/=1;alert(1)//"
    yield shows("polyglot/gif and script", script, np.full((2, 2, 3), 9, np.uint8))
    both = png(FINE, early=chunk(b"teXt", b"%PDF-1.7\n")) + b"PK\x05\x06" + bytes(18)
    yield shows("polyglot/png, pdf and zip", both, FINE)
