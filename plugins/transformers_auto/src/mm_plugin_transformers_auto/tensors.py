"""Tensors of several items as one, and whether two tensors are equal. Knows neither processor nor model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Largest difference between two roundings of one result, in units of the dtype's precision at its largest element.
ROUNDING_UNITS = 16


def join(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Concatenate tensors along an axis, each padded with zeros to the largest size in the other dimensions.

    Args:
        parts: of one dtype and one number of dimensions.
        axis: the axis.
    """
    if len(parts) == 1:
        return parts[0]
    largest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if n == axis else most - part.shape[n] for n, most in enumerate(largest)]
        pad = [amount for most in reversed(missing) for amount in (0, most)]
        padded.append(torch.nn.functional.pad(part, pad) if any(missing) else part)
    return torch.cat(padded, dim=axis)


def is_same(left: torch.Tensor, right: Any) -> bool:
    """Whether two tensors have the same dtype, shape and elements."""
    return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)


def rounding_difference(left: torch.Tensor, right: Any) -> float | None:
    """The largest difference between two floating-point tensors that differ by rounding alone, None otherwise."""
    if not isinstance(right, torch.Tensor) or (left.dtype, left.shape) != (right.dtype, right.shape):
        return None
    if not left.is_floating_point() or not left.numel():
        return None
    largest = float((left - right).abs().max())
    bound = ROUNDING_UNITS * torch.finfo(left.dtype).eps * float(left.abs().max())
    return largest if largest <= bound else None
