from .encoding import encode_rendered
from .masking import SEGMENT_BREAK
from .reader import PromptReader, TokenizedPrompt

__all__ = [
    "SEGMENT_BREAK",
    "PromptReader",
    "TokenizedPrompt",
    "encode_rendered",
]
