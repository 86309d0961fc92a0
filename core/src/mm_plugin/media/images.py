"""Images: encoded files, PIL objects, arrays and tensors -> [height, width, 3] uint8 RGB.

All of them pass through one function, `pixels.normalize_image`.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from mm_plugin.arrays import is_dense, is_tensor, owned
from mm_plugin.errors import LimitError, MediaError, MMPluginError, UsageError
from mm_plugin.forking import new_lock
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.bmp import open_bitmap
from mm_plugin.media.brands import as_pillow_reads
from mm_plugin.media.decoder_errors import decoding
from mm_plugin.media.image_files import ImageFile, format_of, read_file
from mm_plugin.media.image_headers import inner_sizes
from mm_plugin.media.image_pieces import check_pieces
from mm_plugin.media.jpeg import load_jpeg, precision_of
from mm_plugin.media.limits import check_decode_bytes, check_pixels, check_unmasked
from mm_plugin.media.packed import pack, unpack
from mm_plugin.media.pixels import (
    TURNED,
    late_orientation_of,
    normalize_image,
    of_opened,
    orientation_of,
    scale_key,
    stored_as,
    wide_key_of,
)
from mm_plugin.media.quiet import quiet_libtiff
from mm_plugin.media.source import SamplingRules
from mm_plugin.media.sources import is_encoded, read_bytes
from mm_plugin.media.tiff import check_opened
from mm_plugin.media.types import WHITE, Color, DecodedImage, PackedImage, Size, VideoFrames
from mm_plugin.settings import Settings

_TILE_WIDTH, _TILE_LENGTH = 0x0142, 0x0143
# What is opened, where Pillow can: HEIF once an operator has registered an opener for it. Pillow's other decoders run other
# programs (EPS), or decode an image within the image whose size no header says (ICNS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "HEIF")
# Bytes that decoding takes for a pixel, those of the result among them: the most that was measured with an alpha channel, and of
# JPEG with several scans.
DECODING_BYTES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("PNG", "JPEG", "MPO", "GIF", "BMP", "TIFF", "PPM", "ICO"), 17)
    | {"AVIF": 20, "WEBP": 25, "JPEG2000": 25}
)
_MOST_DECODING_BYTES = 25
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
        self._file: ImageFile | None = None  # what of the data is decoded
        self._orientation: int | None = None  # of a PIL object, once it is loaded

    def __getstate__(self) -> dict[str, Any]:
        packed = isinstance(self._value, Image.Image)
        return {**self.__dict__, "_image": None, "_file": None, "_value": self.value() if packed else self._value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._value, PackedImage):
            self._value, self._orientation, self._file = unpack(self._value)

    @classmethod
    def unpacked(cls, path: str, settings: Settings, packed: PackedImage) -> ImageSource:
        """A source of an image that came as plain values; raises as `open_image` does."""
        check_pixels(path, packed.height, packed.width, settings)
        source = cls(path, settings)
        with _decoding_image(path, settings):
            source._value, source._orientation, source._file = unpack(packed)
        return source

    def value(self) -> bytes | np.ndarray | PackedImage:
        """See `MediaSource.value`; a PIL object is loaded, and raises as `probe` does."""
        if not isinstance(self._value, Image.Image):
            return self._value if self._data is None else self._data
        with _decoding_image(self.path, self._settings):
            self._open()
            # Pillow's own pickles lose the transparency of palettes and what a file's plugin knows.
            return pack(self._value, self._orientation or 1, self._file or ImageFile(b""))

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
            file = self._file or of_opened(image)
            self._image = None  # what Pillow decoded goes with this call
            if self._data is not None and image.format in ("JPEG", "MPO"):
                image = load_jpeg(image, self._data)
            return _decoded(normalize_image(image, background=background, orientation=turn, file=file), file.notes)

    def _open(self) -> Image.Image:
        """The image with its header read; a PIL object that was given, loaded."""
        if self._image is not None:
            return self._image
        if self._value is not None:
            if self._orientation is None:
                self._take()
            self._image = self._value
        else:
            self._image = self._open_data(self._data or b"")
        return self._image

    def _take(self) -> None:
        """Load the caller's PIL object and copy it, so that what is prepared is what was digested, whatever the caller does."""
        with _lock_of(self._value):
            if isinstance(self._value, TiffImageFile):
                check_opened(self._value)
                self._check_tiles(self._value)
                quiet_libtiff()
            stored = ""
            if isinstance(self._value, PngImageFile):
                if wide_key_of(self._value) is not None:
                    raise MediaError(
                        "the PNG has a transparent color of 16 bits, of which Pillow reads 8; pass the file itself",
                        reason="mode",
                    )
                stored = stored_as(self._value)  # before it is loaded
            self._value.load()
            turn = orientation_of(self._value)
            check_pixels(self.path, self._value.height, self._value.width, self._settings)
            self._file = of_opened(self._value)
            self._value, self._orientation = Image.Image.copy(self._value), turn
            scale_key(self._value, stored)

    def _open_data(self, data: bytes) -> Image.Image:
        Image.init()
        check_pieces(data)
        data, formats = as_pillow_reads(data, [name for name in _FORMATS if name in Image.OPEN])
        for height, width in inner_sizes(data):
            check_pixels(self.path, height, width, self._settings)
        self._file = read_file(data)
        image = open_bitmap(data) or self._open_by_pillow(self._file, formats)
        # Before load(): the header alone may promise more pixels than fit in memory.
        check_pixels(self.path, image.height, image.width, self._settings)
        taken = DECODING_BYTES.get(image.format or "", _MOST_DECODING_BYTES)
        check_decode_bytes(self.path, image.height * image.width, taken, self._settings)
        if isinstance(image, TiffImageFile):
            self._check_tiles(image)
        elif isinstance(image, PngImageFile):
            key = wide_key_of(image)
            if key is not None:
                del image.info["transparency"]  # compared in all its bits later
            self._file = msgspec.structs.replace(self._file, key=key)
            scale_key(image, stored_as(image))
        return image

    def _open_by_pillow(self, file: ImageFile, formats: list[str]) -> Image.Image:
        try:
            image = Image.open(io.BytesIO(file.data), formats=formats)
        except UnidentifiedImageError as error:
            name = format_of(file.data)
            if name is None:
                raise
            bits = precision_of(file.data) if name == "JPEG" else None
            if bits not in (None, 8):
                raise MediaError(f"the JPEG has samples of {bits} bits; convert it to 8 bits", reason="mode") from error
            raise MediaError(f"the {name} file is corrupted", reason="broken") from error
        except OSError as error:
            if format_of(file.data) is None:  # text that happens to begin like a bitmap
                raise UnidentifiedImageError from error
            if not str(error).startswith("Unsupported BMP"):
                raise
            raise MediaError(f"{error}; convert it to 24 or 32 bits", reason="mode") from error
        if isinstance(image, TiffImageFile):
            quiet_libtiff()
        return image

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
            a torch tensor [3, height, width] uint8, or a `PackedImage`. Arrays and tensors are copied here; a PIL image when it
            is first read, for its digest or its size.
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
    if isinstance(value, PackedImage):
        return ImageSource.unpacked(path, settings, value)
    pixels = as_pixels(value, path, settings)
    if pixels is None:
        raise MediaError(
            f"{path}: expected bytes, a path, a URL, base64, a PIL image, a numpy array or a torch tensor, "
            f"got {type(value).__name__}",
            path=path,
            reason="type",
        )
    # A copy, so that the digested pixels are the prepared ones, whatever the caller does meanwhile.
    return ImageSource(path, settings, value=owned(pixels))


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
    check_unmasked(path, value)
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
    frames = value.frames if isinstance(value, VideoFrames) else value
    # A list within a list is not a frame, however deep a client nests them.
    return sum(map(_raw_pixels, frames)) if isinstance(frames, list | tuple) else _raw_pixels(frames)


def _raw_pixels(value: Any) -> int:
    if isinstance(value, Image.Image):
        return value.width * value.height
    if isinstance(value, np.ndarray) or is_tensor(value):
        return int(math.prod(value.shape)) // 3
    return 0


def _decoded(pixels: np.ndarray, notes: tuple[str, ...] = ()) -> DecodedImage:
    return DecodedImage(Size(*pixels.shape[:2]), pixels, notes)


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
