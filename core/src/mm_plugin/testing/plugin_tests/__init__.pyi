from .base import PluginTests
from .checkpoints import CheckpointTests, TensorFault, edit_json, tensor_faults
from .encoders import EncoderTests
from .end_to_end import ChunkTests, EndToEndTests, Expected, Request
from .media import decoded_file, half_transparent_png, image_of, moving_frames, png_of, video_file
from .prepared import PreparedFieldsTests, PreparedMediaTests, random_table
from .recorded import recorded_numbers
from .schedules import N_REQUESTS, ScheduleTests, World, schedule_test
from .sweeps import CorpusTests, ImportTests, OptionSweepTests, ProvenanceTests

__all__ = [
    "N_REQUESTS",
    "CheckpointTests",
    "ChunkTests",
    "CorpusTests",
    "EncoderTests",
    "EndToEndTests",
    "Expected",
    "ImportTests",
    "OptionSweepTests",
    "PluginTests",
    "PreparedFieldsTests",
    "PreparedMediaTests",
    "ProvenanceTests",
    "Request",
    "ScheduleTests",
    "TensorFault",
    "World",
    "decoded_file",
    "edit_json",
    "half_transparent_png",
    "image_of",
    "moving_frames",
    "png_of",
    "random_table",
    "recorded_numbers",
    "schedule_test",
    "tensor_faults",
    "video_file",
]
