"""Tiles and tensors are those of the model's own processor, bit for bit; odd images work; options are what they say."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mm_plugin import MediaError, ModelProcessor, Registry, RequestError, UsageError
from mm_plugin_deepseekvl2.processor import DeepseekVL2Options
from mm_plugin_deepseekvl2.testing import make_checkpoint, tiny_settings

MODES = ("L", "LA", "P", "PA", "RGBA", "CMYK", "1", "YCbCr", "HSV")


def cases(golden: Callable[[str], Any]) -> list[dict[str, Any]]:
    found = [case for case in golden("processor.json")["cases"] if case["images"] and "error" not in case]
    assert len(found) == 14
    return found


def items_of(processor: ModelProcessor, images: list[Any]) -> list[Any]:
    return processor.process("<image>" * len(images), images).mm_items


def whole(feature: np.ndarray) -> np.ndarray:
    """Compact tiles, the only one of an image beside its thumbnail too."""
    return feature.repeat(2, axis=0) if len(feature) == 1 else feature


def test_tensors_equal_the_reference_bit_for_bit(exact: ModelProcessor, golden: Any, image: Any, sha256: Any) -> None:
    arrays = golden("processor.npz")
    for case in cases(golden):
        items = items_of(exact, [image(name) for name in case["images"]])
        found = np.concatenate([item.feature for item in items])
        assert found.dtype == np.float32
        assert list(found.shape) == case["images_shape"]
        assert [item.images_spatial_crop[0].tolist() for item in items] == case["images_spatial_crop"]
        assert [item.num_tokens for item in items] == case["num_image_tokens"]
        assert [sha256(tile) for tile in found] == case["tile_sha256"]
        assert sha256(found) == case["images_sha256"], case["id"]
        sampled = next((arrays[name] for name in arrays if name.startswith(case["id"])), None)
        if sampled is not None:
            assert np.array_equal(found[:, :, ::48, ::48], sampled)


def test_compact_tiles_are_the_reference_before_normalization(
    processor: ModelProcessor, golden: Any, image: Any, sha256: Any
) -> None:
    for case in cases(golden):
        items = items_of(processor, [image(name) for name in case["images"]])
        tiles = np.concatenate([whole(item.feature) for item in items])
        assert [sha256(tile) for tile in tiles] == case["tile_u8_hwc_sha256"], case["id"]
        for item in items:
            columns, rows = item.images_spatial_crop[0].tolist()
            assert len(item.feature) == (1 if columns * rows == 1 else 1 + columns * rows)


def test_levels_are_divided_and_normalized_as_torch_does(exact: ModelProcessor) -> None:
    levels = torch.arange(256, dtype=torch.uint8).to(torch.float32).div(255)
    expected = levels.sub(torch.tensor(0.5)).div(torch.tensor(0.5)).numpy()
    for channel in exact.options.table:
        assert np.array_equal(channel, expected)


def by_hand(image: Image.Image, columns: int, rows: int, color: tuple[int, int, int] = (127, 127, 127)) -> np.ndarray:
    """The thumbnail and the tiles, with Pillow alone."""
    view = ImageOps.pad(image, (columns * 384, rows * 384), color=color)
    crops = [
        view.crop((384 * left, 384 * top, 384 * left + 384, 384 * top + 384))
        for top in range(rows)
        for left in range(columns)
    ]
    return np.stack([np.asarray(part) for part in (ImageOps.pad(image, (384, 384), color=color), *crops)])


@settings(max_examples=25)
@given(height=st.integers(1, 900), width=st.integers(1, 900), seed=st.integers(0, 99))
def test_any_image_equals_pillow(processor: ModelProcessor, noisy: Any, height: int, width: int, seed: int) -> None:
    image = noisy(height, width, seed)
    (item,) = items_of(processor, [image])
    columns, rows = item.images_spatial_crop[0].tolist()
    assert np.array_equal(whole(item.feature), by_hand(image, columns, rows))


@pytest.mark.parametrize("size", [(500, 700), (384, 384), (100, 90), (1500, 200), (2000, 3)], ids=str)
def test_the_torch_rule_is_within_two_levels(
    registry: Registry, checkpoint: Path, processor: ModelProcessor, noisy: Any, size: tuple[int, int]
) -> None:
    other = registry.load_processor(checkpoint, resize="torch")
    (left,), (right,) = items_of(processor, [noisy(*size)]), items_of(other, [noisy(*size)])
    assert left.images_spatial_crop.tolist() == right.images_spatial_crop.tolist()
    apart = np.abs(left.feature.astype(int) - right.feature).max()
    assert apart <= 2
    assert (apart > 0) == (size != (384, 384))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_works_where_the_reference_raises(processor: ModelProcessor, image: Any, mode: str) -> None:
    image = image("images/ds_chelsea_451x120.png").convert(mode)
    (item,) = items_of(processor, [image])
    assert item.images_spatial_crop.tolist() == [[2, 1]]
    assert np.array_equal(item.feature, by_hand(image.convert("RGB"), 2, 1))


def test_gray_of_16_bits_works(processor: ModelProcessor, image: Any) -> None:
    gray = image("images/ds_gray_L_150x400.png")
    (item,) = items_of(processor, [Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)])
    (same,) = items_of(processor, [gray])
    assert np.array_equal(item.feature, same.feature)


def test_the_recorded_gray_image_equals_its_rgb_form(processor: ModelProcessor, image: Any) -> None:
    image = image("images/ds_gray_L_150x400.png")
    assert image.mode == "L"
    (item,) = items_of(processor, [image])
    columns, rows = item.images_spatial_crop[0].tolist()
    assert np.array_equal(item.feature, by_hand(image.convert("RGB"), columns, rows))


@pytest.mark.case("3.7")
def test_transparent_images_are_composed_over_the_background(processor: ModelProcessor, image: Any) -> None:
    image = image("images/ds_coffee_300x300.png").convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    features = []
    for background in ((255, 255, 255), (10, 20, 30)):
        (item,) = processor.process("<image>", [image], background=background).mm_items
        flat = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image).convert("RGB")
        assert np.array_equal(whole(item.feature), by_hand(flat, 1, 1))
        features.append(item)
    assert features[0].identity != features[1].identity


def test_padding_has_the_mean_color_and_normalization_can_be_off(registry: Registry, tmp_path: Path) -> None:
    given = {"image_mean": [0.1, 0.5, 0.9], "image_std": [0.2, 0.5, 1.0], "normalize": True}
    folder = make_checkpoint(tmp_path, settings=tiny_settings() | given)
    (item,) = items_of(registry.load_processor(folder), [Image.new("RGB", (384, 10))])
    assert item.feature[0, 0, 0].tolist() == [25, 127, 229]
    (item,) = items_of(registry.load_processor(folder, feature_format="float32"), [Image.new("RGB", (384, 10))])
    expected = (np.float32([25, 127, 229]) / np.float32(255) - np.float32([0.1, 0.5, 0.9])) / np.float32([0.2, 0.5, 1])
    assert np.array_equal(item.feature[0, :, 0, 0], expected)
    folder = make_checkpoint(tmp_path, settings=tiny_settings() | given | {"normalize": False})
    (item,) = items_of(registry.load_processor(folder, feature_format="float32"), [Image.new("RGB", (384, 10))])
    assert np.array_equal(item.feature[0, :, 0, 0], np.float32([25, 127, 229]) / np.float32(255))


def test_a_feature_does_not_share_memory_with_the_callers_array(processor: ModelProcessor) -> None:
    pixels = np.full((384, 384, 3), 7, dtype=np.uint8)
    (item,) = items_of(processor, [pixels])
    pixels[:] = 9
    assert (item.feature == 7).all()


@pytest.mark.parametrize("name", ["resize", "feature_format", "patch_size", "candidate_resolutions", "max_pixels"])
def test_options_that_a_call_may_not_give(processor: ModelProcessor, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        processor.process("<image>", [Image.new("RGB", (9, 9))], **{name: 1})


@pytest.mark.parametrize(
    "options", [{"resize": "bilinear"}, {"feature_format": "bfloat16"}, {"patch_size": 14}, {"image_mean": (0, 0, 0)}]
)
def test_options_that_loading_may_not_give(registry: Registry, checkpoint: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        registry.load_processor(checkpoint, **options)


def test_a_background_that_is_not_a_color_is_the_requests_fault(processor: ModelProcessor) -> None:
    with pytest.raises(RequestError):
        processor.process("<image>", [Image.new("RGB", (9, 9))], background=(1, 2))


@pytest.mark.parametrize("broken", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + bytes(60), None, 7, "x.png"])
def test_a_broken_image_is_named(processor: ModelProcessor, image: Any, broken: Any) -> None:
    good = io.BytesIO()
    image("images/ds_coffee_300x300.png").save(good, "PNG")
    with pytest.raises(MediaError, match=r"images\[1\]"):
        processor.process("<image><image><image>", [good.getvalue(), broken, good.getvalue()])


def test_every_option_is_documented() -> None:
    text = DeepseekVL2Options.__doc__ or ""
    own = set(DeepseekVL2Options.__struct_fields__) - {"background"}
    assert {name for name in own if f"{name}: " not in text} == set()
