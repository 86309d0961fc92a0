"""A real encoder under random schedules of chunks, batches, evictions and retractions: the reference's rows, each encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_plugin.cache.embedding import EmbeddingCache
from mm_plugin.embed.routine import embed_mm_inputs
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs, MultimodalProcessorOutput
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.testing.embedding import CallCounter
from mm_plugin.testing.plugin_tests.base import PluginTests

# Requests in a world.
N_REQUESTS = 5
_MOVES = st.tuples(
    st.sampled_from(["extend", "extend", "extend", "absent", "retract"]), st.integers(0, 14), st.integers(0, 40)
)


class World(msgspec.Struct, frozen=True, eq=False):
    """Requests that share some items, and the reference's embeddings of each.

    Attributes:
        outputs: `N_REQUESTS` processed requests, the first of text only.
        references: by request, [N, hidden] float32, made by the model's own library.
        table: the model's text embedding.
        n_items: distinct items in all requests together.
    """

    outputs: list[MultimodalProcessorOutput]
    references: list[torch.Tensor]
    table: torch.nn.Embedding
    n_items: int


def schedule_test(max_examples: int) -> Callable[..., None]:
    """A test method of `ScheduleTests` that tries so many random schedules; a plugin with a slow encoder assigns its own."""

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        moves=st.lists(st.lists(_MOVES, min_size=N_REQUESTS, max_size=N_REQUESTS), max_size=5),
        capacity=st.sampled_from([None, 0, 5000, 1 << 24]),
        most=st.sampled_from([None, 6]),
    )
    def test(self: ScheduleTests, world: World, encoder: Any, moves: Any, capacity: Any, most: Any) -> None:
        self.run(world, encoder, moves, capacity, most)

    return test


class ScheduleTests(PluginTests):
    """Whatever a scheduler does, every chunk has the reference's embeddings. Needs `encoder`.

    Attributes:
        TOLERANCE: by which embeddings may move with what else is in the encoder's call.
    """

    TOLERANCE: ClassVar[float] = 1e-5

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls) -> World:
        """What is scheduled."""
        raise NotImplementedError

    def same(self, found: torch.Tensor, reference: torch.Tensor) -> bool:
        """Whether they differ by no more than rounding."""
        return found.shape == reference.shape and torch.allclose(found, reference, rtol=0, atol=self.TOLERANCE)

    test_every_schedule_gives_the_embeddings_of_the_reference = schedule_test(max_examples=100)

    def run(
        self,
        world: World,
        encoder: Any,
        moves: list[list[tuple[str, int, int]]],
        capacity: int | None,
        most: int | None,
    ) -> None:
        """Schedule the requests of a world, extend all of them to their ends, and compare every chunk.

        Args:
            world: what is scheduled.
            encoder: a real one.
            moves: for each step and request, what is done with it, by how many tokens, and to where it is retracted.
            capacity: of the embedding cache, bytes; no cache where None.
            most: tokens that one call may encode; no limit where None.
        """
        inputs = [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in world.outputs]
        cache = None if capacity is None else EmbeddingCache(capacity)
        counter = CallCounter(encoder)
        options = {"encoder": counter.as_mapping(), "cache": cache, "max_encode_tokens": most}
        done = [0] * len(inputs)
        for step in moves:
            chosen = [index for index, move in enumerate(step) if move[0] != "absent"]
            for index in chosen:
                if step[index][0] == "retract":
                    done[index] = min(done[index], step[index][2])
            if chosen:
                lengths = [len(world.outputs[index].input_ids) for index in chosen]
                extends = [
                    min(step[index][1], length - done[index]) for index, length in zip(chosen, lengths, strict=True)
                ]
                self._step(world, chosen, inputs, done, extends, **options)
        left = [len(output.input_ids) - count for output, count in zip(world.outputs, done, strict=True)]
        self._step(world, range(len(inputs)), inputs, done, left, **options)
        assert all(each.held_embeddings == {} for each in inputs)
        if capacity == 1 << 24:
            assert len(counter.seen) == len(set(counter.seen)) <= world.n_items
        if cache is not None:
            assert cache.stats().pinned == 0

    def _step(
        self,
        world: World,
        chosen: Sequence[int],
        inputs: Sequence[Any],
        done: list[int],
        extends: Sequence[int],
        **options: Any,
    ) -> None:
        """Extend the chosen requests in one batch, and compare what comes out."""
        starts = [done[index] for index in chosen]
        parts = [
            world.outputs[index].padded_input_ids[start : start + extend]
            for index, start, extend in zip(chosen, starts, extends, strict=True)
        ]
        batch = ForwardBatch([inputs[index] for index in chosen], starts, extends)
        out = embed_mm_inputs(torch.from_numpy(np.concatenate(parts)), batch, world.table, **options)
        assert out.failed == ()
        found = out.input_embeds.split(list(extends))
        for index, start, extend, part in zip(chosen, starts, extends, found, strict=True):
            assert self.same(part, world.references[index][start : start + extend])
            done[index] = start + extend

    def test_embeddings_that_are_off_by_more_than_rounding_are_noticed(self, world: World) -> None:
        """The tolerance tells the embeddings of one item from another's, and of one token from its neighbor's."""
        for reference in world.references[1:]:
            assert not self.same(reference.roll(1, dims=0), reference)
            assert not self.same(reference + 2 * self.TOLERANCE, reference)
