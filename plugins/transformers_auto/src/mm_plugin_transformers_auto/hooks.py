"""The declarations of this plugin. Imports nothing but `mm_plugin`."""

from __future__ import annotations

from mm_plugin import ModelSpec, hookimpl


@hookimpl
def mm_register_models() -> ModelSpec:
    """One declaration for every model that transformers can process; what it takes depends on the checkpoint."""
    return ModelSpec(
        name="transformers_auto",
        output_version=1,
        modalities=(),
        placeholders={},
        fields={},
        padding="offsets",
        processor="mm_plugin_transformers_auto.processor:TransformersProcessor",
        encoder="mm_plugin_transformers_auto.encoder:TransformersEncoder",
        specialize="mm_plugin_transformers_auto.specialize:specialize",
    )
