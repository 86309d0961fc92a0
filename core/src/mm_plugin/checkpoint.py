"""A folder or hub id -> config as plain JSON, preprocessor settings, tokenizer, chosen tensors. Knows no model."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mm_plugin.errors import UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, feature_digest, frame
from mm_plugin.items import Modality
from mm_plugin.spec import ModelSpec

# What a processor needs from a hub; the weights are fetched when tensors are asked for.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_PARTS = {Modality.IMAGE: "image_processor", Modality.VIDEO: "video_processor", Modality.AUDIO: "feature_extractor"}
_FILES = {
    Modality.IMAGE: ("preprocessor_config.json",),
    Modality.VIDEO: ("video_preprocessor_config.json", "preprocessor_config.json"),
    Modality.AUDIO: ("preprocessor_config.json",),
}
# Digests of tensors by (file, size, time, inode, name): hashing gigabytes again would tell nothing new.
_TENSOR_DIGESTS: dict[tuple[Any, ...], bytes] = {}


class Checkpoint:
    """One model's files. Final; made by `Checkpoint.open`.

    Attributes:
        folder: where they lie.
        config: config.json as plain JSON.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        source: str,
        open_tokenizer: Callable[[Checkpoint], Any] | None = None,
    ) -> None:
        self.folder, self.config, self._source = folder, config, source
        self._open_tokenizer = _auto_tokenizer if open_tokenizer is None else open_tokenizer
        self._tokenizer: Any = None
        self._read: set[str] = set()
        self._specialization: tuple[ModelSpec | None, ModelSpec, Any] | None = None

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """Open a folder, or fetch a hub id's small files.

        Raises:
            UsageError: there is no such folder or hub id, or its config.json cannot be read.
        """
        try:
            name = os.fsdecode(source)
            is_folder = bool(name) and Path(name).is_dir()
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(f"a checkpoint is a folder or a hub id: {error}", argument="checkpoint") from error
        folder = Path(name) if is_folder else _fetch(name, _SMALL_FILES)
        return cls(folder, _read_json(folder / "config.json"), name)

    def with_tokenizer(self, open_tokenizer: Callable[[Checkpoint], Any]) -> Checkpoint:
        """The same checkpoint, its tokenizer opened by a function; see `ModelSpec.tokenizer`."""
        view = Checkpoint(self.folder, self.config, self._source, open_tokenizer)
        view._specialization = self._specialization
        return view

    def specialized(self, spec: ModelSpec, state: Any, *, base: ModelSpec | None = None) -> Checkpoint:
        """The same checkpoint together with what a plugin made of it, so that whatever is opened from it need not do so again.

        Args:
            spec: the spec for this checkpoint, as `ModelSpec.specialize` returned it.
            state: whatever the plugin's processor and encoder need; nothing else reads it.
            base: the declaration from which the spec was made.

        Returns:
            A view that carries both; this object is not changed.
        """
        view = self.view()
        view._specialization = (base, spec, state)
        return view

    @property
    def specialization(self) -> tuple[ModelSpec, Any] | None:
        """The spec for this checkpoint and the plugin's state, as `specialized` was given them; None without."""
        return None if self._specialization is None else self._specialization[1:]

    def specialization_of(self, base: ModelSpec) -> tuple[ModelSpec, Any] | None:
        """`specialization` if it was made from this declaration, and None if from another one or none at all."""
        return self.specialization if self._specialization is not None and self._specialization[0] == base else None

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, for models that keep their settings where no other model does.

        Raises:
            UsageError: it is missing, or cannot be read as an object.
        """
        return _read_json(self.folder / name)

    def preprocessor(self, modality: Modality = Modality.IMAGE) -> dict[str, Any]:
        """The settings with which the checkpoint's authors prepared a modality.

        They come from its part of processor_config.json, or from the modality's own file, in the order in which
        transformers looks. `size.shortest_edge` and
        `size.longest_edge` are given as `min_pixels` and `max_pixels`, which they are another spelling of.

        Raises:
            UsageError: neither file is there, or one cannot be read.
        """
        settings: Any = None
        combined = self.folder / "processor_config.json"
        if combined.is_file():
            parts = _read_json(combined)
            settings = parts.get(_PARTS[modality])
            if settings is None and modality is Modality.VIDEO:
                settings = parts.get(_PARTS[Modality.IMAGE])
        for name in _FILES[modality]:
            if not isinstance(settings, dict) and (self.folder / name).is_file():
                settings = _read_json(self.folder / name)
        if not isinstance(settings, dict):
            raise UsageError(
                f"{self.folder} holds no settings for {modality.argument}: neither {' nor '.join(_FILES[modality])} "
                f"nor {_PARTS[modality]!r} in processor_config.json",
                argument="checkpoint",
            )
        return _with_pixel_limits(settings)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the plugin's function or else transformers opens from the folder; code in it is never run.

        Raises:
            UsageError: the folder holds none that can be opened.
        """
        if self._tokenizer is None:
            try:
                self._tokenizer = self._open_tokenizer(self)
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"the tokenizer in {self.folder} cannot be opened: {type(error).__name__}: {error}",
                    argument="checkpoint",
                ) from error
        return self._tokenizer

    def fingerprint(self, tensors: Iterable[str] | None = None) -> str:
        """Tells one encoder from another by content: two copies of a checkpoint have one fingerprint, wherever they lie.

        It is made of config.json, the preprocessor settings, the names of all tensors, and the content of those that an
        encoder reads. A tensor is hashed once per process as long as its file keeps size and time.

        Args:
            tensors: whole names of the tensors whose content counts, such as `tensors_read`; all of them where None.

        Returns:
            64 hexadecimal digits.

        Raises:
            UsageError: there is no such tensor, or a file cannot be read.
        """
        # An encoder may normalize by what these say.
        names = sorted({"processor_config.json", *(name for group in _FILES.values() for name in group)})
        settings = {name: digest((self.folder / name).read_bytes()) for name in names if (self.folder / name).is_file()}
        files = self.tensor_names() if any(self.folder.glob("*.safetensors")) else {}
        content = self._tensor_digests(sorted(files) if tensors is None else sorted(set(tensors)))
        parts = ["mm-plugin/checkpoint", FORMAT_VERSION, dict(self.config), settings, sorted(files), content]
        return digest(frame(parts)).hex()

    def _tensor_digests(self, names: Iterable[str]) -> dict[str, bytes]:
        """`feature_digest` of tensors by name; one of them is in memory at a time."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, bytes] = {}
        for file, inside in self._by_file(names).items():
            try:
                stat = file.stat()
                place = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)
                missing = [name for name in inside if (*place, name) not in _TENSOR_DIGESTS]
                if missing:
                    with safe_open(file, framework="pt") as opened:
                        for name in missing:
                            _TENSOR_DIGESTS[*place, name] = feature_digest(opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}", argument="checkpoint") from error
            found |= {name: _TENSOR_DIGESTS[*place, name] for name in inside}
        return found

    @property
    def tensors_read(self) -> frozenset[str]:
        """Whole names of the tensors that were read through this object."""
        return frozenset(self._read)

    def view(self) -> Checkpoint:
        """The same checkpoint as an object of its own, of which no tensor has been read."""
        view = Checkpoint(self.folder, self.config, self._source, self._open_tokenizer)
        view._tokenizer, view._specialization = self._tokenizer, self._specialization
        return view

    def tensor_names(self) -> dict[str, Path]:
        """Every tensor in the checkpoint, and the file that holds it.

        Raises:
            UsageError: there are no safetensors files, or their index cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        folder = self._weights_folder()
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            table = _read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise UsageError(f"{index} has no weight_map of names to files", argument="checkpoint")
            return {name: folder / file for name, file in table.items()}
        names: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    names.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}", argument="checkpoint") from error
        if not names:
            raise UsageError(
                f"{folder} holds no .safetensors files; other formats run code when they are read, and are not opened",
                argument="checkpoint",
            )
        return names

    def tensors(self, prefixes: Iterable[str], *, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        """Chosen tensors, by name without its prefix; no other tensor's bytes are read.

        Where a name begins with several prefixes, the first of them counts.

        Args:
            prefixes: such as `("visual.", "model.visual.")`.
            device: torch device on which they shall lie.
            dtype: torch dtype of floating-point tensors; None keeps their own.

        Raises:
            UsageError: no tensor has such a prefix, two have one name, or a file cannot be read.
        """
        prefixes = tuple(prefixes)
        wanted: dict[str, str] = {}
        for name in self.tensor_names():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix is not None:
                wanted[name] = name.removeprefix(prefix)
        twice = [short for short, count in Counter(wanted.values()).items() if count > 1]
        if twice:
            raise UsageError(f"tensor {twice[0]!r} stands twice under {prefixes}", argument="checkpoint")
        if not wanted:
            raise UsageError(f"{self.folder} holds no tensors under {' or '.join(prefixes)}", argument="checkpoint")
        found = self.read_tensors(wanted, device=device, dtype=dtype)
        return {wanted[name]: tensor for name, tensor in found.items()}

    def read_tensors(self, names: Iterable[str], *, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        """Tensors by their whole names; no other tensor's bytes are read.

        Args:
            names: as `tensor_names` gives them.
            device: as for `tensors`.
            dtype: as for `tensors`.

        Raises:
            UsageError: there is no such tensor, or a file cannot be read.
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
        self._read.update(found)
        return found

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        names = list(names)
        files = self.tensor_names() if names else {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in files:
                raise UsageError(f"{self.folder} holds no tensor {name!r}", argument="checkpoint")
            by_file.setdefault(files[name], []).append(name)
        return by_file

    def _weights_folder(self) -> Path:
        if any(self.folder.glob("*.safetensors")) or Path(self._source).is_dir():
            return self.folder
        return _fetch(self._source, (*_SMALL_FILES, "*.safetensors"))


def check_tensors(tensors: Mapping[str, Any], module: Mapping[str, Any], *, what: str) -> None:
    """Refuse tensors that are not exactly a module's, by their first names.

    Args:
        tensors: what the checkpoint holds.
        module: the module's `state_dict()`, on any device.
        what: whose tensors they are, for the message.

    Raises:
        UsageError: one is missing, one is too many, or one has another shape.
    """
    faults = {
        "missing": [name for name in module if name not in tensors],
        "unexpected": [name for name in tensors if name not in module],
        "of another shape": [
            f"{name} {list(tensors[name].shape)} where its config.json says {list(module[name].shape)}"
            for name in module
            if name in tensors and tensors[name].shape != module[name].shape
        ],
    }
    said = [f"{len(names)} {fault} ({', '.join(names[:3])})" for fault, names in faults.items() if names]
    if said:
        raise UsageError(f"{what}: {'; '.join(said)}", argument="checkpoint")


def _auto_tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(checkpoint.folder), trust_remote_code=False)


def _with_pixel_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(settings)
    size = out.get("size")
    if isinstance(size, Mapping):
        for edge, limit in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if size.get(edge) is not None and out.get(limit) is None:
                out[limit] = size[edge]
    return out


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing", argument="checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", argument="checkpoint") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, not an object", argument="checkpoint")
    return value


def _fetch(name: str, patterns: tuple[str, ...]) -> Path:
    """A hub id's files, from the local hub cache where they are there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:
        raise UsageError(
            f"{name!r} is no folder, and could not be fetched as a hub id: {type(error).__name__}: {error}",
            argument="checkpoint",
        ) from error
