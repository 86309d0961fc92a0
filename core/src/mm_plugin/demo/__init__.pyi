from .base import Demo, DrawsViews, Reference, RowBoxes, ShownVideo, ShowsVideos, TransformersDemo, View, sample_images
from .grids import PatchGridDemo

__all__ = [
    "Demo",
    "DrawsViews",
    "PatchGridDemo",
    "Reference",
    "RowBoxes",
    "ShownVideo",
    "ShowsVideos",
    "TransformersDemo",
    "View",
    "sample_images",
]
