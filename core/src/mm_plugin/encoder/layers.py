"""Layers that vision towers share: patch embedding, rotary positions, attention over segments. Numbers are arguments."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional

from mm_plugin.encoder.base import Encoder, EncodesImages, EncodesVideos
from mm_plugin.encoder.results import as_tensor
from mm_plugin.items import MultimodalDataItem

# A kernel for segments of any length takes a call for all of them; only these dtypes have one.
_PACKED = (torch.float16, torch.bfloat16)


_AMPERE = (8, 0)


class PatchEmbedding:
    """A convolution whose stride is its kernel, as one linear map over patches in any of the forms that items bring. Final.

    Compact patches are normalized here, in the arithmetic of the float form. An image is the same in all frames of a patch, so
    for it the weights of the frames are summed. Products are in float32 whatever the tower's dtype, and rounded once.

    Args:
        weight: [width, 3, frames, side, side] of the convolution.
        bias: [width], or None.
        mean: per channel, of levels scaled to 0..1.
        std: per channel, of levels scaled to 0..1.
        rescale: scales a level to 0..1.
        dtype: of what it returns.
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
            feature: [n_patches, 3, area] uint8 of an image, [n_patches, 3, frames * area] uint8 of different frames, or
                [n_patches, 3 * frames * area] floating point, normalized.

        Shape:
            returns [n_patches, width].
        """
        # A conversion is a copy of its own, which may be written.
        levels = feature.dtype == torch.uint8
        floats = (feature.float().sub_(self._mean).div_(self._std) if levels else feature.float()).flatten(1)
        weight = self._whole if floats.shape[1] == self._whole.shape[1] else self._image
        return functional.linear(floats, weight, self._bias).to(self._dtype)


class PatchGridEncoder(Encoder, EncodesImages, EncodesVideos):
    """For towers that take the patches of all items in one pass, images and videos alike. Abstract: an author says what follows.

    Items have `image_grid_thw` or `video_grid_thw` [1, 3], in patches, and their features in any form that `PatchEmbedding` takes.

    Args:
        proj: the tower's convolution over patches, on its device.
        merge_size: patches along a side of a merged token.
        mean: per channel, of levels scaled to 0..1.
        std: per channel, of levels scaled to 0..1.
        rescale: scales a level to 0..1.
    """

    def __init__(
        self, proj: Any, *, merge_size: int, mean: Sequence[float], std: Sequence[float], rescale: float
    ) -> None:
        self._unit = merge_size**2
        weight = proj.weight
        self._place: torch.device = weight.device
        self._embed = PatchEmbedding(weight, proj.bias, mean=mean, std=std, rescale=rescale, dtype=weight.dtype)

    @abstractmethod
    def encode_patches(self, states: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Rows of all items, in their order.

        Args:
            states: [n_patches, width], embedded; may be written.
            grids: (frames, rows, columns) of each item, patches.

        Shape:
            returns [n_rows, hidden], a row for each merged token.
        """

    @final
    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Rows [num_tokens, hidden] for each image, from one pass of the tower over all of them."""
        return self._encode(items, "image_grid_thw")

    @final
    def get_video_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Rows [num_tokens, hidden] for each video, from one pass of the tower over all of them."""
        return self._encode(items, "video_grid_thw")

    def _encode(self, items: Sequence[MultimodalDataItem], field: str) -> list[torch.Tensor]:
        grids: list[tuple[int, int, int]] = [tuple(item.get(field)[0].tolist()) for item in items]
        with torch.inference_mode():
            states = torch.cat([self._embed(as_tensor(item.feature).to(self._place)) for item in items])
            rows = self.encode_patches(states, grids)
        return list(torch.split(rows, [frames * down * across // self._unit for frames, down, across in grids]))


def frame_lengths(grids: Sequence[tuple[int, int, int]]) -> list[int]:
    """Patches of each frame of all items, for `Segments` in which a frame attends to itself alone.

    Args:
        grids: (frames, rows, columns) of each item, patches.
    """
    return [rows * columns for frames, rows, columns in grids for _ in range(frames)]


class Segments:
    """Consecutive stretches of a sequence, each of which attends to itself alone. Final; made on the host, once for all layers.

    Neighbors of one length are computed together, without padding: the fewer changes of length, the fewer calls. Where torch has
    a kernel for stretches of any length, all of them are one call.

    Args:
        lengths: of each stretch, tokens; at least one.
        device: torch device.
    """

    def __init__(self, lengths: Sequence[int], *, device: Any) -> None:
        self.runs: list[tuple[int, int, int]] = []  # (first token, stretches, tokens in each)
        start = 0
        for length, same in itertools.groupby(lengths):
            count = len(list(same))
            self.runs.append((start, count, length))
            start += count * length
        self._bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
        self._longest = max(lengths)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Softmax attention inside each stretch, scaled by the root of head_dim.

        Shape:
            query, key, value and the result are [n_tokens, n_heads, head_dim].
        """
        packed = _packed_attention(query.device) if query.is_cuda and query.dtype in _PACKED else None
        if packed is not None:
            attended: torch.Tensor = packed(query, key, value, self._bounds, self._bounds, self._longest, self._longest)
            return attended
        done = []
        for start, count, length in self.runs:
            part = slice(start, start + count * length)
            stretches = [
                tensor[part].reshape(count, length, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value)
            ]  # [stretches, n_heads, tokens, head_dim]
            mixed = functional.scaled_dot_product_attention(stretches[0], stretches[1], stretches[2])
            done.append(mixed.transpose(1, 2).flatten(0, 1))
        return done[0] if len(done) == 1 else torch.cat(done)


def _packed_attention(device: torch.device) -> Callable[..., Any] | None:
    """Torch's attention over stretches of any length, where there is one: in newer versions, on devices since Ampere."""
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found


class Rotary:
    """Rotary angles of a two-dimensional grid, one half of them turned by the row and one by the column. Final.

    Args:
        positions: [n_tokens, 2] int64, row and column of each token.
        head_dim: of a head of the tower.
        theta: base of the frequencies.
        device: torch device.

    Source: RoFormer, arXiv:2104.09864; its axes as in Qwen2-VL, arXiv:2409.12191, section 2.1.
    """

    def __init__(self, positions: np.ndarray, *, head_dim: int, theta: float = 10_000.0, device: Any) -> None:
        half = head_dim // 2
        frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)  # [head_dim / 4]
        angles = torch.from_numpy(positions)[:, :, None].float() * frequencies  # [n_tokens, 2, head_dim / 4]
        angles = angles.flatten(1).to(device)  # [n_tokens, head_dim / 2]
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]  # [n_tokens, 1, head_dim / 2]

    def turn(self, states: torch.Tensor) -> torch.Tensor:
        """Turned queries or keys; computed in float32.

        Shape:
            states and the result are [n_tokens, n_heads, head_dim].
        """
        left, right = states.float().chunk(2, dim=-1)
        turned = torch.empty(states.shape, dtype=torch.float32, device=states.device)
        new_left, new_right = turned.chunk(2, dim=-1)
        torch.mul(left, self._cos, out=new_left).addcmul_(right, self._sin, value=-1)
        torch.mul(right, self._cos, out=new_right).addcmul_(left, self._sin)
        return turned.to(states.dtype)


def self_attention(
    states: torch.Tensor, qkv: Any, proj: Any, *, n_heads: int, rotary: Rotary, segments: Segments
) -> torch.Tensor:
    """Attention of a tower's layer whose three inputs come from one linear map.

    Args:
        states: [n_tokens, width].
        qkv: module from width to three times it: queries, keys, values.
        proj: module that mixes the heads.
        n_heads: heads.
        rotary: turns queries and keys.
        segments: which tokens attend to one another.

    Shape:
        returns [n_tokens, width].
    """
    query, key, value = qkv(states).view(len(states), 3, n_heads, -1).unbind(1)
    attended = segments.attend(rotary.turn(query), rotary.turn(key), value)
    mixed: torch.Tensor = proj(attended.flatten(1))
    return mixed


def merge_order(grids: Sequence[tuple[int, int, int]], merge_size: int) -> np.ndarray:
    """Row and column of each patch, in the order in which patches are laid out: merged row, merged column, row, column.

    Args:
        grids: (frames, rows, columns) of each item, patches.
        merge_size: patches along a side of a merged token.

    Shape:
        returns [n_patches, 2] int64.
    """
    parts = []
    for frames, rows, columns in grids:
        places = np.indices((rows, columns)).transpose(1, 2, 0)  # [rows, columns, 2]
        blocks = places.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
        parts.append(np.tile(blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2), (frames, 1)))
    return np.concatenate(parts)


def window_order(
    grids: Sequence[tuple[int, int, int]], *, merge_size: int, window: int
) -> tuple[np.ndarray, list[int]]:
    """An order of merged tokens in which each window of a frame stands together, windows of one length next to one another.

    Args:
        grids: (frames, rows, columns) of each item, patches.
        merge_size: patches along a side of a merged token.
        window: merged tokens along a side of a window; those at the right and lower edges are smaller.

    Shape:
        returns order [n_tokens] int64, indices into the merged tokens as they are laid out, and the length of each window in
        that order, patches.
    """
    owners, count = [], 0
    for frames, rows, columns in grids:
        high, wide = rows // merge_size, columns // merge_size
        across = -(-wide // window)
        row, column = np.indices((high, wide)) // window
        frame = (row * across + column).ravel()
        per_frame = -(-high // window) * across
        owners.append((np.arange(frames)[:, None] * per_frame + frame).ravel() + count)
        count += frames * per_frame
    owner = np.concatenate(owners)  # the window of each merged token
    sizes = np.bincount(owner, minlength=count)
    order = np.lexsort((owner, -sizes[owner]))  # stable: tokens of a window stay in their order
    ranked = np.argsort(-sizes, kind="stable")
    return order.astype(np.int64), (sizes[ranked] * merge_size**2).tolist()
