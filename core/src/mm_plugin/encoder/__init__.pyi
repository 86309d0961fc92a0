from .base import Agree, EmbedRoutine, Encoder, EncoderLike, EncodesAudio, EncodesImages, EncodesVideos
from .layers import Rotary2D, VarlenAttention, self_attention
from .loading import fill_tower, load_tower
from .module import EncoderModule
from .results import as_tensor, checked_embeddings, given_embeddings
from .staging import StagingBuffer

__all__ = [
    "Agree",
    "EmbedRoutine",
    "Encoder",
    "EncoderLike",
    "EncoderModule",
    "EncodesAudio",
    "EncodesImages",
    "EncodesVideos",
    "Rotary2D",
    "StagingBuffer",
    "VarlenAttention",
    "as_tensor",
    "checked_embeddings",
    "fill_tower",
    "given_embeddings",
    "load_tower",
    "self_attention",
]
