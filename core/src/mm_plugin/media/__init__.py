"""Untrusted bytes, paths, URLs, arrays, PIL objects, frames and samples -> one normalised medium. Every limit on media ends here.

    sources   where encoded bytes come from          images   pictures, with Pillow
    remote    http(s), with httpx                    video    clips, with PyAV
    limits    what a medium may be at most           audio    sounds, with PyAV
    sizes     what a medium is, before and after it is decoded
"""

from mm_plugin.media.images import ImageSource, normalise_image, open_image
from mm_plugin.media.limits import check_pixels
from mm_plugin.media.sizes import (
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
from mm_plugin.media.sources import is_remote

__all__ = [
    "WHITE",
    "AudioSamples",
    "AudioSize",
    "Color",
    "Frames",
    "ImageSource",
    "Medium",
    "SampledVideo",
    "Sampling",
    "Size",
    "VideoFrames",
    "VideoSize",
    "check_pixels",
    "is_remote",
    "normalise_image",
    "open_image",
]
