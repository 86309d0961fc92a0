"""`PreparedItem`: one media input by itself, as a request would get it."""

from __future__ import annotations

from typing import Any

import msgspec

from mm_plugin.items import MultimodalDataItem
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.mixins import Fields
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import ReadyItem
from mm_plugin.processor.stages.finish import item_of


class PreparedItem(msgspec.Struct, frozen=True, eq=False):
    """One media input by itself, as a request would get it.

    Attributes:
        source_key: 32 bytes, the key of the preprocess cache; None for a media input that came prepared.
        replacement: the tokens that stand for it.
        item: with its identity and what the encoder reads; its spans count from the first token of the replacement. So
            `encode_items([found.item], encoder)` encodes it without a prompt.
        cached: whether it was prepared before.
    """

    source_key: bytes | None
    replacement: Replacement
    item: MultimodalDataItem
    cached: bool

    @property
    def identity(self) -> bytes:
        """32 bytes."""
        assert self.item.identity is not None
        return self.item.identity

    @property
    def fields(self) -> Fields:
        """The model fields."""
        return self.item.model_specific_data

    @property
    def feature(self) -> Any:
        """What the encoder reads."""
        return self.item.feature

    @property
    def notes(self) -> tuple[str, ...]:
        """What was served otherwise than asked or expected."""
        return self.item.notes


def prepared_item(model: OpenModel, entry: ReadyItem) -> PreparedItem:
    """A media input that is ready, by itself."""
    item = item_of(model, entry, entry.prepared.replacement.runs())
    item.set_identity(entry.prepared.identity)
    return PreparedItem(entry.key or None, entry.prepared.replacement, item, entry.cached)
