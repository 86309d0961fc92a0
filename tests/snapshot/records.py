"""What came out of a call, as one line of short texts, one for each aspect, so that a difference says which aspect moved.

The digests of `source keys`, `identities` (with hashes and pad values), `cache ids` and `feature digests` follow the framework's
byte format; those of all other aspects are made here, from plain bytes, and stay equal when that format is changed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from snapshot.framework import MMPluginError, feature_digest, is_output, is_prepared_item

ASPECTS = (
    "ids",
    "cache ids",
    "marks",
    "offsets",
    "identities",
    "fields",
    "formats",
    "features",
    "feature digests",
    "positions",
    "delta",
    "dropped",
    "source keys",
    "count",
)
NOTHING = "-"
REFUSED = "!"
# What an error says beside its message, which may be reworded.
_SAID = ("reason", "setting", "path", "argument", "expected", "found", "limit", "value")


def short(data: bytes) -> str:
    """16 hexadecimal digits of a digest."""
    return hashlib.sha256(data).hexdigest()[:16]


def plain(value: Any) -> bytes:
    """A value as bytes: its kind, and for an array its dtype, shape and contents in C order."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which numpy has not
            return b"bfloat16" + plain(value.view(torch.int16))
        value = value.numpy()
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return f"{array.dtype.str}{array.shape}".encode() + array.tobytes()
    if isinstance(value, Mapping):
        pairs = sorted((plain(key), plain(part)) for key, part in value.items())
        return b"{" + b"".join(len(part).to_bytes(8) + part for pair in pairs for part in pair)
    if isinstance(value, list | tuple):
        return b"[" + b"".join(len(part).to_bytes(8) + part for part in map(plain, value))
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, str | int | float | bool | None):
        return f"{type(value).__name__} {value}".encode()
    raise TypeError(f"a {type(value).__name__} is not recorded")


def _digest(values: Any) -> str:
    return NOTHING if values is None or (isinstance(values, list) and not values) else short(plain(values))


def attempt(call: Callable[[], Any]) -> str:
    """What a call gives, or how it is refused, as a line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoders warn of much that they read nevertheless
        try:
            found = call()
        except MMPluginError as error:
            return refusal(error)
        except Exception as error:  # no error of another kind may leave the framework; where one does, it shows
            return f"{REFUSED}raised {type(error).__name__}"
    return line(found)


def refusal(error: Any) -> str:
    """An error's code and what it says beside its message."""
    said = [f"{name}={getattr(error, name)}" for name in _SAID if getattr(error, name, None) is not None]
    return REFUSED + " ".join([error.code, *said]).replace("\n", " ")


def line(found: Any) -> str:
    """What a call gave: an output, a prepared item, a count, or a mapping with the aspects that are known already."""
    if is_output(found):
        aspects = of_output(found)
    elif is_prepared_item(found):
        aspects = of_prepared(found)
    elif isinstance(found, tuple):
        aspects = {"count": "/".join(map(str, found))}
    else:
        aspects = found
    return " ".join(aspects.get(name, NOTHING).replace(" ", "_") for name in ASPECTS)


def of_output(output: Any) -> dict[str, str]:
    """The aspects of what `process` returned."""
    items = output.mm_items
    contents = [item.feature if item.precomputed_embeddings is None else item.precomputed_embeddings for item in items]
    return {
        "ids": _digest(output.input_ids),
        "cache ids": _digest(output.padded_input_ids),
        "marks": _digest(output.token_modalities),
        "offsets": _digest([[list(map(int, span)) for span in item.offsets] for item in items]),
        "identities": _digest([[item.identity, item.hash, item.pad_value, list(item.pad_values)] for item in items]),
        "fields": _digest([[int(item.modality), dict(item.model_specific_data)] for item in items]),
        "formats": ",".join(item.format.value[:1] for item in items) or NOTHING,
        "features": _digest(contents),
        "feature digests": _digest([feature_digest(content) for content in contents]),
        "positions": _digest(output.mrope_positions),
        "delta": NOTHING if output.mrope_position_delta is None else str(output.mrope_position_delta),
        "dropped": ",".join(output.dropped) or NOTHING,
    }


def of_prepared(item: Any) -> dict[str, str]:
    """The aspects of what `prepare_item` returned."""
    is_embed = item.replacement.is_embed
    return {
        "ids": _digest([np.array(item.replacement.ids), None if is_embed is None else np.array(is_embed)]),
        "identities": _digest([item.identity]),
        "fields": _digest([dict(item.fields)]),
        "features": _digest([item.feature]),
        "feature digests": NOTHING if item.feature is None else _digest([feature_digest(item.feature)]),
        "source keys": NOTHING if item.source_key is None else item.source_key.hex()[:16],
    }


def folded(lines: Sequence[str]) -> list[str]:
    """Lines of a list with `=` in place of what stands in the line above, for a smaller file."""
    out, above = [], ""
    for line in lines:
        values, old = line.split(" "), above.split(" ")
        if REFUSED not in (line[:1], above[:1]) and above:
            values = ["=" if value == other else value for value, other in zip(values, old, strict=True)]
        out.append("=" if line == above else " ".join(values))
        above = line
    return out


def unfolded(lines: Sequence[str]) -> list[str]:
    """The lines of which `folded` made these."""
    out, above = [], ""
    for line in lines:
        if line == "=":
            out.append(above)
            continue
        old = above.split(" ")
        values = [old[place] if value == "=" else value for place, value in enumerate(line.split(" "))]
        above = " ".join(values)
        out.append(above)
    return out


def differences(expected: str, found: str) -> list[str]:
    """The aspects in which two lines differ, each with both values."""
    if expected[:1] == REFUSED or found[:1] == REFUSED:
        return [] if expected == found else [f"{expected!r} became {found!r}"]
    pairs = zip(ASPECTS, expected.split(" "), found.split(" "), strict=True)
    return [f"{name}: {left} became {right}" for name, left, right in pairs if left != right]
