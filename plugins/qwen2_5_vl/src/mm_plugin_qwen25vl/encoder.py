"""Qwen2.5-VL's vision tower: transformers' modules, loaded alone from a checkpoint. Most blocks attend within windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from mm_plugin.families.patch_grid import Grid, PatchGridEncoder
from mm_plugin_qwen25vl.options import Qwen25VLOptions


class Qwen25VLEncoder(PatchGridEncoder):
    """Patches in, one embedding per merged patch out. A few blocks attend within a frame, the others within its windows."""

    Options = Qwen25VLOptions
    # As released checkpoints name the tower's tensors, and as newer transformers saves them.
    prefixes = ("visual.", "model.visual.")

    @classmethod
    def make_tower(cls, config: Mapping[str, Any]) -> torch.nn.Module:
        """See `PatchGridEncoder`."""
        tower: torch.nn.Module = Qwen2_5_VisionTransformerPretrainedModel(
            Qwen2_5_VLConfig.from_dict(config).vision_config
        )
        del tower.rotary_pos_emb  # its frequencies are in no file, and `run_blocks` has its own
        return tower

    def encode_patches(self, states: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See `PatchGridEncoder`."""
        vision = self.tower.config
        window = vision.window_size // self.options.merge_size // self.options.patch_size  # merged patches along a side
        return self.run_blocks(states, grids, window=window, frame_blocks=vision.fullatt_block_indexes)
