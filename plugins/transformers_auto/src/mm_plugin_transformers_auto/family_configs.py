"""Configs of tiny models, one function per family, over the ids of a tokenizer's special tokens. Small, but with the real keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "head_dim": 8,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def text_config(ids: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """A Llama text config, which the other families share."""
    return {
        "model_type": "llama",
        "vocab_size": len(ids) + 5,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<end>"],
        "pad_token_id": ids["<pad>"],
        **_TEXT,
        **settings,
    }


def clip_config(side: int) -> dict[str, Any]:
    """A CLIP vision config."""
    return {"model_type": "clip_vision_model", "image_size": side, "patch_size": 14, "projection_dim": 32, **_VISION}


def siglip_config(side: int, patch: int = 14) -> dict[str, Any]:
    """A SigLIP vision config."""
    return {"model_type": "siglip_vision_model", "image_size": side, "patch_size": patch, **_VISION}


def llava(ids: Mapping[str, int]) -> dict[str, Any]:
    """LLaVA."""
    return {
        "vision_config": clip_config(56),
        "text_config": text_config(ids),
        "image_token_id": ids["<image>"],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 16,
    }


def llava_next(ids: Mapping[str, int]) -> dict[str, Any]:
    """LLaVA-NeXT."""
    # The released grid (672 x 336 ... of an encoder of 336 pixels) with patches four times as wide, so that prompts stay short.
    return {
        **llava(ids),
        "vision_config": clip_config(336) | {"patch_size": 56},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }


def paligemma(ids: Mapping[str, int]) -> dict[str, Any]:
    """PaliGemma."""
    return {
        "vision_config": siglip_config(56) | {"vision_use_head": False},
        "text_config": text_config(ids) | {"model_type": "gemma", "num_image_tokens": 16},
        "image_token_id": ids["<image>"],
        "projection_dim": 32,
    }


def gemma3(ids: Mapping[str, int]) -> dict[str, Any]:
    """Gemma 3."""
    return {
        "vision_config": siglip_config(56) | {"vision_use_head": False},
        "text_config": text_config(ids)
        | {"model_type": "gemma3_text", "sliding_window": 64, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
        "image_token_id": ids["<soft>"],
        "boi_token_id": ids["<start_of_image>"],
        "eoi_token_id": ids["<end_of_image>"],
        "mm_tokens_per_image": 4,
    }


def idefics3(ids: Mapping[str, int]) -> dict[str, Any]:
    """Idefics 3."""
    return {
        "vision_config": {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14, **_VISION},
        "text_config": text_config(ids),
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
        "pad_token_id": ids["<pad>"],
    }


def idefics2(ids: Mapping[str, int]) -> dict[str, Any]:
    """Idefics 2."""
    return {
        "vision_config": {"model_type": "idefics2_vision", "image_size": 98, "patch_size": 14, **_VISION},
        "perceiver_config": {
            "hidden_size": 32,
            "resampler_n_latents": 6,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "num_key_value_heads": 2,
            "resampler_head_dim": 8,
        },
        "text_config": text_config(ids) | {"model_type": "mistral"},
        "image_token_id": ids["<image>"],
    }


def ovis2(ids: Mapping[str, int]) -> dict[str, Any]:
    """Ovis 2."""
    indicators = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return {
        "vision_config": {"image_size": 56, "patch_size": 14, "hidden_stride": 2, "vocab_size": 70, **_VISION},
        "text_config": text_config(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<IMG_ATOM>"],
        "visual_indicator_token_ids": [ids[token] for token in indicators],
        "vocab_size": len(ids) + 5,
        "hidden_size": 32,
    }


def aya(ids: Mapping[str, int]) -> dict[str, Any]:
    """Aya Vision."""
    return {
        "vision_config": siglip_config(56) | {"vision_use_head": False},
        "text_config": text_config(ids) | {"model_type": "cohere2", "sliding_window": 64},
        "image_token_id": ids["<|IMG_PATCH|>"],
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    }


def mllama(ids: Mapping[str, int]) -> dict[str, Any]:
    """Llama 3.2 Vision."""
    return {
        "vision_config": {
            "model_type": "mllama_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "text_config": text_config(ids) | {"model_type": "mllama_text_model", "cross_attention_layers": [1]},
        "image_token_id": ids["<|image|>"],
    }


def qwen2_audio(ids: Mapping[str, int]) -> dict[str, Any]:
    """Qwen2-Audio."""
    return {
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 200,
        },
        "text_config": text_config(ids) | {"model_type": "qwen2"},
        "audio_token_id": ids["<|AUDIO|>"],
    }


def audio_flamingo(ids: Mapping[str, int]) -> dict[str, Any]:
    """Audio Flamingo 3."""
    return {
        "audio_config": {
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_mel_bins": 16,
            "max_source_positions": 200,
        },
        "text_config": text_config(ids) | {"model_type": "qwen2"},
        "audio_token_id": ids["<sound>"],
    }


def onevision(ids: Mapping[str, int]) -> dict[str, Any]:
    """LLaVA-OneVision."""
    return {
        "vision_config": siglip_config(56) | {"vision_use_head": False},
        "text_config": text_config(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<image>"],
        "video_token_id": ids["<video>"],
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
    }


def internvl(ids: Mapping[str, int]) -> dict[str, Any]:
    """InternVL."""
    return {
        "vision_config": {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14], **_VISION},
        "text_config": text_config(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    }


def pixtral(ids: Mapping[str, int]) -> dict[str, Any]:
    """Pixtral."""
    return {
        "vision_config": {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 8, **_VISION},
        "text_config": text_config(ids) | {"model_type": "mistral"},
        "image_token_id": ids["[IMG]"],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def qwen3_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    """Qwen3-VL."""
    return {
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "patch_size": 16,
        },
        "text_config": text_config(ids)
        | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        },
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
