from .audio import AudioSource, open_audio
from .images import ImageSource, open_image, raw_pixels
from .kinds import MEDIA_KINDS, MediaKind
from .limits import check_pixels
from .pixels import normalize_image
from .probing import probe
from .source import MediaSize, MediaSource, MediaValue, SamplingRules
from .sources import is_remote
from .types import (
    WHITE,
    AudioSamples,
    AudioSize,
    Color,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    Frames,
    PackedImage,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
    whole,
)
from .video import VideoSource, open_video
from .with_options import WithOptions

__all__ = [
    "MEDIA_KINDS",
    "WHITE",
    "AudioSamples",
    "AudioSize",
    "AudioSource",
    "Color",
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "DecodedVideo",
    "Frames",
    "ImageSource",
    "MediaKind",
    "MediaSize",
    "MediaSource",
    "MediaValue",
    "PackedImage",
    "SampledVideo",
    "Sampling",
    "SamplingRules",
    "Size",
    "VideoFrames",
    "VideoSize",
    "VideoSource",
    "WithOptions",
    "check_pixels",
    "is_remote",
    "normalize_image",
    "open_audio",
    "open_image",
    "open_video",
    "probe",
    "raw_pixels",
    "whole",
]
