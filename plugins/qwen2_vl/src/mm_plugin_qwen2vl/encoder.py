"""Qwen2-VL's vision tower, loaded alone from a checkpoint: transformers' module, compact features taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mm_plugin import Checkpoint, Encoder, EncodesImages, Modality, MultimodalDataItem
from mm_plugin.checkpoint import check_tensors
from mm_plugin.imaging import normalisation_table
from mm_plugin_qwen2vl.processor import Qwen2VLOptions

# How released checkpoints name the tower's tensors, and how newer transformers saves them.
PREFIXES = ("visual.", "model.visual.")


class Qwen2VLEncoder(Encoder, EncodesImages):
    """Patches in, one row per merged patch out.

    Args:
        tower: transformers' vision tower on its device, in inference mode.
        options: the checkpoint's numbers for normalisation and patches.
    """

    def __init__(self, tower: Any, options: Qwen2VLOptions) -> None:
        self._tower = tower
        self._device: torch.device = tower.patch_embed.proj.weight.device
        self._temporal = options.temporal_patch_size
        self._merge = options.merge_size
        table = normalisation_table(options.image_mean, options.image_std, rescale=options.rescale_factor, rule="torch")
        self._levels = torch.from_numpy(table).flatten().to(self._device)  # [3 * 256]
        self._channel = torch.arange(3, device=self._device)[:, None] * 256  # [3, 1]

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Qwen2VLEncoder:
        """Build the tower from the checkpoint's vision tensors; the language model is never read.

        Raises:
            UsageError: the checkpoint lacks a tensor of the tower, has one too many, or one of another shape.
        """
        config = Qwen2VLConfig.from_dict(dict(checkpoint.config)).vision_config
        with torch.device(device), _EmptyOnMeta():
            tower = Qwen2VisionTransformerPretrainedModel(config)
        tensors = checkpoint.tensors(PREFIXES, device=device, dtype=dtype)
        what = f"{checkpoint.folder}: its tensors under {' or '.join(PREFIXES)} are not those of its vision tower"
        check_tensors(tensors, tower.state_dict(), what=what)
        tower.load_state_dict(tensors, strict=True, assign=True)
        return cls(tower.eval().requires_grad_(False), Qwen2VLOptions.from_checkpoint(checkpoint, (Modality.IMAGE,)))

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Rows [num_tokens, hidden] for each image, from one pass of the tower over all of them."""
        grids = torch.tensor([item.image_grid_thw[0].tolist() for item in items])  # [n_items, 3]
        patches = torch.cat([self._normalised(item.feature) for item in items])  # [n_patches, patch_dim]
        with torch.inference_mode():
            output = self._tower(patches, grid_thw=grids.to(self._device))
        rows = output if isinstance(output, torch.Tensor) else output.pooler_output  # [n_rows, hidden]
        counts = (grids.prod(dim=1) // self._merge**2).tolist()
        return list(rows.split(counts))

    def _normalised(self, feature: Any) -> torch.Tensor:
        """Float rows of one item on the tower's device; compact patches are looked up level by level, as the reference has them."""
        moved: torch.Tensor = torch.as_tensor(feature).to(self._device, non_blocking=True)
        if moved.dtype != torch.uint8:
            return moved
        floats: torch.Tensor = self._levels[moved.long() + self._channel]  # [n_patches, 3, patch_area]
        return floats.unsqueeze(2).expand(-1, -1, self._temporal, -1).reshape(len(moved), -1)


class _EmptyOnMeta(TorchFunctionMode):
    """Inside it, what is allocated to be filled later takes no memory; what is computed is computed.

    A tower's weights come from the checkpoint. Its rotary frequencies are stored nowhere and made in its constructor, in
    another way in each version of transformers.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.empty and keywords.get("device") is None:
            keywords["device"] = "meta"
        return func(*args, **keywords)
