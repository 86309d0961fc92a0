"""Images and videos to grids of patches and back to token counts: dynamic resolution, with every number an option."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from mm_plugin.families.patch_grid.largest import largest_sides
from mm_plugin.families.patch_grid.notes import frame_notes, image_notes, video_notes
from mm_plugin.families.patch_grid.options import PatchGridOptions, PatchGridVideoOptions
from mm_plugin.items import Modality
from mm_plugin.media.types import DecodedImage, DecodedVideo, SampledVideo, Sampling, Size, VideoSize
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.mixins import AcceptsPrecomputed, AcceptsVideos, Fields, KnowsLargest
from mm_plugin.processor.model import ModelProcessor
from mm_plugin.processor.notes import NotedFields
from mm_plugin.settings import Settings
from mm_plugin.transforms.frames import frame_budget, frame_range, sample_frames
from mm_plugin.transforms.normalizing import normalization_table, normalize_patches
from mm_plugin.transforms.patches import check_patches, grid_rows, patchify, patchify_frames
from mm_plugin.transforms.resizing import ResizeRule, resize, smart_resize

# Fewest and most merged tokens of an image or frame whose size a request gives.
_RESIZED_TOKENS = (4, 16_384)
_DUMMY_RATE = 2.0  # frames per second of a video that stands for the largest
_MOST_TRIED = 64  # sizes of videos; beyond the first they differ only where a limit refuses it
_GRID_FIELDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}


class PatchGridVideos(AcceptsVideos):
    """Mixin for `PatchGridProcessor`s of models that take videos: what a model decides about them.

    `sample` chooses the frames; `sample_evenly` does it by the options of `PatchGridVideoOptions`.
    """

    @abstractmethod
    def video_fields(self, size: SampledVideo, options: Any) -> Fields:
        """Fields of a video beside `video_grid_thw`; empty where the model's positions need no others.

        Args:
            size: the frames that were chosen.
            options: an `Options`, all resolved.

        Returns:
            A dict, or `NotedFields`, whose notes join those of the grid.
        """

    @abstractmethod
    def check_video_fields(self, fields: Fields) -> None:
        """Refuse fields beside `video_grid_thw` that came from a client and cannot be those of a video.

        Args:
            fields: all fields of the video; arrays are numpy, whole numbers int64.

        Raises:
            SizeError: a field has another shape or dtype, or is out of bounds.
        """


class PatchGridProcessor(ModelProcessor, AcceptsPrecomputed, KnowsLargest):
    """One token per merged patch of an image, at a resolution near its own. Abstract: a model names its `Options`.

    A model that takes videos adds `PatchGridVideos`. Its spec declares `image_grid_thw` and `video_grid_thw` as fields, and
    names one placeholder per modality.

    Attributes:
        Options: a `PatchGridOptions`; a `PatchGridVideoOptions` where the model takes videos.

    >>> class Processor(PatchGridProcessor):
    ...     Options = PatchGridOptions  # a subclass of it that states the model's numbers
    """

    Options: ClassVar[type[PatchGridOptions]]

    @final
    def context(self, counts: Mapping[Modality, int]) -> None:
        """An item does not depend on the others of its request."""

    @final
    def layout(self, modality: Modality, size: Any, options: Any, context: None) -> NotedFields:
        """`image_grid_thw` or `video_grid_thw` [1, 3] int64: temporal patches, rows and columns of patches."""
        if isinstance(self, PatchGridVideos) and modality is Modality.VIDEO:
            grid, others = _video_grid(size, options), NotedFields(self.video_fields(size, options), ())
            return NotedFields({"video_grid_thw": grid, **others}, [*video_notes(grid, options), *others.notes])
        grid = _image_grid(size, options)
        return NotedFields({"image_grid_thw": grid}, image_notes(grid, options))

    @final
    def prepare(self, decoded: DecodedImage | DecodedVideo, layout: Fields, options: Any) -> np.ndarray:
        """Patches in the order time, merged row, merged column, row, column.

        Shape:
            compact: [n_patches, 3, patch_area] uint8 of an image, [n_patches, 3, temporal_patch_size * patch_area] uint8 of a
            video; else [n_patches, 3 * temporal_patch_size * patch_area], uint8 or float32.
        """
        _, rows, columns = layout[_GRID_FIELDS[decoded.modality]][0].tolist()
        height, width = rows * options.patch_size, columns * options.patch_size
        if isinstance(decoded, DecodedImage):
            patches = _image_patches(decoded, height, width, options)
            table, repeats = self._image_table, options.temporal_patch_size
        else:
            patches = _video_patches(decoded, height, width, options)
            table, repeats = self._video_table, 1  # a patch of a video holds all of its frames already
        if options.feature_format == "compact":
            return patches
        if options.feature_format == "uint8":
            return np.repeat(patches[:, :, None], repeats, axis=2).reshape(len(patches), -1)
        return normalize_patches(patches, table, temporal_patch_size=repeats)

    @final
    def replacement(self, layout: Fields) -> Replacement:
        """The placeholder of the modality once for each merged patch, every one of them with an embedding."""
        modality = Modality.VIDEO if "video_grid_thw" in layout else Modality.IMAGE
        n_patches = int(layout[_GRID_FIELDS[modality]].prod())
        return Replacement.repeat(self.special_tokens.placeholders[modality], n_patches // self.options.merge_size**2)

    @final
    def check_fields(self, modality: Modality, fields: Fields) -> int:
        """Embeddings of a grid [1, 3] of whole merged patches; an image has one temporal patch."""
        if isinstance(self, PatchGridVideos) and modality is Modality.VIDEO:
            self.check_video_fields(fields)
        name = _GRID_FIELDS[modality]
        still = modality is Modality.IMAGE
        return grid_rows(np.asarray(fields[name]), name=name, merge_size=self.options.merge_size, still=still)

    @final
    def check_feature(self, modality: Modality, feature: Any, fields: Fields) -> None:
        """Pixel values [n_patches, patch_dim] floating point, or uint8 patches as `prepare` gives them."""
        check_patches(
            feature,
            fields[_GRID_FIELDS[modality]],
            name=self.spec.feature_names[modality],
            patch_size=self.options.patch_size,
            temporal_patch_size=self.options.temporal_patch_size,
            still=modality is Modality.IMAGE,
            in_rows=self.options.feature_format == "uint8",
        )

    @final
    def largest_sizes(self, modality: Modality, options: Any, settings: Settings) -> Sequence[Size | SampledVideo]:
        """Exact, by the rules of the options; videos may have their frames chosen before they come."""
        if modality is Modality.VIDEO:
            return _largest_videos(options, settings)
        pixels = min(settings.max_image_pixels, settings.max_request_pixels)
        return [
            Size(*sides) for sides, _ in _largest(options, options.min_pixels, options.max_pixels, pixels, settings)
        ]

    @cached_property
    def _image_table(self) -> np.ndarray:
        return self._table(self.options.resize)

    @cached_property
    def _video_table(self) -> np.ndarray:
        return self._table("torch")

    def _table(self, rule: ResizeRule) -> np.ndarray:
        fixed = self.options
        return normalization_table(fixed.image_mean, fixed.image_std, rescale=fixed.rescale_factor, rule=rule)


def sample_evenly(size: VideoSize, options: PatchGridVideoOptions, *, fps: float) -> Sampling:
    """Frames at a rate, or a given number of them, spread over the video, or over the part between two times.

    Args:
        size: of the whole video.
        options: their `fps`, `num_frames`, `min_frames`, `max_frames`, `video_start`, `video_end` and `frame_rule` decide.
        fps: frames per second where a request gives neither `fps` nor `num_frames`.

    Raises:
        SizeError: the bounds leave no number of frames, or fewer than two frames are between the two times.
    """
    first, total = frame_range(size.frames, size.fps, start=options.video_start, end=options.video_end)
    indices = sample_frames(
        total,
        size.fps,
        fps=fps if options.fps is None else options.fps,
        num_frames=options.num_frames,
        min_frames=options.min_frames,
        max_frames=options.max_frames,
        multiple=options.temporal_patch_size,
        rule=options.frame_rule,
        first=first,
        timestamps=None if size.timestamps is None else size.timestamps[first : first + total],
    )
    notes = frame_notes(size, options, len(indices))
    return Sampling(indices, size.times(indices), len(indices) / total * size.fps, notes)


def _image_grid(size: Size, options: PatchGridOptions) -> np.ndarray:
    return _grid(1, _resized(options) or size, options, options.min_pixels, options.max_pixels)


def _resized(options: PatchGridOptions) -> Size | None:
    """The size that a request gives for resized images and frames, in whole merged tokens, within the utilities' own limits.

    Source: qwen-vl-utils@0.0.14, fetch_image and fetch_video.
    """
    if options.resized_height is None or options.resized_width is None:
        return None
    tokens = options.factor**2
    least, most = _RESIZED_TOKENS
    return Size(
        *smart_resize(
            options.resized_height,
            options.resized_width,
            factor=options.factor,
            min_pixels=least * tokens,
            max_pixels=most * tokens,
        )
    )


def _largest(
    options: PatchGridOptions, min_pixels: int, max_pixels: int, pixels: int, settings: Settings, steps: int = 1
) -> list[tuple[tuple[int, int], int]]:
    """Sizes of an image or a frame with the merged tokens of each, the most of them at the end."""
    tokens = settings.max_item_tokens // steps
    found = largest_sides(
        factor=options.factor, min_pixels=min_pixels, max_pixels=max_pixels, most_pixels=pixels, most_tokens=tokens
    )
    sizes = [((height, width), count) for height, width, count in found]
    resized = _resized(options)
    if resized is None:
        return sizes
    # Whatever its size, it becomes this one.
    side = max(1, min(options.factor, math.isqrt(pixels)))
    return [((side, side), resized.height * resized.width // options.factor**2)]


def _largest_videos(options: PatchGridVideoOptions, settings: Settings) -> list[SampledVideo]:
    """Videos of every number of frames, those with most tokens first."""
    found, most = [], min(options.max_frames, settings.max_video_frames, int(settings.max_video_seconds * _DUMMY_RATE))
    for frames in range(options.temporal_patch_size, most + 1, options.temporal_patch_size):
        steps = frames // options.temporal_patch_size
        pixels = min(settings.max_image_pixels, settings.max_request_pixels // frames)
        found += [
            (steps * tokens, frames, sides)
            for sides, tokens in _largest(
                options, options.video_min_pixels, _frame_budget(frames, options), pixels, settings, steps
            )
        ]
    found.sort(key=lambda entry: -entry[0])
    return [
        SampledVideo(*sides, np.arange(frames), np.arange(frames) / _DUMMY_RATE, _DUMMY_RATE)
        for _, frames, sides in found[:_MOST_TRIED]
    ]


def _frame_budget(frames: int, options: PatchGridVideoOptions) -> int:
    return frame_budget(
        frames,
        min_pixels=options.video_min_pixels,
        max_pixels=options.video_max_pixels,
        total_pixels=options.video_total_pixels if options.frame_size_rule == "qwen" else None,
        temporal_patch_size=options.temporal_patch_size,
    )


def _video_grid(size: SampledVideo, options: PatchGridVideoOptions) -> np.ndarray:
    steps = -(-size.frames // options.temporal_patch_size)
    resized = _resized(options)
    if resized is not None and options.frame_size_rule == "qwen":
        # The training code has no other limit then.
        return _patches(steps, resized.height, resized.width, options)
    max_pixels = _frame_budget(steps * options.temporal_patch_size, options)
    return _grid(steps, resized or size, options, options.video_min_pixels, max_pixels)


def _grid(
    steps: int, size: Size | SampledVideo, options: PatchGridOptions, min_pixels: int, max_pixels: int
) -> np.ndarray:
    """Temporal patches, rows and columns of patches: [1, 3] int64."""
    height, width = smart_resize(
        size.height, size.width, factor=options.factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    return _patches(steps, height, width, options)


def _patches(steps: int, height: int, width: int, options: PatchGridOptions) -> np.ndarray:
    return np.array([[steps, height // options.patch_size, width // options.patch_size]], dtype=np.int64)


def _image_patches(decoded: DecodedImage, height: int, width: int, options: PatchGridOptions) -> np.ndarray:
    pixels = resize(decoded.pixels, height, width, rule=options.resize)
    return patchify(pixels, patch_size=options.patch_size, merge_size=options.merge_size)


def _video_patches(decoded: DecodedVideo, height: int, width: int, options: PatchGridOptions) -> np.ndarray:
    return patchify_frames(
        decoded.frames,
        len(decoded.frames),
        height,
        width,
        patch_size=options.patch_size,
        merge_size=options.merge_size,
        temporal_patch_size=options.temporal_patch_size,
    )
