"""Rows over vision towers: several items in one call, against transformers' own forward of the same tower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration

import mm_plugin_qwen2vl.testing as qwen2vl
import mm_plugin_qwen25vl.testing as qwen25vl
from benchmarks.harness import Bar, Row
from mm_plugin import Modality, MultimodalDataItem, Registry

# Patches high and wide; a video's temporal patches too.
IMAGES = [(32, 32), (24, 44), (16, 16), (16, 16), (40, 20), (10, 30)]
FOOTAGE = (6, 18, 24)
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)[:, None, None]
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)[:, None, None]


def rows(registry: Registry, folder: Path) -> Iterator[Row]:
    """Six images of five sizes, and a video of twelve frames, in both Qwen towers with four layers of width 320."""
    config = qwen2vl.tiny_config(qwen2vl.qwen_tokenizer())
    config.vision_config.depth, config.vision_config.embed_dim, config.vision_config.num_heads = 4, 320, 4
    checkpoint = qwen2vl.make_checkpoint(folder / "qwen2vl", config=config)
    yield from _pair(registry, "Qwen2-VL", checkpoint, Qwen2VLForConditionalGeneration)
    windows = qwen25vl.tiny_config(qwen25vl.qwen_tokenizer())
    vision = windows.vision_config
    vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size = 4, 320, 4, 856
    vision.window_size, vision.fullatt_block_indexes = 112, [3]
    checkpoint = qwen25vl.make_checkpoint(folder / "qwen25vl", config=windows)
    yield from _pair(registry, "Qwen2.5-VL", checkpoint, Qwen2_5_VLForConditionalGeneration)


def _pair(registry: Registry, name: str, checkpoint: Path, kind: Any) -> Iterator[Row]:
    encoder = registry.load_encoder(checkpoint)
    tower = kind.from_pretrained(checkpoint, dtype=torch.float32).eval().model.visual
    grids = [(1, high, wide) for high, wide in IMAGES]
    yield _row(f"{name} tower, 6 images of 5 sizes", encoder, tower, Modality.IMAGE, grids)
    yield _row(f"{name} tower, a video of 12 frames", encoder, tower, Modality.VIDEO, [FOOTAGE])


def _row(work: str, encoder: Any, tower: Any, modality: Modality, grids: list[tuple[int, int, int]]) -> Row:
    random, items, floats = np.random.default_rng(7), [], []
    still = modality is Modality.IMAGE
    for grid in grids:
        levels = random.integers(0, 256, (int(np.prod(grid)), 3, 1 if still else 2, 196), dtype=np.uint8)
        fields = {"image_grid_thw" if still else "video_grid_thw": np.array([grid])}
        items.append(
            MultimodalDataItem(
                modality=modality, feature=levels.reshape(len(levels), 3, -1), model_specific_data=fields
            )
        )
        normal = (levels - 255 * MEAN) / (255 * STD)
        floats.append(np.repeat(normal, 2, axis=2) if still else normal)
    pixels = torch.from_numpy(np.concatenate(floats).reshape(-1, 1176).astype(np.float32))
    table = torch.tensor(grids)

    def check(ours: Any, reference: Any, _floor: Any) -> None:
        assert torch.allclose(torch.cat(list(ours)), reference, rtol=0, atol=1e-4)

    return Row(
        work,
        lambda: encoder.encode(modality, items),
        check,
        Bar(1, "reference"),
        ("transformers' forward", lambda: tower(pixels, grid_thw=table).pooler_output),
    )
