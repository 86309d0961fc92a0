"""Untrusted bytes, paths, URLs, arrays, PIL objects, frames and samples -> one normalised medium. Every limit on media ends here.

`sources` and `remote` find the encoded bytes, `images`, `video` and `audio` decode, `containers` opens what the last two share;
`inner` reads what the pictures within a file claim; `limits` says what a medium may be at most, and `sizes` what it is before and
after it is decoded.
"""

from __future__ import annotations

from typing import Any

from mm_plugin.media.audio import AudioSource, open_audio
from mm_plugin.media.images import ImageSource, normalise_image, open_image, raw_pixels
from mm_plugin.media.limits import check_pixels
from mm_plugin.media.sizes import (
    WHITE,
    AudioSamples,
    AudioSize,
    Color,
    Frames,
    Medium,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
)
from mm_plugin.media.sources import is_remote
from mm_plugin.media.video import VideoSource, open_video, whole
from mm_plugin.settings import Settings
from mm_plugin.structs import Modality

__all__ = [
    "WHITE",
    "AudioSamples",
    "AudioSize",
    "AudioSource",
    "Color",
    "Frames",
    "ImageSource",
    "Medium",
    "SampledVideo",
    "Sampling",
    "Size",
    "VideoFrames",
    "VideoSize",
    "VideoSource",
    "check_pixels",
    "is_remote",
    "normalise_image",
    "open_audio",
    "open_image",
    "open_video",
    "probe",
    "raw_pixels",
    "whole",
]


def probe(
    value: Any, *, modality: Modality | str = Modality.IMAGE, settings: Settings | None = None
) -> Size | VideoSize | AudioSize:
    """How large a medium is, without decoding it: what `ModelProcessor.count` takes.

    Args:
        value: anything that `open_image`, `open_video` or `open_audio` takes.
        modality: what it is.
        settings: limits; the defaults where None.

    Returns:
        A `Size` in pixels; a `VideoSize` with frames and fps; or an `AudioSize` at the file's own rate, as its head tells it.

    Raises:
        MediaError: it cannot be opened.
        LimitError: it is larger than a limit allows.
    """
    modality = Modality.parse(modality)
    settings = Settings() if settings is None else settings
    path = modality.name.lower()
    if modality is Modality.IMAGE:
        return open_image(value, path=path, settings=settings).probe()
    if modality is Modality.VIDEO:
        return open_video(value, path=path, settings=settings).probe()
    return open_audio(value, path=path, settings=settings).header()
