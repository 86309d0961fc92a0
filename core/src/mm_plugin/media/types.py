"""What describes a media input before and after it is decoded: sizes, samplings, raw frames and samples. Decodes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from mm_plugin.items import Modality, are_notes

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)


class Size(msgspec.Struct, frozen=True):
    """The size of an image, known without decoding it: pixels, after orientation.

    Attributes:
        height: pixels.
        width: pixels.
    """

    height: int
    width: int


class VideoSize(msgspec.Struct, frozen=True, eq=False):
    """The size of a video before its frames are sampled, known without decoding it.

    Attributes:
        height: of a frame, pixels, after rotation.
        width: of a frame, pixels, after rotation.
        frames: in the whole video.
        fps: frames per second, on average.
        timestamps: [frames] float64, when each frame is displayed, seconds from the first; index / fps where None.
    """

    height: int
    width: int
    frames: int
    fps: float
    timestamps: np.ndarray | None = None

    @property
    def duration(self) -> float:
        """Seconds; the last frame is displayed as long as an average frame."""
        last = (self.frames - 1) / self.fps if self.timestamps is None else float(self.timestamps[-1])
        return last + 1 / self.fps

    def times(self, indices: np.ndarray) -> np.ndarray:
        """When chosen frames are displayed, seconds from the first.

        Shape:
            indices [n] int64; returns [n] float64.
        """
        found: np.ndarray = indices / self.fps if self.timestamps is None else self.timestamps[indices]
        return found


class Sampling(msgspec.Struct, frozen=True, eq=False):
    """Which frames of a video are used, and the only source of its times after the sampling.

    Attributes:
        indices: [n] int64, never descending; n is at least 1.
        timestamps: [n] float64, when each is displayed, seconds from the video's first frame.
        fps: chosen frames per second.
        notes: what was chosen otherwise than asked, one sentence each, such as fewer frames than an option names; they reach
            the item.

    Example:
        >>> size = VideoSize(height=48, width=64, frames=10, fps=5.0)
        >>> sampling = Sampling.of(size, np.array([0, 5]))
        >>> sampling.timestamps.tolist(), sampling.fps
        ([0.0, 1.0], 1.0)
    """

    indices: np.ndarray
    timestamps: np.ndarray
    fps: float
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, size: VideoSize, indices: np.ndarray, notes: Sequence[str] = ()) -> Sampling:
        """These frames of a video, with their times and their rate: the video's, reduced by the share of frames that is used.

        Shape:
            indices [n] int64.
        """
        return cls(indices, size.times(indices), len(indices) / size.frames * size.fps, notes)


def whole(size: VideoSize) -> Sampling:
    """Every frame of a video: for one whose frames were chosen before it came."""
    return Sampling.of(size, np.arange(size.frames, dtype=np.int64))


def is_sampling(value: Any, frames: int) -> bool:
    """Whether a value is a `Sampling` of frames of a video with so many, with a finite time for each, a positive rate and notes."""
    if not isinstance(value, Sampling) or not isinstance(value.fps, int | float) or not 0 < value.fps < math.inf:
        return False
    if not are_notes(value.notes):
        return False
    for part, dtype in ((value.indices, np.int64), (value.timestamps, np.float64)):
        if not isinstance(part, np.ndarray) or part.dtype != dtype or part.ndim != 1 or not len(part):
            return False
    indices, times = value.indices, value.timestamps
    inside = indices[0] >= 0 and indices[-1] < frames and not (np.diff(indices) < 0).any()
    return bool(inside and len(times) == len(indices) and np.isfinite(times).all())


class SampledVideo(msgspec.Struct, frozen=True, eq=False):
    """The size of a video after its frames were sampled; attributes as in `VideoSize` and `Sampling`.

    Example:
        >>> size = VideoSize(height=48, width=64, frames=10, fps=5.0)
        >>> SampledVideo.of(size, Sampling.of(size, np.array([0, 5]))).frames
        2
    """

    height: int
    width: int
    indices: np.ndarray
    timestamps: np.ndarray
    fps: float
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, size: VideoSize, chosen: Sampling) -> SampledVideo:
        """A video with these of its frames chosen."""
        return cls(size.height, size.width, chosen.indices, chosen.timestamps, float(chosen.fps), tuple(chosen.notes))

    @property
    def frames(self) -> int:
        """Number of chosen frames."""
        return len(self.indices)


class AudioSize(msgspec.Struct, frozen=True):
    """The length of audio.

    Attributes:
        num_samples: of one channel.
        sampling_rate: samples per second.
    """

    num_samples: int
    sampling_rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.num_samples / self.sampling_rate

    def at(self, sampling_rate: int) -> AudioSize:
        """The same audio at another rate; a part of a sample at its end counts as one.

        Examples:
            >>> AudioSize(num_samples=44_101, sampling_rate=44_100).at(16_000)
            AudioSize(num_samples=16001, sampling_rate=16000)
        """
        return AudioSize(-(-self.num_samples * sampling_rate // self.sampling_rate), sampling_rate)


class Frames(Protocol):
    """The chosen frames of a video, decoded one by one while they are iterated, again each time.

    A frame is [height, width, 3] uint8 RGB, contiguous. A frame that was chosen twice is yielded twice, as the same array.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[np.ndarray]: ...


class DecodedImage(msgspec.Struct, frozen=True, eq=False):
    """A decoded image, which `prepare` gets.

    Attributes:
        size: height and width after orientation, pixels.
        pixels: [height, width, 3] uint8 RGB, contiguous.
        notes: what was served otherwise than asked or expected, such as one page of several; complete once `prepare` has read
            the media input to its end.

    Example:
        >>> image = DecodedImage(Size(2, 3), np.zeros((2, 3, 3), np.uint8))
        >>> image.modality.name, image.pixels.shape
        ('IMAGE', (2, 3, 3))
    """

    modality: ClassVar[Modality] = Modality.IMAGE
    size: Size
    pixels: np.ndarray
    notes: Sequence[str] = ()


class DecodedVideo(msgspec.Struct, frozen=True, eq=False):
    """A video with its frames chosen, which `prepare` gets.

    Attributes:
        size: the frames that were chosen.
        frames: those frames, decoded while they are iterated.
        notes: what was served otherwise than asked or expected, such as one page of several; complete once `prepare` has read
            the media input to its end.

    Example:
        >>> size = VideoSize(height=2, width=3, frames=4, fps=2.0)
        >>> sampled = SampledVideo.of(size, Sampling.of(size, np.array([0, 2])))
        >>> video = DecodedVideo(sampled, [np.zeros((2, 3, 3), np.uint8)] * 2)
        >>> video.modality.name, len(video.frames)
        ('VIDEO', 2)
    """

    modality: ClassVar[Modality] = Modality.VIDEO
    size: SampledVideo
    frames: Frames
    notes: Sequence[str] = ()


class DecodedAudio(msgspec.Struct, frozen=True, eq=False):
    """Decoded audio, which `prepare` gets.

    Attributes:
        size: samples and their rate.
        samples: [num_samples] float32, mono, full scale is -1..1.
        notes: what was served otherwise than asked or expected, such as one page of several; complete once `prepare` has read
            the media input to its end.

    Example:
        >>> audio = DecodedAudio(AudioSize(8, 16_000), np.zeros(8, np.float32))
        >>> audio.modality.name, audio.size.sampling_rate
        ('AUDIO', 16000)
    """

    modality: ClassVar[Modality] = Modality.AUDIO
    size: AudioSize
    samples: np.ndarray
    notes: Sequence[str] = ()


DecodedMedia = DecodedImage | DecodedVideo | DecodedAudio


class VideoFrames(msgspec.Struct, frozen=True, eq=False):
    """A video given as its frames and their times: exactly one of `fps` and `timestamps`.

    Attributes:
        frames: a list of images in any form that an image may have, a numpy array [n, height, width, 3] uint8, or a
            torch tensor [n, 3, height, width] uint8.
        fps: frames per second.
        timestamps: when each frame is displayed, seconds, ascending.
        sampled: whether these frames were chosen before; all of them are used then.

    Examples:
        >>> from mm_plugin.media import probe
        >>> video = VideoFrames(np.zeros((8, 4, 6, 3), np.uint8), fps=2)
        >>> probe(video, modality="video").frames
        8
    """

    frames: Any
    fps: float | None = None
    timestamps: Sequence[float] | None = None
    sampled: bool = True


class AudioSamples(msgspec.Struct, frozen=True, eq=False):
    """Audio given as its samples.

    Attributes:
        samples: numpy or torch, [num_samples] or [channels, num_samples]; floats with full scale -1..1, or int16.
        sampling_rate: samples per second.

    Examples:
        >>> from mm_plugin.media import probe
        >>> probe(AudioSamples(np.zeros(8000, np.float32), 16_000), modality="audio").duration
        0.5
    """

    samples: Any
    sampling_rate: int


class PackedImage(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    r"""A PIL image as plain values: all that its digest and its pixels depend on. `open_image` takes it.

    Made by `ImageSource.value`.

    Attributes:
        mode: of Pillow.
        width: pixels, before it is turned.
        height: pixels, before it is turned.
        data: its pixels as `PIL.Image.Image.tobytes` returns them.
        palette: Pillow's mode of the palette, and its colors as RGBA; None where the mode has no palette.
        transparency: what Pillow's `info` says of transparent pixels.
        orientation: EXIF orientation by which it is turned.
        levels: bits of a gray level of more than 8 bits, and whether 0 is white.
        file_palette: of a TIFF, its own palette in place of Pillow's; None elsewhere.
        frame: of a GIF, the part of its screen that its frame covers: left, top, right, bottom; None elsewhere.
        is_bitmap: whether its pixels are those of a Windows bitmap.

    Example:
        >>> from PIL import Image
        >>> from mm_plugin import Settings
        >>> from mm_plugin.media import open_image
        >>> source = open_image(Image.new("L", (3, 2), 7), path="images[0]", settings=Settings())
        >>> packed = source.value()
        >>> packed.mode, packed.width, packed.data
        ('L', 3, b'\x07\x07\x07\x07\x07\x07')
        >>> open_image(packed, path="images[0]", settings=Settings()).digest() == source.digest()
        True
    """

    mode: str
    width: int
    height: int
    data: bytes
    palette: tuple[str, bytes] | None = None
    transparency: int | bytes | tuple[int, ...] | None = None
    orientation: int = 1
    levels: tuple[int, bool] = (16, False)
    file_palette: bytes | None = None
    frame: tuple[int, int, int, int] | None = None
    is_bitmap: bool = False
