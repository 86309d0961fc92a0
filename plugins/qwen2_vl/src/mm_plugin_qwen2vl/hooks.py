"""The declarations of this plugin. Imports nothing but `mm_plugin`."""

from __future__ import annotations

from mm_plugin import Modality, ModelSpec, hookimpl


@hookimpl
def mm_register_models() -> ModelSpec:
    """Qwen2-VL."""
    return ModelSpec(
        name="qwen2_vl",
        output_version=1,
        architectures=("Qwen2VLForConditionalGeneration",),
        model_types=("qwen2_vl",),
        modalities=(Modality.IMAGE, Modality.VIDEO),
        placeholders={Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"},
        token_pairs=(("<|vision_start|>", "<|vision_end|>"),),
        padding="pairs",
        fields={Modality.IMAGE: ("image_grid_thw",), Modality.VIDEO: ("video_grid_thw",)},
        feature_names={Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"},
        processor="mm_plugin_qwen2vl.processor:Qwen2VLProcessor",
        encoder="mm_plugin_qwen2vl.encoder:Qwen2VLEncoder",
        positions="mm_plugin_qwen2vl.positions:positions",
        demo="mm_plugin_qwen2vl.demo:Qwen2VLDemo",
    )
