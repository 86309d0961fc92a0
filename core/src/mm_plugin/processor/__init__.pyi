from .joint_output import JointItem, JointOutput
from .mixins import AcceptsAudio, AcceptsPrecomputed, AcceptsVideos, ProcessesJointly
from .model import ModelProcessor
from .options import BaseOptions, OptionScope
from .pipeline import Prepared, PreparedItem

__all__ = [
    "AcceptsAudio",
    "AcceptsPrecomputed",
    "AcceptsVideos",
    "BaseOptions",
    "JointItem",
    "JointOutput",
    "ModelProcessor",
    "OptionScope",
    "Prepared",
    "PreparedItem",
    "ProcessesJointly",
]
