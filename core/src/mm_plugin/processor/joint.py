"""Requests that a model must prepare together: read as text, one task for the whole request, one item for each modality."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mm_plugin.arrays import detached
from mm_plugin.errors import RequestError, SpanError, UsageError
from mm_plugin.events import MediaNote
from mm_plugin.identity.framing import feature_digest
from mm_plugin.identity.keys import item_identity
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.items import Modality, MultimodalDataItem, join_notes
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.types import DecodedMedia
from mm_plugin.processor.arguments import Arguments, in_order, is_list
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.joint_output import check_joint_output
from mm_plugin.processor.mixins import ProcessesJointly
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import raise_first_error, run_each
from mm_plugin.processor.request import Facts, ReadItem
from mm_plugin.processor.stages.finish import output_of
from mm_plugin.processor.stages.given import is_given
from mm_plugin.processor.stages.measure import AuthorRules
from mm_plugin.processor.stages.read import count, facts_of, read_item, settings_of
from mm_plugin.processor.stages.sources import open_item, size_of
from mm_plugin.tasks import JointPrepared, JointTask, Preparer, prepare_all


class JointRequest(msgspec.Struct, frozen=True, eq=False):
    """A request as text, with its media inputs; where they stand, the model itself decides.

    Attributes:
        facts: what the items share.
        options: the author's `Options`, all resolved.
        text: the prompt.
        rendered: the text is a rendered chat template and has its special tokens already.
        items: the media inputs by modality, in order.
    """

    facts: Facts
    options: Any
    text: str
    rendered: bool
    items: tuple[ReadItem, ...]


def check_joint_arguments(model: OpenModel, arguments: Arguments) -> None:
    """Refuse what only requests that are prepared item by item can have.

    Raises:
        UsageError: `expanded`, `on_overflow` or `prepare` is given.
    """
    for name, usual in (("expanded", False), ("on_overflow", "error"), ("prepare", "here")):
        if getattr(arguments, name) != usual:
            raise UsageError(
                f"{name}: {model.spec.name} prepares the media inputs of a request together, so it must be {usual!r}",
                argument=name,
            )


def has_no_media(model: OpenModel, prompt: Any, media: Mapping[Modality, Sequence[Any]], arguments: Arguments) -> bool:
    """Whether a request is text alone, which is processed as by any other model."""
    return all(is_list(given) and not given for given in media.values()) and not any(
        model.reader.read(prompt, chat=arguments.chat(prompt)).media.values()
    )


def read_jointly(
    model: OpenModel,
    prompt: Any,
    media: Mapping[Modality, Sequence[Any]],
    arguments: Arguments,
    options: Mapping[str, Any],
) -> JointRequest:
    """The text and the media inputs of a request."""
    text, rendered, inside = model.reader.read_text(prompt, arguments.chat(prompt))
    values = {modality: in_order(modality, inside[modality], media[modality]) for modality in Modality}
    counts = count(model, values)
    if arguments.mm_hashes is not None:
        model.hashes.ignore("mm_hashes", "the media inputs of the request are prepared together")
    usual = settings_of(model, counts, options)
    items = [
        read_item(model, modality, index, value, usual[modality])
        for modality in counts
        for index, value in enumerate(values[modality])
    ]
    for item in items:
        if item.settings.options != usual[item.modality].options:
            where = (item.form.path if item.form is not None else None) or item.path
            raise RequestError(
                f"{where}: {model.spec.name} prepares the media inputs of a request together, so none can have options of its own",
                path=where,
            )
    facts = facts_of(model, items, counts, arguments)
    return JointRequest(facts, items[0].settings.options, text, rendered, tuple(items))


def measure_jointly(model: OpenModel, request: JointRequest, item: ReadItem) -> tuple[Any, Any]:
    """Source and size of one media input."""
    if is_given(item.value):
        raise RequestError(f"{item.path}: {model.spec.name} takes no prepared {item.modality.argument}", path=item.path)
    source = open_item(model, item, request.facts.intake)
    rules = AuthorRules(model, request.options, item.path)
    return source, size_of(item, source, rules, request.facts.intake)


def task_of(model: OpenModel, request: JointRequest, measured: Sequence[tuple[Any, Any]]) -> JointTask:
    """The one task of a request, within the limits on totals."""
    model.budget.check_totals([(item.modality, size) for item, (_, size) in zip(request.items, measured, strict=True)])
    sources: dict[Modality, list[tuple[Any, Any]]] = {}
    for item, entry in zip(request.items, measured, strict=True):
        sources.setdefault(item.modality, []).append(entry)
    salt = request.facts.arguments.salt
    return JointTask(model.ref, request.text, request.rendered, sources, request.options, salt)


def prepare_jointly(model: OpenModel, task: JointTask, deadline: Deadline) -> JointPrepared:
    """Decode everything and let the author prepare it together."""
    began, author = time.perf_counter(), model.author
    jointly = author.model
    assert isinstance(jointly, ProcessesJointly)
    entries = [(modality, *entry) for modality, found in task.sources.items() for entry in found]

    def decode(entry: tuple[Modality, Any, Any]) -> DecodedMedia:
        _, source, size = entry
        with deadline.running(f"decoding {source.path}"):
            decoded: DecodedMedia = source.decode(size, background=task.options.background)
        return decoded

    decoded = run_each(model.runtime.executor, decode, entries)
    raise_first_error(decoded)
    media: dict[Modality, list[DecodedMedia]] = {}
    for (modality, _, _), one in zip(entries, decoded, strict=True):
        media.setdefault(modality, []).append(one)
    with deadline.running("preparing the media inputs together"):
        found = author.call(
            "prepare_jointly",
            lambda: jointly.prepare_jointly(task.text, media, task.options, rendered=task.rendered),
            "prompt",
        )
    try:
        ids, items = check_joint_output(found, model.spec, list(media))
    except SpanError as wrong:
        raise author.fault(f"{author.name}: {wrong.message}") from wrong
    for item in items:
        arrays = [array for one in media[item.modality] for array in MEDIA_KINDS[item.modality].arrays(one)]
        item.feature = detached(item.feature, *arrays)
        with author.identified("prepare_jointly returned"):
            content = feature_digest(item.feature, model.runtime.digests)
            item.set_identity(
                item_identity(
                    model.spec.name,
                    model.spec.output_version,
                    item.modality,
                    item.format.value,
                    content,
                    item.model_specific_data,
                    salt=task.salt,
                )
            )
    notes = [_note(item.modality, item.modality.argument, note) for item in items for note in item.notes]
    sizes = [size for _, _, size in entries]
    notes += _media_notes(items, sizes, decoded)
    return JointPrepared(ids, items, time.perf_counter() - began, notes)


def _media_notes(items: Sequence[MultimodalDataItem], sizes: Sequence[Any], decoded: Sequence[Any]) -> list[MediaNote]:
    """Notes on each media input, which its modality's item gets too.

    Args:
        items: one for each modality.
        sizes: of the media inputs.
        decoded: the media inputs, read to their ends, those of a modality in order.
    """
    notes: list[MediaNote] = []
    places = {item.modality: 0 for item in items}
    by_modality = {item.modality: item for item in items}
    for size, one in zip(sizes, decoded, strict=True):
        own = join_notes(getattr(size, "notes", ()), one.notes)
        modality, item = one.modality, by_modality[one.modality]
        notes += [_note(modality, f"{modality.argument}[{places[modality]}]", note) for note in own]
        item.notes = join_notes(item.notes, own)
        places[modality] += 1
    return notes


def _note(modality: Modality, path: str, note: str) -> MediaNote:
    return MediaNote(path=path, modality=modality.name.lower(), note=note)


def finish_jointly(
    model: OpenModel, preparer: Preparer, task: JointTask, limit: int | None
) -> MultimodalProcessorOutput:
    """The output of a request that is prepared together."""
    (prepared,) = prepare_all(preparer, [task], JointPrepared)
    if isinstance(prepared, Exception):
        try:
            raise prepared
        finally:
            del prepared  # its traceback leads to this frame
    model.budget.check_prompt(len(prepared.ids), limit)
    for item in prepared.items:
        model.budget.check_item_tokens(item.num_tokens, item.modality.argument)
    for item in prepared.items:
        model.report(item, item.modality.argument, cached=False, seconds=prepared.seconds)
    for note in prepared.notes:
        model.runtime.observers.emit(note)
    return output_of(model, prepared.ids, list(prepared.items))
