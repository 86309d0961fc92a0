from .joint_output import Whole, WholeItem
from .mixins import TakesAudio, TakesPrepared, TakesVideos, TakesWhole
from .model import ModelProcessor
from .options import BaseOptions, For
from .pipeline import Prepared, PreparedItem, Runtime

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
