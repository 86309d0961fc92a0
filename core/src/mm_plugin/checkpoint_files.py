"""Files of a checkpoint: fetched from the hub, read as JSON, and refused where they block a reader or are outside the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mm_plugin.errors import UsageError
from mm_plugin.files import is_within, open_regular, special_file
from mm_plugin.foreign import is_interruption, words

# What a processor needs from the hub; weights are downloaded when tensors are requested.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def fetch(name: str, patterns: tuple[str, ...]) -> Path:
    """The files of a hub id, from the local cache if they are there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except BaseException as error:
        if is_interruption(error):
            raise
        raise UsageError(
            f"{name!r}: expected a folder or a hub id; there is no such folder, and the hub says {words(error)}",
            argument="checkpoint",
        ) from error


def check_files(folder: Path) -> None:
    """Refuse what would block whoever opens it: the tokenizer's library opens files of the folder by their names.

    Raises:
        UsageError: the folder holds a FIFO, device or socket.
    """
    for place in (folder, folder / "additional_chat_templates"):
        found = special_file(place) if place.is_dir() else None
        if found is not None:
            raise UsageError(f"{found}: expected a regular file, got a FIFO, device or socket", argument="checkpoint")


def weights_file(folder: Path, name: str) -> Path:
    """A file of weights that the folder, or its index, names.

    Raises:
        UsageError: it is not a regular file, or leads out of the folder.
    """
    if not is_within(folder, name):
        raise UsageError(
            f"{folder}: expected weights inside the folder, got {name!r}, which leads out of it; copy the file into the folder",
            argument="checkpoint",
        )
    if not (folder / name).is_file():
        raise UsageError(f"{folder / name}: expected a regular file of weights, found none", argument="checkpoint")
    return folder / name


def read_file(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        UsageError: it is missing, is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path) as opened:
            return opened.read()
    except FileNotFoundError:
        raise UsageError(f"{path} is missing", argument="checkpoint") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", argument="checkpoint") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UsageError: as `read_file`, or it is not a JSON object.
    """
    try:
        value = json.loads(read_file(path).decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", argument="checkpoint") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}", argument="checkpoint")
    return value


def read_vocabulary(folder: Path) -> dict[str, int]:
    """The id of every token, as the tokenizer's files say, read without a tokenizer's library.

    The ids of tokenizer.json come first; tokenizer_config.json (`added_tokens_decoder`) and added_tokens.json may add others.

    Raises:
        UsageError: there is no tokenizer.json, or a file is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            f"{path} is missing, without which token ids are unknown here; save it with transformers' save_pretrained",
            argument="checkpoint",
        )
    found: dict[str, Any] = {}
    config, added = folder / "tokenizer_config.json", folder / "added_tokens.json"
    try:
        if config.is_file():
            decoder = read_json(config).get("added_tokens_decoder") or {}
            found |= {token["content"]: int(number) for number, token in decoder.items()}
        if added.is_file():
            found |= read_json(added)
        table = read_json(path)
        vocabulary = table["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score, in order
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        found |= vocabulary
        found |= {token["content"]: token["id"] for token in table.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder}: the tokenizer's files are malformed ({error})", argument="checkpoint") from error
    if not all(isinstance(token, str) and type(number) is int for token, number in found.items()):
        raise UsageError(f"{path}: expected a whole number for each token", argument="checkpoint")
    return found
