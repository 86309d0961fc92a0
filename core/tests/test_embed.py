"""Steps, chunks and batches: every row comes from where a slow re-implementation says, and a failure stays with its item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import (
    EmbedOutput,
    Piece,
    StepPlan,
    embed_mm_inputs,
    embed_text,
    general_mm_embed_routine,
    plan_step,
)
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.errors import EncoderError, MediaError, UsageError
from mm_plugin.events import EncodeBatch, Event, ItemFailed, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import pad_by_offsets

HIDDEN = 4
VOCABULARY = 50
Offsets = list[tuple[int, int]]


def make_item(seed: int, offsets: Offsets, *, modality: Modality = Modality.IMAGE) -> MultimodalDataItem:
    item = MultimodalDataItem(modality=modality, offsets=list(offsets), feature=np.array([seed]))
    item.set_identity(seed.to_bytes(32, "big"))
    return item


def make_media(seq: int, items: Sequence[MultimodalDataItem]) -> RequestMedia:
    ids = (np.arange(seq, dtype=np.int64) * 7 + 3) % VOCABULARY
    inputs = MultimodalInputs(
        mm_items=list(items),
        input_ids=ids,
        padded_input_ids=pad_by_offsets(ids, [item for item in items if item.pad_values is not None]),
        token_modalities=np.zeros(seq, dtype=np.int64),
    )
    return RequestMedia(inputs)


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


def slow_rows(media: RequestMedia) -> list[list[float]]:
    """Token by token: the item's next row where an item claims the token, else the text's."""
    out = [text_row(int(token) % VOCABULARY) for token in media.inputs.padded_input_ids]
    for item in media.inputs.mm_items:
        seed = int.from_bytes(item.identity or b"", "big")
        places = [place for start, end in item.offsets for place in range(start, end + 1)]
        for place, row in zip(places, expected_rows(seed, len(places)), strict=True):
            out[place] = row
    return out


def cache_ids_of(media: RequestMedia) -> torch.Tensor:
    return torch.from_numpy(media.inputs.padded_input_ids)


def step(
    batch: ForwardBatch, embedding: Any, encoder: Any, cache: EmbeddingCache | None = None, **arguments: Any
) -> EmbedOutput:
    """One step with the ids cut from each request's cache ids; text-only requests count 0, 1, 2, ..."""
    parts = []
    for media, prefix, extend in zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True):
        ids = torch.arange(prefix + extend) % VOCABULARY if media is None else cache_ids_of(media)
        parts.append(ids[prefix : prefix + extend])
    flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return embed_mm_inputs(flat, batch, embedding, encoder, cache, **arguments)


# ------------------------------------------------------------------ strategies


@st.composite
def requests(draw: st.DrawFn) -> RequestMedia | int:
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
    return make_media(cursor + draw(st.integers(0, 3)), items)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[RequestMedia | int], list[list[tuple[int, int]]]]:
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
    return request if isinstance(request, int) else len(request.inputs.padded_input_ids)


# ------------------------------------------------------------------ plan_step


def slow_plan(batch: ForwardBatch) -> list[tuple[int, int, int] | None]:
    """For every token of the step: (request, item, row), or None for text."""
    out: list[tuple[int, int, int] | None] = []
    for request, (media, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        for token in range(prefix, prefix + extend):
            claim = None
            for index, item in enumerate(media.inputs.mm_items if media else ()):
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
    found: tuple[list[RequestMedia | int], list[list[tuple[int, int]]]],
) -> None:
    items, steps = found
    media = [None if isinstance(request, int) else request for request in items]
    for this in steps:
        batch = ForwardBatch(media, [prefix for prefix, _ in this], [extend for _, extend in this])
        plan = plan_step(batch)
        assert by_token(plan) == slow_plan(batch)
        assert plan.text_runs == tuple(sorted(plan.text_runs))
        assert [piece.out_start for piece in plan.pieces] == sorted(piece.out_start for piece in plan.pieces)
        for request, (each, (prefix, extend)) in enumerate(zip(media, this, strict=True)):
            for index, item in enumerate(each.inputs.mm_items if each else ()):
                begun = item.offsets[0][0] < prefix + extend
                over = item.offsets[-1][1] < prefix + extend
                assert ((request, index) in plan.unfinished) == (begun and not over)


def test_a_plan_by_hand() -> None:
    media = make_media(12, [make_item(1, [(2, 4), (6, 7)]), make_item(2, [(8, 10)])])
    plan = plan_step(ForwardBatch([None, media], [5, 3], [2, 6]))
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


def test_spans_that_overlap_are_a_fault_of_their_request() -> None:
    ids = np.zeros(8, dtype=np.int64)
    items = [make_item(1, [(0, 3)]), make_item(2, [(3, 5)])]
    inputs = MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids)
    plan = plan_step(ForwardBatch([inputs], [0], [8]))
    assert (plan.pieces, plan.text_runs, list(plan.faults)) == ((), ((0, 8),), [0])
    assert "mm_items[1].offsets: expected disjoint spans, got one at 3 that overlaps" in str(plan.faults[0])


# ------------------------------------------------------------------ rows


@pytest.mark.case("5.9")
@settings(max_examples=120, deadline=None)
@given(schedules(), st.sampled_from([None, 0, 3 * HIDDEN * 4, 1 << 20]))
def test_every_schedule_writes_the_rows_that_a_scan_of_all_tokens_writes(
    found: tuple[list[RequestMedia | int], list[list[tuple[int, int]]]], capacity: int | None
) -> None:
    table = torch.nn.Embedding(VOCABULARY, HIDDEN)
    with torch.no_grad():
        table.weight.copy_(-torch.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN).float() - 1)
    requests_, steps = found
    media = [None if isinstance(request, int) else request for request in requests_]
    cache = None if capacity is None else EmbeddingCache(capacity)
    encoder = Recorder()
    got: list[list[list[float]]] = [[] for _ in media]
    for this in steps:
        batch = ForwardBatch(media, [prefix for prefix, _ in this], [extend for _, extend in this])
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
            assert request.held_embeddings == {}
    for call in encoder.calls:
        assert len(call) == len(set(call))
    seeds = [seed for call in encoder.calls for seed in call]
    distinct = {(i, item.identity) for i, each in enumerate(media) if each for item in each.inputs.mm_items}
    if capacity == 1 << 20:
        assert len(seeds) == len(set(seeds))
    else:
        places = sum(len(each.inputs.mm_items) for each in media if each)
        assert len({identity for _, identity in distinct}) <= len(seeds) <= places


@pytest.mark.parametrize("size", range(1, 22))
@pytest.mark.case("5.9")
def test_every_chunk_size_gives_the_same_rows_with_one_encoding_and_no_cache(
    size: int, table: torch.nn.Embedding
) -> None:
    media = make_media(21, [make_item(1, [(0, 4)]), make_item(2, [(5, 9)]), make_item(3, [(12, 13), (16, 20)])])
    encoder, parts = Recorder(), []
    for start in range(0, 21, size):
        batch = ForwardBatch([media], [start], [min(size, 21 - start)])
        parts += step(batch, table, encoder).input_embeds.tolist()
    assert parts == slow_rows(media)
    assert sorted(seed for call in encoder.calls for seed in call) == [1, 2, 3]


def test_an_item_in_four_chunks_is_encoded_once_and_let_go_after_its_last_row(table: torch.nn.Embedding) -> None:
    media = make_media(10, [make_item(5, [(1, 8)])])
    encoder = Recorder()
    held = []
    for start, extend in ((0, 3), (3, 3), (6, 2), (8, 2)):
        step(ForwardBatch([media], [start], [extend]), table, encoder, EmbeddingCache(8))
        held.append(len(media.held_embeddings))
    assert encoder.calls == [[5]]
    assert held == [1, 1, 1, 0]


def test_an_item_whose_runs_surround_another_item_is_encoded_once(table: torch.nn.Embedding) -> None:
    media = make_media(12, [make_item(1, [(0, 1), (8, 9)]), make_item(2, [(4, 5)])])
    encoder, parts = Recorder(), []
    for start in range(0, 12, 2):
        parts += step(ForwardBatch([media], [start], [2]), table, encoder).input_embeds.tolist()
    assert encoder.calls == [[1], [2]]
    assert parts == slow_rows(media)
    assert media.held_embeddings == {}


def test_one_image_in_two_places_and_two_requests_is_encoded_once(table: torch.nn.Embedding) -> None:
    first = make_media(9, [make_item(7, [(0, 2)]), make_item(7, [(4, 6)])])
    second = make_media(5, [make_item(7, [(1, 3)])])
    encoder = Recorder()
    out = step(ForwardBatch([first, None, second], [0, 0, 0], [9, 2, 5]), table, encoder)
    assert encoder.calls == [[7]]
    assert out.input_embeds.tolist() == [*slow_rows(first), text_row(0), text_row(1), *slow_rows(second)]


def test_items_of_one_identity_and_other_counts_are_kept_apart(table: torch.nn.Embedding) -> None:
    media = make_media(8, [make_item(7, [(0, 2)]), make_item(7, [(3, 4)])])
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    out = step(ForwardBatch([media], [0], [8]), table, encoder, cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(media)


def test_hashes_in_place_of_identities_work_alike(table: torch.nn.Embedding) -> None:
    items = [make_item(seed, [(2 * seed, 2 * seed + 1)]) for seed in (0, 1)]
    for item in items:
        item.set_hash(int(item.feature[0]))
    media = make_media(4, items)
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    for _ in range(2):
        out = step(ForwardBatch([media], [0], [4]), table, encoder, cache)
        assert out.input_embeds.tolist() == expected_rows(0, 2) + expected_rows(1, 2)
    assert encoder.calls == [[0, 1]]


def test_an_empty_batch_and_a_batch_of_empty_extends_give_no_rows(table: torch.nn.Embedding) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    encoder = Recorder()
    media = make_media(4, [make_item(1, [(0, 3)])])
    for batch in (ForwardBatch([], [], []), ForwardBatch([media, None], [0, 0], [0, 0])):
        out = embed_mm_inputs(empty, batch, table, encoder)
        assert out.input_embeds.shape == (0, HIDDEN)
        assert (out.deepstack, out.failed) == (None, ())
    assert encoder.calls == []


def test_a_step_that_is_all_media_reads_no_text(table: torch.nn.Embedding) -> None:
    media = make_media(6, [make_item(1, [(0, 2)]), make_item(2, [(3, 5)])])
    out = step(ForwardBatch([media], [0], [6]), table, Recorder())
    assert out.input_embeds.tolist() == expected_rows(1, 3) + expected_rows(2, 3)


# ------------------------------------------------------------------ ids and tables


@pytest.mark.case("5.12")
@pytest.mark.parametrize("runs", [3, 64, 65, 200])
def test_cache_ids_and_model_ids_give_the_same_and_stay_as_they_were(runs: int, table: torch.nn.Embedding) -> None:
    items = [make_item(seed, [(2 * seed + 1, 2 * seed + 1)]) for seed in range(runs)]
    media = make_media(2 * runs, items)
    batch = ForwardBatch([media], [0], [2 * runs])
    cache_ids = torch.from_numpy(media.inputs.padded_input_ids)
    model_ids = torch.where(cache_ids >= 1_000_000, 5, cache_ids)
    expected = slow_rows(media)
    for ids in (cache_ids, model_ids, model_ids.to(torch.int32)):
        before = ids.clone()
        assert embed_mm_inputs(ids, batch, table, Recorder()).input_embeds.tolist() == expected
        assert torch.equal(ids, before)
        assert ids.dtype == before.dtype


@pytest.mark.parametrize("hidden", [4, 2048])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("runs", [1, 64, 65, 100])
@pytest.mark.parametrize("given", [False, True])
def test_every_way_to_look_text_up_gives_the_rows_of_the_table(
    hidden: int, length: int, runs: int, given: bool
) -> None:
    """Few runs, many short ones, and many long ones, each followed by an item of one row."""
    step = length + 1
    plan = StepPlan(
        runs * step,
        tuple((at, at + length) for at in range(0, runs * step, step)),
        tuple(Piece(0, index, 0, 1, (index + 1) * step - 1, Modality.IMAGE) for index in range(runs)),
        frozenset(),
    )
    wide = torch.nn.Embedding.from_pretrained(torch.randn(50, hidden, generator=torch.Generator().manual_seed(1)))
    ids = torch.randint(0, 50, (plan.total,), generator=torch.Generator().manual_seed(2))
    buffer = torch.zeros(plan.total, hidden) if given else None
    out = embed_text(ids, plan, wide, buffer)
    text = [place for start, end in plan.text_runs for place in range(start, end)]
    assert torch.equal(out[text], wide(ids[text]))
    assert buffer is None or out.data_ptr() == buffer.data_ptr()


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
    media = make_media(seq, [make_item(index, [(place, place)]) for index, place in enumerate(places)])
    ids = torch.where(cache_ids_of(media) >= 1_000_000, 5, cache_ids_of(media)).clamp(max=VOCABULARY - 2)
    out = embed_mm_inputs(ids, ForwardBatch([media], [0], [seq]), make(), Recorder()).input_embeds.tolist()
    taken = {place: index for index, place in enumerate(places)}
    for place, row in enumerate(out):
        if place in taken:
            assert row == expected_rows(taken[place], 1)[0]
        else:
            assert row == [factor * value for value in text_row(int(ids[place]) + shift)]


def test_any_callable_serves_as_a_table() -> None:
    media = make_media(3, [make_item(1, [(1, 1)])])
    out = step(ForwardBatch([media], [0], [3]), lambda ids: ids[:, None].repeat(1, HIDDEN).double(), Recorder())
    assert out.input_embeds.dtype == torch.float64
    assert out.input_embeds.tolist() == [[3.0] * HIDDEN, expected_rows(1, 1)[0], [17.0] * HIDDEN]


def test_rows_take_the_type_of_the_text() -> None:
    table = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    media = make_media(3, [make_item(1, [(0, 1)])])
    out = step(ForwardBatch([media], [0], [3]), table, Recorder()).input_embeds
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
    out = step(ForwardBatch([make_media(3, [make_item(1, [(1, 1)])])], [0], [3]), table, Recorder())
    assert not out.input_embeds.requires_grad
    out.input_embeds.zero_()
    assert torch.equal(table.weight, before)


# ------------------------------------------------------------------ caches


def test_rows_come_from_the_cache_in_later_requests(table: torch.nn.Embedding) -> None:
    encoder, cache = Recorder(), EmbeddingCache(1 << 20)
    for _ in range(3):
        media = make_media(5, [make_item(1, [(1, 3)])])
        assert step(ForwardBatch([media], [0], [5]), table, encoder, cache).input_embeds.tolist() == slow_rows(media)
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
    media = make_media(5, [make_item(1, [(1, 3)])])
    batch = ForwardBatch([media], [0], [5])
    step(batch, table, encoder, cache)
    (key,) = list(cache.store._entries)  # type: ignore[attr-defined]
    cache.store.put(key, Encoded(wrong), 1)
    out = step(batch, table, encoder, cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(media)
    assert cache.stats().mismatches == 1
    assert encoder.calls == [[1], [1]]


def test_new_weights_make_old_rows_unreachable(table: torch.nn.Embedding) -> None:
    cache = EmbeddingCache(1 << 20)
    media = make_media(5, [make_item(1, [(1, 3)])])
    old, new = Recorder(), Recorder(lambda item: rows_of(item) + 1)
    old.bind(version="a", owner={})
    new.bind(version="b", owner={})
    first = step(ForwardBatch([media], [0], [5]), table, old, cache).input_embeds
    second = step(ForwardBatch([media], [0], [5]), table, new, cache).input_embeds
    assert torch.equal(second[1:4], first[1:4] + 1)


def test_a_kept_row_keeps_no_larger_buffer_and_is_not_the_encoders_own(table: torch.nn.Embedding) -> None:
    buffer = torch.zeros(1000, HIDDEN)
    cache = EmbeddingCache(1 << 20)
    encoder = Recorder(lambda item: buffer[: item.num_tokens])
    media = make_media(3, [make_item(1, [(0, 2)])])
    step(ForwardBatch([media], [0], [3]), table, encoder, cache)
    assert cache.stats().bytes == 3 * HIDDEN * 4
    buffer.fill_(9)
    assert step(ForwardBatch([media], [0], [3]), table, encoder, cache).input_embeds.tolist() == [[0.0] * HIDDEN] * 3


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
    media, encoder, parts = make_media(7, [item]), Recorder(), []
    for start in range(0, 7, size):
        parts += step(ForwardBatch([media], [start], [min(size, 7 - start)]), table, encoder).input_embeds.tolist()
    assert parts == slow_rows(media)
    assert encoder.calls == []
    assert media.held_embeddings == {}


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN + 1), torch.zeros(3, HIDDEN, dtype=torch.int64), "rows", [[1], []]],
    ids=["count", "width", "integers", "text", "ragged"],
)
def test_given_rows_that_do_not_fit_fail_their_item_alone(rows: Any, table: torch.nn.Embedding) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 2)], precomputed_embeddings=rows)
    item.set_identity(b"x" * 32)
    good = make_media(4, [make_item(1, [(1, 2)])])
    out = step(ForwardBatch([make_media(3, [item]), good], [0, 0], [3, 4]), table, Recorder())
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
    media = make_media(12, [make_item(1, [(0, 3)]), make_item(2, [(5, 6), (8, 10)])])
    encoder, cache = Recorder(stacked), EmbeddingCache(1 << 20) if cached else None
    for start in range(0, 12, size):
        extend = min(size, 12 - start)
        out = step(ForwardBatch([None, media], [0, start], [1, extend]), table, encoder, cache)
        wanted = [
            place
            for place in range(start, start + extend)
            if any(first <= place <= last for item in media.inputs.mm_items for first, last in item.offsets)
        ]
        if not wanted:
            assert out.deepstack is None
            continue
        assert out.deepstack is not None
        rows, where = out.deepstack
        main = torch.tensor([slow_rows(media)[place] for place in wanted])
        assert where.tolist() == [1 + place - start for place in wanted]
        assert torch.equal(rows, torch.stack([main + 100_000, main + 200_000]))
    assert sorted(seed for call in encoder.calls for seed in call) == [1, 2]


def test_deepstack_of_other_depth_fails_its_item_alone(table: torch.nn.Embedding) -> None:
    def encode(item: MultimodalDataItem) -> Encoded:
        rows = rows_of(item)
        return Encoded(rows, deepstack=torch.stack([rows] * (3 if item.feature[0] == 2 else 2)))

    media = [make_media(2, [make_item(seed, [(0, 1)])]) for seed in (1, 2, 3)]
    out = step(ForwardBatch(media, [0, 0, 0], [2, 2, 2]), table, Recorder(encode))
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
    media = [make_media(4, [make_item(seed, [(1, 2)])]) for seed in (1, 2, 3)]
    out = step(ForwardBatch(media, [0, 0, 0], [4, 4, 4]), table, encoder, **arguments)
    assert out.input_embeds[:4].tolist() == slow_rows(media[0])
    assert out.input_embeds[8:].tolist() == slow_rows(media[2])
    text = slow_rows(media[1])
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
    media = make_media(4, [make_item(1, [(0, 1)]), make_item(2, [(2, 3)])])
    encoder = {Modality.IMAGE: lambda items: result([rows_of(item) for item in items])}
    out = step(ForwardBatch([media], [0], [4]), table, encoder)
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
    media = make_media(16, [make_item(seed, [(2 * seed, 2 * seed + 1)]) for seed in range(8)])
    encoder = Small(most)
    out = step(ForwardBatch([media], [0], [16]), table, encoder)
    assert [len(call) for call in encoder.calls] == sizes
    assert out.failed == ()
    assert out.input_embeds.tolist() == slow_rows(media)


def test_one_item_that_never_fits_fails_alone(table: torch.nn.Embedding) -> None:
    out = three(table, Failing(torch.OutOfMemoryError("too much")))
    assert "out of device memory" in out.failed[0].error.message


@pytest.mark.case("5.5")
def test_a_released_feature_fails_its_item_alone_and_is_not_asked_for(table: torch.nn.Embedding) -> None:
    media = [make_media(2, [make_item(seed, [(0, 1)])]) for seed in (1, 2, 3)]
    media[1].inputs.release_features()
    encoder = Recorder()
    out = step(ForwardBatch(media, [0, 0, 0], [2, 2, 2]), table, encoder)
    assert encoder.calls == [[1, 3]]
    assert [(failure.request, failure.item) for failure in out.failed] == [(1, 0)]
    assert "released" in out.failed[0].error.message
    assert out.input_embeds[4:].tolist() == expected_rows(3, 2)


def test_released_features_are_not_missed_while_their_rows_are_cached(table: torch.nn.Embedding) -> None:
    media, cache = make_media(2, [make_item(1, [(0, 1)])]), EmbeddingCache(1 << 20)
    step(ForwardBatch([media], [0], [2]), table, Recorder(), cache)
    media.inputs.release_features()
    out = step(ForwardBatch([media], [0], [2]), table, Recorder(), cache)
    assert out.failed == ()
    assert out.input_embeds.tolist() == expected_rows(1, 2)


def test_an_item_without_identity_fails_alone(table: torch.nn.Embedding) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=np.array([9]))
    good = make_media(2, [make_item(1, [(0, 1)])])
    out = step(ForwardBatch([make_media(2, [item]), good], [0, 0], [2, 2]), table, Recorder())
    assert [(failure.request, failure.item) for failure in out.failed] == [(0, 0)]
    assert out.input_embeds[2:].tolist() == slow_rows(good)


def test_a_failed_item_stays_out_of_cache_and_held_embeddings(table: torch.nn.Embedding) -> None:
    cache = EmbeddingCache(1 << 20)
    media = make_media(4, [make_item(2, [(0, 3)])])
    out = step(ForwardBatch([media], [0], [2]), table, Failing(RuntimeError("x")), cache)
    assert len(out.failed) == 1
    assert media.held_embeddings == {}
    assert cache.stats().entries == 0
    good = step(ForwardBatch([media], [2], [2]), table, Recorder(), cache)
    assert good.input_embeds.tolist() == expected_rows(2, 4)[2:]


def test_a_keyboard_interrupt_is_nobodys_item(table: torch.nn.Embedding) -> None:
    with pytest.raises(KeyboardInterrupt):
        three(table, Failing(KeyboardInterrupt()))


def test_a_modality_without_encoder_fails_its_items_alone(table: torch.nn.Embedding) -> None:
    media = make_media(4, [make_item(1, [(0, 1)]), make_item(2, [(2, 3)], modality=Modality.AUDIO)])
    for encoder in (Recorder(), {Modality.IMAGE: lambda items: [rows_of(item) for item in items]}):
        out = step(ForwardBatch([media], [0], [4]), table, encoder)
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
    media = make_media(4, items)
    encoders = {modality: encode(modality.name) for modality in Modality}
    out = step(ForwardBatch([media], [0], [4]), table, encoders)
    assert sorted(calls) == [("AUDIO", [3]), ("IMAGE", [0, 2]), ("VIDEO", [1])]
    assert out.input_embeds.tolist() == slow_rows(media)


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

    media = make_media(3, [make_item(1, [(1, 1)])])
    ids = cache_ids_of(media)
    batch = ForwardBatch([media], [0], [3])
    for name, arguments in (("input_embeds", {}), ("inputs_embeds", {"embeds_argument": "inputs_embeds"})):
        received, embedded = general_mm_embed_routine(ids, batch, Model(), Recorder(), positions=7, **arguments)
        assert set(received) == {name, "positions"}
        assert received["positions"] == 7
        assert received[name].tolist() == slow_rows(media)
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
    media = make_media(10, [make_item(1, [(2, 7)])])
    encoder, parts = Recorder(), []
    for prefix, extend in plan:
        parts += step(ForwardBatch([media], [prefix], [extend]), table, encoder).input_embeds.tolist()
    assert parts == slow_rows(media)[plan[0][0] :]
    assert encoder.calls == [[1]]


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
        inputs = MultimodalInputs(mm_items=[item], input_ids=ids, padded_input_ids=ids, token_modalities=ids)
        step = embed_mm_inputs(
            torch.zeros(4, dtype=torch.int64),
            ForwardBatch([RequestMedia(inputs)], [0], [4]),
            table,
            {Modality.IMAGE: encode},
            cache,
        )
        found.append(step.input_embeds[0, 0].item())
    assert found == [1.0, 2.0, 1.0]


def test_rows_that_another_model_holds_do_not_fit_this_one() -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 3)], feature=np.array(0))
    item.set_identity(b"i" * 32)
    ids = np.zeros(4, dtype=np.int64)
    media = RequestMedia(MultimodalInputs(mm_items=[item], input_ids=ids, padded_input_ids=ids, token_modalities=ids))
    for hidden in (64, 32, 64):
        encoder = {Modality.IMAGE: lambda items, width=hidden: [torch.full((4, width), float(width)) for _ in items]}
        batch = ForwardBatch([media], [0], [2])
        step = embed_mm_inputs(torch.zeros(2, dtype=torch.int64), batch, torch.nn.Embedding(10, hidden), encoder)
        assert step.failed == ()
        assert (step.input_embeds == hidden).all()
