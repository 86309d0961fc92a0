"""The largest media inputs: exactly those that trying every size finds, and as `process` then takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_plugin_deepseekvl2.testing
import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
import mm_plugin_transformers_auto.testing
from mm_plugin import Modality, RequestError, SampledVideo, Settings, Size, UsageError, discover
from mm_plugin.families.patch_grid.largest import largest_sides
from mm_plugin.transforms import smart_resize

MAKERS: dict[str, Any] = {
    "qwen2_vl": mm_plugin_qwen2vl.testing.make_checkpoint,
    "qwen2_5_vl": mm_plugin_qwen25vl.testing.make_checkpoint,
    "deepseek_vl2": mm_plugin_deepseekvl2.testing.make_checkpoint,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) / "checkpoint" for name in MAKERS}
    for name, folder in made.items():
        MAKERS[name](folder)
    return made


def tokens_of(height: int, width: int, factor: int, least: int, most: int) -> int:
    if max(height, width) > 200 * min(height, width):
        return 0
    sides = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
    return math.prod(sides) // factor**2


@given(st.integers(2, 5), st.integers(1, 60), st.integers(0, 60), st.integers(1, 1200), st.integers(1, 90))
@settings(max_examples=300, deadline=None)
def test_the_largest_sides_are_those_that_every_size_has(
    factor: int, tokens: int, more: int, pixels: int, above: int
) -> None:
    most = tokens + above  # fewer would leave no ordinary image
    least, largest = tokens * factor**2, (tokens + more) * factor**2
    every = [
        tokens_of(height, width, factor, least, largest)
        for height in range(1, pixels + 1)
        for width in range(height, pixels // height + 1)
    ]
    expected = max((count for count in every if count <= most), default=0)
    found = list(
        largest_sides(factor=factor, min_pixels=least, max_pixels=largest, most_pixels=pixels, most_tokens=most)
    )
    for height, width, count in found:
        assert height * width <= pixels
        assert tokens_of(height, width, factor, least, largest) == count <= most
    assert max((count for _, _, count in found), default=0) == expected


@pytest.mark.parametrize(
    ("least", "most", "pixels", "expected"),
    [
        (3136, 12_845_056, 89_478_485, 16_384),  # Qwen2-VL: 16,384 tokens of 28 x 28
        (3136, 1_003_520, 89_478_485, 1280),
        (3136, 12_845_056, 1_000_000, 1326),  # by hand: 26 x 51, whose shortest sides are 714 x 1400 = 999,600
    ],
)
def test_the_numbers_of_released_checkpoints(least: int, most: int, pixels: int, expected: int) -> None:
    found = largest_sides(factor=28, min_pixels=least, max_pixels=most, most_pixels=pixels, most_tokens=1 << 20)
    assert max(count for _, _, count in found) >= expected


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({"max_image_pixels": 6_000}, {}),
        ({"max_image_pixels": 6_000, "max_item_tokens": 9}, {}),
        ({"max_image_pixels": 900}, {}),
        ({"max_image_pixels": 6_000}, {"max_pixels": 4 * 28 * 28}),
        ({"max_image_pixels": 6_000}, {"resized_height": 84, "resized_width": 56}),
    ],
    ids=str,
)
def test_an_image_is_the_largest_of_all(
    folders: dict[str, Path], name: str, limits: dict[str, Any], options: dict[str, Any]
) -> None:
    with discover(Settings(**limits)) as registry:
        processor = registry.load_processor(folders[name])
        found: list[int] = []
        pixels = limits["max_image_pixels"]
        # Every size of both orientations, coarser where both sides are long.
        for height in range(1, pixels + 1, 1):
            step = max(1, min(height, pixels // height) // 24)
            for width in range(1, pixels // height + 1, step):
                if height > 40 and width > 40 and (height % 3 or width % 3):
                    continue
                try:
                    found.append(processor.count("image", (height, width), **options)[0])
                except RequestError:
                    continue
            if len(found) > 20_000:
                break
        if not found:
            with pytest.raises(UsageError, match="expected a size that the limits leave"):
                processor.largest("image", **options)
            return
        largest = processor.largest("image", **options)
        assert largest.num_embeddings >= max(found)
        output = processor.process("<|vision_start|><|image_pad|><|vision_end|>", [largest.media()], **options)
        assert output.mm_items[0].num_tokens == largest.num_embeddings


def test_an_image_of_tiles_is_the_largest_of_all(folders: dict[str, Path]) -> None:
    with discover() as registry:
        processor = registry.load_processor(folders["deepseek_vl2"])
        random = np.random.default_rng(7)
        sizes = np.exp(random.uniform(0, math.log(9_000), (3_000, 2))).astype(int) + 1
        for counts in ({Modality.IMAGE: 1}, {Modality.IMAGE: 3}):  # three get no tiles
            found = max(processor.count("image", (int(h), int(w)), counts=counts)[0] for h, w in sizes)
            largest = processor.largest("image", counts=counts)
            assert largest.num_embeddings == found
        media = processor.largest("image").media()
        assert processor.process("<image>", [media]).mm_items[0].num_tokens == processor.largest("image").num_embeddings
    with discover(Settings(max_image_pixels=500)) as registry:  # smaller than every resolution
        largest = registry.load_processor(folders["deepseek_vl2"]).largest("image")
        assert isinstance(largest.size, Size)
        assert largest.size.height * largest.size.width <= 500


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("rule", ["qwen", "transformers"])
def test_a_video_is_the_largest_of_all(folders: dict[str, Path], name: str, rule: str) -> None:
    limits = Settings(max_image_pixels=4_000, max_item_tokens=64)
    options: dict[str, Any] = {"max_frames": 12, "video_total_pixels": 20 * 28 * 28, "video_min_pixels": 28 * 28}
    with discover(limits) as registry:
        processor = registry.load_processor(folders[name], frame_size_rule=rule)
        best = 0
        for frames in range(2, 13, 2):
            times = np.arange(frames) / 2
            for height in range(1, 130):
                for width in range(height, min(4_000 // height, 200) + 1, 3):
                    size = SampledVideo(height, width, np.arange(frames), times, 2.0)
                    try:
                        best = max(best, processor.count("video", size, **options)[0])
                    except RequestError:
                        continue
        largest = processor.largest("video", **options)
        assert largest.num_embeddings >= best > 0
        prompt = "<|vision_start|><|video_pad|><|vision_end|>"
        output = processor.process(prompt, videos=[largest.media()], **options)
        assert output.mm_items[0].num_tokens == largest.num_embeddings


def test_the_fallback_finds_some_large_size(tmp_path: Path) -> None:
    folder = mm_plugin_transformers_auto.testing.make_checkpoint(tmp_path / "checkpoint", family="llava")
    with discover() as registry:
        processor = registry.load_processor(folder)
        largest = processor.largest("image")
        assert largest.num_embeddings == processor.count("image", (300, 500))[0]  # one number for all sizes
        request = processor.dummy_request({"image": 2})
        output = processor.process(**request.arguments())
        assert [item.num_tokens for item in output.mm_items] == [largest.num_embeddings] * 2


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("counts", [{"image": 1}, {"image": 3}, {Modality.IMAGE: 2}, {}], ids=str)
def test_a_dummy_request_has_the_largest_of_each(
    folders: dict[str, Path], name: str, counts: Mapping[Any, int]
) -> None:
    with discover(Settings(max_image_pixels=40_000)) as registry:
        processor = registry.load_processor(folders[name])
        request = processor.dummy_request(counts)
        output = processor.process(**request.arguments())
        count = sum(counts.values())
        assert len(output.mm_items) == count
        if count:
            largest = processor.largest("image", counts={Modality.IMAGE: count})
            assert {item.num_tokens for item in output.mm_items} == {largest.num_embeddings}
            # It leaves nothing behind where it is prepared by whoever encodes.
            entries = processor.cache_stats.entries
            processor.process(**request.arguments(), prepare="worker")
            assert processor.cache_stats.entries == entries


def test_images_and_videos_together(folders: dict[str, Path]) -> None:
    with discover(Settings(max_image_pixels=20_000, max_item_tokens=4_000)) as registry:
        processor = registry.load_processor(folders["qwen2_vl"])
        request = processor.dummy_request({"image": 2, "video": 1, "audio": 0}, max_frames=8)
        output = processor.process(**request.arguments(), max_frames=8)
        assert [item.modality for item in output.mm_items] == [Modality.IMAGE, Modality.IMAGE, Modality.VIDEO]


@pytest.mark.parametrize("counts", [{"image": -1}, {"image": 1.5}, ["image"], {"image": True}, None])
def test_counts_are_checked(folders: dict[str, Path], counts: Any) -> None:
    with discover() as registry, pytest.raises(UsageError, match="counts"):
        registry.load_processor(folders["qwen2_vl"]).dummy_request(counts)


def test_a_modality_that_the_model_does_not_take(folders: dict[str, Path]) -> None:
    with discover() as registry:
        processor = registry.load_processor(folders["deepseek_vl2"])
        with pytest.raises(RequestError):
            processor.largest("audio")
        assert isinstance(processor.largest("image").size, Size)
