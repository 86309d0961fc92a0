"""Expansion, padding and counting of spans, against slow lists and the published values."""

import hashlib
import itertools
import json
import sys
import types
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs import MultimodalInputs, SpecialTokens
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import (
    Replacement,
    Slot,
    expand,
    find_slots,
    match_expanded,
    pad_by_offsets,
    token_modalities_of,
)
from mm_plugin.scheduler import (
    apply_padded_input_ids,
    count_mm_tokens_in_extend,
    pad_input_ids,
    pad_runs,
    pad_token_pairs,
)
from mm_plugin.spec import ModelSpec

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sglang_sentinels.json").read_text())
VALUES = {case["item"]: list(map(int, case["pad_values"])) for case in GOLDEN["items"]}

Piece = tuple[list[int], list[bool] | None]


def items(count: int, **fields: Any) -> list[MultimodalDataItem]:
    made = []
    for index in range(count):
        item = MultimodalDataItem(modality=Modality.IMAGE, **fields)
        item.set_identity(hashlib.sha256(f"item{index}".encode()).digest())
        made.append(item)
    return made


def replacement(piece: Piece) -> Replacement:
    ids, takes = piece
    return Replacement(np.array(ids, dtype=np.int64), None if takes is None else np.array(takes, dtype=bool))


@st.composite
def pieces(draw: st.DrawFn, least: int = 0) -> Piece:
    """The tokens of one media input, each 50 or more, and which of them take rows."""
    ids = draw(st.lists(st.integers(50, 60), min_size=least, max_size=9))
    takes = draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return ids, takes


@st.composite
def prompts(draw: st.DrawFn, least: int = 0) -> list[tuple[list[int], int, Piece]]:
    """Text before a slot, width of the slot, what replaces it; the last entry's text ends the prompt."""
    texts = st.lists(st.integers(0, 9), max_size=4)
    return draw(st.lists(st.tuples(texts, st.integers(1, 3), pieces(least)), max_size=6))


def slow_expand(
    prompt: list[tuple[list[int], int, Piece]], tail: list[int]
) -> tuple[list[int], list[Slot], list[int], list[list[int]], list[tuple[int, int]]]:
    """The prompt, its slots, its expansion, and per slot the indices that take rows and the whole span."""
    ids: list[int] = []
    slots: list[Slot] = []
    expanded: list[int] = []
    rows: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    for text, width, (tokens, takes) in prompt:
        ids += text
        slots.append(Slot(len(ids), len(ids) + width))
        ids += [40] * width
        expanded += text
        start = len(expanded)
        rows.append([])
        for index, token in enumerate(tokens):
            if takes is None or takes[index]:
                rows[-1].append(len(expanded))
            expanded.append(token)
        spans.append((start, len(expanded)))
    return ids + tail, slots, expanded + tail, rows, spans


def covered(offsets: list[tuple[int, int]]) -> list[int]:
    """The indices in spans that are inclusive, after a check that they are ordered and cannot be joined."""
    for (_, end), (start, _) in itertools.pairwise(offsets):
        assert start > end + 1
    return [index for start, end in offsets for index in range(start, end + 1)]


@given(prompts(), st.lists(st.integers(0, 9), max_size=3))
def test_expansion_equals_a_slow_one_of_lists(prompt: list[tuple[list[int], int, Piece]], tail: list[int]) -> None:
    ids, slots, expanded, rows, spans = slow_expand(prompt, tail)
    array = np.array(ids, dtype=np.int64)
    result = expand(array, slots, [replacement(piece) for _, _, piece in prompt])
    assert result.ids.dtype == np.int64
    assert result.ids.tolist() == expanded
    assert [covered(offsets) for offsets in result.offsets] == rows
    assert result.spans == spans
    assert array.tolist() == ids
    assert not np.shares_memory(array, result.ids)


@given(prompts(least=1), st.lists(st.integers(0, 9), max_size=3))
def test_matching_finds_in_expanded_ids_what_expansion_recorded(
    prompt: list[tuple[list[int], int, Piece]], tail: list[int]
) -> None:
    _, _, expanded, rows, spans = slow_expand(prompt, tail)
    array = np.array(expanded, dtype=np.int64)
    result = match_expanded(array, [replacement(piece) for _, _, piece in prompt])
    assert result.ids.tolist() == expanded
    assert [covered(offsets) for offsets in result.offsets] == rows
    assert result.spans == spans
    assert not np.shares_memory(array, result.ids)


@pytest.mark.parametrize(
    ("ids", "wanted", "message"),
    [
        ([1, 9, 9, 2], [[9, 9, 9]], "item 0: .* found other tokens at 1"),
        ([1, 9, 9], [[9, 9, 9]], "item 0"),
        ([1, 9, 9, 2], [[9, 9], [9, 9]], "item 1: .* index 3 on, found no occurrence of its first token"),
        ([1, 2], [[9]], "item 0"),
        ([1, 9], [[]], "item 0 has no tokens"),
        ([8, 9, 8, 8], [[8, 8]], "item 0: .* found other tokens at 0"),
    ],
)
def test_expanded_ids_that_differ_are_refused_by_item(ids: list[int], wanted: list[list[int]], message: str) -> None:
    with pytest.raises(SpanError, match=message):
        match_expanded(np.array(ids, np.int64), [replacement((part, None)) for part in wanted])


@pytest.mark.parametrize(
    "slots",
    [
        [Slot(0, 0)],
        [Slot(2, 1)],
        [Slot(-1, 1)],
        [Slot(2, 4)],
        [Slot(0, 100)],
        [Slot(3, 4)],
        [Slot(0, 2), Slot(1, 3)],
        [Slot(1, 2), Slot(0, 1)],
        [Slot(0, 1), Slot(0, 1)],
    ],
)
def test_slots_that_overlap_or_leave_the_ids_are_refused(slots: list[Slot]) -> None:
    with pytest.raises(SpanError, match="slot"):
        expand(np.arange(3), slots, [Replacement.repeat(9, 1)] * len(slots))


@pytest.mark.case("2.5")
@pytest.mark.parametrize(("slots", "media"), [(0, 1), (3, 1), (1, 0)])
def test_other_counts_of_slots_and_replacements_are_refused_with_both(slots: int, media: int) -> None:
    with pytest.raises(SpanError, match=f"{slots} slots and {media} replacements"):
        expand(np.arange(5), [Slot(i, i + 1) for i in range(slots)], [Replacement.repeat(9, 2)] * media)


def test_slots_are_found_at_every_place_of_the_token() -> None:
    assert find_slots(np.array([7, 1, 7, 7]), 7) == [Slot(0, 1), Slot(2, 3), Slot(3, 4)]
    assert find_slots(np.array([1, 2]), 7) == []


@given(pieces())
def test_rows_and_runs_of_a_replacement_say_the_same(piece: Piece) -> None:
    one = replacement(piece)
    takes = [True] * len(piece[0]) if piece[1] is None else piece[1]
    assert one.num_embeddings == sum(takes)
    assert covered(one.runs()) == [index for index, taken in enumerate(takes) if taken]


@pytest.mark.case("2.9")
def test_a_placeholder_that_was_typed_or_sampled_is_no_span() -> None:
    ids = np.array([9, 5, 9, 6], dtype=np.int64)  # the first 9 was typed
    result = expand(ids, [Slot(2, 3)], [Replacement.repeat(9, 3)])
    assert result.ids.tolist() == [9, 5, 9, 9, 9, 6]
    assert result.offsets == [[(2, 4)]]
    (item,) = items(1, offsets=result.offsets[0])
    grown = np.append(result.ids, 9)  # and the last one sampled
    padded = pad_by_offsets(grown, [item])
    assert padded.tolist() == [9, 5, *VALUES[0][:3], 6, 9]
    assert count_mm_tokens_in_extend([0], [7], [item.offsets]) == 3


# --- cache ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["offsets"], ids=lambda case: case["id"])
def test_offsets_are_padded_as_in_the_reference_and_refused_where_they_leave_the_ids(case: dict[str, Any]) -> None:
    ids = np.array(case["input_ids"], dtype=np.int64)
    made = items(len(case["items"]))
    for item, given_item in zip(made, case["items"], strict=True):
        item.modality = Modality[given_item["modality"]]
        item.offsets = [(start, end) for start, end in given_item["offsets_inclusive"]]
    if case["id"] in ("truncated_inside", "truncated_before", "empty_ids"):
        with pytest.raises(SpanError, match="expected a span within"):
            pad_by_offsets(ids, made)
        return
    expected = list(map(int, case["output"]))
    if case["id"] == "video_without_token_id":
        # The reference leaves a modality without a placeholder id alone; here recorded offsets always count.
        expected[2:] = VALUES[1][:2]
    assert pad_by_offsets(ids, made).tolist() == expected
    assert ids.tolist() == case["input_ids"]


PAIRS_REFUSED = {
    "more_spans_than_items",
    "unbalanced_missing_end",
    "unbalanced_extra_end",
    "slice_before_any_item_start",
    "nested_pairs",
    "nested_pairs_inner_empty",
    "end_before_start",
    "start_ids_empty_list",
    "same_token_starts_and_ends",
}


@pytest.mark.parametrize("case", GOLDEN["token_pairs"], ids=lambda case: case["id"])
def test_pairs_are_padded_as_in_the_reference_and_refused_where_they_are_no_pairs(case: dict[str, Any]) -> None:
    ids = np.array(case["input_ids"], dtype=np.int64)
    arguments = (ids, items(case["num_items"]), [(start, end) for start, end in case["data_token_pairs"]])
    starts = case["data_start_token_ids"]
    if case["id"] in PAIRS_REFUSED:
        with pytest.raises(SpanError):
            pad_token_pairs(*arguments, data_start_token_ids=starts)
    else:
        padded, begun = pad_token_pairs(*arguments, data_start_token_ids=starts)
        assert padded.tolist() == list(map(int, case["output"]))
        assert begun == case["data_offsets"]
    assert ids.tolist() == case["input_ids"]


def test_every_reference_case_of_pairs_is_judged() -> None:
    names = {case["id"] for case in GOLDEN["token_pairs"]}
    assert names >= PAIRS_REFUSED
    assert len(names - PAIRS_REFUSED) == 7


def test_no_pairs_change_nothing() -> None:
    padded, begun = pad_token_pairs(np.arange(4), items(1), [])
    assert (padded.tolist(), begun) == ([0, 1, 2, 3], [])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]], list[Modality]]:
    """A length and the disjoint spans of some items, in any order; adjacent, first, last and all-item ones among them."""
    widths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=7))
    seq, spans = 0, []
    for gap, width in widths:
        spans.append((seq + gap, seq + gap + width - 1))
        seq += gap + width
    seq += draw(st.integers(0, 3))
    owners = draw(st.lists(st.integers(0, 2), min_size=len(spans), max_size=len(spans)))
    return (
        seq,
        [[span for span, owner in zip(spans, owners, strict=True) if owner == index] for index in range(3)],
        draw(st.lists(st.sampled_from(list(Modality)), min_size=3, max_size=3)),
    )


@given(layouts())
def test_padding_and_token_modalities_equal_a_loop_over_tokens(
    layout: tuple[int, list[list[tuple[int, int]]], list[Modality]],
) -> None:
    seq, spans, modalities = layout
    made = items(3)
    ids, token_modalities = list(range(100, 100 + seq)), [0] * seq
    expected = list(ids)
    for index, item in enumerate(made):
        item.offsets, item.modality = spans[index], modalities[index]
        for start, end in spans[index]:
            for at in range(start, end + 1):
                expected[at] = VALUES[index][(at - start) % 4]
                token_modalities[at] = {"IMAGE": 1, "VIDEO": 2, "AUDIO": 3}[modalities[index].name]
    given_ids = np.array(ids, dtype=np.int64)
    padded = pad_by_offsets(given_ids, made)
    assert padded.tolist() == expected
    assert token_modalities_of(made, seq).tolist() == token_modalities
    assert given_ids.tolist() == ids
    assert not np.shares_memory(padded, given_ids)


@pytest.mark.parametrize(
    "offsets",
    [
        [[(0, 2)], [(2, 3)]],
        [[(0, 4)], [(1, 2)]],
        [[(1, 1)], [(1, 1)]],
        [[(0, 1), (1, 2)], []],
        [[(0, 5)], []],
        [[(-1, 0)], []],
        [[(2, 1)], []],
    ],
    ids=["overlap", "inside", "same", "own", "past the end", "before the start", "backwards"],
)
def test_spans_that_overlap_or_leave_the_ids_are_refused(offsets: list[list[tuple[int, int]]]) -> None:
    made = items(2)
    for item, spans in zip(made, offsets, strict=True):
        item.offsets = spans
    with pytest.raises(SpanError, match=r"mm_items\[\d\]"):
        pad_by_offsets(np.arange(5), made)
    with pytest.raises(SpanError, match=r"mm_items\[\d\]"):
        token_modalities_of(made, 5)


def test_padding_an_item_without_identity_is_refused() -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)])
    with pytest.raises(UsageError, match="set_identity"):
        pad_by_offsets(np.arange(3), [item])


def test_runs_of_one_placeholder_are_padded_an_item_each() -> None:
    ids = np.array([9, 9, 1, 9, 2, 9, 9, 9, 9, 9], np.int64)
    expected = [*VALUES[0][:2], 1, VALUES[1][0], 2, *VALUES[2], VALUES[2][0]]
    assert pad_runs(ids, items(3), 9).tolist() == expected
    assert ids[0] == 9


@pytest.mark.parametrize(("ids", "count"), [([9, 9, 1, 9], 1), ([9, 9], 2), ([1], 1), ([9], 0)])
def test_other_counts_of_runs_and_items_are_refused_with_both(ids: list[int], count: int) -> None:
    with pytest.raises(SpanError, match=rf"expected {count} runs of placeholder 9, one per item, got \d"):
        pad_runs(np.array(ids, np.int64), items(count), 9)


requests = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(0, 30),
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=4),
    ),
    max_size=4,
)


@pytest.mark.case("5.9")
@given(requests)
def test_rows_in_an_extend_are_counted_as_a_loop_counts_them(
    batch: list[tuple[int, int, list[tuple[int, int]]]],
) -> None:
    expected = 0
    for prefix, extend, spans in batch:
        for start, end in spans:
            expected += sum(1 for at in range(start, end + 1) if prefix <= at < prefix + extend)
    counted = count_mm_tokens_in_extend([b[0] for b in batch], [b[1] for b in batch], [b[2] for b in batch])
    assert counted == expected


@given(layouts(), st.integers(1, 40))
def test_the_rows_of_all_chunks_are_the_rows_of_the_prompt(
    layout: tuple[int, list[list[tuple[int, int]]], list[Modality]], chunk: int
) -> None:
    seq, spans, _ = layout
    flat = [span for part in spans for span in part]
    total = sum(count_mm_tokens_in_extend([start], [min(chunk, seq - start)], [flat]) for start in range(0, seq, chunk))
    assert total == sum(end - start + 1 for start, end in flat)


def test_a_batch_whose_lists_differ_in_length_is_refused() -> None:
    with pytest.raises(SpanError, match="2 prefixes, 1 extends and 1 lists"):
        count_mm_tokens_in_extend([0, 0], [1], [[]])


# --- ids that came without offsets, by the rule of the plugin ----------------------------------------------------------

CALLS: list[Any] = []


def reverse(ids: np.ndarray, made: Any, special_tokens: SpecialTokens) -> np.ndarray:
    """A plugin's own rule, which is careless with what it is given."""
    CALLS.append((ids.copy(), made, special_tokens))
    ids[:] = ids[::-1].copy()
    return ids


def declared(padding: str, *modalities: Modality) -> ModelSpec:
    return ModelSpec(
        name="padded",
        output_version=1,
        modalities=modalities or (Modality.IMAGE,),
        placeholders={modality: f"<{modality.name}>" for modality in modalities or (Modality.IMAGE,)},
        fields=dict.fromkeys(modalities or (Modality.IMAGE,), ()),
        token_pairs=(("<s>", "</s>"),),
        padding=padding,
        processor="padded:Processor",
        encoder="padded:Encoder",
    )


IDS = np.array([1, 6, 9, 9, 7, 9, 6, 7, 6, 9, 9, 9, 9, 9, 7], np.int64)


def test_by_pairs_every_pair_is_an_items_and_other_tokens_stay() -> None:
    tokens = SpecialTokens(placeholders={Modality.IMAGE: 9}, pairs=((6, 7),))
    before = IDS.copy()
    padded = pad_input_ids(declared("pairs"), tokens, IDS, items(3))
    # The second pair is empty and still counts; the placeholder at 5 is outside of every pair.
    assert padded.tolist() == [1, 6, *VALUES[0][:2], 7, 9, 6, 7, 6, *VALUES[2], VALUES[2][0], 7]
    assert np.array_equal(IDS, before)
    assert not np.shares_memory(padded, IDS)
    with pytest.raises(SpanError, match="2 items"):
        pad_input_ids(declared("pairs"), tokens, IDS, items(2))


def test_by_runs_each_kind_has_its_own_placeholder_and_order() -> None:
    made = items(3)
    made[0].modality = Modality.VIDEO
    spec = declared("runs", Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
    tokens = SpecialTokens(placeholders={Modality.IMAGE: 9, Modality.VIDEO: 8, Modality.AUDIO: 5})
    ids = np.array([9, 9, 9, 8, 8, 1, 9, 2], np.int64)  # runs of two kinds may touch
    expected = [*VALUES[1][:3], *VALUES[0][:2], 1, VALUES[2][0], 2]
    assert pad_input_ids(spec, tokens, ids, made).tolist() == expected
    assert ids.tolist() == [9, 9, 9, 8, 8, 1, 9, 2]
    with pytest.raises(SpanError, match="expected 0 runs of placeholder 8, one per item, got 1"):
        pad_input_ids(spec, tokens, ids, made[1:])


def test_by_runs_an_item_whose_kind_has_no_placeholder_is_refused() -> None:
    made = items(2)
    made[1].modality = Modality.AUDIO
    tokens = SpecialTokens(placeholders={Modality.IMAGE: 9})
    with pytest.raises(SpanError, match="audios"):
        pad_input_ids(declared("runs"), tokens, np.array([9, 1, 5]), made)


@pytest.mark.parametrize("padding", ["pairs", "runs", "offsets", "nowhere:rule"])
def test_recorded_offsets_win_over_every_rule(padding: str) -> None:
    made = items(2)
    made[0].offsets, made[1].offsets = [(0, 0), (3, 4)], [(1, 2)]  # no rule would find these
    padded = pad_input_ids(declared(padding), SpecialTokens(), np.arange(6), made)
    assert padded.tolist() == [VALUES[0][0], *VALUES[1][:2], *VALUES[0][:2], 5]


def test_by_offsets_an_item_without_them_is_refused() -> None:
    made = items(2)
    made[0].offsets = [(0, 0)]
    with pytest.raises(SpanError, match="padded: expected recorded offsets"):
        pad_input_ids(declared("offsets"), SpecialTokens(), np.arange(3), made)


def test_a_plugins_own_rule_is_called_with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("padding_rules")
    module.reverse = reverse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "padding_rules", module)
    CALLS.clear()
    ids, made, tokens = np.array([1, 2, 3], np.int64), items(1), SpecialTokens(pairs=((6, 7),))
    padded = pad_input_ids(declared("padding_rules:reverse"), tokens, ids, made)
    assert padded.tolist() == [3, 2, 1]
    assert ids.tolist() == [1, 2, 3]
    assert not np.shares_memory(padded, ids)
    ((given_ids, given_items, given_tokens),) = CALLS
    assert given_ids.tolist() == [1, 2, 3]
    assert given_items is made
    assert given_tokens is tokens


# --- cache ids where a scheduler keeps its ids -------------------------------------------------------------------------

PADDED = [1, 2**62 + 999_999, 1_000_000, 2]


def kept_inputs(padded: list[int]) -> MultimodalInputs:
    array_ = np.array(padded, np.int64)
    zeros = np.zeros(len(padded), np.int64)
    return MultimodalInputs(mm_items=[], input_ids=zeros, padded_input_ids=array_, token_modalities=zeros)


ORIGINS = {
    "list": lambda ids: list(ids),
    "array": lambda ids: array("q", ids),
    "unsigned array": lambda ids: array("Q", ids),
    "numpy": lambda ids: np.array(ids, np.int64),
    "strided numpy": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
}


@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize("received", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
def test_cache_ids_replace_the_ids_that_a_scheduler_keeps(kind: str, received: Any) -> None:
    origin = ORIGINS[kind]([1, 9, 9, 2])
    same, before, inputs = origin, type(origin), kept_inputs(PADDED)
    assert apply_padded_input_ids(origin, received([1, 9, 9, 2]), inputs) is True
    assert [int(token) for token in origin] == PADDED
    assert origin is same
    assert type(origin) is before
    origin[0] = 5
    assert inputs.padded_input_ids.tolist() == PADDED
    if kind == "list":
        assert {type(token) for token in origin} == {int}


@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize(
    ("origin", "received", "padded"),
    [(4, 4, 3), (4, 3, 4), (3, 4, 4), (4, 4, 5), (4, 0, 0), (0, 4, 4), (1, 4, 4)],
)
def test_where_any_length_differs_nothing_changes(kind: str, origin: int, received: int, padded: int) -> None:
    kept = ORIGINS[kind](list(range(origin)))
    assert apply_padded_input_ids(kept, [0] * received, kept_inputs([10**6] * padded)) is False
    assert [int(token) for token in kept] == list(range(origin))


@pytest.mark.parametrize(
    "origin",
    [np.zeros(4, np.int32), np.zeros(4, np.float64), np.zeros(4, np.uint16), array("i", [0] * 4), array("d", [0] * 4)],
    ids=lambda origin: f"{type(origin).__name__} {getattr(origin, 'dtype', getattr(origin, 'typecode', ''))}",
)
def test_ids_that_cannot_hold_sentinels_are_refused_and_left_alone(origin: Any) -> None:
    with pytest.raises(UsageError, match="sentinels") as caught:
        apply_padded_input_ids(origin, [0] * 4, kept_inputs(PADDED))
    assert caught.value.argument == "origin"
    assert list(origin) == [0] * 4


@given(layouts(), st.integers(0, 3))
def test_expanded_prompts_of_several_kinds_are_matched_padded_and_marked(
    layout: tuple[int, list[list[tuple[int, int]]], list[Modality]], tail: int
) -> None:
    # Every span is an item of its own here, of the kind of its owner, and its tokens are the kind's placeholder.
    seq, spans, modalities = layout
    flat = sorted((span, modalities[owner]) for owner, part in enumerate(spans) for span in part)
    ids = [1] * (seq + tail)
    expected_modalities = [0] * (seq + tail)
    for (start, end), modality in flat:
        for at in range(start, end + 1):
            ids[at], expected_modalities[at] = 50 + int(modality), int(modality)
    parts = [Replacement.repeat(50 + int(modality), end - start + 1) for (start, end), modality in flat]
    found = match_expanded(np.array(ids), parts)
    assert found.offsets == [[span] for span, _ in flat]
    made = items(len(flat))
    for item, offsets, (_, modality) in zip(made, found.offsets, flat, strict=True):
        item.offsets, item.modality = offsets, modality
    assert token_modalities_of(made, seq + tail).tolist() == expected_modalities
    padded = pad_by_offsets(found.ids, made)
    for index, ((start, end), _) in enumerate(flat):
        values = made[index].pad_values or ()
        assert padded[start : end + 1].tolist() == [values[at % 4] for at in range(end - start + 1)]


def test_a_token_that_is_repeated_takes_no_memory() -> None:
    found = Replacement.repeat(7, 10**12)
    assert (len(found.ids), found.num_embeddings, int(found.ids[-1])) == (10**12, 10**12, 7)
