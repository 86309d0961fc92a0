from .audio import AudioSource, open_audio
from .images import ImageSource, normalize_image, open_image, raw_pixels
from .limits import check_pixels
from .probing import probe
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
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "DecodedVideo",
    "Frames",
    "ImageSource",
    "SampledVideo",
    "Sampling",
    "Size",
    "VideoFrames",
    "VideoSize",
    "VideoSource",
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
