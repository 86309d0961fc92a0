"""Images: encoded files, PIL objects, arrays and tensors -> [height, width, 3] uint8 RGB.

All of them meet in one function, in one order: orientation, then transparency, then RGB.
"""

from __future__ import annotations

import io
import math
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from mm_plugin.arrays import is_dense, is_tensor
from mm_plugin.errors import LimitError, MediaError, MMPluginError, UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.decoder_errors import decoding
from mm_plugin.media.image_headers import PNG_HEAD, inner_sizes
from mm_plugin.media.limits import check_pixels
from mm_plugin.media.source import SamplingRules
from mm_plugin.media.sources import is_encoded, read_bytes
from mm_plugin.media.types import WHITE, Color, DecodedImage, Size, VideoFrames
from mm_plugin.settings import Settings

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
_TILE_WIDTH, _TILE_LENGTH = 0x0142, 0x0143
# What is opened, where Pillow can: HEIF once an operator has registered an opener for it. Pillow's other decoders run other
# programs (EPS), or decode an image within the image whose size no header says (ICNS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "HEIF")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
# Two items, even of two requests, may be one lazily opened PIL object, which is not safe to load, or to read EXIF of, from two
# threads. PIL objects are not hashable, so they share a few locks by address.
_LOCKS = tuple(threading.Lock() for _ in range(64))


def _lock_of(image: Image.Image) -> threading.Lock:
    return _LOCKS[id(image) // 16 % len(_LOCKS)]


# By how much a level of so few bits is multiplied as Pillow reads it, by Pillow's name of how it is stored.
_SPREAD = {"L;2": 85, "L;4": 17}
_LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class ImageSource:
    """One image, its kind and size in bytes checked, not decoded yet. Final; made by `open_image`; a `MediaSource`.

    Attributes:
        path: where it stands in the request, such as `images[2]`.
    """

    def __init__(self, path: str, settings: Settings, *, data: bytes | None = None, value: Any = None) -> None:
        self.path, self._settings, self._data, self._value = path, settings, data, value
        self._image: Image.Image | None = None
        self._orientation: int | None = None  # of a PIL object, once it is loaded

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_image": None}
        if isinstance(self._value, Image.Image):
            with _decoding_image(self.path, self._settings):
                self._open()
                # Pillow's own pickles lose the transparency of palettes and what a file's plugin knows.
                state |= {"_value": None, "_orientation": self._orientation, "_packed": _pack(self._value)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("_packed", None)
        self.__dict__.update(state)
        if packed is not None:
            self._value = _unpack(packed)

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoded file; 0 for pixels."""
        return len(self._data or b"")

    def digest(self) -> bytes:
        """What distinguishes this image from others: the digest of its encoded bytes, or of the given pixels; 32 bytes."""
        if self._data is not None:
            return digest(frame(["bytes", digest(self._data)]))
        if isinstance(self._value, np.ndarray):
            return digest(frame(["pixels", feature_digest(self._value)]))
        with _decoding_image(self.path, self._settings):
            image = self._open()
            try:
                return digest(frame(["pil", image, self._turn(image)]))
            except UsageError as error:
                raise MediaError(f"{self.path}: {error.message}", path=self.path, reason="mode") from error

    def probe(self) -> Size:
        """The size after orientation, from the header.

        Raises:
            MediaError: it is not an image that can be opened.
            LimitError: it has more pixels than `max_image_pixels`.
        """
        if isinstance(self._value, np.ndarray):
            return Size(*self._value.shape[:2])
        with _decoding_image(self.path, self._settings):
            image = self._open()
            width, height = image.size
            if self._turn(image) in _TURNED:
                width, height = height, width
        return Size(height, width)

    def size(self, rules: SamplingRules | None = None) -> Size:
        """As `probe`."""
        return self.probe()

    def decode(self, size: Size | None = None, *, background: Color = WHITE) -> DecodedImage:
        """Every pixel of it.

        Args:
            size: without effect: an image is decoded whole.
            background: RGB levels behind transparent pixels.

        Raises:
            MediaError: the file is corrupted.
            LimitError: it has more pixels than `max_image_pixels`.
        """
        if isinstance(self._value, np.ndarray):
            return _decoded(np.ascontiguousarray(self._value))
        with _decoding_image(self.path, self._settings):
            image = self._open()
            turn = self._turn(image)
            self._image = None  # what Pillow decoded goes with this call
            return _decoded(normalize_image(image, background=background, orientation=turn))

    def _open(self) -> Image.Image:
        """The image with its header read; a PIL object that was given, loaded."""
        if self._image is not None:
            return self._image
        if self._value is not None:
            with _lock_of(self._value):
                if isinstance(self._value, TiffImageFile):
                    self._check_tiles(self._value)
                self._value.load()
                if self._orientation is None:
                    self._orientation = _orientation(self._value)
            self._image = self._value
        else:
            data = self._data or b""
            Image.init()
            formats = [name for name in _FORMATS if name in Image.OPEN]
            if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS and "HEIF" not in formats:
                raise MediaError(
                    "HEIC needs an opener; install pillow-heif and call pillow_heif.register_heif_opener()",
                    reason="format",
                )
            for height, width in inner_sizes(data):
                check_pixels(self.path, height, width, self._settings)
            image = Image.open(io.BytesIO(data), formats=formats)
            # Before load(): the header alone may promise more pixels than fit in memory.
            check_pixels(self.path, image.height, image.width, self._settings)
            if isinstance(image, TiffImageFile):
                self._check_tiles(image)
            elif isinstance(image, PngImageFile):
                _fit_transparency(image)
            self._image = image
        return self._image

    def _check_tiles(self, image: TiffImageFile) -> None:
        """A tile of a TIFF is decoded whole, and may be larger than the image."""
        height, width = image.tag_v2.get(_TILE_LENGTH, 1), image.tag_v2.get(_TILE_WIDTH, 1)
        if not isinstance(height, int) or not isinstance(width, int):
            raise MediaError("the TIFF declares tiles without a size", reason="broken")
        check_pixels(self.path, height, width, self._settings)

    def _turn(self, image: Image.Image) -> int:
        """The orientation by which pixels are turned, known without decoding any."""
        if self._value is not None:
            assert self._orientation is not None
            return self._orientation
        if image.format == "TIFF":
            return 1  # Pillow itself turns it: the size when it is opened, the pixels while they are loaded
        found = _orientation(image)
        return _late_orientation(self._data or b"") if found == 1 and image.format == "PNG" else found


def open_image(value: Any, *, path: str, settings: Settings) -> ImageSource:
    """Open an image in any accepted form, without decoding it.

    Args:
        value: encoded bytes, a path below `media_root`, a URL, base64 text, a PIL image, a numpy array [height, width, 3] uint8,
            or a torch tensor [3, height, width] uint8. Arrays and tensors are copied; a PIL image is not, and must not be
            changed while its request is under way.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        MediaError: the value is of another kind, or cannot be read.
        LimitError: it has more bytes or pixels than a limit allows.

    Examples:
        >>> from mm_plugin import Settings
        >>> from mm_plugin.media import open_image
        >>> source = open_image(np.zeros((4, 6, 3), np.uint8), path="images[0]", settings=Settings())
        >>> source.probe(), source.decode().pixels.shape
        (Size(height=4, width=6), (4, 6, 3))
    """
    if is_encoded(value):
        return ImageSource(path, settings, data=read_bytes(value, path, settings))
    if isinstance(value, Image.Image):
        check_pixels(path, value.height, value.width, settings)
        return ImageSource(path, settings, value=value)
    pixels = as_pixels(value, path, settings)
    if pixels is None:
        raise MediaError(
            f"{path}: expected bytes, a path, a URL, base64, a PIL image, a numpy array or a torch tensor, "
            f"got {type(value).__name__}",
            path=path,
            reason="type",
        )
    # A copy, so that the digested pixels are the prepared ones, whatever the caller does meanwhile.
    return ImageSource(path, settings, value=pixels.copy())


def as_pixels(value: Any, path: str, settings: Settings, *, batch: bool = False) -> np.ndarray | None:
    """An array or tensor as a view [height, width, 3] uint8, or None where it is neither.

    The order of axes is each library's own, and no other is guessed: channels last in numpy, first in torch.

    Args:
        value: anything.
        path: where it stands in the request, for messages.
        settings: limits.
        batch: whether it holds frames along a first axis.

    Raises:
        MediaError: another shape or dtype.
        LimitError: an image has more pixels than `max_image_pixels`.
    """
    if is_tensor(value):
        expected, channel = ("[n, 3, height, width]", 1) if batch else ("[3, height, width]", 0)
        good = is_dense(value) and str(value.dtype) == "torch.uint8" and value.ndim == 3 + batch
    elif isinstance(value, np.ndarray):
        expected, channel = ("[n, height, width, 3]", 3) if batch else ("[height, width, 3]", 2)
        good = value.dtype == np.uint8 and value.ndim == 3 + batch
    else:
        return None
    if not good or value.shape[channel] != 3 or 0 in value.shape:
        kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
        raise MediaError(
            f"{path}: {kind} must be {expected} uint8, got {list(value.shape)} {value.dtype}", path=path, reason="array"
        )
    if not isinstance(value, np.ndarray):
        try:
            value = np.moveaxis(value.detach().cpu().numpy(), channel, -1)
        except Exception as error:  # one without memory, such as on the device `meta`
            raise MediaError(
                f"{path}: the tensor cannot be read ({type(error).__name__})", path=path, reason="array"
            ) from error
    check_pixels(path, value.shape[-3], value.shape[-2], settings)
    found: np.ndarray = value
    return found


def raw_pixels(value: Any) -> int:
    """Pixels of an image or video given as a PIL object, an array or a tensor, counted without reading any; 0 for other values."""
    if isinstance(value, Image.Image):
        return value.width * value.height
    if isinstance(value, list | tuple):
        return sum(map(raw_pixels, value))
    if isinstance(value, VideoFrames):
        return raw_pixels(value.frames)
    if isinstance(value, np.ndarray) or is_tensor(value):
        return int(math.prod(value.shape)) // 3
    return 0


def normalize_image(image: Image.Image, *, background: Color = WHITE, orientation: int | None = None) -> np.ndarray:
    """Orientation, then transparency, then RGB: one order for every form in which an image comes.

    16-bit gray is scaled to 8 bits, not clipped. The given image is not changed.

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
        raise MediaError(f"unsupported image mode {image.mode}; convert it to 8 bits per channel", reason="mode")
    if image.mode.startswith("I"):
        return _gray16(image, background)
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, (*background, 255))
        if image.mode == "P":
            image = image.copy()  # converting it would write the alpha into the caller's palette
        layers.alpha_composite((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))
        image = layers
    return _to_array(image if image.mode == "RGB" else image.convert("RGB"))


def _gray16(image: Image.Image, background: Color) -> np.ndarray:
    levels = np.asarray(image)
    if levels.size and (int(levels.min()) < 0 or int(levels.max()) > 0xFFFF):
        raise MediaError("expected gray levels of 0 to 65535, got 32-bit levels; convert it to 8 bits", reason="mode")
    # 65535 becomes 255 and 0 stays 0; 257 levels of the wide scale make one of the narrow.
    narrow = ((levels.astype(np.uint32) + 128) // 257).astype(np.uint8)
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


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none or its block is corrupted."""
    try:
        # The base class's method: a PNG's own would decode the pixels, to look for a block after them.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:
        return 1


def _fit_transparency(image: PngImageFile) -> None:
    """A PNG stores its transparent level with its own bit depth; Pillow scales the pixels to 8 bits, but not that level."""
    raw = image.tile[0][3] if image.tile else ""
    key = image.info.get("transparency")
    if raw in _SPREAD and isinstance(key, int):
        image.info["transparency"] = key * _SPREAD[raw]
    elif raw == "RGB;16B" and isinstance(key, tuple):
        image.info["transparency"] = tuple(level >> 8 for level in key)


def _late_orientation(data: bytes) -> int:
    """The orientation that a PNG stores after its pixels, read without decoding them: from its head and its tail alone."""
    last = data.rfind(b"IDAT")
    tail = last + 8 + int.from_bytes(data[last - 4 : last], "big")  # after its data and its checksum
    if last < 4 or not any(name in data[tail:] for name in _LATE_CHUNKS):
        return 1
    try:
        with Image.open(io.BytesIO(data[:PNG_HEAD] + data[tail:]), formats=("PNG",)) as image:
            return _orientation(image)
    except Exception:
        return 1


def _decoded(pixels: np.ndarray) -> DecodedImage:
    return DecodedImage(Size(*pixels.shape[:2]), pixels)


def _pack(image: Image.Image) -> tuple[Any, ...]:
    """A loaded PIL image as plain values: all that its digest and its pixels depend on."""
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = image.palette.mode, bytes(image.getpalette("RGBA") or ())
    return image.mode, image.size, image.tobytes(), palette, image.info.get("transparency")


def _unpack(packed: tuple[Any, ...]) -> Image.Image:
    mode, size, data, palette, transparency = packed
    image = Image.frombytes(mode, size, data)
    if palette is not None:
        name, colors = palette
        image.putpalette(colors, "RGBA")
        image.load()
        assert image.palette is not None
        image.palette.mode = name  # by which Pillow knows whether the alpha counts
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def _decoding_image(path: str, settings: Settings) -> AbstractContextManager[None]:
    """Turn whatever Pillow raises into one error; see `decoder_errors.decoding`.

    Pillow's parsers are many and none promises one class; warnings are here too, since a server may have turned them into errors.
    """

    def translate(error: Exception) -> MMPluginError | None:
        if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
            # Pillow's own bound on this machine, which may be below ours.
            limit = min(settings.max_image_pixels, 2 * (Image.MAX_IMAGE_PIXELS or settings.max_image_pixels))
            return LimitError.exceeded(
                "pixels", path=path, setting="max_image_pixels", limit=limit, value=None, fix="send a smaller image"
            )
        if isinstance(error, UnidentifiedImageError):
            return MediaError(
                f"{path}: the bytes are not an image of a supported format; supported are PNG, JPEG, WebP, GIF, BMP, TIFF, PPM, "
                "JPEG 2000, AVIF and ICO",
                path=path,
                reason="format",
            )
        return None

    return decoding(path, "image", errors=lambda: (Exception,), translate=translate)
