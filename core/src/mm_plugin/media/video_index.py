"""The index of an encoded video: size, rotation and the times of all frames, read from its packets. Yields no pixels."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.media.limits import check_decoded_pixels, check_frames, check_pixels, check_video_seconds
from mm_plugin.media.mp4_tracks import has_encrypted_video, is_locked, is_upright
from mm_plugin.media.turns import Turn, Turns, turn_of
from mm_plugin.media.types import VideoSize
from mm_plugin.media.video_file import OpenVideo, VideoFile
from mm_plugin.media.video_flags import is_cut, is_encrypted, is_scrambled

if TYPE_CHECKING:
    from av.packet import Packet

# The codecs whose frames' times FFmpeg reports correctly from AVI.
_IN_ORDER = ("mpeg4", "msmpeg4v2", "msmpeg4v3", "mjpeg")
# Containers that know where their key frames are.
_MP4 = "mov,mp4,m4a,3gp,3g2,mj2"
_SEEKABLE = (_MP4, "matroska,webm")
# Containers that do not say how long a frame is, so that whether the last one is whole is seen only by decoding it.
_UNMEASURED = ("mpegts", "mpeg")
# A recording that was cut ends in a damaged frame; so many packets from the end on may be left out for it.
_LAST = 4
# Packets that a decoder gets before the last ones, so that nothing refers to what was passed over.
_SETTLED = 16


class VideoIndex(msgspec.Struct, frozen=True, eq=False):
    """What a file's packets say about its frames.

    Attributes:
        size: after rotation.
        turns: how each frame is turned.
        pts: of each frame in display order; None where packets do not say, so that frames are counted instead.
        keys: pts of key frames, ascending.
        seekable: whether decoding can start at a key frame.
        left_out: damaged frames at the end that are not counted.
    """

    size: VideoSize
    turns: Turns
    pts: list[int] | None
    keys: list[int]
    seekable: bool
    left_out: int = 0


class _Packets:
    """What the packets of the video stream and the header of its container say; filled packet by packet."""

    def __init__(self, video: OpenVideo, data: bytes) -> None:
        stream, name = video.stream, video.container.format.name
        self.pts: list[int | None] = []
        self.keys: list[int] = []
        self.turns: list[tuple[int | None, Turn | None]] = []  # from these times on; None: as the track says
        self.height, self.width = stream.height, stream.width
        self.base, self.rate = stream.time_base, stream.average_rate or stream.guessed_rate
        self.seekable = name in _SEEKABLE
        self.upright = name == _MP4 and is_upright(data, stream.id)
        # In AVI, pts count frames as they are stored, not as they are displayed.
        self.counted = not (name == "avi" and video.codec not in _IN_ORDER)
        self.incomplete, self.guessed = name in _UNMEASURED, name == "mpeg"
        self.broken = False  # whether the last packet is known to be incomplete
        self.starts: list[int] = [0]  # packets before each key frame
        self.last: deque[int | None] = deque(maxlen=_LAST)
        self.promised = stream.frames if name == _MP4 else 0  # of packets, in the header
        self._number, self._corrupt = 0, -_LAST
        # Where FFmpeg finds frames itself, it flags one that it completed before the one that was cut.
        self._reach = _LAST if self.incomplete else 1
        self._reads = video.read_packets()

    def add(self, packet: Packet[Any]) -> None:
        """Count what one packet of the video stream holds."""
        holds = self._reads.read(bytes(packet))
        self._number += 1
        if holds.turn is not None or holds.upright:
            self.turns.append((packet.pts, holds.turn))
        if packet.is_keyframe and packet.pts is not None and holds.frames != 0:
            if not self.keys:
                self.pts.clear()  # what comes before cannot be decoded: the video was cut out of a longer one
                self.last.clear()
            self.keys.append(packet.pts)
            self.starts.append(self._number - 1)
        if holds.frames is None:
            self.counted = False
        self._corrupt = self._number if packet.is_corrupt else self._corrupt
        self.broken = not holds.whole or self._number - self._corrupt < self._reach or self._reads.waits
        if holds.frames == 0 or packet.is_discard:
            return
        if packet.pts is None or not self.keys or packet.pts >= self.keys[0]:
            self.pts.append(packet.pts)
            self.last.append(packet.pts)

    @property
    def total(self) -> int:
        """Packets so far."""
        return self._number

    def before_end(self) -> int:
        """Packets before a key frame from which on the end can be decoded."""
        place = bisect.bisect_right(self.starts, self._number - _SETTLED)
        return self.starts[max(place - 1, 0)]


class _Frames(NamedTuple):
    """What decoding shows, of the first frame or of all of them."""

    height: int
    width: int
    turns: Turns
    pts: list[int] | None  # ascending; None where a frame has none, or two have the same
    total: int
    left_out: int


def read_index(file: VideoFile) -> VideoIndex:
    """The index of a video, from its packets; frames are decoded only where packets do not say enough.

    Raises:
        MediaError: it holds no video that can be read.
        LimitError: it has more frames, seconds or pixels than a limit allows.
    """
    try:
        packets = _read_packets(file)
    except MediaError as error:  # FFmpeg gives up where it does not understand how samples are encrypted
        if error.reason != "format" or not has_encrypted_video(file.data):
            raise
        raise _encrypted() from error
    height, width, base = packets.height, packets.width, packets.base
    first, left_out = Turn(), 0
    ordered = sorted({time for time in packets.pts if time is not None})
    if packets.broken and packets.promised - packets.total > _LAST:
        raise MediaError(
            f"the file ends early: its header lists {packets.promised} frames, and {packets.total} of them are there",
            reason="broken",
        )
    known = packets.counted and len(ordered) == len(packets.pts)
    turns: Turns | None = None
    if not known or not packets.upright or not height or not width:
        frames = _decode_for_index(file, every=not known, broken=packets.broken)
        height, width, first = frames.height, frames.width, frames.turns.first
        if not known:
            turns, left_out = frames.turns, frames.left_out
            if frames.pts is not None:
                ordered = frames.pts
                turns = _turns(first, packets.turns, ordered)
                known = packets.seekable and set(ordered) <= set(packets.pts)
            else:
                ordered, base = list(range(frames.total)), 1 / packets.rate if packets.rate else None
    if turns is None:
        turns = _turns(first, packets.turns, ordered)
        if packets.incomplete or packets.broken:
            damaged = _damaged_end(file, packets, height * width)
            left_out, ordered = len(damaged), [time for time in ordered if time not in damaged]
    if base is None:
        raise MediaError("the file does not say when its frames are displayed", reason="metadata")
    if not ordered:
        raise MediaError("the video holds no frame that can be decoded", reason="broken")
    height, width = turns.at(0).size(height, width)
    check_pixels(file.path, height, width, file.settings)
    times, fps = _times(ordered, base, packets.rate)
    size = VideoSize(height, width, len(ordered), fps, times)
    check_video_seconds(file.path, size.duration, file.settings)
    return VideoIndex(size, turns, ordered if known else None, sorted(packets.keys), packets.seekable, left_out)


def _read_packets(file: VideoFile) -> _Packets:
    with file.open_packets() as (video, stream_packets):
        found = _Packets(video, file.data)
        marked = video.container.format.name == _MP4
        if (marked and is_locked(file.data, video.stream.id)) or "enc_key_id" in video.stream.metadata:
            raise _encrypted()
        for packet in stream_packets:
            if packet.stream is not video.stream or not packet.size:
                continue
            if marked and is_encrypted(packet):
                raise _encrypted()
            found.add(packet)
            check_frames(file.path, len(found.pts), file.settings)
        if not found.pts:
            raise MediaError("the video holds no frame", reason="empty")
        name, track = video.container.format.name, video.stream.id
    found.broken = found.broken or (name == "mpegts" and is_cut(file.data, track))
    if is_scrambled(name, file.data, track) and not _decodes(file):
        raise _encrypted()
    return found


def _encrypted() -> MediaError:
    return MediaError("the video is encrypted; decrypt it first", reason="encrypted")


def _decodes(file: VideoFile) -> bool:
    """Whether one of the first frames is whole."""
    with file.open() as video:
        return any(not frame.is_corrupt and not lost for frame, lost in itertools.islice(video.decode(), 8))


def _turns(first: Turn, said: Sequence[tuple[int | None, Turn | None]], ordered: Sequence[int]) -> Turns:
    """The turn of every frame, from what the stream says at some times. What it says holds until it says otherwise."""
    if not said:
        return Turns(first)
    at = sorted(((time, turn) for time, turn in said if time is not None), key=lambda one: one[0])
    # The first frame's turn, which was decoded, is the track's, unless it is the stream's.
    track = Turn() if at and ordered and at[0][0] <= ordered[0] else first
    places = np.searchsorted(np.array(ordered), np.array([time for time, _ in at])).tolist()
    changes = tuple((place, track if turn is None else turn) for place, (_, turn) in zip(places, at, strict=True))
    return Turns(track, changes)


def _decode_for_index(file: VideoFile, *, every: bool, broken: bool) -> _Frames:
    """The size and turn of the first frame, and the times, turns and count of all frames where those are asked for."""
    times: list[int] = []
    changes: list[tuple[int, Turn]] = []
    first, count = None, 0
    damaged = -_LAST  # the first of the last frames that is damaged
    with file.open() as video:
        for frame, lost in video.decode():
            turn = turn_of(frame)
            first = (frame.height, frame.width, turn) if first is None else first
            if not every:
                break
            if turn != (changes[-1][1] if changes else first[2]) and turn != Turn():
                changes.append((count, turn))
            if (frame.is_corrupt or lost) and count - damaged >= _LAST:
                damaged = count
            count += 1
            check_frames(file.path, count, file.settings)
            check_decoded_pixels(file.path, count * frame.height * frame.width, file.settings)
            if frame.pts is not None:
                times.append(frame.pts)
    if first is None:
        raise MediaError("the video holds no frame that can be decoded", reason="broken")
    height, width, turn = first
    left_out = count - damaged if count - damaged <= _LAST else int(broken)
    timed = len(set(times)) == count
    kept = sorted(times[: count - left_out]) if timed else None
    return _Frames(height, width, Turns(turn, tuple(changes)), kept, count - left_out, left_out)


def _damaged_end(file: VideoFile, packets: _Packets, pixels: int) -> set[int]:
    """Times of the frames of the last packets that are damaged, as where a recording was cut."""
    watched = {time for time in packets.last if time is not None}
    count = 0
    with file.open() as video:
        whole = set()
        for frame, lost in video.decode(skip=packets.before_end()):
            count += 1
            check_decoded_pixels(file.path, count * pixels, file.settings)
            if frame.pts in watched and not frame.is_corrupt and not lost:
                whole.add(frame.pts)
    if packets.broken and packets.last:
        whole.discard(packets.last[-1])
    damaged = watched - whole
    # A program stream does not store the time of each frame, and FFmpeg guesses those after one that is missing.
    return {time for time in watched if time >= min(damaged)} if damaged and packets.guessed else damaged


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
