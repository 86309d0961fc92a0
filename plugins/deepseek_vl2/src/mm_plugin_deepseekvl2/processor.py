"""How DeepSeek-VL2 lays out and prepares an image: a thumbnail, and the tiles of the resolution that fits the image best."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mm_plugin import (
    AcceptsPrecomputed,
    BaseOptions,
    Checkpoint,
    DecodedImage,
    KnowsLargest,
    Modality,
    ModelProcessor,
    OptionScope,
    Replacement,
    Settings,
    Size,
    UsageError,
)
from mm_plugin.errors import SizeError
from mm_plugin.processor import any_value, check_settings
from mm_plugin.transforms import best_resolution, cut_tiles, letterbox, normalization_table
from mm_plugin_deepseekvl2.config import Positive, read_config, read_struct

SETTINGS_FILE = "processor_config.json"
# In a request with more images than this, images get no tiles.
MOST_CROPPED = 2

# What concerns training, or tokens that the released tokenizers have.
_WITHOUT_EFFECT = {
    "add_special_token": any_value,
    "ignore_id": any_value,
    "mask_prompt": any_value,
    "pad_token": any_value,
}

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Channels = Annotated[tuple[Fraction, Fraction, Fraction], OptionScope.checkpoint("image")]
Spread = Annotated[float, msgspec.Meta(gt=0)]


class _Settings(msgspec.Struct, frozen=True):
    """processor_config.json, as the model's own processor reads it; the first three values are required, as they are there."""

    candidate_resolutions: Annotated[tuple[tuple[Positive, Positive], ...], msgspec.Meta(min_length=1)]
    patch_size: Positive
    downsample_ratio: Positive
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    normalize: bool = True
    image_token: Literal["<image>"] = "<image>"
    sft_format: Literal["deepseek"] = "deepseek"

    def __post_init__(self) -> None:
        side = self.candidate_resolutions[0][0]
        for width, height in self.candidate_resolutions:
            if width % side or height % side:
                raise ValueError(
                    f"candidate_resolutions must be multiples of the tile of {side} pixels, got {width} x {height}"
                )


def read_settings(checkpoint: Checkpoint, _: Modality) -> dict[str, Any]:
    """Values of processor_config.json, by option, checked against config.json.

    Raises:
        UsageError: a key is missing or invalid, or the two files contradict each other; the message names files and keys.
    """
    source, settings = f"{checkpoint.folder}/{SETTINGS_FILE}", checkpoint.read_json(SETTINGS_FILE)
    check_settings(
        settings,
        known=_Settings.__struct_fields__,
        without_effect=_WITHOUT_EFFECT,
        source=source,
        reader="DeepseekVL2Processor",
    )
    found = read_struct({name: value for name, value in settings.items() if value is not None}, _Settings, source)
    config = read_config(checkpoint)
    pairs = {
        "candidate_resolutions[0]": (found.candidate_resolutions[0], (config.vision_config.image_size,) * 2),
        "patch_size": (found.patch_size, config.vision_config.patch_size),
        "downsample_ratio": (found.downsample_ratio, config.projector_config.joined),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UsageError(
                f"{checkpoint.folder}: {SETTINGS_FILE} has {name} {ours}, but config.json has {theirs}",
                argument="checkpoint",
            )
    return {name: getattr(found, name) for name in DeepseekVL2Options.__struct_fields__ if hasattr(found, name)}


class DeepseekVL2Options(BaseOptions, frozen=True, kw_only=True):
    """What changes the features of an image; see `OptionScope` for when each may be given.

    Attributes:
        resize: `pillow` equals the model's own processor bit for bit; `torch` is two to three times faster, and within
            two levels of it.
        feature_format: `compact` keeps uint8 tiles, which the encoder normalizes, and a single one where the only tile equals the
            thumbnail; `float32` gives the reference's `images`.
        candidate_resolutions: (width, height), pixels, one of which is chosen for an image; the first is that of one tile.
        patch_size: pixels along a side of a patch.
        downsample_ratio: patches along a side of the square that becomes one embedding.
        image_mean: per channel, of levels scaled to 0..1; also the color with which an image is padded.
        image_std: per channel, of levels scaled to 0..1.
        normalize: whether levels are normalized by mean and standard deviation.
    """

    @classmethod
    def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> dict[str, Any]:
        """From processor_config.json and config.json, which must agree."""
        return read_settings(checkpoint, modality)

    resize: Annotated[Literal["pillow", "torch"], OptionScope.load("image")] = "pillow"
    feature_format: Annotated[Literal["compact", "float32"], OptionScope.load("image")] = "compact"
    candidate_resolutions: Annotated[tuple[tuple[int, int], ...], OptionScope.checkpoint("image")]
    patch_size: Annotated[int, OptionScope.checkpoint("image")]
    downsample_ratio: Annotated[int, OptionScope.checkpoint("image")]
    image_mean: Channels = (0.5, 0.5, 0.5)
    image_std: Annotated[tuple[Spread, Spread, Spread], OptionScope.checkpoint("image")] = (0.5, 0.5, 0.5)
    normalize: Annotated[bool, OptionScope.checkpoint("image")] = True

    @property
    def image_size(self) -> int:
        """Pixels along a side of a tile."""
        return self.candidate_resolutions[0][0]

    @property
    def tile_side(self) -> int:
        """Embeddings along a side of a tile."""
        return -(-(self.image_size // self.patch_size) // self.downsample_ratio)

    @property
    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per channel, of levels scaled to 0..1: what is subtracted, and what the difference is divided by."""
        return (self.image_mean, self.image_std) if self.normalize else ((0.0,) * 3, (1.0,) * 3)

    @property
    def table(self) -> np.ndarray:
        """Normalized values of the 256 levels, per channel: [3, 256] float32."""
        # Division by 255 in float32, as in the reference, and a product in float64 that is then rounded agree on every level.
        return normalization_table(*self.mean_and_std, rescale=1 / 255, rule="pillow")


class DeepseekVL2Processor(ModelProcessor, AcceptsPrecomputed, KnowsLargest):
    """DeepSeek-VL2. An image becomes embeddings of its thumbnail, a separator, and embeddings of its tiles."""

    Options = DeepseekVL2Options

    def context(self, counts: Mapping[Modality, int]) -> bool:
        """Whether images are cut into tiles."""
        return counts.get(Modality.IMAGE, 0) <= MOST_CROPPED

    def layout(self, modality: Modality, size: Size, options: DeepseekVL2Options, context: bool) -> dict[str, Any]:
        """`images_spatial_crop` [1, 2] int64: tiles along the width and along the height."""
        side = options.image_size
        height = width = side
        if context:
            candidates = [(height, width) for width, height in options.candidate_resolutions]
            height, width = best_resolution(size.height, size.width, candidates)
        return {"images_spatial_crop": np.array([[width // side, height // side]], dtype=np.int64)}

    def prepare(self, decoded: DecodedImage, layout: Mapping[str, Any], options: DeepseekVL2Options) -> np.ndarray:
        """Thumbnail, then tiles row by row: [n_tiles, side, side, 3] uint8, or [n_tiles, 3, side, side] float32."""
        columns, rows = layout["images_spatial_crop"][0].tolist()
        side, n_local = options.image_size, rows * columns
        # The only tile of an image equals its thumbnail.
        boxes = [(side, side), (rows * side, columns * side)][: min(2, n_local)]
        red, green, blue = (int(level * 255) for level in options.image_mean)
        thumbnail, *views = letterbox(decoded.pixels, boxes, color=(red, green, blue), rule=options.resize)
        tiles = np.empty((1 + n_local * len(views), side, side, 3), dtype=np.uint8)
        tiles[0] = thumbnail
        for view in views:
            cut_tiles(view, tiles[1:])
        if options.feature_format == "compact":
            return tiles
        return normalize_tiles(tiles if views else tiles.repeat(2, axis=0), self._table)

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        """One `<image>` for each embedding."""
        columns, rows = layout["images_spatial_crop"][0].tolist()
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], self._num_rows(rows, columns))

    def largest_sizes(self, modality: Modality, options: DeepseekVL2Options, settings: Settings) -> list[Size]:
        """An image of each resolution; where the limits do not leave all of these, also images of many shapes that they do."""
        most = min(settings.max_image_pixels, settings.max_request_pixels)
        sizes = [Size(height, width) for width, height in options.candidate_resolutions]
        if all(size.height * size.width <= most for size in sizes):
            return sizes
        for height in {round(most ** (step / 64)) for step in range(65)}:
            sizes += [Size(height, max(1, most // height)), Size(height, max(1, most // height // 2))]
        return sizes

    def check_fields(self, modality: Modality, fields: Mapping[str, Any]) -> int:
        """Embeddings of an image whose tiles add up to one of the checkpoint's resolutions."""
        crop, options = np.asarray(fields["images_spatial_crop"]), self.options
        if crop.shape != (1, 2) or crop.dtype != np.int64:
            raise SizeError(f"images_spatial_crop must be [1, 2] whole numbers, got {list(crop.shape)} {crop.dtype}")
        columns, rows = crop[0].tolist()
        size = (columns * options.image_size, rows * options.image_size)
        if (columns, rows) != (1, 1) and size not in options.candidate_resolutions:
            raise SizeError(f"images_spatial_crop {columns} x {rows} is not one of the model's resolutions")
        return self._num_rows(rows, columns)

    def check_feature(self, modality: Modality, feature: Any, fields: Mapping[str, Any]) -> None:
        """Tiles [1 + rows * columns, 3, side, side] floating point, or compact as `prepare` gives them."""
        columns, rows = fields["images_spatial_crop"][0].tolist()
        side, n_local = self.options.image_size, rows * columns
        compact = str(feature.dtype).endswith("uint8")
        shape = (1 + n_local if n_local > 1 else 1, side, side, 3) if compact else (1 + n_local, 3, side, side)
        if tuple(feature.shape) != shape or not (compact or "float" in str(feature.dtype)):
            raise SizeError(
                f"images are {list(feature.shape)} {feature.dtype}, images_spatial_crop stands for {list(shape)}"
            )

    def _num_rows(self, rows: int, columns: int) -> int:
        """Each row of a grid ends with a newline; a separator stands between the thumbnail and the tiles."""
        side: int = self.options.tile_side
        return side * (side + 1) + 1 + rows * side * (columns * side + 1)

    @cached_property
    def _table(self) -> np.ndarray:
        table: np.ndarray = self.options.table
        return table


def normalize_tiles(tiles: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Compact tiles as the reference's `images`.

    Args:
        tiles: [n_tiles, side, side, 3] uint8.
        table: [3, 256] float32.

    Shape:
        returns [n_tiles, 3, side, side] float32.
    """
    out = np.empty((len(tiles), 3, *tiles.shape[1:3]), dtype=np.float32)
    for tile, floats in zip(tiles, out, strict=True):
        for channel in range(3):
            # mode="video" skips the bounds check, which an uint8 index cannot fail.
            floats[channel] = table[channel].take(tile[:, :, channel], mode="clip")
    return out
