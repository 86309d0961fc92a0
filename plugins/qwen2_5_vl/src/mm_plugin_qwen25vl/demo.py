"""What `mm-plugin demo` shows of Qwen2.5-VL: a tiny checkpoint, and transformers' own forward to compare with."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from mm_plugin import ModelProcessor, MultimodalDataItem
from mm_plugin.testing import Demo, Reference, RowBoxes
from mm_plugin_qwen25vl.testing import make_checkpoint

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
except ModuleNotFoundError:
    # The first versions of transformers 5 have the Pillow backend under the name that later is the torchvision one's.
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessorPil


class Qwen25VLDemo(Demo):
    """Qwen2.5-VL with three layers, two of them in windows, and seeded weights."""

    # transformers' image processor is its Pillow backend wherever torchvision is not installed.
    options: ClassVar[Mapping[str, Any]] = {"resize": "pillow"}

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`; images of up to a quarter megapixel, so that the demo is quick."""
        make_checkpoint(folder, preprocessor={"max_pixels": 512 * 512})

    def prompt(self, num_images: int) -> str:
        """See `Demo`."""
        images = "".join(f"Picture {n + 1}: <|vision_start|><|image_pad|><|vision_end|> " for n in range(num_images))
        question = "What is in the pictures?"
        return f"<|im_start|>user\n{images}{question}<|im_end|>\n<|im_start|>assistant\n"

    def open_model(self, checkpoint: Path) -> Any:
        """See `Demo`."""
        logging.disable_progress_bar()
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(str(checkpoint), dtype=torch.float32)
        return model.eval()

    def input_embedding(self, model: Any) -> Any:
        """See `Demo`."""
        return model.get_input_embeddings()

    def reference(self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]) -> Reference:
        """See `Demo`."""
        pictures = [Image.open(io.BytesIO(data)) for data in images]
        prepared = Qwen2VLImageProcessorPil.from_pretrained(str(checkpoint))(images=pictures, return_tensors="pt")
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

    def logits(self, model: Any, input_embeds: torch.Tensor, position_ids: np.ndarray | None) -> torch.Tensor:
        """See `Demo`."""
        positions = None if position_ids is None else torch.from_numpy(position_ids)[:, None]  # [3, 1, N]
        with torch.inference_mode():
            logits: torch.Tensor = model(inputs_embeds=input_embeds[None], position_ids=positions).logits[0]
        return logits

    def row_boxes(self, processor: ModelProcessor, item: MultimodalDataItem) -> RowBoxes:
        """See `Demo`: a row stands for a square of merged patches."""
        side = processor.options.patch_size * processor.options.merge_size
        _, rows, columns = (int(n) // processor.options.merge_size for n in item.image_grid_thw[0])
        boxes = tuple(
            (column * side, row * side, (column + 1) * side, (row + 1) * side)
            for row in range(rows)
            for column in range(columns)
        )
        return RowBoxes(rows * side, columns * side, boxes)
