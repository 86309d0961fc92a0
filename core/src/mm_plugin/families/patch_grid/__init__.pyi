from .demo import PatchGridDemo
from .encoder import Grid, PatchEmbedding, PatchGridEncoder, frame_lengths, merge_order, window_order
from .options import (
    ChannelValues,
    FrameCount,
    FrameRate,
    FrameRuleName,
    FrameSizeRuleName,
    ImagePixels,
    PatchCount,
    PatchGridOptions,
    PatchGridVideoOptions,
    ResizeRuleName,
    VideoPixels,
)
from .positions import grid_positions
from .processor import PatchGridProcessor, PatchGridVideos, sample_evenly

__all__ = [
    "ChannelValues",
    "FrameCount",
    "FrameRate",
    "FrameRuleName",
    "FrameSizeRuleName",
    "Grid",
    "ImagePixels",
    "PatchCount",
    "PatchEmbedding",
    "PatchGridDemo",
    "PatchGridEncoder",
    "PatchGridOptions",
    "PatchGridProcessor",
    "PatchGridVideoOptions",
    "PatchGridVideos",
    "ResizeRuleName",
    "VideoPixels",
    "frame_lengths",
    "grid_positions",
    "merge_order",
    "sample_evenly",
    "window_order",
]
