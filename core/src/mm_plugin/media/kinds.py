"""The table of modalities: how a media input of each is opened, and what is known of its size. A new modality is a new row."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np

from mm_plugin.arrays import is_masked
from mm_plugin.errors import MediaError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media.audio import open_audio
from mm_plugin.media.images import open_image
from mm_plugin.media.limits import check_audio_samples, check_frames, check_pixels, check_video_seconds
from mm_plugin.media.source import MediaSize, MediaSource, SamplingRules
from mm_plugin.media.types import AudioSize, SampledVideo, Sampling, Size, VideoSize, is_sampling
from mm_plugin.media.video import open_video
from mm_plugin.settings import Settings


class OpenMedia(Protocol):
    """Opens a media input in any accepted form, without decoding it."""

    def __call__(self, value: Any, *, path: str, settings: Settings) -> MediaSource:
        """A source; raises `MediaError` or `LimitError`."""


class MediaKind(msgspec.Struct, frozen=True, eq=False):
    """One modality.

    Attributes:
        modality: which one.
        open: (value, *, path, settings) -> `MediaSource`; opens a media input in any accepted form, without decoding it.
        known_size: (size, rules, path, settings) -> the size that `layout` gets, from one that the caller gave; raises
            `UsageError` where it is not a size of this modality.
        pixels: pixels that are decoded for a media input of a size that `layout` gets.
        arrays: of a decoded media input, the arrays that may be the caller's own.

    Examples:
        >>> from mm_plugin import Modality, Settings
        >>> from mm_plugin.media import MEDIA_KINDS
        >>> kind = MEDIA_KINDS[Modality.IMAGE]
        >>> source = kind.open(np.zeros((4, 6, 3), np.uint8), path="images[0]", settings=Settings())
        >>> source.probe(), kind.pixels(source.probe())
        (Size(height=4, width=6), 24)
    """

    modality: Modality
    open: OpenMedia
    known_size: Callable[[Any, SamplingRules, str, Settings], MediaSize]
    pixels: Callable[[Any], int]
    arrays: Callable[[Any], list[np.ndarray]]


# ---------------------------------------------------------------- sizes that a caller gives


def _known_image(size: Any, rules: SamplingRules, path: str, settings: Settings) -> Size:  # noqa: ARG001 - one signature
    try:
        height, width = map(operator.index, (size.height, size.width) if isinstance(size, Size) else size)
    except (TypeError, ValueError):
        raise UsageError("size: expected (height, width), two whole numbers of pixels", argument="size") from None
    check_pixels(path, height, width, settings)
    return Size(height, width)


def _known_video(size: Any, rules: SamplingRules, path: str, settings: Settings) -> SampledVideo:
    if isinstance(size, SampledVideo):
        return _known_sampled(size, path, settings)
    if not isinstance(size, VideoSize):
        raise UsageError(
            f"size: expected a VideoSize or a SampledVideo for a video, got {type(size).__name__}", argument="size"
        )
    number = isinstance(size.fps, int | float)
    times = size.timestamps is None or _are_times(size.timestamps, size.frames)
    if not _has_whole_sides(size) or type(size.frames) is not int or not number or not times:
        raise UsageError(
            "size: the height, width and frames of a VideoSize must be ints, its fps a number, and its timestamps None or one "
            "for each frame",
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
    return SampledVideo.of(size, rules.sample(size))


def _are_times(timestamps: Any, frames: int) -> bool:
    """Whether there is a number for each frame."""
    if is_masked(timestamps):
        return False
    try:
        array = np.asarray(timestamps)
    except ValueError:  # rows of several lengths
        return False
    return array.shape == (frames,) and array.dtype.kind in "iuf" and bool(np.isfinite(array).all())


def _known_sampled(size: SampledVideo, path: str, settings: Settings) -> SampledVideo:
    whole_sides = _has_whole_sides(size)
    if whole_sides and isinstance(size.indices, np.ndarray) and not size.indices.size:
        raise MediaError(f"{path}: expected at least one sampled frame, got none", path=path, reason="empty")
    if not whole_sides or not is_sampling(Sampling(size.indices, size.timestamps, size.fps), 1 << 62):
        raise UsageError(
            "size: the height and width of a SampledVideo must be ints, its indices ascending int64, its timestamps finite "
            "float64, one for each index, and its fps positive",
            argument="size",
        )
    check_pixels(path, size.height, size.width, settings)
    return size


def _has_whole_sides(size: VideoSize | SampledVideo) -> bool:
    return type(size.height) is int and type(size.width) is int


def _known_audio(size: Any, rules: SamplingRules, path: str, settings: Settings) -> AudioSize:
    if not isinstance(size, AudioSize):
        raise UsageError(f"size: expected an AudioSize for audio, got {type(size).__name__}", argument="size")
    if type(size.num_samples) is not int or type(size.sampling_rate) is not int:
        raise UsageError("size: the samples and the sampling rate of an AudioSize must be ints", argument="size")
    if min(size.num_samples, size.sampling_rate) < 1:
        raise MediaError(
            f"{path}: expected at least one sample and a sampling rate of at least 1 Hz, got {size.num_samples} samples at "
            f"{size.sampling_rate} Hz",
            path=path,
            reason="empty",
        )
    check_audio_samples(path, size.num_samples, size.sampling_rate, settings)
    return size.at(rules.sampling_rate())


# ---------------------------------------------------------------- the table

MEDIA_KINDS: Mapping[Modality, MediaKind] = MappingProxyType(
    {
        kind.modality: kind
        for kind in (
            MediaKind(
                modality=Modality.IMAGE,
                open=open_image,
                known_size=_known_image,
                pixels=lambda size: size.height * size.width,
                arrays=lambda decoded: [decoded.pixels],
            ),
            MediaKind(
                modality=Modality.VIDEO,
                open=open_video,
                known_size=_known_video,
                pixels=lambda size: size.height * size.width * size.frames,
                arrays=lambda decoded: [],  # noqa: ARG005 - frames are copied as they are decoded
            ),
            MediaKind(
                modality=Modality.AUDIO,
                open=open_audio,
                known_size=_known_audio,
                pixels=lambda size: 0,  # noqa: ARG005
                arrays=lambda decoded: [decoded.samples],
            ),
        )
    }
)
