"""Source keys and identities: when two media inputs, or two items, count as the same. Each is the digest of a framed list."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from typing import Any

from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, frame

_CALLER_HASH = re.compile(r"(0[xX])?[0-9a-fA-F]{1,1024}")
_LONGEST_NAME = 1024  # characters


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
    """What the model sees: equal identity means equal embeddings and equal positions.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its number, 1 to 3.
        format: the item's input format.
        feature: 32 bytes from `feature_digest` of the feature or the embeddings.
        fields: every field that the encoder or the positions read.
        salt: separates tenants.

    Returns:
        32 bytes.
    """
    return _keyed("mm-plugin/item", spec_name, output_version, modality, format, feature, fields, salt)


def parse_caller_hash(entry: Any) -> int | None:
    """A caller's hash as a number; None where the entry is malformed.

    Args:
        entry: a non-negative integer, or hexadecimal digits in either case with or without `0x`; of any length up to 1,024
            digits. Signs, `_`, spaces, other digits and empty text are malformed.
    """
    if isinstance(entry, bool):
        return None
    if isinstance(entry, numbers.Integral):
        return int(entry) if 0 <= int(entry) < 1 << 4096 else None
    if isinstance(entry, str) and _CALLER_HASH.fullmatch(entry):
        return int(entry, 16)
    return None


def parse_caller_name(entry: Any) -> int | str | None:
    """A caller's hash as a number where it is one, else as the text that it is; None where it cannot be a name.

    Args:
        entry: as for `parse_caller_hash`, or any text of 1 to 1,024 characters that UTF-8 can encode. Text counts as it is
            written: case, spaces and normal forms distinguish names.

    Example:
        >>> parse_caller_name("0xFF"), parse_caller_name("request-7/image 1"), parse_caller_name("")
        (255, 'request-7/image 1', None)
    """
    value = parse_caller_hash(entry)
    if value is not None or not isinstance(entry, str) or not 0 < len(entry) <= _LONGEST_NAME:
        return value
    try:
        return entry.encode().decode()  # of a subclass of str, its characters
    except UnicodeEncodeError:  # lone surrogates
        return None


def caller_identity(
    spec_name: str,
    output_version: int,
    modality: int,
    value: int | str,
    options: bytes,
    context: Any,
    *,
    salt: str | bytes | None = None,
) -> bytes:
    """The identity of a media input that the caller names by a hash: that hash, and all that could change how it is prepared.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its number, 1 to 3.
        value: the caller's hash, as `parse_caller_name` reads it; all of it counts.
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
    """The key of the preprocess cache: equal keys mean that the same media input was prepared in the same way.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its number, 1 to 3.
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


def deferred_identity(spec_name: str, output_version: int, modality: int, source_key: bytes) -> bytes:
    """The identity of a media input that is prepared where it is encoded: of its source, since nobody has seen its feature yet.

    It is a kind of its own, so it never equals that of the same media input prepared at once. Equal sources under equal options
    have equal identities on every machine.

    Args:
        spec_name: the model spec's name.
        output_version: the spec's output version.
        modality: its number, 1 to 3.
        source_key: 32 bytes; it has the salt already.

    Returns:
        32 bytes.
    """
    return _keyed("mm-plugin/deferred", spec_name, output_version, modality, source_key)


def _keyed(tag: str, spec_name: str, output_version: int, modality: int, *parts: Any) -> bytes:
    """The digest of an identity or key: its kind and the format's version first, then the model, then the rest."""
    return digest(frame([tag, FORMAT_VERSION, spec_name, output_version, int(modality), *parts]))
