"""A demo of models that see images and videos as patch grids, compared with transformers' own forward on its own pixels."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from PIL import Image

from mm_plugin.demo.base import DemoVideo, EmbeddingBoxes, ReferenceOutput, ShowsVideos, TransformersDemo
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.processor.processor import Processor


class PatchGridDemo(TransformersDemo, ShowsVideos):
    """Demo of a model with transformers' Qwen2-VL interface and chat format. Abstract: a model makes its checkpoint.

    Items have `image_grid_thw` or `video_grid_thw`, the model `get_image_features`, `get_video_features` and `get_rope_index`,
    and the checkpoint a preprocessor_config.json.

    Attributes:
        model_class: the model with its language head.
    """

    # transformers falls back to its Pillow backend wherever torchvision is not installed.
    options: ClassVar[Mapping[str, Any]] = {"resize": "pillow"}

    @final
    def prompt(self, num_images: int) -> str:
        """See `Demo`."""
        return self.video_prompt(num_images, 0)

    @final
    def video_prompt(self, num_images: int, num_videos: int) -> str:
        """See `ShowsVideos`."""
        images = "".join(f"Image {n + 1}: <|vision_start|><|image_pad|><|vision_end|> " for n in range(num_images))
        videos = "".join(f"Video {n + 1}: <|vision_start|><|video_pad|><|vision_end|> " for n in range(num_videos))
        return f"<|im_start|>user\n{images}{videos}What can be seen?<|im_end|>\n<|im_start|>assistant\n"

    @final
    def reference(
        self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]
    ) -> ReferenceOutput:
        """See `Demo`."""
        prepared = _prepare_images(checkpoint, images)
        ids = torch.from_numpy(input_ids)[None]  # [1, N]
        is_image = ids == model.config.image_token_id
        grids = prepared["image_grid_thw"]
        # The first versions of transformers 5 find the images in the ids by themselves.
        takes_types = "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters
        types = {"mm_token_type_ids": is_image.long()} if takes_types else {}
        with torch.inference_mode():
            positions, _ = model.model.get_rope_index(ids, image_grid_thw=grids, **types)
            embeddings = torch.cat(model.get_image_features(prepared["pixel_values"], grids).pooler_output)
            embeds = model.get_input_embeddings()(ids)
            embeds = embeds.masked_scatter(is_image[..., None], embeddings)
            logits = model(input_ids=ids, pixel_values=prepared["pixel_values"], image_grid_thw=grids, **types).logits
        return ReferenceOutput(embeds[0], logits[0], positions[:, 0].numpy())

    @final
    def video_reference(
        self,
        model: Any,
        checkpoint: Path,
        output: MultimodalProcessorOutput,
        images: Sequence[bytes],
        videos: Sequence[DemoVideo],
    ) -> ReferenceOutput:
        """See `ShowsVideos`; the positions are `output`'s, because transformers numbers text after a video differently."""
        ids = torch.from_numpy(output.input_ids)
        with torch.inference_mode():
            embeddings: list[torch.Tensor] = []
            if images:
                prepared = _prepare_images(checkpoint, images)
                found = model.get_image_features(prepared["pixel_values"], prepared["image_grid_thw"])
                embeddings += found.pooler_output
            for video in videos:
                grid = torch.tensor(video.item.video_grid_thw.tolist())
                embeddings += model.get_video_features(_prepare_video(video, checkpoint), grid).pooler_output
            embeds = model.get_input_embeddings()(ids)
            is_media = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
            embeds[is_media] = torch.cat(embeddings)
        return ReferenceOutput(embeds, self.logits(model, embeds, output.mrope_positions))

    @final
    def embedding_boxes(self, processor: Processor, item: MultimodalDataItem) -> EmbeddingBoxes:
        """See `Demo`: the square of a merged patch for each embedding."""
        side = processor.options.patch_size * processor.options.merge_size
        grid = item.video_grid_thw if item.modality is Modality.VIDEO else item.image_grid_thw
        _, rows, columns = (int(n) // processor.options.merge_size for n in grid[0])
        boxes = tuple(
            (column * side, row * side, (column + 1) * side, (row + 1) * side)
            for row in range(rows)
            for column in range(columns)
        )
        return EmbeddingBoxes(rows * side, columns * side, boxes)


def _image_processor() -> Any:
    """Transformers' Pillow backend."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    except ModuleNotFoundError:
        # The first versions of transformers 5 have the Pillow backend under the name that later is the torchvision one's.
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor
    return Qwen2VLImageProcessorPil


def _prepare_images(checkpoint: Path, images: Sequence[bytes]) -> Any:
    decoded = [Image.open(io.BytesIO(data)) for data in images]
    return _image_processor().from_pretrained(str(checkpoint))(images=decoded, return_tensors="pt")


def _prepare_video(video: DemoVideo, checkpoint: Path) -> torch.Tensor:
    """Pixel values [n_patches, patch_dim] float32 of a video's chosen frames, by PyAV and plain torch alone."""
    import av

    settings = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    side, merge, temporal = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    mean, std = (torch.tensor(settings[name])[:, None, None] * 255 for name in ("image_mean", "image_std"))
    with av.open(io.BytesIO(video.data), mode="r") as container:
        wanted = set(video.size.indices.tolist())
        decoded = {
            index: torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for index, frame in enumerate(container.decode(video=0))
            if index in wanted
        }
    steps, rows, columns = video.item.video_grid_thw[0].tolist()
    frames = torch.stack([decoded[index] for index in video.size.indices.tolist()]).permute(0, 3, 1, 2)
    size = (rows * side, columns * side)
    frames = torch.nn.functional.interpolate(frames, size=size, mode="bicubic", antialias=True).float()
    frames = (frames - mean) / std
    frames = torch.cat([frames, frames[-1:].expand(-len(frames) % temporal, -1, -1, -1)])
    cut = frames.reshape(steps, temporal, 3, rows // merge, merge, side, columns // merge, merge, side)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
