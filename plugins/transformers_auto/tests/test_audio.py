"""Audio inputs: a model without a method for their embeddings, which are taken where the model calls its language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import (
    AudioSamples,
    AudioSize,
    MediaError,
    Modality,
    MultimodalInputs,
    PlaceholderError,
    RequestError,
    RequestMedia,
)
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import as_tensor
from mm_plugin.inputs import ForwardBatch
from mm_plugin_transformers_auto.tensors import join
from mm_plugin_transformers_auto.testing import FAMILIES

Get = Callable[[str], Any]
FAMILY = FAMILIES["qwen2_audio"]
LENGTHS = (16000, 9001, 100_000, 400)  # samples; the third is longer than the model reads, the last gives one token
RATE = 16000


def waveforms(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [(random.standard_normal(LENGTHS[index]) * 0.1).astype(np.float32) for index in range(count)]


@pytest.mark.parametrize("order", [(), (0,), (1, 0), (2, 0, 1), (3,), (0, 3, 3, 2)])
def test_logits_equal_the_models_own_forward(
    order: tuple[int, ...], opened: Get, probed: Get, encoder: Get, model: Get, reference: Get
) -> None:
    known = waveforms(len(LENGTHS))
    given = [known[index] for index in order]
    prompt, processor, whole_model = FAMILY.prompt(len(order)), opened("qwen2_audio"), model("qwen2_audio")
    output = processor.process(prompt, audios=[AudioSamples(samples, RATE) for samples in given])
    whole: dict[str, Any] = dict(reference("qwen2_audio").tokenizer(prompt, return_tensors="pt"))
    if given:
        whole = dict(reference("qwen2_audio")(text=[prompt], audio=given, sampling_rate=RATE, return_tensors="pt"))
        axes = probed(processor).traits[Modality.AUDIO].axes
        items = output.mm_items
        assert torch.equal(join([item.feature for item in items], 0), whole["input_features"])
        masks = [as_tensor(item.get("feature_attention_mask")) for item in items]
        assert torch.equal(join(masks, axes["feature_attention_mask"]), whole["feature_attention_mask"])
    assert output.input_ids.tolist() == whole["input_ids"][0].tolist()
    ids = torch.from_numpy(output.input_ids)
    batch = ForwardBatch([RequestMedia(MultimodalInputs.from_processor_output(output))], [0], [len(ids)])
    step = embed_mm_inputs(ids, batch, whole_model.get_input_embeddings(), encoder("qwen2_audio"))
    assert step.failed == ()
    with torch.no_grad():
        expected = whole_model(**whole).logits[0]
        found = whole_model(inputs_embeds=step.input_embeds[None]).logits[0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 0.05


def test_an_audio_that_is_too_short_for_a_token_is_refused(opened: Get) -> None:
    processor = opened("qwen2_audio")
    assert processor.count("audio", AudioSize(400, RATE)) == (1, 1)
    with pytest.raises(MediaError, match=r"audios\[0\]: no token stands for a media input of this size"):
        processor.process(FAMILY.prompt(1), audios=[AudioSamples(np.zeros(100, dtype=np.float32), RATE)])


def test_an_audio_of_a_joint_request_that_is_too_short_for_a_token_is_refused(opened: Get) -> None:
    with pytest.raises(MediaError, match=r"audios\[0\]: no token stands"):
        opened("audioflamingo3").process("<sound>", audios=[AudioSamples(np.zeros(100, dtype=np.float32), RATE)])


def test_an_audio_of_another_rate_is_resampled_to_the_models(opened: Get) -> None:
    pytest.importorskip("av")
    processor = opened("qwen2_audio")
    samples = np.sin(np.arange(44_100, dtype=np.float32) / 20)
    output = processor.process(FAMILY.prompt(1), audios=[AudioSamples(samples, 44_100)])
    assert output.mm_items[0].num_tokens == processor.count("audio", AudioSize(RATE, RATE))[0]


def test_arguments_of_the_feature_extractor(opened: Get) -> None:
    processor = opened("qwen2_audio")
    given = [AudioSamples(waveforms(1)[0], RATE)]
    with pytest.raises(
        RequestError, match=r"arguments of WhisperFeatureExtractor, got 'sampling_rate'; supported: max_length"
    ):
        processor.process(FAMILY.prompt(1), audios=given, audio_kwargs={"sampling_rate": 8000})
    usual = processor.process(FAMILY.prompt(1), audios=given)
    same = processor.process(FAMILY.prompt(1), audios=given, audio_kwargs={"truncation": True})
    assert same.mm_items[0].identity == usual.mm_items[0].identity


@pytest.mark.parametrize("length", [400, 16_000, 70_000, 250_000])
def test_an_audio_in_windows_of_a_model_that_takes_one(
    length: int, opened: Get, encoder: Get, model: Get, reference: Get
) -> None:
    """Several windows of features for one audio, from the model's own `get_audio_features`; its processor cuts long ones."""
    family = "audioflamingo3"
    samples = (np.random.default_rng(3).standard_normal(length) * 0.1).astype(np.float32)
    processor, prompt, whole_model = opened(family), FAMILIES[family].prompt(1), model(family)
    assert "1 text but 3 audios" in processor.spec.notes["media"]
    output = processor.process(prompt, audios=[AudioSamples(samples, RATE)])
    whole = dict(reference(family)(text=[prompt], audio=[samples], sampling_rate=RATE, return_tensors="pt"))
    assert output.input_ids.tolist() == whole["input_ids"][0].tolist()
    assert torch.equal(output.mm_items[0].feature, whole["input_features"])
    ids = torch.from_numpy(output.input_ids)
    batch = ForwardBatch([RequestMedia(MultimodalInputs.from_processor_output(output))], [0], [len(ids)])
    step = embed_mm_inputs(ids, batch, whole_model.get_input_embeddings(), encoder(family))
    assert step.failed == ()
    with torch.no_grad():
        expected = whole_model(**whole).logits[0]
        found = whole_model(inputs_embeds=step.input_embeds[None]).logits[0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    with pytest.raises(PlaceholderError, match="1 text but 2 audios"):
        processor.process(FAMILIES[family].prompt(2), audios=[AudioSamples(samples, RATE)] * 2)
