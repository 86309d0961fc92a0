"""What the odd images show, and how it is stored: test patterns, orientations, colors. Makes no entries."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from mm_plugin.items import Modality
from mm_plugin.testing.corpus.entries import refuses
from mm_plugin.testing.corpus.formats import (
    PNG,
    chunk,
    exif,
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
LOSSY = 4  # levels
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
refuses_image = functools.partial(refuses, Modality.IMAGE)


def saved(pixels: np.ndarray | Image.Image, format: str, **options: Any) -> bytes:
    """An image as a file, by Pillow."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def gray_to_rgb(gray: np.ndarray) -> np.ndarray:
    """Gray levels as RGB."""
    return np.repeat(gray[:, :, None], 3, axis=2)


def over_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """RGB levels before a white background, alpha [height, width] of 0 to 255."""
    share = alpha[:, :, None].astype(np.float64) / 255
    return np.rint(pixels * share + 255 * (1 - share)).astype(np.uint8)


def to_inks(pixels: np.ndarray) -> Image.Image:
    """RGB as cyan, magenta, yellow and a black of 40."""
    # (255 - ink) * (255 - black) / 255 is the light that is left
    light = np.minimum(255, np.rint(pixels.astype(np.float64) * 255 / 215))
    planes = np.concatenate([255 - light, np.full((*pixels.shape[:2], 1), 40)], axis=2).astype(np.uint8)
    return Image.frombytes("CMYK", (pixels.shape[1], pixels.shape[0]), planes.tobytes())


def printed_inks(pixels: np.ndarray) -> np.ndarray:
    """What `to_inks` shows: brighter than 215 is impossible under that much black."""
    found: np.ndarray = np.minimum(np.uint8(215), pixels)
    return found


def to_ycc(pixels: np.ndarray) -> np.ndarray:
    """JFIF's luma and chroma of RGB. Source: JFIF 1.02, page 3."""
    red, green, blue = np.moveaxis(pixels.astype(np.float64), -1, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    found: np.ndarray = np.rint(np.stack([luma, 128 + (blue - luma) / 1.772, 128 + (red - luma) / 1.402], axis=-1))
    return found


_APP0, APP1, _APP14, COMMENT = 0xE0, 0xE1, 0xEE, 0xFE


def jpeg_bytes(pixels: np.ndarray | Image.Image = BLOCKS, **options: Any) -> bytes:
    """A JPEG of full quality."""
    return saved(pixels, "JPEG", **{"quality": 95, "subsampling": 0, **options})


def turned(orientation: int, **options: Any) -> bytes:
    """A JPEG with an Exif orientation."""
    return with_segment(jpeg_bytes(), APP1, b"Exif\0\0" + exif(orientation, **options))


WIDTH, HEIGHT, BITS, PACKING, KIND, TURN, SAMPLES, ROWS = 256, 257, 258, 259, 262, 274, 277, 278
TILE_WIDTH, TILE_HEIGHT, EXTRA, FORMAT, MAP = 322, 323, 338, 339, 320


def head_only(height: int, width: int) -> bytes:
    """A PNG of hardly any bytes that promises so many pixels."""
    return (
        PNG + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(b"\0"))
    )
