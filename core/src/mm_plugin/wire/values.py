"""Values as plain msgpack with their buffers beside it, and back. Knows which arrays may travel; a table says which structs may.

A value that msgpack has is itself: None, bool, an int of 64 bits, float, str, short bytes. Every other is a list that begins with
one of the tags below, so that a list stays a list and a tuple a tuple:

    0 list: parts | 1 tuple: parts | 2 mapping: key, value, key, value, ... | 3 numpy array, 4 torch tensor: dtype, shape, index
    of its buffer | 5 struct: its name, {field: value} | 6 int of more than 64 bits: its bytes, big-endian, two's complement |
    7 numpy scalar: dtype, its bytes | 8 enum member: name of the enum, name of the member | 9 long bytes: index of the buffer

A buffer holds the elements of one array in C order, little-endian. A tensor of another device is copied to the host first.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import is_tensor, torch_of_tensors
from mm_plugin.errors import MMPluginError, UsageError
from mm_plugin.tensors import tensor_over

LIST, TUPLE, MAPPING, ARRAY, TENSOR, STRUCT, LONG_INT, SCALAR, ENUM, BUFFER = range(10)

MAX_DEPTH = 64
_MAX_DIMENSIONS = 32
_LONG_BYTES = 1024  # bytes from this length on travel beside the header
_LARGEST_INT = 1 << 64
_LONGEST_INT = 1024  # bytes of an int

# Bytes of an element. Those in the first line exist in numpy too.
_NUMPY = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_TORCH = _NUMPY | {
    "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class StructRule(msgspec.Struct, frozen=True, eq=False):
    """How one struct travels.

    Attributes:
        cls: the struct.
        fields: by name, whether a value that arrived may be the field's; all fields of the struct.
        to_fields: the values that travel; the fields themselves where None.
        from_fields: makes the struct of them; `cls(**fields)` where None.
    """

    cls: type
    fields: Mapping[str, Callable[[Any], bool]]
    to_fields: Callable[[Any], dict[str, Any]] | None = None
    from_fields: Callable[[dict[str, Any]], Any] | None = None


def refuse(what: str) -> UsageError:
    """The error of frames that cannot be decoded."""
    return UsageError(f"frames: {what}; pass what wire.encode returned, unchanged", argument="frames")


class Writer:
    """Turns one value into plain msgpack, and collects its buffers. Final.

    Args:
        rules: by name, the structs that may travel.
        enums: by name, the enums that may travel.
        sort: whether mappings are sorted by their keys, so that equal ones are written alike.
    """

    def __init__(
        self, rules: Mapping[str, StructRule], enums: Mapping[str, type[enum.Enum]], *, sort: bool = False
    ) -> None:
        self.buffers: list[memoryview] = []
        self._rules, self._sort = rules, sort
        self._names = {rule.cls: name for name, rule in rules.items()}
        self._enums = {cls: name for name, cls in enums.items()}

    def plain(self, value: Any, depth: int = 0) -> Any:
        """The value as msgpack has it.

        Raises:
            UsageError: it cannot travel.
        """
        if depth > MAX_DEPTH:
            raise UsageError(f"value: nested more than {MAX_DEPTH} deep", argument="value")
        if value is None or (isinstance(value, bool | float | str) and not isinstance(value, np.generic | enum.Enum)):
            return value
        error = next((base for base in (MMPluginError, MemoryError) if isinstance(value, base)), None)
        name = self._names.get(error or type(value))
        if name is not None:
            rule = self._rules[name]
            fields = msgspec.structs.asdict(value) if rule.to_fields is None else rule.to_fields(value)
            return [STRUCT, name, {field: self.plain(part, depth + 1) for field, part in fields.items()}]
        if isinstance(value, enum.Enum):
            if type(value) not in self._enums:
                raise UsageError(f"value: members of {type(value).__name__} cannot be sent", argument="value")
            return [ENUM, self._enums[type(value)], value.name]
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return [SCALAR, _dtype_name(array), array.astype(array.dtype.newbyteorder("<")).tobytes()]
        if isinstance(value, int):
            return value if -_LARGEST_INT // 2 <= value < _LARGEST_INT else [LONG_INT, _int_bytes(value)]
        if isinstance(value, list | tuple):
            tag = TUPLE if isinstance(value, tuple) else LIST
            return [tag, *(self.plain(part, depth + 1) for part in value)]
        if isinstance(value, Mapping):
            pairs = [(self.plain(key, depth + 1), part) for key, part in value.items()]
            if self._sort:
                pairs.sort(key=lambda pair: msgspec.msgpack.encode(pair[0]))
            return [MAPPING, *(item for key, part in pairs for item in (key, self.plain(part, depth + 1)))]
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value) if len(value) < _LONG_BYTES else [BUFFER, self._add(memoryview(value).cast("B"))]
        return self._array(value)

    def _array(self, value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            name = _dtype_name(value)
            array = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
            return [ARRAY, name, list(value.shape), self._add(array.reshape(-1).view(np.uint8).data)]
        if not is_tensor(value):
            raise UsageError(f"value: a {type(value).__name__} cannot be sent", argument="value")
        torch = torch_of_tensors()
        name = str(value.dtype).removeprefix("torch.")
        odd = value.is_nested or value.is_quantized or value.device.type == "meta" or value.layout is not torch.strided
        if odd or name not in _TORCH:
            raise UsageError(f"value: a tensor of {name} and {value.layout} cannot be sent", argument="value")
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.stride(0) != 1:  # of one element or none
            flat = flat.clone(memory_format=torch.contiguous_format)
        return [TENSOR, name, list(value.shape), self._add(flat.view(torch.uint8).numpy().data)]

    def _add(self, buffer: memoryview) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1


def _dtype_name(array: np.ndarray) -> str:
    name: str = array.dtype.name
    if name not in _NUMPY or isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"value: an array of {name} cannot be sent", argument="value")
    return name


def _int_bytes(value: int) -> bytes:
    length = value.bit_length() // 8 + 1
    if length > _LONGEST_INT:
        raise UsageError(f"value: an int of {length} bytes cannot be sent", argument="value")
    return value.to_bytes(length, "big", signed=True)


class Reader:
    """Turns plain msgpack and its buffers back into the value; what does not fit together is refused. Final.

    Arrays are views of the buffers: nothing is copied, and nothing is allocated by a count that was sent.

    Args:
        rules: as for `Writer`.
        enums: as for `Writer`.
        buffers: of bytes.
    """

    def __init__(
        self, rules: Mapping[str, StructRule], enums: Mapping[str, type[enum.Enum]], buffers: Sequence[memoryview]
    ) -> None:
        self._rules, self._enums, self._buffers = rules, enums, buffers
        self._readers: dict[int, Callable[[list[Any], int], Any]] = {
            LIST: lambda parts, depth: [self.value(part, depth) for part in parts],
            TUPLE: lambda parts, depth: tuple(self.value(part, depth) for part in parts),
            MAPPING: self._mapping,
            ARRAY: self._array,
            TENSOR: self._tensor,
            STRUCT: self._struct,
            LONG_INT: self._long_int,
            SCALAR: self._scalar,
            ENUM: self._enum,
            BUFFER: self._bytes,
        }

    def value(self, plain: Any, depth: int = 0) -> Any:
        """The value.

        Raises:
            UsageError: it is not one that `Writer` makes.
        """
        if plain is None or isinstance(plain, bool | int | float | str | bytes):
            return plain
        if not isinstance(plain, list) or not plain or type(plain[0]) is not int or depth > MAX_DEPTH:
            raise refuse("expected a tagged list")
        read = self._readers.get(plain[0])
        if read is None:
            raise refuse(f"unknown tag {plain[0]}")
        return read(plain[1:], depth + 1)

    def _mapping(self, parts: list[Any], depth: int) -> dict[Any, Any]:
        values = [self.value(part, depth) for part in parts]
        try:
            return dict(zip(values[::2], values[1::2], strict=True))
        except (TypeError, ValueError) as error:
            raise refuse("expected a value for each key") from error

    def _struct(self, parts: list[Any], depth: int) -> Any:
        if len(parts) != 2 or not isinstance(parts[0], str) or not isinstance(parts[1], dict):
            raise refuse("expected a struct's name and fields")
        rule = self._rules.get(parts[0])
        if rule is None or set(parts[1]) != set(rule.fields):
            raise refuse(f"unknown struct {parts[0]!r}, or other fields than it has here")
        fields = {name: self.value(part, depth) for name, part in parts[1].items()}
        for name, value in fields.items():
            if not rule.fields[name](value):
                raise refuse(f"{parts[0]}.{name} cannot be a {type(value).__name__}, or have this value")
        try:
            return rule.cls(**fields) if rule.from_fields is None else rule.from_fields(fields)
        except Exception as error:
            raise refuse(f"{parts[0]}: {error}") from error

    def _array(self, parts: list[Any], depth: int) -> np.ndarray:
        name, shape, buffer = self._described(parts, _NUMPY)
        try:
            if not len(buffer):
                return np.empty(shape, name)
            return np.frombuffer(buffer, np.dtype(name).newbyteorder("<")).reshape(shape)
        except ValueError as error:  # sides of an empty array whose product is too large
            raise refuse(f"shape {shape} cannot be made") from error

    def _tensor(self, parts: list[Any], depth: int) -> Any:
        name, shape, buffer = self._described(parts, _TORCH)
        try:
            return tensor_over(buffer, name, shape)
        except (RuntimeError, AttributeError) as error:
            raise refuse(f"a tensor of {name} and shape {shape} cannot be made") from error

    def _described(self, parts: list[Any], sizes: Mapping[str, int]) -> tuple[str, list[int], memoryview]:
        """dtype, shape and buffer, which fit together."""
        if len(parts) != 3 or not isinstance(parts[0], str) or not isinstance(parts[1], list):
            raise refuse("expected dtype, shape and buffer")
        name, shape, index = parts
        size, buffer = sizes.get(name), self._buffer(index)
        sides = all(type(side) is int and 0 <= side < 1 << 48 for side in shape)
        if size is None or not sides or len(shape) > _MAX_DIMENSIONS or math.prod(shape) * size != len(buffer):
            raise refuse(f"an array of {name!r} and shape {shape} does not have {len(buffer)} bytes")
        return name, shape, buffer

    def _buffer(self, index: Any) -> memoryview:
        if type(index) is not int or not 0 <= index < len(self._buffers):
            raise refuse(f"no buffer {index!r}")
        return self._buffers[index]

    def _scalar(self, parts: list[Any], depth: int) -> Any:
        good = len(parts) == 2 and isinstance(parts[0], str) and isinstance(parts[1], bytes)
        if not good or _NUMPY.get(parts[0]) != len(parts[1]):
            raise refuse("expected a dtype and its bytes")
        return np.frombuffer(parts[1], np.dtype(parts[0]).newbyteorder("<"))[0]

    def _long_int(self, parts: list[Any], depth: int) -> int:
        if len(parts) != 1 or not isinstance(parts[0], bytes) or not 0 < len(parts[0]) <= _LONGEST_INT:
            raise refuse("expected the bytes of an int")
        return int.from_bytes(parts[0], "big", signed=True)

    def _enum(self, parts: list[Any], depth: int) -> enum.Enum:
        try:
            cls, member = parts
            return self._enums[cls][member]
        except (KeyError, TypeError, ValueError) as error:
            raise refuse("unknown enum or member") from error

    def _bytes(self, parts: list[Any], depth: int) -> bytes:
        if len(parts) != 1:
            raise refuse("expected the index of a buffer")
        return bytes(self._buffer(parts[0]))
