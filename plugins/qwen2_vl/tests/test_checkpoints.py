"""Checkpoints of every layout open alike: names of tensors, shards, both kinds of settings files; broken ones say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mm_plugin import Modality, ModelProcessor, Registry, UsageError
from mm_plugin.encoder import Encoder
from mm_plugin_qwen2vl.testing import make_checkpoint, qwen_tokenizer, tiny_config

PART = "<|vision_start|><|image_pad|><|vision_end|>"
LAYOUTS: list[dict[str, Any]] = [
    {"layout": layout, "combined": combined, "shards": shards}
    for layout in ("visual", "model.visual")
    for combined in (False, True)
    for shards in (1, 3)
]


def rows(encoder: Encoder, processor: ModelProcessor, image: Image.Image) -> torch.Tensor:
    (result,) = encoder.encode(Modality.IMAGE, processor.process(PART, [image]).mm_items)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_every_layout_gives_the_same_items_and_rows(
    registry: Registry,
    tmp_path: Path,
    layout: dict[str, Any],
    compact: ModelProcessor,
    encoder: Encoder,
    make_image: Callable[..., Image.Image],
) -> None:
    folder = make_checkpoint(tmp_path, **layout)
    assert (folder / "processor_config.json").is_file() == layout["combined"]
    assert (folder / "preprocessor_config.json").is_file() == (not layout["combined"])
    assert len(list(folder.glob("*.safetensors"))) == layout["shards"]
    processor, tower = registry.load_processor(folder), registry.load_encoder(folder)
    assert processor.options == compact.options
    image = make_image(0, 90, 130)
    left, right = (opened.process(PART, [image]) for opened in (processor, compact))
    assert left.mm_items[0].identity == right.mm_items[0].identity
    assert np.array_equal(left.input_ids, right.input_ids)
    assert torch.equal(rows(tower, processor, image), rows(encoder, compact, image))


@pytest.mark.parametrize("combined", [False, True])
def test_both_settings_files_give_their_pixel_budget(registry: Registry, tmp_path: Path, combined: bool) -> None:
    limits = {"min_pixels": 28 * 28 * 5, "max_pixels": 28 * 28 * 11}
    folder = make_checkpoint(tmp_path, combined=combined, preprocessor=limits)
    options: Any = registry.load_processor(folder).options
    assert (options.min_pixels, options.max_pixels) == (28 * 28 * 5, 28 * 28 * 11)


def test_edges_of_a_size_are_the_pixel_budget(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "preprocessor_config.json"
    described = json.loads(file.read_text())
    del described["min_pixels"], described["max_pixels"]
    described["size"] = {"shortest_edge": 4000, "longest_edge": 50000}
    file.write_text(json.dumps(described))
    options: Any = registry.load_processor(folder).options
    assert (options.min_pixels, options.max_pixels) == (4000, 50000)


def test_settings_that_are_silent_get_the_defaults(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "preprocessor_config.json").write_text("{}")
    options: Any = registry.load_processor(folder).options
    assert (options.min_pixels, options.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert (options.patch_size, options.merge_size, options.temporal_patch_size) == (14, 2, 2)


def test_a_config_without_architectures_is_known_by_its_model_type(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    del described["architectures"]
    (folder / "config.json").write_text(json.dumps(described))
    assert registry.load_processor(folder).spec.name == "qwen2_vl"
    assert registry.load_encoder(folder).version.startswith("qwen2_vl:1:")


@pytest.mark.parametrize("missing", ["config.json", "preprocessor_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(registry: Registry, tmp_path: Path, missing: str) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(UsageError) as caught:
        registry.load_processor(folder)
    assert caught.value.argument in ("checkpoint", "config")
    assert str(folder) in caught.value.message
    assert missing.partition("_")[0].partition(".")[0] in caught.value.message


def test_a_processor_needs_no_weights(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    assert registry.load_processor(folder).count("image", (56, 56)) == (4, 4)
    with pytest.raises(UsageError, match=r"expected \.safetensors"):
        registry.load_encoder(folder)


def test_the_language_model_is_not_needed_for_the_tower(
    registry: Registry,
    tmp_path: Path,
    compact: ModelProcessor,
    encoder: Encoder,
    make_image: Callable[..., Image.Image],
) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name.startswith("visual.")}, file)
    image = make_image(1, 60, 60)
    assert torch.equal(rows(registry.load_encoder(folder), compact, image), rows(encoder, compact, image))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", r"1 missing \(blocks\.1\.attn\.proj\.bias\)"),
        ("unexpected", r"1 unexpected \(blocks\.2\.attn\.proj\.bias\)"),
        ("shape", r"1 of another shape \(blocks\.1\.attn\.proj\.bias \[16\] .* \[32\]\)"),
        ("no block", r"12 missing \(blocks\.1\.norm1\.weight, .*\)"),
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
        tensors |= {f"visual.blocks.{block}.attn.proj.bias": bias.clone() for block in (1, 2)}
    elif fault == "shape":
        tensors["visual.blocks.1.attn.proj.bias"] = bias[:16].clone()
    elif fault == "no block":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("visual.blocks.1.")}
    save_file(tensors, file)
    with pytest.raises(UsageError, match=said) as caught:
        registry.load_encoder(folder)
    assert caught.value.argument == "checkpoint"
    assert str(folder) in caught.value.message


def test_a_broken_weights_file_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read"):
        registry.load_encoder(folder)


def test_a_tokenizer_without_the_placeholder_is_refused_by_its_name(registry: Registry, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = tiny_config(qwen_tokenizer())
    plain = Tokenizer(models.WordLevel({"a": 0, "<|vision_start|>": 1, "<|vision_end|>": 2, "?": 3}, unk_token="?"))
    folder = make_checkpoint(tmp_path, config=config, tokenizer=PreTrainedTokenizerFast(tokenizer_object=plain))
    with pytest.raises(UsageError, match=r"no token '<\|image_pad\|>'"):
        registry.load_processor(folder)


@pytest.mark.case("3.1")
def test_a_vocabulary_that_reaches_the_sentinels_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["vocab_size"] = 1_000_001
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match="1000001"):
        registry.load_processor(folder)
