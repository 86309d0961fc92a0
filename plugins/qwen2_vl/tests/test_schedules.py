"""The real tower under random schedules of chunks, batches, evictions and retractions: transformers' rows, each encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin import ModelProcessor, MultimodalInputs, MultimodalProcessorOutput, RequestMedia
from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import Encoder
from mm_plugin.inputs import ForwardBatch
from mm_plugin.testing import CallCounter
from mm_plugin_qwen2vl.testing import PREPROCESSOR

PART = "<|vision_start|><|image_pad|><|vision_end|>"
# Images by (image, height, width); a prompt shows some of them, the same one twice or in several requests too.
SIZES = [(0, 56, 56), (1, 56, 84), (0, 28, 140), (1, 84, 84)]
PROMPTS: list[tuple[str, tuple[int, ...]]] = [
    ("the thing is in the other one", ()),
    (f"see {PART}{PART}", (0, 1)),
    (f"{PART}", (2,)),
    (f"a {PART} then {PART} and {PART}.", (3, 0, 3)),
    (f"{PART}{PART} in", (1, 2)),
]
# The tower's rows move by rounding with what else is in its call.
TOLERANCE = 1e-5


class World(msgspec.Struct, frozen=True, eq=False):
    """Requests, and transformers' embeddings of each."""

    outputs: list[MultimodalProcessorOutput]
    references: list[torch.Tensor]
    table: torch.nn.Embedding


@pytest.fixture(scope="module")
def world(pillow: ModelProcessor, model: Any, make_image: Callable[..., Image.Image]) -> World:
    size = {"shortest_edge": PREPROCESSOR["min_pixels"], "longest_edge": PREPROCESSOR["max_pixels"]}
    imgs = [make_image(*key) for key in SIZES]
    table, token = model.get_input_embeddings(), model.config.image_token_id
    rows = []
    with torch.no_grad():
        for image in imgs:
            prepared = Qwen2VLImageProcessorPil(size=size)(images=[image], return_tensors="pt")
            rows.append(model.model.visual(prepared["pixel_values"], grid_thw=prepared["image_grid_thw"]).pooler_output)
        outputs, references = [], []
        for prompt, shown in PROMPTS:
            output = pillow.process(prompt, [imgs[index] for index in shown])
            ids = torch.from_numpy(output.input_ids)
            embeds = table(ids).clone()
            if shown:
                embeds[ids == token] = torch.cat([rows[index] for index in shown])
            outputs.append(output)
            references.append(embeds)
    return World(outputs, references, table)


MOVES = st.tuples(
    st.sampled_from(["extend", "extend", "extend", "absent", "retract"]), st.integers(0, 14), st.integers(0, 40)
)


def same(found: torch.Tensor, reference: torch.Tensor) -> bool:
    return found.shape == reference.shape and torch.allclose(found, reference, rtol=0, atol=TOLERANCE)


def take_step(
    world: World, chosen: Sequence[int], media: Sequence[Any], done: list[int], extends: Sequence[int], **options: Any
) -> None:
    starts = [done[index] for index in chosen]
    parts = [
        world.outputs[index].padded_input_ids[start : start + extend]
        for index, start, extend in zip(chosen, starts, extends, strict=True)
    ]
    batch = ForwardBatch([media[index] for index in chosen], starts, extends)
    out = embed_mm_inputs(torch.from_numpy(np.concatenate(parts)), batch, world.table, **options)
    assert out.failed == ()
    rows = out.input_embeds.split(list(extends))
    for index, start, extend, found in zip(chosen, starts, extends, rows, strict=True):
        assert same(found, world.references[index][start : start + extend])
        done[index] = start + extend


@pytest.mark.case("5.9")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.lists(MOVES, min_size=5, max_size=5), max_size=5),
    st.sampled_from([None, 0, 5000, 1 << 24]),
    st.sampled_from([None, 6]),
)
def test_every_schedule_gives_the_rows_of_transformers(
    world: World, encoder: Encoder, moves: list[list[tuple[str, int, int]]], capacity: int | None, most: int | None
) -> None:
    media = [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in world.outputs]
    cache = None if capacity is None else EmbeddingCache(capacity)
    counter = CallCounter(encoder)
    options = {"encoder": counter.as_mapping(), "cache": cache, "max_encode_tokens": most}
    done = [0] * len(media)
    for step in moves:
        chosen = [index for index, move in enumerate(step) if move[0] != "absent"]
        for index in chosen:
            if step[index][0] == "retract":
                done[index] = min(done[index], step[index][2])
        if chosen:
            lengths = [len(world.outputs[index].input_ids) for index in chosen]
            extends = [min(step[index][1], length - done[index]) for index, length in zip(chosen, lengths, strict=True)]
            take_step(world, chosen, media, done, extends, **options)
    left = [len(output.input_ids) - count for output, count in zip(world.outputs, done, strict=True)]
    take_step(world, range(len(media)), media, done, left, **options)
    assert all(each.held_embeddings == {} for each in media)
    if capacity == 1 << 24:
        assert len(counter.seen) == len(set(counter.seen)) <= len(SIZES)
    if cache is not None:
        assert cache.stats().pinned == 0


def test_rows_that_are_off_by_more_than_rounding_are_noticed(world: World) -> None:
    """The tolerance tells one image's rows from another's, and a row from its neighbor."""
    for reference in world.references[1:]:
        assert not same(reference.roll(1, dims=0), reference)
        assert not same(reference + 2e-5, reference)
