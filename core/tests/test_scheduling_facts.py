"""What a scheduler asks of a request's inputs: spans, chunks that cut none that must stay whole, the part without features."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import PlainToy, png, toy_spec

from mm_plugin import (
    EmbedOutput,
    ForwardBatch,
    Modality,
    ModelSpec,
    MultimodalDataItem,
    MultimodalInputs,
    MultimodalProcessorOutput,
    RequestMedia,
    UsageError,
    embed_mm_inputs,
    wire,
)
from mm_plugin.errors import SpanError, SpecError
from mm_plugin.inputs import ItemContent
from mm_plugin.scheduler import merge


def inputs_of(*spans: tuple[int, int, str], length: int = 40) -> MultimodalInputs:
    items = []
    for seed, (first, last, attention) in enumerate(spans):
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=[(first, last)],
            feature=np.zeros((last - first + 1, 2)),
            attention=attention,  # type: ignore[arg-type]
        )
        item.set_identity(bytes([seed]) * 32)
        items.append(item)
    ids = np.arange(length)
    output = MultimodalProcessorOutput(
        input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0, mm_items=items
    )  # fmt: skip
    return MultimodalInputs.from_processor_output(output)


def test_spans_are_in_prompt_order_with_their_items() -> None:
    inputs = inputs_of((20, 25, "causal"), (3, 7, "causal"))
    inputs.mm_items[0].offsets.append((30, 31))
    assert inputs.spans == [(3, 7, 1), (20, 25, 0), (30, 31, 0)]


# tokens 3..7 whole, 8..12 whole, 15..18 causal, 30..39 whole
MIXED = ((3, 7, "whole"), (8, 12, "whole"), (15, 18, "causal"), (30, 39, "whole"))


@pytest.mark.parametrize(
    ("prefix", "length", "expected"),
    [
        (0, 0, 0),
        (0, 3, 3),
        (0, 4, 3),
        (0, 7, 3),
        (0, 8, 8),
        (0, 12, 8),
        (0, 13, 13),
        (0, 17, 17),
        (3, 4, 0),
        (3, 5, 5),
        (8, 5, 5),
        (13, 4, 4),
        (16, 10, 10),
        (16, 15, 14),
        (30, 9, 0),
        (30, 10, 10),
        (30, 500, 500),
        (40, 7, 7),
        (1000, 7, 7),
    ],
)
def test_a_chunk_ends_before_a_span_that_does_not_fit(prefix: int, length: int, expected: int) -> None:
    assert inputs_of(*MIXED).clip_chunk(prefix, length) == expected


@pytest.mark.parametrize("prefix", [4, 7, 9, 12, 31, 39])
def test_a_prefix_within_a_span_is_refused(prefix: int) -> None:
    with pytest.raises(SpanError, match="expected a prefix that does not cut the span"):
        inputs_of(*MIXED).clip_chunk(prefix, 5)


@pytest.mark.parametrize(("prefix", "length"), [(-1, 3), (0, -3), (1.5, 3), (0, None), (True, 3), ("1", 2)])
def test_lengths_are_checked(prefix: Any, length: Any) -> None:
    with pytest.raises(UsageError, match="expected a number of tokens"):
        inputs_of(*MIXED).clip_chunk(prefix, length)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=6),
    st.integers(6, 12),
)
def test_chunks_reach_the_end_and_cut_nothing(parts: list[tuple[int, int, bool]], space: int) -> None:
    spans, at = [], 0
    for gap, count, whole in parts:
        spans.append((at + gap, at + gap + count - 1, "whole" if whole else "causal"))
        at += gap + count
    inputs, prefix = inputs_of(*spans, length=at + 3), 0
    while prefix < at + 3:
        moved = inputs.clip_chunk(prefix, space)
        assert 0 < moved <= space
        end = prefix + moved
        for first, last, attention in spans:
            assert attention == "causal" or end <= first or end > last
        # Nothing longer would do.
        assert moved == space or any(first == end and last >= prefix + space for first, last, _ in spans)
        prefix = end


def test_the_spec_declares_it_and_items_carry_it(open_words: Any) -> None:
    spec = msgspec.structs.replace(toy_spec(Modality.IMAGE, Modality.AUDIO), attention={Modality.IMAGE: "whole"})
    output = open_words(PlainToy, spec).process("word <image> word", [png()])
    assert [item.attention for item in output.mm_items] == ["whole"]
    inputs = MultimodalInputs.from_processor_output(output)
    assert inputs.clip_chunk(0, 2) == 1
    later = merge(inputs, inputs)
    assert [item.attention for item in later.mm_items] == ["whole", "whole"]
    assert wire.decode(wire.encode(inputs)).mm_items[0].attention == "whole"
    assert open_words(PlainToy, toy_spec(Modality.IMAGE)).process("<image>", [png()]).mm_items[0].attention == "causal"


@pytest.mark.parametrize(
    "attention", [{Modality.IMAGE: "half"}, {Modality.VIDEO: "whole"}, ["whole"], {"image": "whole"}]
)
def test_an_unknown_attention_is_refused(attention: Any) -> None:
    fields = msgspec.structs.asdict(toy_spec(Modality.IMAGE))
    with pytest.raises(SpecError, match="attention must name"):
        ModelSpec(**fields | {"attention": attention})


# ---------------------------------------------------------------- two parts


def test_an_output_is_split_and_joined(open_words: Any) -> None:
    processor = open_words(PlainToy, toy_spec(Modality.IMAGE))
    output = processor.process("word <image> <image>", [png(0), png(1)])
    before = wire.decode([bytes(frame) for frame in wire.encode(output)])
    inputs, contents = output.split()
    assert wire.same(output, before)
    sent = b"".join(wire.pack(inputs))
    assert len(sent) < 4096
    assert all(item.feature is None for item in inputs.mm_items)
    received: MultimodalInputs = wire.unpack(sent, MultimodalInputs)
    received.attach(wire.decode([bytes(frame) for frame in wire.encode(contents)]))
    assert wire.same(received, MultimodalInputs.from_processor_output(output))


def test_contents_of_other_items_are_refused(open_words: Any) -> None:
    processor = open_words(PlainToy, toy_spec(Modality.IMAGE))
    inputs, contents = processor.process("<image> <image>", [png(0), png(1)]).split()
    _, others = processor.process("<image> <image>", [png(0), png(2)]).split()
    wrong: list[Any] = [[], contents[:1], contents[::-1], others, [None, None], [*contents, ItemContent(b"x")]]
    for given_contents in wrong:
        with pytest.raises(UsageError, match="expected those of the 2 items"):
            inputs.attach(given_contents)
        assert all(item.feature is None for item in inputs.mm_items)


# ------------------------------------------------------------------ a step that cuts one all the same


def step_of(batch: ForwardBatch) -> EmbedOutput:
    import torch

    total = sum(batch.extend_seq_lens)
    encoder = {Modality.IMAGE: lambda items: [torch.as_tensor(item.feature).float() + 1 for item in items]}
    table = torch.nn.Embedding.from_pretrained(torch.full((64, 2), 5.0))
    return embed_mm_inputs(torch.zeros(total, dtype=torch.int64), batch, table, encoder)


@pytest.mark.parametrize(
    ("prefix", "length", "span"),
    [
        (0, 4, (3, 7)),
        (0, 7, (3, 7)),
        (4, 1, (3, 7)),
        (7, 1, (3, 7)),
        (5, 30, (3, 7)),
        (8, 4, (8, 12)),
        (13, 20, (30, 39)),
        (39, 1, (30, 39)),
        (31, 20, (30, 39)),
    ],
)
def test_a_request_whose_chunk_cuts_a_whole_span_fails_alone(prefix: int, length: int, span: tuple[int, int]) -> None:
    cutting, good = RequestMedia(inputs_of(*MIXED)), RequestMedia(inputs_of(*MIXED))
    out = step_of(ForwardBatch([good, cutting, None], [0, prefix, 0], [13, length, 2]))
    (failed,) = out.failed
    assert (failed.request, failed.item) == (1, None)
    assert out.failed_requests == {1}
    assert f"span ({span[0]}, {span[1]})" in failed.error.message
    assert f"got tokens {prefix} to {prefix + length - 1}" in failed.error.message
    values = out.input_embeds[:, 0].tolist()
    assert values == [5.0] * 3 + [1.0] * 10 + [0.0] * length + [5.0] * 2
    assert cutting.held_embeddings == {}


def test_chunks_that_the_inputs_allow_never_fail() -> None:
    for space in (10, 11, 14, 40):
        media, prefix = RequestMedia(inputs_of(*MIXED)), 0
        while prefix < 40:
            length = media.inputs.clip_chunk(prefix, min(space, 40 - prefix))
            assert step_of(ForwardBatch([media], [prefix], [length])).failed == ()
            prefix += length
        assert step_of(ForwardBatch([media], [39], [0])).failed == ()  # no token of it is computed


def test_spans_that_may_be_cut_are() -> None:
    out = step_of(ForwardBatch([RequestMedia(inputs_of(*MIXED))], [16], [1]))
    assert out.failed == ()
    assert out.input_embeds.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("attention", ["half", None, 3, ["whole"]])
def test_an_item_with_another_attention_fails_its_request(attention: Any) -> None:
    inputs = inputs_of((3, 7, "causal"))
    inputs.mm_items[0].attention = attention
    (failed,) = step_of(ForwardBatch([RequestMedia(inputs)], [0], [10])).failed
    assert "mm_items[0].attention: expected one of causal, whole" in failed.error.message
