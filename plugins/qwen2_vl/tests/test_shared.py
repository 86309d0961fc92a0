"""The shared tests of plugins and of models over patch grids, on Qwen2-VL."""

from __future__ import annotations

import pytest

from mm_plugin import Modality
from mm_plugin.testing.plugin_tests import CorpusTests, ImportTests, OptionSweepTests, ProvenanceTests, schedule_test
from mm_plugin.testing.plugin_tests import patch_grid as shared
from mm_plugin_qwen2vl.testing import TINY


@pytest.mark.case("3.7")
@pytest.mark.case("9.5")
class TestOptionSweep(OptionSweepTests):
    CHANGING = {
        Modality.IMAGE: {
            "background", "min_pixels", "max_pixels", "resized_height", "resized_width", "resize", "feature_format"
        },
        Modality.VIDEO: {
            "fps", "num_frames", "min_frames", "max_frames", "frame_rule", "video_min_pixels", "feature_format",
            "resized_height", "resized_width", "video_start", "video_end",
        },
    }  # fmt: skip
    # The video is small enough for both rules of size; `TestVideoCounts` tells them apart.
    MAY_CHANGE = {Modality.VIDEO: {"video_max_pixels", "video_total_pixels", "frame_size_rule"}}
    VALUES = shared.OPTION_VALUES


@pytest.mark.case("2.1")
class TestProvenance(ProvenanceTests):
    pass


@pytest.mark.case("1.7")
@pytest.mark.case("1.10")
@pytest.mark.case("9.1")
class TestCorpus(CorpusTests):
    TAKEN = {Modality.IMAGE: 100, Modality.VIDEO: 30}
    MAY_REFUSE = ("png/1 x 300", "png/300 x 1")  # a side over 200 times the other


class TestImports(ImportTests):
    PACKAGE = "mm_plugin_qwen2vl"
    LIGHT = ("hooks", "positions")


@pytest.mark.case("3.1")
class TestCheckpoints(shared.PatchGridCheckpointTests):
    MODEL = "qwen2_vl"
    TINY = TINY
    FAULTS = shared.patch_grid_faults(depth=2)
    DEFAULTS = {
        "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2
    }  # fmt: skip


class TestEncoder(shared.PatchGridEncoderTests):
    MODEL = "qwen2_vl"
    DISTRIBUTION = "mm-plugin-qwen2vl"
    TINY = TINY


@pytest.mark.case("5.9")
class TestSchedules(shared.PatchGridScheduleTests):
    test_every_schedule_gives_the_embeddings_of_the_reference = schedule_test(max_examples=150)


class TestChunks(shared.PatchGridChunkTests):
    pass


class TestImageLogits(shared.ImageLogitsTests):
    pass


class TestMixedLogits(shared.MixedLogitsTests):
    pass


class TestMessages(shared.MessageTests):
    pass


class TestRecordedModel(shared.RecordedModelTests):
    pass


@pytest.mark.case("7.3")
@pytest.mark.case("7.4")
@pytest.mark.case("7.6")
class TestPreparedMedia(shared.PatchGridPreparedTests):
    pass


@pytest.mark.case("2.2")
@pytest.mark.case("7.1")
class TestPreparedImages(shared.PreparedImageFieldsTests):
    pass


@pytest.mark.case("2.2")
@pytest.mark.case("7.1")
class TestPreparedVideos(shared.PreparedVideoFieldsTests):
    WRONG = (
        *shared.PreparedVideoFieldsTests.WRONG,
        ({"second_per_grid_ts": [1.0]}, "second_per_grid_ts"),  # time counts temporal patches
    )


class TestImages(shared.PatchGridImageTests):
    pass


@pytest.mark.case("1.9")
@pytest.mark.case("1.10")
@pytest.mark.case("2.8")
class TestImageCounts(shared.PatchGridImageCountTests):
    pass


@pytest.mark.case("9.5")
class TestOptions(shared.PatchGridOptionTests):
    pass


@pytest.mark.case("9.1")
class TestVideos(shared.PatchGridVideoTests):
    TINY = TINY


@pytest.mark.case("4.9")
@pytest.mark.case("9.3")
@pytest.mark.case("9.5")
@pytest.mark.case("9.6")
class TestSampling(shared.PatchGridSamplingTests):
    TINY = TINY


@pytest.mark.case("2.8")
@pytest.mark.case("9.5")
@pytest.mark.case("9.6")
class TestVideoCounts(shared.PatchGridVideoCountTests):
    TINY = TINY
