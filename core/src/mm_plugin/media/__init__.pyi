from .audio import AudioSource, open_audio
from .images import ImageSource, normalise_image, open_image, raw_pixels
from .limits import check_pixels
from .probing import probe
from .sources import is_remote
from .types import (
    WHITE,
    AudioSamples,
    AudioSize,
    Color,
    Frames,
    Medium,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
)
from .video import VideoSource, open_video, whole

__all__ = [
    "WHITE",
    "AudioSamples",
    "AudioSize",
    "AudioSource",
    "Color",
    "Frames",
    "ImageSource",
    "Medium",
    "SampledVideo",
    "Sampling",
    "Size",
    "VideoFrames",
    "VideoSize",
    "VideoSource",
    "check_pixels",
    "is_remote",
    "normalise_image",
    "open_audio",
    "open_image",
    "open_video",
    "probe",
    "raw_pixels",
    "whole",
]
