"""Prompts that are too long: the limit is on what they expand to, and what is left out goes as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from toy import PlainToy, Toy, audio, png, toy_spec

from mm_plugin.errors import LimitError, UsageError
from mm_plugin.events import Event, ItemDropped
from mm_plugin.inputs import MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.processor import ModelProcessor
from mm_plugin.spec import ModelSpec

WORD, OTHER, THIRD, IMAGE, AUDIO, START, END, MARK = 1, 2, 3, 4, 5, 6, 7, 8
WORDS = ("word", "other", "third")
SPECIAL = ["<image>", "<audio>", "<s>", "</s>", "<mark>"]


class Processor(Toy):
    """Twice as many rows where there are fewer than three images."""

    def context(self, counts: Mapping[Modality, int]) -> bool:
        return counts.get(Modality.IMAGE, 0) < 3

    def rows(self, modality: Modality, size: Any, options: Any, context: bool) -> int:
        return super().rows(modality, size, options, False) * (2 if context else 1)


def positions(
    items: Sequence[Any], *, seq: int, config: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[np.ndarray, int]:
    """Positions that stand still inside a media input, so that it shows where each of them lies."""
    still = np.zeros(seq, dtype=np.int64)
    for item in items:
        for start, end in item.offsets:
            still[start + 1 : end + 1] = 1
    along = np.arange(seq) - np.cumsum(still)
    return np.stack([along] * 3).astype(np.int64), -int(still.sum())


SPEC = toy_spec(Modality.IMAGE, Modality.AUDIO, name="two", token_pairs=(("<s>", "</s>"),), positions="two:positions")
Open = Callable[..., ModelProcessor]


@pytest.fixture(autouse=True)
def loaded_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`two:positions` without a module `two`."""
    original = ModelSpec.load
    monkeypatch.setattr(
        ModelSpec, "load", lambda self, name: positions if name == "positions" else original(self, name)
    )


@pytest.fixture
def open_two(open_words: Open) -> Open:
    return lambda cls=PlainToy: open_words(cls, SPEC, SPECIAL, WORDS)


A, B, C, D = png(0, 3), png(1, 4), png(2, 5), png(3, 2)
HEARD_A, HEARD_D = audio(0, 3), audio(3, 2)


def assert_same(left: MultimodalProcessorOutput, right: MultimodalProcessorOutput) -> None:
    """All that a scheduler and a GPU worker get, but for what was dropped."""
    for name in ("input_ids", "padded_input_ids", "token_modalities", "mrope_positions"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert left.mrope_position_delta == right.mrope_position_delta
    assert len(left.mm_items) == len(right.mm_items)
    for one, other in zip(left.mm_items, right.mm_items, strict=True):
        assert (one.modality, one.offsets, one.identity) == (other.modality, other.offsets, other.identity)
        assert one.model_specific_data == other.model_specific_data
        assert np.array_equal(one.feature, other.feature)


# word <s> 3 </s> other <s> 4 </s> third <s> 5 </s> word: 3 + 4 + 5 rows, 6 wrappers, 4 words.
PROMPT = "word <s> <image> </s> other <s> <image> </s> third <s> <image> </s> word"
FULL = 22


@pytest.mark.case("2.3")
@pytest.mark.case("2.4")
@pytest.mark.parametrize(
    ("policy", "limit", "rest", "media", "dropped"),
    [
        ("drop_oldest", FULL, PROMPT, [A, B, C], ()),
        ("drop_oldest", FULL - 1, "word other <s> <image> </s> third <s> <image> </s> word", [B, C], ("images[0]",)),
        ("drop_oldest", 17, "word other <s> <image> </s> third <s> <image> </s> word", [B, C], ("images[0]",)),
        ("drop_oldest", 16, "word other third <s> <image> </s> word", [C], ("images[0]", "images[1]")),
        ("drop_oldest", 11, "word other third <s> <image> </s> word", [C], ("images[0]", "images[1]")),
        ("drop_oldest", 10, "word other third word", [], ("images[0]", "images[1]", "images[2]")),
        ("drop_oldest", 4, "word other third word", [], ("images[0]", "images[1]", "images[2]")),
        ("drop_newest", FULL - 1, "word <s> <image> </s> other <s> <image> </s> third word", [A, B], ("images[2]",)),
        ("drop_newest", 15, "word <s> <image> </s> other <s> <image> </s> third word", [A, B], ("images[2]",)),
        ("drop_newest", 14, "word <s> <image> </s> other third word", [A], ("images[2]", "images[1]")),
        ("drop_newest", 8, "word other third word", [], ("images[2]", "images[1]", "images[0]")),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_dropping_equals_a_request_without_the_dropped(
    open_two: Open,
    decodes: list[str],
    events: list[Event],
    policy: str,
    limit: int,
    rest: str,
    media: list[bytes],
    dropped: tuple[str, ...],
    asynchronous: bool,
) -> None:
    processor = open_two()
    arguments: dict[str, Any] = {"max_prompt_tokens": limit, "on_overflow": policy}
    if asynchronous:
        output = asyncio.run(processor.process_async(PROMPT, [A, B, C], **arguments))
    else:
        output = processor.process(PROMPT, [A, B, C], **arguments)
    assert output.dropped == dropped
    assert len(output.input_ids) <= limit
    assert {"images[0]", "images[1]", "images[2]"} - set(decodes) == set(dropped)
    reported = [event.path for event in events if isinstance(event, ItemDropped)]
    assert reported == list(dropped)
    assert_same(output, open_two().process(rest, media))
    assert processor.cache_stats.pinned == 0


def test_spans_positions_and_token_types_of_what_remains_by_hand(open_two: Open) -> None:
    output = open_two().process(PROMPT, [A, B, C], max_prompt_tokens=17, on_overflow="drop_oldest")
    rows = [IMAGE] * 4, [IMAGE] * 5
    assert output.input_ids.tolist() == [WORD, OTHER, START, *rows[0], END, THIRD, START, *rows[1], END, WORD]
    assert [item.offsets for item in output.mm_items] == [[(3, 6)], [(10, 14)]]
    assert output.token_modalities.tolist() == [0] * 3 + [1] * 4 + [0] * 3 + [1] * 5 + [0] * 2
    assert output.mrope_positions is not None
    assert output.mrope_positions[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7, 7, 7, 7, 7, 8, 9]
    assert output.mrope_position_delta == -7


@pytest.mark.case("2.4")
def test_the_default_is_to_refuse(open_two: Open, decodes: list[str]) -> None:
    for arguments in ({}, {"on_overflow": "error"}):
        with pytest.raises(LimitError, match="at most 21 tokens in the expanded prompt, got 22") as caught:
            open_two().process(PROMPT, [A, B, C], max_prompt_tokens=21, **arguments)
        assert (caught.value.setting, caught.value.limit, caught.value.value) == ("max_prompt_tokens", 21, 22)
    assert decodes == []


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest", "trim_text"])
def test_a_policy_without_a_limit_or_within_it_changes_nothing(
    open_two: Open, events: list[Event], policy: Any
) -> None:
    expected = open_two().process(PROMPT, [A, B, C])
    for limit in (None, FULL, 10**9):
        output = open_two().process(PROMPT, [A, B, C], max_prompt_tokens=limit, on_overflow=policy)
        assert_same(output, expected)
        assert output.dropped == ()
    assert [event for event in events if isinstance(event, ItemDropped)] == []


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_text_that_is_too_long_by_itself_is_refused(open_two: Open, decodes: list[str], policy: Any) -> None:
    processor = open_two()
    with pytest.raises(LimitError, match="at most 3 tokens in the expanded prompt, got 4"):
        processor.process(PROMPT, [A, B, C], max_prompt_tokens=3, on_overflow=policy)
    assert decodes == []
    assert processor.cache_stats.pinned == 0


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        ("word <image> word", "word word"),  # no wrapper
        ("<s> <image> </s>", ""),
        ("<s> word <image> </s>", "<s> word </s>"),  # not around it
        ("</s> <image> <s>", "</s> <s>"),  # no pair
        ("<s> <s> <image> </s> </s>", "<s> </s>"),  # the inner pair alone
        ("<image> </s>", "</s>"),
        ("<s> <image>", "<s>"),
    ],
)
def test_only_a_pair_that_stands_around_a_media_goes_with_it(open_two: Open, prompt: str, rest: str) -> None:
    processor = open_two()
    limit = len(processor.process(rest).input_ids) if rest else 0
    for policy in ("drop_oldest", "drop_newest"):
        output = processor.process(prompt, [A], max_prompt_tokens=limit, on_overflow=policy)
        assert output.input_ids.tolist() == (processor.process(rest).input_ids.tolist() if rest else [])
        assert output.mm_items == []


def test_adjacent_media_of_several_kinds_are_dropped_in_prompt_order(open_two: Open) -> None:
    prompt = "<audio> <s> <image> </s> <image> <s> <audio> </s>"  # 3 + 1 4 1 + 5 + 1 2 1
    for policy, limit, rest, arguments, dropped in (
        ("drop_oldest", 17, "<s> <image> </s> <image> <s> <audio> </s>", ([B, C], [HEARD_D]), ("audios[0]",)),
        ("drop_oldest", 14, "<image> <s> <audio> </s>", ([C], [HEARD_D]), ("audios[0]", "images[0]")),
        ("drop_newest", 17, "<audio> <s> <image> </s> <image>", ([B, C], [HEARD_A]), ("audios[1]",)),
        ("drop_newest", 13, "<audio> <s> <image> </s>", ([B], [HEARD_A]), ("audios[1]", "images[1]")),
    ):
        output = open_two().process(
            prompt, [B, C], audios=[HEARD_A, HEARD_D], max_prompt_tokens=limit, on_overflow=policy
        )
        assert output.dropped == dropped
        assert_same(output, open_two().process(rest, arguments[0], audios=arguments[1]))


# ------------------------------------------------------------------ survivors that depend on their company


@pytest.mark.case("2.4")
@pytest.mark.case("3.9")
@pytest.mark.parametrize("warm", [False, True])
def test_survivors_that_grow_are_laid_out_again(open_two: Open, decodes: list[str], warm: bool) -> None:
    # Four images, one row a line: 3 + 4 + 5 + 2 = 14. Two images, two rows a line: 2 x (5 + 2) = 14. One: 2 x 2 = 4.
    processor = open_two(Processor)
    if warm:
        processor.process("<image> " * 4, [A, B, C, D])
        decodes.clear()
    output = processor.process("<image> " * 4, [A, B, C, D], max_prompt_tokens=14, on_overflow="drop_oldest")
    assert output.dropped == ()
    assert len(output.input_ids) == 14
    decodes.clear()
    # 13: without A 11 are left, which fits, for three images are still three.
    output = processor.process("<image> " * 4, [A, B, C, D], max_prompt_tokens=13, on_overflow="drop_oldest")
    assert output.dropped == ("images[0]",)
    assert_same(output, open_two(Processor).process("<image> " * 3, [B, C, D]))
    decodes.clear()
    # 10: without B the other two grow to 14, so that C goes too.
    output = processor.process("<image> " * 4, [A, B, C, D], max_prompt_tokens=10, on_overflow="drop_oldest")
    assert output.dropped == ("images[0]", "images[1]", "images[2]")
    assert len(output.input_ids) == 4
    assert decodes == ["images[3]"]
    assert_same(output, open_two(Processor).process("<image>", [D]))
    assert processor.cache_stats.pinned == 0


def test_a_survivor_that_others_have_cached_is_taken_from_there(open_two: Open, decodes: list[str]) -> None:
    processor = open_two(Processor)
    processor.process("<image>", [D])
    decodes.clear()
    output = processor.process("<image> " * 4, [A, B, C, D], max_prompt_tokens=10, on_overflow="drop_oldest")
    assert output.mm_items[0].offsets == [(0, 3)]
    assert decodes == []


# ------------------------------------------------------------------ any prompt, against a slow one


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[int], int, str]:
    """Ids in which every image is bare or wrapped, heights of the images, a limit, a policy."""
    ids: list[int] = []
    heights: list[int] = []
    for kind in draw(st.lists(st.integers(0, 6), max_size=9)):
        if kind < 3:
            ids += [WORD] * kind
            ids.append(MARK if kind == 1 else OTHER)
        elif kind < 5:
            ids += [START, IMAGE, END]
        else:
            ids.append(IMAGE)
    heights = [draw(st.integers(1, 4)) for token in ids if token == IMAGE]
    return ids, heights, draw(st.integers(0, 25)), draw(st.sampled_from(["drop_oldest", "drop_newest", "trim_text"]))


def cost(ids: list[int], heights: list[int], policy_context: bool) -> int:
    factor = 2 if policy_context and len(heights) < 3 else 1
    return len(ids) - len(heights) + factor * sum(heights)


def slow(ids: list[int], heights: list[int], limit: int, policy: str) -> tuple[list[int], list[int]] | None:
    """Ids and indices of images that remain; None where it stays too long."""
    ids, kept = list(ids), list(range(len(heights)))
    while cost(ids, [heights[index] for index in kept], True) > limit:
        if policy == "trim_text":
            found = next((at for at, token in enumerate(ids) if token in (WORD, OTHER)), None)
            if found is None:
                return None
            del ids[found]
            continue
        if not kept:
            return None
        images = [at for at, token in enumerate(ids) if token == IMAGE]
        at = images[0] if policy == "drop_oldest" else images[-1]
        kept.pop(0 if policy == "drop_oldest" else -1)
        if 0 < at < len(ids) - 1 and (ids[at - 1], ids[at + 1]) == (START, END):
            del ids[at - 1 : at + 2]
        else:
            del ids[at]
    return ids, kept


@pytest.mark.case("2.3")
@pytest.mark.case("2.4")
@hypothesis_settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
def test_every_policy_equals_a_slow_one(open_two: Open, drawn: tuple[list[int], list[int], int, str]) -> None:
    ids, heights, limit, policy = drawn
    media = [np.full((height, 1, 3), 10 * index, dtype=np.uint8) for index, height in enumerate(heights)]
    processor = open_two(Processor)
    expected = slow(ids, heights, limit, policy)
    if expected is None:
        with pytest.raises(LimitError):
            processor.process(ids, media, max_prompt_tokens=limit, on_overflow=policy)
    else:
        rest, kept = expected
        output = processor.process(ids, media, max_prompt_tokens=limit, on_overflow=policy)
        assert_same(output, processor.process(rest, [media[index] for index in kept]))
        assert {int(path[7:-1]) for path in output.dropped} == set(range(len(heights))) - set(kept)
        assert len(output.input_ids) <= limit
    assert processor.cache_stats.pinned == 0


# ------------------------------------------------------------------ text


@pytest.mark.case("2.3")
@pytest.mark.parametrize(
    ("limit", "rest"),
    [
        (FULL, PROMPT),
        (FULL - 1, "<s> <image> </s> other <s> <image> </s> third <s> <image> </s> word"),
        (FULL - 2, "<s> <image> </s> <s> <image> </s> third <s> <image> </s> word"),
        (FULL - 4, "<s> <image> </s> <s> <image> </s> <s> <image> </s>"),
    ],
)
def test_trimming_takes_the_first_words_and_leaves_media_and_wrappers(open_two: Open, limit: int, rest: str) -> None:
    output = open_two().process(PROMPT, [A, B, C], max_prompt_tokens=limit, on_overflow="trim_text")
    assert len(output.input_ids) == limit
    assert output.dropped == ()
    assert_same(output, open_two().process(rest, [A, B, C]))


def test_trimming_leaves_special_tokens(open_two: Open) -> None:
    prompt = "<mark> word other <mark> <image> third <mark>"
    output = open_two().process(prompt, [D], max_prompt_tokens=6, on_overflow="trim_text")
    assert output.input_ids.tolist() == [MARK, MARK, IMAGE, IMAGE, THIRD, MARK]
    assert output.mm_items[0].offsets == [(2, 3)]


@pytest.mark.case("2.3")
def test_what_cannot_be_trimmed_enough_is_refused(open_two: Open, decodes: list[str]) -> None:
    processor = open_two()
    with pytest.raises(LimitError, match="at most 17") as caught:
        processor.process(PROMPT, [A, B, C], max_prompt_tokens=17, on_overflow="trim_text")
    assert (caught.value.setting, caught.value.limit) == ("max_prompt_tokens", 17)
    assert decodes == []
    assert processor.cache_stats.pinned == 0


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest", "trim_text"])
def test_expanded_ids_are_not_shortened(open_two: Open, policy: Any) -> None:
    processor = open_two()
    ids = processor.process(PROMPT, [A, B, C]).input_ids
    for limit in (None, 5, FULL):
        with pytest.raises(UsageError, match="expanded") as caught:
            processor.process(ids, [A, B, C], expanded=True, max_prompt_tokens=limit, on_overflow=policy)
        assert caught.value.argument == "on_overflow"


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"on_overflow": "drop"}, "on_overflow"),
        ({"on_overflow": None}, "on_overflow"),
        ({"max_prompt_tokens": "9"}, "max_prompt_tokens"),
        ({"max_prompt_tokens": 9.0}, "max_prompt_tokens"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_a_usage_error(open_two: Open, arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_two().process("word", **arguments)
    assert caught.value.argument == argument


def test_a_media_that_is_dropped_binds_no_hash(open_two: Open) -> None:
    processor = open_two()
    processor.process("<image> word", [A], mm_hashes=[7], max_prompt_tokens=1, on_overflow="drop_oldest")
    (item,) = processor.process("<image>", [B], mm_hashes=[7]).mm_items
    assert item.num_tokens == 4


def test_hashes_stay_with_their_media_when_others_are_dropped(open_two: Open) -> None:
    output = open_two().process(
        PROMPT, [A, B, C], mm_hashes=[1, 2, 3], mm_hash_scope="raw", max_prompt_tokens=17, on_overflow="drop_oldest"
    )
    assert [item.hash for item in output.mm_items] == [2, 3]
