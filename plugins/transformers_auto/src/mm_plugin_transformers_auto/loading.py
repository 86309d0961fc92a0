"""A checkpoint's config, model class and processor as transformers opens them, or why it cannot. Runs none of its code."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import transformers
from transformers import AutoConfig, AutoProcessor, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from mm_plugin import Checkpoint, UsageError

_CODE_FILES = ("config.json", "processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class Opened(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint as transformers opens it, without its weights.

    Attributes:
        config: transformers' config.
        model_class: transformers' model class.
        processor: transformers' processor.
    """

    config: Any
    model_class: Any
    processor: Any

    @property
    def label(self) -> str:
        """The processor's class and version, for messages."""
        return f"{type(self.processor).__name__} (transformers {transformers.__version__})"


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """Open config, model class and processor.

    Args:
        checkpoint: the checkpoint.

    Raises:
        UsageError: transformers cannot open it; the message says what is missing.
    """
    config = open_config(checkpoint)
    return Opened(config, find_model_class(checkpoint, config), _open_processor(checkpoint))


def open_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Open a checkpoint's config.

    Args:
        checkpoint: the checkpoint.

    Raises:
        UsageError: transformers does not know its type, or cannot read it.
    """
    try:
        return AutoConfig.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
    except Exception as error:
        raise _refusal(checkpoint, "config", error) from error


def find_model_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> Any:
    """See `model_class_of`.

    Args:
        checkpoint: the checkpoint.
        config: its config.

    Raises:
        UsageError: transformers has no such class.
    """
    found = model_class_of(checkpoint.config, config)
    if found is not None:
        return found
    asked = ", ".join(map(str, checkpoint.config.get("architectures") or ())) or config.model_type
    raise _refusal(checkpoint, "model class", ValueError(f"transformers {transformers.__version__} has no {asked}"))


def model_class_of(described: Mapping[str, Any], config: PreTrainedConfig) -> Any | None:
    """The first of a config's architectures that transformers has, or its class for the config's type; None where there is neither.

    Args:
        described: config.json.
        config: the same, opened.
    """
    named = described.get("architectures") or ()
    for name in (*named, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)):
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _open_processor(checkpoint: Checkpoint) -> Any:
    try:
        processor = AutoProcessor.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
    except Exception as error:
        raise _refusal(checkpoint, "processor", error) from error
    if getattr(processor, "tokenizer", None) is None:
        raise UsageError(
            f"{checkpoint.folder}: expected a processor of prompts with media, AutoProcessor returned a "
            f"{type(processor).__name__}",
            argument="checkpoint",
        )
    return processor


def _refusal(checkpoint: Checkpoint, what: str, error: Exception) -> UsageError:
    """One sentence for whatever transformers raised."""
    said = " ".join(str(error).split())
    missing = _missing_package(what, said, error)
    if missing is not None:
        cls, package = missing
        message = f"its {what} cannot be opened: {cls} needs {package}, which is not installed; pip install {package}"
    elif code := remote_code(checkpoint.folder):
        message = (
            f"its {what} comes with code of its own ({code[0]}), which needs trust_remote_code; this plugin never runs such "
            f"code. transformers itself says: {said[:200]}"
        )
    else:
        message = f"its {what} cannot be opened: {type(error).__name__}: {said[:400]}"
    return UsageError(f"{checkpoint.folder}: {message}", argument="checkpoint")


def _missing_package(what: str, said: str, error: Exception) -> tuple[str, str] | None:
    """What needs a package that is not installed, and the package; None if the error has another cause."""
    needs = re.search(r"(\w+) requires the (\w+) library", said)
    if needs is None and not isinstance(error, ModuleNotFoundError):
        return None
    cls, package = needs.groups() if needs is not None else (what, str(getattr(error, "name", "")))
    package = package.lower()
    return (cls, package) if not package or importlib.util.find_spec(package) is None else None


def remote_code(folder: Path) -> list[str]:
    """The code that a checkpoint brings along, as `file: module.Class`.

    Args:
        folder: the checkpoint's folder.
    """
    found: list[str] = []
    for name in _CODE_FILES:
        try:
            described = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        named = described.get("auto_map") if isinstance(described, dict) else None
        for value in named.values() if isinstance(named, dict) else ():
            found += [f"{name}: {part}" for part in (value if isinstance(value, list) else [value]) if part]
    return found
