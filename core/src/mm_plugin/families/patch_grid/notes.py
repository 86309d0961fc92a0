"""What of a media input's options cannot be had, in words: frames that are not there, areas that no grid of patches has."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mm_plugin.families.patch_grid.options import PatchGridOptions, PatchGridVideoOptions
from mm_plugin.media.types import VideoSize


def frame_notes(size: VideoSize, options: PatchGridVideoOptions, count: int) -> list[str]:
    """A note where a video has other frames chosen than `num_frames` or `fps` asks for; rounding of a rate is not worth one.

    Args:
        size: of the whole video.
        options: which frames are asked for.
        count: frames that were chosen.
    """
    multiple = options.temporal_patch_size
    if options.num_frames is not None:
        asked, wanted = f"num_frames={options.num_frames}", options.num_frames
    elif options.fps is not None:
        asked, wanted = f"fps={options.fps:g}", math.floor(size.frames / size.fps * options.fps / multiple) * multiple
    else:
        return []
    if wanted == count:
        return []
    grouped = f"frames are used in groups of {multiple} (temporal_patch_size)"
    least = options.min_frames if options.num_frames is None else 0
    if size.frames < multiple or size.frames < min(wanted, options.max_frames):
        why = f"the video has {_frames(size.frames)} at {size.fps:.6g} per second"
        why += f", and {grouped}" if count < size.frames else ""
    elif wanted > options.max_frames // multiple * multiple:
        why = f"max_frames={options.max_frames}, and {grouped}"
    elif wanted < least:
        why = f"min_frames={options.min_frames}, and {grouped}"
    else:
        why = grouped
    return [f"{asked} was asked, {_frames(count)} are used: {why}"]


def image_notes(grid: np.ndarray, options: PatchGridOptions) -> list[str]:
    """A note where an image is resized to an area beyond its bounds, as it is in the reference.

    Shape:
        grid [1, 3]: temporal patches, rows and columns of patches.
    """
    area, used = _area(grid, options)
    return _beyond(area, used, least={"min_pixels": options.min_pixels}, most={"max_pixels": options.max_pixels})


def video_notes(grid: np.ndarray, options: PatchGridVideoOptions) -> list[str]:
    """The same for a frame of a video, and where all of its frames together are above their budget.

    Shape:
        grid [1, 3]: temporal patches, rows and columns of patches.
    """
    area, used = _area(grid, options)
    least, most = {"video_min_pixels": options.video_min_pixels}, {"video_max_pixels": options.video_max_pixels}
    notes = _beyond(area, f"each frame {used}", least=least, most=most)
    if options.frame_size_rule == "qwen":
        steps = int(grid[0, 0])
        most = {"video_total_pixels": options.video_total_pixels}
        notes += _beyond(area * steps, f"{steps} temporal patches of {used}", least={}, most=most)
    return notes


def _area(grid: np.ndarray, options: PatchGridOptions) -> tuple[int, str]:
    """Pixels of an image or a frame, and the same in words."""
    _, rows, columns = (grid[0] * options.patch_size).tolist()
    return rows * columns, f"{rows} x {columns} pixels (height x width; multiples of {options.factor})"


def _beyond(area: int, used: str, *, least: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """A note for each bound, by the name of its option, that an area does not keep."""
    broken = [(name, bound) for name, bound in least.items() if area < bound]
    broken += [(name, bound) for name, bound in most.items() if area > bound]
    return [f"{name}={bound} was asked, {area} pixels are used: {used}" for name, bound in broken]


def _frames(count: int) -> str:
    return f"{count} frame{'' if count == 1 else 's'}"
