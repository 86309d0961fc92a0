"""Images and video frames cut into patches in merge order, and the embeddings that a patch grid stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mm_plugin.errors import SizeError
from mm_plugin.transforms.resizing import ResizeRule, interpolator, resize


def patchify(pixels: np.ndarray, *, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut an image into square patches, those that are merged into one token next to one another.

    Args:
        pixels: [height, width, 3] uint8; both sides multiples of patch_size * merge_size.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.

    Shape:
        returns [n_patches, 3, patch_size * patch_size] uint8; patches in the order merged row, merged column, row, column.

    Raises:
        SizeError: a side is not a multiple of the block.
    """
    height, width = pixels.shape[:2]
    block = patch_size * merge_size
    if height % block or width % block:
        raise SizeError(f"height and width must be multiples of {block} pixels, got {height} x {width}")
    cut = pixels.reshape(
        height // block, merge_size, patch_size, width // block, merge_size, patch_size, 3
    )  # [rows, m, p, columns, m, p, 3]
    n_patches = (height // patch_size) * (width // patch_size)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(n_patches, 3, patch_size * patch_size)


def patchify_frames(
    frames: Iterable[np.ndarray],
    count: int,
    height: int,
    width: int,
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    rule: ResizeRule = "torch",
) -> np.ndarray:
    """Resize the frames of a video and cut them into patches of several frames each, one frame in memory at a time.

    The last frame is repeated where the video has no multiple of `temporal_patch_size`.

    Args:
        frames: `count` images [height, width, 3] uint8, of any one size.
        count: frames.
        height: to which they are resized, pixels; a multiple of patch_size * merge_size.
        width: to which they are resized, pixels; a multiple of patch_size * merge_size.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.
        temporal_patch_size: frames in a patch.
        rule: by which frames are resized.

    Shape:
        returns [n_patches, 3, temporal_patch_size * patch_size * patch_size] uint8, nested channel, frame, pixel; patches in the
        order time, merged row, merged column, row, column.

    Raises:
        SizeError: there are not `count` frames, or a side is not a multiple of the block.
    """
    block, steps = patch_size * merge_size, -(-count // temporal_patch_size)
    if height % block or width % block:
        raise SizeError(f"height and width must be multiples of {block} pixels, got {height} x {width}")
    down, across = height // block, width // block
    out = np.empty(
        (steps, down, across, merge_size, merge_size, 3, temporal_patch_size, patch_size, patch_size), dtype=np.uint8
    )
    done = 0
    last: np.ndarray | None = None
    cut = np.empty(0, dtype=np.uint8)
    for frame in frames:
        if done == count:
            raise SizeError(f"expected {count} frames, got more")
        if frame is not last:
            # Channel after channel first: the pixels of a patch's row then lie together, and are copied once, to their place.
            planar = _planar(frame, height, width, rule)
            cut = planar.reshape(3, down, merge_size, patch_size, across, merge_size, patch_size)
            cut, last = cut.transpose(1, 4, 2, 5, 0, 3, 6), frame
        out[done // temporal_patch_size, :, :, :, :, :, done % temporal_patch_size] = cut
        done += 1
    if done < count or last is None:
        raise SizeError(f"expected {count} frames, got {done}")
    for place in range(done, steps * temporal_patch_size):
        out[place // temporal_patch_size, :, :, :, :, :, place % temporal_patch_size] = cut
    return out.reshape(-1, 3, temporal_patch_size * patch_size**2)


def _planar(pixels: np.ndarray, height: int, width: int, rule: ResizeRule) -> np.ndarray:
    """A resized image as [3, height, width]."""
    if rule == "torch" and pixels.shape[:2] != (height, width):
        planar: np.ndarray = interpolator(pixels)((height, width)).contiguous().numpy()
        return planar
    return np.ascontiguousarray(resize(pixels, height, width, rule=rule).transpose(2, 0, 1))


def grid_rows(grid: np.ndarray, *, name: str, merge_size: int, still: bool) -> int:
    """How many merged tokens a grid of patches stands for, if it is valid.

    Args:
        grid: what should be [1, 3] int64: frames or temporal patches, rows and columns, in patches.
        name: of the field, for messages.
        merge_size: patches along a side of a merged token.
        still: whether it is an image's, which has one frame.

    Raises:
        SizeError: another shape, no area, or no whole merged tokens.
    """
    if grid.shape != (1, 3) or grid.dtype != np.int64:
        raise SizeError(f"{name} must be [1, 3] integers, got {list(grid.shape)} {grid.dtype}")
    frames, rows, columns = grid[0].tolist()
    if min(frames, rows, columns) < 1 or (still and frames != 1) or rows % merge_size or columns % merge_size:
        kind = "image" if still else "video"
        raise SizeError(
            f"{name} {frames} x {rows} x {columns} is not a valid {kind} of {merge_size} x {merge_size} blocks"
        )
    return int(frames * rows * columns // merge_size**2)


def check_patches(
    feature: Any,
    grid: np.ndarray,
    *,
    name: str,
    patch_size: int,
    temporal_patch_size: int,
    still: bool,
    in_rows: bool = False,
) -> None:
    """Refuse a feature that is not the patches of a grid.

    Args:
        feature: numpy or torch; what should be [n_patches, 3 * temporal_patch_size * patch_area] floating point, or compact:
            [n_patches, 3, patch_area] uint8 of an image, [n_patches, 3, temporal_patch_size * patch_area] uint8 of a video.
        grid: [1, 3] int64, in patches.
        name: of the feature, for messages.
        patch_size: pixels along a side of a patch.
        temporal_patch_size: frames in a patch.
        still: whether it is an image's.
        in_rows: whether uint8 patches have the shape of floating-point ones.

    Raises:
        SizeError: another shape or dtype.
    """
    n_patches, area, dtype = int(grid.prod()), patch_size**2, str(feature.dtype)
    levels = dtype.endswith("uint8")
    compact = levels and not in_rows
    frames = 1 if compact and still else temporal_patch_size
    shape = (n_patches, 3, frames * area) if compact else (n_patches, 3 * frames * area)
    if tuple(feature.shape) != shape or not (levels or "float" in dtype):
        raise SizeError(f"{name} must be {list(shape)} for this grid, got {list(feature.shape)} {dtype}")
