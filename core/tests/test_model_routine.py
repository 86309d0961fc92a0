"""A model's own way to embed: what its routine gets and returns, and that its faults stay with the request that causes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from embed_media import media_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import EmbedOutput, StepPlan, embed_mm_inputs, general_mm_embed_routine
from mm_plugin.encoder import Encoder, EncodesAudio, EncodesImages
from mm_plugin.errors import EncoderError, MediaError, UsageError
from mm_plugin.events import Event, ItemFailed, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

HIDDEN, PLACEHOLDER = 2, 7
OWNER = {"plugin": "adder", "distribution": "mm-plugin-adder", "version": "1"}
# The text embedding of id i is (-i, -i); that of the placeholder, (-7, -7).
TABLE = torch.nn.Embedding.from_pretrained(-torch.arange(50.0)[:, None].repeat(1, HIDDEN))
Routine = Callable[[torch.Tensor, StepPlan, Sequence[Encoded], torch.Tensor], Any]


def make_media(seq: int, *items: tuple[int, tuple[int, int]], modality: Modality = Modality.IMAGE) -> RequestMedia:
    """Items (seed, span); every other token is text, whose id is its index plus 10."""
    made = []
    ids = np.arange(seq) + 10
    for seed, span in items:
        item = MultimodalDataItem(modality=modality, offsets=[span], feature=np.array([seed]))
        item.set_hash(seed)
        made.append(item)
        ids[span[0] : span[1] + 1] = PLACEHOLDER
    return media_of(made, ids)


class Encoding(Encoder, EncodesImages, EncodesAudio):
    """Row r of the item of seed s is (100 * s + r, 100 * s + r); seed 9 cannot be encoded."""

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Encoding:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        if any(item.feature[0] == 9 for item in items):
            raise ValueError("nine")
        return [
            (100.0 * float(item.feature[0]) + torch.arange(item.num_tokens))[:, None].repeat(1, HIDDEN)
            for item in items
        ]

    get_audio_feature = get_image_feature


def bound(routine: Routine | None, kind: type[Encoding] = Encoding, **named: Any) -> Encoding:
    encoder = kind()
    encoder.bind(version="1", owner=OWNER, embed=routine, **named)
    return encoder


def adding(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
    for piece, encoded in zip(plan.pieces, embeddings, strict=True):
        text[piece.out_start : piece.out_end] += encoded.embeddings
    return text, ids


def step(
    media: Sequence[RequestMedia | None], chunks: Sequence[tuple[int, int]], encoder: Any, **options: Any
) -> EmbedOutput:
    """A step called with cache ids; a request of text has the ids 10, 11, 12, ..."""
    parts = [
        (torch.arange(start + extend) + 10 if each is None else torch.from_numpy(each.inputs.padded_input_ids))[
            start : start + extend
        ]
        for each, (start, extend) in zip(media, chunks, strict=True)
    ]
    batch = ForwardBatch(media, [start for start, _ in chunks], [extend for _, extend in chunks])
    return embed_mm_inputs(torch.cat(parts), batch, TABLE, encoder, **options)


def column(output: EmbedOutput) -> list[float]:
    assert torch.equal(output.input_embeds[:, 0], output.input_embeds[:, 1])
    return output.input_embeds[:, 0].tolist()


# ------------------------------------------------------------------ what it gets and returns


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("cached", [False, True])
def test_rows_are_added_to_the_placeholder_s_embedding_in_any_chunk(size: int, cached: bool) -> None:
    media, encoder = make_media(8, (1, (1, 3)), (2, (5, 6))), bound(adding)
    cache = EmbeddingCache(1 << 16) if cached else None
    found, ids = [], []
    for start in range(0, 8, size):
        out = step([media], [(start, min(size, 8 - start))], encoder, cache=cache)
        assert out.failed == ()
        found += column(out)
        ids += out.extra.tolist()
    assert found == [-10, 93, 94, 95, -14, 193, 194, -17]
    assert ids == [10, 7, 7, 7, 14, 7, 7, 17]  # model ids, though the step was called with cache ids
    assert media.held_embeddings == {}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4), st.integers(1, 9))
def test_a_routine_that_replaces_rows_equals_the_core(runs: list[tuple[int, int]], size: int) -> None:
    def replacing(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        for piece, encoded in zip(plan.pieces, embeddings, strict=True):
            text[piece.out_start : piece.out_end] = encoded.embeddings
        return text, None

    spans, cursor = [], 0
    for seed, (gap, length) in enumerate(runs, 1):
        spans.append((seed, (cursor + gap, cursor + gap + length - 1)))
        cursor += gap + length
    requests = [make_media(cursor + 2, *spans) for _ in range(2)]
    for start in range(0, cursor + 2, size):
        chunk = [(start, min(size, cursor + 2 - start)), (0, 3)]
        own, core = (
            step([media, None], chunk, encoder, check_finite=True)
            for media, encoder in zip(requests, (bound(replacing), bound(None)), strict=True)
        )
        assert torch.equal(own.input_embeds, core.input_embeds)
        assert own.finite


def test_the_routine_knows_which_tokens_belong_to_which_item_of_which_modality() -> None:
    seen: list[Any] = []

    def noting(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        types = torch.zeros(plan.total, dtype=torch.int64)
        for piece in plan.pieces:
            types[piece.out_start : piece.out_end] = int(piece.modality)
        seen.append((plan.text_runs, [encoded.embeddings[:, 0].tolist() for encoded in embeddings]))
        return text, types

    image, audio = make_media(4, (1, (1, 3))), make_media(3, (2, (0, 1)), modality=Modality.AUDIO)
    out = step([image, None, audio], [(2, 2), (0, 1), (0, 3)], bound(noting))
    assert out.extra.tolist() == [1, 1, 0, 3, 3, 0]
    assert seen == [(((2, 3), (5, 6)), [[101, 102], [200, 201]])]
    assert column(out) == [-7, -7, -10, -7, -7, -12]


def test_deepstack_and_kept_rows_are_cut_to_the_piece() -> None:
    class Deep(Encoding):
        def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
            rows = super().get_image_feature(items)
            return [Encoded(each, torch.stack([each + 1000]), torch.arange(len(each))) for each in rows]

    seen: list[Encoded] = []

    def noting(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        seen.extend(embeddings)
        return text, None

    out = step([make_media(5, (1, (0, 3)))], [(1, 2)], bound(noting, Deep))
    (encoded,) = seen
    assert encoded.embeddings[:, 0].tolist() == [101, 102]
    assert encoded.deepstack[0, :, 0].tolist() == [1101, 1102]
    assert encoded.kept.tolist() == [1, 2]
    assert out.deepstack is not None
    assert out.deepstack[1].tolist() == [0, 1]


def test_what_a_routine_writes_reaches_no_cache_no_request_and_no_caller() -> None:
    def writing(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        for encoded in embeddings:
            encoded.embeddings.fill_(-1)
        ids.fill_(-1)
        text.fill_(5)
        return text, None

    media, cache, weight = make_media(4, (1, (0, 3))), EmbeddingCache(1 << 16), TABLE.weight.clone()
    flat = torch.from_numpy(media.inputs.padded_input_ids[:2]).clone()
    before = flat.clone()
    out = embed_mm_inputs(flat, ForwardBatch([media], [0], [2]), TABLE, bound(writing), cache)
    assert column(out) == [5, 5]
    assert torch.equal(flat, before)
    assert media.inputs.input_ids.tolist() == [7] * 4
    (held,) = media.held_embeddings.values()
    assert held.embeddings[:, 0].tolist() == [100, 101, 102, 103]
    assert torch.equal(TABLE.weight, weight)
    again = step([make_media(4, (1, (0, 3)))], [(0, 4)], bound(adding), cache=cache)
    assert column(again) == [93, 94, 95, 96]


def test_a_mapping_of_callables_has_no_routine_and_an_encoder_without_one_replaces_rows() -> None:
    media = make_media(3, (1, (0, 1)))
    for encoder in (bound(None), {Modality.IMAGE: Encoding().get_image_feature}, Encoding()):
        out = step([media], [(0, 3)], encoder)
        assert column(out) == [100, 101, -12]
        assert out.extra is None


def test_a_step_of_text_alone_goes_through_the_routine_too() -> None:
    out = step([None, None], [(0, 2), (4, 1)], bound(adding))
    assert column(out) == [-10, -11, -14]
    assert out.extra.tolist() == [10, 11, 14]


def test_int32_ids_stay_int32() -> None:
    media = make_media(3, (1, (0, 1)))
    ids = torch.from_numpy(media.inputs.input_ids).to(torch.int32)
    out = embed_mm_inputs(ids, ForwardBatch([media], [0], [3]), TABLE, bound(adding))
    assert out.extra.dtype == torch.int32
    assert out.extra.tolist() == [7, 7, 12]


def test_a_request_whose_model_ids_are_too_short_fails_alone() -> None:
    media, other = make_media(4, (1, (1, 3))), make_media(3, (1, (0, 1)))
    media.inputs.input_ids = media.inputs.input_ids[:2]
    out = step([media, other], [(0, 4), (0, 3)], bound(adding))
    assert [(entry.request, entry.item) for entry in out.failed] == [(0, None)]
    assert "expected spans within the 2 ids of the request, got one that ends at 3" in out.failed[0].error.message
    assert column(out) == [0, 0, 0, 0, *column(step([other], [(0, 3)], bound(adding)))]


def test_the_language_model_gets_what_the_routine_adds() -> None:
    class Model:
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return TABLE

        def __call__(self, **given: Any) -> dict[str, Any]:
            return given

    media = make_media(3, (1, (0, 1)))
    ids, batch = torch.from_numpy(media.inputs.input_ids), ForwardBatch([media], [0], [3])
    given, embedded = general_mm_embed_routine(ids, batch, Model(), bound(adding), extra_argument="per_layer")
    assert set(given) == {"input_embeds", "per_layer"}
    assert given["per_layer"] is embedded.extra
    with pytest.raises(UsageError, match="extra_argument: ") as caught:
        general_mm_embed_routine(ids, batch, Model(), bound(adding))
    assert caught.value.argument == "extra_argument"
    given, _ = general_mm_embed_routine(ids, batch, Model(), bound(None), extra_argument="per_layer")
    assert given["per_layer"] is None


def test_a_flag_of_finite_rows_sees_what_the_routine_made_of_items_and_not_of_text() -> None:
    def dividing(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        text[-1] = float("nan")
        for piece in plan.pieces:
            text[piece.out_start : piece.out_end] /= float(ids.numel() > 3)
        return text, None

    for length, finite in ((4, True), (3, False)):
        out = step([make_media(length, (1, (0, 0)))], [(0, length)], bound(dividing), check_finite=True)
        assert bool(out.finite) is finite


# ------------------------------------------------------------------ its faults


def failing_on(seed: int, fault: Callable[[torch.Tensor], Any]) -> Routine:
    """Adds rows, but where an item of this seed is among them."""

    def routine(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        if any(encoded.embeddings[0, 0] // 100 == seed for encoded in embeddings):
            return fault(text)
        return adding(text, plan, embeddings, ids)

    return routine


def throwing(error: BaseException) -> Callable[[torch.Tensor], Any]:
    def fault(text: torch.Tensor) -> Any:
        text.fill_(3)  # what it did before it failed is undone
        raise error

    return fault


FAULTS = {
    "raises": throwing(RuntimeError("no such kernel")),
    "exits": throwing(SystemExit(3)),
    "is cancelled": throwing(asyncio.CancelledError()),
    "out of memory": throwing(torch.OutOfMemoryError("full")),
    "nothing": lambda text: None,
    "one value": lambda text: text,
    "three values": lambda text: (text, None, None),
    "a list": lambda text: [text, None],
    "numpy": lambda text: (text.numpy(), None),
    "rows": lambda text: (text[:-1], None),
    "columns": lambda text: (text[:, :1], None),
    "dimensions": lambda text: (text[None], None),
    "dtype": lambda text: (text.double(), None),
    "device": lambda text: (text.to("meta"), None),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_stays_with_the_request_on_whose_items_it_happens(fault: Any) -> None:
    events: list[Event] = []
    media = [make_media(3, (1, (0, 1))), make_media(3, (2, (0, 0)), (3, (1, 1))), None, make_media(3, (4, (1, 2)))]
    encoder = bound(failing_on(3, fault), observers=Observers([events.append]))
    out = step(media, [(0, 3)] * 4, encoder)
    assert column(out) == [93, 94, -12, 0, 0, -12, -10, -11, -12, -10, 393, 394]
    assert out.extra.tolist() == [7, 7, 12, 7, 7, 12, 10, 11, 12, 10, 7, 7]
    assert [(failed.request, failed.item) for failed in out.failed] == [(1, 0), (1, 1)]
    for failed in out.failed:
        assert isinstance(failed.error, EncoderError)
        assert {name: getattr(failed.error, name) for name in OWNER} == OWNER
        assert failed.error.message.startswith("the embed routine")
        assert failed.error.__traceback__ is None
    assert [(event.request, event.item) for event in events if isinstance(event, ItemFailed)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "RuntimeError: no such kernel"),
        ("one value", r"expected \(input_embeds, extra\), got Tensor"),
        ("three values", r"expected \(input_embeds, extra\), got a tuple of 3"),
        ("numpy", r"expected input_embeds \[3, 2\] torch.float32 on cpu, got ndarray"),
        ("columns", r"got \[3, 1\] torch.float32 on cpu"),
        ("device", r"got \[3, 2\] torch.float32 on meta"),
    ],
)
def test_a_fault_says_what_was_expected_and_what_was_found(fault: str, words: str) -> None:
    out = step([make_media(3, (3, (0, 1)))], [(0, 3)], bound(failing_on(3, FAULTS[fault])))
    (failed,) = out.failed
    with pytest.raises(EncoderError, match=words):
        raise failed.error


def test_an_error_of_ours_comes_through() -> None:
    error = MediaError("images[0]: too dark", path="images[0]")
    out = step([make_media(3, (3, (0, 1)))], [(0, 3)], bound(failing_on(3, throwing(error))))
    assert [failed.error for failed in out.failed] == [error]


def test_of_several_requests_each_that_fails_is_found() -> None:
    tried: list[list[int]] = []

    def odd(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        tried.append([piece.request for piece in plan.pieces])
        if any(encoded.embeddings[0, 0] // 100 % 2 for encoded in embeddings):
            raise ValueError("odd")
        return adding(text, plan, embeddings, ids)

    media = [make_media(1, (seed, (0, 0))) for seed in (1, 2, 3, 4)]
    out = step(media, [(0, 1)] * 4, bound(odd))
    assert column(out) == [0, 193, 0, 393]
    assert [failed.request for failed in out.failed] == [0, 2]
    assert tried == [[0, 1, 2, 3], [], [0], [1], [1, 2], [1, 3]]


def test_an_item_that_was_not_encoded_is_text_to_the_routine_and_zeros_in_the_end() -> None:
    plans: list[StepPlan] = []

    def noting(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        plans.append(plan)
        return adding(text, plan, embeddings, ids)

    out = step([make_media(3, (9, (0, 1))), make_media(2, (1, (0, 0)))], [(0, 3), (0, 2)], bound(noting))
    assert column(out) == [0, 0, -12, 93, -11]
    assert [(failed.request, failed.item) for failed in out.failed] == [(0, 0)]
    (plan,) = plans
    assert plan.text_runs == ((0, 3), (4, 5))
    assert [piece.request for piece in plan.pieces] == [1]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_routine_that_fails_on_text_fails_every_request_of_the_step_and_raises_nothing(fault: Any) -> None:
    """A step without tokens of a request says nothing of it."""

    def broken(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        return fault(text)

    events: list[Event] = []
    media = [None, make_media(3, (1, (0, 1))), make_media(3, (2, (0, 1)))]
    out = step(media, [(0, 2), (0, 3), (2, 0)], bound(broken, observers=Observers([events.append])))
    assert column(out) == [-10, -11, 0, 0, -12]
    assert out.extra is None
    assert [(failed.request, failed.item) for failed in out.failed] == [(1, 0), (0, None)]
    assert all(isinstance(failed.error, EncoderError) for failed in out.failed)
    assert [(event.request, event.item) for event in events if isinstance(event, ItemFailed)] == [(1, 0), (0, None)]


def test_what_was_encoded_is_held_and_cached_though_the_routine_failed() -> None:
    cache, media = EmbeddingCache(1 << 16), make_media(4, (3, (0, 3)))
    step([media], [(0, 2)], bound(failing_on(3, throwing(RuntimeError("once")))), cache=cache)
    assert len(media.held_embeddings) == cache.stats().entries == 1
    assert cache.stats().pinned == 0


def test_a_keyboard_interrupt_is_nobodys_fault_and_leaves_no_pins() -> None:
    cache = EmbeddingCache(1 << 16)
    with pytest.raises(KeyboardInterrupt):
        step([make_media(3, (3, (0, 1)))], [(0, 3)], bound(failing_on(3, throwing(KeyboardInterrupt()))), cache=cache)
    assert cache.stats().pinned == 0


class Collective(Encoding):
    collective = True


def test_ranks_agree_on_what_the_routine_made() -> None:
    """This rank's routine does well; another rank's fails while the second request's item is in the step."""
    asked: list[tuple[str, int]] = []
    plans: list[list[int]] = []

    def noting(text: torch.Tensor, plan: StepPlan, embeddings: Sequence[Encoded], ids: torch.Tensor) -> Any:
        plans.append([piece.request for piece in plan.pieces])
        return adding(text, plan, embeddings, ids)

    def agree(outcome: int) -> int:
        embedding = bool(plans)
        asked.append(("embed" if embedding else "encode", outcome))
        return 2 if embedding and 1 in plans[-1] else outcome

    media = [make_media(2, (1, (0, 0))), make_media(2, (2, (0, 0)))]
    out = step(media, [(0, 2)] * 2, bound(noting, Collective), agree=agree)
    assert column(out) == [93, -11, 0, -11]
    assert [failed.request for failed in out.failed] == [1]
    assert "another rank" in out.failed[0].error.message
    assert asked == [("encode", 0)] + [("embed", 0)] * 4
    assert plans == [[0, 1], [], [0], [0, 1]]


def test_ranks_that_cannot_agree_on_a_step_fail_all_of_it() -> None:
    calls: list[int] = []

    def agree(outcome: int) -> int:
        calls.append(outcome)
        if len(calls) > 1:
            raise ConnectionError("a rank is gone")
        return outcome

    out = step([make_media(2, (1, (0, 0))), None], [(0, 2)] * 2, bound(adding, Collective), agree=agree)
    assert [(failed.request, failed.item) for failed in out.failed] == [(0, 0), (1, None)]
    assert all("could not agree" in failed.error.message for failed in out.failed)
