"""The tower alone gives the rows of transformers' whole model, from compact and from float features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import EncoderError, Modality, ModelProcessor, MultimodalDataItem, Registry
from mm_plugin.encoder import Encoder
from mm_plugin_qwen2vl.testing import make_checkpoint

PART = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = [(56, 56), (84, 140), (61, 45), (200, 300)]


def items_of(processor: ModelProcessor, images: list[Image.Image]) -> list[MultimodalDataItem]:
    return processor.process(PART * len(images), images).mm_items


def reference_rows(model: Any, item: MultimodalDataItem) -> torch.Tensor:
    """The whole model's own vision rows of one image, from float features."""
    with torch.no_grad():
        pixels, grid = torch.from_numpy(item.feature), torch.from_numpy(item.image_grid_thw.copy())
        rows: torch.Tensor = model.model.visual(pixels, grid_thw=grid).pooler_output
    return rows


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_equal_the_whole_models(
    size: tuple[int, int], torch_float: ModelProcessor, encoder: Encoder, model: Any, photo: Callable[..., Image.Image]
) -> None:
    (item,) = items_of(torch_float, [photo(0, *size)])
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    expected = reference_rows(model, item)
    assert rows.shape == (item.num_tokens, 64)
    assert torch.allclose(rows, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 0.01  # rows that are all alike would prove nothing


def test_compact_features_give_the_rows_of_float_features(
    compact: ModelProcessor, torch_float: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]
) -> None:
    images = [photo(index, *size) for index, size in enumerate(SIZES)]
    small = encoder.encode(Modality.IMAGE, items_of(compact, images))
    large = encoder.encode(Modality.IMAGE, items_of(torch_float, images))
    for left, right in zip(small, large, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-5)


def test_compact_features_of_the_pillow_rule_are_within_rounding_of_its_float_ones(
    registry: Registry, checkpoint: Path, pillow: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]
) -> None:
    processor = registry.load_processor(checkpoint, resize="pillow")
    (left,) = encoder.encode(Modality.IMAGE, items_of(processor, [photo(0, 100, 70)]))
    (right,) = encoder.encode(Modality.IMAGE, items_of(pillow, [photo(0, 100, 70)]))
    assert torch.allclose(left, right, rtol=0, atol=1e-5)


def test_company_changes_rows_by_rounding_only(
    compact: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [photo(index, *size) for index, size in enumerate(SIZES)])
    together = encoder.encode(Modality.IMAGE, items)
    reverse = encoder.encode(Modality.IMAGE, items[::-1])[::-1]
    for item, rows, other in zip(items, together, reverse, strict=True):
        (alone,) = encoder.encode(Modality.IMAGE, [item])
        assert torch.allclose(alone, rows, rtol=0, atol=1e-5)
        assert torch.allclose(other, rows, rtol=0, atol=1e-5)


def test_the_same_call_gives_the_same_bits(
    compact: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [photo(0, 84, 84), photo(1, 56, 140)])
    for left, right in zip(encoder.encode(Modality.IMAGE, items), encoder.encode(Modality.IMAGE, items), strict=True):
        assert torch.equal(left, right)


def test_features_are_read_and_not_written(
    compact: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [photo(0, 84, 84)])
    before = items[0].feature.copy()
    encoder.encode(Modality.IMAGE, items)
    assert np.array_equal(items[0].feature, before)


def test_features_may_be_tensors(compact: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]) -> None:
    (item,) = items_of(compact, [photo(0, 84, 84)])
    (expected,) = encoder.encode(Modality.IMAGE, [item])
    item.feature = torch.from_numpy(item.feature)
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    assert torch.equal(rows, expected)


def test_rows_take_no_gradient(compact: ModelProcessor, encoder: Encoder, photo: Callable[..., Image.Image]) -> None:
    (rows,) = encoder.encode(Modality.IMAGE, items_of(compact, [photo(0, 56, 56)]))
    assert not rows.requires_grad


def test_bfloat16_is_as_near_the_truth_as_transformers_own(
    registry: Registry,
    checkpoint: Path,
    compact: ModelProcessor,
    torch_float: ModelProcessor,
    encoder: Encoder,
    model: Any,
    photo: Callable[..., Image.Image],
) -> None:
    half = registry.load_encoder(checkpoint, dtype=torch.bfloat16)
    image = photo(0, 140, 140)
    (truth,) = encoder.encode(Modality.IMAGE, items_of(compact, [image]))
    (rows,) = half.encode(Modality.IMAGE, items_of(compact, [image]))
    assert rows.dtype == torch.bfloat16
    tower = type(model.model.visual)(model.config.vision_config).eval()
    tower.load_state_dict(model.model.visual.state_dict())
    (item,) = items_of(torch_float, [image])
    with torch.no_grad():
        own = tower.to(torch.bfloat16)(
            torch.from_numpy(item.feature), grid_thw=torch.from_numpy(item.image_grid_thw.copy())
        ).pooler_output
    ours, theirs = (float((value.float() - truth).abs().mean()) for value in (rows, own))
    assert 0 < ours <= 1.1 * theirs


def test_a_checkpoint_in_bfloat16_is_opened_as_it_is_or_as_asked(registry: Registry, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    processor = registry.load_processor(folder)
    items = items_of(processor, [Image.new("RGB", (56, 56), (9, 99, 200))])
    (own,) = registry.load_encoder(folder).encode(Modality.IMAGE, items)
    (asked,) = registry.load_encoder(folder, dtype=torch.float32).encode(Modality.IMAGE, items)
    assert (own.dtype, asked.dtype) == (torch.bfloat16, torch.float32)
    assert torch.allclose(own.float(), asked, atol=0.05)


def test_opening_a_tower_draws_no_random_numbers_and_leaves_nothing_unfilled(
    registry: Registry, checkpoint: Path, model: Any
) -> None:
    before = torch.random.get_rng_state()
    tower = registry.load_encoder(checkpoint)._tower
    assert torch.equal(torch.random.get_rng_state(), before)
    expected, found = dict(model.model.visual.named_parameters()), dict(tower.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_other_weights_have_another_version(
    registry: Registry, checkpoint: Path, tmp_path: Path, encoder: Encoder
) -> None:
    other = registry.load_encoder(make_checkpoint(tmp_path, seed=7))
    assert encoder.version.startswith("qwen2_vl:1:")
    assert other.version != encoder.version
    assert registry.load_encoder(checkpoint).version == encoder.version


def test_audio_is_refused_by_name(encoder: Encoder) -> None:
    with pytest.raises(EncoderError, match="does not encode audios") as caught:
        encoder.encode(Modality.AUDIO, [])
    assert caught.value.distribution == "mm-plugin-qwen2vl"
