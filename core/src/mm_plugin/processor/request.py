"""One request between its stages, as typed values: read → measured → fitted → prepared. Nothing here is changed once made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from mm_plugin.items import Modality
from mm_plugin.media.source import MediaSource
from mm_plugin.media.with_options import WithOptions
from mm_plugin.placeholders import Replacement, Slot
from mm_plugin.processor.arguments import Arguments
from mm_plugin.processor.budget import Intake
from mm_plugin.tasks import Prepared, PrepareTask

# A name by which the caller knows content, what it must stand for, and the path that an error names.
Claim = tuple[Any, bytes, str]


class Facts(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What all items of a request share.

    Attributes:
        arguments: what the caller says of the whole request.
        context: what the author's `context` returned for the counts of this request.
        intake: counts what the media inputs take together, as they come.
    """

    arguments: Arguments
    context: Any
    intake: Intake


class ItemSettings(msgspec.Struct, frozen=True, eq=False):
    """What is in force for one media input.

    Attributes:
        options: the author's `Options`, all resolved.
        effective: 32 bytes, the digest of those that can change its output.
    """

    options: Any
    effective: bytes


class ReadItem(msgspec.Struct, frozen=True, eq=False):
    """One media input as it came.

    Attributes:
        modality: what it is.
        path: where it stands in the request, such as `images[2]`.
        value: what the caller gave.
        settings: what is in force for it.
        caller_hash: by which the caller knows it, or None.
        form: the value with its own options, as it came; None for one without.
        is_fetched: whether the value is what a URL led to, which was counted as it arrived.
    """

    modality: Modality
    path: str
    value: Any
    settings: ItemSettings
    caller_hash: int | str | None = None
    form: WithOptions | None = None
    is_fetched: bool = False


class ReadRequest(msgspec.Struct, frozen=True, eq=False):
    """Ids with slots, and a media input for each slot in prompt order; no media input is opened yet.

    Attributes:
        facts: what the items share.
        ids: [n] int64, not expanded unless the caller says so.
        slots: where the items stand in the ids; empty for expanded ids.
        items: the media inputs.
    """

    facts: Facts
    ids: np.ndarray
    slots: tuple[Slot, ...]
    items: tuple[ReadItem, ...]


class MeasuredItem(msgspec.Struct, frozen=True, eq=False):
    """One media input whose tokens are known.

    Attributes:
        modality: what it is.
        path: where it stands in the request.
        settings: what is in force for it.
        caller_hash: by which the caller knows it, or None.
        replacement: the tokens that stand for it.
        key: 32 bytes, its source key; empty for one that came prepared.
        prepared: what the cache or the caller had of it, or None where it must be prepared.
        source: the media input, opened; None where it came prepared.
        size: its size; None where it is prepared.
        fields: the model fields; None where it is prepared.
        cached: whether the preprocess cache had it.
        claim: what the caller's identity of given embeddings must stand for.
        seconds: how long this took.
        notes: what `sample` and `layout` said of it.
    """

    modality: Modality
    path: str
    settings: ItemSettings
    caller_hash: int | str | None
    replacement: Replacement
    key: bytes = b""
    prepared: Prepared | None = None
    source: MediaSource | None = None
    size: Any = None
    fields: Mapping[str, Any] | None = None
    cached: bool = False
    claim: Claim | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


class FittedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that is within every limit; nothing is decoded yet.

    Attributes:
        facts: what the items share.
        ids: [n] int64.
        slots: where the items stand in the ids; empty for expanded ids.
        items: the media inputs that stay.
        dropped: paths of those that were left out.
    """

    facts: Facts
    ids: np.ndarray
    slots: tuple[Slot, ...]
    items: tuple[MeasuredItem, ...]
    dropped: tuple[str, ...] = ()


class ReadyItem(msgspec.Struct, frozen=True, eq=False):
    """One prepared item; the media input that it was made from is gone.

    Attributes:
        modality: what it is.
        path: where it stands in the request.
        settings: what is in force for it.
        caller_hash: by which the caller knows it, or None.
        prepared: fields, replacement, feature and identity.
        key: 32 bytes, its source key; empty for one that came prepared.
        cached: whether it was prepared before.
        claim: what the caller's identity of given embeddings must stand for.
        seconds: how long everything took.
        task: what makes the feature, where the item is prepared elsewhere.
    """

    modality: Modality
    path: str
    settings: ItemSettings
    caller_hash: int | str | None
    prepared: Prepared
    key: bytes = b""
    cached: bool = False
    claim: Claim | None = None
    seconds: float = 0.0
    task: PrepareTask | None = None


class PreparedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request whose items are all prepared.

    Attributes:
        facts: what the items share.
        ids: [n] int64.
        slots: where the items stand in the ids; empty for expanded ids.
        items: in the order of the slots.
        dropped: paths of media inputs that were left out.
    """

    facts: Facts
    ids: np.ndarray
    slots: tuple[Slot, ...]
    items: tuple[ReadyItem, ...]
    dropped: tuple[str, ...] = ()
