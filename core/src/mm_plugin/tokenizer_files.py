"""Which files of a checkpoint hold chat templates and the tokenizer, and which of them cannot be read. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_plugin.checkpoint_files import read_file, read_json
from mm_plugin.errors import UsageError
from mm_plugin.foreign import words
from mm_plugin.metadata import in_words

_LEGACY, _DEFAULT, _NAMED = "chat_template.json", "chat_template.jinja", "additional_chat_templates"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_JSON = (*("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), *_TOKENIZER)


def find_chat_templates(folder: Path, tokenizer: Any) -> dict[str, str]:
    """The chat templates by name: those in files of their own, as for a processor of transformers, or else the tokenizer's.

    Args:
        folder: the checkpoint's.
        tokenizer: as transformers opens it.

    Returns:
        The template without a name as `default`; empty where there is none.

    Raises:
        UsageError: a file cannot be read, or two contradict each other.
    """
    found = _in_files(folder)
    own = getattr(tokenizer, "chat_template", None)
    return found if found or own is None else named_templates(own, f"{folder}: chat_template of the tokenizer")


def _in_files(folder: Path) -> dict[str, str]:
    """Those in files of their own, in the order in which transformers looks for them."""
    combined = folder / "processor_config.json"
    if combined.is_file():
        section = read_json(combined).get("chat_template")
        if section is not None:
            return named_templates(section, f"{combined}: chat_template")
    named = sorted((folder / _NAMED).glob("*.jinja"))
    if (folder / _LEGACY).is_file():
        if named:
            raise UsageError(
                f"{folder}: expected chat templates in {_LEGACY} or in {_NAMED}, found both; keep {_NAMED} and move the other to "
                f"{_DEFAULT}",
                argument="checkpoint",
            )
        return named_templates(read_json(folder / _LEGACY).get("chat_template"), str(folder / _LEGACY))
    found = {file.stem: _read_text(file) for file in named}
    if (folder / _DEFAULT).is_file():
        found["default"] = _read_text(folder / _DEFAULT)
    return found


def named_templates(value: Any, where: str) -> dict[str, str]:
    """Chat templates by name, of a text, an object, or a list of objects with `name` and `template`.

    Args:
        value: as a file or a tokenizer has it.
        where: the place, for the error.

    Raises:
        UsageError: it has another shape.
    """
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return dict(value)
    raise UsageError(
        f"{where}: expected a chat template as text, or several by name, found {type(value).__name__}",
        argument="checkpoint",
    )


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without a tokenizer, of which transformers may make an empty one.

    Args:
        folder: the checkpoint's.

    Raises:
        UsageError: it has none of the files of a tokenizer.
    """
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", *_TOKENIZER)):
        raise UsageError(_no_tokenizer(folder), argument="checkpoint")


def _no_tokenizer(folder: Path) -> str:
    return (
        f"{folder}: expected a tokenizer in {_TOKENIZER[0]} or {_TOKENIZER[1]}, found none of them; copy the file from the "
        "released checkpoint"
    )


def tokenizer_fault(folder: Path, error: BaseException) -> UsageError:
    """The error of a tokenizer that cannot be opened; it names the file that is at fault where one is.

    Args:
        folder: the checkpoint's.
        error: what was raised.
    """
    said = f"{' '.join(words(error).split())[:400]}{in_words(error)}"
    broken = next((found for name in _JSON if (found := _broken(folder / name)) is not None), None)
    if broken is not None:
        return UsageError(f"{broken}; copy the file from the released checkpoint", argument="checkpoint")
    if not any((folder / name).is_file() for name in _TOKENIZER):
        return UsageError(f"{_no_tokenizer(folder)} (transformers: {said})", argument="checkpoint")
    named = next(name for name in _TOKENIZER if (folder / name).is_file())
    return UsageError(f"{folder / named}: the tokenizer cannot be opened: {said}", argument="checkpoint")


def _broken(path: Path) -> str | None:
    """What is wrong with a file of the tokenizer; None where it can be read, or is not there."""
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"{path}: cannot be read: {error}"
    if not content:
        return f"{path}: expected a file of the tokenizer, found an empty one"
    if path.suffix != ".json":
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"{path}: expected JSON, found {type(error).__name__}: {error}"
    if not isinstance(found, dict):
        return f"{path}: expected a JSON object, found {type(found).__name__}"
    if path.name == "tokenizer.json":
        return _broken_tokenizer(path, content.decode())
    return None


def _broken_tokenizer(path: Path, content: str) -> str | None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(content)
    except Exception as error:  # the package raises Exception itself
        return f"{path}: the tokenizer cannot be opened: {' '.join(str(error).split())[:400]}"
    return None


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}", argument="checkpoint") from error
