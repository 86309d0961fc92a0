"""What is read of an encoded image before Pillow is: what kind it is, and whether Pillow would decode it rightly. Decodes nothing.

Where a file has more than is served, or a part that no pixel depends on and that Pillow stumbles over, the rest is passed on.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from mm_plugin.errors import MediaError
from mm_plugin.media import tiff
from mm_plugin.media.image_headers import ICO, J2K, JP2, PNG
from mm_plugin.media.isobmff import boxes

# Chunks that pixels depend on, though their names say that a reader may pass over them.
_NEEDED = (b"tRNS",)
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)


class ImageFile(msgspec.Struct, frozen=True, eq=False):
    """An encoded image as it is passed to Pillow.

    Attributes:
        data: the file, or what of it is decoded.
        levels: of a TIFF, how its gray levels of more than 8 bits are read.
        palette: of a TIFF, its palette in place of the one that Pillow reads; None elsewhere.
        frame: of a GIF, the part of its screen that its frame covers: left, top, right, bottom; None elsewhere.
        key: of a PNG of 16-bit colors, the one that is transparent; None elsewhere.
        is_bitmap: whether its pixels are those of a Windows bitmap, in a file of its own or in an icon.
        notes: what else the file holds.
    """

    data: bytes
    levels: tiff.Levels = tiff.Levels()
    palette: bytes | None = None
    frame: tuple[int, int, int, int] | None = None
    key: tuple[int, ...] | None = None
    is_bitmap: bool = False
    notes: tuple[str, ...] = ()


def read_file(data: bytes) -> ImageFile:
    """What of a file is decoded.

    Raises:
        MediaError: it is of a layout that cannot be decoded rightly.
    """
    if tiff.is_tiff(data):
        chosen = tiff.choose(data)
        if chosen is None:
            return ImageFile(data)
        return ImageFile(chosen.data, tiff.levels_of(chosen.tags), tiff.short_palette(chosen.tags), notes=chosen.notes)
    if data[:8] == PNG:
        return ImageFile(_without_broken_chunks(data))
    if data[:4] == ICO:
        return _best_icon(data)
    if data[:8] == JP2 or data[:4] == J2K:
        _check_jpeg2000(data)
    return ImageFile(data, is_bitmap=data[:2] == b"BM")


# ---------------------------------------------------------------- what a file is


def _is_bitmap(data: bytes) -> bool:
    return data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in _BMP_HEADERS


_SIGNATURES: Mapping[str, Callable[[bytes], bool]] = MappingProxyType(
    {
        "PNG": lambda data: data[:8] == PNG,
        "JPEG": lambda data: data[:2] == b"\xff\xd8",
        "WebP": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
        "GIF": lambda data: data[:6] in (b"GIF87a", b"GIF89a"),
        "BMP": _is_bitmap,
        "TIFF": tiff.is_tiff,
        "PPM": lambda data: data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace(),
        "JPEG 2000": lambda data: data[:8] == JP2 or data[:4] == J2K,
        "ICO": lambda data: data[:4] == ICO and data[4:6] != b"\0\0" and data[9:10] == b"\0",
        "AVIF": lambda data: data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"),
    }
)


def format_of(data: bytes) -> str | None:
    """The format whose signature a file has; None where it has that of no format that is decoded."""
    return next((name for name, matches in _SIGNATURES.items() if matches(data)), None)


# ---------------------------------------------------------------- PNG


def _without_broken_chunks(data: bytes) -> bytes:
    """A PNG without those chunks whose checksum is wrong and that no pixel depends on."""
    broken = [
        (start, end)
        for kind, start, end in _chunks(data)
        if kind[0] & 0x20 and kind not in _NEEDED and not _has_checksum(data, start, end)
    ]
    if not broken:
        return data
    edges = [0, *(place for pair in broken for place in pair), len(data)]
    return b"".join(data[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True))


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of every whole chunk."""
    at = len(PNG)
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            return
        yield data[at + 4 : at + 8], at, end
        at = end


def _has_checksum(data: bytes, start: int, end: int) -> bool:
    return zlib.crc32(memoryview(data)[start + 4 : end - 4]) == int.from_bytes(data[end - 4 : end], "big")


# ---------------------------------------------------------------- ICO


def _best_icon(data: bytes) -> ImageFile:
    """An icon file of one image alone: the largest, and of several as large the one with most bits to a pixel."""
    try:
        images = [_icon(data, index) for index in range(int.from_bytes(data[4:6], "little"))]
    except (struct.error, IndexError):
        return ImageFile(data)
    if not images:
        return ImageFile(data)
    _, bits, entry, body = max(images, key=lambda image: image[:2])
    is_png = body.startswith(PNG)
    # The directory's bits are often 0; by them Pillow decides whether the pixels have an alpha of their own.
    depth = entry[6:8] if is_png else struct.pack("<H", bits)
    alone = ICO + b"\1\0" + entry[:6] + depth + struct.pack("<II", len(body), 22) + body
    return ImageFile(alone, is_bitmap=not is_png)


def _icon(data: bytes, index: int) -> tuple[int, int, bytes, bytes]:
    """(pixels, bits of a pixel, entry of the directory, the image) of one image within an icon file."""
    entry = data[6 + 16 * index : 22 + 16 * index]
    size, offset = struct.unpack_from("<II", entry, 8)
    body = data[offset : offset + size]
    if body.startswith(PNG):
        width, height, depth, color = struct.unpack_from(">IIBB", body, 16)
        bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(color, 1)
    elif int.from_bytes(body[:4], "little") == 12:
        width, height, _, bits = struct.unpack_from("<4H", body, 4)
        height //= 2
    else:
        width, height, _, bits = struct.unpack_from("<iiHH", body, 4)
        height = abs(height) // 2
    return abs(width) * height, bits, entry, body


# ---------------------------------------------------------------- JPEG 2000


def _check_jpeg2000(data: bytes) -> None:
    """Refuse components of several resolutions that do not fill the image, and channels in another order than their colors.

    Source: ISO/IEC 15444-1, A.5.1 and I.5.3.6.
    """
    try:
        start = 0
        for kind, body, end in boxes(data, 0, len(data)) if data[:8] == JP2 else ():
            if kind == b"jp2h":
                for inner, first, last in boxes(data, body, end):
                    if inner == b"cdef":
                        _check_channels(data[first:last])
            elif kind == b"jp2c":
                start = body
                break
        right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
        (components,) = struct.unpack_from(">H", data, start + 40)
        for index in range(components):
            depth, across, down = struct.unpack_from(">3B", data, start + 42 + 3 * index)
            if depth & 0x80 or depth < 7 or (components > 1 and depth > 7):
                # Pillow wraps the levels of colors that have more bits, and shifts those that have fewer.
                bits = f"{(depth & 0x7F) + 1} bits" + (" with a sign" if depth & 0x80 else "")
                raise MediaError(
                    f"the JPEG 2000 image has {components} components of {bits}; convert it to 8 bits", reason="mode"
                )
            if (across > 1 or down > 1) and any(
                edge % max(1, step) for edge, step in ((right, across), (left, across), (bottom, down), (top, down))
            ):
                raise MediaError(
                    "the JPEG 2000 image has components of several resolutions that do not fill its sides; "
                    "convert it to components of one resolution",
                    reason="mode",
                )
    except (struct.error, IndexError):
        return


def _check_channels(body: bytes) -> None:
    (count,) = struct.unpack_from(">H", body)
    for index in range(min(count, len(body) // 6)):
        channel, kind, color = struct.unpack_from(">3H", body, 2 + 6 * index)
        in_order = kind == 0 and color == channel + 1
        is_alpha = kind == 1 and color == 0 and channel == count - 1
        if not in_order and not is_alpha:
            raise MediaError(
                f"the JPEG 2000 image has channel {channel} of type {kind} for color {color}; convert it to gray, RGB or RGBA in "
                "this order, with a straight alpha",
                reason="mode",
            )
