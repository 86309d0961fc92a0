"""Vision towers over patch grids: patches embedded in any form that items bring, blocks that attend within frames or windows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch.nn import functional

from mm_plugin.checkpoint import Checkpoint
from mm_plugin.encoder.base import Encoder, EncodesImages, EncodesVideos
from mm_plugin.encoder.layers import Rotary2D, VarlenAttention, self_attention
from mm_plugin.encoder.loading import load_tower
from mm_plugin.encoder.results import as_tensor
from mm_plugin.families.patch_grid.options import PatchGridOptions
from mm_plugin.items import Modality, MultimodalDataItem

# Temporal patches, rows and columns of one item, in patches.
Grid = tuple[int, int, int]


class PatchEmbedding:
    """A convolution whose stride is its kernel, as one linear map over patches in each form that items bring. Final.

    Compact patches are normalized here, by the arithmetic of the float form. An image is the same in all frames of a patch, so
    the weights of the frames are summed for it. Products are in float32 whatever the tower's dtype, and rounded once.

    Args:
        weight: of the convolution.
        bias: of the convolution, or None.
        mean: per channel, of levels scaled to 0..1.
        std: per channel, of levels scaled to 0..1.
        rescale: scales a level to 0..1.
        dtype: of the embedded patches.

    Shape:
        `weight` is [width, 3, frames, side, side], `bias` [width], floating point, both on the tower's device.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        rescale: float,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        width, channels, frames = weight.shape[:3]
        plain = weight.detach().reshape(width, channels, frames, -1)  # [width, 3, frames, area]
        self._whole = plain.flatten(1).float()
        # Summed in float64, rounded once.
        self._image = plain.double().sum(dim=2).flatten(1).float()
        self._bias = None if bias is None else bias.detach().float()
        levels = torch.tensor(1.0 / rescale, dtype=torch.float32)
        self._mean = (torch.tensor(mean, dtype=torch.float32) * levels)[:, None].to(weight.device)  # [3, 1]
        self._std = (torch.tensor(std, dtype=torch.float32) * levels)[:, None].to(weight.device)

    def __call__(self, feature: torch.Tensor) -> torch.Tensor:
        """Embedded patches.

        Args:
            feature: patches of one item, on the tower's device; left unchanged.

        Shape:
            `feature` is [n_patches, 3, area] uint8 of an image, [n_patches, 3, frames * area] uint8 of a video,
            [n_patches, 3 * frames * area] uint8 of either, or the same floating point, normalized; returns [n_patches, width].
        """
        # A conversion makes a copy, which may be written to.
        if feature.dtype == torch.uint8:
            channels = feature.reshape(len(feature), 3, -1)
            floats = channels.float().sub_(self._mean).div_(self._std).flatten(1)
        else:
            floats = feature.float().flatten(1)
        weight = self._whole if floats.shape[1] == self._whole.shape[1] else self._image
        return functional.linear(floats, weight, self._bias).to(self._dtype)


class PatchGridEncoder(Encoder, EncodesImages, EncodesVideos):
    """One pass of a vision tower over the patches of all images, or all videos, of a batch. Abstract.

    A model says how its tower is constructed and what becomes of the embedded patches; `run_blocks` does the latter for towers
    of transformers' Qwen2-VL kind.

    Args:
        tower: the vision tower on its device, in inference mode; its `patch_embed.proj` is the convolution over patches.
        options: the checkpoint's numbers for patches and normalization.

    Attributes:
        Options: the model's options.
        prefixes: under which a checkpoint's tensors of the tower may be found, such as `("visual.", "model.visual.")`.
        tower: see the arguments.
        options: see the arguments.
    """

    Options: ClassVar[type[PatchGridOptions]]
    prefixes: ClassVar[tuple[str, ...]]

    def __init__(self, tower: Any, options: PatchGridOptions) -> None:
        self.tower, self.options = tower, options
        proj = tower.patch_embed.proj
        self._merge, self._width = options.merge_size, proj.weight.shape[0]
        self._place: torch.device = proj.weight.device
        self._embed = PatchEmbedding(
            proj.weight,
            proj.bias,
            mean=options.image_mean,
            std=options.image_std,
            rescale=options.rescale_factor,
            dtype=proj.weight.dtype,
        )

    @classmethod
    @abstractmethod
    def make_tower(cls, config: Mapping[str, Any]) -> torch.nn.Module:
        """Construct the vision tower; called while the meta device is in force, so its weights take no memory.

        Args:
            config: the checkpoint's config.json.
        """

    @classmethod
    def computed_tensors(cls, tower: torch.nn.Module, config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:  # noqa: ARG003
        """The tensors that the tower computes in its constructor and no file holds, by their full names.

        None here: override it where the tower has some, or let `make_tower` delete what `encode_patches` does not use.

        Args:
            tower: with its weights; these tensors are on the meta device.
            config: the checkpoint's config.json.
        """
        return {}

    @abstractmethod
    def encode_patches(self, states: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Embeddings of all items, in their order.

        Args:
            states: embedded patches of all items; may be written to.
            grids: of each item.

        Shape:
            `states` is [n_patches, width]; returns [n_merged, hidden], one embedding per merged patch.
        """

    @classmethod
    @final
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Self:
        """Build the tower from the checkpoint's vision tensors; the language model is never read.

        Raises:
            UsageError: the checkpoint lacks a tensor of the tower, or has an unexpected one, or one of another shape.
        """
        config = dict(checkpoint.config)
        tower = load_tower(
            lambda: cls.make_tower(config),
            checkpoint,
            cls.prefixes,
            device=device,
            dtype=dtype,
            computed=lambda tower: cls.computed_tensors(tower, config),
        )
        return cls(tower, cls.Options.from_checkpoint(checkpoint, (Modality.IMAGE,)))

    @final
    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Embeddings [num_tokens, hidden] of each image, from one pass of the tower over all of them."""
        return self._encode(items, "image_grid_thw")

    @final
    def get_video_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Embeddings [num_tokens, hidden] of each video, from one pass of the tower over all of them."""
        return self._encode(items, "video_grid_thw")

    def _encode(self, items: Sequence[MultimodalDataItem], field: str) -> list[torch.Tensor]:
        grids: list[Grid] = [tuple(item.get(field)[0].tolist()) for item in items]
        with torch.inference_mode():
            states = torch.cat([self._embed(as_tensor(item.feature).to(self._place)) for item in items])
            embeddings = self.encode_patches(states, grids)
        return list(
            torch.split(embeddings, [steps * rows * columns // self._merge**2 for steps, rows, columns in grids])
        )

    @final
    def run_blocks(
        self,
        states: torch.Tensor,
        grids: Sequence[Grid],
        *,
        window: int | None = None,
        frame_blocks: Collection[int] = (),
    ) -> torch.Tensor:
        """Pass embedded patches through the tower's `blocks` and `merger`, with rotary positions by row and column.

        A block has `norm1`, `attn.qkv`, `attn.proj`, `norm2` and `mlp`; the tower's config has `num_heads`.

        Args:
            states: embedded patches of all items; written to.
            grids: of each item.
            window: merged patches along a side of the windows within which blocks attend; where None, all blocks attend within
                whole frames.
            frame_blocks: indices of the blocks that attend within whole frames although the others have windows.

        Shape:
            `states` is [n_patches, width]; returns [n_merged, hidden].
        """
        positions = merge_order(grids, self._merge)
        frames = self._attention(positions, frame_lengths(grids))
        if window is None:
            for block in self.tower.blocks:
                states = self._run_block(block, states, *frames)
            merged: torch.Tensor = self.tower.merger(states)
            return merged
        # Blocks of one kind that follow one another share an order, so patches move only where the kind changes.
        order, lengths = window_order(grids, merge_size=self._merge, window=window)
        windows = self._attention(positions.reshape(-1, self._merge**2, 2)[order].reshape(-1, 2), lengths)
        into_windows = torch.from_numpy(order).to(states.device)
        into_frames = torch.argsort(into_windows)
        in_windows = False
        for index, block in enumerate(self.tower.blocks):
            if in_windows == (index in frame_blocks):
                in_windows = not in_windows
                states = self._reorder(states, into_windows if in_windows else into_frames)
            states = self._run_block(block, states, *(windows if in_windows else frames))
        embeddings: torch.Tensor = self.tower.merger(states)
        return embeddings[into_frames] if in_windows else embeddings

    def _attention(self, positions: np.ndarray, lengths: Sequence[int]) -> tuple[Rotary2D, VarlenAttention]:
        head_dim = self._width // self.tower.config.num_heads
        rotary = Rotary2D(positions, head_dim=head_dim, device=self._place)
        return rotary, VarlenAttention(lengths, device=self._place)

    def _run_block(
        self, block: Any, states: torch.Tensor, rotary: Rotary2D, attention: VarlenAttention
    ) -> torch.Tensor:
        heads, layer = self.tower.config.num_heads, block.attn
        normed = block.norm1(states)
        states += self_attention(normed, layer.qkv, layer.proj, n_heads=heads, rotary=rotary, attention=attention)
        states += block.mlp(block.norm2(states))
        return states

    def _reorder(self, states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Patches in another order of their merged patches."""
        merged = states.view(-1, self._merge**2, states.shape[-1])  # [n_merged, patches of one, width]
        return merged[order].flatten(0, 1)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each temporal patch of all items, for a `VarlenAttention` within frames.

    Args:
        grids: of each item.

    >>> frame_lengths([(1, 4, 6), (2, 2, 2)])
    [24, 4, 4]
    """
    return [rows * columns for steps, rows, columns in grids for _ in range(steps)]


def merge_order(grids: Sequence[Grid], merge_size: int) -> np.ndarray:
    """Row and column of each patch, in the order in which patches are laid out: merged row, merged column, row, column.

    Args:
        grids: of each item.
        merge_size: patches along a side of a merged patch.

    Shape:
        returns [n_patches, 2] int64.

    >>> merge_order([(1, 2, 4)], 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    parts = []
    for steps, rows, columns in grids:
        places = np.indices((rows, columns)).transpose(1, 2, 0)  # [rows, columns, 2]
        blocks = places.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
        parts.append(np.tile(blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2), (steps, 1)))
    return np.concatenate(parts)


def window_order(grids: Sequence[Grid], *, merge_size: int, window: int) -> tuple[np.ndarray, list[int]]:
    """An order of merged patches that puts each window of a frame together, and windows of one length next to one another.

    Args:
        grids: of each item.
        merge_size: patches along a side of a merged patch.
        window: merged patches along a side of a window; windows at the right and lower edges are smaller.

    Shape:
        returns order [n_merged] int64, indices into the merged patches as they are laid out, and the length of each window in
        that order, patches.

    >>> order, lengths = window_order([(1, 2, 6)], merge_size=2, window=2)
    >>> order.tolist(), lengths
    ([0, 1, 2], [8, 4])
    """
    owners, count = [], 0
    for steps, rows, columns in grids:
        high, wide = rows // merge_size, columns // merge_size
        across = -(-wide // window)
        row, column = np.indices((high, wide)) // window
        frame = (row * across + column).ravel()
        per_frame = -(-high // window) * across
        owners.append((np.arange(steps)[:, None] * per_frame + frame).ravel() + count)
        count += steps * per_frame
    owner = np.concatenate(owners)  # the window of each merged patch
    sizes = np.bincount(owner, minlength=count)
    order = np.lexsort((owner, -sizes[owner]))  # stable: the patches of a window stay in their order
    ranked = np.argsort(-sizes, kind="stable")
    return order.astype(np.int64), (sizes[ranked] * merge_size**2).tolist()
