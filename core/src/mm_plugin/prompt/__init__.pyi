from .chat import ChatArguments
from .encoding import SEGMENT_BREAK, encode_rendered
from .reader import PromptReader, TokenizedPrompt

__all__ = [
    "SEGMENT_BREAK",
    "ChatArguments",
    "PromptReader",
    "TokenizedPrompt",
    "encode_rendered",
]
