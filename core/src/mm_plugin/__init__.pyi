from .checkpoint import Checkpoint
from .embed.encode import encode_items
from .embed.routine import embed_mm_inputs, general_mm_embed_routine
from .embed.rows import EmbedOutput
from .encoder.base import Encoder, EncodesAudio, EncodesImages, EncodesVideos
from .errors import (
    DeadlineError,
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
from .inputs.batch import ForwardBatch
from .inputs.encoded import Encoded
from .inputs.precomputed import PrecomputedEmbeddings, ProcessorOutput
from .inputs.processed import MultimodalInputs, MultimodalProcessorOutput
from .inputs.request_media import RequestMedia
from .items import Modality, MultimodalDataItem, MultimodalInputFormat
from .media.types import (
    AudioSamples,
    AudioSize,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
)
from .media.with_options import WithOptions
from .placeholders import Replacement
from .processor.joint_output import JointItem, JointOutput
from .processor.mixins import (
    AcceptsAudio,
    AcceptsPrecomputed,
    AcceptsVideos,
    KnowsLargest,
    PreparesBatches,
    ProcessesJointly,
)
from .processor.model import ModelProcessor
from .processor.notes import NotedFields
from .processor.options import BaseOptions, OptionScope
from .processor.processor import Processor
from .registry.records import PluginRecord
from .registry.registry import Registry, discover
from .settings import Settings
from .spec import ModelSpec

__version__: str

__all__ = [
    "AcceptsAudio",
    "AcceptsPrecomputed",
    "AcceptsVideos",
    "AudioSamples",
    "AudioSize",
    "BaseOptions",
    "Checkpoint",
    "DeadlineError",
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "DecodedVideo",
    "EmbedOutput",
    "Encoded",
    "Encoder",
    "EncoderError",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "ForwardBatch",
    "JointItem",
    "JointOutput",
    "KnowsLargest",
    "LimitError",
    "MMPluginError",
    "MediaError",
    "Modality",
    "ModelProcessor",
    "ModelSpec",
    "MultimodalDataItem",
    "MultimodalInputFormat",
    "MultimodalInputs",
    "MultimodalProcessorOutput",
    "NoModelError",
    "NotedFields",
    "OptionScope",
    "PlaceholderError",
    "PluginError",
    "PluginLoadError",
    "PluginRecord",
    "PrecomputedEmbeddings",
    "PreparesBatches",
    "ProcessesJointly",
    "Processor",
    "ProcessorError",
    "ProcessorOutput",
    "Registry",
    "Replacement",
    "RequestError",
    "RequestMedia",
    "SampledVideo",
    "Sampling",
    "Settings",
    "Size",
    "UsageError",
    "VideoFrames",
    "VideoSize",
    "WithOptions",
    "__version__",
    "discover",
    "embed_mm_inputs",
    "encode_items",
    "general_mm_embed_routine",
    "hookimpl",
]
