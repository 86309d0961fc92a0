"""Images: encoded files, PIL objects, arrays and tensors -> [height, width, 3] uint8 RGB.

All of them pass through one function, `pixels.normalize_image`.
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
from mm_plugin.forking import new_lock
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.decoder_errors import decoding
from mm_plugin.media.image_headers import inner_sizes
from mm_plugin.media.limits import check_pixels
from mm_plugin.media.pixels import TURNED, fit_transparency, late_orientation_of, normalize_image, orientation_of
from mm_plugin.media.source import SamplingRules
from mm_plugin.media.sources import is_encoded, read_bytes
from mm_plugin.media.types import WHITE, Color, DecodedImage, Size, VideoFrames
from mm_plugin.settings import Settings

_TILE_WIDTH, _TILE_LENGTH = 0x0142, 0x0143
# What is opened, where Pillow can: HEIF once an operator has registered an opener for it. Pillow's other decoders run other
# programs (EPS), or decode an image within the image whose size no header says (ICNS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "HEIF")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
# Two items, even of two requests, may be one lazily opened PIL object, which is not safe to load, or to read EXIF of, from two
# threads. PIL objects are not hashable, so they share a few locks by address.
_LOCKS = tuple(new_lock() for _ in range(64))


def _lock_of(image: Image.Image) -> threading.Lock:
    return _LOCKS[id(image) // 16 % len(_LOCKS)]


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
            if self._turn(image) in TURNED:
                width, height = height, width
        return Size(height, width)

    def size(self, rules: SamplingRules | None = None) -> Size:
        """As `probe`."""
        return self.probe()

    def decode(self, size: Size | None = None, *, background: Color = WHITE) -> DecodedImage:
        """Every pixel of it.

        Args:
            size: without effect: an image is decoded whole.
            background: RGB levels shown through transparent pixels.

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
                    self._orientation = orientation_of(self._value)
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
                fit_transparency(image)
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
        found = orientation_of(image)
        return late_orientation_of(self._data or b"") if found == 1 and image.format == "PNG" else found


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
