"""Media inputs that a processor is tried with: random ones, the same every time, and blank ones of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from mm_plugin import Modality

# (height, width) in pixels: several shapes, one above every common tile size.
IMAGE_SIZES = ((161, 184), (90, 337), (700, 520))
# Seconds.
AUDIO_LENGTHS = (0.9, 0.3, 1.7)


def make_sample(modality: Modality, index: int, sampling_rate: int | None) -> Any:
    """A random image or audio waveform, the same in every call.

    Args:
        modality: image or audio.
        index: which of the sizes above, 0 to 2.
        sampling_rate: samples per second of audio; not used for images.

    Returns:
        A PIL image, or samples [n] float32.
    """
    random = np.random.Generator(np.random.PCG64(index))
    if modality is Modality.AUDIO:
        assert sampling_rate is not None
        samples = random.standard_normal(int(AUDIO_LENGTHS[index] * sampling_rate)) * 0.1
        return samples.astype(np.float32)
    return Image.fromarray(random.integers(0, 256, (*IMAGE_SIZES[index], 3), dtype=np.uint8))


def make_blank(modality: Modality, size: tuple[int, ...]) -> Any:
    """A gray image or silent audio.

    Args:
        modality: image or audio.
        size: (height, width) of an image, pixels; (samples,) of audio.
    """
    if modality is Modality.AUDIO:
        return np.zeros(size, dtype=np.float32)
    return Image.new("RGB", (size[1], size[0]), (127, 127, 127))


def blank_like(media_input: Any) -> Any:
    """A blank media input of the same size."""
    if isinstance(media_input, np.ndarray):
        return make_blank(Modality.AUDIO, media_input.shape)
    return make_blank(Modality.IMAGE, (media_input.height, media_input.width))
