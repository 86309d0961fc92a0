"""Options of processors over patch grids: what each changes, when it may be given, its bounds. Defaults are each model's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from mm_plugin.processor.options import BaseOptions, OptionScope
from mm_plugin.transforms.frames import FrameRule
from mm_plugin.transforms.resizing import ResizeRule

# An image above this is of no use to a model, and one request could take all of a machine's memory.
MAX_PIXELS = 1 << 27

_Pixels = Annotated[int, msgspec.Meta(ge=1, le=MAX_PIXELS)]
_Frames = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]

ImagePixels = Annotated[_Pixels, OptionScope.request("image")]
VideoPixels = Annotated[_Pixels, OptionScope.request("video")]
FrameCount = Annotated[_Frames, OptionScope.request("video")]
FrameRate = Annotated[_Rate | None, OptionScope.request("video")]
ResizeRuleName = Annotated[ResizeRule, OptionScope.load("image")]
FrameRuleName = Annotated[FrameRule, OptionScope.load("video")]
FrameSizeRuleName = Annotated[Literal["qwen", "transformers"], OptionScope.load("video")]
PatchCount = Annotated[int, msgspec.Meta(ge=1, le=64), OptionScope.checkpoint("image", "video")]
ChannelValues = Annotated[tuple[float, float, float], OptionScope.checkpoint("image", "video")]

_Flag = Annotated[bool, OptionScope.checkpoint("image", "video")]
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


class PatchGridOptions(BaseOptions, frozen=True, kw_only=True):
    """What changes the features of an image. A model subclasses it and states the numbers that have no default here.

    Attributes:
        min_pixels: smallest area of a resized image, pixels.
        max_pixels: largest area of a resized image, pixels.
        resize: how images are resized: `torch` equals transformers' torchvision backend, `pillow` its Pillow backend and the
            training code.
        feature_format: `compact` keeps uint8 patches, which the encoder normalizes; `float32` gives the reference's pixel values.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.
        temporal_patch_size: frames in a patch; an image is repeated that many times.
        image_mean: per channel, of levels scaled to 0..1.
        image_std: per channel, of levels scaled to 0..1.
        rescale_factor: scales a level to 0..1.
        resample: Pillow's number of the resize filter; only 3, bicubic, is supported.
        do_resize: a step of the reference; a checkpoint that turns it off is refused, as for the three that follow.
        do_rescale: see `do_resize`.
        do_normalize: see `do_resize`.
        do_convert_rgb: see `do_resize`.

    >>> class Options(PatchGridOptions, frozen=True, kw_only=True):
    ...     min_pixels: ImagePixels = 64 * 32 * 32
    ...     max_pixels: ImagePixels = 16_384 * 32 * 32
    ...     resize: ResizeRuleName = "torch"
    ...     patch_size: PatchCount = 16
    ...     merge_size: PatchCount = 2
    ...     temporal_patch_size: PatchCount = 2
    ...     image_mean: ChannelValues = (0.5, 0.5, 0.5)
    ...     image_std: ChannelValues = (0.5, 0.5, 0.5)
    >>> Options().factor
    32
    """

    min_pixels: ImagePixels
    max_pixels: ImagePixels
    resize: ResizeRuleName
    feature_format: Annotated[Literal["compact", "float32"], OptionScope.load("image", "video")] = "compact"
    patch_size: PatchCount
    merge_size: PatchCount
    temporal_patch_size: PatchCount
    image_mean: ChannelValues
    image_std: ChannelValues
    rescale_factor: Annotated[float, msgspec.Meta(gt=0), OptionScope.checkpoint("image", "video")] = 1 / 255
    resample: Annotated[Literal[3], OptionScope.checkpoint("image", "video")] = 3
    do_resize: _Flag = True
    do_rescale: _Flag = True
    do_normalize: _Flag = True
    do_convert_rgb: _Flag = True

    def __post_init__(self) -> None:
        _check_order(self, "min_pixels", "max_pixels")
        for name in _STEPS:
            if not getattr(self, name):
                raise ValueError(f"{name} must be true, got false in the checkpoint; this step cannot be left out")

    @property
    def factor(self) -> int:
        """Pixels along a side of a merged token; both sides of a resized image or frame are multiples of it."""
        return self.patch_size * self.merge_size


class PatchGridVideoOptions(PatchGridOptions, frozen=True, kw_only=True):
    """What changes the features of an image or a video. A model subclasses it and states the numbers without a default here.

    Attributes:
        fps: frames sampled per second of video; the model's own rate where neither this nor `num_frames` is given.
        num_frames: frames sampled in all, instead of a rate.
        min_frames: fewest frames that are sampled.
        max_frames: most frames that are sampled.
        frame_rule: which frames are sampled: `qwen` is the spacing of the released training code, `transformers` the library's;
            both go by the frames' numbers. `time` goes by their times: what is displayed at evenly spread times.
        video_min_pixels: smallest area of a resized frame, pixels.
        video_max_pixels: largest area of a resized frame, pixels.
        video_total_pixels: largest area of all temporal patches of a video together, pixels.
        frame_size_rule: `qwen` divides `video_total_pixels` among the frames, as the released training code does;
            `transformers` has no budget for the whole video.

    Frames are always resized by the `torch` rule.
    """

    fps: FrameRate = None
    num_frames: Annotated[_Frames | None, OptionScope.request("video")] = None
    min_frames: FrameCount
    max_frames: FrameCount
    frame_rule: FrameRuleName
    video_min_pixels: VideoPixels
    video_max_pixels: VideoPixels
    video_total_pixels: VideoPixels
    frame_size_rule: FrameSizeRuleName

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "video_min_pixels", "video_max_pixels")
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames exclude each other; give one of them")


def _check_order(options: Any, least: str, most: str) -> None:
    if getattr(options, least) > getattr(options, most):
        raise ValueError(
            f"{least} must be at most {most}, got {least}={getattr(options, least)} and {most}={getattr(options, most)}"
        )
