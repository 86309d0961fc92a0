"""What `mm-plugin demo` shows of Qwen2-VL: a tiny checkpoint, and transformers' own forward to compare with."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

from mm_plugin import Modality, ModelProcessor, MultimodalDataItem, MultimodalProcessorOutput
from mm_plugin.testing import Reference, RowBoxes, ShownClip, ShowsVideos, TransformersDemo
from mm_plugin_qwen2vl.testing import PREPROCESSOR, make_checkpoint

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
except ModuleNotFoundError:
    # The first versions of transformers 5 have the Pillow backend under the name that later is the torchvision one's.
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessorPil

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


class Qwen2VLDemo(TransformersDemo, ShowsVideos):
    """Qwen2-VL with two layers and seeded weights."""

    # transformers' image processor is its Pillow backend wherever torchvision is not installed.
    options: ClassVar[Mapping[str, Any]] = {"resize": "pillow"}
    model_class: ClassVar[Any] = Qwen2VLForConditionalGeneration

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`; images of up to a quarter megapixel, so that the demo is quick."""
        make_checkpoint(folder, preprocessor={"max_pixels": 512 * 512})

    def prompt(self, num_images: int) -> str:
        """See `Demo`."""
        return self.video_prompt(num_images, 0)

    def video_prompt(self, num_images: int, num_videos: int) -> str:
        """See `ShowsVideos`."""
        images = "".join(f"Picture {n + 1}: {IMAGE} " for n in range(num_images))
        videos = "".join(f"Video {n + 1}: {VIDEO} " for n in range(num_videos))
        question = "What is to be seen?"
        return f"<|im_start|>user\n{images}{videos}{question}<|im_end|>\n<|im_start|>assistant\n"

    def reference(self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]) -> Reference:
        """See `Demo`."""
        prepared = _prepared_images(checkpoint, images)
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
        clips: Sequence[ShownClip],
    ) -> Reference:
        """See `ShowsVideos`; positions are ours, since transformers numbers text after a clip in another way."""
        ids = torch.from_numpy(output.input_ids)
        with torch.inference_mode():
            rows = []
            if images:
                prepared = _prepared_images(checkpoint, images)
                rows += model.get_image_features(prepared["pixel_values"], prepared["image_grid_thw"]).pooler_output
            for clip in clips:
                grid = torch.tensor(clip.item.video_grid_thw.tolist())
                rows += model.get_video_features(_prepared_clip(clip), grid).pooler_output
            embeds = model.get_input_embeddings()(ids)
            places = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
            embeds[places] = torch.cat(rows)
        return Reference(embeds, self.logits(model, embeds, output.mrope_positions))

    def row_boxes(self, processor: ModelProcessor, item: MultimodalDataItem) -> RowBoxes:
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


def _prepared_images(checkpoint: Path, images: Sequence[bytes]) -> Any:
    pictures = [Image.open(io.BytesIO(data)) for data in images]
    return Qwen2VLImageProcessorPil.from_pretrained(str(checkpoint))(images=pictures, return_tensors="pt")


def _prepared_clip(clip: ShownClip) -> torch.Tensor:
    """Pixel values [n_patches, patch_dim] float32 of a clip's chosen frames, by PyAV and plain torch alone."""
    import av

    with av.open(io.BytesIO(clip.data), mode="r") as container:
        wanted = set(clip.size.indices.tolist())
        decoded = {
            index: torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for index, frame in enumerate(container.decode(video=0))
            if index in wanted
        }
    steps, rows, columns = clip.item.video_grid_thw[0].tolist()
    frames = torch.stack([decoded[index] for index in clip.size.indices.tolist()]).permute(0, 3, 1, 2)
    size = (rows * 14, columns * 14)
    frames = torch.nn.functional.interpolate(frames, size=size, mode="bicubic", antialias=True).float()
    mean, std = (torch.tensor(PREPROCESSOR[name])[:, None, None] * 255 for name in ("image_mean", "image_std"))
    frames = (frames - mean) / std
    if len(frames) % 2:
        frames = torch.cat([frames, frames[-1:]])
    cut = frames.reshape(steps, 2, 3, rows // 2, 2, 14, columns // 2, 2, 14)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
