"""How Qwen2.5-VL lays out and prepares images and videos: dynamic resolution in multiples of a merged patch, frames in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mm_plugin import (
    AcceptsPrecomputed,
    AcceptsVideos,
    BaseOptions,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    Modality,
    ModelProcessor,
    OptionScope,
    Replacement,
    Sampling,
    VideoSize,
)
from mm_plugin.errors import SizeError
from mm_plugin.transforms import (
    check_patches,
    frame_budget,
    grid_rows,
    normalization_table,
    normalize_patches,
    patchify,
    patchify_frames,
    resize,
    sample_frames,
    smart_resize,
)

# Above this no image is useful to the model and one request could take the machine's memory: 171,196 tokens.
MOST_PIXELS = 1 << 27
# A day from one temporal patch to the next; positions would leave what a language model was trained for long before.
MOST_SECONDS = 86_400

Pixels = Annotated[int, msgspec.Meta(ge=1, le=MOST_PIXELS)]
Frames = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Patches = Annotated[int, msgspec.Meta(ge=1, le=64), OptionScope.checkpoint("image", "video")]
Channels = Annotated[tuple[float, float, float], OptionScope.checkpoint("image", "video")]
Flag = Annotated[bool, OptionScope.checkpoint("image", "video")]


class Qwen25VLOptions(BaseOptions, frozen=True, kw_only=True):
    """What changes the features of an image or a video; see `OptionScope` for when each may be given.

    Attributes:
        min_pixels: smallest area of a resized image, pixels.
        max_pixels: largest area of a resized image, pixels.
        resize: rule for images: `torch` equals transformers' torchvision backend, `pillow` its Pillow backend and the training
            code. Frames of videos are resized by `torch`.
        fps: frames per second that are looked at; 2 where neither this nor `num_frames` is given.
        num_frames: frames that are looked at, in place of a rate.
        min_frames: fewest frames.
        max_frames: most frames.
        frame_rule: which frames: `qwen` is the released training code's spacing, `transformers` the library's.
        video_min_pixels: smallest area of a resized frame, pixels.
        video_max_pixels: largest area of a resized frame, pixels.
        video_total_pixels: largest area of all temporal patches of a video together, pixels.
        frame_size_rule: `qwen` shares `video_total_pixels` among the frames, as the released training code does; `transformers`
            has no budget for the whole video.
        feature_format: `compact` keeps uint8 patches, which the encoder normalizes; `float32` keeps the reference's values.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.
        temporal_patch_size: frames in a patch; an image is repeated so often.
        image_mean: per channel, of levels scaled to 0..1.
        image_std: per channel, of levels scaled to 0..1.
        rescale_factor: scales a level to 0..1.
        resample: Pillow's number for the resize filter; 3, bicubic, is what is served.
        do_resize, do_rescale, do_normalize, do_convert_rgb: steps of the reference, none of which can be left out.
    """

    min_pixels: Annotated[Pixels, OptionScope.request("image")] = 56 * 56
    max_pixels: Annotated[Pixels, OptionScope.request("image")] = 28 * 28 * 1280
    resize: Annotated[Literal["torch", "pillow"], OptionScope.load("image")] = "torch"
    fps: Annotated[Rate | None, OptionScope.request("video")] = None
    num_frames: Annotated[Frames | None, OptionScope.request("video")] = None
    min_frames: Annotated[Frames, OptionScope.request("video")] = 4
    max_frames: Annotated[Frames, OptionScope.request("video")] = 768
    frame_rule: Annotated[Literal["qwen", "transformers"], OptionScope.load("video")] = "qwen"
    video_min_pixels: Annotated[Pixels, OptionScope.request("video")] = 128 * 28 * 28
    video_max_pixels: Annotated[Pixels, OptionScope.request("video")] = 768 * 28 * 28
    # Nine tenths of a context of 128,000 tokens.
    video_total_pixels: Annotated[Pixels, OptionScope.request("video")] = 115_200 * 28 * 28
    frame_size_rule: Annotated[Literal["qwen", "transformers"], OptionScope.load("video")] = "qwen"
    feature_format: Annotated[Literal["compact", "float32"], OptionScope.load("image", "video")] = "compact"
    patch_size: Patches = 14
    merge_size: Patches = 2
    temporal_patch_size: Patches = 2
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: Annotated[float, msgspec.Meta(gt=0), OptionScope.checkpoint("image", "video")] = 1 / 255
    resample: Annotated[Literal[3], OptionScope.checkpoint("image", "video")] = 3
    do_resize: Flag = True
    do_rescale: Flag = True
    do_normalize: Flag = True
    do_convert_rgb: Flag = True

    def __post_init__(self) -> None:
        for least, most in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least} {getattr(self, least)} is more than {most} {getattr(self, most)}")
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames both say how many frames are looked at; give one")
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not getattr(self, name):
                raise ValueError(f"{name} is false in the checkpoint; this plugin always takes that step")


class Qwen25VLProcessor(ModelProcessor, AcceptsVideos, AcceptsPrecomputed):
    """Qwen2.5-VL. One image, or each pair of frames, becomes (height / 28) x (width / 28) tokens of a size near its own."""

    Options = Qwen25VLOptions

    def context(self, counts: Mapping[Modality, int]) -> None:
        """Nothing of a media input depends on the others."""

    def sample(self, size: VideoSize, options: Qwen25VLOptions) -> Sampling:
        """So many frames a second, or in all, spread over the video."""
        indices = sample_frames(
            size.frames,
            size.fps,
            fps=2.0 if options.fps is None else options.fps,
            num_frames=options.num_frames,
            min_frames=options.min_frames,
            max_frames=options.max_frames,
            multiple=options.temporal_patch_size,
            rule=options.frame_rule,
        )
        return Sampling.of(size, indices)

    def layout(self, modality: Modality, size: Any, options: Qwen25VLOptions, context: None) -> dict[str, Any]:
        """`image_grid_thw` or `video_grid_thw` [1, 3] int64: temporal patches, rows and columns of patches.

        For a video also `second_per_grid_ts` [1] float64: seconds from one temporal patch to the next.
        """
        steps, least, most = 1, options.min_pixels, options.max_pixels
        if modality is Modality.VIDEO:
            steps, least = -(-size.frames // options.temporal_patch_size), options.video_min_pixels
            most = frame_budget(
                steps * options.temporal_patch_size,
                min_pixels=least,
                max_pixels=options.video_max_pixels,
                total_pixels=options.video_total_pixels if options.frame_size_rule == "qwen" else None,
                temporal_patch_size=options.temporal_patch_size,
            )
        factor = options.patch_size * options.merge_size
        height, width = smart_resize(size.height, size.width, factor=factor, min_pixels=least, max_pixels=most)
        grid = [steps, height // options.patch_size, width // options.patch_size]
        fields = {_grid_name(modality): np.array([grid], dtype=np.int64)}
        if modality is Modality.VIDEO:
            fields["second_per_grid_ts"] = np.array([options.temporal_patch_size / size.fps])
        return fields

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Qwen25VLOptions) -> np.ndarray:
        """Patches [n_patches, 3, patch_area] uint8, a video's of frames * patch_area levels; or [n_patches, patch_dim] float32."""
        _, rows, columns = layout[_grid_name(decoded.modality)][0].tolist()
        side, merge, frames = options.patch_size, options.merge_size, options.temporal_patch_size
        height, width = rows * side, columns * side
        if isinstance(decoded, DecodedImage):
            pixels = resize(decoded.pixels, height, width, rule=options.resize)
            patches, table = patchify(pixels, patch_size=side, merge_size=merge), self._image_table
        else:
            assert isinstance(decoded, DecodedVideo)
            patches = patchify_frames(
                decoded.frames,
                len(decoded.frames),
                height,
                width,
                patch_size=side,
                merge_size=merge,
                temporal_patch_size=frames,
            )
            table, frames = self._video_table, 1  # each frame is in its patch already
        if options.feature_format == "compact":
            return patches
        return normalize_patches(patches, table, temporal_patch_size=frames)

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        """One `<|image_pad|>` or `<|video_pad|>` for each merged patch, each taking a row."""
        modality = Modality.VIDEO if "video_grid_thw" in layout else Modality.IMAGE
        n_patches = int(layout[_grid_name(modality)].prod())
        return Replacement.repeat(self.special_tokens.placeholders[modality], n_patches // self.options.merge_size**2)

    def feature_name(self, modality: Modality) -> str:
        """`pixel_values` or `pixel_values_videos`."""
        return "pixel_values" if modality is Modality.IMAGE else "pixel_values_videos"

    def check_fields(self, modality: Modality, fields: Mapping[str, Any]) -> int:
        """Rows of a grid [1, 3] of whole merged patches, one frame where it is an image's; seconds [1] where it is a video's."""
        name = _grid_name(modality)
        still = modality is Modality.IMAGE
        if not still:
            seconds = np.asarray(fields["second_per_grid_ts"])
            if seconds.shape != (1,) or seconds.dtype.kind not in "iuf" or not 0 <= seconds[0] <= MOST_SECONDS:
                raise SizeError(f"second_per_grid_ts must be [1] seconds from 0 to {MOST_SECONDS}")
        return grid_rows(np.asarray(fields[name]), name=name, merge_size=self.options.merge_size, still=still)

    def check_feature(self, modality: Modality, feature: Any, fields: Mapping[str, Any]) -> None:
        """Pixel values [n_patches, patch_dim] floating point, or compact patches."""
        check_patches(
            feature,
            fields[_grid_name(modality)],
            name=self.feature_name(modality),
            patch_size=self.options.patch_size,
            temporal_patch_size=self.options.temporal_patch_size,
            still=modality is Modality.IMAGE,
        )

    @cached_property
    def _image_table(self) -> np.ndarray:
        return self._table(self.options.resize)

    @cached_property
    def _video_table(self) -> np.ndarray:
        return self._table("torch")

    def _table(self, rule: Literal["torch", "pillow"]) -> np.ndarray:
        fixed = self.options
        return normalization_table(fixed.image_mean, fixed.image_std, rescale=fixed.rescale_factor, rule=rule)


def _grid_name(modality: Modality) -> str:
    return "video_grid_thw" if modality is Modality.VIDEO else "image_grid_thw"
