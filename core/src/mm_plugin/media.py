"""Untrusted bytes, paths, data URLs, arrays and PIL objects -> one normalised medium. Every limit on media ends here.

All entry paths meet in one function, in one order: orientation, then transparency, then RGB. What leaves is always
[height, width, 3] uint8.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import struct
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image, UnidentifiedImageError

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.identity import digest, feature_digest, frame
from mm_plugin.settings import Settings
from mm_plugin.structs import Modality

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)

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
_TURNED = (5, 6, 7, 8)
# What Pillow raises on hostile files, beside OSError: its parsers are many and none promises one class.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
    struct.error,
    Warning,  # a server may have turned warnings into errors
    Image.DecompressionBombError,
)
# What is opened. Pillow's other decoders run other programs (EPS), or decode a picture within the picture as they are opened,
# whose size no header told (ICO, ICNS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# Two items may be one lazily opened PIL object, which is not safe to load, or to read EXIF of, from two threads. PIL objects cannot
# be keys, so they share a few locks by address.
_LOCKS = tuple(threading.Lock() for _ in range(64))


def _lock_of(image: Image.Image) -> threading.Lock:
    return _LOCKS[id(image) // 16 % len(_LOCKS)]


_PNG_HEAD = 33  # bytes of the signature and the first chunk, which says the size
_LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_PIECE = 1 << 16  # characters of a data: URL that are unescaped together


class Size(msgspec.Struct, frozen=True):
    """How large a medium is, known without decoding it: pixels, after orientation."""

    height: int
    width: int


class Medium(msgspec.Struct, frozen=True, eq=False):
    """A decoded, normalised medium.

    Attributes:
        modality: what it is.
        pixels: [height, width, 3] uint8 RGB, contiguous.
    """

    modality: Modality
    pixels: np.ndarray


class Source:
    """One image as it came, checked for its kind and its bytes, and not decoded yet. Final; made by `open_image`.

    Attributes:
        path: where it stands in the request, such as `images[2]`.
    """

    def __init__(self, path: str, settings: Settings, *, data: bytes | None = None, value: Any = None) -> None:
        self.path, self._settings, self._data, self._value = path, settings, data, value
        self._image: Image.Image | None = None
        self._orientation = 1

    def digest(self) -> bytes:
        """What tells this source from others: of the encoded bytes, or of the pixels where that is all there is.

        Returns:
            32 bytes.
        """
        if self._data is not None:
            return digest(frame(["bytes", digest(self._data)]))
        if isinstance(self._value, np.ndarray):
            return digest(frame(["pixels", feature_digest(self._value)]))
        with _decoding(self.path):
            image = self._open()
            return digest(frame(["pil", image, self._turn(image)]))

    def probe(self) -> Size:
        """The size after orientation, from the header.

        Raises:
            MediaError: it is no image that can be opened.
            LimitError: it has more pixels than `max_image_pixels`.
        """
        if isinstance(self._value, np.ndarray):
            return Size(*self._value.shape[:2])
        with _decoding(self.path):
            image = self._open()
            width, height = image.size
            if self._turn(image) in _TURNED:
                width, height = height, width
        return Size(height, width)

    def decode(self, *, background: Color = WHITE) -> Medium:
        """Every pixel of it.

        Args:
            background: RGB levels behind transparent pixels.

        Raises:
            MediaError: the file is broken.
            LimitError: it has more pixels than `max_image_pixels`.
        """
        if isinstance(self._value, np.ndarray):
            return Medium(Modality.IMAGE, np.ascontiguousarray(self._value))
        with _decoding(self.path):
            image = self._open()
            turn = self._turn(image)
            self._image = None  # what Pillow decoded goes with this call
            return Medium(Modality.IMAGE, normalise_image(image, background=background, orientation=turn))

    def _open(self) -> Image.Image:
        """The image with its header read; a PIL object that was given, loaded."""
        if self._image is not None:
            return self._image
        if self._value is not None:
            with _lock_of(self._value):
                self._value.load()
                self._orientation = _orientation(self._value)
            self._image = self._value
        else:
            image = Image.open(io.BytesIO(self._data or b""), formats=_FORMATS)
            # Before load(): the header alone may promise more pixels than the machine has memory.
            check_pixels(self.path, image.height, image.width, self._settings)
            self._image = image
        return self._image

    def _turn(self, image: Image.Image) -> int:
        """The orientation by which pixels are turned, known without decoding any."""
        if self._value is not None:
            return self._orientation
        if image.format == "TIFF":
            return 1  # Pillow itself turns it: the size when it is opened, the pixels while they are loaded
        found = _orientation(image)
        return _late_orientation(self._data or b"") if found == 1 and image.format == "PNG" else found


def open_image(value: Any, *, path: str, settings: Settings) -> Source:
    """Take an image in any form that is accepted, without decoding it.

    Args:
        value: encoded bytes, a path below `media_root`, a `data:` URL, a PIL image, or a numpy array [height, width, 3] uint8.
            An array is copied; a PIL image is not, and must not be changed while its request is under way.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        MediaError: the value is of no such kind, or cannot be read.
        LimitError: it has more bytes or pixels than a limit allows.
    """
    if isinstance(value, Image.Image):
        check_pixels(path, value.height, value.width, settings)
        return Source(path, settings, value=value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or 0 in value.shape:
            raise MediaError(
                f"{path}: an array must be [height, width, 3] uint8, got {list(value.shape)} {value.dtype}",
                path=path,
                reason="array",
            )
        check_pixels(path, value.shape[0], value.shape[1], settings)
        # A copy, so that the pixels that are digested are those that are prepared, whatever the caller does meanwhile.
        return Source(path, settings, value=value.copy())
    if isinstance(value, bytes | bytearray | memoryview):
        data = value if isinstance(value, bytes) else bytes(value)
    elif isinstance(value, str) and value[:5].lower() == "data:":
        data = _read_data_url(value, path, settings)
    elif isinstance(value, str | os.PathLike):
        data = _read_file(value, path, settings)
    else:
        raise MediaError(
            f"{path}: expected bytes, a path, a data: URL, a PIL image or a numpy array, got {type(value).__name__}",
            path=path,
            reason="type",
        )
    _check_bytes(path, len(data), settings)
    if not data:
        raise MediaError(f"{path}: the file is empty", path=path, reason="empty")
    return Source(path, settings, data=data)


def normalise_image(image: Image.Image, *, background: Color = WHITE, orientation: int | None = None) -> np.ndarray:
    """Orientation, then transparency, then RGB: the one order for every entry path.

    16-bit gray is scaled to 8 bits, not clipped. An image is left as it was; nothing is written into it.

    Args:
        image: any PIL image.
        background: RGB levels behind transparent pixels.
        orientation: EXIF orientation by which it is turned; the image's own where None.

    Shape:
        returns [height, width, 3] uint8, contiguous, writable.
    """
    image.load()  # a TIFF is turned by Pillow as it is loaded; its tag must not be read before
    operation = _TRANSPOSE.get(_orientation(image) if orientation is None else orientation)
    if operation is not None:
        image = image.transpose(operation)
    if image.mode in ("F",) or image.mode.startswith("F;"):
        raise MediaError("a picture of floating-point levels has no scale by which to show it", reason="mode")
    if image.mode.startswith("I"):
        return _gray16(image, background)
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, (*background, 255))
        layers.alpha_composite((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))
        image = layers
    return _to_array(image if image.mode == "RGB" else image.convert("RGB"))


def _gray16(image: Image.Image, background: Color) -> np.ndarray:
    levels = np.asarray(image)
    if levels.size and (int(levels.min()) < 0 or int(levels.max()) > 0xFFFF):
        raise MediaError("a picture of 32-bit levels has no scale by which to show it", reason="mode")
    # 65535 becomes 255 and 0 stays 0; 257 levels of the wide scale make one of the narrow.
    narrow = ((levels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    out = np.repeat(narrow[:, :, None], 3, axis=2)
    key = image.info.get("transparency")
    if isinstance(key, int):  # a PNG may declare one level to be transparent
        out[levels == key] = background
    return out


def _to_array(image: Image.Image) -> np.ndarray:
    """The pixels of an RGB image as a writable array.

    Bands keep Pillow's own copy small: for large pictures a third faster than one `np.array` of the whole.
    """
    width, height = image.size
    out = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(1, (1 << 20) // max(1, width * 3))
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        out[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return out


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none or its block is broken."""
    try:
        # The base class's method: a PNG's own would decode the pixels, to look for a block behind them.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except _DECODE_ERRORS:
        return 1


def _late_orientation(data: bytes) -> int:
    """The orientation that a PNG tells only after its pixels, read without decoding them: from its head and its tail alone."""
    last = data.rfind(b"IDAT")
    tail = last + 8 + int.from_bytes(data[last - 4 : last], "big")  # behind its data and its checksum
    if last < 4 or not any(name in data[tail:] for name in _LATE_CHUNKS):
        return 1
    try:
        with Image.open(io.BytesIO(data[:_PNG_HEAD] + data[tail:]), formats=("PNG",)) as image:
            return _orientation(image)
    except _DECODE_ERRORS:
        return 1


@contextlib.contextmanager
def _decoding(path: str) -> Iterator[None]:
    """Turn whatever a decoder raises into one error that names the medium, without a byte of it."""
    try:
        yield
    except MediaError as error:
        if error.path is not None:
            raise
        raise MediaError(f"{path}: {error.message}", path=path, reason=error.reason) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"{path}: more pixels than Pillow opens on this machine", path=path, reason="bomb") from error
    except UnidentifiedImageError as error:
        raise MediaError(f"{path}: the bytes are no image of a known format", path=path, reason="format") from error
    except _DECODE_ERRORS as error:
        raise MediaError(f"{path}: the image is broken ({type(error).__name__})", path=path, reason="broken") from error


def _check_bytes(path: str, size: int, settings: Settings) -> None:
    if size > settings.max_media_bytes:
        raise LimitError(
            f"{path}: {size} bytes, at most {settings.max_media_bytes} are accepted",
            path=path,
            setting="max_media_bytes",
            limit=settings.max_media_bytes,
            value=size,
        )


def check_pixels(path: str, height: int, width: int, settings: Settings) -> None:
    """Refuse a picture of no pixels, or of more than a limit allows.

    Raises:
        LimitError: more than `max_image_pixels`.
        MediaError: a side is not positive.
    """
    if height * width > settings.max_image_pixels:
        raise LimitError(
            f"{path}: {height} x {width} pixels (height x width), at most {settings.max_image_pixels} are accepted",
            path=path,
            setting="max_image_pixels",
            limit=settings.max_image_pixels,
            value=height * width,
        )
    if height < 1 or width < 1:
        raise MediaError(f"{path}: a picture of {height} x {width} pixels has no area", path=path, reason="empty")


def _read_file(value: str | os.PathLike[str], path: str, settings: Settings) -> bytes:
    """A regular file below the media root, links resolved, no more bytes than the limit."""
    if not settings.media_root:
        raise MediaError(
            f"{path}: files are not read: no media_root is set (MM_PLUGIN_MEDIA_ROOT)", path=path, reason="path"
        )
    try:
        root = Path(settings.media_root).resolve(strict=True)
        file = (root / os.fspath(value)).resolve(strict=True)
        if not file.is_relative_to(root) or not file.is_file():
            raise MediaError(f"{path}: the path is no file below media_root", path=path, reason="path")
        with file.open("rb") as opened:
            # One byte more than the limit tells a file that is too large from one that just fits.
            data = opened.read(settings.max_media_bytes + 1)
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise MediaError(
            f"{path}: the file cannot be read ({type(error).__name__})", path=path, reason="path"
        ) from error
    return data


def _read_data_url(value: str, path: str, settings: Settings) -> bytes:
    """RFC 2397: `data:[type][;parameter]*[;base64],data`; the last parameter says whether it is base64, in any case."""
    head, comma, body = value.partition(",")
    if not comma:
        raise MediaError(
            f"{path}: a data: URL has the form data:image/png;base64,... and this one has no comma",
            path=path,
            reason="url",
        )
    parameters = head.split(";")[1:]
    is_base64 = bool(parameters) and parameters[-1].strip().lower() == "base64"
    # A byte takes one character, three where it is escaped; of base64, four thirds of that.
    if len(body) > (4 if is_base64 else 3) * settings.max_media_bytes + 1024:
        _check_bytes(path, max(len(body) // 4, settings.max_media_bytes + 1), settings)
    try:
        plain = _unescape(body)
        if is_base64:
            digits = b"".join(plain.split())
            _check_bytes(path, len(digits) * 3 // 4 - 2, settings)  # the least that so many digits stand for
            return base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{path}: the data: URL's base64 is malformed", path=path, reason="url") from error
    return plain


def _unescape(text: str) -> bytes:
    """Percent escapes resolved, piece by piece: the library's own function makes a list of every escape at once."""
    if "%" not in text:
        return text.encode()
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE
        while end < len(text) and text[end] != "%" and "%" in text[end - 2 : end]:
            end += 1  # not inside an escape; a percent sign is never inside one
        pieces.append(urllib.parse.unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(pieces)
