"""The tower alone gives the rows of transformers' whole model, from images and videos, in compact and in float form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_plugin import EncoderError, Modality, ModelProcessor, MultimodalDataItem, Registry, VideoFrames
from mm_plugin.encoder import Encoder
from mm_plugin_qwen25vl.testing import make_checkpoint, qwen_tokenizer, tiny_config

IMAGE, VIDEO = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
# Windows of 2 x 2 merged tokens: sizes that fill them, leave edges on one side or both, and are smaller than one.
SIZES = [(56, 56), (112, 168), (84, 140), (61, 45), (28, 28), (200, 300)]
VIDEOS = [(1, 84, 112), (3, 56, 56), (4, 84, 140), (6, 28, 196)]
Moving = Callable[..., np.ndarray]


def images_of(processor: ModelProcessor, images: Sequence[Image.Image]) -> list[MultimodalDataItem]:
    return processor.process(IMAGE * len(images), images).mm_items


def videos_of(processor: ModelProcessor, footages: Sequence[np.ndarray]) -> list[MultimodalDataItem]:
    videos = [VideoFrames(frames, fps=2) for frames in footages]
    return processor.process(VIDEO * len(footages), videos=videos, video_min_pixels=784).mm_items


def own_rows(tower: Any, item: MultimodalDataItem) -> torch.Tensor:
    """Transformers' rows of one item, from float features."""
    grid = item.image_grid_thw if item.modality is Modality.IMAGE else item.video_grid_thw
    with torch.no_grad():
        rows: torch.Tensor = tower(torch.from_numpy(item.feature), grid_thw=torch.from_numpy(grid.copy())).pooler_output
    return rows


@pytest.fixture
def items(
    torch_float: ModelProcessor, compact: ModelProcessor, make_image: Callable[..., Image.Image], moving: Moving
) -> dict[Modality, tuple[list[MultimodalDataItem], list[MultimodalDataItem]]]:
    """The same media twice, in float and in compact form."""
    images, footages = (
        [make_image(index, *size) for index, size in enumerate(SIZES)],
        [moving(*video) for video in VIDEOS],
    )
    return {
        Modality.IMAGE: (images_of(torch_float, images), images_of(compact, images)),
        Modality.VIDEO: (videos_of(torch_float, footages), videos_of(compact, footages)),
    }


@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_rows_of_both_forms_equal_the_whole_models(
    modality: Modality, items: dict[Modality, Any], encoder: Encoder, model: Any
) -> None:
    large, small = items[modality]
    together = encoder.encode(modality, small)
    for item, compact, rows in zip(large, small, together, strict=True):
        expected = own_rows(model.model.visual, item)
        assert rows.shape == expected.shape == (item.num_tokens, 64)
        assert float(expected.std()) > 0.01  # rows that are all alike would prove nothing
        (alone,), (floats,) = encoder.encode(modality, [compact]), encoder.encode(modality, [item])
        for found in (rows, alone, floats):
            assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_frames_of_a_patch_are_not_taken_for_one_image(
    encoder: Encoder, compact: ModelProcessor, moving: Moving
) -> None:
    frames = moving(2, 56, 56)
    rows = [
        encoder.encode(Modality.VIDEO, videos_of(compact, [video]))[0] for video in (frames, frames[::-1], frames[:1])
    ]
    assert not torch.allclose(rows[0], rows[1], rtol=0, atol=1e-3)
    assert not torch.allclose(rows[0], rows[2], rtol=0, atol=1e-3)


def test_a_video_of_one_frame_gives_the_rows_of_the_image(
    encoder: Encoder, compact: ModelProcessor, moving: Moving
) -> None:
    (video,) = encoder.encode(Modality.VIDEO, videos_of(compact, [moving(1, 84, 112)]))
    (image,) = encoder.encode(Modality.IMAGE, images_of(compact, [Image.fromarray(moving(1, 84, 112)[0])]))
    assert torch.allclose(video, image, rtol=0, atol=1e-5)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4), st.booleans()
)
def test_any_grids_together_equal_transformers(model: Any, encoder: Encoder, grids: list[Any], video: bool) -> None:
    random = np.random.default_rng(len(grids))
    made, expected = [], []
    for t, h, w in grids:
        grid = np.array([[t if video else 1, 2 * h, 2 * w]])
        pixels = random.standard_normal((int(grid.prod()), 1176)).astype(np.float32)
        modality, name = (Modality.VIDEO, "video_grid_thw") if video else (Modality.IMAGE, "image_grid_thw")
        fields = {name: grid}
        made.append(MultimodalDataItem(modality=modality, feature=pixels, model_specific_data=fields))
        expected.append(own_rows(model.model.visual, made[-1]))
    for found, rows in zip(encoder.encode(modality, made), expected, strict=True):
        assert torch.allclose(found, rows, rtol=0, atol=1e-4)


@pytest.mark.parametrize("whole", [[0], [2], [0, 1, 2], []], ids=str)
def test_layers_of_both_kinds_in_any_order(
    registry: Registry,
    tmp_path: Path,
    compact: ModelProcessor,
    torch_float: ModelProcessor,
    moving: Moving,
    whole: list[int],
) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = tiny_config(qwen_tokenizer())
    config.vision_config.fullatt_block_indexes = whole
    folder = make_checkpoint(tmp_path, config=config)
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval().model.visual
    (rows,) = registry.load_encoder(folder).encode(Modality.VIDEO, videos_of(compact, [moving(4, 84, 140)]))
    (item,) = videos_of(torch_float, [moving(4, 84, 140)])
    assert torch.allclose(rows, own_rows(reference, item), rtol=0, atol=1e-5)


def test_company_changes_rows_by_rounding_only(items: dict[Modality, Any], encoder: Encoder) -> None:
    for modality, (_, small) in items.items():
        together = encoder.encode(modality, small)
        reverse = encoder.encode(modality, small[::-1])[::-1]
        for rows, other in zip(together, reverse, strict=True):
            assert torch.allclose(other, rows, rtol=0, atol=1e-5)
        for left, right in zip(together, encoder.encode(modality, small), strict=True):
            assert torch.equal(left, right)  # the same call, the same bits


def test_features_are_read_and_not_written(
    compact: ModelProcessor, torch_float: ModelProcessor, encoder: Encoder, moving: Moving
) -> None:
    for processor in (compact, torch_float):
        (item,) = videos_of(processor, [moving(4)])
        before, feature = item.feature.copy(), item.feature
        (expected,) = encoder.encode(Modality.VIDEO, [item])
        assert np.array_equal(feature, before)
        item.feature = torch.from_numpy(feature)
        (rows,) = encoder.encode(Modality.VIDEO, [item])
        assert torch.equal(rows, expected)
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
        truth = own_rows(double, item).double()
        (rows,) = half.encode(modality, [compact])
        assert rows.dtype == torch.bfloat16
        ours += float((rows.double() - truth).abs().sum())
        theirs += float((own_rows(own, item).double() - truth).abs().sum())
    assert 0 < ours <= 1.01 * theirs


def test_a_checkpoint_in_bfloat16_is_opened_as_it_is_or_as_asked(
    registry: Registry, tmp_path: Path, compact: ModelProcessor, moving: Moving
) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    video = videos_of(compact, [moving(4)])
    (own,) = registry.load_encoder(folder).encode(Modality.VIDEO, video)
    (asked,) = registry.load_encoder(folder, dtype=torch.float32).encode(Modality.VIDEO, video)
    assert (own.dtype, asked.dtype) == (torch.bfloat16, torch.float32)
    assert torch.allclose(own.float(), asked, atol=0.05)


def test_opening_a_tower_draws_no_random_numbers_and_leaves_nothing_unfilled(
    registry: Registry, checkpoint: Path, model: Any
) -> None:
    before = torch.random.get_rng_state()
    tower: Any = registry.load_encoder(checkpoint)
    assert torch.equal(torch.random.get_rng_state(), before)
    expected, found = dict(model.model.visual.named_parameters()), dict(tower.tower.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_other_weights_have_another_version(
    registry: Registry, checkpoint: Path, tmp_path: Path, encoder: Encoder
) -> None:
    other = registry.load_encoder(make_checkpoint(tmp_path, seed=7))
    assert encoder.version.startswith("qwen2_5_vl:1:")
    assert other.version != encoder.version
    assert registry.load_encoder(checkpoint).version == encoder.version


def test_audio_is_refused_by_name(encoder: Encoder) -> None:
    with pytest.raises(EncoderError, match="does not encode audios") as caught:
        encoder.encode(Modality.AUDIO, [])
    assert caught.value.distribution == "mm-plugin-qwen25vl"
