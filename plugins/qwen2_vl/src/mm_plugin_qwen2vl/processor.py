"""What Qwen2-VL decides about its media: how many frames of a video are sampled, and that its time counts temporal patches."""

from __future__ import annotations

from typing import Any

from mm_plugin import SampledVideo, Sampling, VideoSize
from mm_plugin.families.patch_grid import PatchGridProcessor, PatchGridVideos, sample_evenly
from mm_plugin_qwen2vl.options import Qwen2VLOptions


class Qwen2VLProcessor(PatchGridProcessor, PatchGridVideos):
    """Qwen2-VL. An image, or each pair of frames, becomes (height / 28) x (width / 28) tokens of a size near its own."""

    Options = Qwen2VLOptions

    def sample(self, size: VideoSize, options: Qwen2VLOptions) -> Sampling:
        """Two frames a second unless the options say otherwise, spread over the video."""
        return sample_evenly(size, options, fps=2.0)

    def video_fields(self, size: SampledVideo, options: Qwen2VLOptions) -> dict[str, Any]:
        """Positions need nothing but the grid."""
        return {}

    def check_video_fields(self, fields: Any) -> None:
        """A video has no fields but its grid."""
