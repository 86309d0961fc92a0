"""Questions about arrays and tensors, asked without importing torch. Knows nothing of media or models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from mm_plugin.errors import UsageError


def as_ids(value: Any, *, what: str = "input_ids") -> np.ndarray:
    """Any one-dimensional integer sequence, array or tensor as int64; always a new array.

    Shape:
        returns [n] int64.

    Raises:
        UsageError: it is not one-dimensional, or not integers.
    """
    if isinstance(value, AbstractSet | Mapping):
        raise UsageError(f"{what}: a {type(value).__name__} has no order", argument=what)
    try:
        if hasattr(value, "detach"):  # a torch tensor, without importing torch
            value = value.detach().cpu().numpy()
        array = np.asarray(value if isinstance(value, np.ndarray | Sequence) else list(value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(f"{what}: {type(value).__name__} is no sequence of integers", argument=what) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{what}: expected one dimension of integers, got {array.dtype} {array.shape}", argument=what)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{what}: an id does not fit 64 bits with a sign", argument=what)
    return array.astype(np.int64, copy=True)
