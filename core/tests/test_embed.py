"""Steps, chunks and batches: every row comes from where a slow re-implementation says, and a failure stays with its item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import (
    EmbedOutput,
    StepPlan,
    embed_mm_inputs,
    general_mm_embed_routine,
    plan_step,
)
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.errors import EncoderError, MediaError, SpanError, UsageError
from mm_plugin.events import EncodeBatch, Event, ItemFailed, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import pad_by_offsets
from mm_plugin.scheduler import encoder_len, strip_encoder_part

HIDDEN = 4
VOCABULARY = 50
Offsets = list[tuple[int, int]]


def make_item(seed: int, offsets: Offsets, *, modality: Modality = Modality.IMAGE) -> MultimodalDataItem:
    item = MultimodalDataItem(modality=modality, offsets=list(offsets), feature=np.array([seed]))
    item.set_identity(seed.to_bytes(32, "big"))
    return item


def make_inputs(seq: int, items: Sequence[MultimodalDataItem]) -> MultimodalInputs:
    ids = (np.arange(seq, dtype=np.int64) * 7 + 3) % VOCABULARY
    return MultimodalInputs(
        mm_items=list(items),
        padded_input_ids=pad_by_offsets(ids, [item for item in items if item.pad_values is not None]),
        token_modalities=np.zeros(seq, dtype=np.int64),
    )


def rows_of(item: MultimodalDataItem) -> torch.Tensor:
    """Rows that depend on the item alone: row r, column c is 1000 * seed + 10 * r + c."""
    seed = float(item.feature[0])
    return 1000 * seed + 10 * torch.arange(item.num_tokens)[:, None] + torch.arange(HIDDEN)[None].float()


def expected_rows(seed: int, count: int) -> list[list[float]]:
    return [[1000.0 * seed + 10.0 * row + column for column in range(HIDDEN)] for row in range(count)]


class Recorder(Encoder, EncodesImages):
    """An encoder that keeps the seeds of the items of every call."""

    def __init__(self, encode: Callable[[MultimodalDataItem], Any] = rows_of) -> None:
        self.calls: list[list[int]] = []
        self.one = encode

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Recorder:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        self.calls.append([int(item.feature[0]) for item in items])
        return [self.one(item) for item in items]


@pytest.fixture
def table() -> torch.nn.Embedding:
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
    with torch.no_grad():
        embedding.weight.copy_(-torch.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN).float() - 1)
    return embedding


def text_row(token: int) -> list[float]:
    return [-(token * HIDDEN + column) - 1.0 for column in range(HIDDEN)]


def slow_rows(inputs: MultimodalInputs) -> list[list[float]]:
    """Token by token: the item's next row where an item claims the token, else the text's."""
    out = [text_row(int(token) % VOCABULARY) for token in inputs.padded_input_ids]
    for item in inputs.mm_items:
        seed = int.from_bytes(item.identity or b"", "big")
        places = [place for start, end in item.offsets for place in range(start, end + 1)]
        for place, row in zip(places, expected_rows(seed, len(places)), strict=True):
            out[place] = row
    return out


def text_only_ids_matter(inputs: MultimodalInputs) -> torch.Tensor:
    return torch.from_numpy(inputs.padded_input_ids)


def step(
    batch: ForwardBatch, embedding: Any, encoder: Any, cache: EmbeddingCache | None = None, **arguments: Any
) -> EmbedOutput:
    """One step with the ids cut from each request's cache ids; text-only requests count 0, 1, 2, ..."""
    parts = []
    for inputs, prefix, extend in zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True):
        ids = torch.arange(prefix + extend) % VOCABULARY if inputs is None else text_only_ids_matter(inputs)
        parts.append(ids[prefix : prefix + extend])
    flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return embed_mm_inputs(flat, batch, embedding, encoder, cache, **arguments)


# ------------------------------------------------------------------ strategies


@st.composite
def requests(draw: st.DrawFn) -> MultimodalInputs | int:
    """A request with media in any place, adjacent or with gaps, in one run or several; an int is a text-only one's length."""
    if draw(st.booleans()) and draw(st.booleans()):
        return draw(st.integers(0, 6))
    cursor, items = 0, []
    for _ in range(draw(st.integers(1, 4))):
        runs: Offsets = []
        for _ in range(draw(st.integers(1, 3))):
            start = cursor + draw(st.integers(0, 3)) + (1 if runs and cursor else 0)
            end = start + draw(st.integers(0, 4))
            runs.append((start, end))
            cursor = end + 1
        # The number of rows is part of what an item is, so equal seeds need equal counts: the count enters the seed.
        count = sum(end - start + 1 for start, end in runs)
        items.append(make_item(1 + draw(st.integers(0, 2)) * 20 + count, runs))
    return make_inputs(cursor + draw(st.integers(0, 3)), items)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[MultimodalInputs | int], list[list[tuple[int, int]]]]:
    """Requests, and steps of (prefix, extend) for each until all are done; extends of 0 happen."""
    found = draw(st.lists(requests(), min_size=1, max_size=4))
    done = [0] * len(found)
    steps = []
    while any(done[i] < length(request) for i, request in enumerate(found)):
        this = []
        for index, request in enumerate(found):
            left = length(request) - done[index]
            extend = min(left, draw(st.integers(0, 6)))
            this.append((done[index], extend))
            done[index] += extend
        if not any(extend for _, extend in this):  # somebody must move, or this would not end
            index = next(i for i, request in enumerate(found) if done[i] < length(request))
            this[index] = (done[index], 1)
            done[index] += 1
        steps.append(this)
    return found, steps


def length(request: MultimodalInputs | int) -> int:
    return request if isinstance(request, int) else len(request.padded_input_ids)


# ------------------------------------------------------------------ plan_step


def slow_plan(batch: ForwardBatch) -> list[tuple[int, int, int] | None]:
    """For every token of the step: (request, item, row), or None for text."""
    out: list[tuple[int, int, int] | None] = []
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        for token in range(prefix, prefix + extend):
            claim = None
            for index, item in enumerate(inputs.mm_items if inputs else ()):
                places = [place for start, end in item.offsets for place in range(start, end + 1)]
                if token in places:
                    claim = (request, index, places.index(token))
            out.append(claim)
    return out


def by_token(plan: StepPlan) -> list[tuple[int, int, int] | str | None]:
    out: list[tuple[int, int, int] | str | None] = ["unset"] * plan.total
    for start, end in plan.text_runs:
        assert start < end
        for place in range(start, end):
            assert out[place] == "unset"
            out[place] = None
    for piece in plan.pieces:
        assert piece.rows_start < piece.rows_end
        for row in range(piece.rows_start, piece.rows_end):
            place = piece.out_start + row - piece.rows_start
            assert out[place] == "unset"
            out[place] = (piece.request, piece.item, row)
    return out


@pytest.mark.case("5.9")
@settings(max_examples=150, deadline=None)
@given(schedules())
def test_a_plan_names_text_or_row_of_every_token_as_a_scan_of_all_tokens_does(
    found: tuple[list[MultimodalInputs | int], list[list[tuple[int, int]]]],
) -> None:
    items, steps = found
    inputs = [None if isinstance(request, int) else request for request in items]
    for this in steps:
        batch = ForwardBatch(inputs, [prefix for prefix, _ in this], [extend for _, extend in this])
        plan = plan_step(batch)
        assert by_token(plan) == slow_plan(batch)
        assert plan.text_runs == tuple(sorted(plan.text_runs))
        assert [piece.out_start for piece in plan.pieces] == sorted(piece.out_start for piece in plan.pieces)
        for request, (each, (prefix, extend)) in enumerate(zip(inputs, this, strict=True)):
            for index, item in enumerate(each.mm_items if each else ()):
                begun = item.offsets[0][0] < prefix + extend
                over = item.offsets[-1][1] < prefix + extend
                assert ((request, index) in plan.unfinished) == (begun and not over)


def test_a_plan_by_hand() -> None:
    inputs = make_inputs(12, [make_item(1, [(2, 4), (6, 7)]), make_item(2, [(8, 10)])])
    plan = plan_step(ForwardBatch([None, inputs], [5, 3], [2, 6]))
    # Flat: 0, 1 text of the first; then tokens 3..8 of the second: rows 1, 2 of item 0, text, rows 3, 4, row 0 of item 1.
    assert plan.total == 8
    assert plan.text_runs == ((0, 2), (4, 5))
    assert [(p.request, p.item, p.rows_start, p.rows_end, p.out_start) for p in plan.pieces] == [
        (1, 0, 1, 3, 2),
        (1, 0, 3, 5, 5),
        (1, 1, 0, 1, 7),
    ]
    assert plan.unfinished == {(1, 1)}


@pytest.mark.parametrize(("prefixes", "extends"), [([0], [1, 2]), ([0, 0], [1]), ([-1], [2]), ([0], [-1])], ids=str)
def test_a_batch_whose_lists_do_not_fit_is_a_usage_error(prefixes: list[int], extends: list[int]) -> None:
    with pytest.raises(UsageError) as caught:
        plan_step(ForwardBatch([None], prefixes, extends))
    assert caught.value.argument == "batch"


def test_spans_that_overlap_are_a_usage_error() -> None:
    inputs = MultimodalInputs(
        mm_items=[make_item(1, [(0, 3)]), make_item(2, [(3, 5)])],
        padded_input_ids=np.zeros(8, dtype=np.int64),
        token_modalities=np.zeros(8, dtype=np.int64),
    )
    with pytest.raises(UsageError, match=r"request 0: item 1's span at 3"):
        plan_step(ForwardBatch([inputs], [0], [8]))


# ------------------------------------------------------------------ rows


@pytest.mark.case("5.9")
@settings(max_examples=120, deadline=None)
@given(schedules(), st.sampled_from([None, 0, 3 * HIDDEN * 4, 1 << 20]))
def test_every_schedule_writes_the_rows_that_a_scan_of_all_tokens_writes(
    found: tuple[list[MultimodalInputs | int], list[list[tuple[int, int]]]], capacity: int | None
) -> None:
    table = torch.nn.Embedding(VOCABULARY, HIDDEN)
    with torch.no_grad():
        table.weight.copy_(-torch.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN).float() - 1)
    requests_, steps = found
    inputs = [None if isinstance(request, int) else request for request in requests_]
    cache = None if capacity is None else EmbeddingCache(capacity)
    encoder = Recorder()
    got: list[list[list[float]]] = [[] for _ in inputs]
    for this in steps:
        batch = ForwardBatch(inputs, [prefix for prefix, _ in this], [extend for _, extend in this])
        before = len(encoder.calls)
        out = step(batch, table, encoder, cache)
        assert out.failed == ()
        assert out.deepstack is None
        assert len(encoder.calls) - before <= 1  # one call for all that is missing in a step
        rows = out.input_embeds.tolist()
        for index, (_, extend) in enumerate(this):
            got[index] += rows[:extend]
            rows = rows[extend:]
    for request, each in zip(requests_, got, strict=True):
        if isinstance(request, int):
            assert each == [text_row(token) for token in range(request)]
        else:
            assert each == slow_rows(request)
            assert request.held_rows == {}
    for call in encoder.calls:
        assert len(call) == len(set(call))
    seeds = [seed for call in encoder.calls for seed in call]
    distinct = {(i, item.identity) for i, each in enumerate(inputs) if each for item in each.mm_items}
    if capacity == 1 << 20:
        assert len(seeds) == len(set(seeds))
    else:
        places = sum(len(each.mm_items) for each in inputs if each)
        assert len({identity for _, identity in distinct}) <= len(seeds) <= places


@pytest.mark.parametrize("size", range(1, 22))
@pytest.mark.case("5.9")
def test_every_chunk_size_gives_the_same_rows_with_one_encoding_and_no_cache(
    size: int, table: torch.nn.Embedding
) -> None:
    inputs = make_inputs(21, [make_item(1, [(0, 4)]), make_item(2, [(5, 9)]), make_item(3, [(12, 13), (16, 20)])])
    encoder, parts = Recorder(), []
    for start in range(0, 21, size):
        batch = ForwardBatch([inputs], [start], [min(size, 21 - start)])
        parts += step(batch, table, encoder).input_embeds.tolist()
    assert parts == slow_rows(inputs)
    assert sorted(seed for call in encoder.calls for seed in call) == [1, 2, 3]


def test_an_item_in_four_chunks_is_encoded_once_and_let_go_after_its_last_row(table: torch.nn.Embedding) -> None:
    inputs = make_inputs(10, [make_item(5, [(1, 8)])])
    encoder = Recorder()
    held = []
    for start, extend in ((0, 3), (3, 3), (6, 2), (8, 2)):
        step(ForwardBatch([inputs], [start], [extend]), table, encoder, EmbeddingCache(8))
        held.append(len(inputs.held_rows))
    assert encoder.calls == [[5]]
    assert held == [1, 1, 1, 0]


def test_an_item_whose_runs_surround_another_item_is_encoded_once(table: torch.nn.Embedding) -> None:
    inputs = make_inputs(12, [make_item(1, [(0, 1), (8, 9)]), make_item(2, [(4, 5)])])
    encoder, parts = Recorder(), []
    for start in range(0, 12, 2):
        parts += step(ForwardBatch([inputs], [start], [2]), table, encoder).input_embeds.tolist()
    assert encoder.calls == [[1], [2]]
    assert parts == slow_rows(inputs)
    assert inputs.held_rows == {}


def test_one_image_in_two_places_and_two_requests_is_encoded_once(table: torch.nn.Embedding) -> None:
    first = make_inputs(9, [make_item(7, [(0, 2)]), make_item(7, [(4, 6)])])
    second = make_inputs(5, [make_item(7, [(1, 3)])])
    encoder = Recorder()
    out = step(ForwardBatch([first, None, second], [0, 0, 0], [9, 2, 5]), table, encoder)
    assert encoder.calls == [[7]]
    assert out.input_embeds.tolist() == [*slow_rows(first), text_row(0), text_row(1), *slow_rows(second)]


def test_items_of_one_identity_and_other_counts_are_kept_apart(table: torch.nn.Embedding) -> None:
    inputs = make_inputs(8, [make_item(7, [(0, 2)]), make_item(7, [(3, 4)])])
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    out = step(ForwardBatch([inputs], [0], [8]), table, encoder, cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(inputs)


def test_hashes_in_place_of_identities_work_alike(table: torch.nn.Embedding) -> None:
    items = [make_item(seed, [(2 * seed, 2 * seed + 1)]) for seed in (0, 1)]
    for item in items:
        item.set_hash(int(item.feature[0]))
    inputs = make_inputs(4, items)
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    for _ in range(2):
        out = step(ForwardBatch([inputs], [0], [4]), table, encoder, cache)
        assert out.input_embeds.tolist() == expected_rows(0, 2) + expected_rows(1, 2)
    assert encoder.calls == [[0, 1]]


def test_an_empty_batch_and_a_batch_of_empty_extends_give_no_rows(table: torch.nn.Embedding) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    encoder = Recorder()
    inputs = make_inputs(4, [make_item(1, [(0, 3)])])
    for batch in (ForwardBatch([], [], []), ForwardBatch([inputs, None], [0, 0], [0, 0])):
        out = embed_mm_inputs(empty, batch, table, encoder)
        assert out.input_embeds.shape == (0, HIDDEN)
        assert (out.deepstack, out.failed) == (None, ())
    assert encoder.calls == []


def test_a_step_that_is_all_media_reads_no_text(table: torch.nn.Embedding) -> None:
    inputs = make_inputs(6, [make_item(1, [(0, 2)]), make_item(2, [(3, 5)])])
    out = step(ForwardBatch([inputs], [0], [6]), table, Recorder())
    assert out.input_embeds.tolist() == expected_rows(1, 3) + expected_rows(2, 3)


# ------------------------------------------------------------------ ids and tables


@pytest.mark.case("5.12")
@pytest.mark.parametrize("runs", [3, 64, 65, 200])
def test_cache_ids_and_model_ids_give_the_same_and_stay_as_they_were(runs: int, table: torch.nn.Embedding) -> None:
    items = [make_item(seed, [(2 * seed + 1, 2 * seed + 1)]) for seed in range(runs)]
    inputs = make_inputs(2 * runs, items)
    batch = ForwardBatch([inputs], [0], [2 * runs])
    cache_ids = torch.from_numpy(inputs.padded_input_ids)
    model_ids = torch.where(cache_ids >= 1_000_000, 5, cache_ids)
    expected = slow_rows(inputs)
    for ids in (cache_ids, model_ids, model_ids.to(torch.int32)):
        before = ids.clone()
        assert embed_mm_inputs(ids, batch, table, Recorder()).input_embeds.tolist() == expected
        assert torch.equal(ids, before)
        assert ids.dtype == before.dtype


def test_an_id_outside_the_table_costs_no_other_request_its_step(table: torch.nn.Embedding) -> None:
    ids = torch.tensor([VOCABULARY + 9, 4, -3])
    out = embed_mm_inputs(ids, ForwardBatch([None, None], [0, 0], [1, 2]), table, {})
    assert out.input_embeds[1].tolist() == text_row(4)


class Scaled(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


def plain_table(cls: type[torch.nn.Embedding] = torch.nn.Embedding) -> torch.nn.Embedding:
    embedding = cls(VOCABULARY, HIDDEN)
    with torch.no_grad():
        embedding.weight.copy_(-torch.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN).float() - 1)
    return embedding


def hooked() -> torch.nn.Embedding:
    embedding = plain_table()
    embedding.register_forward_hook(lambda module, args, out: out * 3)
    return embedding


def pre_hooked() -> torch.nn.Embedding:
    embedding = plain_table()
    embedding.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return embedding


def offloaded() -> torch.nn.Embedding:
    embedding = plain_table()
    original = embedding.forward
    embedding.forward = lambda ids: original(ids) * 3  # type: ignore[method-assign]
    return embedding


@pytest.mark.parametrize(
    ("make", "shift", "factor"),
    [(lambda: plain_table(Scaled), 0, 3), (hooked, 0, 3), (pre_hooked, 1, 1), (offloaded, 0, 3)],
    ids=["scaled", "hook", "pre-hook", "forward-put-over"],
)
@pytest.mark.parametrize("seq", [6, 300])
def test_a_table_that_is_more_than_its_weight_is_called(
    make: Callable[[], torch.nn.Embedding], shift: int, factor: int, seq: int
) -> None:
    places = range(1, seq, 2) if seq > 100 else [1]
    inputs = make_inputs(seq, [make_item(index, [(place, place)]) for index, place in enumerate(places)])
    ids = torch.where(text_only_ids_matter(inputs) >= 1_000_000, 5, text_only_ids_matter(inputs)).clamp(
        max=VOCABULARY - 2
    )
    out = embed_mm_inputs(ids, ForwardBatch([inputs], [0], [seq]), make(), Recorder()).input_embeds.tolist()
    taken = {place: index for index, place in enumerate(places)}
    for place, row in enumerate(out):
        if place in taken:
            assert row == expected_rows(taken[place], 1)[0]
        else:
            assert row == [factor * value for value in text_row(int(ids[place]) + shift)]


def test_any_callable_serves_as_a_table() -> None:
    inputs = make_inputs(3, [make_item(1, [(1, 1)])])
    out = step(ForwardBatch([inputs], [0], [3]), lambda ids: ids[:, None].repeat(1, HIDDEN).double(), Recorder())
    assert out.input_embeds.dtype == torch.float64
    assert out.input_embeds.tolist() == [[3.0] * HIDDEN, expected_rows(1, 1)[0], [17.0] * HIDDEN]


def test_rows_take_the_type_of_the_text() -> None:
    table = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    inputs = make_inputs(3, [make_item(1, [(0, 1)])])
    out = step(ForwardBatch([inputs], [0], [3]), table, Recorder()).input_embeds
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[:2], torch.tensor(expected_rows(1, 2)).to(torch.bfloat16))


@pytest.mark.parametrize(
    "ids",
    [torch.zeros(3, dtype=torch.int64), torch.zeros((4, 1), dtype=torch.int64), torch.zeros(4), np.zeros(4, int), None],
    ids=["too few", "two dimensions", "floats", "numpy", "none"],
)
def test_ids_that_do_not_fit_the_batch_are_a_usage_error(ids: Any, table: torch.nn.Embedding) -> None:
    with pytest.raises(UsageError) as caught:
        embed_mm_inputs(ids, ForwardBatch([None], [0], [4]), table, {})
    assert caught.value.argument == "input_ids"


def test_embedding_makes_no_gradients_and_leaves_the_table_alone(table: torch.nn.Embedding) -> None:
    before = table.weight.detach().clone()
    out = step(ForwardBatch([make_inputs(3, [make_item(1, [(1, 1)])])], [0], [3]), table, Recorder())
    assert not out.input_embeds.requires_grad
    out.input_embeds.zero_()
    assert torch.equal(table.weight, before)


# ------------------------------------------------------------------ caches


def test_rows_come_from_the_cache_in_later_requests(table: torch.nn.Embedding) -> None:
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    for _ in range(3):
        inputs = make_inputs(5, [make_item(1, [(1, 3)])])
        assert step(ForwardBatch([inputs], [0], [5]), table, encoder, cache).input_embeds.tolist() == slow_rows(inputs)
    assert encoder.calls == [[1]]
    assert (cache.stats().hits, cache.stats().misses) == (2, 1)


@pytest.mark.case("3.4")
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, HIDDEN),
        torch.zeros(3, HIDDEN + 1),
        torch.zeros(3, HIDDEN, dtype=torch.float64),
        torch.zeros(3),
    ],
    ids=["count", "width", "dtype", "dimensions"],
)
def test_cached_rows_that_do_not_fit_are_a_counted_miss(wrong: torch.Tensor, table: torch.nn.Embedding) -> None:
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    inputs = make_inputs(5, [make_item(1, [(1, 3)])])
    batch = ForwardBatch([inputs], [0], [5])
    step(batch, table, encoder, cache)
    (key,) = list(cache.store._entries)  # type: ignore[attr-defined]
    cache.store.put(key, Encoded(wrong), 1)
    out = step(batch, table, encoder, cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(inputs)
    assert cache.stats().mismatches == 1
    assert encoder.calls == [[1], [1]]


def test_new_weights_make_old_rows_unreachable(table: torch.nn.Embedding) -> None:
    cache = EmbeddingCache(1 << 20)
    inputs = make_inputs(5, [make_item(1, [(1, 3)])])
    old, new = Recorder(), Recorder(lambda item: rows_of(item) + 1)
    old.bind(version="a", owner={})
    new.bind(version="b", owner={})
    first = step(ForwardBatch([inputs], [0], [5]), table, old, cache).input_embeds
    second = step(ForwardBatch([inputs], [0], [5]), table, new, cache).input_embeds
    assert torch.equal(second[1:4], first[1:4] + 1)


def test_a_kept_row_keeps_no_larger_buffer_and_is_not_the_encoders_own(table: torch.nn.Embedding) -> None:
    buffer = torch.zeros(1000, HIDDEN)
    cache = EmbeddingCache(1 << 20)
    encoder = Recorder(lambda item: buffer[: item.num_tokens])
    inputs = make_inputs(3, [make_item(1, [(0, 2)])])
    step(ForwardBatch([inputs], [0], [3]), table, encoder, cache)
    assert cache.stats().bytes == 3 * HIDDEN * 4
    buffer.fill_(9)
    assert step(ForwardBatch([inputs], [0], [3]), table, encoder, cache).input_embeds.tolist() == [[0.0] * HIDDEN] * 3


# ------------------------------------------------------------------ rows that were given, deepstack


@pytest.mark.case("7.3")
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["torch", "numpy", "float64"])
def test_given_rows_are_sliced_as_encoded_ones(size: int, kind: str, table: torch.nn.Embedding) -> None:
    rows = torch.tensor(expected_rows(4, 5))
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(1, 3), (5, 6)],
        precomputed_embeddings={"torch": rows, "numpy": rows.numpy(), "float64": rows.double()}[kind],
    )
    item.set_identity((4).to_bytes(32, "big"))
    inputs, encoder, parts = make_inputs(7, [item]), Recorder(), []
    for start in range(0, 7, size):
        parts += step(ForwardBatch([inputs], [start], [min(size, 7 - start)]), table, encoder).input_embeds.tolist()
    assert parts == slow_rows(inputs)
    assert encoder.calls == []
    assert inputs.held_rows == {}


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN + 1), torch.zeros(3, HIDDEN, dtype=torch.int64), "rows", [[1], []]],
    ids=["count", "width", "integers", "text", "ragged"],
)
def test_given_rows_that_do_not_fit_fail_their_item_alone(rows: Any, table: torch.nn.Embedding) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 2)], precomputed_embeddings=rows)
    item.set_identity(b"x" * 32)
    good = make_inputs(4, [make_item(1, [(1, 2)])])
    out = step(ForwardBatch([make_inputs(3, [item]), good], [0, 0], [3, 4]), table, Recorder())
    (failure,) = out.failed
    assert (failure.request, failure.item) == (0, 0)
    assert isinstance(failure.error, UsageError)
    assert failure.error.argument == "precomputed_embeddings"
    assert out.input_embeds[:3].tolist() == [[0.0] * HIDDEN] * 3
    assert out.input_embeds[3:].tolist() == slow_rows(good)


def stacked(item: MultimodalDataItem) -> Encoded:
    rows = rows_of(item)
    return Encoded(rows, deepstack=torch.stack([rows + 100_000, rows + 200_000]))


@pytest.mark.case("5.10")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("size", range(1, 13))
def test_deepstack_rows_are_sliced_as_the_main_rows(size: int, cached: bool, table: torch.nn.Embedding) -> None:
    inputs = make_inputs(12, [make_item(1, [(0, 3)]), make_item(2, [(5, 6), (8, 10)])])
    encoder, cache = Recorder(stacked), EmbeddingCache(1 << 20) if cached else None
    for start in range(0, 12, size):
        extend = min(size, 12 - start)
        out = step(ForwardBatch([None, inputs], [0, start], [1, extend]), table, encoder, cache)
        wanted = [
            place
            for place in range(start, start + extend)
            if any(first <= place <= last for item in inputs.mm_items for first, last in item.offsets)
        ]
        if not wanted:
            assert out.deepstack is None
            continue
        assert out.deepstack is not None
        rows, where = out.deepstack
        main = torch.tensor([slow_rows(inputs)[place] for place in wanted])
        assert where.tolist() == [1 + place - start for place in wanted]
        assert torch.equal(rows, torch.stack([main + 100_000, main + 200_000]))
    assert sorted(seed for call in encoder.calls for seed in call) == [1, 2]


def test_deepstack_of_other_depth_fails_its_item_alone(table: torch.nn.Embedding) -> None:
    def encode(item: MultimodalDataItem) -> Encoded:
        rows = rows_of(item)
        return Encoded(rows, deepstack=torch.stack([rows] * (3 if item.feature[0] == 2 else 2)))

    inputs = [make_inputs(2, [make_item(seed, [(0, 1)])]) for seed in (1, 2, 3)]
    out = step(ForwardBatch(inputs, [0, 0, 0], [2, 2, 2]), table, Recorder(encode))
    assert [(failure.request, failure.item) for failure in out.failed] == [(1, 0)]
    assert isinstance(out.failed[0].error, EncoderError)
    assert out.deepstack is not None
    assert out.deepstack[1].tolist() == [0, 1, 4, 5]
    assert out.input_embeds.tolist() == expected_rows(1, 2) + [[0.0] * HIDDEN] * 2 + expected_rows(3, 2)


# ------------------------------------------------------------------ failures


class Failing(Recorder):
    """Fails whenever its call holds the item of seed 2."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        rows = super().get_image_feature(items)
        if 2 in self.calls[-1]:
            raise self.error
        return rows


def three(table: torch.nn.Embedding, encoder: Any, **arguments: Any) -> EmbedOutput:
    inputs = [make_inputs(4, [make_item(seed, [(1, 2)])]) for seed in (1, 2, 3)]
    out = step(ForwardBatch(inputs, [0, 0, 0], [4, 4, 4]), table, encoder, **arguments)
    assert out.input_embeds[:4].tolist() == slow_rows(inputs[0])
    assert out.input_embeds[8:].tolist() == slow_rows(inputs[2])
    text = slow_rows(inputs[1])
    assert out.input_embeds[4:8].tolist() == [text[0], [0.0] * HIDDEN, [0.0] * HIDDEN, text[3]]
    assert [(failure.request, failure.item) for failure in out.failed] == [(1, 0)]
    return out


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("no such kernel"), EncoderError),
        (KeyError("grid"), EncoderError),
        (MediaError("images[1]: bad", path="images[1]"), MediaError),
    ],
    ids=["RuntimeError", "KeyError", "MediaError"],
)
def test_an_item_that_raises_fails_alone_after_one_try_each(
    error: Exception, kind: type[Exception], table: torch.nn.Embedding
) -> None:
    encoder = Failing(error)
    encoder.bind(version="", owner={"plugin": "p", "distribution": "d", "version": "1"})
    out = three(table, encoder)
    assert encoder.calls == [[1, 2, 3], [1], [2], [3]]
    assert isinstance(out.failed[0].error, kind)
    if kind is EncoderError:
        failure: Any = out.failed[0].error
        assert (failure.plugin, failure.distribution, failure.version) == ("p", "d", "1")
        assert type(error).__name__ in failure.message
        assert failure.__cause__ is error


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda item: rows_of(item)[:1],
        lambda item: rows_of(item)[:, :2],
        lambda item: rows_of(item).long(),
        lambda item: rows_of(item).numpy(),
        lambda item: Encoded(rows_of(item), deepstack=torch.zeros(2, 1, HIDDEN)),
        lambda item: None,
    ],
    ids=["rows", "columns", "integers", "numpy", "deepstack", "none"],
)
def test_rows_that_do_not_fit_fail_their_item_alone(
    wrong: Callable[[MultimodalDataItem], Any], table: torch.nn.Embedding
) -> None:
    out = three(table, Recorder(lambda item: wrong(item) if item.feature[0] == 2 else rows_of(item)))
    assert isinstance(out.failed[0].error, EncoderError)


@pytest.mark.parametrize(
    "result",
    [lambda rows: torch.stack(rows), lambda rows: rows[:-1], lambda rows: iter(rows), lambda rows: None],
    ids=["one tensor", "one too few", "an iterator", "nothing"],
)
def test_a_result_that_is_no_list_per_item_fails_the_items(
    result: Callable[[list[torch.Tensor]], Any], table: torch.nn.Embedding
) -> None:
    inputs = make_inputs(4, [make_item(1, [(0, 1)]), make_item(2, [(2, 3)])])
    encoder = {Modality.IMAGE: lambda items: result([rows_of(item) for item in items])}
    out = step(ForwardBatch([inputs], [0], [4]), table, encoder)
    assert [failure.item for failure in out.failed] == [0, 1]
    assert all(isinstance(failure.error, EncoderError) for failure in out.failed)
    assert out.input_embeds.tolist() == [[0.0] * HIDDEN] * 4


class Small(Recorder):
    """A device on which so many items fit at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        rows = super().get_image_feature(items)
        if len(items) > self.most:
            raise torch.OutOfMemoryError("too much")
        return rows


@pytest.mark.parametrize(
    ("most", "sizes"), [(4, [8, 4, 4]), (2, [8, 4, 2, 2, 4, 2, 2]), (1, [8, 4, 2, 1, 1, 2, 1, 1, 4, 2, 1, 1, 2, 1, 1])]
)
def test_out_of_memory_halves_the_call_until_it_fits(most: int, sizes: list[int], table: torch.nn.Embedding) -> None:
    inputs = make_inputs(16, [make_item(seed, [(2 * seed, 2 * seed + 1)]) for seed in range(8)])
    encoder = Small(most)
    out = step(ForwardBatch([inputs], [0], [16]), table, encoder)
    assert [len(call) for call in encoder.calls] == sizes
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(inputs)


def test_one_item_that_never_fits_fails_alone(table: torch.nn.Embedding) -> None:
    out = three(table, Failing(torch.OutOfMemoryError("too much")))
    assert "out of device memory" in out.failed[0].error.message


@pytest.mark.case("5.5")
def test_a_released_feature_fails_its_item_alone_and_is_not_asked_for(table: torch.nn.Embedding) -> None:
    inputs = [make_inputs(2, [make_item(seed, [(0, 1)])]) for seed in (1, 2, 3)]
    inputs[1].release_features()
    encoder = Recorder()
    out = step(ForwardBatch(inputs, [0, 0, 0], [2, 2, 2]), table, encoder)
    assert encoder.calls == [[1, 3]]
    assert [(failure.request, failure.item) for failure in out.failed] == [(1, 0)]
    assert "released" in out.failed[0].error.message
    assert out.input_embeds[4:].tolist() == expected_rows(3, 2)


def test_released_features_are_not_missed_while_their_rows_are_cached(table: torch.nn.Embedding) -> None:
    inputs, cache = make_inputs(2, [make_item(1, [(0, 1)])]), EmbeddingCache(1 << 20)
    step(ForwardBatch([inputs], [0], [2]), table, Recorder(), cache)
    inputs.release_features()
    out = step(ForwardBatch([inputs], [0], [2]), table, Recorder(), cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == expected_rows(1, 2)


def test_an_item_without_identity_fails_alone(table: torch.nn.Embedding) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=np.array([9]))
    good = make_inputs(2, [make_item(1, [(0, 1)])])
    out = step(ForwardBatch([make_inputs(2, [item]), good], [0, 0], [2, 2]), table, Recorder())
    assert [(failure.request, failure.item) for failure in out.failed] == [(0, 0)]
    assert out.input_embeds[2:].tolist() == slow_rows(good)


def test_a_failed_item_stays_out_of_cache_and_held_rows(table: torch.nn.Embedding) -> None:
    cache = EmbeddingCache(1 << 20)
    inputs = make_inputs(4, [make_item(2, [(0, 3)])])
    out = step(ForwardBatch([inputs], [0], [2]), table, Failing(RuntimeError("x")), cache)
    assert len(out.failed) == 1
    assert inputs.held_rows == {}
    assert cache.stats().entries == 0
    good = step(ForwardBatch([inputs], [2], [2]), table, Recorder(), cache)
    assert good.input_embeds.tolist() == expected_rows(2, 4)[2:]


def test_a_keyboard_interrupt_is_nobodys_item(table: torch.nn.Embedding) -> None:
    with pytest.raises(KeyboardInterrupt):
        three(table, Failing(KeyboardInterrupt()))


def test_a_modality_without_encoder_fails_its_items_alone(table: torch.nn.Embedding) -> None:
    inputs = make_inputs(4, [make_item(1, [(0, 1)]), make_item(2, [(2, 3)], modality=Modality.AUDIO)])
    for encoder in (Recorder(), {Modality.IMAGE: lambda items: [rows_of(item) for item in items]}):
        out = step(ForwardBatch([inputs], [0], [4]), table, encoder)
        assert [failure.item for failure in out.failed] == [1]
        assert "audios" in out.failed[0].error.message
        assert out.input_embeds[:2].tolist() == expected_rows(1, 2)


def test_each_modality_is_one_call_of_its_own(table: torch.nn.Embedding) -> None:
    calls: list[tuple[str, list[int]]] = []

    def encode(name: str) -> Callable[[Sequence[MultimodalDataItem]], list[torch.Tensor]]:
        def run(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
            calls.append((name, [int(item.feature[0]) for item in items]))
            return [rows_of(item) for item in items]

        return run

    kinds = (Modality.IMAGE, Modality.VIDEO, Modality.IMAGE, Modality.AUDIO)
    items = [make_item(seed, [(seed, seed)], modality=kind) for seed, kind in enumerate(kinds)]
    inputs = make_inputs(4, items)
    encoders = {modality: encode(modality.name) for modality in Modality}
    out = step(ForwardBatch([inputs], [0], [4]), table, encoders)
    assert sorted(calls) == [("AUDIO", [3]), ("IMAGE", [0, 2]), ("VIDEO", [1])]
    assert out.input_embeds.tolist() == slow_rows(inputs)


def test_observers_hear_of_calls_and_failures(table: torch.nn.Embedding) -> None:
    events: list[Event] = []
    three(table, Failing(RuntimeError("x")), observers=Observers([events.append]))
    batches = [event for event in events if isinstance(event, EncodeBatch)]
    failures = [event for event in events if isinstance(event, ItemFailed)]
    assert [(batch.modality, batch.num_items, batch.num_tokens) for batch in batches] == [("image", 1, 2)] * 2
    assert [(failure.request, failure.item, failure.code) for failure in failures] == [(1, 0, "encoder")]


# ------------------------------------------------------------------ the routine around it


def test_the_routine_hands_embeddings_to_the_language_model(table: torch.nn.Embedding) -> None:
    class Model:
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return table

        def __call__(self, **arguments: Any) -> dict[str, Any]:
            return arguments

    inputs = make_inputs(3, [make_item(1, [(1, 1)])])
    ids = text_only_ids_matter(inputs)
    batch = ForwardBatch([inputs], [0], [3])
    for name, arguments in (("input_embeds", {}), ("inputs_embeds", {"embeds_argument": "inputs_embeds"})):
        received, embedded = general_mm_embed_routine(ids, batch, Model(), Recorder(), positions=7, **arguments)
        assert set(received) == {name, "positions"}
        assert received["positions"] == 7
        assert received[name].tolist() == slow_rows(inputs)
        assert embedded.failed == ()


def chunk_plans() -> Iterator[list[tuple[int, int]]]:
    yield [(0, 10)]
    yield [(0, 1), (1, 9)]
    yield [(4, 6)]
    yield [(5, 0), (5, 5)]


@pytest.mark.parametrize("plan", list(chunk_plans()), ids=str)
def test_a_prefix_that_was_computed_elsewhere_is_skipped(
    plan: list[tuple[int, int]], table: torch.nn.Embedding
) -> None:
    inputs = make_inputs(10, [make_item(1, [(2, 7)])])
    encoder, parts = Recorder(), []
    for prefix, extend in plan:
        parts += step(ForwardBatch([inputs], [prefix], [extend]), table, encoder).input_embeds.tolist()
    assert parts == slow_rows(inputs)[plan[0][0] :]
    assert encoder.calls == [[1]]


# ------------------------------------------------------------------ nothing is read back from the device

READ_BACKS = (
    "item", "tolist", "nonzero", "numpy", "cpu", "masked_select",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
)  # fmt: skip
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "repeat_interleave")


class Guard(TorchDispatchMode):
    """Notes whatever would wait for a GPU: reads of values, and shapes that depend on values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name in READ_BACKS:
            patch.setattr(torch.Tensor, name, self.noting(name, getattr(torch.Tensor, name)))
        for name in ("nonzero", "masked_select", "argwhere", "unique"):
            patch.setattr(torch, name, self.noting(name, getattr(torch, name)))

    def noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.seen.append(name)
            return original(*arguments, **named)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or name.startswith("unique"):
            self.seen.append(name)
        if name in ("index", "index_put", "index_put_"):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            self.seen += ["mask"] * len(masks)
        return func(*args, **(kwargs or {}))


def guarded_steps(
    guard: Guard, encode: Callable[[MultimodalDataItem], Any], *, runs: int = 3, module: Any = None
) -> None:
    """Steps that go through every part of the path: all kinds of rows, cached, held, failed; few and many runs of text."""
    given = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 4)], precomputed_embeddings=torch.ones(2, HIDDEN))
    given.set_identity(b"g" * 32)
    wrong = make_item(99, [(0, 0)])
    wrong.feature = None
    many = make_inputs(2 * runs + 8, [make_item(seed, [(2 * seed + 1, 2 * seed + 1)]) for seed in range(3, runs + 3)])
    requests = [make_inputs(9, [make_item(1, [(0, 2), (5, 6)]), given]), None, make_inputs(4, [wrong]), many]
    lengths = [9, 3, 4, 2 * runs + 8]
    ids = [torch.arange(3) if each is None else text_only_ids_matter(each) for each in requests]
    encoder, cache = Recorder(encode), EmbeddingCache(1 << 20)
    for cut in (2, 4):
        for start, end in ((0, cut), (cut, None)):
            parts = [each[start:end] for each in ids]
            extends = [len(part) for part in parts]
            prefixes = [length - extend if start else 0 for length, extend in zip(lengths, extends, strict=True)]
            flat, batch = torch.cat(parts), ForwardBatch(requests, prefixes, extends)
            with guard:
                embed_mm_inputs(flat, batch, module or plain_table(), encoder, cache, check_finite=True)


def quiet_rows(item: MultimodalDataItem) -> Encoded:
    """Rows with all extras, made without a look at any value."""
    seed = torch.from_numpy(item.feature)
    rows = seed[:, None] * 1000.0 + torch.arange(item.num_tokens)[:, None] + torch.arange(HIDDEN)[None]
    return Encoded(rows, deepstack=torch.stack([rows, rows]), kept=torch.arange(item.num_tokens))


@pytest.mark.parametrize("runs", [3, 100])
@pytest.mark.parametrize("module", [None, Scaled], ids=["plain", "called"])
def test_no_value_is_read_back_from_the_device(runs: int, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(monkeypatch)
    guarded_steps(guard, quiet_rows, runs=runs, module=plain_table(module) if module else None)
    assert guard.seen == []


@pytest.mark.parametrize(
    "planted",
    [
        lambda rows: rows[0, 0].item(),
        lambda rows: rows.tolist(),
        lambda rows: bool(rows.any()),
        lambda rows: int(rows.sum()),
        lambda rows: float(rows.sum()),
        lambda rows: range(rows.long().abs().amax()),
        lambda rows: rows.cpu(),
        lambda rows: rows.numpy(),
        lambda rows: rows[rows[:, 0] > 0],
        lambda rows: torch.nonzero(rows),
        lambda rows: torch.masked_select(rows, rows > 0),
        lambda rows: torch.equal(rows, rows),
        lambda rows: torch.where(rows > 0),
        lambda rows: rows.unique(),
    ],
    ids=[
        "item", "tolist", "bool", "int", "float", "index", "cpu", "numpy", "mask", "nonzero", "masked_select", "equal",
        "where", "unique",
    ],
)  # fmt: skip
def test_the_guard_notes_a_planted_read_back(
    planted: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(item: MultimodalDataItem) -> Encoded:
        encoded = quiet_rows(item)
        planted(encoded.rows)
        return encoded

    guard = Guard(monkeypatch)
    guarded_steps(guard, encode)
    assert guard.seen != []


# ------------------------------------------------------------------ models whose encoder part is separate


def crossed(length: int, *spans: tuple[int, int]) -> MultimodalInputs:
    return make_inputs(length, [make_item(index + 1, [span]) for index, span in enumerate(spans)])


def test_the_separate_part_is_what_leads_the_prompt() -> None:
    assert encoder_len(None) == 0
    assert encoder_len(crossed(9)) == 0
    assert encoder_len(crossed(9, (0, 3))) == 4
    assert encoder_len(crossed(9, (4, 6), (0, 3))) == 7


@pytest.mark.parametrize("spans", [[(1, 3)], [(0, 3), (5, 6)]], ids=str)
def test_media_that_do_not_lead_the_prompt_are_refused(spans: Offsets) -> None:
    with pytest.raises(SpanError, match="leads the prompt"):
        encoder_len(crossed(9, *spans))


def test_a_mixed_batch_is_stripped_of_its_encoder_parts() -> None:
    """By hand: media not computed, computed just now, computed long ago, none at all, and one that stands still."""
    inputs = [crossed(8, (0, 2), (3, 4)), crossed(8, (0, 2)), crossed(8, (0, 1)), None, crossed(8, (0, 3))]
    batch = ForwardBatch(inputs, [0, 3, 5, 2, 0], [7, 2, 3, 2, 0])
    ids = np.arange(100, 114)
    before = ids.copy()
    part = strip_encoder_part(ids, batch)
    assert part.input_ids.tolist() == [105, 106, 107, 108, 109, 110, 111, 112, 113]
    assert part.input_ids.dtype == np.int64
    assert part.extend_prefix_lens == [0, 0, 3, 2, 0]
    assert part.extend_seq_lens == [2, 2, 3, 2, 0]
    assert part.encoder_lens == [5, 3, 2, 0, 4]
    assert part.encoder_cached == [False, True, True, True, False]
    part.input_ids[:] = 0
    assert ids.tolist() == before.tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 6)), max_size=5))
def test_steps_that_cut_no_encoder_part_keep_exactly_the_text(rows: list[tuple[int, int, int]]) -> None:
    """Each request: rows of its encoder part, text before the step (none while the part is not computed), text in it."""
    inputs, prefixes, extends, expected, flat = [], [], [], [], 0
    for media, done, text in rows:
        inputs.append(crossed(20, (0, media - 1)) if media else None)
        prefixes.append(media + done if done else 0)
        extends.append(text if done else media + text)
        expected += range(flat + (0 if done else media), flat + extends[-1])
        flat += extends[-1]
    part = strip_encoder_part(np.arange(flat), ForwardBatch(inputs, prefixes, extends))
    assert part.input_ids.tolist() == expected
    assert part.extend_prefix_lens == [done for _, done, _ in rows]
    assert part.extend_seq_lens == [text for _, _, text in rows]
    assert part.encoder_cached == [bool(done) or not media for media, done, _ in rows]


@pytest.mark.parametrize(("prefix", "extend"), [(1, 7), (3, 5), (3, 0), (0, 3), (0, 1)])
def test_a_cut_through_an_encoder_part_is_refused(prefix: int, extend: int) -> None:
    batch = ForwardBatch([None, crossed(8, (0, 3))], [0, prefix], [2, extend])
    with pytest.raises(SpanError, match="request 1: its encoder part has 4 tokens"):
        strip_encoder_part(np.zeros(2 + extend, np.int64), batch)


@pytest.mark.parametrize(
    ("ids", "prefixes", "extends"), [(3, [0], [4]), (4, [0, 0], [4]), (4, [0], [4, 0]), (3, [-1], [3])], ids=str
)
def test_ids_and_lists_that_do_not_fit_are_a_usage_error(ids: int, prefixes: list[int], extends: list[int]) -> None:
    with pytest.raises(UsageError):
        strip_encoder_part(np.zeros(ids, np.int64), ForwardBatch([None], prefixes, extends))


def test_rows_of_an_encoder_that_writes_into_one_buffer_stay_what_they_were() -> None:
    buffer = torch.zeros(4, 8)

    def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        assert len(items) == 1
        return [buffer.fill_(float(items[0].feature))]

    table, cache = torch.nn.Embedding(10, 8), EmbeddingCache(1 << 20)
    found = []
    for value in (1, 2, 1):
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 3)], feature=np.array(value))
        item.set_identity(bytes([value]) * 32)
        ids = np.zeros(4, dtype=np.int64)
        inputs = MultimodalInputs(mm_items=[item], padded_input_ids=ids, token_modalities=ids)
        step = embed_mm_inputs(
            torch.zeros(4, dtype=torch.int64), ForwardBatch([inputs], [0], [4]), table, {Modality.IMAGE: encode}, cache
        )
        found.append(step.input_embeds[0, 0].item())
    assert found == [1.0, 2.0, 1.0]


def test_rows_that_another_model_holds_do_not_fit_this_one() -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 3)], feature=np.array(0))
    item.set_identity(b"i" * 32)
    ids = np.zeros(4, dtype=np.int64)
    inputs = MultimodalInputs(mm_items=[item], padded_input_ids=ids, token_modalities=ids)
    for hidden in (64, 32, 64):
        encoder = {Modality.IMAGE: lambda items, width=hidden: [torch.full((4, width), float(width)) for _ in items]}
        batch = ForwardBatch([inputs], [0], [2])
        step = embed_mm_inputs(torch.zeros(2, dtype=torch.int64), batch, torch.nn.Embedding(10, hidden), encoder)
        assert step.failed == ()
        assert (step.input_embeds == hidden).all()
