"""A step over requests of which one is hostile: it fails alone, and nothing of it is copied before it is counted."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin.cache import EmbeddingCache, MemoryStore
from mm_plugin.cache.keys import embedding_key, encoder_key
from mm_plugin.embed import embed_mm_inputs, general_mm_embed_routine, plan_step
from mm_plugin.errors import EncoderError, UsageError
from mm_plugin.events import ItemFailed, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem, item_key, span_fault

HIDDEN, SEQ = 3, 8
TABLE = torch.nn.Embedding.from_pretrained(torch.full((9, HIDDEN), -1.0))
Change = Callable[[MultimodalInputs], Any]


def make_inputs(seed: int) -> MultimodalInputs:
    """Eight ids with two images, at 1..2 and 5..6."""
    items = []
    for index, span in enumerate([(1, 2), (5, 6)]):
        value = 10 * seed + index
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[span], feature=np.array([value]))
        item.set_identity(value.to_bytes(32, "big"))
        items.append(item)
    ids = np.zeros(SEQ, np.int64)
    return MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids.copy(), token_modalities=ids.copy())


def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
    return [torch.full((item.num_tokens, HIDDEN), float(item.feature[0])) for item in items]


def expected(seed: int) -> list[float]:
    first, second = 10.0 * seed, 10.0 * seed + 1
    return [-1, first, first, -1, -1, second, second, -1]


def run(
    requests: Sequence[Any], encoder: Any = None, cache: Any = None, prefix: int = 0, extend: int = SEQ, **options: Any
) -> Any:
    batch = ForwardBatch(requests, [prefix] * len(requests), [extend] * len(requests))
    ids = torch.zeros(extend * len(requests), dtype=torch.int64)
    found = embed_mm_inputs(ids, batch, TABLE, encoder or {Modality.IMAGE: encode}, cache, **options)
    if cache is not None:
        assert cache.stats().pinned == 0
    return found


def columns(out: Any, request: int, extend: int = SEQ) -> list[float]:
    rows = out.input_embeds[request * extend : (request + 1) * extend]
    assert bool((rows == rows[:, :1]).all())
    return rows[:, 0].tolist()  # type: ignore[no-any-return]


def first(**fields: Any) -> Change:
    def change(inputs: MultimodalInputs) -> None:
        for name, value in fields.items():
            setattr(inputs.mm_items[0], name, value)

    return change


def whole(**fields: Any) -> Change:
    def change(inputs: MultimodalInputs) -> None:
        for name, value in fields.items():
            setattr(inputs, name, value)

    return change


# ------------------------------------------------------------------ the request fails as a whole: no row of it has a place

SPANS: dict[str, Any] = {
    "spans of two items that overlap": [(5, 5)],
    "spans of two items that are one": [(5, 6)],
    "a span around another": [(1, 7)],
    "spans of one item that overlap": [(1, 3), (3, 4)],
    "spans that descend": [(3, 4), (1, 2)],
    "a span that ends before it begins": [(2, 1)],
    "a span before the prompt": [(-1, 1)],
    "a span after the prompt": [(7, 8)],
    "a span far after the prompt": [(7, 1 << 62)],
    "floats": [(1.0, 2.0)],
    "one float": [(1, 2.5)],
    "not a number": [(float("nan"), 2)],
    "infinity": [(1, float("inf"))],
    "booleans": [(True, True)],
    "texts": [("1", "2")],
    "None": None,
    "a pair with None": [(1, None)],
    "a triple": [(1, 2, 3)],
    "a single": [(1,)],
    "numbers": [1, 2],
    "an array of spans": np.array([[1, 2]]),
    "an array of numbers": np.array([1, 2]),
    "a tensor": torch.tensor([[1, 2]]),
    "spans that are arrays": [np.array([1, 2])],
    "a pair of arrays": [(np.array([1]), np.array([2]))],
    "a pair of tensors": [(torch.tensor(1), torch.tensor(2))],
    "a text": "12",
    "a mapping": {1: 2},
    "a set": {(1, 2)},
    "a number": 5,
}
INPUTS: dict[str, Change] = {
    **{f"offsets: {name}": first(offsets=value) for name, value in SPANS.items()},
    "no items": whole(mm_items=None),
    "items that are a number": whole(mm_items=5),
    "an item that is None": whole(mm_items=[None]),
    "an item that is a mapping": whole(mm_items=[{"offsets": [(1, 2)]}]),
    "a modality that is a number": first(modality=1),
    "a modality that is a text": first(modality="image"),
    "no ids": whole(input_ids=None),
    "ids that are a list": whole(input_ids=[0] * SEQ),
    "ids of floats": whole(input_ids=np.zeros(SEQ)),
    "ids of two dimensions": whole(input_ids=np.zeros((2, 4), np.int64)),
    "too few ids": whole(input_ids=np.zeros(6, np.int64)),
    "ids of objects": whole(input_ids=np.array([None] * SEQ)),
    "no token modalities": whole(token_modalities=None),
    "token modalities of floats": whole(token_modalities=np.zeros(SEQ)),
}


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS)
def test_a_request_with_hostile_inputs_fails_alone(change: Change, where: int) -> None:
    requests = [RequestMedia(make_inputs(seed)) for seed in (1, 2, 3)]
    change(requests[where].inputs)
    heard: list[Any] = []
    out = run(requests, cache=EmbeddingCache(1 << 16), observers=Observers([heard.append]))
    for request, seed in enumerate((1, 2, 3)):
        assert columns(out, request) == ([0] * SEQ if request == where else expected(seed))
    assert [(entry.request, entry.item, type(entry.error)) for entry in out.failed] == [(where, None, UsageError)]
    assert [(event.request, event.item) for event in heard if isinstance(event, ItemFailed)] == [(where, None)]
    message = out.failed[0].error.message
    assert "expected" in message
    assert "got" in message


@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS)
def test_the_plan_and_the_language_model_go_on_without_it(change: Change) -> None:
    requests = [RequestMedia(make_inputs(seed)) for seed in (1, 2)]
    change(requests[0].inputs)
    batch = ForwardBatch(requests, [0, 0], [SEQ, SEQ])
    assert {piece.request for piece in plan_step(batch).pieces} == {1}

    class Model:
        def get_input_embeddings(self) -> Any:
            return TABLE

        def __call__(self, **given: Any) -> Any:
            return given

    given, out = general_mm_embed_routine(
        torch.zeros(2 * SEQ, dtype=torch.int64),
        batch,
        Model(),
        {Modality.IMAGE: encode},
        token_modalities_argument="modalities",
    )
    assert len(given["modalities"]) == 2 * SEQ
    assert [entry.request for entry in out.failed] == [0]


@pytest.mark.parametrize("extend", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "name", ["spans of two items that overlap", "floats", "an array of spans", "a span after the prompt"]
)
def test_a_hostile_request_fails_in_every_chunk_and_others_in_none(name: str, extend: int) -> None:
    requests = [RequestMedia(make_inputs(seed)) for seed in (1, 2)]
    requests[1].inputs.mm_items[0].offsets = SPANS[name]
    rows: list[float] = []
    for prefix in range(0, SEQ, extend):
        step = min(extend, SEQ - prefix)
        out = run(requests, prefix=prefix, extend=step)
        assert [(entry.request, entry.item) for entry in out.failed] == [(1, None)]
        rows += columns(out, 0, step)
    assert rows == expected(1)


def test_integers_of_numpy_and_lists_are_spans() -> None:
    media = RequestMedia(make_inputs(1))
    media.inputs.mm_items[0].offsets = [[np.int64(1), np.int32(2)]]  # type: ignore[list-item]
    out = run([media])
    assert out.failed == ()
    assert columns(out, 0) == expected(1)
    assert span_fault(media.inputs.mm_items[0].offsets) is None


# ------------------------------------------------------------------ one item fails

SPARSE = torch.eye(2, 3).to_sparse()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch will drop quantized tensors, and says so
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.qint8)
    COMPRESSED = torch.ones(2, 3).to_sparse_csr()
ITEMS: dict[str, Change] = {
    "an identity that is a text": first(identity="x" * 32),
    "an identity that is short": first(identity=b"short"),
    "an identity that is a bytearray": first(identity=bytearray(32)),
    "an identity that is a list": first(identity=[0] * 32),
    "an identity that is a number": first(identity=5),
    "an identity that is an array": first(identity=np.zeros(32, np.uint8)),
    "a hash that is a float": first(identity=None, hash=1.5),
    "a hash that is a text": first(identity=None, hash="1"),
    "a hash below 0": first(identity=None, hash=-1),
    "a hash of 65 bits": first(identity=None, hash=1 << 64),
    "a hash that is a boolean": first(identity=None, hash=True),
    "neither identity nor hash": first(identity=None, hash=None),
    "no sentinels": first(pad_values=None),
    "fields that are None": first(model_specific_data=None),
    "fields that are a list": first(model_specific_data=[1]),
    "fields named as the item's own": first(model_specific_data={"feature": 1}),
    "a feature that is nothing": first(feature=None),
    "a feature of another kind": first(feature="feature"),
    "embeddings that are sparse": first(feature=None, precomputed_embeddings=SPARSE),
    "embeddings that are quantized": first(feature=None, precomputed_embeddings=QUANTIZED),
    "embeddings without memory": first(feature=None, precomputed_embeddings=torch.empty(2, 3, device="meta")),
    "embeddings of integers": first(feature=None, precomputed_embeddings=np.ones((2, 3), np.int64)),
    "embeddings of objects": first(feature=None, precomputed_embeddings=np.array([[None] * 3] * 2)),
    "embeddings of complex numbers": first(feature=None, precomputed_embeddings=np.ones((2, 3), np.complex64)),
    "a list of embeddings": first(feature=None, precomputed_embeddings=[[1.0] * 3] * 2),
    "too few embeddings": first(feature=None, precomputed_embeddings=np.ones((1, 3), np.float32)),
    "too many embeddings": first(feature=None, precomputed_embeddings=np.ones((3, 3), np.float32)),
    "embeddings of another width": first(feature=None, precomputed_embeddings=np.ones((2, 4), np.float32)),
    "embeddings of three dimensions": first(feature=None, precomputed_embeddings=np.ones((1, 2, 3), np.float32)),
    "a text for embeddings": first(feature=None, precomputed_embeddings="x"),
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("change", ITEMS.values(), ids=ITEMS)
def test_a_hostile_item_fails_alone(change: Change, where: int) -> None:
    requests = [RequestMedia(make_inputs(seed)) for seed in (1, 2)]
    change(requests[where].inputs)
    out = run(requests, cache=EmbeddingCache(1 << 16))
    rows = expected(where + 1)
    assert columns(out, where) == [-1, 0, 0, *rows[3:]]
    assert columns(out, 1 - where) == expected(2 - where)
    assert [(entry.request, entry.item) for entry in out.failed] == [(where, 0)]
    assert isinstance(out.failed[0].error, UsageError | EncoderError)


def test_two_items_without_a_name_do_not_get_each_others_embeddings() -> None:
    requests = [RequestMedia(make_inputs(seed)) for seed in (1, 2)]
    for media in requests:
        media.inputs.mm_items[0].identity = media.inputs.mm_items[0].hash = None
    out = run(requests, cache=EmbeddingCache(1 << 16))
    assert [(entry.request, entry.item) for entry in out.failed] == [(0, 0), (1, 0)]
    assert all("no identity is set" in entry.error.message for entry in out.failed)


@pytest.mark.parametrize(
    "make", [lambda rows: np.broadcast_to(np.float32(1), rows), lambda rows: torch.ones(1).expand(rows)]
)
def test_embeddings_are_counted_before_they_are_copied(make: Any) -> None:
    """A view of one number that stands for a terabyte."""
    media = RequestMedia(make_inputs(1))
    first(feature=None, precomputed_embeddings=make((1 << 38, HIDDEN)))(media.inputs)
    tracemalloc.start()
    out = run([media])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert "expected [2, 3] floating point for the item's span, got [274877906944, 3]" in out.failed[0].error.message


def test_a_view_of_the_right_shape_is_written() -> None:
    media = RequestMedia(make_inputs(1))
    first(feature=None, precomputed_embeddings=np.broadcast_to(np.float32(7), (2, HIDDEN)))(media.inputs)
    assert columns(run([media]), 0)[:3] == [-1, 7, 7]


# ------------------------------------------------------------------ what an encoder returns

RESULTS: dict[str, Any] = {
    "sparse": SPARSE,
    "sparse rows": COMPRESSED,
    "quantized": QUANTIZED,
    "without memory": torch.empty(2, 3, device="meta"),
    "sparse deepstack": Encoded(torch.ones(2, 3), deepstack=torch.ones(1, 2, 3).to_sparse()),
    "deepstack of integers": Encoded(torch.ones(2, 3), deepstack=torch.ones(1, 2, 3, dtype=torch.int64)),
    "deepstack of two dimensions": Encoded(torch.ones(2, 3), deepstack=torch.ones(2, 3)),
    "sparse kept": Encoded(torch.ones(2, 3), kept=torch.ones(2, dtype=torch.int64).to_sparse()),
    "an array": np.ones((2, 3), np.float32),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_that_is_no_matrix_of_embeddings_fails_its_item(result: Any) -> None:
    def odd(items: Sequence[MultimodalDataItem]) -> list[Any]:
        return [result if item.feature[0] == 10 else rows for item, rows in zip(items, encode(items), strict=True)]

    out = run([RequestMedia(make_inputs(1)), RequestMedia(make_inputs(2))], {Modality.IMAGE: odd})
    assert [(entry.request, entry.item) for entry in out.failed] == [(0, 0)]
    assert columns(out, 1) == expected(2)


# ------------------------------------------------------------------ what a request holds

KEY = embedding_key(item_key(make_inputs(1).mm_items[0]), encoder_key("", "torch.float32"))
HELD: dict[str, Any] = {
    "None": None,
    "a tensor": torch.ones(2, HIDDEN),
    "a text": "held",
    "too few": Encoded(torch.full((1, HIDDEN), 99.0)),
    "too many": Encoded(torch.full((3, HIDDEN), 99.0)),
    "of another width": Encoded(torch.full((2, HIDDEN + 1), 99.0)),
    "of another dtype": Encoded(torch.full((2, HIDDEN), 99.0, dtype=torch.float64)),
    "on another device": Encoded(torch.empty(2, HIDDEN, device="meta")),
    "sparse": Encoded(torch.ones(2, HIDDEN).to_sparse()),
    "of one dimension": Encoded(torch.ones(2)),
    "an array": Encoded(np.ones((2, HIDDEN), np.float32)),
    "nothing": Encoded(None),
    "with deepstack of another length": Encoded(torch.full((2, HIDDEN), 99.0), deepstack=torch.ones(1, 3, HIDDEN)),
    "with deepstack that is a text": Encoded(torch.full((2, HIDDEN), 99.0), deepstack="deep"),
    "with kept of another length": Encoded(torch.full((2, HIDDEN), 99.0), kept=torch.zeros(3, dtype=torch.int64)),
    "with kept of floats": Encoded(torch.full((2, HIDDEN), 99.0), kept=torch.zeros(2)),
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_foreign_or_short_held_embeddings_are_not_used(held: Any, cached: bool) -> None:
    requests = [RequestMedia(make_inputs(1)) for _ in range(3)]
    requests[1].hold({KEY: held}, {})
    out = run(requests, cache=EmbeddingCache(1 << 16) if cached else None)
    assert out.failed == ()
    assert [columns(out, request) for request in range(3)] == [expected(1)] * 3


def test_what_a_request_holds_comes_before_what_another_holds() -> None:
    requests = [RequestMedia(make_inputs(1)) for _ in range(3)]
    for value, media in zip((70.0, 80.0), requests, strict=False):
        media.hold({KEY: Encoded(torch.full((2, HIDDEN), value))}, {})
    out = run(requests)
    assert [columns(out, request)[1] for request in range(3)] == [70, 80, 70]


def test_a_store_of_a_plugin_that_returns_other_parts_is_not_believed() -> None:
    class Odd(MemoryStore):
        def get(self, key: bytes) -> Any:
            return Encoded(torch.full((2, HIDDEN), 99.0), deepstack=torch.ones(1, 5, HIDDEN))

    out = run([RequestMedia(make_inputs(1))], cache=EmbeddingCache(0, store=Odd(1 << 16)))
    assert out.failed == ()
    assert columns(out, 0) == expected(1)


# ------------------------------------------------------------------ the batch itself is the scheduler's


@pytest.mark.parametrize("entry", [5, "media", object()])
def test_a_batch_that_is_none_is_the_servers_fault(entry: Any) -> None:
    with pytest.raises(UsageError, match=r"batch.mm_inputs\[0\]"):
        run([entry])
