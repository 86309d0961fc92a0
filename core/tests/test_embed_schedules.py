"""Random requests under random schedules: the rows of every step are the reference rows, and nothing is encoded in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.identity import digest, frame
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import ITEM_KEY_BYTES, Modality, MultimodalDataItem, MultimodalInputFormat
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of

HIDDEN, VOCABULARY, LAYERS = 2, 30, 2
ROW_BYTES = HIDDEN * 4
TABLE = torch.nn.Embedding(VOCABULARY, HIDDEN)
with torch.no_grad():
    TABLE.weight.copy_(-torch.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN).float() - 1)
QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

Identity = tuple[Modality, bytes, int]


def rows_from(modality: int, seed: int, count: int) -> list[list[float]]:
    """Rows that depend on the item alone, and differ in every row of every item."""
    return [[10_000.0 * modality + 1000 * seed + 20 * count + row, 0.5 + row] for row in range(count)]


class Media(msgspec.Struct, frozen=True):
    """One item as it is drawn: what it shows, how it came, and (gap before, length) of each run."""

    modality: Modality
    seed: int
    form: MultimodalInputFormat
    runs: tuple[tuple[int, int], ...]


class Case(msgspec.Struct, frozen=True):
    """Requests (a text-only one has no media; tokens after the last item; whether runs are woven), and moves of a schedule."""

    requests: tuple[tuple[tuple[Media, ...], int, bool], ...]
    capacity: int | None
    moves: tuple[tuple[tuple[str, int, int], ...], ...]
    max_tokens: int | None
    deep: bool


MEDIA = st.builds(
    Media,
    st.sampled_from(Modality),
    st.integers(1, 3),
    st.sampled_from(MultimodalInputFormat),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=3).map(tuple),
)
MOVES = st.tuples(
    st.sampled_from(["extend", "extend", "extend", "wait", "absent", "retract"]), st.integers(0, 9), st.integers(0, 30)
)
CASES = st.builds(
    Case,
    st.lists(
        st.tuples(st.lists(MEDIA, max_size=4).map(tuple), st.integers(0, 3), st.booleans()), min_size=1, max_size=4
    ).map(tuple),
    st.sampled_from([None, 0, 3 * ROW_BYTES, 9 * ROW_BYTES, 1 << 20]),
    st.lists(st.lists(MOVES, min_size=4, max_size=4).map(tuple), min_size=1, max_size=8).map(tuple),
    st.sampled_from([None, None, 1, 6]),
    st.booleans(),
)


class Request:
    """A request, its reference rows token by token, and how far it is."""

    def __init__(self, media: Sequence[Media], tail: int, woven: bool) -> None:
        self.owner: dict[int, tuple[int, list[float]]] = {}
        runs = [(index, number) for index, media_input in enumerate(media) for number in range(len(media_input.runs))]
        if woven:  # first runs of all items, then second runs: an item's gap then holds another item
            runs.sort(key=lambda run: run[1])
        found: list[list[tuple[int, int]]] = [[] for _ in media]
        cursor, before = 0, -1
        for index, number in runs:
            gap, length = media[index].runs[number]
            start = cursor + (gap or int(index == before))
            found[index].append((start, start + length - 1))
            cursor, before = start + length, index
        items = []
        for index, (media_input, offsets) in enumerate(zip(media, found, strict=True)):
            places = [place for start, end in offsets for place in range(start, end + 1)]
            rows = rows_from(media_input.modality, media_input.seed, len(places))
            self.owner |= {place: (index, row) for place, row in zip(places, rows, strict=True)}
            given = media_input.form is MultimodalInputFormat.PRECOMPUTED_EMBEDDING
            item = MultimodalDataItem(
                modality=media_input.modality,
                offsets=offsets,
                format=media_input.form,
                feature=None if given else np.array([media_input.seed]),
                precomputed_embeddings=torch.tensor(rows) if given else None,
            )
            item.set_identity(bytes([media_input.modality, media_input.seed]) * 16)
            items.append(item)
        self.length = cursor + tail
        ids = (np.arange(self.length) * 7 + 3) % VOCABULARY
        self.inputs = MultimodalInputs(
            mm_items=items,
            input_ids=ids,
            padded_input_ids=pad_by_offsets(ids, items),
            token_modalities=token_modalities_of(items, len(ids)),
        )
        text = [[-(int(token) * HIDDEN + column) - 1.0 for column in range(HIDDEN)] for token in ids]
        self.reference = [self.owner[place][1] if place in self.owner else row for place, row in enumerate(text)]
        self.media = RequestMedia(self.inputs)
        self.ids = torch.from_numpy(self.inputs.padded_input_ids)
        self.got: list[list[float]] = []

    def met(self, prefix: int, extend: int) -> set[Identity]:
        """Keys of the items that need an encoder and have a token in the chunk; found by a scan of its tokens."""
        found = {self.owner[place][0] for place in range(prefix, prefix + extend) if place in self.owner}
        items = [self.inputs.mm_items[index] for index in found]
        return {key_of(item) for item in items if item.precomputed_embeddings is None}


def key_of(item: MultimodalDataItem) -> Identity:
    return (item.modality, item.identity or b"", sum(end - start + 1 for start, end in item.offsets))


def item_bytes(key: Identity) -> bytes:
    """What a cache knows the item by."""
    modality, identity, rows = key
    return digest(frame(["mm-plugin/item-embedding", 1, int(modality), identity, rows]))


class Encoders:
    """Callables by modality that note what they are asked for, a set of keys for each call."""

    def __init__(self, *, deep: bool) -> None:
        self.deep = deep
        self.calls: list[list[Identity]] = []

    def mapping(self) -> dict[Modality, Any]:
        return dict.fromkeys(Modality, self.encode)

    def encode(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        self.calls.append([key_of(item) for item in items])
        assert len({item.modality for item in items}) == 1
        return [self._one(item) for item in items]

    def _one(self, item: MultimodalDataItem) -> Any:
        rows = torch.tensor(rows_from(item.modality, int(item.feature[0]), key_of(item)[2]))
        if not self.deep:
            return rows
        return Encoded(rows, deepstack=torch.stack([rows + 100_000 * (layer + 1) for layer in range(LAYERS)]))


def cached_keys(cache: EmbeddingCache | None) -> set[bytes]:
    """What the cache has, or remembers because a request of another step holds it."""
    if cache is None:
        return set()
    known = [*cache.store._entries, *(key for key, held in cache._held._references.items() if held() is not None)]  # type: ignore[attr-defined]
    return {key[:ITEM_KEY_BYTES] for key in known}


def take_step(
    requests: Sequence[Request], chunk: Sequence[tuple[int, int]], encoders: Encoders, cache: Any, case: Case
) -> None:
    """One step over these requests, with all that must hold of it."""
    batch = ForwardBatch(
        [request.media if request.inputs.mm_items else None for request in requests],
        [prefix for prefix, _ in chunk],
        [extend for _, extend in chunk],
    )
    ids = [request.ids[start : start + extend] for request, (start, extend) in zip(requests, chunk, strict=True)]
    there = cached_keys(cache) | {key[:ITEM_KEY_BYTES] for request in requests for key in request.media.held_embeddings}
    wanted = set().union(*(request.met(*part) for request, part in zip(requests, chunk, strict=True)))
    calls = len(encoders.calls)
    out = embed_mm_inputs(torch.cat(ids), batch, TABLE, encoders.mapping(), cache, max_encode_tokens=case.max_tokens)
    assert out.failed == ()
    encoded = [key for call in encoders.calls[calls:] for key in call]
    # Exactly what the chunk meets and nobody has, each once: so nothing in vain, and nothing twice.
    assert sorted(encoded) == sorted(key for key in wanted if item_bytes(key) not in there)
    if case.max_tokens is None:
        assert len(encoders.calls) - calls == len({key[0] for key in encoded})
    else:
        assert all(sum(key[2] for key in call) <= case.max_tokens or len(call) == 1 for call in encoders.calls[calls:])
    rows = out.input_embeds.tolist()
    deep: dict[int, list[list[float]]] = {}
    flat = 0
    for request, (prefix, extend) in zip(requests, chunk, strict=True):
        assert rows[flat : flat + extend] == request.reference[prefix : prefix + extend]
        request.got[prefix:] = rows[flat : flat + extend]
        for place in range(prefix, prefix + extend):
            if case.deep and place in request.owner:
                item, row = request.owner[place]
                if request.inputs.mm_items[item].precomputed_embeddings is None:
                    layers = [[value + 100_000 * (layer + 1) for value in row] for layer in range(LAYERS)]
                    deep[flat + place - prefix] = layers
        flat += extend
    if deep:
        assert out.deepstack is not None
        stacked, where = out.deepstack
        assert where.tolist() == sorted(deep)
        assert stacked.transpose(0, 1).tolist() == [deep[place] for place in sorted(deep)]
    else:
        assert out.deepstack is None
    if cache is not None:
        assert cache.stats().pinned == 0
        assert cache.stats().bytes <= (case.capacity or 0)


def run(case: Case) -> None:
    requests = [Request(*request) for request in case.requests]
    cache = None if case.capacity is None else EmbeddingCache(case.capacity)
    encoders = Encoders(deep=case.deep)
    for moves in case.moves:
        chosen, chunk = [], []
        for request, (move, extend, back) in zip(requests, moves, strict=False):
            if move == "absent":
                continue
            if move == "retract":  # to any earlier prefix, also inside an item
                del request.got[back % (len(request.got) + 1) :]
            done = len(request.got)
            chosen.append(request)
            chunk.append((done, 0 if move == "wait" else min(extend, request.length - done)))
        if chosen:
            take_step(chosen, chunk, encoders, cache, case)
    take_step(
        requests, [(len(request.got), request.length - len(request.got)) for request in requests], encoders, cache, case
    )
    for request in requests:
        assert request.got == request.reference
        assert request.media.held_embeddings == {}


@pytest.mark.case("5.9")
@pytest.mark.case("5.10")
@pytest.mark.case("7.3")
@settings(max_examples=600, **QUICK)
@given(CASES)
def test_every_schedule_gives_the_reference_rows_and_encodes_nothing_in_vain(case: Case) -> None:
    run(case)


@pytest.mark.slow
@pytest.mark.case("5.9")
@settings(max_examples=20_000, **QUICK)
@given(CASES)
def test_twenty_thousand_schedules_give_the_reference_rows(case: Case) -> None:
    run(case)


@pytest.mark.case("5.9")
@settings(max_examples=200, **QUICK)
@given(
    st.lists(MEDIA, min_size=1, max_size=3),
    st.lists(st.integers(0, 4), max_size=20),
    st.sampled_from([None, 0, 5 * ROW_BYTES]),
    st.booleans(),
)
def test_chunks_of_one_request_alone_encode_each_item_once_whatever_the_cache(
    media: list[Media], extends: list[int], capacity: int | None, woven: bool
) -> None:
    """Items of other seeds, so that none helps another; each is held from its first row to its last."""
    distinct = [msgspec.structs.replace(media_input, seed=index + 1) for index, media_input in enumerate(media)]
    request, encoders = Request(distinct, 2, woven), Encoders(deep=False)
    cache = None if capacity is None else EmbeddingCache(capacity)
    case = Case(requests=(), capacity=capacity, moves=(), max_tokens=None, deep=False)
    for extend in [*extends, request.length]:
        done = len(request.got)
        take_step([request], [(done, min(extend, request.length - done))], encoders, cache, case)
    keys = [key for call in encoders.calls for key in call]
    assert sorted(keys) == sorted(request.met(0, request.length))
