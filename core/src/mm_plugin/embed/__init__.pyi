from .calls import EncoderCalls
from .plan import Piece, StepPlan, plan_step
from .pruning import kept_positions, place_kept_positions, prune_video, rows_per_frame
from .routine import embed_mm_inputs, general_mm_embed_routine
from .rows import EmbedOutput, FailedItem, Step, embed_text
from .staging import StagingBuffer

__all__ = [
    "EmbedOutput",
    "EncoderCalls",
    "FailedItem",
    "Piece",
    "StagingBuffer",
    "Step",
    "StepPlan",
    "embed_mm_inputs",
    "embed_text",
    "general_mm_embed_routine",
    "kept_positions",
    "place_kept_positions",
    "plan_step",
    "prune_video",
    "rows_per_frame",
]
