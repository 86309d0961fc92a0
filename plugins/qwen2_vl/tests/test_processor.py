"""Pixels, grids and counts are those of transformers, bit for bit; options are refused where they may not be given."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin import MediaError, Modality, ModelProcessor, Registry, RequestError, Size, UsageError
from mm_plugin.errors import MMPluginError
from mm_plugin_qwen2vl.testing import PREPROCESSOR, make_checkpoint

PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>b"
IMAGE_PAD = "<|image_pad|>"
MODES = ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "HSV")
# (height, width): small, thin, on and off multiples of 28, at the ties of rounding, 200 to 1.
SIZES = [
    (1, 1), (1, 200), (200, 1), (13, 13), (14, 14), (15, 300), (26, 28), (27, 29), (28, 28), (41, 43), (42, 42), (42, 70),
    (56, 84), (69, 71), (97, 211), (110, 57), (140, 140), (161, 184), (224, 300), (333, 332), (337, 400), (30, 900), (500, 700),
]  # fmt: skip


@functools.cache
def reference() -> Any:
    """Transformers' Pillow backend with the settings of the checkpoint."""
    size = {"shortest_edge": PREPROCESSOR["min_pixels"], "longest_edge": PREPROCESSOR["max_pixels"]}
    return Qwen2VLImageProcessorPil(size=size)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def process_one(processor: ModelProcessor, image: Any, **options: Any) -> Any:
    (item,) = processor.process(PROMPT, [image], **options).mm_items
    return item


def assert_equals_reference(processor: ModelProcessor, image: Image.Image, **call: Any) -> None:
    options = {}
    if call:
        options = {"size": {"shortest_edge": call["min_pixels"], "longest_edge": call["max_pixels"]}}
    expected = reference()(images=image.copy(), return_tensors="np", **options)
    item = process_one(processor, image, **call)
    assert item.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
    assert item.feature.dtype == np.float32
    assert np.array_equal(item.feature, expected["pixel_values"])
    assert item.num_tokens == int(expected["image_grid_thw"].prod()) // 4


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixel_values_equal_transformers_pillow_backend(pillow: ModelProcessor, size: tuple[int, int]) -> None:
    assert_equals_reference(pillow, noise(*size))


@settings(max_examples=25, deadline=None)
@given(height=st.integers(1, 260), width=st.integers(1, 260), seed=st.integers(0, 1000))
def test_pixel_values_equal_transformers_at_any_size(
    pillow: ModelProcessor, height: int, width: int, seed: int
) -> None:
    image = noise(height, width, seed)
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError, match="ratio"):
            reference()(images=image)
        with pytest.raises(MediaError):
            pillow.process(PROMPT, [image])
    else:
        assert_equals_reference(pillow, image)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_transformers(
    pillow: ModelProcessor, mode: str, make_image: Callable[..., Image.Image]
) -> None:
    image = make_image(1, 61, 85)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    assert_equals_reference(pillow, image.convert(mode))


def test_an_image_equals_transformers_through_its_file(
    pillow: ModelProcessor, make_image: Callable[..., Image.Image]
) -> None:
    file = io.BytesIO()
    make_image(0, 211, 170).save(file, "JPEG")
    expected = reference()(images=Image.open(io.BytesIO(file.getvalue())), return_tensors="np")["pixel_values"]
    assert np.array_equal(process_one(pillow, file.getvalue()).feature, expected)


@pytest.mark.parametrize(
    ("least", "most"), [(3136, 12845056), (784, 784), (3136, 50176), (200704, 1003520), (1, 1 << 27), (5000, 5001)]
)
@pytest.mark.parametrize("size", [(61, 45), (300, 500), (28, 3000), (3, 500)], ids=str)
def test_pixel_budgets_of_a_call_are_transformers_own(
    pillow: ModelProcessor, least: int, most: int, size: tuple[int, int]
) -> None:
    assert_equals_reference(pillow, noise(*size), min_pixels=least, max_pixels=most)


def test_a_budget_of_one_call_does_not_reach_the_next(pillow: ModelProcessor) -> None:
    image = noise(300, 300)
    small = process_one(pillow, image, max_pixels=28 * 28 * 9)
    assert small.image_grid_thw.tolist() == [[1, 6, 6]]
    assert process_one(pillow, image).image_grid_thw.tolist() == [[1, 22, 22]]


def test_a_budget_of_loading_wins_over_the_checkpoint_and_loses_to_the_call(
    registry: Registry, checkpoint: Path
) -> None:
    processor = registry.load_processor(checkpoint, max_pixels=28 * 28 * 9)
    image = noise(300, 300)
    assert process_one(processor, image).num_tokens == 9
    assert process_one(processor, image, max_pixels=28 * 28 * 5).num_tokens == 4


# ------------------------------------------------------------------ values that were made elsewhere


def golden_cases() -> list[str]:
    return [
        "synth_rgb_84x56|default", "synth_rgb_61x45|default", "gray_L_90x70|default", "rgba_gradient_alpha_100x70|default",
        "palette_P_120x90|default", "palette_P_transparency_90x64|default", "bilevel_1_80x70|default", "tall_28x300|default",
    ]  # fmt: skip


def test_every_golden_case_is_tested(golden: Callable[[str], Any]) -> None:
    assert [case["id"] for case in golden("pixels.json")["cases"]] == golden_cases()


@pytest.mark.parametrize("name", golden_cases())
def test_pixels_have_the_digests_of_both_backends(
    golden: Callable[[str], Any],
    name: str,
    pillow: ModelProcessor,
    torch_float: ModelProcessor,
    compact: ModelProcessor,
) -> None:
    data = golden("pixels.json")
    (case,) = [case for case in data["cases"] if case["id"] == name]
    file = base64.b64decode(data["images"][case["image"]])
    for processor, key in (
        (pillow, "pillow_sha256"),
        (torch_float, "torchvision_sha256"),
        (compact, "uint8_patches_sha256"),
    ):
        for image in (file, Image.open(io.BytesIO(file))):
            item = process_one(processor, image, **case["options"])
            assert item.image_grid_thw.tolist() == [case["grid_thw"]]
            assert hashlib.sha256(np.ascontiguousarray(item.feature).tobytes()).hexdigest() == case[key]


@pytest.mark.parametrize("size", [(61, 45), (42, 200), (300, 213), (28, 28), (29, 900)], ids=str)
def test_the_torch_rule_is_plain_torch_arithmetic(
    torch_float: ModelProcessor, compact: ModelProcessor, size: tuple[int, int], make_image: Callable[..., Image.Image]
) -> None:
    image = make_image(0, *size)
    item = process_one(torch_float, image)
    _, rows, columns = item.image_grid_thw[0].tolist()
    planar = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
    resized = torch.nn.functional.interpolate(planar, (rows * 14, columns * 14), mode="bicubic", antialias=True)[0]
    mean = torch.tensor(PREPROCESSOR["image_mean"]) * 255
    std = torch.tensor(PREPROCESSOR["image_std"]) * 255
    normal = (resized.float() - mean[:, None, None]) / std[:, None, None]
    expected, levels = [], []
    for block_row in range(0, rows, 2):  # patch by patch, the four of a merged token together
        for block_column in range(0, columns, 2):
            for row in (block_row, block_row + 1):
                for column in (block_column, block_column + 1):
                    place = (slice(None), slice(row * 14, row * 14 + 14), slice(column * 14, column * 14 + 14))
                    patch = normal[place].reshape(3, 196)
                    expected.append(torch.stack([patch, patch], dim=1).reshape(-1))
                    levels.append(resized[place].reshape(3, 196))
    assert torch.equal(torch.from_numpy(item.feature), torch.stack(expected))
    assert torch.equal(torch.from_numpy(process_one(compact, image).feature), torch.stack(levels))


def test_a_compact_feature_is_an_eighth_of_the_float_one(compact: ModelProcessor, pillow: ModelProcessor) -> None:
    image = noise(56, 56)
    small, large = process_one(compact, image).feature, process_one(pillow, image).feature
    assert (small.shape, small.dtype) == ((16, 3, 196), np.uint8)
    assert (large.shape, large.dtype) == ((16, 1176), np.float32)
    assert large.nbytes == 8 * small.nbytes


# ------------------------------------------------------------------ counts


@pytest.mark.case("2.8")
@settings(max_examples=300, deadline=None)
@given(
    height=st.integers(1, 2000),
    width=st.integers(1, 2000),
    budget=st.sampled_from([(3136, 12845056), (3136, 1003520), (200704, 1003520), (3136, 50176)]),
)
def test_counts_are_transformers_own_at_every_size(
    compact: ModelProcessor, height: int, width: int, budget: tuple[int, int]
) -> None:
    least, most = budget
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(MediaError):
            compact.count("image", (height, width), min_pixels=least, max_pixels=most)
        return
    patches = reference().get_number_of_image_patches(height, width, {"min_pixels": least, "max_pixels": most})
    assert compact.count("image", (height, width), min_pixels=least, max_pixels=most) == (patches // 4, patches // 4)


@pytest.mark.case("2.8")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_count_is_what_processing_yields(compact: ModelProcessor, size: tuple[int, int]) -> None:
    output = compact.process(PROMPT, [noise(*size)])
    (item,) = output.mm_items
    rows, tokens = compact.count(Modality.IMAGE, size)
    pad = compact.special_tokens.im_token_id
    assert rows == item.num_tokens == int(np.count_nonzero(output.input_ids == pad)) == len(item.feature) // 4
    assert len(output.input_ids) == 4 + tokens


@pytest.mark.case("2.8")
@pytest.mark.parametrize("height", [1, 13, 28, 161, 640, 1414, 2000])
def test_a_count_is_what_processing_yields_up_to_two_thousand_pixels(compact: ModelProcessor, height: int) -> None:
    for width in (1, 28, 57, 333, 999, 2000):
        if max(height, width) / min(height, width) <= 200:
            item = process_one(compact, np.zeros((height, width, 3), dtype=np.uint8), max_pixels=28 * 28 * 30)
            counted = compact.count("image", (height, width), max_pixels=28 * 28 * 30)
            assert counted == (item.num_tokens, item.num_tokens) == (len(item.feature) // 4,) * 2


@pytest.mark.case("1.9")
@pytest.mark.case("1.10")
@pytest.mark.parametrize(
    ("size", "options"),
    [((15420, 690), {}), ((31, 639), {"max_pixels": 20 * 28 * 28}), ((26, 28), {}), ((332, 27), {}), ((1000, 5), {})],
    ids=str,
)
def test_thin_and_small_images_get_at_least_one_token_a_side(
    compact: ModelProcessor, size: tuple[int, int], options: dict[str, int]
) -> None:
    assert compact.count("image", size, **options)[0] >= 1
    grid = compact.model.layout(Modality.IMAGE, Size(*size), compact.options, None)["image_grid_thw"]
    assert grid.min() >= 1


@pytest.mark.case("1.10")
def test_a_ratio_over_200_is_the_clients_error(compact: ModelProcessor) -> None:
    assert compact.count("image", (1000, 5))[0] > 0
    with pytest.raises(MediaError, match=r"images\[1\].*218\.6") as caught:
        compact.process(PROMPT * 2, [noise(30, 30), noise(1093, 5)])
    assert (caught.value.path, caught.value.reason) == ("images[1]", "size")


# ------------------------------------------------------------------ the whole output


def test_ids_offsets_and_token_modalities_agree(compact: ModelProcessor) -> None:
    output = compact.process(PROMPT * 3, [noise(56, 56), noise(84, 56), noise(56, 140)])
    pad, tokens = compact.special_tokens.im_token_id, [4, 6, 10]
    assert [item.num_tokens for item in output.mm_items] == tokens
    # Each part is a, <start>, rows, <end>, b.
    starts = [2, 2 + 4 + 4, 2 + 4 + 4 + 6 + 4]
    assert [item.offsets for item in output.mm_items] == [
        [(start, start + count - 1)] for start, count in zip(starts, tokens, strict=True)
    ]
    assert output.token_modalities.tolist() == (output.input_ids == pad).astype(int).tolist()
    inside = output.token_modalities == 1
    assert (output.padded_input_ids[inside] >= 1_000_000).all()
    assert output.padded_input_ids[~inside].tolist() == output.input_ids[~inside].tolist()
    assert set(output.mm_items[0].model_specific_data) == {"image_grid_thw"}


def test_identity_follows_what_the_model_sees(compact: ModelProcessor, pillow: ModelProcessor) -> None:
    image = noise(56, 56)
    same = process_one(compact, image).identity
    file = io.BytesIO()
    image.save(file, "PNG")
    assert process_one(compact, file.getvalue()).identity == same
    assert process_one(compact, np.array(image)).identity == same
    assert process_one(compact, image, max_pixels=56 * 56).identity == same  # the same grid and pixels
    others = {
        process_one(compact, noise(56, 56, 1)).identity,
        process_one(compact, image, max_pixels=3135, min_pixels=1).identity,
        process_one(compact, image, salt="tenant").identity,
        process_one(pillow, image).identity,
    }
    assert len(others) == 4
    assert same not in others


@pytest.mark.case("7.4")
def test_what_the_plugin_does_not_take_is_refused_by_name(compact: ModelProcessor) -> None:
    with pytest.raises(RequestError, match="takes images, videos, not audios"):
        compact.process("x", audios=[b"x"])


# ------------------------------------------------------------------ options


@pytest.mark.case("9.5")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_pixel": 5}, UsageError),
        ({"resize": "pillow"}, UsageError),
        ({"feature_format": "float32"}, UsageError),
        ({"patch_size": 16}, UsageError),
        ({"image_mean": (0.0, 0.0, 0.0)}, UsageError),
        ({"do_resize": False}, UsageError),
        ({"min_pixels": 5000, "max_pixels": 4000}, RequestError),
        ({"min_pixels": 1 << 26, "max_pixels": 1 << 40}, RequestError),
        ({"max_pixels": 100}, RequestError),
        ({"max_pixels": 0}, RequestError),
        ({"max_pixels": -1}, RequestError),
        ({"max_pixels": "1000"}, RequestError),
        ({"max_pixels": 1e9}, RequestError),
        ({"max_pixels": True}, RequestError),
        ({"max_pixels": None}, RequestError),
        ({"background": (0, 0)}, RequestError),
    ],
    ids=str,
)
def test_options_that_a_call_may_not_give(
    compact: ModelProcessor, options: dict[str, Any], error: type[MMPluginError]
) -> None:
    for call in (
        lambda: compact.process(PROMPT, [noise(56, 56)], **options),
        lambda: compact.count("image", (56, 56), **options),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert any(name in caught.value.message for name in options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixel": 5},
        {"patch_size": 16},
        {"merge_size": 2},
        {"rescale_factor": 1 / 255},
        {"do_normalize": True},
        {"resize": "bilinear"},
        {"resize": None},
        {"feature_format": "float16"},
        {"min_pixels": 5000, "max_pixels": 4000},
        {"max_pixels": 1 << 40},
        {"max_pixels": "1000"},
    ],
    ids=str,
)
def test_options_that_loading_may_not_give(registry: Registry, checkpoint: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        registry.load_processor(checkpoint, **options)
    assert any(name in caught.value.message for name in options)


def test_an_option_of_another_moment_is_distinguished_from_an_unknown_one(
    registry: Registry, checkpoint: Path, compact: ModelProcessor
) -> None:
    with pytest.raises(UsageError, match=r"'resize'.*fixed when the model is opened"):
        compact.process(PROMPT, [noise(56, 56)], resize="pillow")
    with pytest.raises(UsageError, match=r"'patch_size'.*the checkpoint's alone"):
        registry.load_processor(checkpoint, patch_size=14)
    with pytest.raises(UsageError, match=r"'max_pixel'.*is unknown.*max_pixels"):
        compact.process(PROMPT, [noise(56, 56)], max_pixel=5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_convert_rgb": False},
        {"resample": 2},
        {"patch_size": 0},
        {"image_mean": [0.5, 0.5]},
        {"image_std": "0.5"},
        {"min_pixels": 4000, "max_pixels": 3000},
        {"rescale_factor": 0},
    ],
    ids=str,
)
def test_a_checkpoint_whose_settings_are_not_served_is_refused(
    registry: Registry, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, preprocessor=wrong)
    with pytest.raises(UsageError) as caught:
        registry.load_processor(folder)
    assert next(iter(wrong)) in caught.value.message


def test_numbers_of_the_checkpoint_are_used(registry: Registry, tmp_path: Path) -> None:
    mean, std, rescale = [0.5, 0.25, 0.125], [0.5, 1.0, 2.0], 1 / 127.5
    settings_ = {"image_mean": mean, "image_std": std, "rescale_factor": rescale, "max_pixels": 50176}
    folder = make_checkpoint(tmp_path, preprocessor=settings_)
    processor = registry.load_processor(folder, resize="pillow", feature_format="float32")
    expected = Qwen2VLImageProcessorPil(
        image_mean=mean, image_std=std, rescale_factor=rescale, size={"shortest_edge": 3136, "longest_edge": 50176}
    )(images=noise(300, 400), return_tensors="np")
    item = process_one(processor, noise(300, 400))
    assert item.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
    assert np.array_equal(item.feature, expected["pixel_values"])


def test_the_background_is_the_callers(compact: ModelProcessor) -> None:
    clear = Image.new("RGBA", (56, 56), (9, 9, 9, 0))
    levels = {
        tuple(np.unique(process_one(compact, clear, **options).feature).tolist())
        for options in ({}, {"background": (0, 0, 0)}, {"background": (7, 7, 7)})
    }
    assert levels == {(255,), (0,), (7,)}
