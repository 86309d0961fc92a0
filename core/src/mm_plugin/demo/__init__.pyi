from .base import Demo, DrawsViews, Reference, RowBoxes, ShownVideo, ShowsVideos, TransformersDemo, View, sample_images

__all__ = [
    "Demo",
    "DrawsViews",
    "Reference",
    "RowBoxes",
    "ShownVideo",
    "ShowsVideos",
    "TransformersDemo",
    "View",
    "sample_images",
]
