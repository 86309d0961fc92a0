"""Tiny Qwen2-VL checkpoints with seeded weights, in the layout of the released ones, for tests and demos."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

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
# A few byte pairs that merge across the places where text and template meet.
_MERGES = ("Ċ Ċ", "Ġ t", "h e", "Ġt he", "i n", "a n", "Ġ a", "o n", "Ġ Ġ", "Ċ Ġ", "e r", "i s")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's way to split text, a few merges, and Qwen2-VL's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (pair.split() for pair in _MERGES)]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, *, vocab_size: int = 320) -> Qwen2VLConfig:
    """A Qwen2-VL of about 200,000 parameters.

    Args:
        tokenizer: its special tokens' ids go into the config.
        vocab_size: rows of the embedding table, padding included.
    """
    ids = tokenizer.get_vocab()
    return Qwen2VLConfig(
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
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def fill_weights(state: Mapping[str, torch.Tensor], *, seed: int) -> dict[str, torch.Tensor]:
    """Weights that depend on name and seed alone, equal on every machine.

    Each tensor is uniform in b - a .. b + a: biases (0.1, 0), norms (0.1, 1), embeddings (1, 0), all else
    (sqrt(3 / fan_in), 0), where fan_in is the product of all dimensions but the first.

    Args:
        state: names and shapes; the values are ignored.
        seed: exclusive-ored with the CRC-32 of each name.
    """
    filled = {}
    for name, tensor in state.items():
        if name.endswith(".bias"):
            spread, centre = 0.1, 0.0
        elif "norm" in name or "ln_q" in name:
            spread, centre = 0.1, 1.0
        elif "embed_tokens" in name:
            spread, centre = 1.0, 0.0
        else:
            spread, centre = math.sqrt(3 / math.prod(tensor.shape[1:])), 0.0
        random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()) ^ seed)).random(tensor.numel())
        values = ((random * 2 - 1) * spread + centre).astype(np.float32)
        filled[name] = torch.from_numpy(values.reshape(tuple(tensor.shape)))
    return filled


def make_checkpoint(
    folder: str | Path,
    *,
    config: Qwen2VLConfig | None = None,
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
        tokenizer: a `byte_level_tokenizer` where None.
        seed: of the weights.
        preprocessor: settings over the released ones.
        layout: `visual` names the tensors as released (`visual.`, `model.`), `model.visual` as in memory.
        combined: write processor_config.json, as newer transformers does, in place of preprocessor_config.json.
        shards: safetensors files; more than one come with an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
    config = tiny_config(tokenizer) if config is None else config
    tokenizer.save_pretrained(str(folder))
    described = config.to_dict() | {"architectures": ["Qwen2VLForConditionalGeneration"]}
    _write_json(folder / "config.json", described)
    settings = PREPROCESSOR | dict(preprocessor or {})
    if combined:
        size = {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}
        _write_json(folder / "processor_config.json", {"image_processor": settings | {"size": size}})
    else:
        _write_json(folder / "preprocessor_config.json", settings)
    with torch.device("meta"):
        names = Qwen2VLForConditionalGeneration(config).state_dict()
    state = fill_weights(names, seed=seed)
    if layout == "visual":
        state = {_released_name(name): tensor for name, tensor in state.items()}
    _write_tensors(folder, state, shards)
    return folder


def _released_name(name: str) -> str:
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def _write_tensors(folder: Path, state: Mapping[str, torch.Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    names = sorted(state)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[index::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in state.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index_json)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
