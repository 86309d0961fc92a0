"""What Qwen2.5-VL decides about its media: how many frames of a video are sampled, and that its time counts seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mm_plugin import NotedFields, SampledVideo, Sampling, VideoSize
from mm_plugin.errors import SizeError
from mm_plugin.families.patch_grid import PatchGridProcessor, PatchGridVideos, sample_evenly
from mm_plugin_qwen25vl.options import Qwen25VLOptions
from mm_plugin_qwen25vl.positions import positions_per_second, time_positions

# A day between temporal patches; positions would leave what a language model was trained for long before.
MAX_SECONDS = 86_400


class Qwen25VLProcessor(PatchGridProcessor, PatchGridVideos):
    """Qwen2.5-VL. An image, or each pair of frames, becomes (height / 28) x (width / 28) tokens of a size near its own."""

    Options = Qwen25VLOptions

    def sample(self, size: VideoSize, options: Qwen25VLOptions) -> Sampling:
        """Two frames a second unless the options say otherwise, spread over the video."""
        return sample_evenly(size, options, fps=2.0)

    def video_fields(self, size: SampledVideo, options: Qwen25VLOptions) -> NotedFields:
        """`second_per_grid_ts` [1] float64: seconds from one temporal patch to the next."""
        seconds, rate = options.temporal_patch_size / size.fps, positions_per_second(self.config)
        steps = -(-size.frames // options.temporal_patch_size)
        apart = len(np.unique(time_positions(steps, seconds, rate)))
        notes = []
        if apart < steps:
            notes.append(
                f"{steps} temporal patches of {size.fps:.6g} frames per second have only {apart} positions along time, since a "
                f"second takes {rate:g}: frames with one position are at the same time for the model"
            )
        return NotedFields({"second_per_grid_ts": np.array([seconds])}, notes)

    def check_video_fields(self, fields: Any) -> None:
        """Seconds [1], from 0 to a day."""
        seconds = np.asarray(fields["second_per_grid_ts"])
        if seconds.shape != (1,) or seconds.dtype.kind not in "iuf" or not 0 <= seconds[0] <= MAX_SECONDS:
            raise SizeError(f"second_per_grid_ts must be [1] seconds from 0 to {MAX_SECONDS}")
