"""Rows over tiles: one PIL image to what DeepSeek-VL2's encoder reads, against the procedure that its peers run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from benchmarks.harness import Bar, Row
from benchmarks.pixel_rows import img
from mm_plugin import Modality, Processor, Registry, Size
from mm_plugin.media import open_image

SIDE = 384
GRAY = (127, 127, 127)


def rows(registry: Registry, checkpoint: Path) -> Iterator[Row]:
    """Both resize rules at 1,024 x 1,024 and 12 megapixels, and the reference's float tensor."""

    def load(**options: Any) -> Processor:
        return registry.load_processor(checkpoint, **options)

    for size, name in (((1024, 1024), "1,024 x 1,024"), ((3024, 4032), "4,032 x 3,024")):
        image = Image.fromarray(img(*size))
        work = f"DeepSeek-VL2 tiles, {name}"
        yield _row(f"{work}, pillow, compact", image, load(), 1.0)
        yield _row(f"{work}, pillow, float32", image, load(feature_format="float32"), 1.0)
        yield _row(f"{work}, torch, compact", image, load(resize="torch"), 0.4)


def _row(work: str, image: Image.Image, processor: Processor, bar: float) -> Row:
    options = processor.options

    def ours() -> tuple[np.ndarray, np.ndarray]:
        decoded = open_image(image, path="images[0]", settings=processor.settings).decode()
        layout = processor.model.layout(Modality.IMAGE, Size(*decoded.pixels.shape[:2]), options, True)
        return processor.model.prepare(decoded, layout, options), layout["images_spatial_crop"][0]

    columns, rows = ours()[1].tolist()
    pillow, compact = options.resize == "pillow", options.feature_format == "compact"

    def check(found: Any, expected: Any, floor: Any) -> None:
        feature, (width, height) = found
        assert len(expected) == 1 + width * height
        assert np.array_equal(feature, floor)
        values = feature if not compact else _as_reference(feature)
        # Two resize rules: levels may differ by two, one level being 2 / 255.
        apart = np.abs(values - expected.numpy()).max()
        assert apart == 0 if pillow else apart <= 2.01 * 2 / 255

    return Row(
        work,
        ours,
        check,
        Bar(bar, "reference"),
        ("pad, crop, a tensor for each tile", lambda: _reference(image, columns, rows)),
        (f"{options.resize}, two resizes and copies", lambda: _floor(image, columns, rows, pillow, compact)),
    )


def _reference(image: Image.Image, columns: int, rows: int) -> torch.Tensor:
    """Pillow pads and crops; each tile becomes a float tensor, normalized as torchvision does it, and all are stacked."""
    views = [ImageOps.pad(image, (SIDE, SIDE), color=GRAY)]
    view = ImageOps.pad(image, (columns * SIDE, rows * SIDE), color=GRAY)
    for top in range(0, rows * SIDE, SIDE):
        views += [view.crop((left, top, left + SIDE, top + SIDE)) for left in range(0, columns * SIDE, SIDE)]
    mean = std = torch.full((3, 1, 1), 0.5)
    tensors = []
    for tile in views:
        levels = torch.from_numpy(np.array(tile, copy=True)).permute(2, 0, 1).contiguous()
        tensors.append(levels.to(torch.float32).div(255).clone().sub_(mean).div_(std))
    return torch.stack(tensors)


def _floor(image: Image.Image, columns: int, rows: int, pillow: bool, compact: bool) -> np.ndarray:
    """Two resizes, and each pixel copied to its tile once; a table for the float form."""
    tiles = np.empty((1 + rows * columns, SIDE, SIDE, 3), dtype=np.uint8)
    pixels = None if pillow else np.asarray(image)
    for part, (across, down) in ((tiles[:1], (1, 1)), (tiles[1:], (columns, rows))):
        size = (across * SIDE, down * SIDE)
        view = np.asarray(ImageOps.pad(image, size, color=GRAY)) if pillow else _torch_pad(pixels, *size)
        part.reshape(down, across, SIDE, SIDE, 3)[...] = view.reshape(down, SIDE, across, SIDE, 3).swapaxes(1, 2)
    return tiles if compact else _as_reference(tiles)


def _torch_pad(pixels: Any, width: int, height: int) -> np.ndarray:
    scale = min(width / pixels.shape[1], height / pixels.shape[0])
    size = (round(pixels.shape[0] * scale), round(pixels.shape[1] * scale))
    source = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(source, size=size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    out = np.full((height, width, 3), GRAY, dtype=np.uint8)
    top, left = round((height - size[0]) * 0.5), round((width - size[1]) * 0.5)
    out[top : top + size[0], left : left + size[1]] = resized.numpy()
    return out


_TABLE = ((np.arange(256, dtype=np.float32) / np.float32(255)) - np.float32(0.5)) / np.float32(0.5)


def _as_reference(tiles: np.ndarray) -> np.ndarray:
    """Compact tiles as the reference's floats."""
    return np.ascontiguousarray(_TABLE[tiles].transpose(0, 3, 1, 2))
