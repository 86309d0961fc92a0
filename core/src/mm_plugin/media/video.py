"""Videos: encoded files and lists of frames -> the sampled frames, one [height, width, 3] uint8 RGB array after another.

A file is read packet by packet for its frames' times, which decodes none. Later exactly the chosen frames are decoded into
images; where the container can be entered at a key frame, the stretches between them are left out.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.images import ImageSource, as_pixels, open_image
from mm_plugin.media.limits import check_bytes, check_frames, check_pixels, check_request_pixels, check_video_seconds
from mm_plugin.media.pyav import CheckedFile, decoding, open_container, open_packets
from mm_plugin.media.sources import is_encoded, is_remote, read_bytes
from mm_plugin.media.types import WHITE, Color, DecodedVideo, SampledVideo, Sampling, VideoFrames, VideoSize
from mm_plugin.settings import Settings

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# FFmpeg's names.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
_CODECS = frozenset(
    {
        "h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "gif", "theora",
        "msmpeg4v2", "msmpeg4v3", "prores",
    }
)  # fmt: skip
# Of AVI, the codecs of which FFmpeg tells when their frames are shown.
_IN_ORDER = ("mpeg4", "msmpeg4v2", "msmpeg4v3", "mjpeg")
# Containers that know where their key frames are.
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
# A key frame that is fewer frames ahead is reached by decoding; measured: entering again costs as much as some frames.
_WORTH_SEEKING = 16
# The matrix of an mp4 file that turns nothing, as its bytes.
_UNTURNED = np.array([65536, 0, 0, 0, 65536, 0, 0, 0, 0x40000000], dtype=">i4").tobytes()


class _Turn(NamedTuple):
    """How a viewer turns a frame: sides are exchanged first, then rows or columns are read backwards."""

    exchanged: bool = False
    upwards: bool = False
    leftwards: bool = False


_QUARTERS = (_Turn(), _Turn(True, True, False), _Turn(False, True, True), _Turn(True, False, True))  # counterclockwise


class _Index(msgspec.Struct, frozen=True, eq=False):
    """What a file's packets tell of its frames.

    Attributes:
        size: after rotation.
        turn: how a frame is turned.
        pts: of each frame in the order in which they are shown; None where packets do not tell, and frames are counted instead.
        keys: pts of key frames, ascending.
        seekable: whether the container can be entered at a key frame.
    """

    size: VideoSize
    turn: _Turn
    pts: list[int] | None
    keys: list[int]
    seekable: bool


class EncodedVideo:
    """One encoded video, checked for its bytes, and not decoded yet. Final; made by `open_video`.

    Attributes:
        path: where it stands in the request, such as `videos[0]`.
        sampled: whether its frames were chosen before it came.
    """

    sampled = False

    def __init__(self, path: str, settings: Settings, data: bytes) -> None:
        self.path, self._settings, self._data = path, settings, data
        self._index: _Index | None = None

    def digest(self) -> bytes:
        """What tells this video from others: of its encoded bytes.

        Returns:
            32 bytes.
        """
        return digest(frame(["bytes", digest(self._data)]))

    def probe(self) -> VideoSize:
        """Size, frames, rate and times, from the packets.

        No frame is decoded, unless the file's head leaves its size or rotation open (then one is), or its packets do not tell the
        time of each frame (then they are counted by decoding).

        Raises:
            MediaError: it is no video that can be opened.
            LimitError: it has more frames, seconds or pixels than a limit allows.
        """
        if self._index is None:
            with decoding(self.path, "video"):
                self._index = self._read_index()
        return self._index.size

    def decode(self, size: SampledVideo, *, background: Color = WHITE) -> DecodedVideo:
        """The chosen frames, decoded while they are iterated; iterating raises as `probe` does.

        Args:
            size: which frames.
            background: RGB levels behind transparent pixels.
        """
        self.probe()
        assert self._index is not None
        frames = _DecodedFrames(self, self._index, size.indices.tolist(), background)
        return DecodedVideo(size, frames)

    @functools.cached_property
    def _file(self) -> CheckedFile:
        return CheckedFile(self._data)

    # ---------------------------------------------------------------- reading packets

    def _read_index(self) -> _Index:
        with open_packets(self._file, _FORMATS) as (container, packets):
            stream = self._stream(container)
            pts: list[int | None] = []
            keys: list[int] = []
            hidden = _hidden_frames(stream)
            for packet in packets:
                if packet.stream is not stream or packet.size == 0:
                    continue
                if packet.is_keyframe and packet.pts is not None:
                    if not keys:
                        pts.clear()  # what comes before cannot be decoded: the video was cut out of a longer one
                    keys.append(packet.pts)
                if packet.is_discard or (hidden and not memoryview(packet)[0] & hidden):
                    continue
                if packet.pts is None or not keys or packet.pts >= keys[0]:
                    pts.append(packet.pts)
                    check_frames(self.path, len(pts), self._settings)
            if not pts:
                raise MediaError("the video holds no frame", reason="empty")
            seekable = container.format.name in _SEEKABLE
            # A file whose every matrix turns nothing needs no look at a frame.
            mov = container.format.name == _SEEKABLE[0]
            upright = mov and self._data.count(_UNTURNED) >= self._data.count(b"tkhd") + self._data.count(b"mvhd")
            height, width, base = stream.height, stream.width, stream.time_base
            rate = stream.average_rate or stream.guessed_rate
            # AVI numbers frames as they are stored, which need not be as they are shown.
            numbered = container.format.name == "avi" and stream.codec_context.codec.canonical_name not in _IN_ORDER
        ordered = sorted({time for time in pts if time is not None})
        known = not numbered and len(ordered) == len(pts)
        turn = _Turn()
        if not known or not upright or not height or not width:
            height, width, turn, shown, count = self._look(every=not known)
            if not known and shown is not None:
                ordered = shown
            elif not known:
                ordered, base = list(range(count)), 1 / rate if rate else None
        if base is None:
            raise MediaError("the file does not tell when its frames are shown", reason="metadata")
        if turn.exchanged:
            height, width = width, height
        check_pixels(self.path, height, width, self._settings)
        times, fps = _times(ordered, base, rate)
        size = VideoSize(height, width, len(ordered), fps, times)
        check_video_seconds(self.path, size.duration, self._settings)
        return _Index(size, turn, ordered if known else None, sorted(keys), seekable)

    def _look(self, *, every: bool) -> tuple[int, int, _Turn, list[int] | None, int]:
        """(height, width, turn) as the first frame has them; the times of every frame, None where not all tell; their count."""
        times: list[int] = []
        first, count, last, told = None, 0, None, True
        with open_container(self._file, _FORMATS) as container:
            for shown in container.decode(self._stream(container)):
                first = (shown.height, shown.width, _turn_of(shown)) if first is None else first
                if not every:
                    break
                count += 1
                check_frames(self.path, count, self._settings)
                told = told and shown.pts is not None and (last is None or shown.pts > last)
                last = shown.pts
                if told:
                    times.append(shown.pts)
        if first is None:
            raise MediaError("the video holds no frame that can be decoded", reason="broken")
        return *first, times if told else None, count

    def _stream(self, container: InputContainer) -> VideoStream:
        """The first stream that is a moving image, ready to be decoded."""
        from av.stream import Disposition

        for stream in container.streams.video:
            if not stream.disposition & Disposition.attached_pic:
                break
        else:
            raise MediaError("the file holds no video", reason="format")
        codec = stream.codec_context
        if codec is None or codec.codec.canonical_name not in _CODECS:
            raise MediaError("the video's codec is none that is decoded here", reason="codec")
        check_pixels(self.path, max(stream.height, 1), max(stream.width, 1), self._settings)
        # What a frame says of its own size counts too; a decoder works in whole blocks, so it may ask for a little more.
        limit = self._settings.max_image_pixels
        codec.options = {"max_pixels": str(limit + limit // 8 + (1 << 16))}
        stream.thread_type = "AUTO"
        codec.thread_count = min(2, self._settings.threads)
        return stream

    # ---------------------------------------------------------------- decoding

    def chosen(self, index: _Index, indices: Sequence[int]) -> Iterator[VideoFrame]:
        """The decoded frames at these indices, ascending and each once."""
        done = 0
        if index.pts is not None and index.seekable:
            for shown in self._entered(index, [index.pts[place] for place in indices]):
                yield shown
                done += 1
        if done == len(indices):
            return
        # Where the container cannot be entered, or not where it says, every frame is decoded, which misses none.
        rest = iter(indices[done:] if index.pts is None else [index.pts[place] for place in indices[done:]])
        with open_container(self._file, _FORMATS) as container:
            target = next(rest, None)
            for place, shown in enumerate(container.decode(self._stream(container))):
                if (place if index.pts is None else shown.pts) == target:
                    if shown.is_corrupt:
                        break
                    yield shown
                    target = next(rest, None)
                    if target is None:
                        return
        raise MediaError("a frame that the file promises cannot be decoded", reason="broken")

    def _entered(self, index: _Index, wanted: Sequence[int]) -> Iterator[VideoFrame]:
        """Frames with these times, entered at one key frame after another; ends early where a frame was not found."""
        stretches = list(_stretches(index, wanted))
        if len(stretches) == 1 and stretches[0][1] is None:
            return  # nothing can be left out
        from av.video.frame import PictureType

        with open_container(self._file, _FORMATS) as container:
            stream = self._stream(container)
            for stretch, start in stretches:
                rest = iter(stretch)
                target = next(rest, None)
                try:
                    if start is not None:
                        container.seek(start, stream=stream, backward=True)
                    entered = start is None
                    for shown in container.decode(stream):
                        if not entered and shown.pts is not None and start is not None and shown.pts >= start:
                            # What is no whole image by itself, whatever the container calls it, cannot be begun with.
                            entered = shown.pts == start and shown.key_frame and shown.pict_type == PictureType.I
                            if not entered:
                                return
                        if shown.pts is not None and target is not None and shown.pts > target:
                            return
                        if shown.pts == target:
                            if shown.is_corrupt:
                                return
                            yield shown
                            target = next(rest, None)
                            if target is None:
                                break
                except (OSError, ValueError):
                    return  # it cannot be entered, or what is there is broken
                if target is not None:
                    return


class _DecodedFrames:
    """The chosen frames of an encoded video; see `Frames`."""

    def __init__(self, footage: EncodedVideo, index: _Index, indices: list[int], background: Color) -> None:
        self._video, self._index, self._indices, self._background = footage, index, indices, background

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[np.ndarray]:
        with decoding(self._video.path, "video"):
            shown = self._video.chosen(self._index, sorted(set(self._indices)))
            last, pixels = -1, np.zeros((0, 0, 3), dtype=np.uint8)
            for place in self._indices:
                if place != last:
                    del pixels  # only one is held while the next is made
                    pixels, last = _rgb(next(shown), self._index, self._background), place
                yield pixels


def _stretches(index: _Index, wanted: Sequence[int]) -> Iterator[tuple[list[int], int | None]]:
    """Wanted times, cut where entering at a key frame leaves out enough frames; with the key frame, None for the beginning."""
    pts = index.pts
    assert pts is not None
    stretch: list[int] = []
    start: int | None = None
    reached = 0  # frames decoded so far, as an index
    for time in wanted:
        place = bisect.bisect_right(index.keys, time) - 1
        key = index.keys[place] if place >= 0 else None
        if key is not None and bisect.bisect_left(pts, key) - reached > _WORTH_SEEKING:
            if stretch:
                yield stretch, start
            stretch, start = [], key
        stretch.append(time)
        reached = bisect.bisect_left(pts, time)
    if stretch:
        yield stretch, start


def _hidden_frames(stream: VideoStream) -> int:
    """The bit of a packet's first byte that says whether its frame is shown; 0 where every packet's is.

    Source: RFC 6386, section 9.1: VP8 stores frames that are only referred to as packets of their own.
    """
    codec = stream.codec_context
    return 0x10 if codec is not None and codec.codec.canonical_name == "vp8" else 0


def _times(ordered: Sequence[int], base: Fraction, rate: Fraction | None) -> tuple[np.ndarray, float]:
    """When each frame is shown, seconds from the first, and how many there are in a second."""
    unit = float(base)
    times = np.array([time - ordered[0] for time in ordered], dtype=np.float64) * unit
    span = (ordered[-1] - ordered[0]) * unit
    told = float(rate) if rate else 0.0
    if span <= 0:
        return times, told or 1.0
    # A container that stores rounded times may still know the exact rate: it counts where it gives as many frames.
    agrees = abs(told * span - (len(ordered) - 1)) < 1
    return times, told if agrees else (len(ordered) - 1) / span


def _turn_of(shown: VideoFrame) -> _Turn:
    """From the matrix by which a place (x, y) of the frame is shown at (a x + c y, b x + d y), x to the right and y down."""
    try:
        side_data: Any = shown.side_data
        matrix = bytes(side_data["DISPLAYMATRIX"])
    except KeyError:
        return _Turn()
    except ValueError:  # the frame brings some other thing that PyAV has no name for
        return _QUARTERS[round(shown.rotation / 90) % 4]
    a, b, _, c, d = np.frombuffer(matrix, dtype=np.int32, count=5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _Turn(True, b < 0, c < 0)
    return _Turn(False, d < 0, a < 0)


def _rgb(shown: VideoFrame, index: _Index, background: Color) -> np.ndarray:
    """A decoded frame as [height, width, 3] uint8, turned as a viewer turns it."""
    see_through = shown.format.has_palette or any(part.is_alpha for part in shown.format.components)
    pixels = shown.to_ndarray(format="rgba" if see_through else "rgb24")
    if see_through:
        alpha = pixels[:, :, 3:].astype(np.uint16)
        front = pixels[:, :, :3] * alpha + np.array(background, dtype=np.uint16) * (255 - alpha)
        pixels = ((front + 127) // 255).astype(np.uint8)
    if index.turn.exchanged:
        pixels = pixels.swapaxes(0, 1)
    pixels = pixels[:: -1 if index.turn.upwards else 1, :: -1 if index.turn.leftwards else 1]
    if pixels.shape[:2] != (index.size.height, index.size.width) or _turn_of(shown) != index.turn:
        raise MediaError("the video's frames are not all of one size", reason="size")
    return np.ascontiguousarray(pixels)


class GivenFrames:
    """One video that came as its frames. Final; made by `open_video`.

    Attributes:
        path: where it stands in the request, such as `videos[0]`.
        sampled: whether its frames were chosen before it came.
    """

    def __init__(self, path: str, settings: Settings, value: VideoFrames) -> None:
        self.path = path
        self.sampled = value.sampled
        if not isinstance(self.sampled, bool):
            raise MediaError(f"{path}: sampled must be true or false", path=path, reason="metadata")
        pixels = as_pixels(value.frames, path, settings, batch=True)
        if pixels is None and not isinstance(value.frames, list | tuple):
            raise MediaError(
                f"{path}: frames are a list of images, a numpy array or a torch tensor, "
                f"not a {type(value.frames).__name__}",
                path=path,
                reason="type",
            )
        count = len(value.frames)
        if not count:
            raise MediaError(f"{path}: a video without frames", path=path, reason="empty")
        check_frames(path, count, settings)
        self._times, self._fps = _given_times(path, value, count)
        size = VideoSize(1, 1, count, self._fps, self._times)
        check_video_seconds(path, size.duration, settings)
        if pixels is not None:
            check_request_pixels(path, math.prod(pixels.shape[:3]), settings)
            pixels = pixels.copy()
        self._pixels = pixels
        self._sources = [] if pixels is not None else list(_images(value.frames, path, settings))

    def digest(self) -> bytes:
        """What tells this video from others: of its frames, their times, and whether they were chosen.

        Returns:
            32 bytes.
        """
        content: Any = [source.digest() for source in self._sources]
        if self._pixels is not None:
            content = feature_digest(self._pixels)
        return digest(frame(["frames", content, self._times, self._fps, self.sampled]))

    def probe(self) -> VideoSize:
        """Size, frames, rate and times.

        Raises:
            MediaError: a frame is no image, or they are not all of one size.
        """
        if self._pixels is not None:
            height, width = self._pixels.shape[1:3]
        else:
            sizes = {(size.height, size.width) for size in (source.probe() for source in self._sources)}
            if len(sizes) > 1:
                raise MediaError(f"{self.path}: frames of {len(sizes)} sizes", path=self.path, reason="size")
            ((height, width),) = sizes
        return VideoSize(height, width, len(self._times), self._fps, self._times)

    def decode(self, size: SampledVideo, *, background: Color = WHITE) -> DecodedVideo:
        """The chosen frames, decoded while they are iterated.

        Args:
            size: which frames.
            background: RGB levels behind transparent pixels.
        """
        return DecodedVideo(size, _PickedFrames(self, size, background))

    def image(self, place: int, background: Color) -> np.ndarray:
        """One frame."""
        if self._pixels is not None:
            return np.ascontiguousarray(self._pixels[place])
        pixels: np.ndarray = self._sources[place].decode(background=background).pixels
        return pixels


class _PickedFrames:
    """Chosen frames of those that were given; see `Frames`."""

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
                raise MediaError(f"{self._video.path}: frames of two sizes", path=self._video.path, reason="size")
            yield pixels


VideoSource = EncodedVideo | GivenFrames


def open_video(value: Any, *, path: str, settings: Settings) -> VideoSource:
    """Take a video in any form that is accepted, without decoding it.

    Args:
        value: an encoded video in any form that an encoded image may have, or `VideoFrames`.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        MediaError: the value is of no such kind, cannot be read, or brings frames without their time.
        LimitError: it has more bytes, frames, seconds or pixels than a limit allows.
    """
    if is_encoded(value):
        return EncodedVideo(path, settings, read_bytes(value, path, settings))
    if isinstance(value, VideoFrames):
        return GivenFrames(path, settings, value)
    if isinstance(value, list | tuple) or hasattr(value, "shape"):
        raise MediaError(
            f"{path}: bare frames tell no time; give VideoFrames(frames, fps=...) or VideoFrames(frames, timestamps=...)",
            path=path,
            reason="metadata",
        )
    raise MediaError(
        f"{path}: expected bytes, a path, a URL, base64 or VideoFrames, got {type(value).__name__}",
        path=path,
        reason="type",
    )


def whole(size: VideoSize) -> Sampling:
    """Every frame of a video: for one whose frames were chosen already."""
    return Sampling.of(size, np.arange(size.frames, dtype=np.int64))


def _images(frames: Sequence[Any], path: str, settings: Settings) -> Iterator[ImageSource]:
    """Each frame opened; together they may have the bytes of one media input, and what is copied the pixels of a request."""
    total = pixels = 0
    for frame_given in frames:
        if is_remote(frame_given):
            # A video is one media input: it is fetched by one URL, or its frames are fetched by whoever lists them.
            raise MediaError(f"{path}: a frame is not fetched by a URL of its own", path=path, reason="url")
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
        raise MediaError(f"{path}: VideoFrames needs fps or timestamps, one of the two", path=path, reason="metadata")
    try:
        with np.errstate(all="ignore"):  # what is no number in the end is refused below
            if value.timestamps is None:
                fps = float(value.fps or 0)
                times = np.arange(count, dtype=np.float64) / fps if fps > 0 else np.full(count, np.nan)
            else:
                times = np.array(value.timestamps, dtype=np.float64)
                if times.shape != (count,):
                    raise MediaError(
                        f"{path}: {count} frames, {times.size} timestamps; each frame needs one",
                        path=path,
                        reason="metadata",
                    )
                times = times - times[0]
                fps = (count - 1) / float(times[-1]) if count > 1 and times[-1] > 0 else 1.0
            steps = np.diff(times)
    except (TypeError, ValueError, OverflowError) as error:
        raise MediaError(f"{path}: fps and timestamps are numbers of seconds", path=path, reason="metadata") from error
    if not np.isfinite(times).all() or not np.isfinite(fps) or not (steps > 0).all():
        raise MediaError(
            f"{path}: fps must be above 0, timestamps ascend, and all are finite", path=path, reason="metadata"
        )
    return times, fps
