"""Keys of a checkpoint's settings: each is an option, or is known to change nothing; any other is refused where it stands."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mm_plugin.errors import UsageError
from mm_plugin.settings_files import PIXEL_EDGES

# What libraries write beside the numbers: names of classes, and the form in which arrays come and go.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_map",
        "data_format",
        "device",
        "disable_grouping",
        "input_data_format",
        "processor_class",
        "return_metadata",
        "return_tensors",
        "transformers_version",
        "video_metadata",
    }
)
_EDGES = dict(PIXEL_EDGES)


def any_value(value: Any) -> bool:  # noqa: ARG001
    """For a key that changes nothing whatever its value; see `BaseOptions.settings_without_effect`."""
    return True


def check_settings(
    settings: Mapping[str, Any], *, known: Collection[str], without_effect: Mapping[str, Any], source: str, reader: str
) -> None:
    """Refuse keys of which nobody said that they change nothing.

    Keys whose value is null count as absent. A key of the object `size` is named `size.height`.

    Args:
        settings: as a file has them.
        known: keys that are read.
        without_effect: further keys: the value with which a key changes nothing, or a function that is true of such values.
        source: the file, and the section of it, for the message.
        reader: who reads them, for the message.

    Raises:
        UsageError: a key is neither; the message names file and key.

    Examples:
        >>> rules = {"known": {"patch_size"}, "without_effect": {"do_pad": False}, "source": "a.json", "reader": "TinyVL"}
        >>> check_settings({"patch_size": 14, "do_pad": False, "crop_size": None, "auto_map": {}}, **rules)
        >>> check_settings({"patch_size": 14, "do_pad": True}, **rules)
        Traceback (most recent call last):
        ...
        mm_plugin.errors.UsageError: a.json: do_pad must be false for TinyVL, got true
    """
    for name, value in _flat(settings, known):
        if value is None or name in known or _is_harmless(name):
            continue
        if name not in without_effect:
            raise UsageError(
                f"{source}: unknown key {name}; {reader} does not read it, and it may change what the model sees; remove it if it "
                "does not",
                argument="checkpoint",
            )
        allowed = without_effect[name]
        if not _is_allowed(value, allowed):
            must = "cannot be followed by" if callable(allowed) else f"must be {_shown(allowed)} for"
            raise UsageError(f"{source}: {name} {must} {reader}, got {_shown(value)}", argument="checkpoint")


def _is_allowed(value: Any, allowed: Any) -> bool:
    if not callable(allowed):
        return type(value) is type(allowed) and bool(value == allowed)
    try:
        return bool(allowed(value))
    except (TypeError, ValueError):  # a value of a type that the function does not expect
        return False


def _flat(settings: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of `size` by themselves; limits that `Checkpoint.preprocessor` made of them are not repeated."""
    size = settings.get("size")
    edges = size if isinstance(size, Mapping) else {}
    made = {_EDGES[edge]: value for edge, value in edges.items() if edge in _EDGES and value is not None}
    for edge, value in edges.items() if "size" not in known else ():
        limit = _EDGES.get(edge)
        yield limit if limit is not None and limit in known else f"size.{edge}", value
    for name, value in settings.items():
        is_repeated = name in made and made[name] == value
        if not is_repeated and not (name == "size" and edges is size):
            yield name, value


def _is_harmless(name: str) -> bool:
    return name in _WITHOUT_EFFECT or name.startswith("_") or name.endswith("_type")


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:80]
