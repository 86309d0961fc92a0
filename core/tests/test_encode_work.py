"""What a step has to encode: what `embed_mm_inputs` then does encode, and chunks that stay within a budget of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin import (
    ForwardBatch,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    RequestMedia,
    embed_mm_inputs,
    encode_items,
)
from mm_plugin.cache import EmbeddingCache
from mm_plugin.errors import SpanError, UsageError
from mm_plugin.items import item_key
from mm_plugin.scheduler import encode_work, limit_chunk

TABLE = torch.nn.Embedding.from_pretrained(torch.zeros(4, 2))
FIT = {"dtype": torch.float32, "device": "cpu"}


def item(seed: int, spans: Sequence[tuple[int, int]], *, attention: Any = "causal") -> MultimodalDataItem:
    made = MultimodalDataItem(
        modality=Modality.IMAGE, offsets=list(spans), feature=np.array([seed]), attention=attention
    )
    made.set_identity(seed.to_bytes(32, "big"))
    return made


def inputs_of(items: Sequence[MultimodalDataItem], length: int) -> MultimodalInputs:
    ids = np.zeros(length, np.int64)
    return MultimodalInputs(mm_items=list(items), input_ids=ids, padded_input_ids=ids, token_modalities=ids)


class Counting:
    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        self.tokens += sum(one.num_tokens for one in items)
        return [torch.zeros(one.num_tokens, 2) for one in items]


# (gap before it, seed) of each item; an item's tokens follow from its seed, so that equal seeds are equal items.
REQUESTS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=4), min_size=1, max_size=3)


def laid_out(parts: Sequence[tuple[int, int]], precomputed: int) -> tuple[MultimodalInputs, int]:
    at, items = 0, []
    for gap, seed in parts:
        first, count = at + gap, 2 * seed
        middle = first + seed
        items.append(item(seed, [(first, middle - 1), (middle + 1, first + count)]))  # in two runs
        if seed == precomputed:
            items[-1].feature, items[-1].precomputed_embeddings = None, torch.zeros(count, 2)
        at = first + count + 1
    return inputs_of(items, at + 2), at + 2


@given(REQUESTS, st.integers(1, 7), st.sets(st.integers(1, 5), max_size=2), st.integers(0, 5), st.booleans())
def test_it_is_what_a_step_then_encodes(
    requests: list[list[tuple[int, int]]], chunk: int, ahead: set[int], precomputed: int, keeps: bool
) -> None:
    made = [laid_out(parts, precomputed) for parts in requests]
    media = [RequestMedia(inputs) for inputs, _ in made]
    cache = EmbeddingCache(1 << 20 if keeps else 1)  # one that keeps nothing finds what requests hold
    encoder = Counting()
    encode_items([item(seed, [(0, 2 * seed - 1)]) for seed in sorted(ahead)], {Modality.IMAGE: encoder}, cache, **FIT)
    known = cache.items("", torch.float32)
    for start in range(0, max(length for _, length in made), chunk):
        extends = [max(0, min(chunk, length - start)) for _, length in made]
        prefixes = [min(start, length) for _, length in made]
        batch = ForwardBatch(media, prefixes, extends)
        lookups = cache.stats().hits + cache.stats().misses
        work = encode_work(batch, known)
        assert cache.stats().hits + cache.stats().misses == lookups
        assert cache.stats().pinned == 0
        before = encoder.tokens
        ids = torch.zeros(sum(extends), dtype=torch.int64)
        assert embed_mm_inputs(ids, batch, TABLE, {Modality.IMAGE: encoder}, cache).failed == ()
        assert work.num_tokens == encoder.tokens - before
        assert len(set(work.keys)) == len(work.keys)


def test_a_chunk_that_needs_two_rows_encodes_ninety() -> None:
    inputs = inputs_of([item(1, [(2, 91)])], 100)
    batch = ForwardBatch([inputs, None], [0, 5], [4, 9])
    assert encode_work(batch).num_tokens == 90
    assert encode_work(batch, {item_key(inputs.mm_items[0])}).num_tokens == 0
    assert encode_work(ForwardBatch([inputs], [92], [3])).num_tokens == 0


def test_what_cannot_be_encoded_is_no_work() -> None:
    nameless = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 3)], feature=1)
    overlapping = inputs_of([item(1, [(0, 3)]), item(2, [(2, 5)])], 8)
    batch = ForwardBatch([inputs_of([nameless], 8), overlapping], [0, 0], [8, 8])
    assert encode_work(batch) == encode_work(ForwardBatch([], [], []))


@given(REQUESTS, st.integers(1, 9), st.integers(0, 12), st.sets(st.integers(1, 5)))
def test_a_chunk_stays_within_its_budget_and_is_the_longest_that_does(
    requests: list[list[tuple[int, int]]], space: int, most: int, cached: set[int]
) -> None:
    inputs, length = laid_out(requests[0], 0)
    known = {item_key(one) for one in inputs.mm_items if int(one.feature[0]) in cached}
    prefix = 0
    while prefix < length:
        asked = min(space, length - prefix)
        taken = limit_chunk(inputs, prefix, asked, max_encode_tokens=most, cache=known)
        work = encode_work(ForwardBatch([inputs], [prefix], [taken]), known)
        assert work.num_tokens <= most
        assert 0 <= taken <= asked
        if taken < asked:
            assert encode_work(ForwardBatch([inputs], [prefix], [taken + 1]), known).num_tokens > most
        if taken == 0:
            break
        known.update(work.keys)
        prefix += taken


def test_whole_spans_and_the_budget_hold_together() -> None:
    inputs = inputs_of([item(1, [(2, 5)], attention="whole"), item(2, [(8, 13)])], 20)
    assert [limit_chunk(inputs, 0, length, max_encode_tokens=99) for length in (4, 6, 9, 20)] == [2, 6, 9, 20]
    assert [limit_chunk(inputs, 0, 20, max_encode_tokens=most) for most in (0, 3, 4, 9, 10)] == [2, 2, 8, 8, 20]
    with pytest.raises(SpanError):
        limit_chunk(inputs, 3, 5, max_encode_tokens=99)


def test_what_a_request_holds_is_free() -> None:
    media = RequestMedia(inputs_of([item(1, [(2, 9)])], 12))
    encoder = {Modality.IMAGE: Counting()}
    embed_mm_inputs(torch.zeros(4, dtype=torch.int64), ForwardBatch([media], [0], [4]), TABLE, encoder)
    assert limit_chunk(media, 4, 8, max_encode_tokens=0) == 8
    assert limit_chunk(media.inputs, 4, 8, max_encode_tokens=0) == 0


@pytest.mark.parametrize("most", [-1, 1.5, None, True, "9"])
def test_the_budget_is_a_number(most: Any) -> None:
    with pytest.raises(UsageError, match="max_encode_tokens"):
        limit_chunk(inputs_of([], 4), 0, 4, max_encode_tokens=most)


def test_what_a_cache_has_follows_eviction_and_release() -> None:
    cache = EmbeddingCache(48)  # of two embeddings of 3 x 2 float32
    keys = []
    for seed in (1, 2, 3):
        one = item(seed, [(0, 2)])
        encode_items([one], {Modality.IMAGE: Counting()}, cache, **FIT)
        keys.append(item_key(one))
    known = cache.items("", torch.float32)
    assert [key in known for key in keys] == [False, True, True]
    assert "text" not in known
    cache.invalidate()
    assert not any(key in known for key in keys)
