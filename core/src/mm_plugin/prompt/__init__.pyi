from .masking import SEGMENT_BREAK
from .reader import PromptReader, TokenizedPrompt, encode_rendered

__all__ = [
    "SEGMENT_BREAK",
    "PromptReader",
    "TokenizedPrompt",
    "encode_rendered",
]
