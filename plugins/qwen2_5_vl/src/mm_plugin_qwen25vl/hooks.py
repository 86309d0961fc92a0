"""The declarations of this plugin. Imports nothing but `mm_plugin`."""

from __future__ import annotations

from mm_plugin import Modality, ModelSpec, hookimpl


@hookimpl
def mm_register_models() -> ModelSpec:
    """Qwen2.5-VL."""
    return ModelSpec(
        name="qwen2_5_vl",
        output_version=1,
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        model_types=("qwen2_5_vl",),
        modalities=(Modality.IMAGE, Modality.VIDEO),
        placeholders={Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"},
        token_pairs=(("<|vision_start|>", "<|vision_end|>"),),
        padding="pairs",
        fields={Modality.IMAGE: ("image_grid_thw",), Modality.VIDEO: ("video_grid_thw", "second_per_grid_ts")},
        feature_names={Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"},
        processor="mm_plugin_qwen25vl.processor:Qwen25VLProcessor",
        encoder="mm_plugin_qwen25vl.encoder:Qwen25VLEncoder",
        positions="mm_plugin_qwen25vl.positions:positions",
        demo="mm_plugin_qwen25vl.demo:Qwen25VLDemo",
    )
