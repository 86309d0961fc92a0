"""Tries every option of a plugin: an option enters the source key of a media input exactly where it may change the item."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect

from mm_plugin.errors import RequestError, UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import frame
from mm_plugin.items import Modality
from mm_plugin.processor.options import option_scopes

if TYPE_CHECKING:
    from mm_plugin.processor.processor import Processor


class OptionTrial(msgspec.Struct, frozen=True):
    """One value of one option, tried on one media input.

    Attributes:
        option: its name.
        value: what it was set to.
        modality: of the media input.
        changed: whether fields, replacement or feature differ from those of the default.
        new_key: whether the source key differs from that of the default.

    Example:
        >>> from mm_plugin import Modality
        >>> trial = OptionTrial("max_pixels", 4096, Modality.IMAGE, changed=True, new_key=True)
        >>> trial.new_key or not trial.changed  # what changes the output must change the source key
        True
    """

    option: str
    value: Any
    modality: Modality
    changed: bool
    new_key: bool


def sweep_options(
    open_processor: Callable[..., Processor],
    media: Mapping[Modality, Any],
    *,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> list[OptionTrial]:
    """Try every option of a plugin: what changes an item changes its source key, and options of other modalities change neither.

    Options that only the checkpoint's files may set, and those of modalities that the model does not take, are left out.

    Args:
        open_processor: opens the plugin's processor with the load options that are passed to it.
        media: a media input of each modality that the plugin takes.
        values: by option, the values to try; values near the default, by the option's type, where it has none here. A mapping
            is several options together, of which none can be given alone.

    Returns:
        All trials. Assert on them that the options that must make a difference did.

    Raises:
        AssertionError: an option breaks the rule, or none of its values was accepted; the message names the option.
    """
    usual = open_processor()
    before = {modality: _try(usual, modality, media_input, {}) for modality, media_input in media.items()}
    kinds = {field.name: field.type for field in _struct_info(type(usual.model).Options).fields}
    trials: list[OptionTrial] = []
    for option, scope in option_scopes(type(usual.model).Options).items():
        if scope.at == "checkpoint" or not any(map(scope.is_about, usual.spec.modalities)):
            continue
        current = getattr(usual.options, option)
        tried = 0
        for value in (values or {}).get(option) or _other_values(kinds[option], current):
            try:
                given = value if isinstance(value, Mapping) and option in value else {option: value}
                loaded, called = (open_processor(**given), {}) if scope.at == "load" else (usual, given)
                after = {m: _try(loaded, m, media_input, called) for m, media_input in media.items()}
            except (RequestError, UsageError):
                continue
            tried += 1
            for modality in media:
                (old_key, old_content), (key, content) = before[modality], after[modality]
                changed, new_key = old_content != content, old_key != key
                about = not scope.modalities or modality.name.lower() in scope.modalities
                trials.append(OptionTrial(option, value, modality, changed, new_key))
                trial = f"{option}={value!r} on {modality.argument}"
                excluded = "although its OptionScope does not name them"
                assert about or not changed, f"{trial} changes the item, {excluded}"
                assert about or not new_key, f"{trial} changes the source key, {excluded}"
                assert new_key or not changed, f"{trial} changes the item but not the source key"
        assert tried, f"{option}: none of the values tried was accepted; pass some in `values`"
    return trials


def _struct_info(declared: type[msgspec.Struct]) -> msgspec.inspect.StructType:
    info = msgspec.inspect.type_info(declared)
    assert isinstance(info, msgspec.inspect.StructType)
    return info


def _other_values(kind: msgspec.inspect.Type, current: Any) -> list[Any]:
    """Values near the current one that the option's type may allow."""
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.LiteralType):
        return [value for value in kind.values if value != current]
    if isinstance(current, bool):
        return [not current]
    if isinstance(current, int):
        return [current * 4, current * 2, current + 1, current - 1, current // 2, current // 4]
    if isinstance(current, float):
        return [current * 2, current / 2]
    if isinstance(current, tuple) and all(isinstance(level, int) for level in current):
        return [tuple(255 - level for level in current)]
    return []


def _try(
    processor: Processor, modality: Modality, media_input: Any, options: Mapping[str, Any]
) -> tuple[bytes | None, bytes]:
    """Source key of a media input, and a digest of all that the plugin computes from it.

    The digest is computed under a fresh salt, because a cache hit under a wrong key would hide what the option changes.
    """
    key = processor.prepare_item(modality, media_input, **options).source_key
    made = processor.prepare_item(modality, media_input, salt=secrets.token_bytes(16), **options)
    return key, digest(frame([made.fields, made.replacement.ids, made.replacement.is_embed, made.feature]))
