"""Tiny DeepSeek-VL2 checkpoints with seeded weights, laid out as the released ones are, for tests and demos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mm_plugin.testing import fill_weights, write_json, write_tensors
from mm_plugin_deepseekvl2.config import DeepseekVL2Config
from mm_plugin_deepseekvl2.conversation import PAD
from mm_plugin_deepseekvl2.encoder import DeepseekVL2Tower

# Learned embeddings and positions, which are neither biases nor norms nor linear maps.
_SPREADS = {"image_newline": 1.0, "view_seperator": 1.0, "pos_embed": 0.5, "latent": 0.5}
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# (columns, rows) of the released models: every grid of at most nine tiles. Among equals the first is chosen, so order matters.
TILE_GRIDS = (
    (1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1), (2, 3), (3, 2), (1, 7), (7, 1),
    (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3),
)  # fmt: skip


def byte_level_tokenizer(merges: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Three special tokens, then a token for each byte: id = 3 + byte. As in released ones, the tokens that the plugin adds lack.

    Args:
        merges: byte pairs that become one token, such as `a b`, in the byte-level alphabet.
    """
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    tokens = [BOS, EOS, PAD, *_byte_characters(), *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _byte_characters() -> list[str]:
    """The character for each byte in a byte-level vocabulary: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def tiny_config(*, image_size: int = 384, hidden: int = 24, vocab_size: int = 320) -> dict[str, Any]:
    """config.json of a DeepSeek-VL2 of about 60,000 parameters, without top-level architectures, as released ones are.

    Args:
        image_size: pixels along a side of a tile.
        hidden: channels of the language model.
        vocab_size: entries of the text embedding, padding included.
    """
    return {
        "model_type": "deepseek_vl_v2",
        "torch_dtype": "float32",
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": _resolutions(image_size),
        "vision_config": {
            "model_type": "vision",
            "model_name": "siglip_so400m_patch14_384",
            "image_size": image_size,
            "patch_size": 14,
            "width": 32,
            "layers": 2,
            "heads": 4,
            "mlp_ratio": 3.7362,
        },
        "projector_config": {"model_type": "mlp_projector", "input_dim": 32, "n_embed": hidden},
        "language_config": {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "use_mla": False,
            "first_k_dense_replace": 1,
            "n_routed_experts": None,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "max_position_embeddings": 8192,
        },
    }


def tiny_settings(*, image_size: int = 384) -> dict[str, Any]:
    """processor_config.json of the released models, with tiles of another size."""
    return {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": _resolutions(image_size),
        "patch_size": 14,
        "downsample_ratio": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "normalize": True,
        "image_token": "<image>",
        "pad_token": PAD,
        "add_special_token": False,
        "sft_format": "deepseek",
        "mask_prompt": False,
        "ignore_id": -100,
    }


def _resolutions(image_size: int) -> list[list[int]]:
    return [[columns * image_size, rows * image_size] for columns, rows in TILE_GRIDS]


def language_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The config of a tiny checkpoint's language model, which is a Llama because it has neither experts nor latent attention.

    Args:
        config: config.json, as `tiny_config` makes it.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    rest = ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id")
    return LlamaConfig(**{name: config["language_config"][name] for name in names + rest}, tie_word_embeddings=False)


def make_checkpoint(
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    seed: int = 20260207,
    shards: int = 2,
) -> Path:
    """Write a whole checkpoint, laid out as the released ones are, and return its folder.

    Args:
        folder: created where it does not exist.
        config: a `tiny_config` where None.
        settings: processor_config.json; `tiny_settings` for the config's tiles where None.
        tokenizer: a `byte_level_tokenizer` where None.
        state: tensors by their names in the files; seeded ones for the whole model where None.
        seed: of the weights.
        shards: safetensors files; two or more come with an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    if settings is None:
        settings = tiny_settings(image_size=config["vision_config"].get("image_size", 384))
    tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
    tokenizer.save_pretrained(str(folder))
    write_json(folder / "config.json", config)
    write_json(folder / "processor_config.json", settings)
    if state is None:
        state = fill_weights(whole_state(config), seed=seed, spreads=_SPREADS)
    write_tensors(folder, state, shards=shards, digits=6)
    return folder


def whole_state(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Names and shapes of all tensors of a tiny checkpoint, on the meta device."""
    with torch.device("meta"):
        tower = DeepseekVL2Tower(msgspec.convert(config, DeepseekVL2Config)).state_dict()
        language = LlamaForCausalLM(language_config(config)).state_dict()
    return tower | _pooling_head(config) | {f"language.{name}": tensor for name, tensor in language.items()}


def _pooling_head(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of SigLIP's pooling head, which released checkpoints contain and the model never uses."""
    width = config["vision_config"]["width"]
    hidden = int(width * config["vision_config"]["mlp_ratio"])
    shapes: dict[str, tuple[int, ...]] = {"latent": (1, 1, width)}
    for name, (out, into) in {
        "q": (width, width),
        "kv": (2 * width, width),
        "proj": (width, width),
        "mlp.fc1": (hidden, width),
        "mlp.fc2": (width, hidden),
    }.items():
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return {f"vision.attn_pool.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
