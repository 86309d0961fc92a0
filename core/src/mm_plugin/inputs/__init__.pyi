from .batch import ForwardBatch
from .encoded import Encoded
from .precomputed import PrecomputedEmbeddings, ProcessorOutput
from .processed import ItemContent, MultimodalInputs, MultimodalProcessorOutput, NextTurn, PromptUsage, SpecialTokens
from .request_media import Recipe, RequestMedia, Retain

__all__ = [
    "Encoded",
    "ForwardBatch",
    "ItemContent",
    "MultimodalInputs",
    "MultimodalProcessorOutput",
    "NextTurn",
    "PrecomputedEmbeddings",
    "ProcessorOutput",
    "PromptUsage",
    "Recipe",
    "RequestMedia",
    "Retain",
    "SpecialTokens",
]
