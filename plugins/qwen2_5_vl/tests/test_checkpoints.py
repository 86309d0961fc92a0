"""Checkpoints of every layout open alike; broken ones, and settings that are not served, say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_plugin import Modality, ModelProcessor, Registry, UsageError, VideoFrames
from mm_plugin.encoder import Encoder
from mm_plugin_qwen25vl.testing import make_checkpoint

SLOT = "<|vision_start|><|video_pad|><|vision_end|>"
LAYOUTS: list[dict[str, Any]] = [
    {"layout": layout, "combined": combined, "shards": shards}
    for layout in ("visual", "model.visual")
    for combined, shards in ((False, 1), (True, 3))
]


def rows(encoder: Encoder, processor: ModelProcessor, frames: np.ndarray) -> torch.Tensor:
    items = processor.process(SLOT, videos=[VideoFrames(frames, fps=2)]).mm_items
    (result,) = encoder.encode(Modality.VIDEO, items)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_every_layout_gives_the_same_rows(
    registry: Registry,
    tmp_path: Path,
    layout: dict[str, Any],
    compact: ModelProcessor,
    encoder: Encoder,
    moving: Callable[..., np.ndarray],
) -> None:
    folder = make_checkpoint(tmp_path, **layout)
    assert (folder / "processor_config.json").is_file() == layout["combined"]
    assert len(list(folder.glob("*.safetensors"))) == layout["shards"]
    processor, tower = registry.load_processor(folder), registry.load_encoder(folder)
    assert processor.options == compact.options
    assert torch.equal(rows(tower, processor, moving(3)), rows(encoder, compact, moving(3)))


def test_the_language_model_is_not_needed_for_the_tower(
    registry: Registry, tmp_path: Path, compact: ModelProcessor, encoder: Encoder, moving: Callable[..., np.ndarray]
) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name.startswith("visual.")}, file)
    assert torch.equal(rows(registry.load_encoder(folder), compact, moving(2)), rows(encoder, compact, moving(2)))


def test_a_config_without_architectures_is_known_by_its_model_type(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    del described["architectures"]
    (folder / "config.json").write_text(json.dumps(described))
    assert registry.load_processor(folder).spec.name == "qwen2_5_vl"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", r"1 missing \(blocks\.1\.attn\.proj\.bias\)"),
        ("unexpected", r"1 unexpected \(blocks\.3\.attn\.proj\.bias\)"),
        ("shape", r"1 of another shape \(blocks\.1\.attn\.proj\.bias \[16\] .* \[32\]\)"),
    ],
)
def test_a_tower_that_does_not_fit_its_config_is_refused_by_the_tensors_name(
    registry: Registry, tmp_path: Path, fault: str, said: str
) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("visual.blocks.1.attn.proj.bias")
    if fault == "unexpected":
        tensors |= {f"visual.blocks.{block}.attn.proj.bias": bias.clone() for block in (1, 3)}
    elif fault == "shape":
        tensors["visual.blocks.1.attn.proj.bias"] = bias[:16].clone()
    save_file(tensors, file)
    with pytest.raises(UsageError, match=said) as caught:
        registry.load_encoder(folder)
    assert caught.value.argument == "checkpoint"


@pytest.mark.parametrize(
    "wrong",
    [{"do_resize": False}, {"do_normalize": False}, {"do_rescale": False}, {"do_convert_rgb": False}, {"resample": 2},
     {"temporal_patch_size": 0}, {"image_std": "0.5"}, {"min_pixels": 4000, "max_pixels": 3000}],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_whose_settings_are_not_served_is_refused(
    registry: Registry, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, preprocessor=wrong)
    with pytest.raises(UsageError) as caught:
        registry.load_processor(folder)
    assert next(iter(wrong)) in caught.value.message


def test_settings_of_videos_beside_those_of_images_are_not_taken_for_theirs(registry: Registry, tmp_path: Path) -> None:
    """Newer checkpoints describe videos in a file of their own, with bounds of the whole video under the names of an image's."""
    folder = make_checkpoint(tmp_path)
    described = {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "fps": 1.0, "max_frames": 99}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(described))
    options: Any = registry.load_processor(folder).options
    assert (options.min_pixels, options.max_pixels) == (3136, 12845056)
    file = folder / "preprocessor_config.json"
    silent = {name: value for name, value in json.loads(file.read_text()).items() if not name.endswith("_pixels")}
    file.write_text(json.dumps(silent))
    options = registry.load_processor(folder).options
    assert (options.min_pixels, options.max_pixels) == (56 * 56, 28 * 28 * 1280)  # the defaults, not those of a video
    assert (options.fps, options.max_frames) == (1.0, 99)  # what is about videos is taken from their own file
