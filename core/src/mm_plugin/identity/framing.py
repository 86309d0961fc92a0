"""The framed encoding of values, and digests of arrays. Knows no media; two different values never share an encoding.

The frame of a value is a one-byte tag, then what the tag says, every variable part led by its length as 8 big-endian bytes:

    N none | T true | F false | i int: sign byte, length, magnitude big-endian | f float: 8 bytes IEEE 754 big-endian
    s str: length, UTF-8 | b bytes: length, bytes | l list or tuple: count, frames | d mapping: count, (frame of key,
    frame of value) sorted by the key's frame | e enum member: frame of [name, value] | m msgspec struct: frame of [tag or
    None, fields as a mapping] | a array or tensor: its `feature_digest`, 32 bytes | p PIL image: frame of [mode, width,
    height, palette as RGBA bytes or None, transparency, BLAKE3 of its bytes]

No frame holds the name of a class or of a module, so moving or renaming one changes no digest. Where a value may be one of
several structs, their msgspec tags tell them apart.

`FORMAT_VERSION` is part of every digest below and rises when any of this changes.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import is_tensor, torch_of_tensors
from mm_plugin.errors import UsageError
from mm_plugin.identity.digests import Digests, digest

FORMAT_VERSION = 1


_LENGTH = struct.Struct(">Q")


_DOUBLE = struct.Struct(">d")


def frame(value: Any) -> bytes:
    """The framed, typed encoding of a value; see the module's docstring.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, mapping, enum member, msgspec struct, numpy array or scalar,
            torch tensor, PIL image; nested as deeply as Python allows.

    Raises:
        UsageError: a value of another type.
    """
    out: list[bytes] = []
    try:
        _frame(value, out)
    except RecursionError:
        raise UsageError("value: nested too deeply to be framed", argument="value") from None
    return b"".join(out)


def _frame(value: Any, out: list[bytes]) -> None:
    if value is None:
        out.append(b"N")
    elif value is True or value is False:
        out.append(b"T" if value else b"F")
    elif isinstance(value, enum.Enum):
        # Before int and str: members of IntEnum are both.
        out.append(b"e")
        _frame([value.name, value.value], out)
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
        if isinstance(value, memoryview) and (value.format != "B" or value.ndim != 1):
            raise UsageError("value: expected a memoryview of bytes, got another format or shape", argument="value")
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
        out.append(b"m")
        _frame([value.__struct_config__.tag, msgspec.structs.asdict(value)], out)
    elif _is_array(value):
        out.append(b"a" + feature_digest(value))
    elif _is_image(value):
        out.append(b"p")
        palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
        transparency = value.info.get("transparency")
        if not isinstance(transparency, int | bytes | tuple | None):
            raise UsageError(
                f"transparency of a PIL image must be an int, bytes or a tuple, got {type(transparency).__name__}",
                argument="value",
            )
        palette_bytes = None if palette is None else bytes(palette)
        _frame([value.mode, value.width, value.height, palette_bytes, transparency, digest(value.tobytes())], out)
    else:
        raise UsageError(f"value: a {type(value).__name__} cannot be framed", argument="value")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) or is_tensor(value)


def _is_image(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


def feature_digest(value: Any, digests: Digests | None = None) -> bytes:
    """BLAKE3 over the frame of (dtype, shape, BLAKE3 of the raw bytes): the identity of an array.

    Equal for numpy and torch, for every memory layout, device and process. The raw bytes are little-endian, in C order.

    Args:
        value: numpy array or scalar, or torch tensor; any dtype except object, any device.
        digests: what hashes on other devices; the core's own where None.

    Returns:
        32 bytes.

    Raises:
        UsageError: it is not an array, or its bytes do not determine its value (object, long double, sparse, quantized).
    """
    return feature_digests([value], digests)[0]


def feature_digests(values: Sequence[Any], digests: Digests | None = None) -> list[bytes]:
    """`feature_digest` of many values; those on one device are hashed together, in place.

    Args:
        values: as for `feature_digest`, in any mixture.
        digests: as for `feature_digest`.

    Returns:
        32 bytes for each.
    """
    digests = Digests() if digests is None else digests
    described = [_describe(value) for value in values]
    raw: list[bytes] = [b""] * len(described)
    elsewhere: dict[Any, list[int]] = {}
    for index, (_, _, data) in enumerate(described):
        if isinstance(data, np.ndarray):
            raw[index] = digest(data.data)
        else:
            elsewhere.setdefault(data.device, []).append(index)
    for indices in elsewhere.values():
        for index, found in zip(indices, digests.of([described[index][2] for index in indices]), strict=True):
            raw[index] = found
    return [digest(frame([name, shape, found])) for (name, shape, _), found in zip(described, raw, strict=True)]


def _describe(value: Any) -> tuple[str, list[int], Any]:
    """dtype, shape, and the raw bytes: [n] uint8 as numpy on the CPU, as torch elsewhere."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # The padding bytes of a long double are arbitrary.
        if array.dtype.kind not in "biufc" or array.dtype.char in "gG" or isinstance(value, np.ma.MaskedArray):
            raise UsageError(f"feature: an array of dtype {array.dtype} cannot be digested", argument="feature")
        flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
        return array.dtype.name, list(np.shape(value)), flat.view(np.uint8)
    if not is_tensor(value):
        raise UsageError(
            f"feature: expected a numpy array or torch tensor, got {type(value).__name__}", argument="feature"
        )
    torch = torch_of_tensors()

    odd = value.is_nested or value.is_quantized or value.device.type == "meta"
    if value.layout is not torch.strided or odd:
        raise UsageError("feature: a sparse, nested, quantized or meta tensor cannot be digested", argument="feature")
    # flatten before view: a tensor without dimensions cannot be viewed as bytes.
    tensor = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if tensor.stride(0) != 1:  # of one element or none, which count as contiguous and yet cannot be viewed
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    data = tensor.view(torch.uint8)
    return (
        str(value.dtype).removeprefix("torch."),
        list(value.shape),
        data.numpy() if data.device.type == "cpu" else data,
    )
