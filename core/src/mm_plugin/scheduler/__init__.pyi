from .accounting import count_mm_tokens_in_extend
from .encoder_part import SeparatePart, encoder_len, strip_encoder_part
from .encoding_budget import EncodeWork, encode_work, limit_chunk
from .lifecycle import Lifecycle, LiveMedia
from .padding import apply_padded_input_ids, pad_input_ids, pad_runs, pad_token_pairs
from .sessions import merge, turn_rules

__all__ = [
    "EncodeWork",
    "Lifecycle",
    "LiveMedia",
    "SeparatePart",
    "apply_padded_input_ids",
    "count_mm_tokens_in_extend",
    "encode_work",
    "encoder_len",
    "limit_chunk",
    "merge",
    "pad_input_ids",
    "pad_runs",
    "pad_token_pairs",
    "strip_encoder_part",
    "turn_rules",
]
