from .base import Agree, Encoder, EncoderLike, EncodesAudio, EncodesImages, EncodesVideos
from .layers import Rotary2D, VarlenAttention, self_attention
from .loading import fill_tower, load_tower
from .results import as_tensor, checked_rows, given_rows

__all__ = [
    "Agree",
    "Encoder",
    "EncoderLike",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "Rotary2D",
    "VarlenAttention",
    "as_tensor",
    "checked_rows",
    "fill_tower",
    "given_rows",
    "load_tower",
    "self_attention",
]
