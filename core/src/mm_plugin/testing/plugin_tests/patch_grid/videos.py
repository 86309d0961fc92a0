"""Pixels of videos: patches of frames bit for bit, in every form in which frames come, one frame in memory at a time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.media.types import VideoFrames
from mm_plugin.registry import Registry
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.media import moving_frames, png_of, video_file
from mm_plugin.testing.plugin_tests.patch_grid.requests import VIDEO

SMALL = {"video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 24}


def take(processor: Any, video: Any, **options: Any) -> Any:
    """The item of one video."""
    (item,) = processor.process(VIDEO, videos=[video], **options).mm_items
    assert item.modality is Modality.VIDEO
    return item


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


class VideoTests(PluginTests):
    """What the tests of videos share. They need `registry`, `checkpoint`, `processor` and `exact`.

    Attributes:
        TINY: makes the checkpoints.
    """

    TINY: ClassVar[PatchGridCheckpoints]

    def check_time(self, fields: Mapping[str, Any], seconds: float) -> None:
        """Assert that the fields of a video say how many seconds a temporal patch lasts; for models that know it."""

    def equals(self, item: MultimodalDataItem, small: MultimodalDataItem, frames: np.ndarray) -> None:
        """Assert that both forms of a feature are plain torch's of the frames that should have been sampled."""
        images = resized(frames, item.video_grid_thw)
        settings_ = self.TINY.preprocessor
        mean, std = (torch.tensor(settings_[f"image_{name}"])[:, None, None] * 255 for name in ("mean", "std"))
        assert item.video_grid_thw[0, 0] == len(images) // 2
        normal = patched((images.float() - mean) / std).flatten(1)
        assert torch.equal(torch.from_numpy(item.feature), normal)
        assert np.array_equal(small.video_grid_thw, item.video_grid_thw)
        assert torch.equal(torch.from_numpy(small.feature), patched(images))


class PatchGridVideoTests(VideoTests):
    """Pixels of videos: patches bit for bit, in every form, one frame in memory at a time."""

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
    @pytest.mark.parametrize("size", [(84, 112), (61, 45), (30, 200), (256, 256)], ids=str)
    def test_patches_of_frames_are_plain_torch_bit_for_bit(
        self, exact: Any, processor: Any, count: int, size: tuple[int, int]
    ) -> None:
        frames = moving_frames(count, *size)
        large, small = (take(opened, VideoFrames(frames, fps=2), **SMALL) for opened in (exact, processor))
        self.equals(large, small, frames)

    def test_frames_that_have_the_size_already_are_not_resized(self, exact: Any, processor: Any) -> None:
        frames = moving_frames(4, 84, 112)
        large, small = (take(opened, VideoFrames(frames, fps=2), **SMALL) for opened in (exact, processor))
        assert large.video_grid_thw.tolist() == [[2, 6, 8]]
        self.equals(large, small, frames)
        assert large.feature.nbytes == 4 * small.feature.nbytes

    @pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 1), (4, 1), (6, 2), (9, 3)])
    def test_the_last_frame_fills_a_temporal_patch_of_four(
        self, registry: Registry, tmp_path: Path, count: int, steps: int
    ) -> None:
        folder = self.TINY.write(tmp_path, preprocessor={"temporal_patch_size": 4})
        frames = moving_frames(count, 28, 28)
        item = take(registry.load_processor(folder), VideoFrames(frames, fps=4), **SMALL)
        assert item.video_grid_thw.tolist() == [[steps, 2, 2]]
        found = item.feature.reshape(steps, 2, 2, 3, 4, 14, 14).transpose(0, 4, 1, 5, 2, 6, 3).reshape(-1, 28, 28, 3)
        assert np.array_equal(found, frames[np.minimum(np.arange(4 * steps), count - 1)])

    @pytest.mark.parametrize("form", ["array", "tensor", "list", "images", "files"])
    def test_frames_in_every_form_are_one_video(self, processor: Any, form: str) -> None:
        frames = moving_frames(3)
        images = [Image.fromarray(frame) for frame in frames]
        forms: dict[str, Any] = {
            "array": frames,
            "tensor": torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()),
            "list": list(frames),
            "images": images,
            "files": [png_of(image) for image in images],
        }
        expected, found = (take(processor, VideoFrames(value, fps=2)) for value in (frames, forms[form]))
        assert np.array_equal(found.feature, expected.feature)
        assert found.identity == expected.identity

    def test_a_video_stored_without_loss_gives_its_own_frames(self, processor: Any) -> None:
        """A GIF's levels survive, so that what is sampled can be compared with what was written."""
        import io

        frames = moving_frames(4) // 64 * 85  # 64 colors
        images = [Image.fromarray(frame).quantize(64, dither=Image.Dither.NONE) for frame in frames]
        shown = np.stack([np.asarray(image.convert("RGB")) for image in images])
        file = io.BytesIO()
        images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=500, optimize=False)
        item = take(processor, file.getvalue(), video_min_pixels=784)
        self.check_time(item.model_specific_data, 1.0)
        found = item.feature.reshape(2, 3, 4, 2, 2, 3, 2, 14, 14).transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
        assert np.array_equal(found.reshape(4, 84, 112, 3), shown)

    def test_a_video_of_two_minutes_is_never_in_memory(self, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from mm_plugin.media import video_frames as video_files

        data = video_file(2880, 24, 48, 64)
        alive: set[int] = set()
        made, most = 0, 0
        convert, number = video_files._rgb, itertools.count()

        def counted(*arguments: Any) -> np.ndarray:
            nonlocal made, most
            pixels = convert(*arguments)
            made, key = made + 1, next(number)
            alive.add(key)
            weakref.finalize(pixels, alive.discard, key)
            most = max(most, len(alive))
            return pixels

        monkeypatch.setattr(video_files, "_rgb", counted)
        item = take(processor, data, fps=0.5, video_min_pixels=28 * 28)
        assert made == 2 * item.video_grid_thw[0, 0] == 60  # only sampled frames become images
        assert most <= 3
        assert not alive
