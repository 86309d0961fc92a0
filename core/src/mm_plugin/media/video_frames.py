"""The chosen frames of an encoded video, decoded one after another into [height, width, 3] uint8 RGB. Chooses none."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.media.pyav import av_decoding
from mm_plugin.media.types import Color
from mm_plugin.media.video_index import VideoFile, VideoIndex, turn_of

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

# A key frame that is fewer frames ahead is reached by decoding; measured: seeking costs as much as decoding some frames.
_WORTH_SEEKING = 16


class DecodedFrames:
    """The chosen frames of an encoded video; see `Frames`.

    Args:
        file: the video.
        index: of that file.
        indices: the chosen frames, never descending.
        background: RGB levels shown through transparent pixels.
    """

    def __init__(self, file: VideoFile, index: VideoIndex, indices: list[int], background: Color) -> None:
        self._file, self._index, self._indices, self._background = file, index, indices, background

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[np.ndarray]:
        with av_decoding(self._file.path, "video"):
            frames = _chosen(self._file, self._index, sorted(set(self._indices)))
            last, pixels = -1, np.zeros((0, 0, 3), dtype=np.uint8)
            for place in self._indices:
                if place != last:
                    del pixels  # only one is held while the next is made
                    pixels, last = _rgb(next(frames), self._index, self._background), place
                yield pixels


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
    rest = iter(indices[done:] if index.pts is None else [index.pts[place] for place in indices[done:]])
    with file.open() as (container, stream):
        target = next(rest, None)
        for place, frame in enumerate(container.decode(stream)):
            if (place if index.pts is None else frame.pts) == target:
                if frame.is_corrupt:
                    break
                yield frame
                target = next(rest, None)
                if target is None:
                    return
    raise MediaError("a frame that the file's index lists cannot be decoded", reason="broken")


def _after_seeking(file: VideoFile, index: VideoIndex, wanted: Sequence[int]) -> Iterator[VideoFrame]:
    """Frames with these times, decoded from one key frame after another; ends early where a frame was not found."""
    stretches = list(_stretches(index, wanted))
    if len(stretches) == 1 and stretches[0][1] is None:
        return  # nothing can be skipped
    from av.video.frame import PictureType

    with file.open() as (container, stream):
        for stretch, start in stretches:
            rest = iter(stretch)
            target = next(rest, None)
            try:
                if start is not None:
                    container.seek(start, stream=stream, backward=True)
                entered = start is None
                for frame in container.decode(stream):
                    if not entered and frame.pts is not None and start is not None and frame.pts >= start:
                        # A frame that is not whole by itself, whatever the container calls it, is not a place to start.
                        entered = frame.pts == start and frame.key_frame and frame.pict_type == PictureType.I
                        if not entered:
                            return
                    if frame.pts is not None and target is not None and frame.pts > target:
                        return
                    if frame.pts == target:
                        if frame.is_corrupt:
                            return
                        yield frame
                        target = next(rest, None)
                        if target is None:
                            break
            except (OSError, ValueError):
                return  # seeking failed, or what is there is corrupted
            if target is not None:
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


def _rgb(frame: VideoFrame, index: VideoIndex, background: Color) -> np.ndarray:
    """A decoded frame as [height, width, 3] uint8, turned as a viewer turns it."""
    transparent = frame.format.has_palette or any(part.is_alpha for part in frame.format.components)
    pixels = frame.to_ndarray(format="rgba" if transparent else "rgb24")
    if transparent:
        alpha = pixels[:, :, 3:].astype(np.uint16)
        front = pixels[:, :, :3] * alpha + np.array(background, dtype=np.uint16) * (255 - alpha)
        pixels = ((front + 127) // 255).astype(np.uint8)
    if index.turn.exchanged:
        pixels = pixels.swapaxes(0, 1)
    pixels = pixels[:: -1 if index.turn.upwards else 1, :: -1 if index.turn.leftwards else 1]
    if pixels.shape[:2] != (index.size.height, index.size.width) or turn_of(frame) != index.turn:
        raise MediaError(
            f"expected every frame to have {index.size.height} x {index.size.width} pixels, got one of "
            f"{pixels.shape[0]} x {pixels.shape[1]} or with another rotation",
            reason="size",
        )
    return np.ascontiguousarray(pixels)
