from .base import Agree, Encoder, EncoderLike, EncodesAudio, EncodesImages, EncodesVideos
from .layers import (
    PatchEmbedding,
    PatchGridEncoder,
    Rotary,
    Segments,
    frame_lengths,
    merge_order,
    self_attention,
    window_order,
)
from .loading import fill_tower, load_tower
from .results import as_tensor, checked_rows, given_rows

__all__ = [
    "Agree",
    "Encoder",
    "EncoderLike",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "PatchEmbedding",
    "PatchGridEncoder",
    "Rotary",
    "Segments",
    "as_tensor",
    "checked_rows",
    "fill_tower",
    "frame_lengths",
    "given_rows",
    "load_tower",
    "merge_order",
    "self_attention",
    "window_order",
]
