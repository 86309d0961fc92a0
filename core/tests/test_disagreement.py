"""A plugin that refuses items together and takes each alone is heard of, and refused under strict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from toy import PlainToy, img, toy_spec

from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.errors import EncoderError, MediaError, ProcessorError, SizeError
from mm_plugin.events import BatchRefused, Observers
from mm_plugin.inputs import ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.processor import PreparesBatches
from mm_plugin.runtime import Runtime
from mm_plugin.settings import Settings

TABLE = torch.nn.Embedding.from_pretrained(torch.full((4, 3), -1.0))


def request(*seeds: int) -> RequestMedia:
    items = []
    for index, seed in enumerate(seeds):
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(index, index)], feature=np.array([seed]))
        item.set_identity(seed.to_bytes(32, "big"))
        items.append(item)
    ids = np.zeros(len(seeds), np.int64)
    return RequestMedia(MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids))


def returned(value: Any) -> Any:
    return lambda items: value


def raised(error: BaseException) -> Any:
    def fail(items: Any) -> Any:
        raise error

    return fail


class Picky(Encoder, EncodesImages):
    """Encodes items one by one; of several, what `together` says becomes of them."""

    def __init__(self, together: Any, bad: Sequence[int] = ()) -> None:
        self.together, self.bad = together, bad

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Any:
        raise NotImplementedError

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> Any:
        if len(items) > 1:
            return self.together(items)
        if items[0].feature[0] in self.bad:
            raise ValueError("bad")
        return [torch.full((1, 3), float(items[0].feature[0]))]


REFUSED = {
    "an exception": raised(ValueError("sizes differ")),
    "a panic": raised(BaseException("sizes differ")),
    "too few": returned([torch.ones(1, 3)]),
    "a wrong shape": lambda items: [torch.ones(1, 4) for _ in items],
    "no list": lambda items: torch.ones(len(items), 3),
}
refused = pytest.mark.parametrize("together", REFUSED.values(), ids=REFUSED)


def step(
    encoder: Any, media: RequestMedia, strict: bool | None = None, bound_strict: bool = False, **options: Any
) -> Any:
    heard: list[Any] = []
    if isinstance(encoder, Encoder):
        encoder.bind(version="1", owner={"plugin": "picky", "distribution": "d", "version": "1"}, strict=bound_strict)
    count = len(media.inputs.input_ids)
    batch = ForwardBatch([media], [0], [count])
    out = embed_mm_inputs(
        torch.zeros(count, dtype=torch.int64),
        batch,
        TABLE,
        encoder,
        observers=Observers([heard.append]),
        strict=strict,
        **options,
    )
    return out, [event for event in heard if isinstance(event, BatchRefused)]


@refused
def test_an_encoder_that_refuses_items_together_is_heard_of(together: Any, log: Any) -> None:
    out, heard = step(Picky(together), request(1, 2, 3))
    assert out.failed == ()
    assert out.input_embeds[:, 0].tolist() == [1, 2, 3]
    assert [(event.plugin, event.call, event.num_items) for event in heard] == [("picky", "image", 3)]
    (said,) = log("WARNING")
    assert "picky: the encoder refused 3 images together that it encoded one by one: " in said
    assert heard[0].error in said


@refused
@pytest.mark.parametrize(("strict", "bound_strict"), [(True, False), (True, True), (None, True)])
def test_under_strict_all_of_them_have_failed(together: Any, strict: bool | None, bound_strict: bool) -> None:
    out, heard = step(Picky(together), request(1, 2, 3), strict, bound_strict)
    assert [(entry.item, type(entry.error), entry.error.plugin) for entry in out.failed] == [
        (index, EncoderError, "picky") for index in range(3)
    ]
    assert "encode a batch as its items" in out.failed[0].error.message
    assert not out.input_embeds.any()
    assert len(heard) == 1


def test_the_call_itself_decides_before_the_registry() -> None:
    out, heard = step(Picky(REFUSED["an exception"]), request(1, 2), strict=False, bound_strict=True)
    assert (out.failed, len(heard)) == ((), 1)


@pytest.mark.parametrize("strict", [False, True])
def test_an_item_that_is_refused_alone_too_explains_the_refusal(strict: bool, log: Any) -> None:
    out, heard = step(Picky(REFUSED["an exception"], bad=[2]), request(1, 2, 3), strict)
    assert [entry.item for entry in out.failed] == [1]
    assert out.input_embeds[:, 0].tolist() == [1, 0, 3]
    assert (heard, log("WARNING")) == ([], [])


@pytest.mark.parametrize("strict", [False, True])
def test_memory_that_is_too_small_is_no_disagreement(strict: bool, log: Any) -> None:
    out, heard = step(Picky(raised(torch.OutOfMemoryError("full"))), request(1, 2, 3), strict)
    assert (out.failed, heard, log("WARNING")) == ((), [], [])


@pytest.mark.parametrize("strict", [False, True])
def test_a_mapping_of_callables_is_heard_of_too(strict: bool) -> None:
    out, heard = step({Modality.IMAGE: Picky(REFUSED["an exception"]).get_image_feature}, request(1, 2), strict)
    assert len(heard) == 1
    assert [entry.item for entry in out.failed] == ([0, 1] if strict else [])


def test_only_the_part_of_a_split_step_that_was_refused_is_counted() -> None:
    out, heard = step(Picky(REFUSED["an exception"]), request(1, 2, 3, 4, 5), max_encode_tokens=2)
    assert (out.failed, [event.num_items for event in heard]) == ((), [2, 2])


# ------------------------------------------------------------------ prepare_batch


SPEC = toy_spec(name="picky")


def batched(error: BaseException, bad: Sequence[int] = ()) -> Any:
    class Batched(PreparesBatches, PlainToy):
        def prepare_batch(self, decoded: Any, fields: Any, options: Any) -> Any:
            raise error

        def prepare(self, decoded: Any, layout: Any, options: Any) -> Any:
            if decoded.pixels[0, 0, 0] in bad:
                raise SizeError("bad")
            return super().prepare(decoded, layout, options)

    return Batched


@pytest.mark.parametrize("error", [SizeError("sizes differ"), MediaError("sizes differ")])
@pytest.mark.parametrize("strict", [False, True])
def test_a_prepare_batch_that_refuses_what_prepare_takes(
    error: Exception, strict: bool, open_words: Any, log: Any
) -> None:
    heard: list[Any] = []
    services: Any = lambda kind: {"test": heard.append} if kind == "observers" else {}  # noqa: E731
    with Runtime(Settings(strict=strict), services=services) as runtime:
        processor = open_words(batched(error), SPEC, runtime=runtime)
        if strict:
            with pytest.raises(
                ProcessorError, match=r"prepare_batch refused 2 media inputs together .* sizes differ"
            ) as caught:
                processor.process("<image> <image>", [img(0), img(1)])
            assert caught.value.plugin == "picky"
        else:
            output = processor.process("<image> <image>", [img(0), img(1)])
            assert [np.array_equal(item.feature, img(i)) for i, item in enumerate(output.mm_items)] == [True, True]
    events = [event for event in heard if isinstance(event, BatchRefused)]
    assert [(event.plugin, event.call, event.num_items) for event in events] == [("picky", "prepare_batch", 2)]
    assert sum("picky: Batched.prepare_batch refused" in line for line in log("WARNING")) == 1


def test_a_media_input_that_prepare_refuses_too_is_the_requests_fault(open_words: Any, log: Any) -> None:
    processor = open_words(batched(SizeError("x"), bad=[int(img(1)[0, 0, 0])]), SPEC)
    with pytest.raises(MediaError, match=r"images\[1\]: bad"):
        processor.process("<image> <image>", [img(0), img(1)])
    assert log("WARNING") == []
