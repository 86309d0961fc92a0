"""Layers that vision towers share: attention over sequences of any length, two-dimensional rotary angles. Numbers are arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

# Dtypes for which torch has a kernel that takes sequences of different lengths in one call.
_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
# The oldest compute capability on which that kernel runs.
_AMPERE = (8, 0)


class VarlenAttention:
    """Softmax attention within consecutive sequences of a packed batch. Final; built on the host, once for all layers.

    Neighboring sequences of one length are computed together, without padding, so the fewer changes of length, the fewer calls.
    On devices for which torch has a kernel for sequences of any length, all of them are one call.

    Args:
        lengths: tokens in each sequence; at least one sequence, none of them empty.
        device: torch device.

    Attributes:
        runs: (first token, sequences, tokens in each) of each run of sequences of one length.

    >>> VarlenAttention([4, 4, 2], device="cpu").runs
    [(0, 2, 4), (8, 1, 2)]
    """

    def __init__(self, lengths: Sequence[int], *, device: Any) -> None:
        self.runs: list[tuple[int, int, int]] = []
        start = 0
        for length, same in itertools.groupby(lengths):
            count = len(list(same))
            self.runs.append((start, count, length))
            start += count * length
        self._bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
        self._longest = max(lengths)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention scaled by 1 / sqrt(head_dim); a token attends to the tokens of its own sequence.

        Args:
            query: of all sequences, one after another.
            key: like `query`.
            value: like `query`.

        Shape:
            `query`, `key`, `value` and the result are [n_tokens, n_heads, head_dim], floating point, on the device.
        """
        kernel = _varlen_kernel(query.device) if query.is_cuda and query.dtype in _VARLEN_DTYPES else None
        if kernel is not None:
            attended: torch.Tensor = kernel(query, key, value, self._bounds, self._bounds, self._longest, self._longest)
            return attended
        done = []
        for start, count, length in self.runs:
            part = slice(start, start + count * length)
            batched = [
                tensor[part].reshape(count, length, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value)
            ]  # [count, n_heads, length, head_dim]
            mixed = functional.scaled_dot_product_attention(batched[0], batched[1], batched[2])
            done.append(mixed.transpose(1, 2).flatten(0, 1))
        return done[0] if len(done) == 1 else torch.cat(done)


def _varlen_kernel(device: torch.device) -> Callable[..., Any] | None:
    """Torch's own attention over sequences of any length; None in older versions, and on devices before Ampere."""
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found


class Rotary2D:
    """Position embedding by rotation over a grid: one half of the angles follows the row, the other the column. Final.

    Args:
        positions: row and column of each token.
        head_dim: channels of an attention head; a multiple of 4.
        theta: base of the frequencies.
        device: torch device.

    Shape:
        `positions` is [n_tokens, 2] int64, on the CPU.

    >>> Rotary2D(np.array([[0, 0], [0, 1]]), head_dim=8, device="cpu").apply(torch.ones(2, 1, 8)).shape
    torch.Size([2, 1, 8])

    Source: RoFormer, arXiv:2104.09864; axes as in Qwen2-VL, arXiv:2409.12191, section 2.1.
    """

    def __init__(self, positions: np.ndarray, *, head_dim: int, theta: float = 10_000.0, device: Any) -> None:
        half = head_dim // 2
        frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)  # [head_dim / 4]
        angles = torch.from_numpy(positions)[:, :, None].float() * frequencies  # [n_tokens, 2, head_dim / 4]
        angles = angles.flatten(1).to(device)  # [n_tokens, head_dim / 2]
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]  # [n_tokens, 1, head_dim / 2]

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys; computed in float32, returned in the dtype of `states`.

        Args:
            states: a query or key of each token and head; left unchanged.

        Shape:
            `states` and the result are [n_tokens, n_heads, head_dim], floating point.
        """
        left, right = states.float().chunk(2, dim=-1)
        rotated = torch.empty(states.shape, dtype=torch.float32, device=states.device)
        new_left, new_right = rotated.chunk(2, dim=-1)
        torch.mul(left, self._cos, out=new_left).addcmul_(right, self._sin, value=-1)
        torch.mul(right, self._cos, out=new_right).addcmul_(left, self._sin)
        return rotated.to(states.dtype)


def self_attention(
    states: torch.Tensor, qkv: Any, proj: Any, *, n_heads: int, rotary: Rotary2D, attention: VarlenAttention
) -> torch.Tensor:
    """Self-attention of a layer whose queries, keys and values come from one linear map.

    Args:
        states: input of the layer, normalized.
        qkv: module from `width` to 3 * `width` channels: queries, keys, values.
        proj: module from `width` to `width` channels that mixes the heads.
        n_heads: attention heads.
        rotary: position embedding of queries and keys.
        attention: which tokens attend to one another.

    Shape:
        `states` and the result are [n_tokens, width], floating point, on one device.
    """
    query, key, value = qkv(states).view(len(states), 3, n_heads, -1).unbind(1)
    attended = attention(rotary.apply(query), rotary.apply(key), value)
    mixed: torch.Tensor = proj(attended.flatten(1))
    return mixed
