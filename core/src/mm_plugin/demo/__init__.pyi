from .base import (
    Demo,
    DemoVideo,
    DrawsViews,
    EmbeddingBoxes,
    ReferenceOutput,
    ShowsVideos,
    TransformersDemo,
    View,
    sample_images,
)

__all__ = [
    "Demo",
    "DemoVideo",
    "DrawsViews",
    "EmbeddingBoxes",
    "ReferenceOutput",
    "ShowsVideos",
    "TransformersDemo",
    "View",
    "sample_images",
]
