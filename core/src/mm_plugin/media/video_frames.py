"""The chosen frames of an encoded video, decoded one after another into [height, width, 3] uint8 RGB. Chooses none.

One frame is held at a time, as it is decoded and as it is yielded, whether or not garbage is collected.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.media.limits import check_decoded_pixels
from mm_plugin.media.pyav import av_decoding
from mm_plugin.media.turns import Turn
from mm_plugin.media.types import Color
from mm_plugin.media.video_file import VideoFile, is_whole
from mm_plugin.media.video_index import VideoIndex

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

# A key frame that is fewer frames ahead is reached by decoding; measured: seeking costs as much as decoding some frames.
_WORTH_SEEKING = 16
_MOST_DISORDER = 16  # frames that come before one that is displayed earlier; no codec holds more
_BAND = 64  # rows that are composited together


class DecodedFrames:
    """The chosen frames of an encoded video; see `Frames`.

    Args:
        file: the video.
        index: of that file.
        indices: the chosen frames, never descending.
        background: RGB levels shown through transparent pixels.

    Raises:
        LimitError: more pixels must be decoded for them than a limit allows.
    """

    def __init__(self, file: VideoFile, index: VideoIndex, indices: list[int], background: Color) -> None:
        self._file, self._index, self._indices, self._background = file, index, indices, background
        frames = _decoded_frames(index, sorted(set(indices)))
        check_decoded_pixels(file.path, frames * index.size.height * index.size.width, file.settings)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[np.ndarray]:
        with av_decoding(self._file.path, "video"):
            frames = _chosen(self._file, self._index, sorted(set(self._indices)))
            last, pixels = -1, np.zeros((0, 0, 3), dtype=np.uint8)
            for place in self._indices:
                if place != last:
                    del pixels  # only one is held while the next is made
                    pixels, last = self._image(next(frames), place), place
                yield pixels

    def _image(self, frame: VideoFrame, place: int) -> np.ndarray:
        """A decoded frame as [height, width, 3] uint8, turned as a viewer turns it."""
        size, turn = self._index.size, self._index.turns.at(place)
        height, width = turn.size(frame.height, frame.width)
        if (height, width) != (size.height, size.width):
            raise MediaError(
                f"expected every frame to have {size.height} x {size.width} pixels, as the first has, got one of {height} x "
                f"{width}",
                reason="size",
            )
        return _rgb(frame, turn, self._background)


def _rgb(frame: VideoFrame, turn: Turn, background: Color) -> np.ndarray:
    transparent = frame.format.has_palette or any(part.is_alpha for part in frame.format.components)
    pixels = frame.to_ndarray(format="rgba" if transparent else "rgb24")
    if transparent:
        pixels = _over(pixels, background)
    return np.ascontiguousarray(turn.apply(pixels))


def _over(pixels: np.ndarray, background: Color) -> np.ndarray:
    """An image with alpha over a background, some rows at a time."""
    shown = np.empty((*pixels.shape[:2], 3), dtype=np.uint8)
    under = np.array(background, dtype=np.uint16)
    for start in range(0, len(pixels), _BAND):
        band = pixels[start : start + _BAND]
        alpha = band[:, :, 3:].astype(np.uint16)
        shown[start : start + _BAND] = (band[:, :, :3] * alpha + under * (255 - alpha) + 127) // 255
    return shown


def _chosen(file: VideoFile, index: VideoIndex, indices: Sequence[int]) -> Iterator[VideoFrame]:
    """The decoded frames at these indices, ascending and each once."""
    done = 0
    if index.pts is not None and index.seekable:
        for frame in _after_seeking(file, index, [index.pts[place] for place in indices]):
            yield frame
            done += 1
    if done == len(indices):
        return
    # Where seeking is impossible or does not arrive, every frame is decoded, which misses none.
    rest = indices[done:] if index.pts is None else [index.pts[place] for place in indices[done:]]
    with file.open() as video:
        numbered = (
            (place if index.pts is None else frame.pts, frame, lost)
            for place, (frame, lost) in enumerate(video.decode())
        )
        for frame in _in_order(numbered, rest):
            yield frame
            done += 1
    if done < len(indices):
        raise MediaError("a frame that the file's index lists is damaged or missing", reason="broken")


def _after_seeking(file: VideoFile, index: VideoIndex, wanted: Sequence[int]) -> Iterator[VideoFrame]:
    """Frames with these times, decoded from one key frame after another; ends early where a frame was not found."""
    stretches = list(_stretches(index, wanted))
    if len(stretches) == 1 and stretches[0][1] is None:
        return  # nothing can be skipped
    with file.open() as video:
        for stretch, start in stretches:
            done = 0
            try:
                if start is not None:
                    video.container.seek(start, stream=video.stream, backward=True)
                for frame in _in_order(_entered(video.decode(), start), stretch):
                    yield frame
                    done += 1
            except (OSError, ValueError):
                return  # seeking failed, or what is there is corrupted
            if done < len(stretch):
                return


def _entered(
    decoded: Iterator[tuple[VideoFrame, bool]], start: int | None
) -> Iterator[tuple[int | None, VideoFrame, bool]]:
    """Frames with their times; none where the first one from `start` on is not a key frame at that time."""
    entered = start is None
    for frame, lost in decoded:
        if not entered and frame.pts is not None and start is not None and frame.pts >= start:
            # A frame that is not whole by itself, whatever the container calls it, is not a place to start.
            entered = frame.pts == start and is_whole(frame)
            if not entered:
                return
        yield frame.pts, frame, lost


def _in_order(decoded: Iterator[tuple[int | None, VideoFrame, bool]], wanted: Sequence[int]) -> Iterator[VideoFrame]:
    """The frames with these numbers, ascending; ends early at one that is damaged or does not come.

    Some streams do not say how far frames are from their place, and their first ones come out of order; those wait here.
    """
    early: dict[int, VideoFrame] = {}
    place = late = 0
    if not wanted:
        return
    left = set(wanted)
    for number, frame, lost in decoded:
        if number in left:
            if frame.is_corrupt or lost:
                return
            left.discard(number)
            early[number] = frame
        while place < len(wanted) and wanted[place] in early:
            late = 0
            yield early.pop(wanted[place])
            place += 1
        if place == len(wanted):
            return
        late += number is not None and number > wanted[place]
        if late > _MOST_DISORDER:
            return


def _stretches(index: VideoIndex, wanted: Sequence[int]) -> Iterator[tuple[list[int], int | None]]:
    """Wanted times, split where seeking to a key frame skips enough frames; with that key frame, None for the beginning."""
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


def _decoded_frames(index: VideoIndex, indices: Sequence[int]) -> int:
    """How many frames are decoded for these, where no seek fails."""
    if not indices:
        return 0
    if index.pts is None or not index.seekable:
        return indices[-1] + 1
    places = {time: place for place, time in zip(indices, (index.pts[place] for place in indices), strict=True)}
    return sum(
        places[stretch[-1]] + 1 - (0 if start is None else bisect.bisect_left(index.pts, start))
        for stretch, start in _stretches(index, [index.pts[place] for place in indices])
    )
