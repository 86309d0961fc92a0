from .checkpoints import PatchGridCheckpointTests, patch_grid_faults
from .images import PatchGridImageCountTests, PatchGridImageTests, PatchGridOptionTests
from .prepared import PreparedImageFieldsTests, PreparedVideoFieldsTests
from .requests import (
    IMAGE,
    OPTION_VALUES,
    VIDEO,
    ImageLogitsTests,
    MessageTests,
    MixedLogitsTests,
    PatchGridChunkTests,
    PatchGridPreparedTests,
    PatchGridScheduleTests,
    tower_embeddings,
)
from .run_elsewhere import RecordedModelTests
from .sampling import PatchGridSamplingTests, PatchGridVideoCountTests
from .towers import PatchGridEncoderTests
from .videos import PatchGridVideoTests

__all__ = [
    "IMAGE",
    "OPTION_VALUES",
    "VIDEO",
    "ImageLogitsTests",
    "MessageTests",
    "MixedLogitsTests",
    "PatchGridCheckpointTests",
    "PatchGridChunkTests",
    "PatchGridEncoderTests",
    "PatchGridImageCountTests",
    "PatchGridImageTests",
    "PatchGridOptionTests",
    "PatchGridPreparedTests",
    "PatchGridSamplingTests",
    "PatchGridScheduleTests",
    "PatchGridVideoCountTests",
    "PatchGridVideoTests",
    "PreparedImageFieldsTests",
    "PreparedVideoFieldsTests",
    "RecordedModelTests",
    "patch_grid_faults",
    "tower_embeddings",
]
