from .base import Agree, EmbedRoutine, Encoder, EncoderLike, EncodesAudio, EncodesImages, EncodesVideos
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
from .results import as_tensor, checked_embeddings, given_embeddings
from .staging import StagingBuffer

__all__ = [
    "Agree",
    "EmbedRoutine",
    "Encoder",
    "EncoderLike",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "PatchEmbedding",
    "PatchGridEncoder",
    "Rotary",
    "Segments",
    "StagingBuffer",
    "as_tensor",
    "checked_embeddings",
    "fill_tower",
    "frame_lengths",
    "given_embeddings",
    "load_tower",
    "merge_order",
    "self_attention",
    "window_order",
]
