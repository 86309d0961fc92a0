from .base import Demo, DrawsViews, Reference, RowBoxes, ShownClip, ShowsVideos, TransformersDemo, View, photographs
from .grids import PatchGridDemo

__all__ = [
    "Demo",
    "DrawsViews",
    "PatchGridDemo",
    "Reference",
    "RowBoxes",
    "ShownClip",
    "ShowsVideos",
    "TransformersDemo",
    "View",
    "photographs",
]
