from .joint_output import JointItem, JointOutput
from .largest import DummyRequest, LargestMedia
from .mixins import AcceptsAudio, AcceptsPrecomputed, AcceptsVideos, KnowsLargest, PreparesBatches, ProcessesJointly
from .model import ModelProcessor
from .notes import NotedFields
from .options import BaseOptions, OptionScope
from .prepared_item import PreparedItem
from .processor import Processor
from .settings_keys import any_value, check_settings

__all__ = [
    "AcceptsAudio",
    "AcceptsPrecomputed",
    "AcceptsVideos",
    "BaseOptions",
    "DummyRequest",
    "JointItem",
    "JointOutput",
    "KnowsLargest",
    "LargestMedia",
    "ModelProcessor",
    "NotedFields",
    "OptionScope",
    "PreparedItem",
    "PreparesBatches",
    "ProcessesJointly",
    "Processor",
    "any_value",
    "check_settings",
]
