"""What a media input may be at most. Every check comes before what it guards is read, decoded or allocated."""

from __future__ import annotations

import sys

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.settings import Settings


def exceeds(path: str, what: str, setting: str, limit: float, value: float) -> LimitError:
    """The error of a value that is over a setting."""
    return LimitError(
        f"{path}: {what}, at most {limit} are accepted",
        path=path,
        setting=setting,
        limit=int(limit),
        value=int(min(value, sys.maxsize)),
    )


def check_bytes(path: str, size: int, settings: Settings) -> None:
    """Refuse more encoded bytes than `max_media_bytes`."""
    limit = settings.max_media_bytes
    if size > limit:
        raise exceeds(path, f"{size} bytes", "max_media_bytes", limit, size)


def check_pixels(path: str, height: int, width: int, settings: Settings) -> None:
    """Refuse an image or frame of no pixels, or of more than a limit allows.

    Raises:
        LimitError: more than `max_image_pixels`.
        MediaError: a side is not positive.
    """
    limit = settings.max_image_pixels
    if height * width > limit:
        raise exceeds(path, f"{height} x {width} pixels (height x width)", "max_image_pixels", limit, height * width)
    if height < 1 or width < 1:
        raise MediaError(f"{path}: an image of {height} x {width} pixels has no area", path=path, reason="empty")


def check_frames(path: str, frames: int, settings: Settings) -> None:
    """Refuse a video of more frames than `max_video_frames`."""
    limit = settings.max_video_frames
    if frames > limit:
        raise exceeds(path, f"{frames} frames", "max_video_frames", limit, frames)


def check_video_seconds(path: str, seconds: float, settings: Settings) -> None:
    """Refuse a video that is longer than `max_video_seconds`."""
    limit = settings.max_video_seconds
    if seconds > limit:
        raise exceeds(path, f"{seconds:.3f} seconds", "max_video_seconds", limit, seconds)


def check_audio_samples(path: str, samples: int, rate: int, settings: Settings) -> None:
    """Refuse an audio input that is longer than `max_audio_seconds`."""
    limit = settings.max_audio_seconds
    if samples > limit * rate:
        raise exceeds(path, f"{samples / rate:.3f} seconds", "max_audio_seconds", limit, samples / rate)


def check_request_pixels(path: str, pixels: int, settings: Settings) -> None:
    """Refuse media that have more pixels than `max_request_pixels`, all up to this one together."""
    limit = settings.max_request_pixels
    if pixels > limit:
        raise exceeds(path, f"{pixels} pixels", "max_request_pixels", limit, pixels)
