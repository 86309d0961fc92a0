"""The declarations of this plugin. Imports nothing but `mm_plugin`."""

from __future__ import annotations

from mm_plugin import Modality, ModelSpec, hookimpl


@hookimpl
def mm_register_models() -> ModelSpec:
    """DeepSeek-VL2: base, small and tiny. Released folders have a model type, but no architectures."""
    return ModelSpec(
        name="deepseek_vl2",
        output_version=1,
        architectures=("DeepseekVLV2ForCausalLM",),
        model_types=("deepseek_vl_v2",),
        modalities=(Modality.IMAGE,),
        placeholders={Modality.IMAGE: "<image>"},
        padding="runs",  # images have no start and end tokens; only recorded offsets separate adjacent ones
        fields={Modality.IMAGE: ("images_spatial_crop",)},
        feature_names={Modality.IMAGE: "images"},
        processor="mm_plugin_deepseekvl2.processor:DeepseekVL2Processor",
        encoder="mm_plugin_deepseekvl2.encoder:DeepseekVL2Encoder",
        tokenizer="mm_plugin_deepseekvl2.conversation:open_tokenizer",
        demo="mm_plugin_deepseekvl2.demo:DeepseekVL2Demo",
    )
