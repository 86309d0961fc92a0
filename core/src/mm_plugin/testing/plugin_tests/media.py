"""Images, frames and video files for tests of plugins, made on the spot from the bundled images."""

from __future__ import annotations

import functools
import io
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

from mm_plugin.demo.base import sample_images


@functools.cache
def _bundled(index: int) -> Image.Image:
    return Image.open(io.BytesIO(sample_images()[index % 2][1])).convert("RGB")


def image_of(index: int = 0, height: int = 90, width: int = 130) -> Image.Image:
    """One of two bundled images, scaled.

    Args:
        index: even or odd.
        height: pixels.
        width: pixels.

    >>> image_of(0, height=20, width=30).size
    (30, 20)
    """
    return _bundled(index).resize((width, height), Image.Resampling.BOX)


def half_transparent_png() -> bytes:
    """A PNG file of 300 x 200 pixels (width x height) with half-transparent pixels, on which a background shows."""
    image = _bundled(0).convert("RGBA").crop((0, 0, 300, 200))
    image.putalpha(128)
    return png_of(image)


def png_of(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def moving_frames(count: int, height: int = 84, width: int = 112) -> np.ndarray:
    """Frames of a sliding image, no two alike.

    Args:
        count: frames.
        height: pixels.
        width: pixels.

    Shape:
        returns [count, height, width, 3] uint8.
    """
    still = np.asarray(image_of(1, height, width))
    return np.stack([np.roll(still, (3 * n, 5 * n), axis=(0, 1)) // (1 + n % 2) for n in range(count)])


@functools.cache
def video_file(count: int, rate: Fraction | int = 24, height: int = 84, width: int = 112) -> bytes:
    """An MPEG-4 file of a sliding image; its pixels are whatever a decoder gives. Needs PyAV.

    Args:
        count: frames; they repeat after 40.
        rate: frames per second.
        height: pixels.
        width: pixels.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", 12
        for image in moving_frames(min(count, 40), height, width)[np.arange(count) % min(count, 40)]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@functools.cache
def decoded_file(data: bytes) -> np.ndarray:
    """All frames of a video file, by PyAV alone: [n, height, width, 3] uint8."""
    import av

    with av.open(io.BytesIO(data), mode="r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
