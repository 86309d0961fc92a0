"""Second stage, item by item: source key and cache, or size, fields and replacement from the header. Nothing is decoded."""

from __future__ import annotations

import time
from typing import Any

from mm_plugin.cache.pins import Pins
from mm_plugin.identity.keys import source_key
from mm_plugin.media.source import MediaSource
from mm_plugin.media.types import Sampling, VideoSize
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import Facts, MeasuredItem, ReadItem
from mm_plugin.processor.stages.given import accept, is_given
from mm_plugin.processor.stages.sources import open_item, size_of


class AuthorRules:
    """The author's choices that a source needs before its size is known: frames of a video, the rate of audio."""

    def __init__(self, model: OpenModel, options: Any, path: str) -> None:
        self._author, self._options, self._path = model.author, options, path

    def sample(self, size: VideoSize) -> Sampling:
        """See `Author.sample`."""
        return self._author.sample(size, self._options, self._path)

    def sampling_rate(self) -> int:
        """See `Author.sampling_rate`."""
        return self._author.sampling_rate(self._options)


def measure(
    model: OpenModel, facts: Facts, pins: Pins, item: ReadItem, source: MediaSource | None = None
) -> MeasuredItem:
    """What the cache has of a media input, or fields and replacement from its size.

    Args:
        model: the open model.
        facts: what the items share.
        pins: what the request holds in the cache.
        item: the media input as it came.
        source: the same, where it was opened before; it is not fetched or read again.

    Raises:
        RequestError: it cannot be opened, or is larger than a limit allows.
    """
    if is_given(item.value):
        return accept(model, facts, item)
    began, is_new = time.perf_counter(), False
    if source is None:
        source = open_item(model, item, facts.intake)
        is_new = True
    key = source_key(
        model.spec.name,
        model.spec.output_version,
        item.modality,
        source.digest(),
        item.settings.effective,
        facts.context,
        model=model.digest,
        salt=facts.arguments.salt,
    )
    prepared = None
    if facts.arguments.prepare == "here":
        # Pinned first: what is found stays until the request has ended.
        pins.take(key)
        prepared = model.runtime.preprocess_cache.get(key)
    if prepared is not None:
        # The store may be shared with a registry of other limits.
        model.budget.check_item_tokens(len(prepared.replacement.ids), item.path)
        return MeasuredItem(
            item.modality,
            item.path,
            item.settings,
            item.caller_hash,
            prepared.replacement,
            key=key,
            prepared=prepared,
            source=source,
            cached=True,
            seconds=time.perf_counter() - began,
        )
    options = item.settings.options
    rules = AuthorRules(model, options, item.path)
    size = size_of(item, source, rules, facts.intake) if is_new else source.size(rules)
    fields, replacement, notes = model.measure(item.modality, size, options, facts.context, item.path)
    return MeasuredItem(
        item.modality,
        item.path,
        item.settings,
        item.caller_hash,
        replacement,
        key=key,
        source=source,
        size=size,
        fields=fields,
        seconds=time.perf_counter() - began,
        notes=notes,
    )
