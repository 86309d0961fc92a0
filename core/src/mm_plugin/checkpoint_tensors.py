"""The tensors of a checkpoint: in safetensors files, which are read by name, or given by whoever has read them. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mm_plugin.arrays import is_dense, is_tensor
from mm_plugin.checkpoint_files import SMALL_FILES, fetch, read_json, weights_file
from mm_plugin.errors import UsageError
from mm_plugin.identity.framing import feature_digest

# Digests of tensors by (file, size, time, inode, name), so that gigabytes are not hashed twice.
_DIGESTS: dict[tuple[Any, ...], bytes] = {}


class CheckpointTensors(Protocol):
    """Where the tensors of a checkpoint come from.

    Attributes:
        label: what has them, for messages.
    """

    label: str

    def names(self) -> dict[str, Path | None]:
        """Every tensor's name, with the file that contains it; None where it was given."""

    def read(self, names: Iterable[str], *, device: Any, dtype: Any) -> dict[str, Any]:
        """Tensors by name, on a device; floating-point ones in a dtype unless that is None."""

    def digests(self, names: Iterable[str]) -> dict[str, bytes]:
        """`feature_digest` of tensors by name."""


class FileTensors:
    """Tensors in the safetensors files of a folder, or of a hub id, whose files are fetched when they are asked for. Final.

    Args:
        folder: of the checkpoint.
        source: the folder or hub id that was opened.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._source, self.label = folder, source, str(folder)

    def names(self) -> dict[str, Path | None]:
        """See `CheckpointTensors`.

        Raises:
            UsageError: there are no safetensors files, one cannot be read or is outside of the folder, or their index is malformed.
        """
        return dict(self._files())

    def _files(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        folder = self._weights_folder()
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise UsageError(
                    f"{index}: expected a weight_map from tensor names to files, found {type(table).__name__}",
                    argument="checkpoint",
                )
            files = {file: weights_file(folder, file) for file in set(table.values())}
            return {name: files[file] for name, file in table.items()}
        names: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights_file(folder, file.name)
            try:
                with safe_open(file, framework="pt") as opened:
                    names.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}", argument="checkpoint") from error
        if not names:
            raise UsageError(
                f"{folder}: expected .safetensors files, found none; convert the weights, because other formats can run code "
                "when they are read",
                argument="checkpoint",
            )
        return names

    def read(self, names: Iterable[str], *, device: Any, dtype: Any) -> dict[str, Any]:
        """See `CheckpointTensors`; no other tensor's bytes are read.

        Raises:
            UsageError: a tensor is missing, or a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        found: dict[str, Any] = {}
        for file, inside in self._by_file(names).items():
            try:
                with safe_open(file, framework="pt", device=str(device)) as opened:
                    for name in inside:
                        tensor = opened.get_tensor(name)
                        found[name] = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}", argument="checkpoint") from error
        return found

    def digests(self, names: Iterable[str]) -> dict[str, bytes]:
        """See `CheckpointTensors`; one tensor is in memory at a time, and is hashed once per process unless its file changes.

        Raises:
            UsageError: a tensor is missing, or a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        found: dict[str, bytes] = {}
        for file, inside in self._by_file(names).items():
            try:
                stat = file.stat()
                place = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)
                missing = [name for name in inside if (*place, name) not in _DIGESTS]
                if missing:
                    with safe_open(file, framework="pt") as opened:
                        for name in missing:
                            _DIGESTS[*place, name] = feature_digest(opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}", argument="checkpoint") from error
            found |= {name: _DIGESTS[*place, name] for name in inside}
        return found

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        names = list(names)
        files = self._files() if names else {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in files:
                raise UsageError(f"{self._folder} holds no tensor {name!r}", argument="checkpoint")
            by_file.setdefault(files[name], []).append(name)
        return by_file

    def _weights_folder(self) -> Path:
        if any(self._folder.glob("*.safetensors")) or Path(self._source).is_dir():
            return self._folder
        return fetch(self._source, (*SMALL_FILES, "*.safetensors"))


class GivenTensors:
    """Tensors that somebody has read already, such as an engine, by the names that they have in the checkpoint. Final.

    Args:
        tensors: dense torch tensors by name, or pairs of both; kept as they are.

    Raises:
        UsageError: an entry is not a name and a dense tensor, or a name comes twice.
    """

    label = "tensors"

    def __init__(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        try:
            pairs = [(name, tensor) for name, tensor in (tensors.items() if isinstance(tensors, Mapping) else tensors)]
        except (TypeError, ValueError) as error:
            raise UsageError(f"tensors: expected tensors by name, got {error}", argument="tensors") from error
        self._tensors: dict[str, Any] = {}
        for name, tensor in pairs:
            if not isinstance(name, str) or not is_tensor(tensor) or not is_dense(tensor) or tensor.is_meta:
                got = "one on the meta device" if is_tensor(tensor) and tensor.is_meta else f"a {type(tensor).__name__}"
                raise UsageError(
                    f"tensors: expected names and dense torch tensors with values, got {name!r:.80} and {got}",
                    argument="tensors",
                )
            if name in self._tensors:
                raise UsageError(f"tensors: expected each name once, got {name!r} twice", argument="tensors")
            self._tensors[name] = tensor.detach()

    def names(self) -> dict[str, Path | None]:
        """See `CheckpointTensors`."""
        return dict.fromkeys(self._tensors)

    def read(self, names: Iterable[str], *, device: Any, dtype: Any) -> dict[str, Any]:
        """See `CheckpointTensors`; a tensor of that device and dtype is not copied.

        Raises:
            UsageError: a tensor is missing.
        """
        return {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in self._chosen(names).items()
        }

    def digests(self, names: Iterable[str]) -> dict[str, bytes]:
        """See `CheckpointTensors`.

        Raises:
            UsageError: a tensor is missing.
        """
        return {name: feature_digest(tensor) for name, tensor in self._chosen(names).items()}

    def _chosen(self, names: Iterable[str]) -> dict[str, Any]:
        names = list(names)
        missing = next((name for name in names if name not in self._tensors), None)
        if missing is not None:
            raise UsageError(f"tensors: expected {missing!r} among those that were given", argument="tensors")
        return {name: self._tensors[name] for name in names}
