"""`feature_format="uint8"`: the reference's pixel values before normalization, in the reference's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
from mm_plugin import MediaError, Modality, ProcessorOutput, VideoFrames, discover

QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def media() -> dict[str, Any]:
    random = np.random.default_rng(1)
    image = random.integers(0, 256, (60, 90, 3), dtype=np.uint8)
    frames = random.integers(0, 256, (6, 56, 84, 3), dtype=np.uint8)
    return {"images": [image], "videos": [VideoFrames(frames, fps=2.0)]}


@pytest.mark.parametrize("module", [mm_plugin_qwen2vl, mm_plugin_qwen25vl])
def test_levels_are_those_of_the_reference_s_rows(module: Any, tmp_path: Path) -> None:
    folder = module.testing.make_checkpoint(tmp_path / "checkpoint")
    with discover() as registry:
        found = {}
        for name in ("compact", "uint8", "float32"):
            processor = registry.load_processor(folder, resize="pillow", feature_format=name)
            found[name] = processor.process(QWEN + VIDEO, **media()).mm_items
        encoder = registry.load_encoder(folder, device="cpu", dtype=torch.float32)
        for compact, levels, floats in zip(*found.values(), strict=True):
            assert (levels.feature.dtype, levels.feature.shape) == (np.uint8, floats.feature.shape)
            assert levels.feature.shape[1] == 1176
            rows = levels.feature.reshape(len(levels.feature), 3, -1) / 255
            normalized = (rows - MEAN[:, None]) / STD[:, None]
            assert np.abs(normalized.reshape(floats.feature.shape) - floats.feature).max() < 1e-5
            assert len({compact.identity, levels.identity, floats.identity}) == 3
            encode = encoder.get_image_feature if levels.modality is Modality.IMAGE else encoder.get_video_feature
            made = [encode([item])[0] for item in (compact, levels, floats)]
            made = [getattr(one, "embeddings", one) for one in made]
            assert torch.allclose(made[1], made[0], atol=1e-4)
            assert torch.allclose(made[1], made[2], atol=1e-4)


def test_levels_that_come_prepared_have_the_layout_of_the_option(tmp_path: Path) -> None:
    folder = mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path / "checkpoint")
    grid = np.array([[1, 2, 4]])
    rows, compact = np.zeros((8, 1176), np.uint8), np.zeros((8, 3, 196), np.uint8)
    with discover() as registry:
        for name, right, wrong in (("uint8", rows, compact), ("compact", compact, rows)):
            processor = registry.load_processor(folder, feature_format=name)
            given = ProcessorOutput({"pixel_values": right, "image_grid_thw": grid})
            assert processor.process(QWEN, [given]).mm_items[0].num_tokens == 2
            with pytest.raises(MediaError, match="pixel_values must be"):
                processor.process(QWEN, [ProcessorOutput({"pixel_values": wrong, "image_grid_thw": grid})])
