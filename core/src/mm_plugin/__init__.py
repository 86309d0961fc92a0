"""mm-plugin: a plugin framework for model-specific multimodal processors.

`discover()` reads what is installed; a `Registry` opens processors and encoders. Importing this package imports neither torch nor
transformers nor numpy: every name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> room. What is here is public and stable; everything else is reached by its room.
_PUBLIC = {
    "AudioSamples": "media",
    "AudioSize": "media",
    "BaseOptions": "processor",
    "Checkpoint": "checkpoint",
    "EmbedOutput": "embed",
    "Encoded": "structs",
    "Encoder": "encoder",
    "EncoderError": "errors",
    "EncodesAudio": "encoder",
    "EncodesImages": "encoder",
    "EncodesVideos": "encoder",
    "For": "processor",
    "ForwardBatch": "structs",
    "LimitError": "errors",
    "MMPluginError": "errors",
    "MediaError": "errors",
    "Medium": "media",
    "Modality": "structs",
    "ModelProcessor": "processor",
    "ModelSpec": "spec",
    "MultimodalDataItem": "structs",
    "MultimodalInputFormat": "structs",
    "MultimodalInputs": "structs",
    "MultimodalProcessorOutput": "structs",
    "NoModelError": "errors",
    "PlaceholderError": "errors",
    "PluginError": "errors",
    "PluginLoadError": "errors",
    "PluginRecord": "registry",
    "PrecomputedRows": "structs",
    "ProcessorError": "errors",
    "ProcessorOutput": "structs",
    "Registry": "registry",
    "Replacement": "placeholders",
    "RequestError": "errors",
    "SampledVideo": "media",
    "Sampling": "media",
    "Settings": "settings",
    "Size": "media",
    "TakesAudio": "processor",
    "TakesPrepared": "processor",
    "TakesVideos": "processor",
    "TakesWhole": "processor",
    "UsageError": "errors",
    "VideoFrames": "media",
    "VideoSize": "media",
    "Whole": "processor",
    "WholeItem": "processor",
    "discover": "registry",
    "embed_mm_inputs": "embed",
    "general_mm_embed_routine": "embed",
    "hookimpl": "hookspecs",
}

__all__ = [
    "AudioSamples",
    "AudioSize",
    "BaseOptions",
    "Checkpoint",
    "EmbedOutput",
    "Encoded",
    "Encoder",
    "EncoderError",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "For",
    "ForwardBatch",
    "LimitError",
    "MMPluginError",
    "MediaError",
    "Medium",
    "Modality",
    "ModelProcessor",
    "ModelSpec",
    "MultimodalDataItem",
    "MultimodalInputFormat",
    "MultimodalInputs",
    "MultimodalProcessorOutput",
    "NoModelError",
    "PlaceholderError",
    "PluginError",
    "PluginLoadError",
    "PluginRecord",
    "PrecomputedRows",
    "ProcessorError",
    "ProcessorOutput",
    "Registry",
    "Replacement",
    "RequestError",
    "SampledVideo",
    "Sampling",
    "Settings",
    "Size",
    "TakesAudio",
    "TakesPrepared",
    "TakesVideos",
    "TakesWhole",
    "UsageError",
    "VideoFrames",
    "VideoSize",
    "Whole",
    "WholeItem",
    "__version__",
    "discover",
    "embed_mm_inputs",
    "general_mm_embed_routine",
    "hookimpl",
]

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.embed import EmbedOutput, embed_mm_inputs, general_mm_embed_routine
    from mm_plugin.encoder import Encoder, EncodesAudio, EncodesImages, EncodesVideos
    from mm_plugin.errors import (
        EncoderError,
        LimitError,
        MediaError,
        MMPluginError,
        NoModelError,
        PlaceholderError,
        PluginError,
        PluginLoadError,
        ProcessorError,
        RequestError,
        UsageError,
    )
    from mm_plugin.hookspecs import hookimpl
    from mm_plugin.media import (
        AudioSamples,
        AudioSize,
        Medium,
        SampledVideo,
        Sampling,
        Size,
        VideoFrames,
        VideoSize,
    )
    from mm_plugin.placeholders import Replacement
    from mm_plugin.processor import (
        BaseOptions,
        For,
        ModelProcessor,
        TakesAudio,
        TakesPrepared,
        TakesVideos,
        TakesWhole,
        Whole,
        WholeItem,
    )
    from mm_plugin.registry import PluginRecord, Registry, discover
    from mm_plugin.settings import Settings
    from mm_plugin.spec import ModelSpec
    from mm_plugin.structs import (
        Encoded,
        ForwardBatch,
        Modality,
        MultimodalDataItem,
        MultimodalInputFormat,
        MultimodalInputs,
        MultimodalProcessorOutput,
        PrecomputedRows,
        ProcessorOutput,
    )


def __getattr__(name: str) -> Any:
    room = _PUBLIC.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
