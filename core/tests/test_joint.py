"""Requests that a model prepares only as a whole: one item for each modality, exact, and nothing remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from toy import Toy, png, toy_spec

from mm_plugin import (
    DecodedMedia,
    JointItem,
    JointOutput,
    LimitError,
    MediaError,
    Modality,
    MultimodalInputs,
    PlaceholderError,
    PrecomputedEmbeddings,
    ProcessesJointly,
    ProcessorError,
    Replacement,
    RequestError,
    UsageError,
)
from mm_plugin.events import HashIgnored, ItemKeyed

WORD, OTHER, IMAGE, MARK = 1, 2, 3, 4
SPEC = toy_spec(name="mosaic", fields={Modality.IMAGE: ("heights",)}, padding="offsets")
Open = Callable[..., Any]


class Mosaic(ProcessesJointly, Toy):
    """All images side by side, as many rows as the highest is high, wherever the text says `<image>`; then a mark."""

    def is_joint(self) -> bool:
        return True

    def prepare_jointly(
        self, text: str, media: Mapping[Modality, Sequence[DecodedMedia]], options: Any, *, rendered: bool
    ) -> JointOutput:
        images = [decoded.pixels for decoded in media[Modality.IMAGE]]
        if text.count("<image>") != len(images):
            raise PlaceholderError("prompt: as many images as places", path="prompt")
        heights = [len(image) for image in images]
        ids: list[int] = []
        for word in text.split():
            ids += [IMAGE] * max(heights) if word == "<image>" else [WORD]
        is_embed = np.array([index == IMAGE for index in ids] + [False])
        feature = np.concatenate([image.reshape(-1) for image in images])
        fields = {"heights": np.array(heights)}
        return JointOutput(np.array([*ids, MARK]), [JointItem(Modality.IMAGE, is_embed, feature, fields)])

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> dict[str, Any]:
        raise AssertionError("an image was laid out by itself")

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
        raise AssertionError("an image was prepared by itself")

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        raise AssertionError("an image was replaced by itself")


@pytest.fixture
def mosaic(open_words: Open) -> Any:
    return open_words(Mosaic, SPEC, ["<image>", "<mark>"], ("word", "other"))


A, B = png(0, 3, 2), png(1, 4, 2)


def test_a_request_gives_one_item_with_the_spans_of_all_its_media(mosaic: Any, events: list[Any]) -> None:
    output = mosaic.process("word <image> word <image>", [A, B])
    assert output.input_ids.tolist() == [WORD, *[IMAGE] * 4, WORD, *[IMAGE] * 4, MARK]
    (item,) = output.mm_items
    assert item.offsets == [(1, 4), (6, 9)]
    assert item.get("heights").tolist() == [3, 4]
    assert len(item.feature) == (3 + 4) * 2 * 3
    assert output.token_modalities.tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    # Both views of the ids, as for any request.
    assert (output.padded_input_ids != output.input_ids).tolist() == (output.token_modalities == 1).tolist()
    assert MultimodalInputs.from_processor_output(output).num_image_tokens == 8
    (keyed,) = [event for event in events if isinstance(event, ItemKeyed)]
    assert (keyed.path, keyed.num_tokens, keyed.cached) == ("images", 8, False)


def test_identities_tell_requests_apart_and_nothing_is_remembered(mosaic: Any, decodes: list[str]) -> None:
    prompt = "<image> <image>"
    first, again = mosaic.process(prompt, [A, B]), mosaic.process(prompt, [A, B])
    assert first.mm_items[0].identity == again.mm_items[0].identity
    others = [mosaic.process(prompt, [B, A]), mosaic.process(prompt, [A, B], salt="x")]
    assert len({output.mm_items[0].identity for output in (first, *others)}) == 3
    assert len(decodes) == 8
    assert mosaic.cache_stats.entries == 0


def test_the_asynchronous_way_gives_the_same(mosaic: Any) -> None:
    prompt = "word <image>"
    found, expected = asyncio.run(mosaic.process_async(prompt, [A])), mosaic.process(prompt, [A])
    assert np.array_equal(found.padded_input_ids, expected.padded_input_ids)


def test_a_request_without_media_needs_no_model(mosaic: Any) -> None:
    assert mosaic.process("word other").input_ids.tolist() == [WORD, OTHER]
    assert mosaic.process([WORD, OTHER]).input_ids.tolist() == [WORD, OTHER]
    with pytest.raises(PlaceholderError, match="1 image placeholders <image>, 0 images"):
        mosaic.process("word <image>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"expanded": True}, "expanded: .* it must be False"),
        ({"on_overflow": "drop_oldest"}, "on_overflow: .* it must be 'error'"),
    ],
)
def test_what_needs_single_media_is_refused(mosaic: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        mosaic.process("<image>", [A], **arguments)
    with pytest.raises(UsageError, match="not token ids"):
        mosaic.process([IMAGE], [A])
    for call in (lambda: mosaic.count("image", (3, 3)), lambda: mosaic.prepare_item("image", A)):
        with pytest.raises(UsageError, match="prepares the media inputs of a request together"):
            call()


def test_limits_hold(open_words: Open, decodes: list[str]) -> None:
    def opened(**limits: int) -> Any:
        return open_words(Mosaic, SPEC, ["<image>", "<mark>"], ("word",), **limits)

    with pytest.raises(LimitError, match="images\\[1\\]") as caught:
        opened(max_image_pixels=6).process("<image> <image>", [A, B])
    assert caught.value.setting == "max_image_pixels"
    with pytest.raises(LimitError, match="at most 1 media inputs, got 2"):
        opened(max_items=1).process("<image> <image>", [A, B])
    assert decodes == []
    with pytest.raises(LimitError, match="images: expected at most 3 tokens, got 4"):
        opened(max_item_tokens=3).process("<image>", [B])
    with pytest.raises(LimitError, match="at most 4 tokens in the expanded prompt, got 5"):
        opened().process("<image>", [B], max_prompt_tokens=4)
    assert len(opened().process("<image>", [B], max_prompt_tokens=5).input_ids) == 5


def test_faults_have_their_author(mosaic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlaceholderError, match="as many images as places"):
        mosaic.process("word", [A])
    with pytest.raises(MediaError, match="images\\[0\\]"):
        mosaic.process("<image>", [A[:40]])
    with pytest.raises(RequestError, match="takes no prepared images"):
        mosaic.process("<image>", [PrecomputedEmbeddings(np.zeros((3, 8)), {})])
    with pytest.raises(RequestError, match="mosaic takes images, not audios"):
        mosaic.process("<image>", [A], audios=[b"x"])

    ids, row = np.array([IMAGE, MARK]), np.array([True, False])
    good = {"heights": np.array([1])}
    feature = np.zeros(3, dtype=np.uint8)
    wrong: list[tuple[Any, str]] = [
        (None, "must return JointOutput"),
        (JointOutput(ids.astype(np.int32), [JointItem(Modality.IMAGE, row, feature, good)]), "int64"),
        (JointOutput(ids, []), "one item for each"),
        (JointOutput(ids, [JointItem(Modality.AUDIO, row, feature, good)]), "one item for each"),
        (JointOutput(ids, [JointItem(Modality.IMAGE, row, feature, {})]), "the spec declares"),
        (JointOutput(ids, [JointItem(Modality.IMAGE, row[:1], feature, good)]), "bool"),
        (JointOutput(ids, [JointItem(Modality.IMAGE, ~row & row, feature, good)]), "no token that takes a row"),
        (JointOutput(ids, [JointItem(Modality.IMAGE, row, "feature", good)]), "no identity"),
    ]
    for value, said in wrong:
        monkeypatch.setattr(Mosaic, "prepare_jointly", lambda self, *_, value=value, **__: value)
        with pytest.raises(ProcessorError, match=said):
            mosaic.process("<image>", [A])


def test_a_callers_hashes_are_left_aside_and_that_is_reported(mosaic: Any, events: list[Any]) -> None:
    plain = mosaic.process("<image>", [A]).mm_items[0].identity
    assert mosaic.process("<image>", [A], mm_hashes=["ab"]).mm_items[0].identity == plain
    (reported,) = [event for event in events if isinstance(event, HashIgnored)]
    assert (reported.path, reported.why) == ("mm_hashes", "the media inputs of the request are prepared together")
