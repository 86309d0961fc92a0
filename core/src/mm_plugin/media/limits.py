"""Limits on media. Every check comes before what it guards is read, decoded or allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mm_plugin.arrays import is_masked
from mm_plugin.errors import LimitError, MediaError
from mm_plugin.settings import Settings

# Called with the number of bytes that are about to be read or copied; raises where a request may bring no more.
Arrived = Callable[[int], None]


def uncounted(count: int) -> None:
    """An `Arrived` for callers without a limit on the whole request."""


def check_bytes(path: str, size: int, settings: Settings) -> None:
    """Refuse more encoded bytes than `max_media_bytes`.

    Raises:
        LimitError: more bytes.
    """
    limit = settings.max_media_bytes
    if size > limit:
        raise LimitError.exceeded(
            "bytes", path=path, setting="max_media_bytes", limit=limit, value=size, fix="send a smaller file"
        )


def check_unmasked(path: str, value: Any) -> None:
    """Refuse a masked array or tensor, or a list of such: what is masked has no value, and a copy would show what lies below.

    Raises:
        MediaError: it is masked.
    """
    if is_masked(value):
        raise MediaError(
            f"{path}: expected an array without a mask, got a masked one; pass its .filled(level)",
            path=path,
            reason="array",
        )


def check_pixels(path: str, height: int, width: int, settings: Settings) -> None:
    """Refuse an image or frame without pixels, or with more than `max_image_pixels`.

    Raises:
        LimitError: more pixels.
        MediaError: a side is not positive.
    """
    limit = settings.max_image_pixels
    if height * width > limit:
        raise LimitError.exceeded(
            "pixels",
            path=path,
            setting="max_image_pixels",
            limit=limit,
            value=height * width,
            found=f"{height} x {width} (height x width)",
            fix="send a smaller image",
        )
    if height < 1 or width < 1:
        raise MediaError(f"{path}: expected at least 1 x 1 pixels, got {height} x {width}", path=path, reason="empty")


def check_decode_bytes(path: str, pixels: int, bytes_per_pixel: int, settings: Settings) -> None:
    """Refuse an image whose decoding takes more memory than `max_decode_bytes`.

    Args:
        path: where it stands in the request, for messages.
        pixels: of the image.
        bytes_per_pixel: what the decoder of its format and the way to RGB take at most, measured.
        settings: limits.

    Raises:
        LimitError: it takes more.
    """
    limit = settings.max_decode_bytes
    if pixels * bytes_per_pixel > limit:
        raise LimitError.exceeded(
            "bytes for decoding",
            path=path,
            setting="max_decode_bytes",
            limit=limit,
            value=pixels * bytes_per_pixel,
            fix="send a smaller image",
        )


def check_frames(path: str, frames: int, settings: Settings) -> None:
    """Refuse a video of more frames than `max_video_frames`.

    Raises:
        LimitError: more frames.
    """
    limit = settings.max_video_frames
    if frames > limit:
        raise LimitError.exceeded(
            "frames", path=path, setting="max_video_frames", limit=limit, value=frames, fix="send a shorter video"
        )


def check_video_seconds(path: str, seconds: float, settings: Settings) -> None:
    """Refuse a video that is longer than `max_video_seconds`.

    Raises:
        LimitError: it is longer.
    """
    limit = settings.max_video_seconds
    if seconds > limit:
        raise LimitError.exceeded(
            "seconds", path=path, setting="max_video_seconds", limit=limit, value=seconds, fix="send a shorter video"
        )


def check_audio_samples(path: str, samples: int, rate: int, settings: Settings) -> None:
    """Refuse audio that is longer than `max_audio_seconds`.

    Args:
        path: where it stands in the request, for messages.
        samples: of one channel.
        rate: samples per second.
        settings: limits.

    Raises:
        LimitError: it is longer.
    """
    limit = settings.max_audio_seconds
    if samples > limit * rate:
        raise LimitError.exceeded(
            "seconds",
            path=path,
            setting="max_audio_seconds",
            limit=limit,
            value=samples / rate,
            fix="send shorter audio",
        )


def check_request_bytes(path: str | None, size: int, settings: Settings) -> None:
    """Refuse media inputs that together have more bytes than `max_request_bytes`.

    Args:
        path: the media input at which the sum passed the limit.
        size: bytes of all media inputs up to and including this one.
        settings: limits.

    Raises:
        LimitError: more bytes.
    """
    limit = settings.max_request_bytes
    if size > limit:
        raise LimitError.exceeded(
            "bytes of media inputs in one request",
            path=path,
            setting="max_request_bytes",
            limit=limit,
            value=size,
            fix="send fewer or smaller media",
        )


def check_request_audio_seconds(path: str, seconds: float, settings: Settings) -> None:
    """Refuse audio inputs that together are longer than `max_request_audio_seconds`.

    Args:
        path: the audio at which the sum passed the limit.
        seconds: of all audio up to and including this one.
        settings: limits.

    Raises:
        LimitError: they are longer.
    """
    limit = settings.max_request_audio_seconds
    if seconds > limit:
        raise LimitError.exceeded(
            "seconds of audio in one request",
            path=path,
            setting="max_request_audio_seconds",
            limit=limit,
            value=seconds,
            fix="send fewer or shorter audio inputs",
        )


def check_request_pixels(path: str | None, pixels: int, settings: Settings) -> None:
    """Refuse media that together have more pixels than `max_request_pixels`.

    Args:
        path: the media input at which the sum passed the limit; None where all were summed at once.
        pixels: of all images and sampled frames up to and including this one.
        settings: limits.

    Raises:
        LimitError: more pixels.
    """
    limit = settings.max_request_pixels
    if pixels > limit:
        raise LimitError.exceeded(
            "pixels of images and sampled frames in one request",
            path=path,
            setting="max_request_pixels",
            limit=limit,
            value=pixels,
            fix="send fewer or smaller media",
        )
