"""Prepared images and videos over patch grids: what is taken, what is the client's fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mm_plugin.errors import MediaError
from mm_plugin.inputs import ProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.testing.plugin_tests.patch_grid.requests import IMAGE, VIDEO
from mm_plugin.testing.plugin_tests.prepared import PreparedFieldsTests

# A grid of 1 x 2 x 4 patches of an image, and one of 2 x 2 x 4 of a video.
IMAGE_PIXELS, IMAGE_LEVELS = np.zeros((8, 1176), np.float32), np.zeros((8, 3, 196), np.uint8)
VIDEO_PIXELS, VIDEO_LEVELS = np.zeros((16, 1176), np.float32), np.zeros((16, 3, 392), np.uint8)


class PreparedImageFieldsTests(PreparedFieldsTests):
    """Prepared images."""

    MODALITY: ClassVar[Modality] = Modality.IMAGE
    PLACEHOLDER: ClassVar[str] = IMAGE
    GOOD: ClassVar[Mapping[str, Any]] = {"pixel_values": IMAGE_PIXELS, "image_grid_thw": np.array([[1, 2, 4]])}
    FEATURE: ClassVar[str] = "pixel_values"
    TOKENS: ClassVar[int] = 2
    HIDDEN: ClassVar[int] = 64
    ACCEPTED: ClassVar[Sequence[Mapping[str, Any]]] = (
        {},
        {"image_grid_thw": [[1, 2, 4]]},
        {"pixel_values": IMAGE_LEVELS},
        {"pixel_values": torch.zeros(8, 1176, dtype=torch.bfloat16)},
    )
    WRONG: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = (
        ({"image_grid_thw": ...}, "image_grid_thw"),
        ({"pixel_values": ...}, "pixel_values"),
        ({"extra": 1}, "extra"),
        ({"pixel_values": IMAGE_PIXELS[:7]}, r"\[7, 1176\]"),
        ({"pixel_values": IMAGE_PIXELS[:, :100]}, r"\[8, 100\]"),
        ({"pixel_values": np.zeros((8, 3, 392), np.uint8)}, r"\[8, 3, 392\]"),  # levels of two frames
        ({"pixel_values": IMAGE_PIXELS.astype(np.int64)}, "int64"),
        ({"pixel_values": [[1.0]]}, "dense"),
        ({"pixel_values": torch.zeros(8, 1176).to_sparse()}, "dense"),
        ({"pixel_values": np.array([object()])}, "dense"),
        ({"image_grid_thw": [1, 2, 4]}, r"\[3\]"),
        ({"image_grid_thw": [[1.0, 2.0, 4.0]]}, "float64"),
        ({"image_grid_thw": [[1, 3, 4]]}, "image_grid_thw 1 x 3 x 4"),
        ({"image_grid_thw": [[2, 2, 4]]}, "image_grid_thw 2 x 2 x 4"),
        ({"image_grid_thw": [[1, -2, -4]]}, "image_grid_thw 1 x -2 x -4"),
        ({"image_grid_thw": [[1, 0, 4]]}, "image_grid_thw 1 x 0 x 4"),
        ({"image_grid_thw": "1x2x4"}, "image_grid_thw"),
        ({"image_grid_thw": object()}, "image_grid_thw"),
        ({"image_grid_thw": None}, "image_grid_thw"),
        ({"image_grid_thw": [[1, 2], [3]]}, "image_grid_thw"),
        ({"image_grid_thw": np.ones((1000, 1000))}, "65536"),
    )
    TOO_LARGE: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"image_grid_thw": [[1, 1 << 40, 1 << 40]]},
        {"image_grid_thw": [[1, 2, 1 << 20]]},
        {"image_grid_thw": [[1, 1 << 62, 2]]},
    )


class PreparedVideoFieldsTests(PreparedFieldsTests):
    """Prepared videos. A plugin whose videos have more fields adds them to `GOOD`, and what can be wrong with them to `WRONG`."""

    MODALITY: ClassVar[Modality] = Modality.VIDEO
    PLACEHOLDER: ClassVar[str] = VIDEO
    GOOD: ClassVar[Mapping[str, Any]] = {"pixel_values_videos": VIDEO_LEVELS, "video_grid_thw": np.array([[2, 2, 4]])}
    FEATURE: ClassVar[str] = "pixel_values_videos"
    TOKENS: ClassVar[int] = 4
    HIDDEN: ClassVar[int] = 64
    ACCEPTED: ClassVar[Sequence[Mapping[str, Any]]] = (
        {},
        {"pixel_values_videos": torch.from_numpy(VIDEO_LEVELS.copy())},
        {"pixel_values_videos": VIDEO_PIXELS},
        {"pixel_values_videos": VIDEO_PIXELS.astype(np.float16)},
        {"pixel_values_videos": torch.zeros(16, 1176, dtype=torch.bfloat16)},
    )
    WRONG: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = (
        ({"video_grid_thw": ...}, "video_grid_thw"),
        ({"pixel_values_videos": ...}, "pixel_values_videos"),
        ({"pixel_values": VIDEO_PIXELS}, "pixel_values"),
        ({"image_grid_thw": np.array([[2, 2, 4]])}, "image_grid_thw"),
        ({"video_grid_thw": [[2, 2, 3]]}, "video_grid_thw 2 x 2 x 3"),
        ({"video_grid_thw": [[2, 3, 4]]}, "video_grid_thw 2 x 3 x 4"),
        ({"video_grid_thw": [[0, 2, 4]]}, "video_grid_thw 0 x 2 x 4"),
        ({"video_grid_thw": [[-2, 2, -4]]}, "video_grid_thw -2 x 2 x -4"),
        ({"video_grid_thw": [[2, 2, 4], [2, 2, 4]]}, r"\[2, 3\]"),
        ({"video_grid_thw": [[2.0, 2.0, 4.0]]}, "float64"),
        ({"video_grid_thw": [[2, 2, 6]]}, r"\[16, 3, 392\]"),
        ({"video_grid_thw": [[1, 2, 4]]}, r"\[16, 3, 392\]"),
        ({"pixel_values_videos": VIDEO_LEVELS[:, :, :196]}, r"\[16, 3, 196\]"),
        ({"pixel_values_videos": VIDEO_LEVELS.reshape(16, 1176)}, r"\[16, 1176\]"),
        ({"pixel_values_videos": VIDEO_LEVELS.astype(np.int8)}, "int8"),
        ({"pixel_values_videos": VIDEO_PIXELS.astype(np.complex64)}, "dense"),
        ({"pixel_values_videos": VIDEO_PIXELS[:15]}, r"\[15, 1176\]"),
    )
    TOO_LARGE: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"video_grid_thw": [[1 << 20, 2, 1 << 20]]},
        {"video_grid_thw": [[1 << 40, 2, 2]]},
        {"video_grid_thw": [[1, 1 << 62, 2]]},
        {"video_grid_thw": [[1 << 21, 1 << 21, 1 << 21]]},
    )

    def test_an_image_and_a_video_are_not_taken_for_each_other(self, processor: Any) -> None:
        image = {"pixel_values": IMAGE_LEVELS, "image_grid_thw": [[1, 2, 4]]}
        with pytest.raises(MediaError, match="pixel_values"):
            processor.process(IMAGE, [ProcessorOutput(self.changed({}))])
        with pytest.raises(MediaError, match="pixel_values_videos"):
            processor.process(VIDEO, videos=[ProcessorOutput(image)])
