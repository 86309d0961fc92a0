"""What is the same for every modality: a `MediaSource` that is opened, measured and decoded, and one row of a table each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from mm_plugin.errors import MediaError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media.audio import open_audio
from mm_plugin.media.images import open_image
from mm_plugin.media.limits import check_frames, check_pixels, check_video_seconds
from mm_plugin.media.types import AudioSize, DecodedMedia, SampledVideo, Sampling, Size, VideoSize, is_sampling
from mm_plugin.media.video import open_video, whole
from mm_plugin.settings import Settings


class Chooser(Protocol):
    """What a model decides before a media input can be measured."""

    def sample(self, size: VideoSize) -> SampledVideo:
        """The frames of a video that are used."""

    def sampling_rate(self) -> int:
        """The rate of audio, Hz."""


class MediaSource(Protocol):
    """One media input, opened and not decoded. It can be pickled.

    Attributes:
        path: where it stands in its request, such as `images[2]`.
    """

    path: str

    def digest(self) -> bytes:
        """32 bytes that tell this media input from others."""

    def decode(self, size: Any, **options: Any) -> DecodedMedia:
        """Decode what the size names."""


class MediaKind(msgspec.Struct, frozen=True):
    """Everything that the core knows of one modality's media inputs; a new modality is a new row of `MEDIA_KINDS`.

    Attributes:
        open: (value, path=, settings=) -> the source.
        size: (source, chooser) -> the size that the author's `layout` gets.
        known: (size, path, settings, chooser) -> the same from a size that a caller gives.
        decode: (source, size, options) -> the decoded media input.
        arrays: arrays of the decoded media input that may be the caller's own.
    """

    open: Callable[..., Any]
    size: Callable[[Any, Chooser], Any]
    known: Callable[[Any, str, Settings, Chooser], Any]
    decode: Callable[[Any, Any, Any], DecodedMedia]
    arrays: Callable[[Any], Sequence[np.ndarray]]


def _video_size(source: Any, chooser: Chooser) -> SampledVideo:
    size: VideoSize = source.probe()
    if not source.sampled:
        return chooser.sample(size)
    every = whole(size)
    return SampledVideo(size.height, size.width, every.indices, every.timestamps, float(every.fps))


def _known_image(size: Any, path: str, settings: Settings, _: Chooser) -> Size:
    try:
        image = Size(*map(operator.index, (size.height, size.width) if isinstance(size, Size) else size))
    except TypeError:
        raise UsageError(
            f"size: expected (height, width), two whole numbers of pixels, got {size!r}", argument="size"
        ) from None
    check_pixels(path, image.height, image.width, settings)
    return image


def _known_video(size: Any, path: str, settings: Settings, chooser: Chooser) -> SampledVideo:
    if not isinstance(size, VideoSize | SampledVideo):
        raise UsageError(
            f"size: expected a VideoSize or a SampledVideo for a video, got {type(size).__name__}", argument="size"
        )
    whole_sides = all(type(side) is int for side in (size.height, size.width))
    if isinstance(size, SampledVideo):
        if whole_sides and isinstance(size.indices, np.ndarray) and not size.indices.size:
            raise MediaError(f"{path}: expected at least one sampled frame, got none", path=path, reason="empty")
        if not whole_sides or not is_sampling(Sampling(size.indices, size.timestamps, size.fps), 1 << 62):
            raise UsageError(
                "size: a SampledVideo needs integer sides, int64 indices that ascend, a finite float64 timestamp for each, and "
                "an fps above 0",
                argument="size",
            )
        check_pixels(path, size.height, size.width, settings)
        return size
    number = isinstance(size.fps, int | float)
    times = size.timestamps is None or np.shape(size.timestamps) == (size.frames,)
    if not whole_sides or type(size.frames) is not int or not number or not times:
        raise UsageError(
            "size: a VideoSize needs integer sides, a number of frames, an fps, and a timestamp for each frame or none",
            argument="size",
        )
    check_pixels(path, size.height, size.width, settings)
    if size.frames < 1 or not 0 < size.fps < math.inf:
        raise MediaError(
            f"{path}: expected at least one frame and a positive fps, got {size.frames} frames at {size.fps}",
            path=path,
            reason="empty",
        )
    check_frames(path, size.frames, settings)
    check_video_seconds(path, size.duration, settings)
    return chooser.sample(size)


def _known_audio(size: Any, path: str, _: Settings, chooser: Chooser) -> AudioSize:
    if not isinstance(size, AudioSize):
        raise UsageError(f"size: expected an AudioSize for audio, got {type(size).__name__}", argument="size")
    if min(size.num_samples, size.sampling_rate) < 1:
        raise MediaError(
            f"{path}: expected at least one sample and a sampling rate of at least 1 Hz, got {size.num_samples} samples at "
            f"{size.sampling_rate} Hz",
            path=path,
            reason="empty",
        )
    return size.at(chooser.sampling_rate())


MEDIA_KINDS: Mapping[Modality, MediaKind] = {
    Modality.IMAGE: MediaKind(
        open=open_image,
        size=lambda source, _: source.probe(),
        known=_known_image,
        decode=lambda source, _, options: source.decode(background=options.background),
        arrays=lambda decoded: [decoded.pixels],
    ),
    Modality.VIDEO: MediaKind(
        open=open_video,
        size=_video_size,
        known=_known_video,
        decode=lambda source, size, options: source.decode(size, background=options.background),
        arrays=lambda _: [],
    ),
    Modality.AUDIO: MediaKind(
        open=open_audio,
        size=lambda source, chooser: source.probe(chooser.sampling_rate()),
        known=_known_audio,
        decode=lambda source, size, _: source.decode(size),
        arrays=lambda decoded: [decoded.samples],
    ),
}
