"""Items encoded apart from any step: each once, found by steps, failing alone. And rows in a buffer, and encoders as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin import (
    Encoded,
    Encoder,
    EncodesImages,
    ForwardBatch,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    Replacement,
    RequestMedia,
    Size,
    embed_mm_inputs,
    encode_items,
)
from mm_plugin.cache import EmbeddingCache
from mm_plugin.encoder import EncoderModule
from mm_plugin.errors import EncoderError, MMPluginError, UsageError
from mm_plugin.events import EncodeBatch, Event, Observers
from mm_plugin.media import MediaValue
from mm_plugin.tasks import ModelRef, Prepared, PrepareTask

HIDDEN = 3
TABLE = torch.nn.Embedding.from_pretrained(torch.full((8, HIDDEN), -1.0))
FIT = {"dtype": torch.float32, "device": "cpu"}


def item(seed: int, count: int = 2, *, start: int = 0, modality: Modality = Modality.IMAGE) -> MultimodalDataItem:
    made = MultimodalDataItem(modality=modality, offsets=[(start, start + count - 1)], feature=np.array([seed]))
    made.set_identity(seed.to_bytes(32, "big"))
    return made


class Recording(Encoder, EncodesImages):
    """Embeddings that say the seed; notes the seeds of each call."""

    def __init__(self, most: int = 100, fails: Sequence[int] = (), layers: int = 0) -> None:
        self.calls: list[list[int]] = []
        self.most, self.fails, self.layers = most, fails, layers

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Recording:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        seeds = [int(one.feature[0]) for one in items]
        self.calls.append(seeds)
        if len(items) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        if set(seeds) & set(self.fails):
            raise ValueError("broken")
        rows = [torch.full((one.num_tokens, HIDDEN), float(seed)) for one, seed in zip(items, seeds, strict=True)]
        return [Encoded(each, deepstack=each[None].repeat(self.layers, 1, 1)) for each in rows] if self.layers else rows


def seeds_of(found: Sequence[Encoded | MMPluginError]) -> list[Any]:
    return [float(one.embeddings[0, 0]) if isinstance(one, Encoded) else type(one) for one in found]


def embed(items: Sequence[MultimodalDataItem], encoder: Any, cache: Any = None, **options: Any) -> Any:
    length = max((one.offsets[-1][1] + 1 for one in items), default=0) + 1
    ids = np.zeros(length, np.int64)
    inputs = MultimodalInputs(mm_items=list(items), input_ids=ids, padded_input_ids=ids, token_modalities=ids)
    batch = ForwardBatch([RequestMedia(inputs)], [0], [length])
    return embed_mm_inputs(torch.zeros(length, dtype=torch.int64), batch, TABLE, encoder, cache, **options)


# ------------------------------------------------------------------ what is encoded


@given(st.lists(st.integers(1, 4), max_size=8), st.sets(st.integers(1, 4)), st.sets(st.integers(1, 4)))
def test_each_item_gets_its_embeddings_or_its_error(seeds: list[int], fails: set[int], cached: set[int]) -> None:
    encoder, cache = Recording(fails=sorted(fails)), EmbeddingCache(1 << 20)
    ahead = Recording()
    encode_items([item(seed) for seed in sorted(cached)], ahead, cache, **FIT)
    found = encode_items([item(seed) for seed in seeds], encoder, cache, **FIT)
    assert seeds_of(found) == [EncoderError if seed in fails - cached else float(seed) for seed in seeds]
    wanted = list(dict.fromkeys(seed for seed in seeds if seed not in cached))
    assert encoder.calls[:1] == ([wanted] if wanted else [])  # one call, each content once
    assert {seed for call in encoder.calls for seed in call} == set(wanted)
    assert cache.stats().pinned == 0
    again = Recording()
    good = [seed for seed in seeds if seed not in fails - cached]
    assert seeds_of(encode_items([item(seed) for seed in good], again, cache, **FIT)) == good
    assert again.calls == []


def test_a_step_finds_what_was_encoded_ahead_bit_for_bit() -> None:
    items = [item(5, 3, start=1), item(6, 2, start=4)]
    plain = embed(items, Recording(layers=2))
    cache, encoder = EmbeddingCache(1 << 20), Recording(layers=2)
    encode_items(items, encoder, cache, **FIT)
    step = embed(items, encoder, cache)
    assert encoder.calls == [[5, 6]]
    assert torch.equal(step.input_embeds, plain.input_embeds)
    assert torch.equal(step.deepstack[0], plain.deepstack[0])


def test_out_of_memory_halves_a_call_and_max_encode_tokens_splits_it() -> None:
    items = [item(seed) for seed in range(1, 6)]
    small = Recording(most=2)
    assert seeds_of(encode_items(items, small, **FIT)) == [1, 2, 3, 4, 5]
    assert small.calls == [[1, 2, 3, 4, 5], [1, 2], [3, 4], [5]]
    split = Recording()
    assert seeds_of(encode_items(items, split, max_encode_tokens=4, **FIT)) == [1, 2, 3, 4, 5]
    assert split.calls == [[1, 2], [3, 4], [5]]


def test_precomputed_embeddings_and_several_modalities() -> None:
    precomputed = item(1)
    precomputed.feature, precomputed.precomputed_embeddings = None, np.full((2, HIDDEN), 9.0, np.float32)
    video = item(2, modality=Modality.VIDEO)
    encoder = {Modality.VIDEO: lambda items: [torch.full((one.num_tokens, HIDDEN), 7.0) for one in items]}
    found = encode_items([precomputed, video, item(3)], encoder, hidden=HIDDEN, **FIT)
    assert seeds_of(found) == [9.0, 7.0, EncoderError]
    assert "expected one for images, got none" in found[2].message  # type: ignore[union-attr]
    (wrong,) = encode_items([precomputed], encoder, hidden=HIDDEN + 1, **FIT)
    assert "expected [2, 4] floating point" in wrong.message  # type: ignore[union-attr]


# ------------------------------------------------------------------ what cannot be encoded


def without(field: str) -> MultimodalDataItem:
    made = item(9)
    setattr(made, field, None)
    return made


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (without("feature"), "feature was released"),
        (without("pad_values"), "items[1]: no identity is set"),
        (without("modality"), "items[1].modality: expected a Modality, got NoneType"),
        (without("attention"), "items[1].attention: expected one of causal, whole"),
        (without("offsets"), "items[1].offsets: "),
        (without("model_specific_data"), "items[1]: model_specific_data: expected a dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_item_that_cannot_be_read_fails_alone(broken: MultimodalDataItem, words: str) -> None:
    encoder = Recording()
    one, error, two = encode_items([item(1), broken, item(2)], encoder, **FIT)
    assert seeds_of([one, two]) == [1.0, 2.0]
    assert isinstance(error, MMPluginError)
    assert words in error.message


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"items": [None]}, "items"),
        ({"items": ["image"]}, "items"),
        ({"items": None}, "items"),
        ({"items": 5}, "items"),
        ({"items": {1: 2}}, "items"),
        ({"dtype": None}, "dtype"),
        ({"device": None}, "device"),
    ],
)
def test_what_is_not_known_is_asked_for(arguments: dict[str, Any], argument: str) -> None:
    given = {"items": [item(1)], "encoder": Recording(), **FIT} | arguments
    with pytest.raises(UsageError) as caught:
        encode_items(**given)
    assert caught.value.argument == argument


def test_an_encoder_that_was_loaded_says_where_and_in_which_dtype() -> None:
    encoder = Recording()
    encoder.bind(version="v", device="cpu", dtype=torch.bfloat16, owner={})
    (found,) = encode_items([item(1)], encoder)
    assert isinstance(found, Encoded)
    assert found.embeddings.dtype == torch.bfloat16
    (cast,) = encode_items([item(1)], encoder, dtype=torch.float16)
    assert isinstance(cast, Encoded)
    assert cast.embeddings.dtype == torch.float16


def test_dtypes_and_versions_do_not_share_an_entry_and_any_width_does_not_believe_another_count() -> None:
    cache, encoder = EmbeddingCache(1 << 20), Recording()
    for version, dtype in (("a", torch.float32), ("a", torch.float16), ("b", torch.float32), ("a", torch.float32)):
        encoder.bind(version=version, device="cpu", dtype=dtype, owner={})
        encode_items([item(1)], encoder, cache)
    assert encoder.calls == [[1]] * 3
    other = Encoded(torch.zeros(5, HIDDEN))
    assert cache.put(b"key", other)
    assert cache.get(b"key", num_tokens=2, hidden=None, dtype=torch.float32, device=torch.device("cpu")) is None
    assert cache.put(b"key", other)
    assert cache.get(b"key", num_tokens=5, hidden=None, dtype=torch.float32, device=torch.device("cpu")) is other
    assert cache.get(b"key", num_tokens=5, hidden=HIDDEN, dtype=torch.float32, device=torch.device("cpu")) is other
    assert cache.get(b"key", num_tokens=5, hidden=None, dtype=torch.float16, device=torch.device("cpu")) is None


def test_collective_encoders_agree_here_too() -> None:
    class Collective(Recording):
        collective = True

    with pytest.raises(UsageError, match="agree: a collective encoder needs it"):
        encode_items([item(1)], Collective(), **FIT)
    asked: list[int] = []

    def agree(outcome: int) -> int:
        asked.append(outcome)
        return 2 if len(asked) == 1 else outcome  # another rank failed on both together

    assert seeds_of(encode_items([item(1), item(2)], Collective(), agree=agree, **FIT)) == [1.0, 2.0]
    assert asked == [0, 0, 0]


@pytest.mark.parametrize("rank", ["fails", "another fails", "cannot agree"])
def test_ranks_agree_on_what_could_be_prepared(rank: str) -> None:
    """One rank that lacks memory must not leave the others waiting in a call that it does not make."""

    class Collective(Recording):
        collective = True

    outcomes: list[int] = []

    def agree(outcome: int) -> int:
        outcomes.append(outcome)
        if len(outcomes) == 1 and rank != "fails":
            if rank == "cannot agree":
                raise ConnectionError("lost")
            return 2
        return outcome

    def prepare(tasks: Sequence[PrepareTask]) -> list[Any]:
        made = [
            Prepared({}, Replacement.repeat(1, 2), np.array([index + 5]), bytes(32)) for index, _ in enumerate(tasks)
        ]
        return [MemoryError("none left"), *made[1:]] if rank == "fails" else made

    items = []
    for seed in (1, 2):
        items.append(item(seed))
        items[-1].feature, items[-1].task = None, task(seed)
    encoder = Collective()
    first, second = encode_items(items, encoder, agree=agree, prepare=prepare, **FIT)
    assert isinstance(first, EncoderError)
    said = {"fails": "MemoryError: none left", "another fails": "another rank", "cannot agree": "ranks could not agree"}
    assert said[rank] in first.message
    assert seeds_of([second]) == [6.0]
    assert encoder.calls == [[6]]
    assert outcomes == [2 if rank == "fails" else 0, 0, 0]


def task(seed: int) -> PrepareTask:
    source = MediaValue(f"images[{seed}]", b"")
    return PrepareTask(
        ModelRef("a", "b"), Modality.IMAGE, source.path, source, Size(1, 1), {}, {}, Replacement.repeat(1, 2)
    )


def test_observers_hear_of_calls() -> None:
    events: list[Event] = []
    encode_items([item(1, 4), item(2, 2)], Recording(), observers=Observers([events.append]), **FIT)
    (event,) = events
    assert isinstance(event, EncodeBatch)
    assert (event.num_items, event.num_tokens) == (2, 6)


# ------------------------------------------------------------------ rows in a buffer of the caller


def scaled(ids: torch.Tensor) -> torch.Tensor:
    """Another kind of text embedding than `nn.Embedding`."""
    rows: torch.Tensor = TABLE(ids) * 2
    return rows


@pytest.mark.parametrize("table", [TABLE, scaled], ids=["table", "callable"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", ["exact", "longer", "strided"])
def test_a_buffer_gets_the_same_rows_and_no_others(table: Any, own: bool, layout: str) -> None:
    items = [item(5, 3, start=1), item(6, 2, start=5)]
    ids = np.zeros(8, np.int64)
    inputs = MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids)

    def routine(text: torch.Tensor, plan: Any, embeddings: Any, ids: torch.Tensor) -> Any:
        for piece, encoded in zip(plan.pieces, embeddings, strict=True):
            text[piece.out_start : piece.out_end] += encoded.embeddings
        return text, "extra"

    encoder = Recording()
    encoder.bind(version="v", device="cpu", owner={}, embed=routine if own else None)
    buffer = {
        "exact": torch.full((6, HIDDEN), 50.0),
        "longer": torch.full((9, HIDDEN), 50.0),
        "strided": torch.full((9, 2 * HIDDEN), 50.0)[:, ::2],
    }[layout]
    whole = torch.full((6, HIDDEN), -1.0)  # of the first six tokens, by one call without a buffer
    for out in (None, buffer):
        batch = ForwardBatch([RequestMedia(inputs)], [0], [6])
        step = embed_mm_inputs(torch.zeros(6, dtype=torch.int64), batch, table, encoder, out=out)
        assert step.failed == ()
        if out is None:
            whole = step.input_embeds
    assert torch.equal(step.input_embeds, whole)
    assert step.input_embeds.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:6], whole)
    assert bool((buffer[6:] == 50.0).all())
    assert step.extra == ("extra" if own else None)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, HIDDEN),
        torch.zeros(4, HIDDEN + 1),
        torch.zeros(4, HIDDEN, dtype=torch.float16),
        torch.zeros(4 * HIDDEN),
        torch.zeros(4, HIDDEN, device="meta"),
        torch.zeros(4, HIDDEN).to_sparse(),
        np.zeros((4, HIDDEN), np.float32),
    ],
    ids=["short", "wide", "dtype", "flat", "meta", "sparse", "array"],
)
@pytest.mark.parametrize("table", [TABLE, scaled], ids=["table", "callable"])
def test_a_buffer_that_does_not_fit_is_refused(out: Any, table: Any) -> None:
    with pytest.raises(UsageError, match=r"out: expected \[at least 4, 3\] torch.float32 on cpu, got") as caught:
        embed_mm_inputs(torch.zeros(4, dtype=torch.int64), ForwardBatch([None], [0], [4]), table, Recording(), out=out)
    assert caught.value.argument == "out"


# ------------------------------------------------------------------ an encoder in a tree of modules


class Towered(Recording):
    def __init__(self) -> None:
        super().__init__()
        self._tower = torch.nn.Linear(2, HIDDEN)
        self.merger = torch.nn.LayerNorm(HIDDEN)


class ModuleItself(Encoder, EncodesImages, torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Linear(2, HIDDEN)

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> ModuleItself:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        return [self.tower(torch.ones(one.num_tokens, 2)) for one in items]


def test_a_model_that_holds_an_encoder_sees_its_parameters() -> None:
    encoder = Towered()
    model = torch.nn.ModuleDict({"visual": EncoderModule(encoder), "head": torch.nn.Linear(2, 2)})
    assert {name for name, _ in model.named_parameters()} == {
        "visual.tower.weight", "visual.tower.bias", "visual.merger.weight", "visual.merger.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert dict(model.named_parameters())["visual.tower.weight"] is encoder._tower.weight
    assert [float(one[0, 0]) for one in model["visual"](Modality.IMAGE, [item(4)])] == [4.0]


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16)])
@pytest.mark.parametrize("above", [False, True])
def test_it_cannot_be_moved_or_cast_without_a_word(move: Any, above: bool) -> None:
    module = EncoderModule(Towered())
    with pytest.raises(UsageError, match=r"load it there, with load_encoder\(checkpoint, device=..., dtype=...\)"):
        move(torch.nn.ModuleList([module]) if above else module)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert module.to("cpu").to(torch.float32).eval() is module


def test_an_encoder_may_be_a_module_itself() -> None:
    encoder = ModuleItself()
    encoder.bind(version="v", device="cpu", dtype=torch.float32, owner={})
    step = embed([item(1, start=1)], encoder)
    assert step.failed == ()
    assert torch.equal(step.input_embeds[1:3], encoder.tower(torch.ones(2, 2)).detach())
    shown = EncoderModule(encoder)
    assert [name for name, _ in shown.named_parameters()] == ["tower.weight", "tower.bias"]
    assert [name for name, _ in torch.nn.ModuleDict({"visual": encoder}).named_parameters()] == [
        "visual.tower.weight",
        "visual.tower.bias",
    ]


def test_only_an_encoder_becomes_a_module() -> None:
    with pytest.raises(UsageError, match="encoder: expected an Encoder, got dict"):
        EncoderModule({})  # type: ignore[arg-type]
