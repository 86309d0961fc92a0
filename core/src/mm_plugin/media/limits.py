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


def check_limit(
    setting: str, settings: Settings, path: str | None, value: float, what: str, *, found: str = "", fix: str = ""
) -> None:
    """Refuse more of something than a setting allows.

    Args:
        setting: the limit's name.
        settings: has it.
        path: where it stands in the request, for messages; None where it is of the whole request.
        value: how many there are.
        what: they are, in the plural.
        found: the value in words, where they say more than the number.
        fix: what the client can do.

    Raises:
        LimitError: there are more.
    """
    limit = getattr(settings, setting)
    if value > limit:
        raise LimitError.exceeded(what, path=path, setting=setting, limit=limit, value=value, found=found, fix=fix)


def check_bytes(path: str, size: int, settings: Settings) -> None:
    """Refuse more encoded bytes than `max_media_bytes`.

    Raises:
        LimitError: more bytes.
    """
    check_limit("max_media_bytes", settings, path, size, "bytes", fix="send a smaller file")


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
    check_limit(
        "max_image_pixels",
        settings,
        path,
        height * width,
        "pixels",
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
    check_limit(
        "max_decode_bytes", settings, path, pixels * bytes_per_pixel, "bytes for decoding", fix="send a smaller image"
    )


def check_frames(path: str, frames: int, settings: Settings) -> None:
    """Refuse a video of more frames than `max_video_frames`.

    Raises:
        LimitError: more frames.
    """
    check_limit("max_video_frames", settings, path, frames, "frames", fix="send a shorter video")


def check_video_seconds(path: str, seconds: float, settings: Settings) -> None:
    """Refuse a video that is longer than `max_video_seconds`.

    Raises:
        LimitError: it is longer.
    """
    check_limit("max_video_seconds", settings, path, seconds, "seconds", fix="send a shorter video")


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
    check_limit("max_audio_seconds", settings, path, min(samples, 1 << 63) / rate, "seconds", fix="send shorter audio")


def check_request_bytes(path: str | None, size: int, settings: Settings) -> None:
    """Refuse media inputs that together have more bytes than `max_request_bytes`.

    Args:
        path: the media input at which the sum passed the limit.
        size: bytes of all media inputs up to and including this one.
        settings: limits.

    Raises:
        LimitError: more bytes.
    """
    check_limit(
        "max_request_bytes",
        settings,
        path,
        size,
        "bytes of media inputs in one request",
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
    check_limit(
        "max_request_audio_seconds",
        settings,
        path,
        seconds,
        "seconds of audio in one request",
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
    check_limit(
        "max_request_pixels",
        settings,
        path,
        pixels,
        "pixels of images and sampled frames in one request",
        fix="send fewer or smaller media",
    )


def check_packets(path: str, packets: int, settings: Settings) -> None:
    """Refuse a file of more packets, all streams together, than `max_media_packets`.

    Raises:
        LimitError: more packets.
    """
    check_limit(
        "max_media_packets",
        settings,
        path,
        packets,
        "packets of all streams",
        fix="send a shorter file, or one with fewer streams",
    )


def check_decoded_pixels(path: str, pixels: int, settings: Settings) -> None:
    """Refuse a video of which more pixels must be decoded than `max_decoded_pixels`.

    Args:
        path: where it stands in the request, for messages.
        pixels: of all frames that are decoded, the ones between the sampled frames included.
        settings: limits.

    Raises:
        LimitError: more pixels.
    """
    check_limit(
        "max_decoded_pixels",
        settings,
        path,
        pixels,
        "decoded pixels",
        fix="send a shorter or smaller video, or one with more key frames",
    )
