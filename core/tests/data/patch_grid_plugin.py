"""The images of a model that no plugin serves: patches of 16 pixels, merged 2 x 2, levels scaled to -1..1, as in Qwen3-VL."""

from mm_plugin.families.patch_grid import (
    ChannelValues,
    ImagePixels,
    PatchCount,
    PatchGridOptions,
    PatchGridProcessor,
    ResizeRuleName,
)


class Options(PatchGridOptions, frozen=True, kw_only=True):
    min_pixels: ImagePixels = 65_536
    max_pixels: ImagePixels = 16_777_216
    resize: ResizeRuleName = "torch"
    patch_size: PatchCount = 16
    merge_size: PatchCount = 2
    temporal_patch_size: PatchCount = 2
    image_mean: ChannelValues = (0.5, 0.5, 0.5)
    image_std: ChannelValues = (0.5, 0.5, 0.5)


class Processor(PatchGridProcessor):
    Options = Options
