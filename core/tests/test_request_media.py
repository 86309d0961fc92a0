"""What a worker keeps of one request: a place of its own for what a chunk cut, and an end that frees it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import (
    ForwardBatch,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    RequestMedia,
    UsageError,
    embed_mm_inputs,
)
from mm_plugin.cache import embedding_key, encoder_key
from mm_plugin.embed import plan_step
from mm_plugin.inputs import Encoded
from mm_plugin.items import item_key
from mm_plugin.scheduler import Lifecycle, merge

HIDDEN = 2
TABLE = torch.nn.Embedding.from_pretrained(torch.zeros(20, HIDDEN))


class Feature(np.ndarray[Any, Any]):
    """An array that can be referred to weakly."""


def make_inputs(*seeds: int) -> MultimodalInputs:
    """A prompt of a token of text, then for each seed an image of four tokens, and a token of text after each."""
    items, cursor = [], 1
    for seed in seeds:
        item = MultimodalDataItem(
            modality=Modality.IMAGE, offsets=[(cursor, cursor + 3)], feature=np.array([seed]).view(Feature)
        )
        item.set_hash(seed)
        items.append(item)
        cursor += 5
    ids = np.arange(cursor)
    padded = ids.copy()
    for item in items:
        padded[item.offsets[0][0] : item.offsets[0][1] + 1] = item.padding_sequence(4)
    return MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=padded, token_modalities=ids * 0)


class Counter:
    """Encoders that note what they were called with."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        self.seeds += [int(item.feature[0]) for item in items]
        return [torch.full((item.num_tokens, HIDDEN), float(item.feature[0])) for item in items]


def step(media: Sequence[Any], prefixes: Sequence[int], extends: Sequence[int], encode: Any) -> list[float]:
    out = embed_mm_inputs(
        torch.zeros(sum(extends), dtype=torch.int64),
        ForwardBatch(media, prefixes, extends),
        TABLE,
        {Modality.IMAGE: encode},
    )
    assert out.failed == ()
    return out.input_embeds[:, 0].tolist()


def test_inputs_alone_are_refused_before_anything_is_encoded_and_the_error_says_what_to_do() -> None:
    encode = Counter()
    with pytest.raises(
        UsageError, match=r"batch.mm_inputs\[1\]: expected a RequestMedia.* make RequestMedia\(inputs\)"
    ) as caught:
        step([None, make_inputs(3)], [0, 0], [1, 6], encode)
    assert caught.value.argument == "batch"
    assert encode.seeds == []
    # A step is planned from either: a scheduler has no RequestMedia.
    inputs = make_inputs(3)
    assert plan_step(ForwardBatch([inputs], [0], [6])) == plan_step(ForwardBatch([RequestMedia(inputs)], [0], [6]))


@pytest.mark.parametrize("entry", [{}, "media", 3, [None]], ids=str)
def test_another_kind_of_entry_is_refused(entry: Any) -> None:
    with pytest.raises(UsageError, match=rf"batch.mm_inputs\[0\]: .*got {type(entry).__name__}"):
        plan_step(ForwardBatch([entry], [0], [1]))


@pytest.mark.parametrize(
    ("inputs", "options", "argument"),
    [
        (None, {}, "inputs"),
        (make_inputs(), {"retain": "rows"}, "retain"),
        (make_inputs(), {"retain": "recipe"}, "recipe"),
    ],
    ids=["inputs", "retain", "recipe"],
)
def test_arguments_that_cannot_work_are_refused(inputs: Any, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(UsageError, match=f"{argument}: ") as caught:
        RequestMedia(inputs, **options)
    assert caught.value.argument == argument


def test_one_object_without_a_lifecycle_serves_a_request_to_its_end() -> None:
    inputs, encode, ended = make_inputs(3), Counter(), []
    media = RequestMedia(inputs, on_end=ended.append)
    found = [value for start in range(0, 6, 2) for value in step([media], [start], [2], encode)]
    assert found == [0, 3, 3, 3, 3, 0]
    assert encode.seeds == [3]
    assert media.held_embeddings == {}
    for _ in range(2):
        media.finish()
    assert media.ended
    assert ended == [media]
    assert inputs.mm_items[0].feature is None


def test_requests_that_share_their_inputs_hold_what_each_of_them_needs() -> None:
    """As with several samples of one prompt: one has passed the image, the other is within it."""
    inputs, encode = make_inputs(3), Counter()
    first, second = RequestMedia(inputs), RequestMedia(inputs)
    step([first, second], [0, 0], [3, 3], encode)
    step([first], [3], [3], encode)
    assert (len(first.held_embeddings), len(second.held_embeddings)) == (0, 1)
    assert step([second], [3], [3], encode) == [3, 3, 0]
    assert encode.seeds == [3]


def test_what_is_held_is_given_out_as_a_copy() -> None:
    media = RequestMedia(make_inputs(3))
    step([media], [0], [3], Counter())
    media.held_embeddings.clear()
    ((key, encoded),) = media.held_embeddings.items()
    assert key == embedding_key(item_key(media.inputs.mm_items[0]), encoder_key("", "torch.float32"))
    assert isinstance(encoded, Encoded)


def test_a_request_that_ended_holds_nothing_of_a_step_that_was_under_way() -> None:
    media = RequestMedia(make_inputs(3))
    media.abort()
    media.hold({b"key": Encoded(torch.zeros(1, HIDDEN))}, {})
    assert media.held_embeddings == {}


def test_one_request_s_recipe_keeps_no_other_request_waiting() -> None:
    """Each request has locks of its own; and a step of the same request reads while its recipe runs."""
    started, go_on = threading.Event(), threading.Event()

    def recipe(index: int) -> Any:
        started.set()
        assert go_on.wait(30)
        return np.array([3])

    lifecycle, encode = Lifecycle("recipe"), Counter()
    slow = lifecycle.admit(make_inputs(3), recipe=recipe)
    other = lifecycle.admit(make_inputs(5), recipe=recipe)
    slow.advance(6)
    thread = threading.Thread(target=slow.retract)
    thread.start()
    try:
        assert started.wait(30)
        assert step([other], [0], [6], encode) == [0, 5, 5, 5, 5, 0]
        assert slow.held_embeddings == {}
        assert lifecycle.live().requests == 2
    finally:
        go_on.set()
        thread.join()


def test_a_recipe_may_abort_its_own_request() -> None:
    media = Lifecycle("recipe").admit(make_inputs(3), recipe=lambda index: (media.abort(), np.array([3]))[1])
    media.advance(6)
    media.retract()
    assert media.ended


# ------------------------------------------------------------------ the next turn of a session


def test_a_turn_that_was_not_merged_is_refused_and_changes_nothing() -> None:
    media = RequestMedia(make_inputs(3))
    before = media.inputs
    for wrong in (make_inputs(5), make_inputs(), merge(make_inputs(4), make_inputs(5))):
        with pytest.raises(
            UsageError, match=r"expected the request's 6 tokens and 1 items first.*merge\(media.inputs, turn\)"
        ):
            media.next_turn(wrong)
        assert media.inputs is before
    media.next_turn(merge(media.inputs, make_inputs(5)))
    assert len(media.inputs.mm_items) == 2


def test_a_turn_whose_feature_was_consumed_keeps_it_nowhere() -> None:
    """The turn's own inputs belong to the caller; the session does not keep a second copy of their items alive."""
    media = Lifecycle("recipe").admit(make_inputs(3), recipe=lambda index: np.array([3]))
    turn = make_inputs(5)
    feature = weakref.ref(turn.mm_items[0].feature)
    media.next_turn(merge(media.inputs, turn), recipe=lambda index: np.array([5]))
    del turn
    gc.collect()
    assert feature() is not None
    media.advance(12)
    gc.collect()
    assert feature() is None
    media.retract(0)
    assert step([media], [0], [12], Counter()) == [0, 3, 3, 3, 3, 0, 0, 5, 5, 5, 5, 0]


def test_a_turn_that_follows_while_a_step_runs_is_none_of_the_step_s_business() -> None:
    media = RequestMedia(make_inputs(3))
    encode = Counter()

    def following(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        out = encode(items)
        media.next_turn(merge(media.inputs, make_inputs(5)))
        return out

    assert step([media], [0], [3], following) == [0, 3, 3]
    assert step([media], [3], [9], encode) == [3, 3, 0, 0, 5, 5, 5, 5, 0]
    assert encode.seeds == [3, 5]


def test_an_abort_releases_the_features_of_all_turns() -> None:
    lifecycle = Lifecycle()
    media = lifecycle.admit(make_inputs(3))
    turn = make_inputs(5)
    features = [weakref.ref(media.inputs.mm_items[0].feature), weakref.ref(turn.mm_items[0].feature)]
    media.next_turn(merge(media.inputs, turn))
    del turn
    media.abort()
    gc.collect()
    assert [feature() for feature in features] == [None, None]
    assert lifecycle.live().requests == 0
