"""Tiny Qwen2.5-VL checkpoints with seeded weights, in the layout of the released ones, for tests and demos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm_plugin.testing import byte_level_tokenizer, write_transformers_checkpoint

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


# What tensors are called in memory, and in released checkpoints.
RELEASED_NAMES = {"model.visual.": "visual.", "model.language_model.": "model."}


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen2.5-VL's special tokens and chat format."""
    return byte_level_tokenizer(
        SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, *, vocab_size: int = 320) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL of about 200,000 parameters.

    Args:
        tokenizer: its special tokens' ids go into the config.
        vocab_size: rows of the embedding table, padding included.
    """
    ids = tokenizer.get_vocab()
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def make_checkpoint(
    folder: str | Path,
    *,
    config: Qwen2_5_VLConfig | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    seed: int = 20260101,
    preprocessor: Mapping[str, Any] | None = None,
    layout: str = "visual",
    combined: bool = False,
    shards: int = 1,
) -> Path:
    """Write a whole checkpoint as the released ones are laid out.

    Args:
        folder: made if it is not there.
        config: a `tiny_config` where None.
        tokenizer: a `qwen_tokenizer` where None.
        seed: of the weights.
        preprocessor: settings over the released ones.
        layout: `visual` names the tensors as released (`visual.`, `model.`), `model.visual` as in memory.
        combined: write processor_config.json, as newer transformers does, in place of preprocessor_config.json.
        shards: safetensors files; more than one come with an index.
    """
    tokenizer = qwen_tokenizer() if tokenizer is None else tokenizer
    return write_transformers_checkpoint(
        folder,
        Qwen2_5_VLForConditionalGeneration,
        tiny_config(tokenizer) if config is None else config,
        tokenizer,
        PREPROCESSOR | dict(preprocessor or {}),
        seed=seed,
        renamed=RELEASED_NAMES if layout == "visual" else None,
        combined=combined,
        shards=shards,
    )
