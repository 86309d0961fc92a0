"""Videos: encoded files and lists of frames -> the chosen frames, one [height, width, 3] uint8 RGB array after another.

A file is read packet by packet for the times of its frames, which decodes none (`video_index`). Later exactly the chosen frames are
decoded; where seeking to a key frame skips enough of the others, it does (`video_frames`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mm_plugin.arrays import owned
from mm_plugin.errors import MediaError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.images import ImageSource, as_pixels, open_image
from mm_plugin.media.limits import check_bytes, check_frames, check_request_pixels, check_unmasked, check_video_seconds
from mm_plugin.media.pyav import av_decoding
from mm_plugin.media.source import SamplingRules
from mm_plugin.media.sources import is_encoded, is_remote, read_bytes
from mm_plugin.media.types import WHITE, Color, DecodedVideo, SampledVideo, VideoFrames, VideoSize, whole
from mm_plugin.media.video_file import VideoFile
from mm_plugin.media.video_frames import DecodedFrames
from mm_plugin.media.video_index import VideoIndex, read_index
from mm_plugin.settings import Settings


class EncodedVideo:
    """One encoded video, its size in bytes checked, not decoded yet. Final; made by `open_video`; a `MediaSource`.

    Attributes:
        path: where it stands in the request, such as `videos[0]`.
        sampled: whether its frames were chosen before it came: never.
    """

    sampled = False

    def __init__(self, path: str, settings: Settings, data: bytes) -> None:
        self.path, self._settings, self._data = path, settings, data
        self._index: VideoIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def value(self) -> bytes:
        """See `MediaSource.value`."""
        return self._data

    def digest(self) -> bytes:
        """What distinguishes this video from others: the digest of its encoded bytes, 32 bytes."""
        return digest(frame(["bytes", digest(self._data)]))

    def probe(self) -> VideoSize:
        """Size, frames, rate and times, from the packets.

        No frame is decoded, unless the header leaves the size or rotation open (then one is), or the packets do not say the time of
        each frame (then frames are counted by decoding).

        Raises:
            MediaError: it is not a video that can be opened.
            LimitError: it has more frames, seconds or pixels than a limit allows.
        """
        return self._indexed().size

    def size(self, rules: SamplingRules) -> SampledVideo:
        """The size with the frames chosen that the rules choose; raises as `probe` does."""
        measured = self.probe()
        return SampledVideo.of(measured, rules.sample(measured))

    def decode(self, size: SampledVideo, *, background: Color = WHITE) -> DecodedVideo:
        """The chosen frames, decoded while they are iterated; iterating raises as `probe` does.

        Args:
            size: which frames.
            background: RGB levels shown through transparent pixels.

        Raises:
            LimitError: more pixels must be decoded for them than a limit allows.
        """
        index = self._indexed()
        frames = DecodedFrames(self._file, index, size.indices.tolist(), background)
        return DecodedVideo(size, frames, notes=_notes(index))

    def _indexed(self) -> VideoIndex:
        if self._index is None:
            with av_decoding(self.path, "video"):
                self._index = read_index(self._file)
        return self._index

    @functools.cached_property
    def _file(self) -> VideoFile:
        return VideoFile(self.path, self._settings, self._data)


class GivenFrames:
    """One video that came as its frames. Final; made by `open_video`; a `MediaSource`.

    Attributes:
        path: where it stands in the request, such as `videos[0]`.
        sampled: whether its frames were chosen before it came.
    """

    def __init__(self, path: str, settings: Settings, value: VideoFrames) -> None:
        self.path = path
        self.sampled = value.sampled
        if not isinstance(self.sampled, bool):
            raise MediaError(
                f"{path}: sampled must be True or False, got {type(self.sampled).__name__}",
                path=path,
                reason="metadata",
            )
        pixels = as_pixels(value.frames, path, settings, batch=True)
        if pixels is None and not isinstance(value.frames, list | tuple):
            raise MediaError(
                f"{path}: frames must be a list of images, a numpy array or a torch tensor, got {type(value.frames).__name__}",
                path=path,
                reason="type",
            )
        count = len(value.frames)
        if not count:
            raise MediaError(f"{path}: expected at least one frame, got none", path=path, reason="empty")
        check_frames(path, count, settings)
        self._times, self._fps = _given_times(path, value, count)
        self._has_rate = value.fps is not None
        size = VideoSize(1, 1, count, self._fps, self._times)
        check_video_seconds(path, size.duration, settings)
        if pixels is not None:
            check_request_pixels(path, math.prod(pixels.shape[:3]), settings)
            pixels = owned(pixels)
        self._pixels = pixels
        self._sources = [] if pixels is not None else list(_images(value.frames, path, settings))

    def value(self) -> VideoFrames:
        """See `MediaSource.value`; PIL objects among its frames are loaded, and raise as `probe` does."""
        frames: Any = [source.value() for source in self._sources] if self._pixels is None else self._pixels
        if self._has_rate:
            return VideoFrames(frames, fps=self._fps, sampled=self.sampled)
        return VideoFrames(frames, timestamps=self._times.tolist(), sampled=self.sampled)

    def digest(self) -> bytes:
        """What distinguishes this video from others: its frames, their times, and whether they were chosen; 32 bytes."""
        content: Any = [source.digest() for source in self._sources]
        if self._pixels is not None:
            content = feature_digest(self._pixels)
        return digest(frame(["frames", content, self._times, self._fps, self.sampled]))

    def probe(self) -> VideoSize:
        """Size, frames, rate and times.

        Raises:
            MediaError: a frame is not a readable image, or the frames differ in size.
        """
        if self._pixels is not None:
            height, width = self._pixels.shape[1:3]
        else:
            sizes = {(size.height, size.width) for size in (source.probe() for source in self._sources)}
            if len(sizes) > 1:
                raise MediaError(
                    f"{self.path}: expected frames of one size, got {len(sizes)} sizes", path=self.path, reason="size"
                )
            ((height, width),) = sizes
        return VideoSize(height, width, len(self._times), self._fps, self._times)

    def size(self, rules: SamplingRules) -> SampledVideo:
        """The size with every frame where they were chosen before, with those that the rules choose otherwise."""
        measured = self.probe()
        return SampledVideo.of(measured, whole(measured) if self.sampled else rules.sample(measured))

    def decode(self, size: SampledVideo, *, background: Color = WHITE) -> DecodedVideo:
        """The chosen frames, decoded while they are iterated.

        Args:
            size: which frames.
            background: RGB levels shown through transparent pixels.
        """
        return DecodedVideo(size, _PickedFrames(self, size, background))

    def image(self, place: int, background: Color) -> np.ndarray:
        """One frame."""
        if self._pixels is not None:
            return np.ascontiguousarray(self._pixels[place])
        pixels: np.ndarray = self._sources[place].decode(background=background).pixels
        return pixels


class _PickedFrames:
    """Some of the frames that were given; see `Frames`."""

    def __init__(self, footage: GivenFrames, size: SampledVideo, background: Color) -> None:
        self._video, self._size, self._background = footage, size, background

    def __len__(self) -> int:
        return len(self._size.indices)

    def __iter__(self) -> Iterator[np.ndarray]:
        last, pixels = -1, np.zeros((0, 0, 3), dtype=np.uint8)
        for place in self._size.indices.tolist():
            if place != last:
                pixels, last = self._video.image(place, self._background), place
            if pixels.shape[:2] != (self._size.height, self._size.width):
                raise MediaError(
                    f"{self._video.path}: expected a frame of {self._size.height} x {self._size.width} pixels, got "
                    f"{pixels.shape[0]} x {pixels.shape[1]}",
                    path=self._video.path,
                    reason="size",
                )
            yield pixels


VideoSource = EncodedVideo | GivenFrames


def _notes(index: VideoIndex) -> tuple[str, ...]:
    if not index.left_out:
        return ()
    frames = "the last frame is" if index.left_out == 1 else f"{index.left_out} of the last frames are"
    return (f"{frames} damaged or cut off, and left out",)


def open_video(value: Any, *, path: str, settings: Settings) -> VideoSource:
    """Open a video in any accepted form, without decoding it.

    Args:
        value: an encoded video in any form that an encoded image may have, or `VideoFrames`.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        MediaError: the value is of another kind, cannot be read, or has frames without times.
        LimitError: it has more bytes, frames, seconds or pixels than a limit allows.
    """
    if is_encoded(value):
        return EncodedVideo(path, settings, read_bytes(value, path, settings))
    if isinstance(value, VideoFrames):
        return GivenFrames(path, settings, value)
    if isinstance(value, list | tuple) or hasattr(value, "shape"):
        raise MediaError(
            f"{path}: expected frames with their times, got frames alone; pass VideoFrames(frames, fps=...) or "
            "VideoFrames(frames, timestamps=...)",
            path=path,
            reason="metadata",
        )
    raise MediaError(
        f"{path}: expected bytes, a path, a URL, base64 or VideoFrames, got {type(value).__name__}",
        path=path,
        reason="type",
    )


def _images(frames: Sequence[Any], path: str, settings: Settings) -> Iterator[ImageSource]:
    """Each frame opened; all together are held to the bytes of one media input, and arrays to the pixels of a request."""
    total = pixels = 0
    for frame_given in frames:
        if is_remote(frame_given):
            # A video is one media input: it is fetched from one URL, or the caller fetches its frames.
            raise MediaError(
                f"{path}: frames cannot be URLs; fetch the frames first, or pass the URL of a video",
                path=path,
                reason="url",
            )
        if hasattr(frame_given, "shape"):
            found = as_pixels(frame_given, path, settings)
            pixels += 0 if found is None else found.shape[0] * found.shape[1]
            check_request_pixels(path, pixels, settings)
        source = open_image(frame_given, path=path, settings=settings)
        total += source.num_bytes
        check_bytes(path, total, settings)
        yield source


def _given_times(path: str, value: VideoFrames, count: int) -> tuple[np.ndarray, float]:
    """Timestamps from 0 on and the rate, from whichever of the two was given."""
    if (value.fps is None) == (value.timestamps is None):
        given = "neither" if value.fps is None else "both"
        raise MediaError(
            f"{path}: VideoFrames needs either fps or timestamps, got {given}", path=path, reason="metadata"
        )
    check_unmasked(path, value.timestamps)
    try:
        with np.errstate(all="ignore"):  # what is not finite in the end is refused below
            if value.timestamps is None:
                fps = float(value.fps or 0)
                times = np.arange(count, dtype=np.float64) / fps if fps > 0 else np.full(count, np.nan)
            else:
                times = np.array(value.timestamps, dtype=np.float64)
                if times.shape != (count,):
                    raise MediaError(
                        f"{path}: expected one timestamp for each of {count} frames, got {times.size}",
                        path=path,
                        reason="metadata",
                    )
                times = times - times[0]
                fps = (count - 1) / float(times[-1]) if count > 1 and times[-1] > 0 else 1.0
            steps = np.diff(times)
    except (TypeError, ValueError, OverflowError) as error:
        raise MediaError(f"{path}: fps and timestamps must be numbers", path=path, reason="metadata") from error
    if not np.isfinite(times).all() or not np.isfinite(fps) or not (steps > 0).all():
        raise MediaError(
            f"{path}: fps must be positive and finite, timestamps finite and ascending", path=path, reason="metadata"
        )
    return times, fps
