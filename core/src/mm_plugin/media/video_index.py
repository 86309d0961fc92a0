"""The index of an encoded video: size, rotation and the times of all frames, read from its packets. Yields no pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.media.limits import check_frames, check_pixels, check_video_seconds
from mm_plugin.media.pyav import CheckedFile, open_container, open_packets
from mm_plugin.media.types import VideoSize
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
# The codecs whose frames' times FFmpeg reports correctly from AVI.
_IN_ORDER = ("mpeg4", "msmpeg4v2", "msmpeg4v3", "mjpeg")
# Containers that know where their key frames are.
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
# The identity matrix of an mp4 file, as its bytes.
_UNTURNED = np.array([65536, 0, 0, 0, 65536, 0, 0, 0, 0x40000000], dtype=">i4").tobytes()


class Turn(NamedTuple):
    """How a viewer turns a frame: sides are exchanged first, then rows or columns are read backwards."""

    exchanged: bool = False
    upwards: bool = False
    leftwards: bool = False


_QUARTERS = (Turn(), Turn(True, True, False), Turn(False, True, True), Turn(True, False, True))  # counterclockwise


class VideoIndex(msgspec.Struct, frozen=True, eq=False):
    """What a file's packets say about its frames.

    Attributes:
        size: after rotation.
        turn: how a frame is turned.
        pts: of each frame in display order; None where packets do not say, so that frames are counted instead.
        keys: pts of key frames, ascending.
        seekable: whether decoding can start at a key frame.
    """

    size: VideoSize
    turn: Turn
    pts: list[int] | None
    keys: list[int]
    seekable: bool


class VideoFile:
    """An encoded video as it is opened again and again, with its limits. Final.

    Args:
        path: where it stands in the request, for messages.
        settings: limits.
        data: the encoded file.
    """

    def __init__(self, path: str, settings: Settings, data: bytes) -> None:
        self.path, self.settings = path, settings
        self._file = CheckedFile(data)

    @property
    def data(self) -> bytes:
        """The file without its tags."""
        return self._file.data

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        """The container and its video stream, ready to be decoded."""
        with open_container(self._file, _FORMATS) as container:
            yield container, self._stream(container)

    @contextlib.contextmanager
    def open_packets(self) -> Iterator[tuple[InputContainer, VideoStream, Iterator[Any]]]:
        """The container, its video stream, and every packet of all of its streams."""
        with open_packets(self._file, _FORMATS) as (container, packets):
            yield container, self._stream(container), packets

    def _stream(self, container: InputContainer) -> VideoStream:
        """The first stream that is a moving image."""
        from av.stream import Disposition

        for stream in container.streams.video:
            if not stream.disposition & Disposition.attached_pic:
                break
        else:
            raise MediaError("the file holds no video", reason="format")
        codec = stream.codec_context
        name = codec.codec.canonical_name if codec is not None else "unknown"
        if codec is None or name not in _CODECS:
            raise MediaError(f"unsupported video codec {name}; convert the video to H.264", reason="codec")
        check_pixels(self.path, max(stream.height, 1), max(stream.width, 1), self.settings)
        # The size in a frame's own header counts too; a decoder works in whole blocks, so it may ask for a little more.
        limit = self.settings.max_image_pixels
        codec.options = {"max_pixels": str(limit + limit // 8 + (1 << 16))}
        stream.thread_type = "AUTO"
        codec.thread_count = min(2, self.settings.threads)
        return stream


class _Packets(NamedTuple):
    """What the packets of the video stream and the header of its container say."""

    pts: list[int | None]
    keys: list[int]
    height: int
    width: int
    base: Fraction | None
    rate: Fraction | None
    seekable: bool
    upright: bool  # every matrix in the header is the identity
    numbered: bool  # pts count frames as they are stored, not as they are displayed


class _Frames(NamedTuple):
    """What decoding shows, of the first frame or of all of them."""

    height: int
    width: int
    turn: Turn
    pts: list[int] | None  # None where a frame has none, or they do not ascend
    total: int


def read_index(file: VideoFile) -> VideoIndex:
    """The index of a video, from its packets; frames are decoded only where packets do not say enough.

    Raises:
        MediaError: it holds no video that can be read.
        LimitError: it has more frames, seconds or pixels than a limit allows.
    """
    packets = _read_packets(file)
    height, width, base, turn = packets.height, packets.width, packets.base, Turn()
    ordered = sorted({time for time in packets.pts if time is not None})
    known = not packets.numbered and len(ordered) == len(packets.pts)
    if not known or not packets.upright or not height or not width:
        frames = _decode_for_index(file, every=not known)
        height, width, turn = frames.height, frames.width, frames.turn
        if not known and frames.pts is not None:
            ordered = frames.pts
        elif not known:
            ordered, base = list(range(frames.total)), 1 / packets.rate if packets.rate else None
    if base is None:
        raise MediaError("the file does not say when its frames are displayed", reason="metadata")
    if turn.exchanged:
        height, width = width, height
    check_pixels(file.path, height, width, file.settings)
    times, fps = _times(ordered, base, packets.rate)
    size = VideoSize(height, width, len(ordered), fps, times)
    check_video_seconds(file.path, size.duration, file.settings)
    return VideoIndex(size, turn, ordered if known else None, sorted(packets.keys), packets.seekable)


def _read_packets(file: VideoFile) -> _Packets:
    with file.open_packets() as (container, stream, packets):
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
                check_frames(file.path, len(pts), file.settings)
        if not pts:
            raise MediaError("the video holds no frame", reason="empty")
        name = container.format.name
        return _Packets(
            pts=pts,
            keys=keys,
            height=stream.height,
            width=stream.width,
            base=stream.time_base,
            rate=stream.average_rate or stream.guessed_rate,
            seekable=name in _SEEKABLE,
            upright=name == _SEEKABLE[0]
            and file.data.count(_UNTURNED) >= file.data.count(b"tkhd") + file.data.count(b"mvhd"),
            numbered=name == "avi" and stream.codec_context.codec.canonical_name not in _IN_ORDER,
        )


def _decode_for_index(file: VideoFile, *, every: bool) -> _Frames:
    """The size and turn of the first frame, and the times and count of all frames where those are asked for."""
    times: list[int] = []
    first, count, last, timed = None, 0, None, True
    with file.open() as (container, stream):
        for frame in container.decode(stream):
            first = (frame.height, frame.width, turn_of(frame)) if first is None else first
            if not every:
                break
            count += 1
            check_frames(file.path, count, file.settings)
            timed = timed and frame.pts is not None and (last is None or frame.pts > last)
            last = frame.pts
            if timed and last is not None:
                times.append(last)
    if first is None:
        raise MediaError("the video holds no frame that can be decoded", reason="broken")
    return _Frames(*first, times if timed else None, count)


def turn_of(frame: VideoFrame) -> Turn:
    """From the matrix that displays a pixel (x, y) of the frame at (a x + c y, b x + d y), x to the right and y down."""
    try:
        side_data: Any = frame.side_data
        matrix = bytes(side_data["DISPLAYMATRIX"])
    except KeyError:
        return Turn()
    except ValueError:  # the frame has side data of a kind that PyAV has no name for
        return _QUARTERS[round(frame.rotation / 90) % 4]
    a, b, _, c, d = np.frombuffer(matrix, dtype=np.int32, count=5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(True, b < 0, c < 0)
    return Turn(False, d < 0, a < 0)


def _hidden_frames(stream: VideoStream) -> int:
    """The bit of a packet's first byte that says whether its frame is displayed; 0 where every packet's is.

    Source: RFC 6386, section 9.1: VP8 stores frames that are only referred to as packets of their own.
    """
    codec = stream.codec_context
    return 0x10 if codec is not None and codec.codec.canonical_name == "vp8" else 0


def _times(ordered: Sequence[int], base: Fraction, rate: Fraction | None) -> tuple[np.ndarray, float]:
    """When each frame is displayed, seconds from the first, and the frames per second."""
    unit = float(base)
    times = np.array([time - ordered[0] for time in ordered], dtype=np.float64) * unit
    span = (ordered[-1] - ordered[0]) * unit
    declared = float(rate) if rate else 0.0
    if span <= 0:
        return times, declared or 1.0
    # A container that stores rounded times may still know the exact rate: it counts where it gives as many frames.
    agrees = abs(declared * span - (len(ordered) - 1)) < 1
    return times, declared if agrees else (len(ordered) - 1) / span
