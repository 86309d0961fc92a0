"""A loaded PIL image as plain values, and back: the form in which one travels to another process. Decodes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageMode

from mm_plugin.media import tiff
from mm_plugin.media.image_files import ImageFile
from mm_plugin.media.types import PackedImage


def pack(image: Image.Image, orientation: int, file: ImageFile) -> PackedImage:
    """A loaded image as plain values.

    Args:
        image: with its pixels.
        orientation: by which it is turned.
        file: what is known of its file.
    """
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = image.palette.mode, bytes(image.getpalette("RGBA") or ())
    return PackedImage(
        mode=image.mode,
        width=image.width,
        height=image.height,
        data=image.tobytes(),
        palette=palette,
        transparency=image.info.get("transparency"),
        orientation=orientation,
        levels=(file.levels.bits, file.levels.inverted),
        file_palette=file.palette,
        frame=file.frame,
        is_bitmap=file.is_bitmap,
    )


def unpack(packed: PackedImage) -> tuple[Image.Image, int, ImageFile]:
    """The image, its orientation, and what is known of its file.

    Raises:
        ValueError: the bytes are not those of an image of this mode and size. Nothing was allocated for it.
    """
    if packed.mode not in _MODES or len(packed.data) != _num_bytes(packed):
        raise ValueError(f"{len(packed.data)} bytes are not {packed.width} x {packed.height} pixels of {packed.mode}")
    if packed.palette is not None and packed.mode not in ("P", "PA"):
        raise ValueError(f"a palette beside pixels of {packed.mode}")
    image = Image.frombytes(packed.mode, (packed.width, packed.height), packed.data)
    if packed.palette is not None:
        name, colors = packed.palette
        image.putpalette(colors, "RGBA")
        image.load()
        assert image.palette is not None
        image.palette.mode = name  # by which Pillow knows whether the alpha counts
    if packed.transparency is not None:
        image.info["transparency"] = packed.transparency
    levels = tiff.Levels(*packed.levels)
    file = ImageFile(b"", levels, packed.file_palette, packed.frame, is_bitmap=packed.is_bitmap)
    return image, packed.orientation, file


# All of Pillow's that hold pixels; `ImageMode` fails for others.
_MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "F"),
    *("I", "I;16", "I;16L", "I;16B", "I;16N"),
)


def _num_bytes(packed: PackedImage) -> int:
    if packed.mode == "1":
        return (packed.width + 7) // 8 * packed.height
    mode: Any = ImageMode.getmode(packed.mode)
    return packed.width * packed.height * len(mode.bands) * int(np.dtype(mode.typestr).itemsize)
