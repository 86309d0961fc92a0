"""Qwen2-VL's vision tower: transformers' modules, loaded alone from a checkpoint. All blocks attend within a frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mm_plugin.families.patch_grid import Grid, PatchGridEncoder
from mm_plugin_qwen2vl.options import Qwen2VLOptions


class Qwen2VLEncoder(PatchGridEncoder):
    """Patches in, one embedding per merged patch out."""

    Options = Qwen2VLOptions
    # As released checkpoints name the tower's tensors, and as newer transformers saves them.
    prefixes = ("visual.", "model.visual.")

    @classmethod
    def make_tower(cls, config: Mapping[str, Any]) -> torch.nn.Module:
        """See `PatchGridEncoder`."""
        tower: torch.nn.Module = Qwen2VisionTransformerPretrainedModel(Qwen2VLConfig.from_dict(config).vision_config)
        del tower.rotary_pos_emb  # its frequencies are in no file, and `run_blocks` has its own
        return tower

    def encode_patches(self, states: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See `PatchGridEncoder`."""
        return self.run_blocks(states, grids)
