"""Framed digests: source keys and identities. Knows no medium, only values; two different values never share an encoding.

The frame of a value is a one-byte tag, then what the tag says, every variable part led by its length as 8 big-endian bytes:

    N none | T true | F false | i int: sign byte, length, magnitude big-endian | f float: 8 bytes IEEE 754 big-endian
    s str: length, UTF-8 | b bytes: length, bytes | l list or tuple: count, frames | d mapping: count, (frame of key,
    frame of value) sorted by the key's frame | a array or tensor: its `feature_digest`, 32 bytes

`FORMAT_VERSION` is part of every digest below and rises when any of this changes.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from mm_plugin.errors import UsageError

FORMAT_VERSION = 1
_LENGTH = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
# Below this many bytes starting threads costs more than it saves.
_PARALLEL_BYTES = 1 << 20


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of raw bytes, by as many threads as the machine has where that pays.

    Returns:
        32 bytes.
    """
    threads = blake3.AUTO if len(data) >= _PARALLEL_BYTES else 1
    return blake3(data, max_threads=threads).digest()


def frame(value: Any) -> bytes:
    """The framed, typed encoding of a value; see the module's docstring.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, mapping, enum member, msgspec struct, numpy array or scalar,
            torch tensor; nested as deeply as Python allows.

    Raises:
        UsageError: a value of another type.
    """
    out: list[bytes] = []
    try:
        _frame(value, out)
    except RecursionError:
        raise UsageError("a value that is nested too deeply has no identity", argument="value") from None
    return b"".join(out)


def _frame(value: Any, out: list[bytes]) -> None:
    if value is None:
        out.append(b"N")
    elif value is True or value is False:
        out.append(b"T" if value else b"F")
    elif isinstance(value, enum.Enum):
        # Before int and str: members of IntEnum are both.
        _frame([type(value).__name__, value.name], out)
    elif isinstance(value, int):
        magnitude = abs(value)
        data = magnitude.to_bytes((magnitude.bit_length() + 7) // 8, "big")
        out.append(b"i" + (b"-" if value < 0 else b"+") + _LENGTH.pack(len(data)) + data)
    elif isinstance(value, float):
        out.append(b"f" + _DOUBLE.pack(value))
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        out.append(b"s" + _LENGTH.pack(len(data)) + data)
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        out.append(b"b" + _LENGTH.pack(len(data)) + data)
    elif isinstance(value, list | tuple):
        out.append(b"l" + _LENGTH.pack(len(value)))
        for part in value:
            _frame(part, out)
    elif isinstance(value, Mapping):
        pairs = sorted((frame(key), frame(part)) for key, part in value.items())
        out.append(b"d" + _LENGTH.pack(len(pairs)))
        for key, part in pairs:
            out.append(key + part)
    elif isinstance(value, msgspec.Struct):
        _frame([type(value).__name__, msgspec.structs.asdict(value)], out)
    elif _is_array(value):
        out.append(b"a" + feature_digest(value))
    else:
        raise UsageError(f"a value of type {type(value).__name__} has no identity", argument="value")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    # Who holds a tensor has imported torch; who has not need not pay for it here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def feature_digest(value: Any) -> bytes:
    """BLAKE3 over the frame of (dtype, shape, BLAKE3 of the raw bytes): the identity of an array, wherever and however it lies.

    Equal for numpy and torch, for every memory layout, device and process. The raw bytes are little-endian, in C order.

    Args:
        value: numpy array or scalar, or torch tensor; any dtype but object, any device.

    Returns:
        32 bytes.

    Raises:
        UsageError: it is no array, or one whose bytes do not say its value (object, sparse, quantised).
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        name = array.dtype.name
        if array.dtype.kind not in "biufc":
            raise UsageError(f"an array of dtype {array.dtype} has no identity", argument="feature")
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        shape = np.shape(value)
    elif _is_tensor(value):
        import torch

        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise UsageError("a sparse, quantised or meta tensor has no identity", argument="feature")
        name = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        # flatten before view: a tensor without dimensions cannot be viewed as bytes.
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy()
    else:
        raise UsageError(f"a value of type {type(value).__name__} is no array", argument="feature")
    raw = digest(array.reshape(-1).view(np.uint8).data)
    return digest(frame([name, list(shape), raw]))


def item_identity(
    spec_name: str,
    output_version: int,
    modality: int,
    format: str,
    feature: bytes,
    fields: Mapping[str, Any],
    *,
    salt: str | bytes | None = None,
) -> bytes:
    """What the model sees: equal identity means equal rows and equal positions.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its mark, 1 to 3.
        format: the item's input format.
        feature: 32 bytes from `feature_digest` of the feature or the rows.
        fields: every field that encoder or positions read.
        salt: separates tenants.

    Returns:
        32 bytes.
    """
    parts = ["mm-plugin/item", FORMAT_VERSION, spec_name, output_version, int(modality), format, feature, fields, salt]
    return digest(frame(parts))


def source_key(
    spec_name: str,
    output_version: int,
    modality: int,
    source: bytes,
    options: Mapping[str, Any],
    context: Any,
    *,
    salt: str | bytes | None = None,
) -> bytes:
    """What makes a repeated medium free: the key of the preprocess cache.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its mark, 1 to 3.
        source: 32 bytes, the digest of the encoded source or of the pixels.
        options: the effective options of the modality, after call, load, checkpoint and default are resolved.
        context: request-level facts that the item depends on.
        salt: separates tenants.

    Returns:
        32 bytes.
    """
    parts = [
        "mm-plugin/source",
        FORMAT_VERSION,
        spec_name,
        output_version,
        int(modality),
        source,
        options,
        context,
        salt,
    ]
    return digest(frame(parts))
