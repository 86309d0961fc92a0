"""BLAKE3 of raw bytes, wherever they lie: on the CPU, or on a device that a function was given for."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from blake3 import blake3

from mm_plugin.arrays import torch_of_tensors
from mm_plugin.errors import PluginError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.forking import new_lock

logger = logging.getLogger("mm_plugin")

# For fewer bytes, starting threads costs more than it saves.
_PARALLEL_BYTES = 1 << 20


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of raw bytes, on all cores where there are enough bytes.

    Returns:
        32 bytes.
    """
    threads = blake3.AUTO if len(data) >= _PARALLEL_BYTES else 1
    return blake3(data, max_threads=threads).digest()


DigestFunction = Callable[[Sequence[Any]], list[bytes]]


class Digests:
    """Hashes raw bytes on each type of device. Final; thread-safe.

    Each function takes tensors [n] uint8 on one device and returns BLAKE3-256 of each. It is checked against published test
    vectors on its own device before its first digest is used.

    Args:
        functions: by device type, such as `cuda`; the core's own for `cuda` is Triton, where that is installed.
    """

    def __init__(self, functions: Mapping[str, DigestFunction] | None = None) -> None:
        self._functions = dict(functions or {})
        self._checked: set[str] = set()
        self._copied: set[str] = set()
        self._lock = new_lock()

    @property
    def copied(self) -> frozenset[str]:
        """Device types without a digest function, whose tensors were copied to the CPU."""
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
                kernel = importlib.import_module("mm_plugin.identity.blake3_triton")
                self._functions[kind] = kernel.digest_buffers
            function = self._functions.get(kind)
            if function is None:
                if kind not in self._copied:
                    self._copied.add(kind)
                    hint = "; pip install 'mm-plugin[gpu]'" if kind == "cuda" else ""
                    logger.warning("mm-plugin: no digest function for %s, tensors are copied to the CPU%s", kind, hint)
                return None
            if str(device) not in self._checked:
                _check(function, device)
                self._checked.add(str(device))
            return function


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _asked(function: DigestFunction, tensors: Sequence[Any], device: Any) -> list[bytes]:
    """A plugin's digests, checked for their number and type."""
    try:
        answers = list(function(tensors))
    except BaseException as error:
        if is_interruption(error):
            raise
        raise PluginError(f"the digest for {device.type} failed: {words(error)}") from error
    if len(answers) != len(tensors) or not all(isinstance(found, bytes) and len(found) == 32 for found in answers):
        raise PluginError(
            f"the digest for {device.type} must return 32 bytes for each of {len(tensors)} tensors, got {len(answers)} values"
        )
    return answers


def _check(function: DigestFunction, device: Any) -> None:
    """Compare with the vectors of the BLAKE3 specification: byte i of an input is i modulo 251."""
    torch = torch_of_tensors()

    vectors = test_vectors()["blake3"]
    inputs = [torch.arange(entry["length"]).remainder(251).to(torch.uint8).to(device) for entry in vectors]
    for entry, found in zip(vectors, _asked(function, inputs, device), strict=True):
        if found.hex() != entry["digest"]:
            raise PluginError(
                f"the digest for {device.type} is wrong for {entry['length']} bytes: expected {entry['digest']}, got {found.hex()}"
            )


def test_vectors() -> dict[str, Any]:
    """The published test vectors of this format, for other implementations: raw digests, frames, identities and keys."""
    vectors: dict[str, Any] = json.loads(resources.files("mm_plugin.identity").joinpath("vectors.json").read_bytes())
    return vectors
