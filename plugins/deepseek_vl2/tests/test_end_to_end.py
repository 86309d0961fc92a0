"""A whole request through chunks, caches, limits and companions, with rows that are compared with plain torch."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import (
    Encoder,
    ForwardBatch,
    LimitError,
    Modality,
    ModelProcessor,
    MultimodalInputs,
    PlaceholderError,
    Registry,
    RequestMedia,
    embed_mm_inputs,
)
from mm_plugin.cli.drawing import draw
from mm_plugin.cli.main import main
from mm_plugin.errors import SpanError
from mm_plugin.scheduler import pad_input_ids
from mm_plugin.testing import CallCounter, embed_in_chunks
from mm_plugin_deepseekvl2.demo import DeepseekVL2Demo
from mm_plugin_deepseekvl2.testing import make_checkpoint, tiny_config, tiny_settings

SIDE = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiles of 48 pixels, so that every chunk size can be tried."""
    return make_checkpoint(
        tmp_path_factory.mktemp("small"), config=tiny_config(image_size=SIDE), settings=tiny_settings(image_size=SIDE)
    )


@pytest.fixture(scope="module")
def processor(registry: Registry, folder: Path) -> ModelProcessor:
    return registry.load_processor(folder)


@pytest.fixture(scope="module")
def small_encoder(registry: Registry, folder: Path) -> Encoder:
    return registry.load_encoder(folder)


@pytest.fixture(scope="module")
def shown(folder: Path) -> tuple[DeepseekVL2Demo, Any]:
    demo = DeepseekVL2Demo()
    return demo, demo.open_model(folder)


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_requests_share_one_pass_of_the_tower(
    processor: ModelProcessor, small_encoder: Encoder, shown: Any, noisy: Any
) -> None:
    demo, model = shown
    outputs = [
        processor.process("<image>", [noisy(96, 100)]),
        processor.process("x"),
        processor.process("<image>" * 3, [noisy(96, 100, seed) for seed in range(3)]),
    ]
    counter = CallCounter(small_encoder)
    ids = torch.from_numpy(np.concatenate([output.padded_input_ids for output in outputs]))
    lengths = [len(output.input_ids) for output in outputs]
    batch = ForwardBatch(
        [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in outputs], [0] * 3, lengths
    )
    step = embed_mm_inputs(ids, batch, demo.input_embedding(model), counter.as_mapping())
    assert step.failed == ()
    assert counter.calls == [4]
    parts = step.input_embeds.split(lengths)
    for output, part in zip(outputs, parts, strict=True):
        alone = embed_in_chunks(output, demo.input_embedding(model), small_encoder, size=len(output.input_ids))
        assert torch.allclose(part, alone, rtol=0, atol=1e-5)


@pytest.mark.case("3.9")
@pytest.mark.case("8.1")
def test_an_image_in_company_is_another_item_and_a_small_one_is_the_same(processor: ModelProcessor, noisy: Any) -> None:
    large, small = noisy(96, 100), noisy(20, 20)
    alone = processor.process("<image><image>", [large, small]).mm_items
    company = processor.process("<image>" * 4, [large, small, small, large]).mm_items
    assert alone[0].identity != company[0].identity
    assert alone[0].num_tokens > company[0].num_tokens == company[3].num_tokens
    # An image of one tile is the same whether cropping is on or off.
    assert alone[1].identity == company[1].identity == company[2].identity


@pytest.mark.case("2.4")
@pytest.mark.case("8.1")
def test_survivors_of_a_limit_grow_when_few_enough_are_left(processor: ModelProcessor, noisy: Any) -> None:
    images = [noisy(96, 100, seed) for seed in range(4)]
    # Each of four takes 6 + 1 + 6 tokens; each of two 6 + 1 + 4 * 5 or so.
    four, two = (processor.count("image", (96, 100), counts={Modality.IMAGE: count})[0] for count in (4, 2))
    assert four == 13 < two
    whole = len(processor.process("<image>" * 4, images).input_ids)
    assert whole == 1 + 4 * four
    kept = processor.process("<image>" * 4, images, max_prompt_tokens=whole - 1, on_overflow="drop_oldest")
    assert len(kept.mm_items) == 3
    kept = processor.process("<image>" * 4, images, max_prompt_tokens=3 * four, on_overflow="drop_newest")
    # Two would take more than three did, so one is left.
    assert kept.dropped == ("images[3]", "images[2]", "images[1]")
    assert kept.mm_items[0].num_tokens == two
    assert len(kept.input_ids) == 1 + two
    with pytest.raises(LimitError):
        processor.process("<image>" * 4, images, max_prompt_tokens=whole - 1)


@pytest.mark.case("2.5")
@pytest.mark.parametrize(("slots", "images"), [(0, 1), (1, 0), (1, 3), (3, 1)])
def test_a_wrong_number_of_images_is_reported_with_both_counts(
    processor: ModelProcessor, noisy: Any, slots: int, images: int
) -> None:
    with pytest.raises(PlaceholderError) as caught:
        processor.process("x" + "<image>" * slots, [noisy(9, 9)] * images)
    assert (caught.value.expected, caught.value.found) == (slots, images)


def test_expanded_ids_give_the_same_request(processor: ModelProcessor, noisy: Any) -> None:
    images = [noisy(96, 100), noisy(48, 48)]
    output = processor.process("a<image><image>", images)
    again = processor.process(output.input_ids, images, expanded=True)
    assert np.array_equal(again.padded_input_ids, output.padded_input_ids)
    assert [item.offsets for item in again.mm_items] == [item.offsets for item in output.mm_items]
    with pytest.raises(PlaceholderError):
        processor.process(output.input_ids[:-1], images, expanded=True)


def test_ids_without_offsets_are_padded_by_runs_where_images_are_not_adjacent(
    processor: ModelProcessor, noisy: Any
) -> None:
    images = [noisy(96, 100), noisy(48, 48)]
    for prompt, distinguished in (("a<image> <image>", True), ("a<image><image>", False)):
        output = processor.process(prompt, images)
        for item in output.mm_items:
            item.offsets = []
        arguments = (processor.spec, processor.special_tokens, output.input_ids, output.mm_items)
        if distinguished:
            assert np.array_equal(pad_input_ids(*arguments), output.padded_input_ids)
        else:
            with pytest.raises(SpanError, match=r"expected 2 runs .* got 1"):
                pad_input_ids(*arguments)


def test_async_equals_sync(processor: ModelProcessor, noisy: Any) -> None:
    images = [noisy(96, 100), noisy(48, 48)]
    left = processor.process("<image> <image>", images)
    right = asyncio.run(processor.process_async("<image> <image>", images))
    assert np.array_equal(left.padded_input_ids, right.padded_input_ids)


def test_the_command_shows_it_and_everything_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    image = tmp_path / "demo.png"
    assert main(["demo", "--model", "deepseek_vl2", "--chunk", "512", "--out", str(image)]) == 0
    said = capsys.readouterr().out
    assert "embeddings against plain torch" in said
    assert "everything agrees" in said
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("images", [1, 2, 3])
def test_the_demo_draws_thumbnail_tiles_and_layout(
    processor: ModelProcessor, shown: Any, noisy: Any, images: int
) -> None:
    demo, _ = shown
    files = [png(noisy(96, 100, seed)) for seed in range(images)]
    output = processor.process(demo.prompt(images), files)
    views = [demo.views(processor, item, "name", data) for item, data in zip(output.mm_items, files, strict=True)]
    for item, (thumbnail, tiles, layout) in zip(output.mm_items, views, strict=True):
        columns, rows = item.images_spatial_crop[0].tolist()
        assert np.array_equal(thumbnail.pixels, item.feature[0])
        assert tiles.pixels.shape == (rows * SIDE, columns * SIDE, 3)
        assert np.array_equal(tiles.pixels[:SIDE, :SIDE], item.feature[1 if rows * columns > 1 else 0])
        assert (len(thumbnail.boxes), len(tiles.boxes), len(tiles.frames)) == (4, 4 * rows * columns, rows * columns)
        # A square for each token: all but the white ground and lines.
        cells = layout.pixels[::6, ::6].reshape(-1, 3)
        assert (cells != 255).any(axis=1).sum() == item.num_tokens
    sheet = draw(views, output, chunk=16)
    assert sheet.width == 1200
