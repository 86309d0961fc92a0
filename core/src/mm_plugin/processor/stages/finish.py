"""Last stage: expansion with recorded spans, identities, sentinels, token modalities and positions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mm_plugin.errors import PlaceholderError, UnattributedError
from mm_plugin.inputs.processed import MultimodalProcessorOutput, PromptUsage
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import (
    Expansion,
    expand,
    match_expanded,
    order_expanded,
    pad_by_offsets,
    token_modalities_of,
)
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import PreparedRequest, ReadyItem


def finish(model: OpenModel, request: PreparedRequest) -> MultimodalProcessorOutput:
    """The output of a request whose items are prepared.

    Raises:
        PlaceholderError: expanded ids do not hold the items' replacements.
        RequestError: a caller's hash stood for other content before.
    """
    expanded = request.facts.arguments.expanded
    try:
        if expanded:
            request = _in_order_of_ids(request)
        replacements = [entry.prepared.replacement for entry in request.items]
        if expanded:
            expansion = match_expanded(request.ids, replacements)
            _check_surplus(model, expansion)
        else:
            expansion = expand(request.ids, request.slots, replacements)
    except UnattributedError as error:
        raise PlaceholderError(f"prompt: {error.message}", path="prompt") from error
    items = [item_of(model, entry, offsets) for entry, offsets in zip(request.items, expansion.offsets, strict=True)]
    claims = [
        model.hashes.identify(item, entry, request.facts) for entry, item in zip(request.items, items, strict=True)
    ]
    claims += [entry.claim for entry in request.items]
    model.hashes.bind([claim for claim in claims if claim is not None])
    for entry, item in zip(request.items, items, strict=True):
        model.report(item, entry.path, cached=entry.cached, seconds=entry.seconds)
        model.report_notes(item.modality, entry.path, item.notes)
    return output_of(model, expansion.ids, items, request.dropped)


def output_of(
    model: OpenModel, ids: np.ndarray, items: list[MultimodalDataItem], dropped: tuple[str, ...] = ()
) -> MultimodalProcessorOutput:
    """The output of expanded ids and items that have their spans and identities."""
    positions, delta = model.author.positions(items, len(ids), model.position_options)
    token_modalities = token_modalities_of(items, len(ids))
    return MultimodalProcessorOutput(
        input_ids=ids,
        padded_input_ids=pad_by_offsets(ids, items),
        token_modalities=token_modalities,
        mm_items=items,
        special_tokens=model.special_tokens,
        mrope_positions=positions,
        mrope_position_delta=delta,
        position_options=dict(model.position_options),
        dropped=dropped,
        usage=PromptUsage.of(token_modalities),
    )


def item_of(model: OpenModel, entry: ReadyItem, offsets: Sequence[tuple[int, int]]) -> MultimodalDataItem:
    """The item of a prepared media input, without an identity."""
    prepared = entry.prepared
    return MultimodalDataItem(
        modality=entry.modality,
        offsets=list(offsets),
        format=prepared.format,
        feature=prepared.feature,
        task=entry.task,
        precomputed_embeddings=prepared.embeddings,
        model_specific_data=dict(prepared.fields),
        attention=model.spec.attention.get(entry.modality, "causal"),
        notes=prepared.notes,
    )


def _in_order_of_ids(request: PreparedRequest) -> PreparedRequest:
    """Items of several modalities in the order in which they stand in expanded ids."""
    kinds: dict[Modality, list[ReadyItem]] = {}
    for entry in request.items:
        kinds.setdefault(entry.modality, []).append(entry)
    if len(kinds) < 2:
        return request
    groups = [[entry.prepared.replacement for entry in entries] for entries in kinds.values()]
    queues = [iter(entries) for entries in kinds.values()]
    ordered = tuple(next(queues[group]) for group in order_expanded(request.ids, groups))
    return msgspec.structs.replace(request, items=ordered)


def _check_surplus(model: OpenModel, expansion: Expansion) -> None:
    """Expanded ids hold no placeholder but those of the items that came."""
    for modality, token in model.special_tokens.placeholders.items():
        inside = sum(int(np.count_nonzero(expansion.ids[start:end] == token)) for start, end in expansion.spans)
        found = int(np.count_nonzero(expansion.ids == token))
        if found != inside:
            raise PlaceholderError(
                f"prompt: expected {inside} {model.spec.placeholders[modality]} for the {modality.argument} that were given, "
                f"got {found}",
                path="prompt",
                expected=inside,
                found=found,
            )
