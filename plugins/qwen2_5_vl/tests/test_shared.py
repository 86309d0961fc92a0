"""The shared tests of plugins and of models over patch grids, on Qwen2.5-VL."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import (
    Modality,
    ModelProcessor,
    MultimodalDataItem,
    ProcessorOutput,
    Registry,
    SampledVideo,
    VideoFrames,
    VideoSize,
)
from mm_plugin.testing.plugin_tests import CorpusTests, ImportTests, OptionSweepTests, ProvenanceTests, moving_frames
from mm_plugin.testing.plugin_tests import patch_grid as shared
from mm_plugin_qwen25vl.testing import TINY


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
    PACKAGE = "mm_plugin_qwen25vl"
    LIGHT = ("hooks", "positions")


@pytest.mark.case("3.1")
class TestCheckpoints(shared.PatchGridCheckpointTests):
    MODEL = "qwen2_5_vl"
    TINY = TINY
    FAULTS = shared.patch_grid_faults(depth=3)
    DEFAULTS = {
        "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2
    }  # fmt: skip


class TestEncoder(shared.PatchGridEncoderTests):
    MODEL = "qwen2_5_vl"
    DISTRIBUTION = "mm-plugin-qwen25vl"
    TINY = TINY


@pytest.mark.case("5.9")
class TestSchedules(shared.PatchGridScheduleTests):
    pass


class TestChunks(shared.PatchGridChunkTests):
    pass


class TestImageLogits(shared.ImageLogitsTests):
    pass


class TestMixedLogits(shared.MixedLogitsTests):
    def arguments(self, videos: list[Any]) -> dict[str, Any]:
        return {"second_per_grid_ts": torch.tensor([float(item.second_per_grid_ts[0]) for item in videos])}


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
    GOOD = {**shared.PreparedVideoFieldsTests.GOOD, "second_per_grid_ts": np.array([0.5])}
    ACCEPTED = tuple(
        {**changes, "second_per_grid_ts": seconds}
        for changes in shared.PreparedVideoFieldsTests.ACCEPTED
        for seconds in (np.array([0.5]), [0.5], np.array([0.5], np.float32), torch.tensor([2]), [0.0])
    )
    WRONG = (
        *shared.PreparedVideoFieldsTests.WRONG,
        *(
            ({"second_per_grid_ts": wrong}, "second_per_grid_ts")
            for wrong in (
                ..., [float("nan")], [float("inf")], [-0.5], [1e300], [86_401.0], [1 << 70], [1j], 0.5, [0.5, 0.5], "abc",
                ["abc"], ["a"], [None],
            )
        ),
    )  # fmt: skip

    def test_a_day_between_frames_makes_nothing_of_its_length(self, processor: ModelProcessor) -> None:
        media = ProcessorOutput(self.changed({"second_per_grid_ts": [86_400.0]}))
        processor.process(shared.VIDEO, videos=[media])
        tracemalloc.start()
        output = processor.process(f"a {shared.VIDEO} b", videos=[media])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert output.mrope_positions is not None
        assert output.mrope_positions.max() > 86_400
        assert most < 1 << 20


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


class SecondsKnown:
    """The fields of a video say how many seconds a temporal patch lasts."""

    def check_time(self, fields: Mapping[str, Any], seconds: float) -> None:
        assert fields["second_per_grid_ts"].tolist() == pytest.approx([seconds], rel=1e-9)


@pytest.mark.case("9.1")
class TestVideos(SecondsKnown, shared.PatchGridVideoTests):
    TINY = TINY


@pytest.mark.case("4.9")
@pytest.mark.case("9.3")
@pytest.mark.case("9.5")
@pytest.mark.case("9.6")
class TestSampling(SecondsKnown, shared.PatchGridSamplingTests):
    TINY = TINY


@pytest.mark.case("2.8")
@pytest.mark.case("9.5")
@pytest.mark.case("9.6")
class TestVideoCounts(SecondsKnown, shared.PatchGridVideoCountTests):
    TINY = TINY


@pytest.mark.case("4.9")
class TestTime:
    def test_timestamps_are_the_rate_of_frames(self, processor: ModelProcessor) -> None:
        def take(**time: Any) -> MultimodalDataItem:
            (item,) = processor.process(shared.VIDEO, videos=[VideoFrames(moving_frames(5), **time)]).mm_items
            return item

        even = take(timestamps=[3.0, 3.5, 4.0, 4.5, 5.0])
        assert even.second_per_grid_ts.tolist() == [1.0]
        assert even.identity == take(fps=2).identity
        assert take(timestamps=[0.0, 0.1, 0.2, 0.3, 8.0]).second_per_grid_ts.tolist() == [4.0]

    @pytest.mark.parametrize(
        ("frames", "fps", "options", "count", "seconds"),
        [
            (300, 30.0, {"num_frames": 32}, 32, 2 / (32 / 300 * 30)),
            (1830, 30.0, {"fps": 1.0, "max_frames": 16}, 16, 7.625),
            (1830, 30.0, {"fps": 1.0}, 60, 2 / (60 / 1830 * 30)),
        ],
    )
    def test_times_come_from_the_frames_that_were_chosen(
        self, processor: Any, frames: int, fps: float, options: dict[str, Any], count: int, seconds: float
    ) -> None:
        size, resolved = VideoSize(84, 112, frames, fps), type(processor.options)(**options)
        chosen = processor.model.sample(size, resolved)
        assert len(chosen.indices) == len(chosen.timestamps) == count
        assert chosen.timestamps.tolist() == pytest.approx((chosen.indices / fps).tolist())
        sampled = SampledVideo(84, 112, chosen.indices, chosen.timestamps, chosen.fps)
        fields = processor.model.layout(Modality.VIDEO, sampled, resolved, None)
        assert fields["video_grid_thw"][0, 0] == count // 2
        assert fields["second_per_grid_ts"].tolist() == pytest.approx([seconds])


class TestWindows:
    @pytest.mark.parametrize("whole", [[0], [2], [0, 1, 2], []], ids=str)
    def test_blocks_of_both_kinds_in_any_order(
        self, registry: Registry, tmp_path: Path, processor: ModelProcessor, exact: ModelProcessor, whole: list[int]
    ) -> None:
        config = TINY.config(TINY.tokenizer())
        config.vision_config.fullatt_block_indexes = whole
        folder = TINY.write(tmp_path, config=config)
        reference = TINY.model_class.from_pretrained(folder, dtype=torch.float32).eval().model.visual
        small, large = (
            opened.process(
                shared.VIDEO, videos=[VideoFrames(moving_frames(4, 84, 140), fps=2)], video_min_pixels=784
            ).mm_items
            for opened in (processor, exact)
        )
        (found,) = registry.load_encoder(folder).encode(Modality.VIDEO, small)
        assert torch.allclose(found, shared.tower_embeddings(reference, large[0]), rtol=0, atol=1e-5)
