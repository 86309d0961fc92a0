"""Media that a processor or an encoder made already: taken as they are, checked in everything, equal to raw ones in the end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin import (
    Encoder,
    LimitError,
    MediaError,
    ModelProcessor,
    MultimodalInputFormat,
    PrecomputedEmbeddings,
    ProcessorOutput,
    Registry,
    RequestError,
    UsageError,
    discover,
)
from mm_plugin.demo import sample_images
from mm_plugin.identity import feature_digest
from mm_plugin.testing import embed_in_chunks
from mm_plugin_qwen2vl.testing import make_checkpoint

SLOT = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ready"), preprocessor={"max_pixels": 28 * 28 * 30})


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with discover() as opened:
        yield opened


@pytest.fixture(scope="module")
def processor(registry: Registry, folder: Path) -> ModelProcessor:
    return registry.load_processor(folder, resize="pillow", feature_format="float32")


@pytest.fixture(scope="module")
def encoder(registry: Registry, folder: Path) -> Encoder:
    return registry.load_encoder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """What transformers' own processor makes of the first image."""
    image = Image.open(io.BytesIO(sample_images()[0][1]))
    return dict(Qwen2VLImageProcessorPil.from_pretrained(str(folder))(images=image, return_tensors="pt"))


@pytest.fixture(scope="module")
def table() -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(torch.randn(320, 64, generator=torch.Generator().manual_seed(3)))


@pytest.mark.case("7.6")
def test_the_output_of_transformers_processor_gives_the_rows_of_the_raw_image(
    processor: ModelProcessor, encoder: Encoder, reference: dict[str, Any], table: torch.nn.Embedding
) -> None:
    raw = processor.process(f"a {SLOT} b", [sample_images()[0][1]])
    ready = processor.process(f"a {SLOT} b", [ProcessorOutput(reference)])
    assert ready.mm_items[0].format is MultimodalInputFormat.PROCESSOR_OUTPUT
    for name in ("input_ids", "token_modalities", "mrope_positions"):
        assert np.array_equal(getattr(raw, name), getattr(ready, name))
    whole = len(raw.input_ids)
    expected = embed_in_chunks(raw, table, encoder, size=whole)
    assert torch.equal(embed_in_chunks(ready, table, encoder, size=7), expected)


@pytest.mark.case("7.3")
@pytest.mark.case("7.4")
def test_rows_that_were_encoded_already_are_written_as_they_are(
    processor: ModelProcessor, encoder: Encoder, reference: dict[str, Any], table: torch.nn.Embedding
) -> None:
    raw = processor.process(f"a {SLOT} b", [sample_images()[0][1]])
    rows = encoder.encode(raw.mm_items[0].modality, raw.mm_items)[0]
    fields = {"image_grid_thw": reference["image_grid_thw"]}
    ready = processor.process(f"a {SLOT} b", [PrecomputedEmbeddings(rows, fields)])
    assert ready.mm_items[0].format is MultimodalInputFormat.PRECOMPUTED_EMBEDDING
    expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
    for size in (1, 5, len(raw.input_ids)):
        assert torch.equal(embed_in_chunks(ready, table, {}, size=size), expected)


def test_all_three_forms_stand_side_by_side(
    processor: ModelProcessor, encoder: Encoder, reference: dict[str, Any], table: torch.nn.Embedding
) -> None:
    raw = sample_images()[0][1]
    rows = encoder.encode(*_first(processor, raw))[0]
    media = [
        PrecomputedEmbeddings(rows, {"image_grid_thw": reference["image_grid_thw"]}),
        raw,
        ProcessorOutput(reference),
    ]
    output = processor.process(SLOT * 3, media)
    found = embed_in_chunks(output, table, encoder, size=11)
    spans = [item.offsets[0] for item in output.mm_items]
    for start, end in spans:
        torch.testing.assert_close(found[start : end + 1], rows, rtol=0, atol=1e-5)
    assert len({item.identity for item in output.mm_items}) == 3  # the form is part of an identity


def _first(processor: ModelProcessor, raw: bytes) -> tuple[Any, Any]:
    items = processor.process(SLOT, [raw]).mm_items
    return items[0].modality, items


def test_an_identity_of_the_callers_own_stands_for_rows(processor: ModelProcessor) -> None:
    fields = {"image_grid_thw": [[1, 2, 4]]}
    made = [
        PrecomputedEmbeddings(np.full((2, 64), value, np.float32), fields, identity=b"i" * 32) for value in (0, 0, 1)
    ]
    first, second = (processor.process(SLOT, [rows]).mm_items[0].identity for rows in made[:2])
    assert first == second
    with pytest.raises(RequestError, match="give each content and preparation a name of its own"):
        processor.process(SLOT, [made[2]])
    # A name that equals the digest of other rows is still another identity than theirs.
    victim = np.ones((2, 64), np.float32)
    forged = PrecomputedEmbeddings(np.zeros((2, 64), np.float32), fields, identity=feature_digest(victim))
    honest = processor.process(SLOT, [PrecomputedEmbeddings(victim, fields)]).mm_items[0].identity
    assert processor.process(SLOT, [forged]).mm_items[0].identity != honest
    other = processor.process(SLOT, [PrecomputedEmbeddings(np.zeros((2, 64), np.float32), fields)]).mm_items[0].identity
    assert other != first
    with pytest.raises(UsageError, match="32 bytes"):
        processor.process(SLOT, [PrecomputedEmbeddings(np.zeros((2, 64), np.float32), fields, identity=b"short")])


PIXELS = np.zeros((8, 1176), np.float32)
GRID = np.array([[1, 2, 4]])


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"pixel_values": PIXELS}, "image_grid_thw"),
        ({"image_grid_thw": GRID}, "pixel_values"),
        ({"pixel_values": PIXELS, "image_grid_thw": GRID, "extra": 1}, "extra"),
        ({"pixel_values": PIXELS[:7], "image_grid_thw": GRID}, r"\[7, 1176\]"),
        ({"pixel_values": PIXELS[:, :100], "image_grid_thw": GRID}, r"\[8, 100\]"),
        ({"pixel_values": PIXELS.astype(np.int64), "image_grid_thw": GRID}, "int64"),
        ({"pixel_values": [[1.0]], "image_grid_thw": GRID}, "dense"),
        ({"pixel_values": torch.zeros(8, 1176).to_sparse(), "image_grid_thw": GRID}, "dense"),
        ({"pixel_values": np.array([object()]), "image_grid_thw": GRID}, "dense"),
        ({"pixel_values": PIXELS, "image_grid_thw": [1, 2, 4]}, r"\[3\]"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1.0, 2.0, 4.0]]}, "float64"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, 3, 4]]}, "not a valid image"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[2, 2, 4]]}, "not a valid image"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, -2, -4]]}, "not a valid image"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, 0, 4]]}, "not a valid image"),
        ({"pixel_values": PIXELS, "image_grid_thw": "1x2x4"}, "image_grid_thw"),
        ({"pixel_values": PIXELS, "image_grid_thw": object()}, "image_grid_thw"),
        ({"pixel_values": PIXELS, "image_grid_thw": None}, "image_grid_thw"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, 2], [3]]}, "image_grid_thw"),
        ({"pixel_values": PIXELS, "image_grid_thw": np.ones((1000, 1000))}, "65536"),
    ],
)
def test_fields_that_do_not_fit_are_the_clients_fault(
    processor: ModelProcessor, fields: dict[str, Any], part: str
) -> None:
    with pytest.raises(MediaError, match=part) as caught:
        processor.process(f"{SLOT}{SLOT}", [sample_images()[0][1], ProcessorOutput(fields)])
    assert caught.value.path == "images[1]"


@pytest.mark.case("7.1")
@pytest.mark.parametrize("grid", [[[1, 1 << 40, 1 << 40]], [[1, 2, 1 << 20]], [[1, 1 << 62, 2]]])
def test_a_grid_that_promises_too_much_makes_nothing_of_that_size(processor: ModelProcessor, grid: Any) -> None:
    for media_input in (
        ProcessorOutput({"pixel_values": PIXELS, "image_grid_thw": grid}),
        PrecomputedEmbeddings(np.zeros((2, 64), np.float32), {"image_grid_thw": grid}),
    ):
        with pytest.raises(LimitError) as caught:
            processor.process(SLOT, [media_input])
        assert caught.value.setting == "max_item_tokens"


@pytest.mark.parametrize(
    "rows",
    [np.zeros((3, 64), np.float32), np.zeros(2, np.float32), np.zeros((2, 64), np.int32), None, [[0.0] * 64] * 2],
)
def test_rows_that_do_not_fit_are_the_clients_fault(processor: ModelProcessor, rows: Any) -> None:
    with pytest.raises(MediaError, match=r"images\[0\]: the fields stand for embeddings .* got"):
        processor.process(SLOT, [PrecomputedEmbeddings(rows, {"image_grid_thw": GRID})])


def test_a_feature_that_cannot_be_written_is_taken(
    processor: ModelProcessor, encoder: Encoder, table: torch.nn.Embedding
) -> None:
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    output = processor.process(SLOT, [ProcessorOutput({"pixel_values": frozen, "image_grid_thw": GRID})])
    assert embed_in_chunks(output, table, encoder, size=3).shape == (4, 64)


def test_a_request_that_fails_binds_no_identity(processor: ModelProcessor) -> None:
    fields = {"image_grid_thw": GRID}
    first, second = (
        PrecomputedEmbeddings(np.full((2, 64), level, np.float32), fields, identity=b"f" * 32) for level in (0, 1)
    )
    with pytest.raises(MediaError):
        processor.process(SLOT * 2, [first, b"no image"])
    assert len(processor.process(SLOT, [second]).mm_items) == 1
    with pytest.raises(RequestError, match="give each content and preparation a name of its own"):
        processor.process(SLOT, [first])


LEVELS, VIDEO = np.zeros((16, 3, 392), np.uint8), "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.case("7.6")
@pytest.mark.parametrize("feature", [LEVELS, torch.from_numpy(LEVELS.copy()), np.zeros((16, 1176), np.float32)])
def test_a_prepared_video_is_taken_in_both_forms(
    processor: ModelProcessor, encoder: Encoder, table: torch.nn.Embedding, feature: Any
) -> None:
    media_input = ProcessorOutput({"pixel_values_videos": feature, "video_grid_thw": [[2, 2, 4]]})
    output = processor.process(VIDEO, videos=[media_input])
    assert output.mm_items[0].num_tokens == 4
    assert torch.isfinite(embed_in_chunks(output, table, encoder, size=3)).all()


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"pixel_values_videos": LEVELS}, "video_grid_thw"),
        (
            {"pixel_values_videos": LEVELS, "video_grid_thw": [[2, 2, 4]], "second_per_grid_ts": [1.0]},
            "second_per_grid_ts",
        ),
        ({"pixel_values_videos": LEVELS, "video_grid_thw": [[1, 2, 4]]}, r"\[16, 3, 392\]"),
        ({"pixel_values_videos": LEVELS[:, :, :196], "video_grid_thw": [[2, 2, 4]]}, r"\[16, 3, 196\]"),
        ({"pixel_values_videos": LEVELS, "video_grid_thw": [[2, 3, 4]]}, "not a valid video"),
        ({"pixel_values_videos": LEVELS, "video_grid_thw": [[-2, 2, -4]]}, "not a valid video"),
        ({"pixel_values": LEVELS, "image_grid_thw": [[2, 2, 4]]}, "pixel_values_videos"),
    ],
)
def test_fields_of_a_video_that_do_not_fit_are_the_clients_fault(
    processor: ModelProcessor, fields: dict[str, Any], part: str
) -> None:
    with pytest.raises(MediaError, match=part) as caught:
        processor.process(VIDEO, videos=[ProcessorOutput(fields)])
    assert caught.value.path == "videos[0]"
