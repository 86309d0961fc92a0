"""A folder or hub id -> config as plain JSON, preprocessor settings, tokenizer, selected tensors. Knows no model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mm_plugin.checkpoint_files import SMALL_FILES, check_files, fetch, read_file, read_json
from mm_plugin.checkpoint_tensors import CheckpointTensors, FileTensors, GivenTensors
from mm_plugin.errors import UsageError
from mm_plugin.foreign import is_interruption
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, frame
from mm_plugin.items import Modality
from mm_plugin.settings_files import SETTINGS_FILES, find_settings
from mm_plugin.spec import ModelSpec
from mm_plugin.tokenizer_files import check_tokenizer_files, find_chat_templates, tokenizer_fault


class Checkpoint:
    """One model's files. Final; created by `Checkpoint.open`.

    Attributes:
        folder: the folder that contains them.
        config: config.json as plain JSON.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
        ...     size = {"shortest_edge": 3136, "longest_edge": 1003520}
        ...     _ = (Path(folder) / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        ...     checkpoint = Checkpoint.open(folder)
        ...     print(checkpoint.config["model_type"], checkpoint.preprocessor()["max_pixels"])
        qwen2_vl 1003520
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        source: str,
        open_tokenizer: Callable[[Checkpoint], Any] | None = None,
        specialization: tuple[ModelSpec | None, ModelSpec, Any] | None = None,
        tensors: CheckpointTensors | None = None,
    ) -> None:
        self.folder, self.config, self._source = folder, config, source
        self._tensors: CheckpointTensors = FileTensors(folder, source) if tensors is None else tensors
        self._open_tokenizer = _auto_tokenizer if open_tokenizer is None else open_tokenizer
        self._tokenizer: Any = None
        self._read: set[str] = set()
        self._specialization = specialization

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """Open a folder, or download the small files of a hub id.

        Raises:
            UsageError: there is no such folder or hub id, its config.json cannot be read, or it holds a FIFO, device or socket.
        """
        try:
            name = os.fsdecode(source)
            is_folder = bool(name) and Path(name).is_dir()
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(
                f"checkpoint: expected a folder or a hub id, got {source!r:.80} ({error})", argument="checkpoint"
            ) from error
        # Absolute, since a worker that opens it again may run in another folder.
        folder = Path(name).absolute() if is_folder else fetch(name, SMALL_FILES)
        check_files(folder)
        return cls(folder, read_json(folder / "config.json"), str(folder) if is_folder else name)

    def with_tokenizer(self, open_tokenizer: Callable[[Checkpoint], Any]) -> Checkpoint:
        """A view of the same files whose tokenizer a function opens; see `ModelSpec.tokenizer`."""
        return self._view(open_tokenizer=open_tokenizer)

    def with_tensors(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Checkpoint:
        """A view whose tensors are these and no others, for whoever has read them already, such as an engine.

        Args:
            tensors: dense torch tensors by the names that they have in the checkpoint, or pairs of both. They are kept, and an
                encoder uses the memory of those that have its device and dtype.

        Raises:
            UsageError: an entry is not a name and a dense tensor, or a name comes twice.
        """
        return self._view(tensors=GivenTensors(tensors))

    def _view(self, **changed: Any) -> Checkpoint:
        kept = {
            "open_tokenizer": self._open_tokenizer,
            "specialization": self._specialization,
            "tensors": self._tensors,
        }
        view = Checkpoint(self.folder, self.config, self._source, **kept | changed)
        if "open_tokenizer" not in changed:
            view._tokenizer = self._tokenizer
        return view

    def specialized(self, spec: ModelSpec, state: Any, *, base: ModelSpec | None = None) -> Checkpoint:
        """A view that carries what a plugin learned about this checkpoint, so that opening it again need not repeat the work.

        Args:
            spec: the spec for this checkpoint, as `ModelSpec.specialize` returned it.
            state: what the plugin's processor and encoder need; nothing else reads it.
            base: the plugin's declaration, from which `spec` was made.

        Returns:
            The view; this object does not change.
        """
        return self._view(specialization=(base, spec, state))

    @property
    def specialization(self) -> tuple[ModelSpec, Any] | None:
        """The spec for this checkpoint and the plugin's state, as passed to `specialized`; None if it was not called."""
        return None if self._specialization is None else self._specialization[1:]

    def specialization_of(self, base: ModelSpec) -> tuple[ModelSpec, Any] | None:
        """`specialization` if it was made from this declaration, None otherwise."""
        made = self._specialization
        return made[1:] if made is not None and made[0] == base else None

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, for models with settings in files of their own.

        Args:
            name: the file's name.

        Raises:
            UsageError: the file is missing, or is not a JSON object.
        """
        return read_json(self.folder / name)

    def preprocessor(self, modality: Modality = Modality.IMAGE) -> dict[str, Any]:
        """The preprocessing settings of a modality, as the checkpoint's authors saved them.

        They are read from the modality's section of processor_config.json, or else from the modality's own file, in the order
        in which transformers looks. `size.shortest_edge` and `size.longest_edge`, which older files call `size.min_pixels` and
        `size.max_pixels`, are also returned as `min_pixels` and `max_pixels` (pixels), names for the same limits.

        Args:
            modality: the modality whose settings are read.

        Raises:
            UsageError: no file has such settings, or a file cannot be read.
        """
        return find_settings(self.folder, modality)[1]

    def preprocessor_source(self, modality: Modality = Modality.IMAGE) -> str:
        """The file that `preprocessor` reads, with the section of it where it has some, for messages; equal for one source.

        Args:
            modality: the modality whose settings are read.

        Raises:
            UsageError: as for `preprocessor`.
        """
        return find_settings(self.folder, modality)[0]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, opened by the plugin's function or else by transformers; code in the folder is never run.

        Raises:
            UsageError: the folder has no tokenizer that can be opened; the message names the file.
        """
        if self._tokenizer is None:
            try:
                self._tokenizer = self._open_tokenizer(self)
            except UsageError:
                raise
            except BaseException as error:
                if is_interruption(error):
                    raise
                raise tokenizer_fault(self.folder, error) from error
        return self._tokenizer

    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name: those in files of their own, as for a processor of transformers, or else the tokenizer's.

        Raises:
            UsageError: a file cannot be read, or two contradict each other.
        """
        return find_chat_templates(self.folder, self.tokenizer)

    def fingerprint(self, tensors: Iterable[str] | None = None) -> str:
        """Identifies an encoder by content: copies of a checkpoint have the same fingerprint, in whatever folder they are.

        It covers config.json, the preprocessor settings, the names of all tensors, and the content of those that an encoder
        reads. A tensor is hashed once per process, unless the size or modification time of its file changes.

        Args:
            tensors: full names of the tensors whose content is hashed, such as `tensors_read`; None for all of them.

        Returns:
            64 hexadecimal digits.

        Raises:
            UsageError: a tensor is missing, or a file cannot be read.
        """
        # An encoder may read how to normalize from these.
        names = SETTINGS_FILES
        settings = {name: digest(read_file(self.folder / name)) for name in names if (self.folder / name).is_file()}
        # Names are those of the files, also where tensors were given: both ways give one fingerprint for one content.
        files = FileTensors(self.folder, self._source).names() if any(self.folder.glob("*.safetensors")) else {}
        everything = files if isinstance(self._tensors, FileTensors) else self._tensors.names()
        content = self._tensors.digests(sorted(everything if tensors is None else set(tensors)))
        parts = ["mm-plugin/checkpoint", FORMAT_VERSION, dict(self.config), settings, sorted(files), content]
        return digest(frame(parts)).hex()

    @property
    def source(self) -> str:
        """The folder or hub id that was opened."""
        return self._source

    @property
    def tensors_read(self) -> frozenset[str]:
        """Full names of the tensors that were read through this object."""
        return frozenset(self._read)

    def view(self) -> Checkpoint:
        """The same checkpoint as a separate object with an empty `tensors_read`."""
        return self._view()

    def tensor_names(self) -> dict[str, Path | None]:
        """The name of every tensor in the checkpoint, with the file that contains it; None for tensors that were given.

        Raises:
            UsageError: there are no safetensors files, one cannot be read or is outside of the folder, or their index is malformed.
        """
        return self._tensors.names()

    def tensors(self, prefixes: Iterable[str], *, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        """The tensors under some prefixes, by name without the prefix; no other tensor's bytes are read.

        If a name begins with several of the prefixes, the first of them is removed.

        Args:
            prefixes: such as `("visual.", "model.visual.")`.
            device: torch device of the result.
            dtype: torch dtype to which floating-point tensors are cast; None keeps their own.

        Raises:
            UsageError: no tensor has such a prefix, two would get the same name, or a file cannot be read.
        """
        prefixes = tuple(prefixes)
        wanted: dict[str, str] = {}
        for name in self.tensor_names():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix is not None:
                wanted[name] = name.removeprefix(prefix)
        twice = [short for short, count in Counter(wanted.values()).items() if count > 1]
        if twice:
            raise UsageError(
                f"{self._tensors.label}: expected one tensor {twice[0]!r} under {' or '.join(prefixes)}, found two",
                argument="checkpoint",
            )
        if not wanted:
            what = f"{self._tensors.label} holds no tensors under {' or '.join(prefixes)}"
            raise UsageError(what, argument="checkpoint")
        found = self.read_tensors(wanted, device=device, dtype=dtype)
        return {wanted[name]: tensor for name, tensor in found.items()}

    def read_tensors(self, names: Iterable[str], *, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        """Tensors by their full names; no other tensor's bytes are read.

        Args:
            names: as in `tensor_names`.
            device: as for `tensors`.
            dtype: as for `tensors`.

        Raises:
            UsageError: a tensor is missing, or a file cannot be read.
        """
        found = self._tensors.read(names, device=device, dtype=dtype)
        self._read.update(found)
        return found


def check_tensors(tensors: Mapping[str, Any], module: Mapping[str, Any], *, what: str) -> None:
    """Check that tensors are exactly those of a module; the message names the first that differ.

    Args:
        tensors: the checkpoint's tensors by name.
        module: the module's `state_dict()`, on any device.
        what: the module's name, for the message.

    Raises:
        UsageError: a tensor is missing, unexpected, or of another shape.
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

    check_tokenizer_files(checkpoint.folder)
    return AutoTokenizer.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
