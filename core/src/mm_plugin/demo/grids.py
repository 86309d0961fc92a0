"""A demo of models that see images and videos as a grid of merged patches and that transformers opens whole. Knows none of them."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from mm_plugin.demo.base import Reference, RowBoxes, ShownVideo, ShowsVideos, TransformersDemo
from mm_plugin.inputs import MultimodalProcessorOutput
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.processor.processor import Processor


class PatchGridDemo(TransformersDemo, ShowsVideos):
    """Abstract: an author says how a checkpoint is made and how a prompt is written.

    Items have `image_grid_thw` or `video_grid_thw`, the model `get_image_features` and `get_video_features`, and the checkpoint
    has preprocessor_config.json.

    Attributes:
        image_processor: transformers' class that prepares images under the demo's `options`.
    """

    image_processor: ClassVar[Any] = None

    def prompt(self, num_images: int) -> str:
        """See `Demo`."""
        return self.video_prompt(num_images, 0)

    def reference(self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]) -> Reference:
        """See `Demo`."""
        prepared = self._prepared(checkpoint, images)
        ids = torch.from_numpy(input_ids)[None]  # [1, N]
        marks = (ids == model.config.image_token_id).long()
        grids = prepared["image_grid_thw"]
        # The first versions of transformers 5 find the images in the ids by themselves.
        marked = "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters
        types = {"mm_token_type_ids": marks} if marked else {}
        with torch.inference_mode():
            positions, _ = model.model.get_rope_index(ids, image_grid_thw=grids, **types)
            rows = torch.cat(model.get_image_features(prepared["pixel_values"], grids).pooler_output)
            embeds = model.get_input_embeddings()(ids)
            embeds = embeds.masked_scatter(marks.bool()[..., None], rows)
            logits = model(
                input_ids=ids,
                pixel_values=prepared["pixel_values"],
                image_grid_thw=grids,
                **types,
            ).logits
        return Reference(embeds[0], logits[0], positions[:, 0].numpy())

    def video_reference(
        self,
        model: Any,
        checkpoint: Path,
        output: MultimodalProcessorOutput,
        images: Sequence[bytes],
        videos: Sequence[ShownVideo],
    ) -> Reference:
        """See `ShowsVideos`; positions are ours, since transformers numbers text after a video in another way."""
        ids = torch.from_numpy(output.input_ids)
        with torch.inference_mode():
            rows = []
            if images:
                prepared = self._prepared(checkpoint, images)
                rows += model.get_image_features(prepared["pixel_values"], prepared["image_grid_thw"]).pooler_output
            for footage in videos:
                grid = torch.tensor(footage.item.video_grid_thw.tolist())
                rows += model.get_video_features(_prepared_video(footage, checkpoint), grid).pooler_output
            embeds = model.get_input_embeddings()(ids)
            places = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
            embeds[places] = torch.cat(rows)
        return Reference(embeds, self.logits(model, embeds, output.mrope_positions))

    def row_boxes(self, processor: Processor, item: MultimodalDataItem) -> RowBoxes:
        """See `Demo`: a row stands for a square of merged patches."""
        side = processor.options.patch_size * processor.options.merge_size
        grid = item.video_grid_thw if item.modality is Modality.VIDEO else item.image_grid_thw
        _, rows, columns = (int(n) // processor.options.merge_size for n in grid[0])
        boxes = tuple(
            (column * side, row * side, (column + 1) * side, (row + 1) * side)
            for row in range(rows)
            for column in range(columns)
        )
        return RowBoxes(rows * side, columns * side, boxes)

    def _prepared(self, checkpoint: Path, images: Sequence[bytes]) -> Any:
        imgs = [Image.open(io.BytesIO(data)) for data in images]
        return self.image_processor.from_pretrained(str(checkpoint))(images=imgs, return_tensors="pt")


def _prepared_video(footage: ShownVideo, checkpoint: Path) -> torch.Tensor:
    """Pixel values [n_patches, patch_dim] float32 of a video's chosen frames, by PyAV and plain torch alone."""
    import av

    settings = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    side, merge, temporal = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    mean, std = (torch.tensor(settings[name])[:, None, None] * 255 for name in ("image_mean", "image_std"))
    with av.open(io.BytesIO(footage.data), mode="r") as container:
        wanted = set(footage.size.indices.tolist())
        decoded = {
            index: torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for index, frame in enumerate(container.decode(video=0))
            if index in wanted
        }
    steps, rows, columns = footage.item.video_grid_thw[0].tolist()
    frames = torch.stack([decoded[index] for index in footage.size.indices.tolist()]).permute(0, 3, 1, 2)
    size = (rows * side, columns * side)
    frames = torch.nn.functional.interpolate(frames, size=size, mode="bicubic", antialias=True).float()
    frames = (frames - mean) / std
    frames = torch.cat([frames, frames[-1:].expand(-len(frames) % temporal, -1, -1, -1)])
    cut = frames.reshape(steps, temporal, 3, rows // merge, merge, side, columns // merge, merge, side)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
