"""Who keeps features and rows, until when, and what a session's next turn goes on from."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import EmbedOutput, embed_mm_inputs
from mm_plugin.errors import UsageError
from mm_plugin.inputs import (
    Encoded,
    ForwardBatch,
    MultimodalInputs,
    MultimodalProcessorOutput,
    RequestMedia,
)
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of
from mm_plugin.positions import extend_positions, mrope_positions, slice_positions
from mm_plugin.scheduler import Lifecycle, LiveMedia, merge

HIDDEN = 2
NOTHING = LiveMedia(requests=0, features=0, feature_bytes=0, held=0, held_bytes=0)
TABLE = torch.nn.Embedding.from_pretrained(-torch.arange(1, 101.0).reshape(50, HIDDEN))
Grid = tuple[int, int, int]


class Feature(np.ndarray[Any, Any]):
    """An array that can be referred to weakly."""


def feature_of(seed: int) -> Feature:
    return np.array([seed], dtype=np.int64).view(Feature)


def make_item(seed: int, span: tuple[int, int], *, precomputed: bool = False) -> MultimodalDataItem:
    item = MultimodalDataItem(modality=Modality(1 + seed % 3), offsets=[span])
    if precomputed:
        item.precomputed_embeddings = torch.full((item.num_tokens, HIDDEN), float(seed))
    else:
        item.feature = feature_of(seed)
    item.set_identity(seed.to_bytes(32, "big"))
    return item


def make_inputs(seq: int, items: Sequence[MultimodalDataItem], ids: np.ndarray | None = None) -> MultimodalInputs:
    plain = np.arange(seq, dtype=np.int64) % 50 if ids is None else ids
    output = MultimodalProcessorOutput(
        input_ids=plain,
        padded_input_ids=pad_by_offsets(plain, items),
        token_modalities=token_modalities_of(items, seq),
        mm_items=list(items),
    )
    return MultimodalInputs.from_processor_output(output)


def rows(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
    return [torch.full((item.num_tokens, HIDDEN), float(item.feature[0])) for item in items]


ENCODERS = dict.fromkeys(Modality, rows)


def step(media: RequestMedia, prefix: int, extend: int, cache: Any = None, encoder: Any = None) -> EmbedOutput:
    ids = torch.from_numpy(media.inputs.padded_input_ids[prefix : prefix + extend])
    return embed_mm_inputs(ids, ForwardBatch([media], [prefix], [extend]), TABLE, encoder or ENCODERS, cache)


def expected(inputs: MultimodalInputs) -> list[list[float]]:
    out = [
        [-float(2 * (token % 50) + 1), -float(2 * (token % 50) + 2)] for token in range(len(inputs.padded_input_ids))
    ]
    for item in inputs.mm_items:
        for start, end in item.offsets:
            out[start : end + 1] = [[float(int.from_bytes(item.identity or b"", "big"))] * HIDDEN] * (end + 1 - start)
    return out


def remake(seed: int) -> Any:
    """A recipe of requests whose item of index i has the seed `seed + i`."""
    return lambda index: feature_of(seed + index)


# ------------------------------------------------------------------ retain


def two_items() -> MultimodalInputs:
    return make_inputs(12, [make_item(1, (1, 4)), make_item(2, (6, 9))])


@pytest.mark.case("5.5")
@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
@pytest.mark.parametrize("back", range(11))
def test_a_request_that_is_retracted_to_any_prefix_gives_its_rows_again(retain: Any, back: int) -> None:
    inputs = two_items()
    lifecycle = Lifecycle(retain)
    media = lifecycle.admit(inputs, recipe=remake(1))
    for start, extend in ((0, 3), (3, 5), (8, 4)):
        assert step(media, start, extend).input_embeds.tolist() == expected(inputs)[start : start + extend]
        media.advance(start + extend)
    media.retract(back)
    out = step(media, back, 12 - back)
    assert out.failed == ()
    assert out.input_embeds.tolist() == expected(inputs)[back:]
    media.finish()
    assert lifecycle.live() == NOTHING


@pytest.mark.case("5.4")
@pytest.mark.parametrize(
    ("retain", "features", "held"),
    [
        ("feature", [2, 2, 2, 2], [0, 1, 0, 0]),
        ("recipe", [2, 2, 1, 0], [0, 1, 0, 0]),
        ("embeddings", [2, 2, 1, 0], [0, 1, 1, 2]),
    ],
)
def test_what_is_alive_while_a_request_goes_on(retain: Any, features: list[int], held: list[int]) -> None:
    inputs, lifecycle = two_items(), Lifecycle(retain)
    media = lifecycle.admit(inputs, recipe=remake(1))
    seen = [lifecycle.live()]
    for start, extend in ((0, 3), (3, 3), (6, 6)):
        step(media, start, extend)
        media.advance(start + extend)
        seen.append(lifecycle.live())
    assert [live.features for live in seen] == features
    assert [live.feature_bytes for live in seen] == [8 * count for count in features]
    assert [live.held for live in seen] == held
    assert [live.held_bytes for live in seen] == [4 * HIDDEN * 4 * count for count in held]
    assert {live.requests for live in seen} == {1}
    media.finish()
    assert lifecycle.live() == NOTHING


@pytest.mark.case("5.5")
def test_a_feature_goes_only_when_the_last_row_of_its_item_is_computed() -> None:
    inputs = two_items()
    media = Lifecycle("recipe").admit(inputs, recipe=remake(1))
    for computed, left in ((0, [True, True]), (4, [True, True]), (5, [False, True]), (9, [False, True])):
        media.advance(computed)
        assert [item.feature is not None for item in inputs.mm_items] == left
    media.advance(10)
    assert [item.feature for item in inputs.mm_items] == [None, None]


@pytest.mark.case("5.5")
def test_rows_that_were_never_encoded_here_are_no_way_back() -> None:
    """The prefix came from another request's KV cache, so no step met the first item."""
    inputs, lifecycle = two_items(), Lifecycle("embeddings")
    media = lifecycle.admit(inputs)
    step(media, 5, 7)
    media.advance(12)
    assert [item.feature is None for item in inputs.mm_items] == [False, True]
    media.retract(0)
    out = step(media, 0, 12)
    assert out.failed == ()
    assert out.input_embeds.tolist() == expected(inputs)


@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
def test_rows_that_came_with_the_request_stay_until_its_end(retain: Any) -> None:
    inputs = make_inputs(6, [make_item(7, (1, 3), precomputed=True)])
    lifecycle = Lifecycle(retain)
    media = lifecycle.admit(inputs, recipe=lambda index: pytest.fail("a recipe was asked for given rows"))
    step(media, 0, 6)
    media.advance(6)
    media.retract(0)
    assert step(media, 0, 6).input_embeds.tolist() == expected(inputs)
    assert lifecycle.live().features == 1
    media.finish()
    assert inputs.mm_items[0].precomputed_embeddings is None


def test_a_retract_asks_the_recipe_only_for_what_is_needed_again() -> None:
    asked: list[int] = []

    def recipe(index: int) -> Any:
        asked.append(index)
        return feature_of(1 + index)

    inputs = two_items()
    media = Lifecycle("recipe").admit(inputs, recipe=recipe)
    media.advance(12)
    media.retract(5)
    assert asked == [1]
    media.retract(4)
    assert asked == [1, 0]
    media.retract(0)
    assert asked == [1, 0]


@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
@pytest.mark.parametrize("hit", range(12))
@pytest.mark.parametrize("computed", [0, 3, 8, 12])
def test_a_prefix_hit_is_consumed_and_the_rest_is_right(retain: Any, hit: int, computed: int) -> None:
    """At admission (nothing computed), and after a prefill whose KV cache was taken away."""
    asked: list[int] = []

    def recipe(index: int) -> Any:
        asked.append(index)
        return feature_of(1 + index)

    inputs, lifecycle = two_items(), Lifecycle(retain)
    media = lifecycle.admit(inputs, recipe=recipe)
    for start, extend in ((0, 3), (3, 5), (8, 4)):
        if start < computed:
            step(media, start, extend)
            media.advance(start + extend)
    media.resume(hit)
    ends = (4, 9)
    needed = [end >= hit for end in ends]
    released = [computed > end for end in ends]
    assert asked == [index for index in range(2) if retain == "recipe" and needed[index] and released[index]]
    if retain != "embeddings":
        assert lifecycle.live().held <= sum(needed)
    if retain == "recipe":
        assert [item.feature is not None for item in inputs.mm_items] == needed
    if retain == "feature":
        assert all(item.feature is not None for item in inputs.mm_items)
    out = step(media, hit, 12 - hit)
    assert out.failed_requests == frozenset()
    assert out.input_embeds.tolist() == expected(inputs)[hit:]
    media.retract(0)  # all of it can be computed again, whatever was consumed
    assert step(media, 0, 12).input_embeds.tolist() == expected(inputs)
    media.finish()
    assert lifecycle.live() == NOTHING


def test_what_a_hit_covers_is_held_no_longer_unless_it_comes_again() -> None:
    again = make_item(1, (6, 9))
    for second, held in ((make_item(2, (6, 9)), 0), (again, 1)):
        lifecycle = Lifecycle()
        media = lifecycle.admit(make_inputs(12, [make_item(1, (1, 4)), second]))
        step(media, 0, 3)
        assert lifecycle.live().held == 1
        media.resume(5)
        assert lifecycle.live().held == held


def test_a_hit_that_cuts_what_must_stay_whole_is_refused_and_changes_nothing() -> None:
    whole = make_item(1, (1, 4))
    whole.attention = "whole"
    inputs = make_inputs(12, [whole, make_item(2, (6, 9))])
    media = Lifecycle("recipe").admit(inputs, recipe=remake(1))
    for hit in (2, 4):
        with pytest.raises(UsageError, match=r"hit: expected tokens that do not cut the span \(1, 4\), got"):
            media.resume(hit)
    with pytest.raises(UsageError, match="hit: expected tokens from 0, got -1"):
        media.resume(-1)
    with pytest.raises(UsageError, match="expected a number of tokens"):
        media.resume(1.5)  # type: ignore[arg-type]
    assert all(item.feature is not None for item in inputs.mm_items)
    media.resume(8)
    assert [item.feature is not None for item in inputs.mm_items] == [False, True]


def test_a_recipe_that_gives_nothing_is_named() -> None:
    inputs = two_items()
    media = Lifecycle("recipe").admit(inputs, recipe=lambda index: None)
    media.advance(12)
    with pytest.raises(UsageError, match=r"mm_items\[0\]") as caught:
        media.retract(0)
    assert caught.value.argument == "recipe"


def test_arguments_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="expected one of feature, recipe, embeddings, got 'all'"):
        Lifecycle("all")  # type: ignore[arg-type]
    lifecycle = Lifecycle("recipe")
    with pytest.raises(UsageError, match="needs a recipe"):
        lifecycle.admit(two_items())
    assert lifecycle.live() == NOTHING


# ------------------------------------------------------------------ the end


@pytest.mark.case("5.4")
@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
@pytest.mark.parametrize("computed", [None, 0, 3, 5, 8, 12])
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_an_end_at_any_stage_frees_all(retain: Any, computed: int | None, end: str) -> None:
    inputs, lifecycle = two_items(), Lifecycle(retain)
    features = [weakref.ref(item.feature) for item in inputs.mm_items]
    media = lifecycle.admit(inputs, recipe=remake(1))
    if computed is not None:
        step(media, 0, computed)
        media.advance(computed)
    for _ in range(2):
        getattr(media, end)()
    assert lifecycle.live() == NOTHING
    assert media.held_embeddings == {}
    gc.collect()
    assert [feature() for feature in features] == [None, None]


@pytest.mark.parametrize("retain", ["feature", "embeddings"])
def test_an_abort_while_the_encoder_runs_leaves_nothing_held(retain: Any) -> None:
    inputs, lifecycle = two_items(), Lifecycle(retain)
    media = lifecycle.admit(inputs)

    def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        out = rows(items)
        media.abort()
        return out

    step(media, 0, 4, encoder=dict.fromkeys(Modality, encode))
    assert media.held_embeddings == {}
    assert lifecycle.live() == NOTHING


def test_an_abort_while_the_encoder_runs_gives_no_other_request_its_rows() -> None:
    inputs = [make_inputs(2, [make_item(seed, (0, 1))]) for seed in (3, 6, 9)]  # all images
    media = [Lifecycle().admit(each) for each in inputs]

    def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        out = rows(items)
        media[0].abort()
        return out

    ids = torch.from_numpy(np.concatenate([each.padded_input_ids for each in inputs]))
    batch = ForwardBatch(media, [0, 0, 0], [2, 2, 2])
    out = embed_mm_inputs(ids, batch, TABLE, {Modality.IMAGE: encode})
    assert out.input_embeds[2:].tolist() == [[6.0] * HIDDEN] * 2 + [[9.0] * HIDDEN] * 2


@pytest.mark.parametrize("call", ["advance", "retract", "resume", "next_turn"])
def test_a_request_that_has_ended_is_over(call: str) -> None:
    media = Lifecycle().admit(two_items())
    media.abort()
    with pytest.raises(UsageError, match="has ended"):
        getattr(media, call)(two_items() if call == "next_turn" else 0)


def test_requests_of_one_media_end_one_by_one() -> None:
    first, second = two_items(), two_items()
    lifecycle = Lifecycle()
    one, two = lifecycle.admit(first), lifecycle.admit(second)
    one.finish()
    assert lifecycle.live().requests == 1
    assert step(two, 0, 12).input_embeds.tolist() == expected(second)
    two.finish()
    assert lifecycle.live() == NOTHING


def test_threads_admit_and_end_requests_at_once() -> None:
    lifecycle = Lifecycle("embeddings")
    faults: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                media = lifecycle.admit(two_items())
                step(media, 0, 8)
                media.advance(8)
                lifecycle.live()
                media.finish()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert lifecycle.live() == NOTHING


# ------------------------------------------------------------------ sessions


class Turn:
    """Ids, spans and grids of one turn alone, its positions, and its inputs."""

    def __init__(self, parts: Sequence[int | Grid], seed: int) -> None:
        self.spans: list[tuple[int, int]] = []
        self.grids: list[Grid] = []
        cursor = 0
        for part in parts:
            if isinstance(part, int):
                cursor += part
                continue
            count = part[0] * part[1] * part[2]
            self.spans.append((cursor, cursor + count - 1))
            self.grids.append(part)
            cursor += count
        self.seq = cursor
        items = [make_item(seed + index, span) for index, span in enumerate(self.spans)]
        self.inputs = make_inputs(cursor, items)
        self.inputs.mrope_positions, self.inputs.mrope_position_delta = mrope_positions(
            self.spans, self.grids, seq=cursor
        )


PARTS = st.lists(st.integers(0, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), max_size=4)


@pytest.mark.case("4.6")
@given(PARTS, st.integers(0, 4), PARTS, st.integers(0, 4), PARTS)
def test_a_session_in_turns_equals_the_session_in_one(
    first: list[Any], generated: int, second: list[Any], more: int, third: list[Any]
) -> None:
    turns = [Turn(first, 10), Turn(second, 20), Turn(third, 30)]
    merged = merge(turns[0].inputs, turns[1].inputs, generated=range(generated))
    merged = merge(merged, turns[2].inputs, generated=np.arange(more))
    whole = Turn([*first, generated, *second, more, *third], 0)
    positions, delta = merged.mrope_positions, merged.mrope_position_delta
    assert positions is not None
    assert whole.inputs.mrope_positions is not None
    assert positions.tolist() == whole.inputs.mrope_positions.tolist()
    assert delta == whole.inputs.mrope_position_delta
    assert [item.offsets for item in merged.mm_items] == [[span] for span in whole.spans]
    # Ids: each turn's own, the generated ones between; modalities of the same places.
    ids = [turns[0].inputs.padded_input_ids, np.arange(generated), turns[1].inputs.padded_input_ids, np.arange(more)]
    assert merged.padded_input_ids.tolist() == np.concatenate([*ids, turns[2].inputs.padded_input_ids]).tolist()
    ids = [turns[0].inputs.input_ids, np.arange(generated), turns[1].inputs.input_ids, np.arange(more)]
    assert merged.input_ids.tolist() == np.concatenate([*ids, turns[2].inputs.input_ids]).tolist()
    modalities = [0] * whole.seq
    for item in merged.mm_items:
        ((start, end),) = item.offsets
        modalities[start : end + 1] = [int(item.modality)] * (end + 1 - start)
        assert merged.padded_input_ids[start : end + 1].tolist() == item.padding_sequence(end + 1 - start).tolist()
    assert merged.token_modalities.tolist() == modalities
    counts = [merged.num_image_tokens, merged.num_video_tokens, merged.num_audio_tokens]
    assert counts == [modalities.count(1), modalities.count(2), modalities.count(3)]


@pytest.mark.case("4.6")
def test_a_turn_after_a_prompt_that_ends_in_an_image_by_hand() -> None:
    # Two tokens of text, an image of 1 x 4 x 2, three generated tokens, then a turn of text, image 1 x 1 x 2, text.
    merged = merge(Turn([2, (1, 4, 2)], 1).inputs, Turn([1, (1, 1, 2), 1], 5).inputs, generated=[9, 9, 9])
    assert merged.mrope_positions is not None
    time, height, width = merged.mrope_positions.tolist()
    assert time == [0, 1] + [2] * 8 + [6, 7, 8] + [9] + [10, 10] + [12]
    assert height == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 10, 12]
    assert width == [0, 1] + [2, 3] * 4 + [6, 7, 8] + [9] + [10, 11] + [12]
    assert merged.mrope_position_delta == 13 - 17
    assert [item.offsets for item in merged.mm_items] == [[(2, 9)], [(14, 15)]]


def test_merging_leaves_both_turns_as_they_were() -> None:
    before, after = Turn([2, (1, 2, 2)], 1), Turn([(1, 1, 2), 1], 5)
    kept = [(turn.inputs.padded_input_ids.copy(), turn.spans) for turn in (before, after)]
    merged = merge(before.inputs, after.inputs, generated=[3])
    merged.padded_input_ids[:] = 0
    merged.mm_items.clear()
    for turn, (ids, spans) in zip((before, after), kept, strict=True):
        assert turn.inputs.padded_input_ids.tolist() == ids.tolist()
        assert [item.offsets for item in turn.inputs.mm_items] == [[span] for span in spans]


def test_a_turn_of_text_without_positions_goes_on_by_its_indices() -> None:
    def turn(seq: int, positions: np.ndarray | None, delta: int | None) -> MultimodalInputs:
        ids = np.zeros(seq, dtype=np.int64)
        return MultimodalInputs(
            mm_items=[],
            input_ids=ids,
            padded_input_ids=ids,
            token_modalities=ids,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    with_table = turn(3, np.array([[0, 1, 1], [0, 1, 1], [0, 1, 2]]), 0)
    merged = merge(with_table, turn(2, None, None), generated=[7])
    assert merged.mrope_positions is not None
    assert merged.mrope_positions[0].tolist() == [0, 1, 1, 3, 4, 5]
    before = merge(turn(2, None, None), with_table)
    assert before.mrope_positions is not None
    assert before.mrope_positions[2].tolist() == [0, 1, 2, 3, 4]
    assert merge(turn(2, None, None), turn(2, None, None)).mrope_positions is None


@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
def test_a_session_goes_on_and_gives_the_rows_of_all_turns_after_a_retract(retain: Any) -> None:
    lifecycle, turns = Lifecycle(retain), [Turn([1, (1, 2, 2), 1], 10), Turn([(1, 1, 3), 2, (1, 2, 1)], 20)]
    media = lifecycle.admit(turns[0].inputs, recipe=remake(10))
    step(media, 0, 6)
    media.advance(6)
    media.next_turn(merge(media.inputs, turns[1].inputs, generated=[6, 7]), recipe=remake(20))
    ids = np.arange(len(media.inputs.padded_input_ids)) % 50
    assert len(ids) == 6 + 2 + 7
    for back in (6, 0, 9, 3):  # the second turn is prefilled, then all, then from within either
        media.retract(back)
        out = step(media, back, 15 - back)
        assert out.failed == ()
        found = out.input_embeds.tolist()
        for place in range(back, 15):
            if not any(start <= place <= end for item in media.inputs.mm_items for start, end in item.offsets):
                continue
            assert found[place - back] == expected(media.inputs)[place]
        media.advance(15)
    media.finish()
    assert lifecycle.live() == NOTHING
    assert media.held_embeddings == {}


def test_a_session_with_one_recipe_is_asked_by_the_index_in_the_session() -> None:
    asked: list[int] = []

    def recipe(index: int) -> Any:
        asked.append(index)
        return feature_of(index)

    media = Lifecycle("recipe").admit(Turn([(1, 1, 2), (1, 1, 1)], 0).inputs, recipe=recipe)
    media.next_turn(merge(media.inputs, Turn([(1, 1, 2)], 2).inputs))
    media.advance(5)
    media.retract(0)
    assert asked == [0, 1, 2]


# ------------------------------------------------------------------ positions of generated tokens


@pytest.mark.case("4.4")
@pytest.mark.case("4.6")
@pytest.mark.parametrize("parts", [[3], [2, (1, 4, 2)], [(1, 2, 5)], [1, (3, 1, 1), 2]], ids=str)
def test_decode_positions_come_from_the_delta_of_the_request_itself(parts: list[Any]) -> None:
    """Also with another request between, and after a retract of generated tokens."""
    turn, other = Turn(parts, 1), Turn([(1, 9, 9)], 2)
    positions, delta = turn.inputs.mrope_positions, turn.inputs.mrope_position_delta
    assert positions is not None
    assert delta is not None
    maximum = int(positions.max())
    media = Lifecycle().admit(turn.inputs)
    for k in range(5):
        assert slice_positions(positions, delta, turn.seq + k, 1).tolist() == [[maximum + 1 + k]] * 3
        assert other.inputs.mrope_position_delta == 9 - 81
    media.retract(0)
    again = extend_positions(positions, delta, turn.seq + 5)
    assert again[:, turn.seq :].tolist() == [list(range(maximum + 1, maximum + 6))] * 3


# ------------------------------------------------------------------ soak


class Worker:
    """Requests that come, go on in chunks, are retracted, take another turn, and end or are aborted."""

    def __init__(self, retain: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.lifecycle = Lifecycle(retain)
        self.cache = EmbeddingCache(40 * HIDDEN * 4)
        self.running: list[tuple[RequestMedia, int]] = []
        self.features: list[weakref.ref[Any]] = []
        self.admitted = self.ends = 0
        self.most = 0

    def turn(self) -> tuple[MultimodalInputs, Any]:
        seeds: list[int] = []
        items, cursor = [], self.random.randrange(3)
        for _ in range(self.random.randrange(4)):
            count = self.random.randrange(1, 8)
            seed = self.random.randrange(1, 30) * 10 + count  # the count is part of what an item is
            seeds.append(seed)
            items.append(make_item(seed, (cursor, cursor + count - 1), precomputed=self.random.random() < 0.2))
            cursor += count + self.random.randrange(2)
        self.features += [weakref.ref(item.feature) for item in items if item.feature is not None]
        return make_inputs(cursor + 1, items), lambda index: feature_of(seeds[index])

    def tick(self) -> None:
        while len(self.running) < 8 and self.random.random() < 0.7:
            inputs, recipe = self.turn()
            self.running.append((self.lifecycle.admit(inputs, recipe=recipe), 0))
            self.admitted += 1
        batch = [
            (media, done, min(self.random.randrange(9), len(media.inputs.padded_input_ids) - done))
            for media, done in self.running
        ]
        ids = [media.inputs.padded_input_ids[done : done + extend] for media, done, extend in batch]
        if batch:
            out = embed_mm_inputs(
                torch.from_numpy(np.concatenate(ids)),
                ForwardBatch([media for media, _, _ in batch], [d for _, d, _ in batch], [e for _, _, e in batch]),
                TABLE,
                ENCODERS,
                self.cache,
            )
            assert out.failed == ()
            self.compare(out, batch)
        assert self.cache.stats().pinned == 0
        self.most = max(self.most, self.lifecycle.live().features)
        self.running = [(media, done + extend) for media, done, extend in batch]
        for media, done in self.running:
            media.advance(done)
        self.running = [kept for entry in self.running if (kept := self.go_on(*entry)) is not None]

    def compare(self, out: EmbedOutput, batch: Sequence[tuple[RequestMedia, int, int]]) -> None:
        found, flat = out.input_embeds[:, 0].tolist(), 0
        for media, done, extend in batch:
            for item in media.inputs.mm_items:
                seed = int.from_bytes(item.identity or b"", "big")
                for start, end in item.offsets:
                    first, stop = max(start, done), min(end + 1, done + extend)
                    part = found[flat + first - done : flat + stop - done] if first < stop else []
                    assert part == [float(seed)] * len(part)
            flat += extend

    def go_on(self, media: RequestMedia, done: int) -> tuple[RequestMedia, int] | None:
        chance = self.random.random()
        if chance < 0.06:
            media.abort()
            return None
        if chance < 0.25:
            done = self.random.randrange(done + 1)
            media.retract(done)
            return media, done
        if done < len(media.inputs.padded_input_ids):
            return media, done
        if chance < 0.4:
            inputs, recipe = self.turn()
            merged = merge(media.inputs, inputs, generated=[1] * self.random.randrange(3))
            media.next_turn(merged, recipe=recipe)
            return media, done
        media.finish()
        self.ends += 1
        return None


@pytest.mark.case("5.4")
@pytest.mark.case("5.5")
@pytest.mark.parametrize("retain", ["feature", "recipe", "embeddings"])
def test_two_thousand_mixed_requests_leave_nothing_after(retain: Any) -> None:
    worker = Worker(retain, seed=5)
    while worker.admitted < 2000:
        worker.tick()
        if worker.admitted % 400 < 2:
            gc.collect()
            # Flat: what lives belongs to the few requests that run, however many there were.
            assert sum(feature() is not None for feature in worker.features) <= worker.lifecycle.live().features
    for media, _ in worker.running:
        media.abort()
    worker.running.clear()
    assert worker.ends > 500
    assert worker.most > 8
    assert worker.lifecycle.live() == NOTHING
    assert worker.cache.stats().pinned == 0
    assert worker.cache.stats().bytes <= 40 * HIDDEN * 4
    gc.collect()
    assert [feature for feature in worker.features if feature() is not None] == []


def test_held_deepstack_rows_are_counted() -> None:
    def deep(items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        return [Encoded(part, deepstack=torch.stack([part, part])) for part in rows(items)]

    lifecycle = Lifecycle()
    media = lifecycle.admit(two_items())
    step(media, 0, 3, encoder=dict.fromkeys(Modality, deep))
    assert lifecycle.live().held_bytes == 3 * 4 * HIDDEN * 4
