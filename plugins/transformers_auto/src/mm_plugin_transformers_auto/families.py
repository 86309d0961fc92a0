"""The model families that the fallback is tested on, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mm_plugin_transformers_auto import family_configs as configs

_MEAN_STD = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One model family in miniature.

    Attributes:
        name: short name, as the folder in transformers.
        architecture: the model class.
        special: special tokens beside those of every tokenizer here.
        config: makes the model's config from the ids of its tokens.
        processor: processor_config.json.
        image: how an image stands in a prompt; empty if the model takes none.
        audio: how an audio input stands in a prompt; empty if the model takes none.
        needs: packages without which its processor cannot be opened.
        refused: whether the plugin refuses it, because of what the model does.
        most: the most media inputs that its processor takes in one request.
        bos: whether the tokenizer adds a bos token.
        tokens: attributes of the tokenizer by name, such as `image_token`.
        shows: what it is an example of, for the table of models.

    Example:
        >>> FAMILIES["llava"].prompt(1).splitlines()
        ['see <image>', 'what is in the one?']
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
        """A prompt with media inputs, some of which touch text without a space, and some each other.

        Args:
            count: of media inputs.
        """
        media = self.image or self.audio
        texts = ["see ", " and the\n", "", "\n\nthe other ", " in "]
        return "".join(texts[index % 5] + media for index in range(count)) + "\nwhat is in the one?"


def _sizes(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def _clip(side: int, **settings: Any) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": side, "width": side},
        "size": {"shortest_edge": side},
        **_MEAN_STD,
        **settings,
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
            config=configs.llava,
            processor={
                "processor_class": "LlavaProcessor",
                "image_processor": _clip(56),
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
            config=configs.llava_next,
            processor={
                "processor_class": "LlavaNextProcessor",
                "image_processor": _clip(336)
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
            config=configs.gemma3,
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
            config=configs.paligemma,
            processor={"processor_class": "PaliGemmaProcessor", "image_processor": _SIGLIP | {"image_seq_length": 16}},
            image="<image>",
            bos=False,
            shows="a prompt that is rewritten around its images",
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
            config=configs.idefics3,
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
            config=configs.idefics2,
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
            config=configs.aya,
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
            config=configs.ovis2,
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
            shows="a model that also writes at the positions of its indicator tokens",
        ),
        Family(
            name="mllama",
            architecture="MllamaForConditionalGeneration",
            special=("<|image|>",),
            config=configs.mllama,
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
            shows="cross-attention: no token takes an embedding",
        ),
        Family(
            name="qwen2_audio",
            architecture="Qwen2AudioForConditionalGeneration",
            special=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
            config=configs.qwen2_audio,
            processor={
                "processor_class": "Qwen2AudioProcessor",
                "feature_extractor": _WHISPER,
            },
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
            bos=False,
            shows="audio",
        ),
        Family(
            name="audioflamingo3",
            architecture="AudioFlamingo3ForConditionalGeneration",
            special=("<sound>",),
            config=configs.audio_flamingo,
            processor={
                "processor_class": "AudioFlamingo3Processor",
                "feature_extractor": _WHISPER,
                "max_audio_len": 12,
            },
            audio="<sound>",
            bos=False,
            most=1,
            shows="audio in windows, one input per request",
        ),
        Family(
            name="llava_onevision",
            architecture="LlavaOnevisionForConditionalGeneration",
            special=("<image>", "<video>"),
            config=configs.onevision,
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
            config=configs.internvl,
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
            config=configs.pixtral,
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
            config=configs.qwen3_vl,
            processor={
                "processor_class": "Qwen3VLProcessor",
                "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **_QWEN},
                "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **_QWEN},
            },
            image="<|vision_start|><|image_pad|><|vision_end|>",
            needs=("torchvision",),
            bos=False,
            shows="M-RoPE and deepstack",
        ),
    )
}
