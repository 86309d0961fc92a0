"""A tiny model of known weights that was run elsewhere: its rows, positions and logits, as they were recorded then."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mm_plugin.registry import Registry
from mm_plugin.testing.embedding import embed_in_chunks
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.base import PluginTests

_SPECIAL = {
    "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>",
    "eos": "<|im_end|>", "pad": "<|endoftext|>",
}  # fmt: skip
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "pillow": {"resize": "pillow", "feature_format": "float32"},
    "torch": {"resize": "torch", "feature_format": "float32"},
    "compact": {},
}


def _word_tokenizer(special: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """256 words, word n has id n; the special tokens have the ids that the model was run with."""
    names = {special[name]: token for name, token in _SPECIAL.items()}
    vocabulary = {names.get(index, f"w{index}"): index for index in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


class RecordedModelTests(PluginTests):
    """Needs `registry`, `tiny`, and `golden`, which reads models.json and tiny.npz of the plugin's test data.

    Attributes:
        NAMES: of the recorded requests.
        OPTIONS: load options under which each is run.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"name": "NAMES", "options": "OPTIONS"}
    NAMES: ClassVar[tuple[str, ...]] = ("two_images", "image_first_last")
    OPTIONS: ClassVar[Mapping[str, Mapping[str, str]]] = _OPTIONS

    @pytest.fixture(scope="class")
    @classmethod
    def folder(
        cls, tiny: PatchGridCheckpoints, golden: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        """A checkpoint of the recorded config and weights."""
        described = golden("models.json")["tiny"]
        special = described["special_ids"]
        config = tiny.config_class(
            text_config=described["text_config"],
            vision_config=described["vision_config"],
            image_token_id=special["image"],
            video_token_id=special["video"],
            vision_start_token_id=special["vision_start"],
            vision_end_token_id=special["vision_end"],
            tie_word_embeddings=described["tie_word_embeddings"],
        )
        folder = tmp_path_factory.mktemp("recorded")
        return tiny.write(folder, config=config, tokenizer=_word_tokenizer(special), seed=20260101)

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tiny: PatchGridCheckpoints, folder: Path) -> Any:
        """The whole model, opened by transformers."""
        return tiny.model_class.from_pretrained(folder, dtype=torch.float32).eval()

    def test_the_weights_are_those_of_the_written_rule(self, golden: Callable[[str], Any], whole: Any) -> None:
        described = golden("models.json")["tiny"]
        digest, state = hashlib.sha256(), whole.state_dict()
        for name in sorted(state):
            digest.update(name.encode() + b"\0" + state[name].contiguous().numpy().tobytes())
        assert digest.hexdigest() == described["state_dict_sha256"]
        assert sum(parameter.numel() for parameter in whole.parameters()) == described["parameters"]

    def test_embeddings_positions_and_logits_are_the_recorded_ones(
        self,
        golden: Callable[[str], Any],
        name: str,
        options: Mapping[str, Any],
        registry: Registry,
        folder: Path,
        whole: Any,
    ) -> None:
        (case,) = [case for case in golden("models.json")["tiny"]["cases"] if case["id"] == name]
        arrays = {
            key.partition(".")[2]: value for key, value in golden("tiny.npz").items() if key.startswith(f"{name}.")
        }
        processor, encoder = registry.load_processor(folder, **options), registry.load_encoder(folder)
        files = [base64.b64decode(image) for image in case["images"]]
        pad, ids = processor.special_tokens.im_token_id, arrays["input_ids"].tolist()
        short = [
            token for token, group in itertools.groupby(ids) for token in (list(group)[:1] if token == pad else group)
        ]
        output = processor.process(short, files)
        assert output.input_ids.tolist() == ids
        assert [item.image_grid_thw.tolist()[0] for item in output.mm_items] == case["image_grid_thw"]
        if options.get("resize") == "pillow":
            digests = [hashlib.sha256(item.feature.tobytes()).hexdigest() for item in output.mm_items]
            assert digests == case["pixel_values_sha256"]
        assert output.mrope_positions is not None
        assert output.mrope_positions.tolist() == arrays["position_ids"].tolist()
        assert output.mrope_position_delta == case["rope_delta"]
        embeds = embed_in_chunks(output, whole.get_input_embeddings(), encoder, size=33)
        for index, item in enumerate(output.mm_items):
            ((start, end),) = item.offsets
            expected = torch.from_numpy(arrays[f"vision_embeds.image{index}"])
            assert torch.allclose(embeds[start : end + 1], expected, rtol=0, atol=1e-4)
        with torch.no_grad():
            positions = torch.from_numpy(np.array(output.mrope_positions))[:, None]
            logits = whole(inputs_embeds=embeds[None], position_ids=positions).logits[0]
        assert torch.allclose(logits, torch.from_numpy(arrays["logits"]), rtol=0, atol=1e-4)
        assert int(logits[-1].argmax()) == case["greedy_next_8_tokens"][0]
