"""The tower alone gives the rows of transformers' whole model, from compact and from float features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import EncoderError, Modality, ModelProcessor, MultimodalDataItem, Registry, VideoFrames
from mm_plugin.encoder import Encoder
from mm_plugin_qwen2vl.testing import make_checkpoint

PART = "<|vision_start|><|image_pad|><|vision_end|>"
FOOTAGE = "<|vision_start|><|video_pad|><|vision_end|>"
SIZES = [(56, 56), (84, 140), (61, 45), (200, 300)]
VIDEOS = [(1, 84, 112), (3, 56, 56), (4, 84, 140), (6, 28, 196)]


def items_of(processor: ModelProcessor, images: list[Image.Image]) -> list[MultimodalDataItem]:
    return processor.process(PART * len(images), images).mm_items


def videos_of(processor: ModelProcessor, footages: list[np.ndarray]) -> list[MultimodalDataItem]:
    videos = [VideoFrames(frames, fps=2) for frames in footages]
    return processor.process(FOOTAGE * len(footages), videos=videos, video_min_pixels=784).mm_items


def reference_rows(model: Any, item: MultimodalDataItem) -> torch.Tensor:
    """The whole model's (or its tower's) own rows of one item, from float features."""
    with torch.no_grad():
        grid = item.image_grid_thw if item.modality is Modality.IMAGE else item.video_grid_thw
        tower = getattr(getattr(model, "model", None), "visual", model)
        rows: torch.Tensor = tower(torch.from_numpy(item.feature), grid_thw=torch.from_numpy(grid.copy())).pooler_output
    return rows


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_equal_the_whole_models(
    size: tuple[int, int],
    torch_float: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
) -> None:
    (item,) = items_of(torch_float, [make_image(0, *size)])
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    expected = reference_rows(model, item)
    assert rows.shape == (item.num_tokens, 64)
    assert torch.allclose(rows, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 0.01  # rows that are all alike would prove nothing


def test_compact_features_give_the_rows_of_float_features(
    compact: ModelProcessor, torch_float: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    images = [make_image(index, *size) for index, size in enumerate(SIZES)]
    small = encoder.encode(Modality.IMAGE, items_of(compact, images))
    large = encoder.encode(Modality.IMAGE, items_of(torch_float, images))
    for left, right in zip(small, large, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-5)


def test_compact_features_of_the_pillow_rule_are_within_rounding_of_its_float_ones(
    registry: Registry,
    checkpoint: Path,
    pillow: ModelProcessor,
    encoder: Encoder,
    make_image: Callable[..., Image.Image],
) -> None:
    processor = registry.load_processor(checkpoint, resize="pillow")
    (left,) = encoder.encode(Modality.IMAGE, items_of(processor, [make_image(0, 100, 70)]))
    (right,) = encoder.encode(Modality.IMAGE, items_of(pillow, [make_image(0, 100, 70)]))
    assert torch.allclose(left, right, rtol=0, atol=1e-5)


def test_rows_of_videos_equal_the_whole_models_in_both_forms(
    compact: ModelProcessor,
    torch_float: ModelProcessor,
    encoder: Encoder,
    model: Any,
    moving: Callable[..., np.ndarray],
) -> None:
    footages = [moving(*video) for video in VIDEOS]
    small, large = (videos_of(processor, footages) for processor in (compact, torch_float))
    together = encoder.encode(Modality.VIDEO, small)
    for rows, item, compact_item in zip(together, large, small, strict=True):
        expected = reference_rows(model, item)
        (floats,), (alone,) = encoder.encode(Modality.VIDEO, [item]), encoder.encode(Modality.VIDEO, [compact_item])
        for found in (rows, floats, alone):
            assert found.shape == (item.num_tokens, 64)
            assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_frames_of_a_patch_are_not_taken_for_one_image(
    compact: ModelProcessor, encoder: Encoder, moving: Callable[..., np.ndarray]
) -> None:
    frames = moving(2, 56, 56)
    footages = [frames, frames[::-1].copy(), frames[:1]]
    ahead, back, still = (encoder.encode(Modality.VIDEO, videos_of(compact, [video]))[0] for video in footages)
    assert not torch.allclose(ahead, back, rtol=0, atol=1e-3)
    assert not torch.allclose(ahead, still, rtol=0, atol=1e-3)
    (image,) = encoder.encode(Modality.IMAGE, items_of(compact, [Image.fromarray(frames[0])]))
    assert torch.allclose(still, image, rtol=0, atol=1e-5)


def test_company_changes_rows_by_rounding_only(
    compact: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [make_image(index, *size) for index, size in enumerate(SIZES)])
    together = encoder.encode(Modality.IMAGE, items)
    reverse = encoder.encode(Modality.IMAGE, items[::-1])[::-1]
    for item, rows, other in zip(items, together, reverse, strict=True):
        (alone,) = encoder.encode(Modality.IMAGE, [item])
        assert torch.allclose(alone, rows, rtol=0, atol=1e-5)
        assert torch.allclose(other, rows, rtol=0, atol=1e-5)


def test_the_same_call_gives_the_same_bits(
    compact: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [make_image(0, 84, 84), make_image(1, 56, 140)])
    for left, right in zip(encoder.encode(Modality.IMAGE, items), encoder.encode(Modality.IMAGE, items), strict=True):
        assert torch.equal(left, right)


def test_features_are_read_and_not_written(
    compact: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    items = items_of(compact, [make_image(0, 84, 84)])
    before = items[0].feature.copy()
    encoder.encode(Modality.IMAGE, items)
    assert np.array_equal(items[0].feature, before)


def test_features_may_be_tensors(
    compact: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    (item,) = items_of(compact, [make_image(0, 84, 84)])
    (expected,) = encoder.encode(Modality.IMAGE, [item])
    item.feature = torch.from_numpy(item.feature)
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    assert torch.equal(rows, expected)


def test_rows_take_no_gradient(
    compact: ModelProcessor, encoder: Encoder, make_image: Callable[..., Image.Image]
) -> None:
    (rows,) = encoder.encode(Modality.IMAGE, items_of(compact, [make_image(0, 56, 56)]))
    assert not rows.requires_grad


@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_bfloat16_is_as_near_the_truth_as_transformers_own(
    registry: Registry, checkpoint: Path, modality: Modality, model: Any
) -> None:
    half = registry.load_encoder(checkpoint, dtype=torch.bfloat16)
    double, own = (copy.deepcopy(model.model.visual).to(dtype) for dtype in (torch.float64, torch.bfloat16))
    options, random = half._embed, np.random.default_rng(5)  # type: ignore[attr-defined]
    still, ours, theirs = modality is Modality.IMAGE, 0.0, 0.0
    for _ in range(24):  # one item alone may be nearer or farther by a tenth
        grid = np.array([[1 if still else 2, *(2 * random.integers(2, 6, 2))]])
        levels = random.integers(0, 256, (int(grid.prod()), 3, 1 if still else 2, 196), dtype=np.uint8)
        fields = {"image_grid_thw" if still else "video_grid_thw": grid}
        compact = MultimodalDataItem(
            modality=modality, feature=levels.reshape(len(levels), 3, -1), model_specific_data=fields
        )
        mean, std = options._mean.numpy()[:, :, None], options._std.numpy()[:, :, None]
        floats = np.repeat((levels - mean) / std, 2 if still else 1, axis=2).reshape(len(levels), -1).astype(np.float32)
        item = MultimodalDataItem(modality=modality, feature=floats, model_specific_data=fields)
        truth = reference_rows(double, item).double()
        (rows,) = half.encode(modality, [compact])
        assert rows.dtype == torch.bfloat16
        ours += float((rows.double() - truth).abs().sum())
        theirs += float((reference_rows(own, item).double() - truth).abs().sum())
    assert 0 < ours <= 1.01 * theirs


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
    tower = registry.load_encoder(checkpoint).tower
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
