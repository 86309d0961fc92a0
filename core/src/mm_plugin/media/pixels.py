"""A PIL image -> [height, width, 3] uint8 RGB, in one order: orientation, then transparency, then RGB. Opens no file."""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageChops, ImagePalette
from PIL.GifImagePlugin import GifImageFile
from PIL.IcoImagePlugin import IcoImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from mm_plugin.errors import MediaError
from mm_plugin.media.image_files import ImageFile
from mm_plugin.media.image_headers import PNG, PNG_HEAD
from mm_plugin.media.tiff import Levels, levels_of, short_palette, tags_of
from mm_plugin.media.types import WHITE, Color

_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TURNED = (5, 6, 7, 8)
# By how much a level of so few bits is multiplied as Pillow reads it, by Pillow's name of how it is stored.
_SPREAD = {"L;2": 85, "L;4": 17}
_LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


def of_opened(image: Image.Image) -> ImageFile:
    """What is known of an image that the caller opened, whose file is not at hand."""
    if isinstance(image, GifImageFile):
        return ImageFile(b"", frame=_extent_of(image))
    if isinstance(image, IcoImageFile):
        return ImageFile(b"", is_bitmap=_is_bitmap_icon(image))
    if not isinstance(image, TiffImageFile):
        return ImageFile(b"", is_bitmap=image.format in ("BMP", "DIB"))
    tags = tags_of(image)
    return ImageFile(b"", levels_of(tags), short_palette(tags))


def normalize_image(
    image: Image.Image,
    *,
    background: Color = WHITE,
    orientation: int | None = None,
    file: ImageFile | None = None,
) -> np.ndarray:
    """Orientation, then transparency, then RGB: one order for every form in which an image comes.

    16-bit gray is scaled to 8 bits, not clipped. An image that the caller opened is not changed.

    Args:
        image: any PIL image.
        background: RGB levels shown through transparent pixels.
        orientation: EXIF orientation by which it is turned; the image's own where None.
        file: what is known of its file; of an image that was not opened from one, nothing.

    Shape:
        returns [height, width, 3] uint8, contiguous, writable.
    """
    file = file or ImageFile(b"")
    image.load()  # a TIFF is turned by Pillow as it is loaded; its tag must not be read before
    image = _mended(image, file)
    operation = _TRANSPOSE.get(orientation_of(image) if orientation is None else orientation)
    if operation is not None:
        image = image.transpose(operation)
    if image.mode in ("F",) or image.mode.startswith("F;"):
        raise MediaError(f"unsupported image mode {image.mode}; convert it to 8 bits per channel", reason="mode")
    if image.mode.startswith("I"):
        return _gray16(image, background, file.levels)
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, (*background, 255))
        if image.mode == "P":
            image = image.copy()  # converting it would write the alpha into the caller's palette
        layers.alpha_composite((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))
        image = layers
    return _to_array(image if image.mode == "RGB" else image.convert("RGB"))


def _extent_of(image: GifImageFile) -> tuple[int, int, int, int] | None:
    """The part of the screen that the first frame covers; later frames are put together by Pillow."""
    return image.dispose_extent if image.tell() == 0 else None


def _is_bitmap_icon(image: IcoImageFile) -> bool:
    """Whether the image of an icon file that the caller opened is stored as a bitmap."""
    try:
        entry = image.ico.entry[image.ico.getentryindex(image.size)]
        image.ico.buf.seek(entry.offset)
        return image.ico.buf.read(len(PNG)) != PNG
    except Exception:
        return False


def _hide_key(image: Image.Image, key: tuple[int, ...], data: bytes) -> None:
    """Make those 16-bit colors of a PNG transparent that equal its key in all bits; Pillow reads the upper eight alone."""
    with Image.open(io.BytesIO(data), formats=("PNG",)) as lower:
        tile = lower.tile[0]
        lower.tile = [tile._replace(args=str(tile.args).replace("16B", "16L"))]
        lower.load()
        # 255 where a byte differs from the key's. Pillow's own bands, one after the other, take little memory.
        unlike = (
            part.getchannel(channel).point([255 * (byte != level >> shift & 255) for byte in range(256)])
            for part, shift in ((image, 8), (lower, 0))
            for channel, level in enumerate(key)
        )
        image.putalpha(functools.reduce(ImageChops.lighter, unlike))


def _mended(image: Image.Image, file: ImageFile) -> Image.Image:
    """An image as its file says, where Pillow reads it otherwise; one that the caller opened is not changed."""
    if file.palette is not None and image.mode in ("P", "PA"):
        image = image.copy()
        image.palette = ImagePalette.raw("RGB;L", file.palette)
    if file.is_bitmap and image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # programs that know no alpha leave its byte at 0
    if file.key is not None:
        _hide_key(image, file.key, file.data)
    frame = _extent_of(image) if isinstance(image, GifImageFile) else file.frame
    if frame is not None and frame != (0, 0, *image.size):
        # What the frame leaves open is not the file's background color, which no viewer shows.
        left, top, right, bottom = frame
        shown = Image.new("RGBA", image.size)
        # A copy: converting a palette image writes the alpha into its palette, and the digest would be another afterwards.
        shown.paste(image.copy().convert("RGBA").crop((left, top, right, bottom)), (left, top))
        return shown
    return image


def _gray16(image: Image.Image, background: Color, wide: Levels) -> np.ndarray:
    levels, largest = np.asarray(image), (1 << max(8, wide.bits)) - 1
    if levels.size and (int(levels.min()) < 0 or int(levels.max()) > largest):
        raise MediaError(
            f"expected gray levels of 0 to {largest}, got 32-bit levels; convert it to 8 bits", reason="mode"
        )
    # The largest level becomes 255 and 0 stays 0; of 16 bits, 257 levels make one.
    narrow = ((levels.astype(np.uint32) * 510 + largest) // (2 * largest)).astype(np.uint8)
    if wide.inverted:
        narrow = 255 - narrow
    out = np.repeat(narrow[:, :, None], 3, axis=2)
    key = image.info.get("transparency")
    if isinstance(key, int):  # a PNG may declare one level to be transparent
        out[levels == key] = background
    return out


def _to_array(image: Image.Image) -> np.ndarray:
    """The pixels of an RGB image as a writable array.

    Bands keep Pillow's own copy small: for large images a third faster than one `np.array` of the whole.
    """
    width, height = image.size
    out = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(1, (1 << 20) // max(1, width * 3))
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        out[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return out


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none or its block is corrupted."""
    try:
        # The base class's method: a PNG's own would decode the pixels, to look for a block after them.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:
        return 1


def stored_as(image: PngImageFile) -> str:
    """Pillow's name of how the pixels of a PNG are stored; empty once they are loaded."""
    return str(image.tile[0][3]) if image.tile else ""


def wide_key_of(image: PngImageFile) -> tuple[int, ...] | None:
    """The transparent color of a PNG of 16-bit colors, whose lower bits Pillow does not read; None where there is none."""
    key, stored = image.info.get("transparency"), stored_as(image)
    is_wide = isinstance(key, tuple) and (stored == "RGB;16B" or (not stored and max(key) > 255))
    return key if is_wide else None


def scale_key(image: Image.Image, stored: str) -> None:
    """Scale the transparent level of an image as its pixels: a PNG stores both with its own bits, Pillow scales the pixels alone.

    Args:
        image: opened from a PNG, or a copy of one.
        stored: how its pixels were, see `stored_as`.
    """
    key = image.info.get("transparency")
    if stored in _SPREAD and isinstance(key, int):
        spread = _SPREAD[stored]
        image.info["transparency"] = key % (255 // spread + 1) * spread


def late_orientation_of(data: bytes) -> int:
    """The orientation that a PNG stores after its pixels, read without decoding them: from its head and its tail alone."""
    last = data.rfind(b"IDAT")
    tail = last + 8 + int.from_bytes(data[last - 4 : last], "big")  # after its data and its checksum
    if last < 4 or not any(name in data[tail:] for name in _LATE_CHUNKS):
        return 1
    try:
        with Image.open(io.BytesIO(data[:PNG_HEAD] + data[tail:]), formats=("PNG",)) as image:
            return orientation_of(image)
    except Exception:
        return 1
