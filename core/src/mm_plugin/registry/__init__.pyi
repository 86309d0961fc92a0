from .claims import ClaimGroup
from .diagnosis import check_plugin
from .discovery import Catalog
from .positions import ModelPositions
from .records import OpenedModel, PluginRecord
from .registry import Registry, discover

__all__ = [
    "Catalog",
    "ClaimGroup",
    "ModelPositions",
    "OpenedModel",
    "PluginRecord",
    "Registry",
    "check_plugin",
    "discover",
]
