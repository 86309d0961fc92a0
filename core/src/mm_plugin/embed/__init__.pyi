from .calls import EncoderCalls
from .encode import encode_items
from .plan import Piece, StepPlan, plan_step
from .pruning import kept_per_frame, kept_positions, place_kept_positions, prune_video
from .routine import embed_mm_inputs, general_mm_embed_routine
from .rows import EmbedOutput, FailedItem
from .text import embed_text

__all__ = [
    "EmbedOutput",
    "EncoderCalls",
    "FailedItem",
    "Piece",
    "StepPlan",
    "embed_mm_inputs",
    "embed_text",
    "encode_items",
    "general_mm_embed_routine",
    "kept_per_frame",
    "kept_positions",
    "place_kept_positions",
    "plan_step",
    "prune_video",
]
