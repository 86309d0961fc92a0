"""Spans that no chunk may cut: what the class's own mask says, and what the whole model does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mm_plugin import ForwardBatch, Modality, MultimodalInputs, RequestMedia, embed_mm_inputs
from mm_plugin_transformers_auto.attention import attends_forward

Get = Callable[[str], Any]
IMAGE = Modality.IMAGE


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("gemma3", {IMAGE: "whole"}),
        ("paligemma", {IMAGE: "whole"}),
        ("llava", {}),
        ("idefics3", {}),
        ("qwen2_audio", {}),
    ],
)
def test_the_spec_says_which_spans_stay_whole(opened: Get, family: str, attention: dict[Modality, str]) -> None:
    assert opened(family).spec.attention == attention


@pytest.mark.parametrize(("family", "is_seen"), [("gemma3", True), ("llava", False)])
def test_a_later_token_of_an_image_changes_an_earlier_one_in_the_model_itself(
    model: Get, opened: Get, family: str, is_seen: bool
) -> None:
    """Independent of masks: the last token of an image is changed, and the first one's hidden state is looked at."""
    whole = model(family)
    torch.manual_seed(0)
    embeds = torch.randn(1, 8, whole.config.get_text_config().hidden_size)
    types = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    changed = embeds.clone()
    changed[0, 5] += 1
    extra = {"token_type_ids": types} if is_seen else {}
    with torch.inference_mode():
        before, after = (whole(inputs_embeds=each, **extra).logits[0, 2] for each in (embeds, changed))
    assert (float((before - after).abs().max()) > 1e-4) is is_seen
    assert (opened(family).spec.attention.get(IMAGE) == "whole") is is_seen


def test_a_request_whose_chunk_cuts_an_image_fails(opened: Get, encoder: Get, make_image: Any) -> None:
    output = opened("gemma3").process("<start_of_image> a", [make_image()])
    inputs = MultimodalInputs.from_processor_output(output)
    first, last, _ = inputs.spans[0]
    assert inputs.clip_chunk(0, first + 2) == first
    table = torch.nn.Embedding(int(output.input_ids.max()) + 1, 32)
    ids = torch.from_numpy(output.input_ids)
    for end, failed in ((first + 2, {0}), (last + 1, frozenset())):
        step = embed_mm_inputs(ids[:end], ForwardBatch([RequestMedia(inputs)], [0], [end]), table, encoder("gemma3"))
        assert step.failed_requests == failed


def test_a_class_whose_mask_cannot_be_made_counts_as_causal_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @staticmethod
        def create_masks_for_generate(config: Any, inputs_embeds: Any) -> Any:
            raise IndexError("lost")

    class Config:
        def get_text_config(self) -> Any:
            return self

    with caplog.at_level(logging.WARNING):
        assert not attends_forward(Broken, Config(), IMAGE)
    assert "create_masks_for_generate failed, so its prompts count as causal: IndexError: lost" in caplog.text
