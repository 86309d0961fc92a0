"""Options of Qwen2-VL, with the defaults of the released checkpoints and training code."""

from __future__ import annotations

from mm_plugin.families.patch_grid import (
    ChannelValues,
    FrameCount,
    FrameRuleName,
    FrameSizeRuleName,
    ImagePixels,
    PatchCount,
    PatchGridVideoOptions,
    ResizeRuleName,
    VideoPixels,
)


class Qwen2VLOptions(PatchGridVideoOptions, frozen=True, kw_only=True):
    """See `PatchGridVideoOptions` for what each option changes, and `OptionScope` for when each may be given."""

    min_pixels: ImagePixels = 56 * 56
    max_pixels: ImagePixels = 28 * 28 * 1280
    resize: ResizeRuleName = "torch"
    min_frames: FrameCount = 4
    max_frames: FrameCount = 768
    frame_rule: FrameRuleName = "qwen"
    video_min_pixels: VideoPixels = 128 * 28 * 28
    video_max_pixels: VideoPixels = 768 * 28 * 28
    # Nine tenths of a context of 128,000 tokens.
    video_total_pixels: VideoPixels = 115_200 * 28 * 28
    frame_size_rule: FrameSizeRuleName = "qwen"
    patch_size: PatchCount = 14
    merge_size: PatchCount = 2
    temporal_patch_size: PatchCount = 2
    image_mean: ChannelValues = (0.48145466, 0.4578275, 0.40821073)
    image_std: ChannelValues = (0.26862954, 0.26130258, 0.27577711)
