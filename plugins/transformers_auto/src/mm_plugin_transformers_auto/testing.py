"""Tiny checkpoints with seeded weights of the model families that the fallback is proved on, made on the spot by transformers.

Each is laid out as released ones are: config.json, a tokenizer, processor_config.json, safetensors. What is small is the model, not
the rule by which its images are cut and its prompts are written.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from mm_plugin.testing import byte_level_tokenizer, fill_weights, write_json

_TURN = (
    "{{% for message in messages %}}<turn>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% elif part['type'] == 'audio' %}}{audio}"
    "{{% elif part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<end>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<turn>assistant\n{{% endif %}}"
)
_MEAN_STD = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
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


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One model family in miniature.

    Attributes:
        name: short name, as transformers' folder.
        architecture: the model class.
        special: special tokens beside the ones that every tokenizer here has.
        config: the model's config, by the ids of its tokens.
        processor: processor_config.json.
        image: how an image stands in a prompt; empty where it takes none.
        audio: how an audio input stands in a prompt; empty where it takes none.
        needs: packages that its processor cannot be opened without.
        refused: whether it is refused, as what it does is nothing that this interface can give.
        most: media that its processor takes in one request.
        bos: whether the tokenizer puts a bos token in front.
        tokens: attributes of the tokenizer by name, such as `image_token`.
        shows: what of the family's ways it stands for, for the table of models.
    """

    name: str
    architecture: str
    special: tuple[str, ...]
    config: Callable[[Mapping[str, int]], dict[str, Any]]
    processor: Mapping[str, Any]
    image: str = ""
    audio: str = ""
    needs: tuple[str, ...] = ()
    refused: bool = False
    most: int = 5
    bos: bool = True
    tokens: Mapping[str, str] = {}
    shows: str = ""

    def prompt(self, count: int) -> str:
        """A prompt with so many media of the family's kind, some of which touch text without a space, and some each other."""
        media = self.image or self.audio
        texts = ["see ", " and the\n", "", "\n\nthe other ", " in "]
        return "".join(texts[index % 5] + media for index in range(count)) + "\nwhat is in the one?"


def _sizes(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def _video(side: int, **settings: Any) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": side, "width": side},
        "size": {"shortest_edge": side},
        **_MEAN_STD,
        **settings,
    }


def _llama(ids: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(ids) + 5,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<end>"],
        "pad_token_id": ids["<pad>"],
        **_TEXT,
        **settings,
    }


def _clip_tower(side: int) -> dict[str, Any]:
    return {"model_type": "clip_vision_model", "image_size": side, "patch_size": 14, "projection_dim": 32, **_VISION}


def _siglip_tower(side: int, patch: int = 14) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", "image_size": side, "patch_size": patch, **_VISION}


def _llava(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": _clip_tower(56),
        "text_config": _llama(ids),
        "image_token_id": ids["<image>"],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 16,
    }


def _llava_next(ids: Mapping[str, int]) -> dict[str, Any]:
    # The released grid (672 x 336 ... of a 336 tower) with patches four times as wide, so that prompts stay short.
    return {
        **_llava(ids),
        "vision_config": _clip_tower(336) | {"patch_size": 56},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }


def _paligemma(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": _siglip_tower(56) | {"vision_use_head": False},
        "text_config": _llama(ids) | {"model_type": "gemma", "num_image_tokens": 16},
        "image_token_id": ids["<image>"],
        "projection_dim": 32,
    }


def _gemma3(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": _siglip_tower(56) | {"vision_use_head": False},
        "text_config": _llama(ids)
        | {"model_type": "gemma3_text", "sliding_window": 64, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
        "image_token_id": ids["<soft>"],
        "boi_token_id": ids["<start_of_image>"],
        "eoi_token_id": ids["<end_of_image>"],
        "mm_tokens_per_image": 4,
    }


def _idefics3(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14, **_VISION},
        "text_config": _llama(ids),
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
        "pad_token_id": ids["<pad>"],
    }


def _idefics2(ids: Mapping[str, int]) -> dict[str, Any]:
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
        "text_config": _llama(ids) | {"model_type": "mistral"},
        "image_token_id": ids["<image>"],
    }


def _ovis2(ids: Mapping[str, int]) -> dict[str, Any]:
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return {
        "vision_config": {"image_size": 56, "patch_size": 14, "hidden_stride": 2, "vocab_size": 70, **_VISION},
        "text_config": _llama(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<IMG_ATOM>"],
        "visual_indicator_token_ids": [ids[mark] for mark in marks],
        "vocab_size": len(ids) + 5,
        "hidden_size": 32,
    }


def _aya(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": _siglip_tower(56) | {"vision_use_head": False},
        "text_config": _llama(ids) | {"model_type": "cohere2", "sliding_window": 64},
        "image_token_id": ids["<|IMG_PATCH|>"],
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    }


def _mllama(ids: Mapping[str, int]) -> dict[str, Any]:
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
        "text_config": _llama(ids) | {"model_type": "mllama_text_model", "cross_attention_layers": [1]},
        "image_token_id": ids["<|image|>"],
    }


def _qwen2_audio(ids: Mapping[str, int]) -> dict[str, Any]:
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
        "text_config": _llama(ids) | {"model_type": "qwen2"},
        "audio_token_id": ids["<|AUDIO|>"],
    }


def _audio_flamingo(ids: Mapping[str, int]) -> dict[str, Any]:
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
        "text_config": _llama(ids) | {"model_type": "qwen2"},
        "audio_token_id": ids["<sound>"],
    }


def _onevision(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": _siglip_tower(56) | {"vision_use_head": False},
        "text_config": _llama(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<image>"],
        "video_token_id": ids["<video>"],
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
    }


def _internvl(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14], **_VISION},
        "text_config": _llama(ids) | {"model_type": "qwen2"},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    }


def _pixtral(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 8, **_VISION},
        "text_config": _llama(ids) | {"model_type": "mistral"},
        "image_token_id": ids["[IMG]"],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _qwen3_vl(ids: Mapping[str, int]) -> dict[str, Any]:
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
        "text_config": _llama(ids)
        | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        },
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


_SIGLIP = {
    "image_processor_type": "SiglipImageProcessor",
    **_sizes(56),
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "chunk_length": 4,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "return_attention_mask": True,
}
_QWEN = {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16, "merge_size": 2}

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llava",
            architecture="LlavaForConditionalGeneration",
            special=("<image>",),
            config=_llava,
            processor={
                "processor_class": "LlavaProcessor",
                "image_processor": _video(56),
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
            image="<image>",
            shows="a fixed number of tokens",
        ),
        Family(
            name="llava_next",
            architecture="LlavaNextForConditionalGeneration",
            special=("<image>",),
            config=_llava_next,
            processor={
                "processor_class": "LlavaNextProcessor",
                "image_processor": _video(336)
                | {
                    "image_processor_type": "LlavaNextImageProcessor",
                    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
                },
                "patch_size": 56,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
            image="<image>",
            shows="any resolution: the number of tokens depends on the size",
        ),
        Family(
            name="gemma3",
            architecture="Gemma3ForConditionalGeneration",
            special=("<start_of_image>", "<soft>", "<end_of_image>"),
            config=_gemma3,
            processor={
                "processor_class": "Gemma3Processor",
                "image_processor": _SIGLIP | {"image_processor_type": "Gemma3ImageProcessor"},
                "image_seq_length": 4,
            },
            image="<start_of_image>",
            tokens={"boi_token": "<start_of_image>", "image_token": "<soft>", "eoi_token": "<end_of_image>"},
            shows="line ends, a start and an end token around soft tokens",
        ),
        Family(
            name="paligemma",
            architecture="PaliGemmaForConditionalGeneration",
            special=("<image>",),
            config=_paligemma,
            processor={"processor_class": "PaliGemmaProcessor", "image_processor": _SIGLIP | {"image_seq_length": 16}},
            image="<image>",
            bos=False,
            shows="a prompt that is written again around its images",
        ),
        Family(
            name="idefics3",
            architecture="Idefics3ForConditionalGeneration",
            special=(
                "<image>",
                "<fake_token_around_image>",
                "<global-img>",
                "<end_of_utterance>",
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
            ),
            config=_idefics3,
            processor={
                "processor_class": "Idefics3Processor",
                "image_processor": {
                    "image_processor_type": "Idefics3ImageProcessor",
                    "size": {"longest_edge": 224},
                    "max_image_size": {"longest_edge": 56},
                    **_MEAN_STD,
                },
                "image_seq_len": 4,
            },
            image="<image>",
            shows="row and column markers between tiles",
        ),
        Family(
            name="idefics2",
            architecture="Idefics2ForConditionalGeneration",
            special=("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
            config=_idefics2,
            processor={
                "processor_class": "Idefics2Processor",
                "image_processor": {
                    "image_processor_type": "Idefics2ImageProcessor",
                    "size": {"shortest_edge": 42, "longest_edge": 98},
                    "do_image_splitting": False,
                    **_MEAN_STD,
                },
                "image_seq_len": 6,
            },
            image="<image>",
            shows="images of their own shape, padded to the largest, and a resampler",
        ),
        Family(
            name="aya_vision",
            architecture="AyaVisionForConditionalGeneration",
            special=(
                "<image>",
                "<|IMG_PATCH|>",
                "<|START_OF_IMG|>",
                "<|END_OF_IMG|>",
                "<|IMG_LINE_BREAK|>",
                "TILE",
                "TILE_GLOBAL",
                *(f"TILE_{n}" for n in range(1, 13)),
            ),
            config=_aya,
            processor={
                "processor_class": "AyaVisionProcessor",
                "image_processor": {
                    "image_processor_type": "GotOcr2ImageProcessor",
                    "crop_to_patches": True,
                    "min_patches": 1,
                    "max_patches": 6,
                    **_sizes(56),
                    **_MEAN_STD,
                },
                "patch_size": 28,
                "img_size": 56,
                "downsample_factor": 1,
            },
            image="<image>",
            shows="tiles with a marker each",
        ),
        Family(
            name="ovis2",
            architecture="Ovis2ForConditionalGeneration",
            special=("<image>", "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            config=_ovis2,
            processor={
                "processor_class": "Ovis2Processor",
                "image_processor": {
                    "image_processor_type": "Ovis2ImageProcessor",
                    "crop_to_patches": False,
                    **_sizes(56),
                    **_MEAN_STD,
                },
                "image_seq_length": 4,
                "image_token": "<image>",
            },
            image="<image>",
            refused=True,
            shows="a model that writes at the places of its marks too",
        ),
        Family(
            name="mllama",
            architecture="MllamaForConditionalGeneration",
            special=("<|image|>",),
            config=_mllama,
            processor={
                "processor_class": "MllamaProcessor",
                "image_processor": {
                    "image_processor_type": "MllamaImageProcessor",
                    "max_image_tiles": 4,
                    **_sizes(56),
                    **_MEAN_STD,
                },
            },
            image="<|image|>",
            refused=True,
            shows="cross-attention: no token takes a row",
        ),
        Family(
            name="qwen2_audio",
            architecture="Qwen2AudioForConditionalGeneration",
            special=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
            config=_qwen2_audio,
            processor={
                "processor_class": "Qwen2AudioProcessor",
                "feature_extractor": _WHISPER,
            },
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
            bos=False,
            shows="audio inputs",
        ),
        Family(
            name="audioflamingo3",
            architecture="AudioFlamingo3ForConditionalGeneration",
            special=("<sound>",),
            config=_audio_flamingo,
            processor={
                "processor_class": "AudioFlamingo3Processor",
                "feature_extractor": _WHISPER,
                "max_audio_len": 12,
            },
            audio="<sound>",
            bos=False,
            most=1,
            shows="audio inputs in windows, one of them in a request",
        ),
        Family(
            name="llava_onevision",
            architecture="LlavaOnevisionForConditionalGeneration",
            special=("<image>", "<video>"),
            config=_onevision,
            processor={
                "processor_class": "LlavaOnevisionProcessor",
                "image_processor": _SIGLIP
                | {
                    "image_processor_type": "LlavaOnevisionImageProcessor",
                    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
                },
                "video_processor": _SIGLIP | {"video_processor_type": "LlavaOnevisionVideoProcessor"},
                "num_image_tokens": 16,
                "vision_feature_select_strategy": "full",
            },
            image="<image>",
            needs=("torchvision",),
            shows="any resolution of one image, another rule for several",
        ),
        Family(
            name="internvl",
            architecture="InternVLForConditionalGeneration",
            special=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
            config=_internvl,
            processor={
                "processor_class": "InternVLProcessor",
                "image_processor": {
                    "image_processor_type": "GotOcr2ImageProcessor",
                    "crop_to_patches": True,
                    "min_patches": 1,
                    "max_patches": 6,
                    **_sizes(56),
                    **_MEAN_STD,
                },
                "video_processor": {"video_processor_type": "InternVLVideoProcessor", **_sizes(56), **_MEAN_STD},
                "image_seq_length": 4,
            },
            image="<IMG_CONTEXT>",
            needs=("torchvision",),
            bos=False,
            tokens={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
            shows="tiles without markers",
        ),
        Family(
            name="pixtral",
            architecture="LlavaForConditionalGeneration",
            special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
            config=_pixtral,
            processor={
                "processor_class": "PixtralProcessor",
                "image_processor": {
                    "image_processor_type": "PixtralImageProcessor",
                    "size": {"longest_edge": 112},
                    "patch_size": {"height": 14, "width": 14},
                    **_MEAN_STD,
                },
                "patch_size": 14,
            },
            image="[IMG]",
            needs=("torchvision",),
            shows="row breaks",
        ),
        Family(
            name="qwen3_vl",
            architecture="Qwen3VLForConditionalGeneration",
            special=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
            config=_qwen3_vl,
            processor={
                "processor_class": "Qwen3VLProcessor",
                "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **_QWEN},
                "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **_QWEN},
            },
            image="<|vision_start|><|image_pad|><|vision_end|>",
            needs=("torchvision",),
            bos=False,
            shows="M-RoPE and deepstack rows",
        ),
    )
}


def tiny_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE, in which two line ends are one token as in released vocabularies, with the family's special tokens."""
    tokenizer = byte_level_tokenizer(
        ("<pad>", "<bos>", "<end>", "<turn>", *family.special),
        bos_token="<bos>",
        eos_token="<end>",
        pad_token="<pad>",
        chat_template=_TURN.format(image=family.image, audio=family.audio),
        extra_special_tokens=dict(family.tokens),
    )
    if family.bos:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    return tokenizer


def make_checkpoint(folder: str | Path, family: str, *, seed: int = 20260101) -> Path:
    """Write a whole tiny checkpoint.

    Args:
        folder: made if it is not there.
        family: a key of `FAMILIES`.
        seed: of the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = FAMILIES[family]
    tokenizer = tiny_tokenizer(described)
    tokenizer.save_pretrained(str(folder))
    write_json(folder / "processor_config.json", described.processor)
    cls = getattr(transformers, described.architecture)
    config = cls.config_class(**described.config(tokenizer.get_vocab()), tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).eval()
    model.load_state_dict(fill_weights(dict(model.named_parameters()), seed=seed), strict=False)
    model.save_pretrained(str(folder))
    return folder


def missing_packages(family: Family) -> list[str]:
    """Packages that its processor needs and that are not installed."""
    return [name for name in family.needs if importlib.util.find_spec(name) is None]
