"""Qwen2-VL's vision tower, loaded alone from a checkpoint: transformers' modules, features taken in every form that items bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mm_plugin import Checkpoint, Modality
from mm_plugin.encoder import PatchGridEncoder, Rotary, Segments, frame_lengths, load_tower, merge_order, self_attention
from mm_plugin_qwen2vl.processor import Qwen2VLOptions

# How released checkpoints name the tower's tensors, and how newer transformers saves them.
PREFIXES = ("visual.", "model.visual.")


class Qwen2VLEncoder(PatchGridEncoder):
    """Patches in, one row per merged patch out. A frame's patches attend to one another, and to no other frame's.

    Args:
        tower: transformers' vision tower on its device, in inference mode.
        options: the checkpoint's numbers for normalization and patches.
    """

    def __init__(self, tower: Any, options: Qwen2VLOptions) -> None:
        super().__init__(
            tower.patch_embed.proj,
            merge_size=options.merge_size,
            mean=options.image_mean,
            std=options.image_std,
            rescale=options.rescale_factor,
        )
        self._tower, self._merge = tower, options.merge_size
        self._heads: int = tower.config.num_heads
        self._head_dim: int = tower.config.embed_dim // tower.config.num_heads

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

    def encode_patches(self, states: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """See `PatchGridEncoder`."""
        device = states.device
        rotary = Rotary(merge_order(grids, self._merge), head_dim=self._head_dim, device=device)
        segments = Segments(frame_lengths(grids), device=device)
        for block in self._tower.blocks:
            normed, layer = block.norm1(states), block.attn
            states += self_attention(
                normed, layer.qkv, layer.proj, n_heads=self._heads, rotary=rotary, segments=segments
            )
            states += block.mlp(block.norm2(states))
        rows: torch.Tensor = self._tower.merger(states)  # [n_rows, hidden]
        return rows
