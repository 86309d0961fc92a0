"""Framed digests: source keys and identities. Knows no medium, only values; two different values never share an encoding.

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
import importlib.util
import json
import logging
import numbers
import re
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from mm_plugin.errors import PluginError, UsageError

logger = logging.getLogger("mm_plugin")

FORMAT_VERSION = 1
_CALLER_HASH = re.compile(r"(0[xX])?[0-9a-fA-F]{1,1024}")
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
            torch tensor, PIL image; nested as deeply as Python allows.

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
            raise UsageError("a memoryview of anything but bytes has no identity", argument="value")
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
    elif _is_picture(value):
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
        raise UsageError(f"a value of type {type(value).__name__} has no identity", argument="value")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def _is_picture(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


def _is_tensor(value: Any) -> bool:
    # Who holds a tensor has imported torch; who has not need not pay for it here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def feature_digest(value: Any, digests: Digests | None = None) -> bytes:
    """BLAKE3 over the frame of (dtype, shape, BLAKE3 of the raw bytes): the identity of an array, wherever and however it lies.

    Equal for numpy and torch, for every memory layout, device and process. The raw bytes are little-endian, in C order.

    Args:
        value: numpy array or scalar, or torch tensor; any dtype but object, any device.
        digests: what hashes on other devices; the core's own where None.

    Returns:
        32 bytes.

    Raises:
        UsageError: it is no array, or one whose bytes do not say its value (object, long double, sparse, quantised).
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
    digests = _CORE_DIGESTS if digests is None else digests
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
        # The long double has bytes of padding, which may hold anything.
        if array.dtype.kind not in "biufc" or array.dtype.char in "gG" or isinstance(value, np.ma.MaskedArray):
            raise UsageError(f"an array of dtype {array.dtype} has no identity", argument="feature")
        flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
        return array.dtype.name, list(np.shape(value)), flat.view(np.uint8)
    if not _is_tensor(value):
        raise UsageError(f"a value of type {type(value).__name__} is no array", argument="feature")
    import torch

    odd = value.is_nested or value.is_quantized or value.device.type == "meta"
    if value.layout is not torch.strided or odd:
        raise UsageError("a sparse, nested, quantised or meta tensor has no identity", argument="feature")
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


DigestFunction = Callable[[Sequence[Any]], list[bytes]]


class Digests:
    """What hashes raw bytes on each kind of device. Final; safe to use from several threads.

    Each function takes tensors [n] uint8 on one device and returns BLAKE3-256 of each. It is checked against published test
    vectors on its own device before its first answer is believed.

    Args:
        functions: by device type, such as `cuda`; the core's own for `cuda` is Triton, where that is installed.
    """

    def __init__(self, functions: Mapping[str, DigestFunction] | None = None) -> None:
        self._functions = dict(functions or {})
        self._checked: set[str] = set()
        self._copied: set[str] = set()
        self._lock = threading.Lock()

    @property
    def copied(self) -> frozenset[str]:
        """Device types that nothing here can hash on, so that tensors were copied to the CPU."""
        return frozenset(self._copied)

    def of(self, tensors: Sequence[Any]) -> list[bytes]:
        """BLAKE3-256 of the bytes of tensors that lie on one device.

        Args:
            tensors: [n] uint8 each.

        Returns:
            32 bytes for each.

        Raises:
            PluginError: the device's function fails, or gives wrong digests.
        """
        device = tensors[0].device
        function = self._function(device)
        if function is None:
            return [digest(tensor.cpu().numpy().data) for tensor in tensors]
        return _asked(function, tensors, device)

    def _function(self, device: Any) -> DigestFunction | None:
        kind = device.type
        with self._lock:
            if kind not in self._functions and kind == "cuda" and _has_triton():
                from mm_plugin.identity.blake3_triton import digest_buffers

                self._functions[kind] = digest_buffers
            function = self._functions.get(kind)
            if function is None:
                if kind not in self._copied:
                    self._copied.add(kind)
                    hint = "; pip install 'mm-plugin[gpu]'" if kind == "cuda" else ""
                    logger.warning("mm-plugin: nothing hashes on %s, tensors are copied to the CPU%s", kind, hint)
                return None
            if str(device) not in self._checked:
                _check(function, device)
                self._checked.add(str(device))
            return function


_CORE_DIGESTS = Digests()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _asked(function: DigestFunction, tensors: Sequence[Any], device: Any) -> list[bytes]:
    """A plugin's digests, of the right number and kind; its fault is neither the request's nor another plugin's."""
    try:
        answers = list(function(tensors))
    except (Exception, SystemExit) as error:
        raise PluginError(f"the digest for {device.type} failed: {type(error).__name__}: {error}") from error
    if len(answers) != len(tensors) or not all(isinstance(found, bytes) and len(found) == 32 for found in answers):
        raise PluginError(
            f"the digest for {device.type} gave {len(answers)} answers for {len(tensors)} tensors; each must be 32 bytes"
        )
    return answers


def _check(function: DigestFunction, device: Any) -> None:
    """Compare with the vectors of the BLAKE3 specification: byte i of an input is i modulo 251."""
    import torch

    vectors = test_vectors()["blake3"]
    inputs = [torch.arange(entry["length"]).remainder(251).to(torch.uint8).to(device) for entry in vectors]
    for entry, found in zip(vectors, _asked(function, inputs, device), strict=True):
        if found.hex() != entry["digest"]:
            raise PluginError(
                f"the digest for {device.type} is wrong for {entry['length']} bytes: {found.hex()}, not {entry['digest']}"
            )


def test_vectors() -> dict[str, Any]:
    """The published vectors of this format, for those who implement it elsewhere: raw digests, frames, identities, keys."""
    vectors: dict[str, Any] = json.loads(resources.files("mm_plugin.identity").joinpath("vectors.json").read_bytes())
    return vectors


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
    return _keyed("mm-plugin/item", spec_name, output_version, modality, format, feature, fields, salt)


def parse_caller_hash(entry: Any) -> int | None:
    """A caller's hash as a number; None where the entry is malformed.

    Args:
        entry: a whole number from 0 on, or hexadecimal digits in either case with or without `0x`; of any length up to 1,024
            digits. Signs, `_`, spaces, other digits and empty text are malformed.
    """
    if isinstance(entry, bool):
        return None
    if isinstance(entry, numbers.Integral):
        return int(entry) if 0 <= int(entry) < 1 << 4096 else None
    if isinstance(entry, str) and _CALLER_HASH.fullmatch(entry):
        return int(entry, 16)
    return None


def caller_identity(
    spec_name: str,
    output_version: int,
    modality: int,
    value: int,
    options: bytes,
    context: Any,
    *,
    salt: str | bytes | None = None,
) -> bytes:
    """The identity of a medium whose caller vouches for it by a hash: that hash, and all that could change what becomes of it.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its mark, 1 to 3.
        value: the caller's hash, as `parse_caller_hash` reads it; all of its bits count.
        options: as for `source_key`.
        context: as for `source_key`.
        salt: separates tenants.

    Returns:
        32 bytes.
    """
    return _keyed("mm-plugin/caller", spec_name, output_version, modality, value, options, context, salt)


def source_key(
    spec_name: str,
    output_version: int,
    modality: int,
    source: bytes,
    options: bytes,
    context: Any,
    *,
    model: bytes = b"",
    salt: str | bytes | None = None,
) -> bytes:
    """The key of the preprocess cache: equal keys mean that equal media input was prepared in the same way.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its mark, 1 to 3.
        source: 32 bytes, the digest of the encoded source or of the pixels.
        options: 32 bytes, the digest of the frame of the modality's effective options: a mapping from name to value, after
            call, load, checkpoint and default are resolved.
        context: request-level facts that the item depends on.
        model: 32 bytes, the digest of the frame of [config.json, {modality: placeholder id}, [[start id, end
            id], ...]], on which fields and replacement depend.
        salt: separates tenants.

    Returns:
        32 bytes.
    """
    return _keyed("mm-plugin/source", spec_name, output_version, modality, source, options, context, model, salt)


def _keyed(tag: str, spec_name: str, output_version: int, modality: int, *parts: Any) -> bytes:
    """The digest behind every identity and key: its kind and this format's version first, then whose it is, then the rest."""
    return digest(frame([tag, FORMAT_VERSION, spec_name, output_version, int(modality), *parts]))
