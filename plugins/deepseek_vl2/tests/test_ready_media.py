"""Images that a processor or an encoder made already: taken as they are, checked in everything, freely mixed with raw ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import (
    Encoder,
    LimitError,
    Modality,
    ModelProcessor,
    MultimodalInputFormat,
    PrecomputedEmbeddings,
    ProcessorOutput,
    Settings,
    discover,
)
from mm_plugin.testing import embed_in_chunks


def crop(columns: int, rows: int) -> np.ndarray:
    return np.array([[columns, rows]])


@pytest.fixture(scope="module")
def item(exact: ModelProcessor, noisy: Any) -> Any:
    """A processed image of 2 x 1 tiles in float32."""
    return exact.process("<image>", [noisy(384, 768)]).mm_items[0]


@pytest.mark.case("7.6")
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda array: torch.from_numpy(array).bfloat16()])
def test_the_references_own_output_is_taken(
    processor: ModelProcessor, encoder: Encoder, item: Any, kind: Callable[[Any], Any]
) -> None:
    given = ProcessorOutput({"images": kind(item.feature), "images_spatial_crop": [[2, 1]]})
    (found,) = processor.process("<image>", [given]).mm_items
    assert found.format is MultimodalInputFormat.PROCESSOR_OUTPUT
    assert found.num_tokens == 617
    (rows,), (expected,) = (encoder.encode(Modality.IMAGE, [each]) for each in (found, item))
    assert torch.allclose(rows, expected, rtol=0, atol=1e-5 if given.fields["images"].dtype != torch.bfloat16 else 0.1)


def test_compact_tiles_are_taken_too(processor: ModelProcessor, encoder: Encoder, noisy: Any) -> None:
    for size, columns in (((384, 768), 2), ((300, 300), 1)):
        (raw,) = processor.process("<image>", [noisy(*size)]).mm_items
        given = ProcessorOutput({"images": raw.feature, "images_spatial_crop": crop(columns, 1)})
        (found,) = processor.process("<image>", [given]).mm_items
        (left,), (right,) = (encoder.encode(Modality.IMAGE, [each]) for each in (raw, found))
        assert torch.equal(left, right)


def test_raw_prepared_and_encoded_images_in_one_request(
    processor: ModelProcessor, encoder: Encoder, item: Any, noisy: Any
) -> None:
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    embedding = torch.nn.Embedding(320, 24)
    media = [
        noisy(384, 768),
        ProcessorOutput({"images": item.feature, "images_spatial_crop": crop(2, 1)}),
        PrecomputedEmbeddings(rows, {"images_spatial_crop": crop(2, 1)}),
    ]
    pair = processor.process("<image><image>", media[1:])
    assert [each.num_tokens for each in pair.mm_items] == [617, 617]
    # All three count: the raw one gets no tiles. What came prepared is as it came.
    output = processor.process("<image> <image> <image>", media)
    assert [each.num_tokens for each in output.mm_items] == [421, 617, 617]
    found = embed_in_chunks(output, embedding, encoder, size=100)
    for each in output.mm_items[1:]:
        ((start, end),) = each.offsets
        assert torch.allclose(found[start : end + 1], rows, rtol=0, atol=1e-5)


def test_as_many_tiles_laid_out_the_other_way_are_another_image(processor: ModelProcessor, item: Any) -> None:
    """Nothing in the tiles tells one layout from the other."""
    given = ProcessorOutput({"images": item.feature, "images_spatial_crop": crop(1, 2)})
    assert processor.process("<image>", [given]).mm_items[0].num_tokens == 631


def test_limits_hold_for_what_came_prepared(checkpoint: Any, item: Any) -> None:
    with discover(Settings(max_item_tokens=616)) as registry:
        processor = registry.load_processor(checkpoint)
        with pytest.raises(LimitError):
            processor.process("<image>", [ProcessorOutput({"images": item.feature, "images_spatial_crop": crop(2, 1)})])
