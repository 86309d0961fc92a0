"""Sizes that models want, and uint8 images resized to them by two named rules. Numbers are arguments; knows no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from PIL import Image

from mm_plugin.errors import SizeError

# Levels from which on a thread for each further size of an image pays: it costs 0.1 ms, resizing a megapixel 10 ms.
_WORTH_A_THREAD = 3_000_000

ResizeRule = Literal["torch", "pillow"]


MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, max_ratio: float = MAX_ASPECT_RATIO
) -> tuple[int, int]:
    """The size to which an image is resized so that both sides are multiples of `factor` and the area is within a budget.

    The ratio of the sides is kept as nearly as the multiples allow. A side is never shorter than `factor`, so the area of a
    very thin image may pass `max_pixels`, as it does in the reference.

    Args:
        height: pixels.
        width: pixels.
        factor: pixels; patch size times merge size.
        min_pixels: smallest area, pixels.
        max_pixels: largest area, pixels.
        max_ratio: longer side over shorter side that is still accepted.

    Returns:
        (height, width), pixels.

    Raises:
        SizeError: a side is not positive, the ratio is over `max_ratio`, or the budget is empty.

    Source: transformers@5.24 Qwen2VLImageProcessor; numbers of the released Qwen2-VL training code, where they agree.
    """
    if height < 1 or width < 1:
        raise SizeError(f"height and width must be at least 1 pixel, got {height} x {width}")
    if not 1 <= min_pixels <= max_pixels:
        raise SizeError(f"min_pixels must not exceed max_pixels, got {min_pixels} and {max_pixels}")
    ratio = max(height, width) / min(height, width)
    if ratio > max_ratio:
        raise SizeError(f"expected an aspect ratio of at most {max_ratio}, got {ratio:.1f} ({height} x {width} pixels)")
    # Python's round (half to even) is part of the rule: 14 and 42 pixels at factor 28 round to 0 and 56.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    area = height * width
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    # A side that rounded to nothing makes the area 0, which is below every budget, so it has grown again.
    return new_height, new_width


def resize(pixels: np.ndarray, height: int, width: int, *, rule: ResizeRule) -> np.ndarray:
    """Bicubic resize with antialiasing on uint8, by one of two named rules.

    `torch` equals transformers' torchvision backend on the CPU; `pillow` equals its Pillow backend and the released training
    code. They differ by a level or two. An image that has the size already is returned as it is, by both rules.

    Args:
        pixels: [height, width, 3] uint8.
        height: new height, pixels.
        width: new width, pixels.
        rule: `torch` or `pillow`.

    Shape:
        returns [height, width, 3] uint8, contiguous.
    """
    return resize_all(pixels, [(height, width)], rule)[0]


def resize_all(pixels: np.ndarray, sizes: Sequence[tuple[int, int]], rule: ResizeRule) -> list[np.ndarray]:
    """An image resized to each of several sizes; it is brought into Pillow's or torch's form once."""
    if all(pixels.shape[:2] == size for size in sizes):
        return [pixels] * len(sizes)
    make = _pillow_resizer(pixels) if rule == "pillow" else _torch_resizer(pixels)

    def make_one(size: tuple[int, int]) -> np.ndarray:
        return pixels if pixels.shape[:2] == size else make(size)

    first, *others = sizes
    if not others or pixels.size < _WORTH_A_THREAD:
        return [make_one(size) for size in sizes]
    # Both libraries use one core for one image, and let other threads run. Resizing in bands would not be exact.
    with ThreadPoolExecutor(len(others)) as pool:
        futures = [pool.submit(make_one, size) for size in others]
        return [make_one(first), *(future.result() for future in futures)]


def _pillow_resizer(pixels: np.ndarray) -> Callable[[tuple[int, int]], np.ndarray]:
    image = Image.fromarray(pixels)
    return lambda size: np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))


def _torch_resizer(pixels: np.ndarray) -> Callable[[tuple[int, int]], np.ndarray]:
    interpolate = interpolator(pixels)
    # torch puts the channels last in half the time that numpy takes.
    return lambda size: interpolate(size).permute(1, 2, 0).contiguous().numpy()  # [height, width, 3]


def interpolator(pixels: np.ndarray) -> Callable[[tuple[int, int]], Any]:
    """The `torch` rule: from [height, width, 3] uint8 a tensor [3, height, width] of another size, in whatever memory order."""
    import torch

    # A channels-last view of the image as it lies is three times faster than a planar copy, and equal bit for bit.
    # torch takes no memory that cannot be written, such as a view of a PIL image.
    writable = pixels if pixels.flags.writeable else pixels.copy()
    source = torch.from_numpy(writable).permute(2, 0, 1).unsqueeze(0)  # [1, 3, height, width]
    return lambda size: torch.nn.functional.interpolate(source, size=size, mode="bicubic", antialias=True)[0]
