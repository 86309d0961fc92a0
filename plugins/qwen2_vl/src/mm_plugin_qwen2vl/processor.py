"""How Qwen2-VL lays out and prepares one image: dynamic resolution in multiples of a merged patch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mm_plugin import BaseOptions, For, Medium, Modality, ModelProcessor, Replacement, Size, TakesPrepared
from mm_plugin.errors import SizeError
from mm_plugin.imaging import normalisation_table, normalise_patches, patchify, resize, smart_resize

# Above this no picture is useful to the model and one request could take the machine's memory: 171,196 tokens.
MOST_PIXELS = 1 << 27

Pixels = Annotated[int, msgspec.Meta(ge=1, le=MOST_PIXELS), For.call("image")]
Patches = Annotated[int, msgspec.Meta(ge=1, le=64), For.checkpoint("image")]
Channels = Annotated[tuple[float, float, float], For.checkpoint("image")]
Flag = Annotated[bool, For.checkpoint("image")]


class Qwen2VLOptions(BaseOptions, frozen=True, kw_only=True):
    """What changes the features of an image; see `For` for when each may be given.

    Attributes:
        min_pixels: smallest area of the resized image, pixels.
        max_pixels: largest area of the resized image, pixels.
        resize: `torch` equals transformers' torchvision backend, `pillow` its Pillow backend and the training code.
        feature_format: `compact` keeps uint8 patches, which the encoder normalises; `float32` keeps the reference's
            `pixel_values`.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.
        temporal_patch_size: frames in a patch; an image is repeated so often.
        image_mean: per channel, of levels scaled to 0..1.
        image_std: per channel, of levels scaled to 0..1.
        rescale_factor: scales a level to 0..1.
        resample: Pillow's number for the resize filter; 3, bicubic, is what is served.
        do_resize, do_rescale, do_normalize, do_convert_rgb: steps of the reference, none of which can be left out.
    """

    min_pixels: Pixels = 56 * 56
    max_pixels: Pixels = 28 * 28 * 1280
    resize: Annotated[Literal["torch", "pillow"], For.load("image")] = "torch"
    feature_format: Annotated[Literal["compact", "float32"], For.load("image")] = "compact"
    patch_size: Patches = 14
    merge_size: Patches = 2
    temporal_patch_size: Patches = 2
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: Annotated[float, msgspec.Meta(gt=0), For.checkpoint("image")] = 1 / 255
    resample: Annotated[Literal[3], For.checkpoint("image")] = 3
    do_resize: Flag = True
    do_rescale: Flag = True
    do_normalize: Flag = True
    do_convert_rgb: Flag = True

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is more than max_pixels {self.max_pixels}")
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not getattr(self, name):
                raise ValueError(f"{name} is false in the checkpoint; this plugin always takes that step")


class Qwen2VLProcessor(ModelProcessor, TakesPrepared):
    """Qwen2-VL. One image becomes (height / 28) x (width / 28) tokens of a size near its own."""

    Options = Qwen2VLOptions

    def context(self, counts: Mapping[Modality, int]) -> None:
        """Nothing of an image depends on the others."""

    def layout(self, modality: Modality, size: Size, options: Qwen2VLOptions, context: None) -> dict[str, Any]:
        """`image_grid_thw` [1, 3] int64: frames, rows and columns of patches."""
        height, width = smart_resize(
            size.height,
            size.width,
            factor=options.patch_size * options.merge_size,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
        )
        grid = [1, height // options.patch_size, width // options.patch_size]
        return {"image_grid_thw": np.array([grid], dtype=np.int64)}

    def prepare(self, medium: Medium, layout: Mapping[str, Any], options: Qwen2VLOptions) -> np.ndarray:
        """Patches [n_patches, 3, patch_area] uint8, or [n_patches, patch_dim] float32."""
        _, rows, columns = layout["image_grid_thw"][0].tolist()
        side = options.patch_size
        pixels = resize(medium.pixels, rows * side, columns * side, rule=options.resize)
        patches = patchify(pixels, patch_size=side, merge_size=options.merge_size)
        if options.feature_format == "compact":
            return patches
        return normalise_patches(patches, self._table, temporal_patch_size=options.temporal_patch_size)

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        """One `<|image_pad|>` for each merged patch, each taking a row."""
        n_patches = int(layout["image_grid_thw"].prod())
        token = self.special_tokens.placeholders[Modality.IMAGE]
        return Replacement.repeat(token, n_patches // self.options.merge_size**2)

    def feature_name(self, modality: Modality) -> str:
        """`pixel_values`."""
        return "pixel_values"

    def check_fields(self, modality: Modality, fields: Mapping[str, Any]) -> int:
        """Rows of an image whose grid is [1, 3]: one frame of whole merged patches."""
        grid, merge = np.asarray(fields["image_grid_thw"]), self.options.merge_size
        if grid.shape != (1, 3) or grid.dtype != np.int64:
            raise SizeError(f"image_grid_thw must be [1, 3] whole numbers, got {list(grid.shape)} {grid.dtype}")
        frames, rows, columns = grid[0].tolist()
        if frames != 1 or min(rows, columns) < 1 or rows % merge or columns % merge:
            raise SizeError(
                f"image_grid_thw {frames} x {rows} x {columns} is no image of whole {merge} x {merge} blocks"
            )
        return int(rows * columns // merge**2)

    def check_feature(self, modality: Modality, feature: Any, fields: Mapping[str, Any]) -> None:
        """Pixel values [n_patches, patch_dim] floating point, or compact patches [n_patches, 3, patch_area] uint8."""
        n_patches = int(fields["image_grid_thw"].prod())
        area = self.options.patch_size**2
        compact = str(feature.dtype).endswith("uint8")
        shape = (n_patches, 3, area) if compact else (n_patches, 3 * self.options.temporal_patch_size * area)
        floating = "float" in str(feature.dtype)
        if tuple(feature.shape) != shape or not (compact or floating):
            raise SizeError(
                f"pixel_values are {list(feature.shape)} {feature.dtype}, the grid stands for {list(shape)}"
            )

    @cached_property
    def _table(self) -> np.ndarray:
        fixed = self.options
        return normalisation_table(fixed.image_mean, fixed.image_std, rescale=fixed.rescale_factor, rule=fixed.resize)
