"""Tiny Qwen2.5-VL checkpoints with seeded weights, laid out as the released ones are, for tests and demos."""

from __future__ import annotations

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm_plugin.testing import PatchGridCheckpoints

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
TINY = PatchGridCheckpoints(
    config_class=Qwen2_5_VLConfig,
    model_class=Qwen2_5_VLForConditionalGeneration,
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
    preprocessor=PREPROCESSOR,
)
qwen_tokenizer, tiny_config, make_checkpoint = TINY.tokenizer, TINY.config, TINY.write
