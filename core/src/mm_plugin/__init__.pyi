from .checkpoint import Checkpoint
from .embed.routine import embed_mm_inputs, general_mm_embed_routine
from .embed.rows import EmbedOutput
from .encoder.base import Encoder, EncodesAudio, EncodesImages, EncodesVideos
from .errors import (
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
from .hookspecs import hookimpl
from .inputs import Encoded, ForwardBatch, MultimodalInputs, MultimodalProcessorOutput, PrecomputedRows, ProcessorOutput
from .items import Modality, MultimodalDataItem, MultimodalInputFormat
from .media.types import AudioSamples, AudioSize, Medium, SampledVideo, Sampling, Size, VideoFrames, VideoSize
from .placeholders import Replacement
from .processor.joint_output import Whole, WholeItem
from .processor.mixins import TakesAudio, TakesPrepared, TakesVideos, TakesWhole
from .processor.model import ModelProcessor
from .processor.options import BaseOptions, For
from .registry import PluginRecord, Registry, discover
from .settings import Settings
from .spec import ModelSpec

__version__: str

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
