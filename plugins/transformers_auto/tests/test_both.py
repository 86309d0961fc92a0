"""Images and audio in one prompt. No family that runs everywhere takes both, so a processor is put together from two that do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessor, PreTrainedModel, WhisperFeatureExtractor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from mm_plugin import AudioSamples, Modality
from mm_plugin.encoder import as_tensor
from mm_plugin_transformers_auto.loading import Opened
from mm_plugin_transformers_auto.tensors import join
from mm_plugin_transformers_auto.testing import FAMILIES, Family, tiny_tokenizer

Get = Callable[[str], Any]
FAMILY = Family(
    name="both",
    architecture="",
    special=("<image>", "<audio>", "<soft>"),
    config=lambda ids: {},
    processor={},
    image="<image>",
)


class BothProcessor(ProcessorMixin):
    """A soft token for each hundred columns of an image between two line ends, and one for each tenth of a second."""

    audio_kwargs = {"padding": "max_length", "return_attention_mask": True}  # noqa: RUF012 - as transformers declares them

    def __init__(self, image_processor: Any = None, feature_extractor: Any = None, tokenizer: Any = None) -> None:
        self.image_token, self.audio_token = "<image>", "<audio>"
        super().__init__(image_processor, feature_extractor, tokenizer)

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        self.widths = [image.width for image in images]
        return super()._process_images(images, **kwargs)

    def _process_audio(self, audio: Any, **kwargs: Any) -> Any:
        out, _ = super()._process_audio(audio, **kwargs), None
        features, _ = out
        features["audio_mask"] = features.pop("attention_mask")
        return features, ["<audio>" * (1 + len(samples) // 1600) for samples in audio]

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        return "\n<image>" + "<soft>" * (1 + self.widths[image_idx] // 100) + "<image>\n"

    def replace_audio_token(self, audio_inputs: Any, audio_idx: int, **kwargs: Any) -> str:
        return "<audio>"

    def _check_special_mm_tokens(self, *_: Any, **__: Any) -> None:
        return None

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "pixel_values", "input_features", "audio_mask"]


class BothModel(PreTrainedModel):
    """Nothing but a name."""


@pytest.fixture
def processor(registry: Any, checkpoint: Get, composable: Get, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    tokenizer = tiny_tokenizer(FAMILY)
    parts = FAMILIES["llava"].processor["image_processor"], FAMILIES["qwen2_audio"].processor["feature_extractor"]
    image_settings = {key: value for key, value in parts[0].items() if key != "image_processor_type"}
    audio_settings = {key: value for key, value in parts[1].items() if key != "feature_extractor_type"}
    try:
        image_processor = CLIPImageProcessorPil(**image_settings)
    except ImportError:
        image_processor = CLIPImageProcessor(**image_settings)
    both = BothProcessor(image_processor, WhisperFeatureExtractor(**audio_settings), tokenizer)
    ids = tokenizer.get_vocab()
    config = SimpleNamespace(image_token_id=ids["<soft>"], audio_token_id=ids["<audio>"])
    monkeypatch.setattr(
        "mm_plugin_transformers_auto.specialize.open_checkpoint", lambda _: Opened(config, BothModel, both)
    )
    return composable(registry.load_processor(checkpoint("llava")))


def test_a_prompt_with_both_is_composed_as_the_processor_does(processor: Any, probed: Get, make_image: Any) -> None:
    assert processor.spec.notes["media"] == "one by one"
    assert processor.spec.modalities == (Modality.IMAGE, Modality.AUDIO)
    assert processor.spec.placeholder_affixes == {Modality.IMAGE: ("\n", "\n")}
    assert processor.spec.fields[Modality.AUDIO] == ("prompt_ids", "audio_mask")
    images = [make_image(0, 60, 250), make_image(1, 60, 90)]
    waveforms = [np.full(count, 0.1, dtype=np.float32) for count in (4000, 1000)]
    prompt = "a <audio>\n<image><image> b <audio>"
    output = processor.process(prompt, images, audios=[AudioSamples(samples, 16_000) for samples in waveforms])
    whole = probed(processor).opened.processor(
        text=[prompt], images=images, audio=waveforms, return_tensors="pt", audio_kwargs={"sampling_rate": 16_000}
    )
    assert output.input_ids.tolist() == whole["input_ids"][0].tolist()
    kinds = [item.modality for item in output.mm_items]
    assert kinds == [Modality.AUDIO, Modality.IMAGE, Modality.IMAGE, Modality.AUDIO]
    assert [item.num_tokens for item in output.mm_items] == [3, 3, 1, 1]
    seen = [item for item in output.mm_items if item.modality is Modality.IMAGE]
    heard = [item for item in output.mm_items if item.modality is Modality.AUDIO]
    assert torch.equal(join([item.feature for item in seen], 0), whole["pixel_values"])
    assert torch.equal(join([item.feature for item in heard], 0), whole["input_features"])
    assert torch.equal(join([as_tensor(item.get("audio_mask")) for item in heard], 0), whole["audio_mask"])


def test_each_modality_has_arguments_of_its_own(processor: Any, make_image: Any) -> None:
    waveform = AudioSamples(np.full(4000, 0.1, dtype=np.float32), 16_000)
    usual = processor.process("<audio><image>", [make_image()], audios=[waveform])
    other = processor.process(
        "<audio><image>", [make_image()], audios=[waveform], images_kwargs={"do_normalize": False}
    )
    same = [one.identity == two.identity for one, two in zip(usual.mm_items, other.mm_items, strict=True)]
    assert same == [True, False]
