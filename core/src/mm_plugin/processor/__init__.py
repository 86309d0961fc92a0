"""`ModelProcessor`, what an author subclasses, and the pipeline from prompt + media to its output, written once."""

from __future__ import annotations

from mm_plugin.processor.abilities import TakesAudio, TakesPrepared, TakesVideos, TakesWhole
from mm_plugin.processor.model import ModelProcessor
from mm_plugin.processor.options import BaseOptions, For
from mm_plugin.processor.pipeline import Prepared, PreparedItem, Runtime
from mm_plugin.processor.whole import Whole, WholeItem

__all__ = [
    "BaseOptions",
    "For",
    "ModelProcessor",
    "Prepared",
    "PreparedItem",
    "Runtime",
    "TakesAudio",
    "TakesPrepared",
    "TakesVideos",
    "TakesWhole",
    "Whole",
    "WholeItem",
]
