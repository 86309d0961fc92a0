"""Torch tensors over memory that is there already: arrays and received bytes. Imports torch when called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class _Memory:
    """Bytes by their address, which torch takes without a warning where they are read-only; kept alive by the tensor."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "shape": (len(buffer),),
            "typestr": "|u1",
            "data": (np.frombuffer(buffer, np.uint8).ctypes.data, False),
            "version": 3,
        }


def tensor_of(value: Any) -> Any:
    """A numpy array as a torch tensor over the same memory, a read-only one too; a tensor as it is.

    Nobody may write into the tensor of a read-only array. An array that is not contiguous is copied if it is read-only.
    """
    import torch

    if not isinstance(value, np.ndarray) or value.flags.writeable or not value.size:
        return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value)
    array = np.ascontiguousarray(value)
    return tensor_over(array.reshape(-1).view(np.uint8).data, array.dtype.name, list(array.shape))


def tensor_over(buffer: memoryview, dtype: str, shape: Sequence[int]) -> Any:
    """A torch tensor over bytes that it keeps alive; a read-only buffer raises no warning, and must not be written into.

    Args:
        buffer: [n] uint8, contiguous.
        dtype: a name in torch.
        shape: of n bytes.

    Raises:
        RuntimeError: the shape is not of n bytes.
        AttributeError: this version of torch does not know the dtype.
    """
    import torch

    kind = getattr(torch, dtype)
    if not len(buffer):
        return torch.empty(tuple(shape), dtype=kind)
    memory = np.asarray(_Memory(buffer))
    return torch.from_numpy(memory).view(kind).reshape(tuple(shape))
