"""The window tower under random schedules of chunks, batches, evictions and retractions: transformers' rows, each encoded once."""

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

from mm_plugin import Modality, ModelProcessor, MultimodalInputs, MultimodalProcessorOutput, RequestMedia, VideoFrames
from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import Encoder
from mm_plugin.inputs import ForwardBatch
from mm_plugin.testing import CallCounter

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
# Images by (image, height, width) and videos by (frames, height, width); some are in several requests, or twice in one.
IMAGES = [(0, 56, 56), (1, 84, 112)]
VIDEOS = [(3, 56, 84), (4, 84, 84)]
PROMPTS: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("the thing is in the other one", (), ()),
    (f"see {IMAGE}{VIDEO}", (0,), (0,)),
    (f"{VIDEO}", (), (1,)),
    (f"a {IMAGE} then {VIDEO} and {IMAGE}.", (1, 1), (0,)),
    (f"{VIDEO}{IMAGE} in {VIDEO}", (0,), (1, 0)),
]
# The tower's rows move by rounding with what else is in its call.
TOLERANCE = 1e-5


class World(msgspec.Struct, frozen=True, eq=False):
    """Requests, and transformers' embeddings of each."""

    outputs: list[MultimodalProcessorOutput]
    references: list[torch.Tensor]
    table: torch.nn.Embedding


@pytest.fixture(scope="module")
def world(
    compact: ModelProcessor,
    torch_float: ModelProcessor,
    model: Any,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
) -> World:
    imgs = [make_image(*key) for key in IMAGES]
    footages = [VideoFrames(moving(*key), fps=2) for key in VIDEOS]
    table = model.get_input_embeddings()
    outputs, references = [], []
    with torch.no_grad():
        for prompt, images, videos in PROMPTS:
            given = [imgs[index] for index in images], [footages[index] for index in videos]
            small = {"video_min_pixels": 784} if videos else {}
            floats, output = (opened.process(prompt, *given, **small) for opened in (torch_float, compact))
            embeds = table(torch.from_numpy(output.input_ids)).clone()
            for item in floats.mm_items:
                grid = item.video_grid_thw if item.modality is Modality.VIDEO else item.image_grid_thw
                rows = model.model.visual(torch.from_numpy(item.feature), grid_thw=torch.from_numpy(grid.copy()))
                ((start, end),) = item.offsets
                embeds[start : end + 1] = rows.pooler_output
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
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
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
        assert len(counter.seen) == len(set(counter.seen)) <= len(IMAGES) + len(VIDEOS)
    if cache is not None:
        assert cache.stats().pinned == 0


def test_rows_that_are_off_by_more_than_rounding_are_noticed(world: World) -> None:
    """The tolerance tells one image's rows from another's, and a row from its neighbor."""
    for reference in world.references[1:]:
        assert not same(reference.roll(1, dims=0), reference)
        assert not same(reference + 2e-5, reference)
