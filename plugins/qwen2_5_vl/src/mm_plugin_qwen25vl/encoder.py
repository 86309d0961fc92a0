"""Qwen2.5-VL's vision tower, loaded alone from a checkpoint: transformers' modules, most layers in windows of a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from mm_plugin import Checkpoint, Modality
from mm_plugin.encoder import (
    PatchGridEncoder,
    Rotary,
    Segments,
    frame_lengths,
    load_tower,
    merge_order,
    self_attention,
    window_order,
)
from mm_plugin_qwen25vl.processor import Qwen25VLOptions

# How released checkpoints name the tower's tensors, and how newer transformers saves them.
PREFIXES = ("visual.", "model.visual.")


class Qwen25VLEncoder(PatchGridEncoder):
    """Patches in, one row per merged patch out. A few layers attend within a frame, the others within its windows.

    Args:
        tower: transformers' vision tower on its device, in inference mode.
        options: the checkpoint's numbers for normalization and patches.
    """

    def __init__(self, tower: Any, options: Qwen25VLOptions) -> None:
        super().__init__(
            tower.patch_embed.proj,
            merge_size=options.merge_size,
            mean=options.image_mean,
            std=options.image_std,
            rescale=options.rescale_factor,
        )
        self._tower, self._merge = tower, options.merge_size
        self._heads: int = tower.config.num_heads
        self._head_dim: int = tower.config.hidden_size // tower.config.num_heads
        self._window: int = tower.config.window_size // options.merge_size // options.patch_size  # merged tokens
        self._whole = frozenset(tower.config.fullatt_block_indexes)

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Qwen25VLEncoder:
        """Build the tower from the checkpoint's vision tensors; the language model is never read.

        Raises:
            UsageError: the checkpoint lacks a tensor of the tower, has one too many, or one of another shape.
        """
        config = Qwen2_5_VLConfig.from_dict(dict(checkpoint.config)).vision_config
        tower = load_tower(
            lambda: Qwen2_5_VisionTransformerPretrainedModel(config), checkpoint, PREFIXES, device=device, dtype=dtype
        )
        return cls(tower, Qwen25VLOptions.from_checkpoint(checkpoint, (Modality.IMAGE,)))

    def encode_patches(self, states: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """See `PatchGridEncoder`."""
        device = states.device
        # Neighbors first, then windows of one length together; layers of a kind follow one another in one order.
        order, lengths = window_order(grids, merge_size=self._merge, window=self._window)
        places = merge_order(grids, self._merge)
        frames = Segments(frame_lengths(grids), device=device)
        windows = Segments(lengths, device=device)
        there = torch.from_numpy(order).to(device)
        back = torch.argsort(there)
        rotary = Rotary(places, head_dim=self._head_dim, device=device)
        shuffled = places.reshape(-1, self._merge**2, 2)[order].reshape(-1, 2)
        window_rotary = Rotary(shuffled, head_dim=self._head_dim, device=device)
        in_windows = False
        for number, block in enumerate(self._tower.blocks):
            if in_windows == (number in self._whole):
                in_windows = not in_windows
                states = self._moved(states, there if in_windows else back)
            normed, layer = block.norm1(states), block.attn
            states += self_attention(
                normed,
                layer.qkv,
                layer.proj,
                n_heads=self._heads,
                rotary=window_rotary if in_windows else rotary,
                segments=windows if in_windows else frames,
            )
            states += block.mlp(block.norm2(states))
        rows: torch.Tensor = self._tower.merger(states)  # [n_rows, hidden]
        return rows[back] if in_windows else rows

    def _moved(self, states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Patches in another order of their merged tokens."""
        units = states.view(-1, self._merge**2, states.shape[-1])  # [n_tokens, patches of a token, width]
        return units[order].flatten(0, 1)
