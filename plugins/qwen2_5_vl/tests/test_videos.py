"""Videos: which frames are looked at, their size, their patches bit for bit, their time, and what is counted for them."""

from __future__ import annotations

import functools
import io
import itertools
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin import (
    MediaError,
    Modality,
    ModelProcessor,
    Registry,
    RequestError,
    SampledVideo,
    Settings,
    UsageError,
    VideoFrames,
    VideoSize,
    discover,
)
from mm_plugin.media import video_frames as video_files
from mm_plugin_qwen25vl.testing import PREPROCESSOR, make_checkpoint

SLOT = "<|vision_start|><|video_pad|><|vision_end|>"
REAL = ["bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4", "carphone_distorted.mp4"]
SMALL = {"video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 24}


def take(processor: ModelProcessor, video: Any, **options: Any) -> Any:
    (item,) = processor.process(SLOT, videos=[video], **options).mm_items
    assert item.modality is Modality.VIDEO
    return item


@functools.cache
def decoded(data: bytes) -> np.ndarray:
    """All frames of a file, by PyAV alone: [n, height, width, 3] uint8."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def resized(frames: np.ndarray, grid: np.ndarray) -> torch.Tensor:
    """[n, 3, height, width] uint8 of a multiple of two frames, by torch alone."""
    _, rows, columns = grid[0].tolist()
    planar = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).contiguous()
    if planar.shape[2:] != (rows * 14, columns * 14):
        planar = torch.nn.functional.interpolate(planar, (rows * 14, columns * 14), mode="bicubic", antialias=True)
    return torch.cat([planar, planar[-1:].expand(-len(planar) % 2, -1, -1, -1)])


def patched(images: torch.Tensor) -> torch.Tensor:
    """Patches as the paper lays them out: time, then blocks of 2 x 2 patches, each channel, frame, row, column."""
    frames, _, height, width = images.shape
    cut = images.reshape(frames // 2, 2, 3, height // 28, 2, 14, width // 28, 2, 14)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3, 2 * 196)


def normalized(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(PREPROCESSOR[name])[:, None, None] * 255 for name in ("image_mean", "image_std"))
    return (images.float() - mean) / std


def assert_plain_torch(item: Any, small: Any, frames: np.ndarray) -> None:
    """Both forms of a feature, from the frames that should have been looked at."""
    images = resized(frames, item.video_grid_thw)
    assert item.video_grid_thw[0, 0] == len(images) // 2
    assert torch.equal(torch.from_numpy(item.feature), patched(normalized(images)).flatten(1))
    assert np.array_equal(small.video_grid_thw, item.video_grid_thw)
    assert torch.equal(torch.from_numpy(small.feature), patched(images))


# ------------------------------------------------------------------ pixels


@pytest.mark.case("9.1")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [(84, 112), (61, 45), (30, 200), (256, 256)], ids=str)
def test_patches_of_frames_are_plain_torch_bit_for_bit(
    torch_float: ModelProcessor,
    compact: ModelProcessor,
    moving: Callable[..., np.ndarray],
    count: int,
    size: tuple[int, int],
) -> None:
    frames = moving(count, *size)
    items = [take(opened, VideoFrames(frames, fps=2), **SMALL) for opened in (torch_float, compact)]
    assert_plain_torch(*items, frames)


def test_frames_that_have_the_size_already_are_not_resized(
    torch_float: ModelProcessor, compact: ModelProcessor, moving: Callable[..., np.ndarray]
) -> None:
    frames = moving(4, 84, 112)
    items = [take(opened, VideoFrames(frames, fps=2), **SMALL) for opened in (torch_float, compact)]
    assert items[0].video_grid_thw.tolist() == [[2, 6, 8]]
    assert_plain_torch(*items, frames)
    assert items[0].feature.nbytes == 4 * items[1].feature.nbytes


@pytest.mark.case("9.1")
@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 1), (4, 1), (6, 2), (9, 3)])
def test_the_last_frame_fills_a_temporal_patch_of_four(
    registry: Registry, tmp_path: Path, moving: Callable[..., np.ndarray], count: int, steps: int
) -> None:
    folder = make_checkpoint(tmp_path, preprocessor={"temporal_patch_size": 4})
    frames = moving(count, 28, 28)
    item = take(registry.load_processor(folder), VideoFrames(frames, fps=4), **SMALL)
    assert item.video_grid_thw.tolist() == [[steps, 2, 2]]
    found = item.feature.reshape(steps, 2, 2, 3, 4, 14, 14).transpose(0, 4, 1, 5, 2, 6, 3).reshape(-1, 28, 28, 3)
    assert np.array_equal(found, frames[np.minimum(np.arange(4 * steps), count - 1)])


@pytest.mark.parametrize("form", ["array", "tensor", "list", "images", "files"])
def test_frames_in_every_form_are_one_video(
    compact: ModelProcessor, moving: Callable[..., np.ndarray], form: str
) -> None:
    from PIL import Image

    frames = moving(3)
    images = [Image.fromarray(frame) for frame in frames]
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    forms: dict[str, Any] = {
        "array": frames,
        "tensor": torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()),
        "list": list(frames),
        "images": images,
        "files": files,
    }
    expected, found = (take(compact, VideoFrames(value, fps=2)) for value in (frames, forms[form]))
    assert np.array_equal(found.feature, expected.feature)
    assert found.identity == expected.identity


# ------------------------------------------------------------------ which frames

# Frames in the file, its rate, what is asked; the frames that are looked at and the seconds of a step, by hand.
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


@pytest.mark.case("9.3")
@pytest.mark.case("9.6")
@pytest.mark.parametrize(("count", "rate", "options", "indices", "seconds"), SAMPLES, ids=str)
def test_a_file_is_looked_at_in_these_frames(
    torch_float: ModelProcessor,
    compact: ModelProcessor,
    video: Callable[..., bytes],
    count: int,
    rate: Fraction | int,
    options: dict[str, Any],
    indices: list[int],
    seconds: float,
) -> None:
    data = video(count, rate)
    frames = decoded(data)
    assert len(frames) == count
    items = [take(opened, data, **SMALL, **options) for opened in (torch_float, compact)]
    assert_plain_torch(*items, frames[indices])
    assert items[0].second_per_grid_ts.tolist() == pytest.approx([seconds], rel=1e-9)


@pytest.mark.case("9.5")
@pytest.mark.parametrize(
    "options",
    [{}, {"fps": 1.0}, {"num_frames": 4}, {"max_frames": 4}, {"min_frames": 12}, {"video_max_pixels": 28 * 28 * 6},
     {"video_total_pixels": 28 * 28 * 40}, {"video_total_pixels": 28 * 28 * 10, "fps": 4.0}],
    ids=str,
)  # fmt: skip
def test_path_bytes_url_and_frames_have_one_budget_and_one_feature(
    checkpoint: Path, tmp_path: Path, video: Callable[..., bytes], options: dict[str, Any]
) -> None:
    import base64

    data = video(72, 24)
    file = tmp_path / "video.mp4"
    file.write_bytes(data)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    frames = decoded(data)
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


def test_frames_that_were_chosen_already_are_all_used(
    torch_float: ModelProcessor, compact: ModelProcessor, moving: Callable[..., np.ndarray]
) -> None:
    frames = moving(9)
    for options in ({}, {"num_frames": 4}, {"fps": 0.5, "max_frames": 4}):
        chosen = [take(opened, VideoFrames(frames, fps=30), **SMALL, **options) for opened in (torch_float, compact)]
        assert_plain_torch(*chosen, frames)
        assert chosen[0].second_per_grid_ts.tolist() == pytest.approx([2 / 30])
    whole = [
        take(opened, VideoFrames(frames, fps=30, sampled=False), num_frames=4, **SMALL)
        for opened in (torch_float, compact)
    ]
    assert_plain_torch(*whole, frames[[0, 3, 5, 8]])


@pytest.mark.case("4.9")
def test_timestamps_are_the_rate_of_frames(compact: ModelProcessor, moving: Callable[..., np.ndarray]) -> None:
    even = take(compact, VideoFrames(moving(5), timestamps=[3.0, 3.5, 4.0, 4.5, 5.0]))
    assert even.second_per_grid_ts.tolist() == [1.0]
    assert even.identity == take(compact, VideoFrames(moving(5), fps=2)).identity
    uneven = take(compact, VideoFrames(moving(5), timestamps=[0.0, 0.1, 0.2, 0.3, 8.0]))
    assert uneven.second_per_grid_ts.tolist() == [4.0]


@pytest.mark.case("4.9")
@pytest.mark.parametrize(
    "bare",
    [lambda frames: frames, list, lambda frames: VideoFrames(frames), lambda frames: VideoFrames(frames, fps=0),
     lambda frames: VideoFrames(frames, fps=float("nan")), lambda frames: VideoFrames(frames, timestamps=[0, 1]),
     lambda frames: VideoFrames(frames, timestamps=[0, 2, 1]), lambda frames: VideoFrames(frames, fps=1, timestamps=[0, 1, 2]),
     lambda frames: VideoFrames(frames[:0], fps=1)],
)  # fmt: skip
def test_frames_that_tell_no_time_are_the_clients_fault(
    compact: ModelProcessor, moving: Callable[..., np.ndarray], bare: Callable[[Any], Any]
) -> None:
    with pytest.raises(MediaError, match=r"videos\[1\]") as caught:
        compact.process(SLOT * 2, videos=[VideoFrames(moving(2), fps=1), bare(moving(3))])
    assert caught.value.path == "videos[1]"


@pytest.mark.parametrize("name", REAL)
def test_a_real_video_is_looked_at_in_the_frames_that_every_decoder_gives(
    torch_float: ModelProcessor, compact: ModelProcessor, real_video: Callable[[str], bytes], name: str
) -> None:
    data = real_video(name)
    frames = decoded(data)
    for options in ({}, {"num_frames": 6}):
        items = [take(opened, data, video_max_pixels=28 * 28 * 160, **options) for opened in (torch_float, compact)]
        count = int(items[0].video_grid_thw[0, 0]) * 2
        indices = torch.linspace(0, len(frames) - 1, count).round().long().numpy()
        assert_plain_torch(*items, frames[indices])


@pytest.mark.case("9.3")
@pytest.mark.parametrize(
    ("frames", "fps", "options", "count", "seconds"),
    [
        (300, 30.0, {"num_frames": 32}, 32, 2 / (32 / 300 * 30)),
        (1830, 30.0, {"fps": 1.0, "max_frames": 16}, 16, 7.625),
        (1830, 30.0, {"fps": 1.0}, 60, 2 / (60 / 1830 * 30)),
    ],
)
def test_times_come_from_the_frames_that_were_chosen(
    compact: ModelProcessor, frames: int, fps: float, options: dict[str, Any], count: int, seconds: float
) -> None:
    size, resolved = VideoSize(84, 112, frames, fps), type(compact.options)(**options)
    chosen = compact.model.sample(size, resolved)  # type: ignore[attr-defined]
    assert len(chosen.indices) == len(chosen.timestamps) == count
    assert chosen.timestamps.tolist() == pytest.approx((chosen.indices / fps).tolist())
    video_size = SampledVideo(84, 112, chosen.indices, chosen.timestamps, chosen.fps)
    fields = compact.model.layout(Modality.VIDEO, video_size, resolved, None)
    assert fields["video_grid_thw"][0, 0] == count // 2
    assert fields["second_per_grid_ts"].tolist() == pytest.approx([seconds])


# ------------------------------------------------------------------ memory


def test_a_video_of_two_minutes_is_never_in_memory(
    compact: ModelProcessor, video: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = video(2880, 24, 48, 64)
    alive: set[int] = set()
    made, most = 0, 0
    convert = video_files._rgb
    number = itertools.count()

    def counted(*arguments: Any) -> np.ndarray:
        nonlocal made, most
        pixels = convert(*arguments)
        made, key = made + 1, next(number)
        alive.add(key)
        weakref.finalize(pixels, alive.discard, key)
        most = max(most, len(alive))
        return pixels

    monkeypatch.setattr(video_files, "_rgb", counted)
    item = take(compact, data, fps=0.5, video_min_pixels=28 * 28)
    assert made == 2 * item.video_grid_thw[0, 0] == 60  # only what is looked at becomes an image
    assert most <= 3
    assert not alive


# ------------------------------------------------------------------ counts and sizes that were made elsewhere


@pytest.mark.parametrize("rule", ["qwen", "transformers"])
def test_sizes_of_frames_are_those_that_were_written_down(
    golden: Callable[[str], Any], checkpoint: Path, rule: str
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


@pytest.mark.case("9.6")
def test_samples_are_those_that_were_written_down(golden: Callable[[str], Any], compact: ModelProcessor) -> None:
    cases = golden("videos.json")["samples"]
    assert len(cases) > 60
    for case in cases:
        size = VideoSize(28, 28, case["frames"], case["fps"])
        tokens = case["n"] // 2
        found = compact.count("video", size, video_min_pixels=1, video_max_pixels=784, **case["options"])
        assert found == (tokens, tokens), case
        options = type(compact.options)(**case["options"])
        chosen = compact.model.sample(size, options)  # type: ignore[attr-defined]
        assert chosen.indices[:4].tolist() == case["first"], case
        assert chosen.indices[-4:].tolist() == case["last"], case
        video_size = SampledVideo(28, 28, chosen.indices, chosen.timestamps, chosen.fps)
        seconds = compact.model.layout(Modality.VIDEO, video_size, options, None)["second_per_grid_ts"]
        assert seconds.tolist() == pytest.approx([case["seconds"]], rel=1e-12)


@pytest.mark.case("2.8")
@settings(max_examples=40)
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
    compact: ModelProcessor, frames: int, height: int, width: int, fps: float, options: dict[str, Any], chosen: bool
) -> None:
    video = VideoFrames(np.zeros((frames, height, width, 3), dtype=np.uint8), fps=fps, sampled=chosen)
    size: Any = VideoSize(height, width, frames, fps)
    if chosen:
        indices = np.arange(frames, dtype=np.int64)
        size = SampledVideo(height, width, indices, indices / fps, fps)
    if max(height, width) / min(height, width) > 200:
        for call in (lambda: compact.count("video", size, **options), lambda: take(compact, video, **options)):
            with pytest.raises(MediaError, match="ratio"):
                call()
        return
    item = take(compact, video, **options)
    rows, tokens = compact.count("video", size, **options)
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
@pytest.mark.case("9.5")
def test_options_that_a_call_may_not_give(
    compact: ModelProcessor, moving: Callable[..., np.ndarray], options: dict[str, Any], error: type[Exception]
) -> None:
    video = VideoFrames(moving(4), fps=2, sampled=False)
    for call in (
        lambda: compact.process(SLOT, videos=[video], **options),
        lambda: compact.count("video", VideoSize(84, 112, 4, 2.0), **options),
    ):
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, UsageError | RequestError)


def test_the_librarys_frames_are_an_option(
    registry: Registry, checkpoint: Path, video: Callable[..., bytes], compact: ModelProcessor
) -> None:
    processor = registry.load_processor(checkpoint, frame_rule="transformers")
    data = video(48, 24)
    item = take(processor, data, **SMALL)
    images = resized(decoded(data)[[0, 12, 24, 36]], item.video_grid_thw)
    assert torch.equal(torch.from_numpy(item.feature), patched(images))
    assert item.identity != take(compact, data, **SMALL).identity
