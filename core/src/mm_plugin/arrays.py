"""Questions about numpy arrays and torch tensors, asked without importing torch. Knows nothing of media or models.

Whoever holds a tensor has imported torch already, so a process without torch pays nothing here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from mm_plugin.errors import UsageError

_OVERHEAD = 64  # bytes of a Python object, roughly


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor, of any device and layout."""
    # While another thread imports torch, the module is there and its names are not.
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class is not None and isinstance(value, tensor_class)


def torch_of_tensors() -> Any:
    """The torch module, for callers that hold a tensor, so that it is imported already."""
    return sys.modules["torch"]


def is_masked(value: Any, depth: int = 32) -> bool:
    """Whether the value is a masked array or a masked tensor, or a list of such; a masked element has no value.

    Args:
        value: anything.
        depth: how deep in lists it is looked for; numpy makes no array of deeper ones.
    """
    if isinstance(value, list | tuple):
        return depth > 0 and any(is_masked(part, depth - 1) for part in value if not isinstance(part, int | float))
    if isinstance(value, np.ma.MaskedArray):
        return True
    masked = getattr(sys.modules.get("torch.masked"), "MaskedTensor", None)
    return masked is not None and isinstance(value, masked)


def is_dense(value: Any) -> bool:
    """Whether the value is a numpy array of numbers or booleans, or a strided torch tensor that is not quantized; not masked."""
    if is_masked(value):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return is_tensor(value) and value.layout is sys.modules["torch"].strided and not value.is_quantized


def is_floating(value: Any) -> bool:
    """Whether an array or tensor has a floating-point dtype."""
    return value.dtype.kind == "f" if isinstance(value, np.ndarray) else bool(value.is_floating_point())


def num_bytes(value: Any) -> int:
    """Bytes of an array's or tensor's own elements; 0 for anything else."""
    return int(getattr(value, "nbytes", 0))


def storage_bytes(value: Any) -> int:
    """Bytes that a value keeps alive: of a view, the whole array or storage below it; of a container, all of its parts."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return int(value.nbytes)
    if is_tensor(value):
        return int(value.untyped_storage().nbytes())
    if isinstance(value, Mapping):
        return _OVERHEAD + sum(storage_bytes(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return _OVERHEAD + sum(map(storage_bytes, value))
    return _OVERHEAD + (len(value) if isinstance(value, str | bytes) else 0)


def owned(value: Any) -> Any:
    """A copy in memory of its own that torch takes as it is: C order, the machine's byte order, no subclass, no gradient.

    Args:
        value: numpy array or torch tensor of any device; anything else, masked ones among it, is returned as it is.

    Example:
        >>> mirrored = np.arange(3, dtype=">i4")[::-1]
        >>> copied = owned(mirrored)
        >>> copied.tolist(), copied.strides, copied.dtype.isnative
        ([2, 1, 0], (4,), True)
    """
    if is_masked(value):
        return value
    if isinstance(value, np.ndarray):
        return np.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True, subok=False)
    if is_tensor(value):
        torch = torch_of_tensors()
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)
    return value


def detached(feature: Any, *sources: np.ndarray) -> Any:
    """The feature in memory of its own, in a form that torch takes.

    A feature that shares the memory of a source is copied. So is a numpy array that torch would not take (negative strides, another
    byte order, a subclass), and a view that keeps more than twice its own bytes alive.

    Args:
        feature: numpy array or torch tensor; anything else is returned as it is.
        sources: the arrays that the feature was made from, contiguous.
    """
    if isinstance(feature, np.ndarray):
        shared = any(np.may_share_memory(feature, source) for source in sources)
        return owned(feature) if shared or not _is_plain(feature) else feature
    if is_tensor(feature) and feature.device.type == "cpu":
        storage = feature.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for source in sources:
            first = source.ctypes.data
            if begin < first + source.nbytes and first < end:
                return owned(feature)
    return feature


def _is_plain(array: np.ndarray) -> bool:
    """Whether torch takes an array, and it keeps no more than twice its own bytes alive."""
    usable = array.dtype.isnative and array.flags.aligned and all(step >= 0 for step in array.strides)
    return usable and type(array) is np.ndarray and storage_bytes(array) <= 2 * array.nbytes


def unshared(feature: Any) -> Any:
    """The feature, copied if it is a view of a larger array or storage, which others may be views of too."""
    if is_dense(feature) and storage_bytes(feature) > num_bytes(feature):
        return feature.copy() if isinstance(feature, np.ndarray) else feature.clone()
    return feature


def writable(value: Any) -> Any:
    """The value, copied if it is a read-only numpy array, from which torch would make no tensor without a warning."""
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


def frozen(value: Any) -> Any:
    """A read-only copy of a numpy array, safe to share between requests; anything else is returned as it is."""
    if isinstance(value, np.ndarray) and not is_masked(value):
        value = owned(value)
        value.flags.writeable = False
    return value


def as_ids(value: Any, *, what: str = "input_ids") -> np.ndarray:
    """Any one-dimensional sequence, array or tensor of integers as int64; always a new array.

    Args:
        value: the ids.
        what: the argument's name, for messages.

    Shape:
        returns [n] int64.

    Raises:
        UsageError: it is not one-dimensional, or not integers.
    """
    if is_masked(value):
        raise UsageError(f"{what}: expected a plain array, got a masked one; pass its .compressed()", argument=what)
    if isinstance(value, AbstractSet | Mapping):
        raise UsageError(f"{what}: expected ids in order, got an unordered {type(value).__name__}", argument=what)
    try:
        if is_tensor(value):
            value = value.detach().cpu().numpy()
        array = np.asarray(value if isinstance(value, np.ndarray | Sequence) else list(value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"{what}: expected a sequence of integers, got {type(value).__name__}", argument=what
        ) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{what}: expected one dimension of integers, got {array.dtype} {array.shape}", argument=what)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{what}: expected ids below 2**63, got {int(array.max())}", argument=what)
    return array.astype(np.int64, copy=True)
