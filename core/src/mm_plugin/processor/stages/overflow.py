"""Third stage: the expanded prompt held to its limit by the caller's policy, and totals to theirs. Nothing is decoded.

A policy is a row of `POLICIES`: a function that makes a request shorter, or returns None where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from mm_plugin.cache.pins import Pins
from mm_plugin.events import ItemDropped
from mm_plugin.identity.framing import frame
from mm_plugin.items import Modality
from mm_plugin.placeholders import Slot
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import raise_first_error, run_each
from mm_plugin.processor.request import FittedRequest, MeasuredItem, ReadRequest
from mm_plugin.processor.stages.measure import measure

Policy = Callable[[OpenModel, FittedRequest, int], FittedRequest | None]


def fit(model: OpenModel, pins: Pins, read: ReadRequest, items: tuple[MeasuredItem, ...]) -> FittedRequest:
    """The request within every limit; media inputs are measured again where the others' number changes them.

    Args:
        model: the open model.
        pins: what the request holds in the cache.
        read: the request as it came.
        items: its media inputs, measured.

    Raises:
        LimitError: it is still too long, or a total is too large.
    """
    request = FittedRequest(read.facts, read.ids, read.slots, items)
    limit, policy = read.facts.arguments.max_prompt_tokens, POLICIES[read.facts.arguments.on_overflow]
    while limit is not None and (excess := expanded_length(request) - limit) > 0:
        shorter = policy(model, request, excess)
        if shorter is None:
            break
        request = _measured_again(model, pins, read, request, shorter)
    model.budget.check_prompt(expanded_length(request), limit)
    model.budget.check_totals([(item.modality, item.size) for item in request.items if item.size is not None])
    return request


def expanded_length(request: FittedRequest) -> int:
    """Tokens of the expanded prompt."""
    length = len(request.ids)
    for slot, item in zip(request.slots, request.items, strict=bool(request.slots)):
        length += len(item.replacement.ids) - (slot.end - slot.start)
    return length


def _measured_again(
    model: OpenModel, pins: Pins, read: ReadRequest, before: FittedRequest, after: FittedRequest
) -> FittedRequest:
    """The shorter request with the context of the media inputs that stay, and each measured again if that is another."""
    gone = [item for item in before.items if item not in after.items]
    if not gone:
        return after
    pins.give_back(item.key for item in gone if item.key)
    for item in gone:
        why = f"the prompt has more than {read.facts.arguments.max_prompt_tokens} tokens"
        model.runtime.observers.emit(ItemDropped(path=item.path, why=why))
    context = model.author.context(_counts(after))
    if frame(context) == frame(after.facts.context):
        return after
    pins.give_back(item.key for item in after.items if item.key)
    facts = msgspec.structs.replace(after.facts, context=context)
    values = {item.path: item for item in read.items}
    items = run_each(
        model.runtime.executor, lambda item: measure(model, facts, pins, values[item.path], item.source), after.items
    )
    raise_first_error(items)
    return msgspec.structs.replace(after, facts=facts, items=tuple(items))


def _counts(request: FittedRequest) -> Mapping[Modality, int]:
    counts = {modality: sum(item.modality is modality for item in request.items) for modality in Modality}
    return {modality: count for modality, count in counts.items() if count}


# -------------------------------------------------------------------- policies


def _refuse(_: OpenModel, __: FittedRequest, ___: int) -> None:
    """Nothing is left out."""


def _drop_oldest(model: OpenModel, request: FittedRequest, _: int) -> FittedRequest | None:
    """Leave out the first media input."""
    return _drop(model, request, 0) if request.items else None


def _drop_newest(model: OpenModel, request: FittedRequest, _: int) -> FittedRequest | None:
    """Leave out the last media input."""
    return _drop(model, request, len(request.items) - 1) if request.items else None


def _trim_text(model: OpenModel, request: FittedRequest, excess: int) -> FittedRequest | None:
    """Leave out the first tokens of text; media inputs, their wrappers and special tokens stay."""
    text = ~model.reader.is_protected(request.ids)
    for slot in request.slots:
        text[slot.start : slot.end] = False
    gone = np.flatnonzero(text)[:excess]
    if not len(gone):
        return None
    shift = [int(np.searchsorted(gone, slot.start)) for slot in request.slots]
    slots = tuple(Slot(slot.start - n, slot.end - n) for slot, n in zip(request.slots, shift, strict=True))
    return msgspec.structs.replace(request, ids=np.delete(request.ids, gone), slots=slots)


POLICIES: Mapping[str, Policy] = {
    "error": _refuse,
    "drop_oldest": _drop_oldest,
    "drop_newest": _drop_newest,
    "trim_text": _trim_text,
}


def _drop(model: OpenModel, request: FittedRequest, index: int) -> FittedRequest:
    """The request without one media input, its slot, and the start and end token around it."""
    slot = _wrapped(model, request.ids, request.slots[index])
    width = slot.end - slot.start
    others = [other for place, other in enumerate(request.slots) if place != index]
    return msgspec.structs.replace(
        request,
        ids=np.delete(request.ids, np.arange(slot.start, slot.end)),
        slots=tuple(
            Slot(other.start - width, other.end - width) if other.start >= slot.end else other for other in others
        ),
        items=tuple(item for place, item in enumerate(request.items) if place != index),
        dropped=(*request.dropped, request.items[index].path),
    )


def _wrapped(model: OpenModel, ids: np.ndarray, slot: Slot) -> Slot:
    """The slot with the start and end token that stand around it, if they do."""
    if slot.start > 0 and slot.end < len(ids):
        around = (int(ids[slot.start - 1]), int(ids[slot.end]))
        if around in model.special_tokens.pairs:
            return Slot(slot.start - 1, slot.end + 1)
    return slot
