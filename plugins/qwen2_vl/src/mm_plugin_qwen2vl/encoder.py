"""Qwen2-VL's vision tower, loaded alone from a checkpoint: transformers' modules, features taken in every form that items bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mm_plugin import Checkpoint, Encoder, EncodesImages, EncodesVideos, Modality, MultimodalDataItem
from mm_plugin.encoder.towers import PatchEmbedding, Rotary, Segments, load_tower, merge_order, self_attention
from mm_plugin_qwen2vl.processor import Qwen2VLOptions

# How released checkpoints name the tower's tensors, and how newer transformers saves them.
PREFIXES = ("visual.", "model.visual.")


class Qwen2VLEncoder(Encoder, EncodesImages, EncodesVideos):
    """Patches in, one row per merged patch out. A frame's patches attend to one another, and to no other frame's.

    Args:
        tower: transformers' vision tower on its device, in inference mode.
        options: the checkpoint's numbers for normalisation and patches.
    """

    def __init__(self, tower: Any, options: Qwen2VLOptions) -> None:
        self._tower, self._merge = tower, options.merge_size
        self._heads: int = tower.config.num_heads
        self._head_dim: int = tower.config.embed_dim // tower.config.num_heads
        proj = tower.patch_embed.proj
        self._device: torch.device = proj.weight.device
        self._embed = PatchEmbedding(
            proj.weight,
            proj.bias,
            mean=options.image_mean,
            std=options.image_std,
            rescale=options.rescale_factor,
            dtype=proj.weight.dtype,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Qwen2VLEncoder:
        """Build the tower from the checkpoint's vision tensors; the language model is never read.

        Raises:
            UsageError: the checkpoint lacks a tensor of the tower, has one too many, or one of another shape.
        """
        config = Qwen2VLConfig.from_dict(dict(checkpoint.config)).vision_config
        tower = load_tower(
            lambda: Qwen2VisionTransformerPretrainedModel(config), checkpoint, PREFIXES, device=device, dtype=dtype
        )
        return cls(tower, Qwen2VLOptions.from_checkpoint(checkpoint, (Modality.IMAGE,)))

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Rows [num_tokens, hidden] for each image, from one pass of the tower over all of them."""
        return self._encode(items, "image_grid_thw")

    def get_video_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Rows [num_tokens, hidden] for each video, from one pass of the tower over all of them."""
        return self._encode(items, "video_grid_thw")

    def _encode(self, items: Sequence[MultimodalDataItem], field: str) -> list[torch.Tensor]:
        grids: list[tuple[int, int, int]] = [tuple(item.get(field)[0].tolist()) for item in items]
        counts = [frames * rows * columns for frames, rows, columns in grids]
        lengths = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
        with torch.inference_mode():
            rotary = Rotary(merge_order(grids, self._merge), head_dim=self._head_dim, device=self._device)
            segments = Segments(lengths, device=self._device)
            states = torch.cat([self._embed(torch.as_tensor(item.feature).to(self._device)) for item in items])
            for block in self._tower.blocks:
                normed, layer = block.norm1(states), block.attn
                states += self_attention(
                    normed, layer.qkv, layer.proj, n_heads=self._heads, rotary=rotary, segments=segments
                )
                states += block.mlp(block.norm2(states))
            rows = self._tower.merger(states)  # [n_rows, hidden]
        return list(rows.split([count // self._merge**2 for count in counts]))
