"""Tiny checkpoints of models over patch grids that transformers has, in Qwen-VL's chat format. Which model is an argument."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from mm_plugin.testing.checkpoints import byte_level_tokenizer, write_transformers_checkpoint

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
}
# Names of tensors in memory, and in released checkpoints.
_RELEASED_NAMES = {"model.visual.": "visual.", "model.language_model.": "model."}


class PatchGridCheckpoints(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Checkpoints of one model with about 200,000 seeded parameters, laid out as the released ones are.

    Attributes:
        config_class: transformers' config of the model.
        model_class: transformers' model with its language head.
        vision_config: of the tiny model; its embeddings are 64 channels wide, as the language model is.
        preprocessor: contents of the released preprocessor_config.json.
    """

    config_class: Any
    model_class: Any
    vision_config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level BPE with Qwen-VL's special tokens and chat template."""
        return byte_level_tokenizer(
            _SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT_TEMPLATE
        )

    def config(self, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int = 320) -> Any:
        """The config of the tiny model.

        Args:
            tokenizer: the ids of its special tokens go into the config.
            vocab_size: entries of the text embedding, padding included.
        """
        ids = tokenizer.get_vocab()
        special = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}
        text = copy.deepcopy(_TEXT_CONFIG) | {name: ids[token] for name, token in special.items()}
        return self.config_class(
            text_config=text | {"vocab_size": vocab_size},
            vision_config=copy.deepcopy(dict(self.vision_config)),
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=False,
        )

    def write(
        self,
        folder: str | Path,
        *,
        config: Any = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        seed: int = 20260101,
        preprocessor: Mapping[str, Any] | None = None,
        layout: str = "visual",
        combined: bool = False,
        shards: int = 1,
    ) -> Path:
        """Write a whole checkpoint and return its folder.

        Args:
            folder: created where it does not exist.
            config: one from `config`, possibly changed; the ordinary one where None.
            tokenizer: one from `tokenizer` where None.
            seed: of the weights.
            preprocessor: settings that replace the released ones.
            layout: `visual` names the tensors as released (`visual.`, `model.`), `model.visual` as in memory.
            combined: write processor_config.json, as newer transformers does, instead of preprocessor_config.json.
            shards: safetensors files; two or more come with an index.
        """
        tokenizer = self.tokenizer() if tokenizer is None else tokenizer
        return write_transformers_checkpoint(
            folder,
            self.model_class,
            self.config(tokenizer) if config is None else config,
            tokenizer,
            {**self.preprocessor, **(preprocessor or {})},
            seed=seed,
            renamed=_RELEASED_NAMES if layout == "visual" else None,
            combined=combined,
            shards=shards,
        )
