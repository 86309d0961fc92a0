"""Rows over pixels: one PIL image to what the encoder reads, against transformers' Pillow backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.harness import Bar, Row
from mm_plugin import Modality, Processor, Registry, Size
from mm_plugin.media import open_image

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
FULL, MEGAPIXEL = 12_845_056, 1_003_520


def img(height: int, width: int) -> np.ndarray:
    """A smooth image with a little noise, [height, width, 3] uint8: compresses and resizes as an image does."""
    random = np.random.default_rng(height * width)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin(y / (37 + 20 * c)) + np.cos(x / (53 - 10 * c)) for c in range(3)]
    levels = 127 + 50 * np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 1)).astype(np.float32)
    return levels.clip(0, 255).astype(np.uint8)


def rows(registry: Registry, checkpoint: Path) -> Iterator[Row]:
    """Three ways at 1,024 x 1,024, and 12 megapixels twice."""

    def load(**options: Any) -> Processor:
        return registry.load_processor(checkpoint, **options)

    image = Image.fromarray(img(1024, 1024))
    small = "Qwen2-VL pixels, 1,024 x 1,024"
    yield _row(f"{small}, torch, compact", image, load(), 0.25)
    yield _row(f"{small}, torch, float32", image, load(feature_format="float32"), 0.35)
    yield _row(f"{small}, pillow, float32", image, load(resize="pillow", feature_format="float32"), 0.6)
    image = Image.fromarray(img(3024, 4032))
    large = "Qwen2-VL pixels, 4,032 x 3,024"
    yield _row(f"{large} to 1 megapixel, torch, compact", image, load(max_pixels=MEGAPIXEL), 0.25)
    yield _row(f"{large} at native size, compact", image, load(), 0.12)


def _row(work: str, image: Image.Image, processor: Processor, bar: float) -> Row:
    options = processor.options
    reference = Qwen2VLImageProcessorPil(size={"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels})

    def ours() -> tuple[Any, Any]:
        decoded = open_image(image, path="images[0]", settings=processor.settings).decode()
        layout = processor.model.layout(Modality.IMAGE, Size(*decoded.pixels.shape[:2]), options, None)
        return processor.model.prepare(decoded, layout, options), layout["image_grid_thw"]

    grid = ours()[1][0].tolist()
    height, width = grid[1] * 14, grid[2] * 14
    compact = options.feature_format == "compact"
    plan = _Floor(height, width, options.resize, compact)
    exact = options.resize == "pillow" or image.size == (width, height)

    def check(found: Any, expected: Any, floor: Any) -> None:
        feature, layout = found
        assert np.array_equal(layout, expected["image_grid_thw"])
        assert np.array_equal(feature, floor)
        values = feature if feature.dtype == np.float32 else _as_reference(feature)
        if exact:
            assert np.array_equal(values, expected["pixel_values"])
            return
        # Two resize rules: levels may differ by two, one level being 1 / 255 / std.
        assert np.abs(values - expected["pixel_values"]).max() <= 2.01 / 255 / STD.min()

    name = "torch, 1 permuted copy" if compact and options.resize == "torch" else f"{options.resize}, table of pairs"
    return Row(
        work,
        ours,
        check,
        Bar(bar, "reference"),
        ("transformers, Pillow backend", lambda: reference(image, return_tensors="np")),
        (name, lambda: plan(image)),
    )


class _Floor:
    """The least that numpy, torch and Pillow need for the same numbers."""

    def __init__(self, height: int, width: int, rule: str, compact: bool) -> None:
        self._height, self._width, self._pillow, self._compact = height, width, rule == "pillow", compact
        levels = np.arange(256)
        if self._pillow:
            scaled = (levels.astype(np.float64) * (1 / 255)).astype(np.float32)
            self._table = (scaled - MEAN[:, None].astype(np.float32)) / STD[:, None].astype(np.float32)
        else:
            scale = np.float32(255)
            mean, std = MEAN[:, None].astype(np.float32), STD[:, None].astype(np.float32)
            self._table = (levels.astype(np.float32) - mean * scale) / (std * scale)
        # Two neighboring levels are looked up at once, as one 16-bit number: half the look-ups, 8 bytes each.
        pairs = np.arange(1 << 16)
        self._pairs = np.stack([self._table[:, pairs & 255], self._table[:, pairs >> 8]], axis=-1).view(np.complex64)

    def __call__(self, image: Image.Image) -> np.ndarray:
        size = (self._width, self._height)
        if image.size == size:
            pixels = _levels(image)
        elif self._pillow:
            pixels = _levels(image.resize(size, Image.Resampling.BICUBIC))
        else:
            source = torch.from_numpy(_levels(image)).permute(2, 0, 1)[None]
            out = torch.nn.functional.interpolate(source, size=size[::-1], mode="bicubic", antialias=True)
            pixels = out[0].permute(1, 2, 0).contiguous().numpy()
        cut = pixels.reshape(self._height // 28, 2, 14, self._width // 28, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = cut.reshape(-1, 3, 196)
        if self._compact:
            return patches
        out, words = np.empty((len(patches), 3, 2, 98), dtype=np.complex64), patches.view("<u2")
        for start in range(0, len(patches), 512):
            part = slice(start, start + 512)
            for channel in range(3):
                first = self._pairs[channel, :, 0].take(words[part, channel], mode="clip")
                out[part, channel, 0] = first
                out[part, channel, 1] = first
        return out.view(np.float32).reshape(len(patches), -1)


def _levels(image: Image.Image) -> np.ndarray:
    """The pixels of an RGB image, in bands of 256 rows: Pillow's own copy of a band stays in the caches."""
    out = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for top in range(0, image.height, 256):
        bottom = min(image.height, top + 256)
        out[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return out


def _as_reference(patches: np.ndarray) -> np.ndarray:
    """Compact patches as the reference's `pixel_values`, by its own three steps."""
    scaled = (patches.astype(np.float64) * (1 / 255)).astype(np.float32)
    values = (scaled - MEAN.astype(np.float32)[:, None]) / STD.astype(np.float32)[:, None]
    return np.repeat(values[:, :, None], 2, axis=2).reshape(len(patches), -1)
