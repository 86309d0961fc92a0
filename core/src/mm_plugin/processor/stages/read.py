"""First stage: ids with slots, and a media input for each slot in prompt order. No media input is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin.errors import PlaceholderError
from mm_plugin.items import Modality
from mm_plugin.media.images import raw_pixels
from mm_plugin.media.limits import check_request_pixels
from mm_plugin.media.with_options import WithOptions
from mm_plugin.processor.arguments import Arguments, in_order
from mm_plugin.processor.budget import Intake, array_bytes
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import Facts, ItemSettings, ReadItem, ReadRequest


def read(
    model: OpenModel,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> ReadRequest:
    """Ids with slots, and a media input for each slot.

    Args:
        model: the open model.
        prompt: text, token ids, or chat messages.
        media: what the caller gave beside the prompt.
        arguments: what the caller says of the whole request.
        options: options of this request.

    Raises:
        RequestError: prompt and media inputs do not fit, or are too many.
    """
    found = model.reader.read(prompt, expanded=arguments.expanded, chat=arguments.chat(prompt))
    values = {modality: in_order(modality, found.media[modality], media[modality]) for modality in Modality}
    counts = count(model, values)
    if arguments.expanded:
        order = [modality for modality, number in counts.items() for _ in range(number)]
    else:
        order = [modality for _, modality in found.slots]
        for modality in Modality:
            check_slots(model, modality, order.count(modality), len(values[modality]))
    usual = settings_of(model, counts, options)
    hashes = model.hashes.align(arguments.mm_hashes, counts, arguments.mm_hash_scope)
    taken = dict.fromkeys(Modality, 0)
    items = []
    for modality in order:
        index = taken[modality]
        taken[modality] += 1
        known = hashes[modality][index] if hashes else None
        items.append(read_item(model, modality, index, values[modality][index], usual[modality], known))
    facts = facts_of(model, items, counts, arguments)
    return ReadRequest(facts, found.ids, tuple(slot for slot, _ in found.slots), tuple(items))


def read_one(
    model: OpenModel,
    modality: Modality,
    value: Any,
    counts: Mapping[Modality, int],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> ReadRequest:
    """A request of one media input without a prompt."""
    item = read_item(model, modality, 0, value, settings_of(model, [modality], options)[modality])
    return ReadRequest(facts_of(model, [item], counts, arguments), np.zeros(0, dtype=np.int64), (), (item,))


def read_item(
    model: OpenModel,
    modality: Modality,
    index: int,
    value: Any,
    usual: ItemSettings,
    caller_hash: int | str | None = None,
) -> ReadItem:
    """A media input and what is in force for it: its own options before those of the request.

    Args:
        model: the open model.
        modality: what it is.
        index: among those of its modality.
        value: as the caller gave it.
        usual: what is in force for those without options of their own.
        caller_hash: by which the caller knows it, or None.

    Raises:
        RequestError: an option of a client is unknown, or its value does not fit.
        UsageError: an option of the server is unknown.
    """
    path = f"{modality.argument}[{index}]"
    if not isinstance(value, WithOptions):
        return ReadItem(modality, path, value, usual, caller_hash)
    options = model.item_options.resolve(value, modality, path, usual.options)
    settings = ItemSettings(options, model.table.effective(options, modality))
    return ReadItem(modality, path, value.value, settings, caller_hash, value)


def settings_of(
    model: OpenModel, modalities: Iterable[Modality], options: Mapping[str, Any]
) -> dict[Modality, ItemSettings]:
    """What is in force, by modality, for media inputs without options of their own.

    Raises:
        UsageError: an option of the request is unknown.
        RequestError: a value does not fit its option.
    """
    resolved = model.table.call(options)
    return {modality: ItemSettings(resolved, model.table.effective(resolved, modality)) for modality in modalities}


def count(model: OpenModel, values: Mapping[Modality, Sequence[Any]]) -> dict[Modality, int]:
    """How many media inputs there are by modality, if the model takes them and they are not too many."""
    counts = {modality: len(found) for modality, found in values.items() if found}
    for modality in counts:
        model.serves(modality)
    model.budget.check_counts(counts)
    return counts


def facts_of(
    model: OpenModel,
    items: Sequence[ReadItem],
    counts: Mapping[Modality, int],
    arguments: Arguments,
) -> Facts:
    """What the items of a request share; what came as arrays and PIL objects is counted before any is touched."""
    pixels, intake = 0, Intake(model.settings, counts.get(Modality.AUDIO, 0))
    for item in items:
        pixels += raw_pixels(item.value)
        check_request_pixels(item.path, pixels, model.settings)
        intake.add_bytes(item.path, array_bytes(item.value))
    return Facts(arguments=arguments, context=model.author.context(counts), intake=intake)


def check_slots(model: OpenModel, modality: Modality, slots: int, given: int) -> None:
    """Refuse a prompt whose placeholders are not as many as its media inputs."""
    if slots != given:
        token = model.spec.placeholders.get(modality, "")
        raise PlaceholderError(
            f"{modality.argument}: the prompt has {slots} {modality.name.lower()} placeholders {token}, "
            f"{given} {modality.argument} were given",
            path=modality.argument,
            expected=slots,
            found=given,
        )
