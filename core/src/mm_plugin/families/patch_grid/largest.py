"""The sizes of images and frames that take most merged tokens under a budget of pixels. Integers and the rule of `smart_resize`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from mm_plugin.transforms.resizing import MAX_ASPECT_RATIO

_RATIO = int(MAX_ASPECT_RATIO)


def largest_sides(
    *, factor: int, min_pixels: int, max_pixels: int, most_pixels: int, most_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Sizes, one of which takes as many merged tokens as any that is accepted.

    `smart_resize` rounds both sides where that meets the budget, shrinks what is larger, and grows what is smaller. A side is never
    shorter than one token, so thin images may pass `max_pixels` when they shrink, and others when they grow.

    Args:
        factor: pixels along a side of a merged token.
        min_pixels: smallest area of a resized image, pixels.
        max_pixels: largest area of a resized image, pixels.
        most_pixels: largest area of an image that is accepted, pixels.
        most_tokens: most merged tokens that are accepted; what is found is exact where these are enough for `min_pixels`.

    Returns:
        (height, width, merged tokens), pixels.
    """
    best = 0
    least = -(-min_pixels // factor**2)
    rounded = _rounded(factor, least, min(max_pixels // factor**2, most_tokens), most_pixels)
    if rounded is not None:
        best = rounded[2]
        yield rounded
    for side in (*range(_sides(1, factor)[0], 2 * factor + 1), math.isqrt(most_pixels // _RATIO)):
        thin = _thin(side, factor, max_pixels, most_pixels, most_tokens)
        if thin is not None and best < thin[2] <= most_tokens:
            best = thin[2]
            yield thin
    # How far growing may round up.
    bound = (math.sqrt(min_pixels / _RATIO) / factor + 1) * (math.sqrt(min_pixels * _RATIO) / factor + 1)
    if bound > best:
        grown = _grown(factor, min_pixels, most_pixels, most_tokens)
        if grown is not None and grown[2] > best:
            yield grown


def _rounded(factor: int, least: int, most: int, most_pixels: int) -> tuple[int, int, int] | None:
    """The size with most tokens, within two bounds, of those whose sides are only rounded."""
    best: tuple[int, int, int] | None = None
    for rows in range(1, math.isqrt(most) + 1):
        shortest, longest = _sides(rows, factor)
        columns = min(most // rows, _RATIO * rows + _RATIO)
        while columns >= rows and rows * columns >= (least if best is None else max(least, best[2] + 1)):
            sides = _fitting(
                (rows * factor, shortest, longest), (columns * factor, *_sides(columns, factor)), most_pixels
            )
            if sides is not None:
                best = (*sides, rows * columns)
                break
            columns -= 1
    return best


def _thin(side: int, factor: int, max_pixels: int, most_pixels: int, most_tokens: int) -> tuple[int, int, int] | None:
    """A size that shrinks to one token along its shorter side, and to as many as are accepted along the other."""
    rows = round(side / factor)
    if not rows:
        return None
    shrinks = _sides(max_pixels // (rows * factor**2) + 1, factor)[0]  # the shortest that is not only rounded
    enough = math.ceil(most_tokens**2 * factor**2 * side / max_pixels)
    long = min(_RATIO * side, most_pixels // side, max(shrinks, enough))
    if long < max(side, shrinks):
        return None
    shrink = math.sqrt(side * long / max_pixels)
    high, wide = (max(1, math.floor(each / shrink / factor)) for each in (side, long))
    return side, long, high * wide


@functools.lru_cache(maxsize=1 << 16)
def _sides(tokens: int, factor: int) -> tuple[int, int]:
    """The shortest and the longest side that rounds to so many tokens; Python rounds halves to even numbers."""
    middle = tokens * factor
    shortest = next(
        side for side in range(max(1, middle - factor // 2 - 1), middle + 1) if round(side / factor) == tokens
    )
    longest = next(side for side in range(middle + factor // 2 + 1, middle - 1, -1) if round(side / factor) == tokens)
    return shortest, longest


def _fitting(heights: tuple[int, ...], widths: tuple[int, ...], most_pixels: int) -> tuple[int, int] | None:
    """Sides that are accepted, whole tokens where they are."""
    for height in heights:
        for width in widths:
            if height * width <= most_pixels and max(height, width) <= _RATIO * min(height, width):
                return height, width
    return None


def _grown(factor: int, min_pixels: int, most_pixels: int, most_tokens: int) -> tuple[int, int, int] | None:
    """The size with most tokens of those that grow to `min_pixels`."""
    best: tuple[int, int, int] | None = None
    for height in range(1, math.isqrt(min_pixels) + factor + 1):
        rows = round(height / factor)  # where there are none, an image grows whatever its width
        widest = min_pixels // (rows * factor) + factor if rows else most_pixels
        widths = np.arange(height, min(_RATIO * height, most_pixels // height, widest) + 1)
        area = rows * np.round(widths / factor) * factor**2
        widths = widths[area < min_pixels]
        if not len(widths):
            continue
        grow = np.sqrt(min_pixels / (height * widths))
        tokens = np.ceil(height * grow / factor) * np.ceil(widths * grow / factor)
        tokens[tokens > most_tokens] = 0
        index = int(tokens.argmax())
        if tokens[index] > (0 if best is None else best[2]):
            best = height, int(widths[index]), int(tokens[index])
    return best
