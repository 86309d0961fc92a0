"""Options of processors over patch grids: what each changes, when it may be given, its bounds. Defaults are each model's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from mm_plugin.items import Modality
from mm_plugin.processor.options import BaseOptions, OptionScope
from mm_plugin.processor.settings_keys import any_value
from mm_plugin.transforms.frames import FrameRule
from mm_plugin.transforms.resizing import ResizeRule

# An image above this is of no use to a model, and one request could take all of a machine's memory.
MAX_PIXELS = 1 << 27

_Pixels = Annotated[int, msgspec.Meta(ge=1, le=MAX_PIXELS)]
_MAX_FRAMES = 1 << 16
_Frames = Annotated[int, msgspec.Meta(ge=1, le=_MAX_FRAMES)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]

ImagePixels = Annotated[_Pixels, OptionScope.request("image")]
VideoPixels = Annotated[_Pixels, OptionScope.request("video")]
FrameCount = Annotated[_Frames, OptionScope.request("video", sampling=True)]
FrameRate = Annotated[_Rate | None, OptionScope.request("video", sampling=True)]
ResizeRuleName = Annotated[ResizeRule, OptionScope.load("image")]
FrameRuleName = Annotated[FrameRule, OptionScope.load("video")]
FrameSizeRuleName = Annotated[Literal["qwen", "transformers"], OptionScope.load("video")]
PatchCount = Annotated[int, msgspec.Meta(ge=1, le=64), OptionScope.checkpoint("image", "video")]
ChannelValues = Annotated[tuple[float, float, float], OptionScope.checkpoint("image", "video")]

_Length = Annotated[_Side | None, OptionScope.request("image", "video")]
_Seconds = Annotated[float | None, OptionScope.request("video", sampling=True)]
_Flag = Annotated[bool, OptionScope.checkpoint("image", "video")]
_SIDES = frozenset({"resized_height", "resized_width"})
_AREAS = frozenset({"min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "video_total_pixels"})
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


class PatchGridOptions(BaseOptions, frozen=True, kw_only=True):
    """What changes the features of an image. A model subclasses it and states the numbers that have no default here.

    Attributes:
        min_pixels: smallest area of a resized image, pixels.
        max_pixels: largest area of a resized image, pixels.
        resized_height: height of a resized image or frame, pixels, rounded as `smart_resize` rounds; given with `resized_width`.
            An image is then held to `min_pixels` and `max_pixels`.
        resized_width: width of a resized image or frame; see `resized_height`.
        resize: how images are resized: `torch` equals transformers' torchvision backend, `pillow` its Pillow backend and the
            training code.
        feature_format: `compact` keeps uint8 patches, which the encoder normalizes, of an image one frame of each; `uint8` keeps
            them in the layout of the reference, all frames of a patch in a row; `float32` gives the reference's pixel values.
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
    resized_height: _Length = None
    resized_width: _Length = None
    resize: ResizeRuleName
    feature_format: Annotated[Literal["compact", "uint8", "float32"], OptionScope.load("image", "video")] = "compact"
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
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width belong together; give both")
        for name in sorted(_SIDES):
            side = getattr(self, name)
            if side is not None and not round(side / self.factor):
                raise ValueError(f"{name} must be over {self.factor // 2} pixels, got {side}")
        for name in _STEPS:
            if not getattr(self, name):
                raise ValueError(f"{name} must be true, got false in the checkpoint; this step cannot be left out")

    @classmethod
    def for_item(cls, given: Mapping[str, Any], modality: Modality, usual: Self) -> dict[str, Any]:
        """As in the released utilities, both sides together come before limits of the area. Either comes before the request's."""
        options = super().for_item(given, modality, usual)
        if options.keys() >= _SIDES:
            return {name: value for name, value in options.items() if name not in _AREAS}
        if options.keys() & _AREAS and not options.keys() & _SIDES:
            options |= dict.fromkeys(_SIDES)
        return options

    def settings_without_effect(self, modality: Modality) -> Mapping[str, Any]:
        """Steps that the reference's processors have and do not take, and what counts only in them."""
        return {
            "do_center_crop": False,
            "crop_size": any_value,
            "do_pad": False,
            "pad_size": any_value,
            "size_divisor": any_value,
            "default_to_square": any_value,
            "image_seq_length": any_value,
            "vision_token_id": any_value,
        }

    @property
    def factor(self) -> int:
        """Pixels along a side of a merged token; both sides of a resized image or frame are multiples of it."""
        return self.patch_size * self.merge_size


class PatchGridVideoOptions(PatchGridOptions, frozen=True, kw_only=True):
    """What changes the features of an image or a video. A model subclasses it and states the numbers without a default here.

    Attributes:
        fps: frames sampled per second of video; the model's own rate where neither this nor `num_frames` is given.
        num_frames: frames sampled in all, instead of a rate.
        video_start: seconds; frames before it are not sampled. See `mm_plugin.transforms.frame_range`.
        video_end: seconds; frames after it are not sampled.
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

    # Beside a part, as in the released utilities, limits of a frame have the names that an image's have.
    ITEM_NAMES: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "video": {
            "min_pixels": "video_min_pixels",
            "max_pixels": "video_max_pixels",
            "total_pixels": "video_total_pixels",
            "nframes": "num_frames",
        }
    }

    fps: FrameRate = None
    num_frames: Annotated[_Frames | None, OptionScope.request("video", sampling=True)] = None
    video_start: _Seconds = None
    video_end: _Seconds = None
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
        for name in ("video_start", "video_end"):
            if not math.isfinite(getattr(self, name) or 0):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")

    def settings_without_effect(self, modality: Modality) -> Mapping[str, Any]:
        """Also the limits of frames in a file of the videos' own, where the rule in force would not reach them.

        By the training code's rule frames are resized by its own numbers first, and by the library's rule by those of the file. A
        server that opens the model with `video_min_pixels` and `video_max_pixels` decides.
        """
        found = dict(super().settings_without_effect(modality))
        if modality is not Modality.VIDEO:
            return found
        trained = self.frame_size_rule == "qwen"

        def least(value: Any) -> bool:
            return bool(value <= self.video_min_pixels if trained else value == self.video_min_pixels)

        def most(value: Any) -> bool:
            return bool(value >= self.video_max_pixels if trained else value == self.video_max_pixels)

        for prefix in ("", "size."):
            found |= {f"{prefix}min_pixels": least, f"{prefix}max_pixels": most}
        return found | {
            "size.shortest_edge": least,
            "size.longest_edge": most,
            "do_sample_frames": any_value,
            "cap_pixels_per_frame": any_value if trained else False,
        }

    @classmethod
    def for_item(cls, given: Mapping[str, Any], modality: Modality, usual: Self) -> dict[str, Any]:
        """As the released utilities: `max_pixels` beside a video only lowers the limit of a frame, and `min_pixels` may raise it.

        A rate takes the place of a number of frames that the request gives, and the other way round. `max_frames` bounds a rate,
        and not `nframes`.
        """
        options = super().for_item(given, modality, usual)
        if modality is not Modality.VIDEO:
            return options
        if "video_max_pixels" not in given and options.keys() & {"video_min_pixels", "video_max_pixels"}:
            least = options.get("video_min_pixels", usual.video_min_pixels)
            limit = max(usual.video_max_pixels, int(least * 1.05))
            options["video_max_pixels"] = min(given.get("max_pixels", limit), limit)
        if "nframes" in given:
            options["max_frames"] = max(usual.max_frames, min(given["nframes"] + 1, _MAX_FRAMES))
        for name, other in (("fps", "num_frames"), ("num_frames", "fps")):
            if name in options:
                options.setdefault(other, None)
        return options


def _check_order(options: Any, least: str, most: str) -> None:
    if getattr(options, least) > getattr(options, most):
        raise ValueError(
            f"{least} must be at most {most}, got {least}={getattr(options, least)} and {most}={getattr(options, most)}"
        )
