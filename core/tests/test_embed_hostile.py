"""Requests that die, encoders that misbehave, stores that lie: each harms itself alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin.cache import EmbeddingCache, MemoryStore, Stats, Store
from mm_plugin.embed import embed_mm_inputs, general_mm_embed_routine
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.errors import MMPluginError, SpanError, UsageError
from mm_plugin.events import Observers
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.positions import batch_positions, slice_positions

HIDDEN = 4


def item(name: int, start: int = 1, rows: int = 3, feature: Any = "own") -> MultimodalDataItem:
    feature = np.array(name) if isinstance(feature, str) else feature
    made = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(start, start + rows - 1)], feature=feature)
    made.set_identity(bytes([name]) * 32)
    return made


def request(*items: MultimodalDataItem, seq: int = 8) -> RequestMedia:
    modalities = np.zeros(seq, dtype=np.int64)
    for entry in items:
        for start, end in entry.offsets:
            modalities[start : end + 1] = 1
    ids = np.zeros(seq, np.int64)
    inputs = MultimodalInputs(
        mm_items=list(items), input_ids=ids, padded_input_ids=ids.copy(), token_modalities=modalities
    )
    return RequestMedia(inputs)


def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
    return [torch.full((entry.num_tokens, HIDDEN), float(entry.feature)) for entry in items]


def step(requests: Sequence[RequestMedia], encoder: Any = None, cache: Any = None, **options: Any) -> Any:
    encoder = {Modality.IMAGE: encode} if encoder is None else encoder
    lengths = [len(media.inputs.padded_input_ids) for media in requests]
    batch = ForwardBatch(list(requests), [0] * len(requests), lengths)
    table = torch.nn.Embedding.from_pretrained(torch.zeros(10, HIDDEN))
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    return embed_mm_inputs(ids, batch, table, encoder, cache, **options)


@pytest.mark.case("2.2")
def test_a_request_whose_feature_is_gone_takes_no_other_with_it() -> None:
    out = step([request(item(5, feature=None)), request(item(5))])
    assert out.failed == ()
    assert (out.input_embeds[9:12] == 5).all()


@pytest.mark.parametrize("harm", ["reverse", "clear", "pop", "append"])
def test_an_encoder_may_do_what_it_likes_with_its_list(harm: str) -> None:
    def harming(items: list[MultimodalDataItem]) -> list[torch.Tensor]:
        rows = encode(items)
        if harm == "append":
            items.append(items[0])
        else:
            getattr(items, harm)()
        return rows

    out = step([request(item(1)), request(item(2))], {Modality.IMAGE: harming})
    assert out.failed == ()
    assert (out.input_embeds[1:4] == 1).all()
    assert (out.input_embeds[9:12] == 2).all()


class Big:
    pass


def test_memory_of_a_failed_call_is_free_before_the_next_and_after_the_step() -> None:
    alive: list[weakref.ref[Big]] = []
    seen: list[int] = []

    def hungry(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        gc.collect()
        seen.append(sum(reference() is not None for reference in alive))
        activations = Big()
        alive.append(weakref.ref(activations))
        if len(items) > 1:
            raise torch.OutOfMemoryError("full")
        if float(items[0].feature) == 2:
            raise RuntimeError("bad item")
        return encode(items)

    out = step([request(item(1)), request(item(2))], {Modality.IMAGE: hungry})
    assert [failed.request for failed in out.failed] == [1]
    gc.collect()
    assert seen == [0, 0, 0]
    assert [reference() for reference in alive] == [None] * 3


class Odd(MMPluginError):
    def __init__(self) -> None:  # forgets to call the class above
        pass


@pytest.mark.parametrize("error", [Odd(), asyncio.CancelledError(), SystemExit(3), StopIteration(), RuntimeError("no")])
def test_whatever_an_encoder_raises_is_reported_of_its_items_alone(error: BaseException) -> None:
    def failing(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        if any(float(entry.feature) == 2 for entry in items):
            raise error
        return encode(items)

    heard: list[Any] = []
    out = step([request(item(1)), request(item(2))], {Modality.IMAGE: failing}, observers=Observers([heard.append]))
    assert [(failed.request, failed.item) for failed in out.failed] == [(1, 0)]
    assert isinstance(out.failed[0].error.message, str)
    assert (out.input_embeds[1:4] == 1).all()


class Lying(Store):
    """A store whose entries are not what was put."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def get(self, key: Any) -> Any:
        return self.entry

    def put(self, key: Any, value: Any, num_bytes: int) -> bool:
        return True

    def delete(self, key: Any) -> None:
        pass

    def pin(self, key: Any) -> bool:
        return False

    def unpin(self, key: Any) -> None:
        pass

    def clear(self) -> None:
        pass

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None:
        pass


FACTS = (3, HIDDEN, torch.float32, torch.device("cpu"))


@pytest.mark.case("3.4")
@pytest.mark.parametrize(
    "entry",
    [
        Encoded(torch.ones(2, HIDDEN)),
        Encoded(torch.ones(3, HIDDEN, dtype=torch.float64)),
        Encoded("rows"),
        (Encoded(torch.ones(2, HIDDEN)), *FACTS),
        (Encoded("rows"), *FACTS),
        ("rows", *FACTS),
        ("rows", np.array([1, 2]), 1, 2, 3),
        (),
        "rows",
        7,
    ],
    ids=range(10),
)
def test_a_store_that_lies_is_a_miss(entry: Any) -> None:
    cache = EmbeddingCache(100, store=Lying(entry))
    out = step([request(item(5))], cache=cache)
    assert out.failed == ()
    assert (out.input_embeds[1:4] == 5).all()
    assert cache.stats().mismatches == 1


def test_rows_of_a_plugins_store_that_fit_are_taken() -> None:
    cache = EmbeddingCache(100, store=Lying(Encoded(torch.full((3, HIDDEN), 9.0))))
    assert (step([request(item(5))], cache=cache).input_embeds[1:4] == 9).all()


class Collective(Encoder, EncodesImages):
    collective = True

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Encoder:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor]:
        return encode(items)


def test_a_collective_encoder_needs_a_way_to_agree() -> None:
    with pytest.raises(UsageError, match="agree"):
        step([request(item(1))], Collective())
    assert step([request(item(1))], Collective(), agree=lambda outcome: outcome).failed == ()


def test_ranks_that_cannot_agree_fail_the_items() -> None:
    def broken(outcome: int) -> int:
        raise ConnectionError("a rank is gone")

    out = step([request(item(1)), request(item(2))], Collective(), agree=broken)
    assert [failed.request for failed in out.failed] == [0, 1]


def test_a_table_that_gives_other_rows_than_ids_is_the_servers_fault() -> None:
    batch = ForwardBatch([None], [0], [6])
    with pytest.raises(UsageError, match="input_embedding: expected"):
        embed_mm_inputs(torch.zeros(6, dtype=torch.int64), batch, lambda ids: torch.zeros(1, HIDDEN), {})


class Model:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(10, HIDDEN)

    def __call__(self, **given: Any) -> str:
        self.given = given
        return "hidden states"


def test_the_routine_hands_over_all_that_a_model_asks_for() -> None:
    model = Model()
    media = request(item(1), seq=6)
    batch = ForwardBatch([media, None], [2, 0], [6, 2])

    def deep(items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        return [Encoded(rows, deepstack=torch.stack([rows, rows * 2])) for rows in encode(items)]

    ids = torch.zeros(8, dtype=torch.int64)
    returned, embedded = general_mm_embed_routine(
        ids,
        batch,
        model,
        {Modality.IMAGE: deep},
        embeds_argument="embeds",
        deepstack_argument="deep",
        token_modalities_argument="modalities",
        cos=3,
    )
    assert returned == "hidden states"
    assert set(model.given) == {"embeds", "deep", "modalities", "cos"}
    assert model.given["embeds"] is embedded.input_embeds
    assert model.given["deep"][1].tolist() == [0, 1]  # the image's last two rows, at the chunk's first two places
    assert model.given["modalities"].tolist() == [
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
    ]  # past the prompt, and in a request of text, 0
    with pytest.raises(UsageError, match="deepstack_argument: "):
        general_mm_embed_routine(ids, batch, model, {Modality.IMAGE: deep})


def test_a_request_lets_go_of_rows_that_a_later_step_passes_by() -> None:
    media = request(item(1), seq=8)
    table = torch.nn.Embedding(10, HIDDEN)
    for prefix, extend, held in ((0, 2, 1), (6, 1, 0)):
        batch = ForwardBatch([media], [prefix], [extend])
        embed_mm_inputs(torch.zeros(extend, dtype=torch.int64), batch, table, {Modality.IMAGE: encode})
        assert len(media.held_embeddings) == held


def test_a_flag_of_finite_rows_sees_deepstack_rows_too() -> None:
    def deep(items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        return [Encoded(rows, deepstack=torch.full((1, *rows.shape), float("nan"))) for rows in encode(items)]

    assert not step([request(item(1))], {Modality.IMAGE: deep}, check_finite=True).finite


def test_deepstack_rows_of_other_layers_are_not_cached() -> None:
    def uneven(items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        return [
            Encoded(rows, deepstack=torch.zeros(int(entry.feature), *rows.shape))
            for rows, entry in zip(encode(items), items, strict=True)
        ]

    cache = EmbeddingCache(1 << 20)
    out = step([request(item(1)), request(item(2))], {Modality.IMAGE: uneven}, cache)
    assert [failed.request for failed in out.failed] == [1]
    assert isinstance(cache.store, MemoryStore)
    assert cache.stats().entries == 1


def test_positions_are_not_guessed() -> None:
    table = np.zeros((3, 4), dtype=np.int64)
    with pytest.raises(SpanError, match="delta"):
        batch_positions([table], [None], [0], [2])
    for prefix, extend in ((-1, 2), (0, -2)):
        with pytest.raises(SpanError):
            slice_positions(table, 0, prefix, extend)


def test_rows_that_a_request_holds_are_found_by_one_in_another_step() -> None:
    calls: list[int] = []

    def counting(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        calls.append(len(items))
        return encode(items)

    table, cache = torch.nn.Embedding(10, HIDDEN), EmbeddingCache(1)  # too small for any rows
    first, second = request(item(1)), request(item(1))
    for media, extend in ((first, 2), (second, 8), (first, 8)):
        embed_mm_inputs(
            torch.zeros(extend, dtype=torch.int64),
            ForwardBatch([media], [0], [extend]),
            table,
            {Modality.IMAGE: counting},
            cache,
        )
    assert calls == [1]
    gc.collect()
    step([request(item(1))], {Modality.IMAGE: counting}, cache)
    assert calls == [1, 1]  # nobody held them any more
