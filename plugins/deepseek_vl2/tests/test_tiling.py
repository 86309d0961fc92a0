"""Which resolution an image gets, and how many tokens: the model's own code for every recorded size, and by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_plugin import LimitError, MediaError, Modality, ModelProcessor, Registry, Settings, Size, discover
from mm_plugin_deepseekvl2.testing import make_checkpoint, tiny_config, tiny_settings

SOME = st.one_of(st.integers(1, 60), st.integers(1, 2000), st.integers(370, 400), st.integers(1140, 1160))


def crop(processor: ModelProcessor, height: int, width: int, images: int) -> list[int]:
    context = processor.model.context({Modality.IMAGE: images})
    fields = processor.model.layout(Modality.IMAGE, Size(height, width), processor.options, context)
    found: list[int] = fields["images_spatial_crop"][0].tolist()
    return found


def test_the_candidates_of_the_maker_are_the_released_ones(golden: Callable[[str], Any]) -> None:
    assert tiny_settings()["candidate_resolutions"] == golden("tiling.json")["candidate_resolutions"]


@pytest.mark.case("8.1")
@pytest.mark.case("8.2")
def test_every_recorded_size(processor: ModelProcessor, golden: Callable[[str], Any]) -> None:
    cases = golden("tiling.json")["cases"]
    assert len(cases) == 109
    for case in cases:
        height, width = case["height"], case["width"]
        for images, expected in ((1, case["cropping_on"]), (2, case["cropping_on"]), (3, case["cropping_off"])):
            where = f"{case['id']}, {images} images"
            assert crop(processor, height, width, images) == expected["images_spatial_crop"], where
            rows = expected["num_image_tokens"]
            found = processor.count("image", (height, width), counts={Modality.IMAGE: images})
            assert found == (rows, rows), where
        columns, rows = case["tiles_w_h"]
        assert [columns * 384, rows * 384] == case["best_resolution"]


@pytest.mark.case("8.1")
@pytest.mark.case("3.9")
def test_six_images_get_no_tiles_and_one_image_of_the_same_file_does(processor: ModelProcessor, noisy: Any) -> None:
    image = noisy(500, 700)
    counts = []
    for images in (1, 2, 3, 6):
        output = processor.process("<image>" * images, [image] * images)
        (tokens,) = {item.num_tokens for item in output.mm_items}
        assert tokens == processor.count("image", (500, 700), counts={Modality.IMAGE: images})[0]
        assert len(output.input_ids) == 1 + images * tokens
        counts.append(tokens)
    # 700 x 500 is 5:4 and more than one tile: 2 x 2 tiles of 14 x 14.
    assert counts == [210 + 1 + 28 * 29] * 2 + [210 + 1 + 210] * 2
    keys = [
        processor.prepare_item("image", image, counts={Modality.IMAGE: images}).source_key for images in (1, 2, 3, 6)
    ]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.case("2.8")
@settings(max_examples=150)
@given(height=SOME, width=SOME, images=st.integers(1, 3))
def test_the_count_is_the_rule_of_the_grid(processor: ModelProcessor, height: int, width: int, images: int) -> None:
    columns, rows = crop(processor, height, width, images)
    assert (columns * rows <= 9) if images <= 2 else (columns, rows) == (1, 1)
    tokens = 210 + 1 + 14 * rows * (14 * columns + 1)
    assert processor.count("image", (height, width), counts={Modality.IMAGE: images}) == (tokens, tokens)


@pytest.mark.case("2.8")
@settings(max_examples=12)
@given(height=st.integers(1, 700), width=st.integers(1, 700), images=st.integers(1, 3))
def test_a_count_is_what_processing_yields(processor: ModelProcessor, height: int, width: int, images: int) -> None:
    image = Image.new("RGB", (width, height), (9, 8, 7))
    output = processor.process("<image>" * images, [image] * images)
    expected = processor.count("image", (height, width), counts={Modality.IMAGE: images})
    for item in output.mm_items:
        assert (item.num_tokens, item.num_tokens) == expected


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1), (2, 3000)], ids=str)
@pytest.mark.parametrize("images", [1, 3])
def test_the_strangest_sizes_end_in_tokens(processor: ModelProcessor, size: tuple[int, int], images: int) -> None:
    image = Image.new("RGB", size[::-1], (255, 0, 0))
    output = processor.process("<image>" * images, [image] * images)
    columns, rows = output.mm_items[0].images_spatial_crop[0].tolist()
    assert output.mm_items[0].num_tokens == 211 + 14 * rows * (14 * columns + 1)
    assert output.mm_items[0].feature.shape[1:] == (384, 384, 3)


def test_limits_are_the_cores(checkpoint: Path) -> None:
    with discover(Settings(max_item_tokens=421)) as registry:
        processor = registry.load_processor(checkpoint)
        assert processor.count("image", (384, 384)) == (421, 421)
        with pytest.raises(LimitError, match="at most 421"):
            processor.count("image", (385, 385))
        assert processor.count("image", (385, 385), counts={Modality.IMAGE: 3}) == (421, 421)
    with pytest.raises(MediaError, match="expected at least 1 x 1 pixels"), discover() as registry:
        registry.load_processor(checkpoint).count("image", (0, 10))


@pytest.mark.parametrize(
    ("image_size", "patch", "ratio", "side"),
    [(48, 14, 2, 2), (64, 16, 2, 2), (64, 16, 1, 4), (90, 9, 3, 4), (384, 14, 2, 14)],
)
def test_tokens_follow_the_checkpoints_own_numbers(
    registry: Registry, tmp_path: Path, image_size: int, patch: int, ratio: int, side: int
) -> None:
    config = tiny_config(image_size=image_size)
    config["vision_config"]["patch_size"] = patch
    config["projector_config"]["downsample_ratio"] = ratio
    settings = tiny_settings(image_size=image_size) | {"patch_size": patch, "downsample_ratio": ratio}
    folder = make_checkpoint(tmp_path, config=config, settings=settings)
    processor, encoder = registry.load_processor(folder), registry.load_encoder(folder)
    output = processor.process("<image>", [Image.new("RGB", (3 * image_size, 2 * image_size), (1, 2, 3))])
    (item,) = output.mm_items
    assert item.images_spatial_crop.tolist() == [[3, 2]]
    assert item.num_tokens == side * (side + 1) + 1 + 2 * side * (3 * side + 1)
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    assert rows.shape == (item.num_tokens, 24)
