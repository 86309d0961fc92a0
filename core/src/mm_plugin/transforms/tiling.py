"""Tiles: which grid of them fits an image, and how the image is cut into them. Numbers are arguments; knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mm_plugin.errors import SizeError
from mm_plugin.transforms.resizing import ResizeRule, resize_all


def best_resolution(height: int, width: int, candidates: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The candidate that keeps most of an image's pixels, and of those that keep equally many the smallest.

    What a candidate keeps is the area of the image fitted into it, at most the image's own. The first of equals wins, so
    the order of the candidates counts.

    Args:
        height: pixels.
        width: pixels.
        candidates: (height, width), pixels.

    Returns:
        (height, width), pixels: one of the candidates. Of an image so thin that none keeps any of it, the smallest.

    Source: LLaVA-NeXT's any-resolution rule, with the rounding of the released DeepSeek-VL2 code.
    """

    def rank(candidate: tuple[int, int]) -> tuple[int, int]:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -candidate[0] * candidate[1]

    return max(candidates, key=rank)  # the first of equals


def contained_size(height: int, width: int, *, box_height: int, box_width: int) -> tuple[int, int]:
    """The largest size within a box that keeps the ratio of the sides, as `PIL.ImageOps.contain` rounds it.

    Args:
        height: of the image, pixels.
        width: of the image, pixels.
        box_height: pixels.
        box_width: pixels.

    Returns:
        (height, width), pixels; one of them is the box's own, the other is 0 where the image is so thin that nothing is left.
    """
    ratio, box_ratio = width / height, box_width / box_height
    if ratio > box_ratio:
        return round(height / width * box_width), box_width
    if ratio < box_ratio:
        return box_height, round(width / height * box_height)
    return box_height, box_width


def letterbox(
    pixels: np.ndarray, sizes: Sequence[tuple[int, int]], *, color: tuple[int, int, int], rule: ResizeRule
) -> list[np.ndarray]:
    """An image resized into each of several boxes, centered, the rest of a box in one color.

    Under the rule `pillow` it equals `PIL.ImageOps.pad` with the bicubic filter, bit for bit. An image so thin that nothing of it
    is left in a box leaves that box empty, as it does there.

    Args:
        pixels: [height, width, 3] uint8.
        sizes: (height, width) of each box, pixels.
        color: RGB levels.
        rule: see `resize`.

    Shape:
        returns for each size [height, width, 3] uint8; it may be `pixels` itself where that has the size already.
    """
    height, width = pixels.shape[:2]
    inner = [contained_size(height, width, box_height=box[0], box_width=box[1]) for box in sizes]
    visible = resize_all(pixels, [size for size in inner if all(size)], rule)
    boxes: list[np.ndarray] = []
    for box, size in zip(sizes, inner, strict=True):
        if size == box:
            boxes.append(visible.pop(0))
            continue
        out = np.empty((*box, 3), dtype=np.uint8)
        out[...] = color
        # Python's round, half to even, of half of what is left over.
        top, left = (round((side - part) * 0.5) for side, part in zip(box, size, strict=True))
        if all(size):
            out[top : top + size[0], left : left + size[1]] = visible.pop(0)
        boxes.append(out)
    return boxes


def cut_tiles(pixels: np.ndarray, out: np.ndarray) -> None:
    """Cut an image into square tiles, row by row.

    Args:
        pixels: [height, width, 3] uint8; both sides multiples of a tile's.
        out: [n_tiles, side, side, 3] uint8, written; as many tiles as the image has.

    Raises:
        SizeError: the image is not made of so many tiles.
    """
    side = out.shape[1]
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    if pixels.shape[:2] != (rows * side, columns * side) or len(out) != rows * columns:
        raise SizeError(
            f"expected {len(out)} tiles of {side} pixels, got {pixels.shape[0]} x {pixels.shape[1]} pixels (height x width)"
        )
    cut = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    out.reshape(rows, columns, side, side, 3)[...] = cut
