"""Windows bitmaps that Pillow does not decode, or not as they are: channels by masks, palettes, run lengths.

Source: the structures BITMAPINFOHEADER to BITMAPV5HEADER of the Windows API, and its page on bitmap compression.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from mm_plugin.errors import MediaError

_OS2_HEADER = 64
_HEADERS = (40, 52, 56, _OS2_HEADER, 108, 124)
_RAW, _RUNS_OF_8, _RUNS_OF_4, _BIT_FIELDS, _ALPHA_BIT_FIELDS = 0, 1, 2, 3, 6
_INDEX_BITS = (1, 2, 4, 8)
# Measured: a second. An image of 89 million pixels has 350,000 runs where each is as long as it can be.
_MOST_RUNS = 1 << 20


class Bitmap(msgspec.Struct, frozen=True):
    """The header of a bitmap.

    Attributes:
        width: pixels.
        height: pixels.
        bits: of a pixel.
        runs: whether its indices are stored as run lengths.
        is_upright: whether the first row is the top one.
        start: of the pixels in the file, bytes.
        masks: of red, green, blue and, where there is one, alpha; empty for a palette.
        palette: red, green and blue of each color, a byte each.
    """

    width: int
    height: int
    bits: int
    runs: bool
    is_upright: bool
    start: int
    masks: tuple[int, ...] = ()
    palette: bytes = b""


def open_bitmap(data: bytes) -> Image.Image | None:
    """A bitmap that is decoded here, its header read and no pixel; None for one that Pillow decodes rightly, or that is broken.

    Raises:
        MediaError: the bits of a mask are not consecutive.
    """
    if data[:2] != b"BM":
        return None
    try:
        header = _header(data)
    except struct.error:
        return None
    return None if header is None else _LazyBitmap(data, header)


def _header(data: bytes) -> Bitmap | None:
    (start,) = struct.unpack_from("<I", data, 10)
    size, width, height, _, bits, compression = struct.unpack_from("<IiiHHI", data, 14)
    if size not in _HEADERS or width <= 0 or not height:
        return None
    runs = (compression, bits) in ((_RUNS_OF_8, 8), (_RUNS_OF_4, 4))
    masks: tuple[int, ...] = ()
    palette = b""
    if size != _OS2_HEADER and compression in (_BIT_FIELDS, _ALPHA_BIT_FIELDS) and bits in (16, 32):
        masks = struct.unpack_from("<3I", data, 54)
        if size >= 56 or compression == _ALPHA_BIT_FIELDS:
            masks += struct.unpack_from("<I", data, 66)
        masks = tuple(mask & ((1 << bits) - 1) for mask in masks)
        if not any(masks):
            return None
        for mask in masks:
            if mask & (mask + (mask & -mask)):
                raise MediaError(f"the BMP has the mask {mask:#x}, whose bits are not consecutive", reason="mode")
        masks = masks if masks[3:] != (0,) else masks[:3]
    elif bits in _INDEX_BITS and (compression == _RAW or runs):
        (colors,) = struct.unpack_from("<I", data, 46)
        first = 14 + size
        count = max(0, min(colors or 256, 1 << bits, (start - first) // 4, (len(data) - first) // 4))
        palette = np.frombuffer(data, np.uint8, 4 * count, first).reshape(-1, 4)[:, 2::-1].tobytes()
    else:
        return None
    return Bitmap(width, abs(height), bits, runs, height < 0, start, masks, palette)


class _LazyBitmap(Image.Image):
    """A PIL image whose pixels are decoded when they are first asked for."""

    format = "BMP"

    def __init__(self, data: bytes, header: Bitmap) -> None:
        super().__init__()
        self._data: bytes | None = data
        self._header = header
        self._size = header.width, header.height
        self._mode = "RGBA" if len(header.masks) == 4 else "RGB"

    def load(self) -> Any:
        """Decode the pixels.

        Raises:
            MediaError: the file ends before them.
        """
        if self._data is not None:
            pixels = _pixels(self._data, self._header)
            self.im = Image.fromarray(np.ascontiguousarray(pixels)).im
            self._data = None
        return super().load()


def _pixels(data: bytes, header: Bitmap) -> np.ndarray:
    """[height, width, 3 or 4] uint8, from the top down."""
    if header.runs:
        return _colored(_runs(data, header), header)
    row = (header.width * header.bits + 31) // 32 * 4
    needed = row * (header.height - 1) + (header.width * header.bits + 7) // 8
    if len(data) - header.start < needed:
        raise MediaError("the BMP ends before its pixels do", reason="broken")
    stored = np.zeros(header.height * row, np.uint8)
    given = np.frombuffer(data, np.uint8, min(len(stored), len(data) - header.start), header.start)
    stored[: len(given)] = given
    raw = stored.reshape(header.height, row)
    if not header.masks:
        if header.bits == 8:
            return _colored(raw[:, : header.width], header)
        shifts = np.arange(8 - header.bits, -1, -header.bits, dtype=np.uint8)
        indices = raw[:, :, None] >> shifts & ((1 << header.bits) - 1)
        return _colored(indices.reshape(header.height, -1)[:, : header.width], header)
    values = raw.view("<u2" if header.bits == 16 else "<u4")[:, : header.width]
    found = np.empty((*values.shape, len(header.masks)), np.uint8)
    for channel, mask in enumerate(header.masks):
        found[:, :, channel] = _channel(values, mask)
    return found if header.is_upright else found[::-1]


def _channel(values: np.ndarray, mask: int) -> np.ndarray | int:
    """The levels below a mask, spread over 0 to 255 and rounded; 0 without a mask."""
    if not mask:
        return 0
    shift = (mask & -mask).bit_length() - 1
    largest = mask >> shift
    levels = (values & mask).astype(np.uint64) >> np.uint64(shift)
    spread: np.ndarray = (levels * 510 + largest) // (2 * largest)
    return spread


def _colored(indices: np.ndarray, header: Bitmap) -> np.ndarray:
    """The colors of indices; an index without one is black."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(header.palette) // 3] = np.frombuffer(header.palette, np.uint8).reshape(-1, 3)
    colored: np.ndarray = table[indices]
    return colored if header.is_upright else colored[::-1]


def _runs(data: bytes, header: Bitmap) -> np.ndarray:
    """[height, width] uint8 indices of a bitmap of run lengths; those that no run sets are 0.

    Raises:
        MediaError: it has more runs than an image has any use for.
    """
    width, height, is_short = header.width, header.height, header.bits == 4
    out = bytearray(width * height)
    x, y, at, end = 0, 0, header.start, len(data) - 1
    for _ in range(_MOST_RUNS):
        if at >= end or y >= height:
            return np.frombuffer(out, np.uint8).reshape(height, width)
        count, value = data[at], data[at + 1]
        at += 2
        if count:
            pattern = bytes((value >> 4, value & 15)) * 128 if is_short else bytes((value,)) * count
            indices = pattern[:count]
        elif value > 2:  # so many indices as they are
            length = (value + 1) // 2 if is_short else value
            indices = data[at : at + length]
            if is_short:
                indices = bytes(half for byte in indices for half in (byte >> 4, byte & 15))[:value]
            count, at = value, at + length + length % 2
        elif value == 0:  # the end of a row
            x, y = 0, y + 1
            continue
        elif value == 1:  # the end of the bitmap
            at = end
            continue
        elif at >= end:  # a move that is cut off
            continue
        else:
            x, y, at = x + data[at], y + data[at + 1], at + 2
            continue
        shown = indices[: max(0, width - x)]  # what leaves the row is dropped
        out[y * width + x : y * width + x + len(shown)] = shown
        x += count
    raise MediaError(f"expected at most {_MOST_RUNS} runs of a BMP, got more", reason="broken")
