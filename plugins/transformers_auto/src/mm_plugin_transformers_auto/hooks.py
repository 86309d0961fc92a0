"""The declarations of this plugin. Imports nothing but `mm_plugin`."""

from __future__ import annotations

from mm_plugin import ModelSpec, hookimpl


@hookimpl
def mm_register_models() -> ModelSpec:
    """Whatever transformers can process; what that is, each checkpoint tells."""
    return ModelSpec(
        name="transformers_auto",
        output_version=1,
        modalities=(),
        placeholders={},
        fields={},
        padding="offsets",
        processor="mm_plugin_transformers_auto.processor:ImagesProcessor",
        encoder="mm_plugin_transformers_auto.encoder:TransformersEncoder",
        specialize="mm_plugin_transformers_auto.learning:specialize",
    )
