"""One image, video or audio of a request as it travels: the item, its spans and the key of its rows. Knows no request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.sentinels import PadValues, pad_values_from_hash, pad_values_from_identity, sentinel_sequence


class Modality(enum.IntEnum):
    """What a media input is. The value is its mark in `token_modalities`, where 0 is text."""

    IMAGE = 1
    VIDEO = 2
    AUDIO = 3

    @property
    def argument(self) -> str:
        """The argument of `process` that takes such media, and the head of their error paths: `images`."""
        return f"{self.name.lower()}s"

    @classmethod
    def parse(cls, value: Modality | str | int) -> Modality:
        """A member from itself, its mark, or its name in any case.

        Raises:
            UsageError: there is no such modality.
        """
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            names = ", ".join(member.name.lower() for member in cls)
            raise UsageError(f"{value!r} is no modality; there are {names}", argument="modality") from None


class MultimodalInputFormat(enum.Enum):
    """In which form a media input came: raw media, a processor's output, or rows that need no encoder."""

    NORMAL = "normal"
    PROCESSOR_OUTPUT = "processor_output"
    PRECOMPUTED_EMBEDDING = "precomputed_embedding"


Offset = tuple[int, int]


class MultimodalDataItem(msgspec.Struct, eq=False, kw_only=True):
    """One image, one video or one audio.

    Model fields (`model_specific_data`) can be read as attributes. Assigning to a name that is no field of the struct fails,
    so that a misspelt field cannot become data; a model field is changed with `set`.

    Attributes:
        modality: what it is.
        hash: 64-bit hash, the first eight bytes of the identity where there is one.
        pad_value: the first sentinel.
        offsets: runs of tokens that take this item's rows, in the expanded ids; both ends inclusive.
        format: in which form it came.
        feature: what the encoder reads, [n_patches, ...], numpy or torch; None once released or where rows were given.
        precomputed_embeddings: rows [num_tokens, hidden]; such an item never meets the encoder.
        keep_device_embedding: rows stay on the device that made them when the item is copied or sent.
        model_specific_data: the fields that the plugin declared, such as `image_grid_thw`.
        identity: 32 bytes; equal identity means equal rows and equal positions.
        pad_values: the four sentinels.
    """

    modality: Modality
    hash: int | None = None
    pad_value: int | None = None
    offsets: list[Offset] = msgspec.field(default_factory=list)
    format: MultimodalInputFormat = MultimodalInputFormat.NORMAL
    feature: Any = None
    precomputed_embeddings: Any = None
    keep_device_embedding: bool = False
    model_specific_data: dict[str, Any] = msgspec.field(default_factory=dict)
    identity: bytes | None = None
    pad_values: PadValues | None = None

    def __post_init__(self) -> None:
        if self.hash is not None:
            self.hash %= 1 << 64
        if self.feature is not None and self.precomputed_embeddings is not None:
            raise UsageError(
                "an item holds a feature or precomputed embeddings, not both", argument="precomputed_embeddings"
            )
        clash = set(self.model_specific_data) & set(self.__struct_fields__)
        if clash:
            raise UsageError(
                f"model field {', '.join(sorted(clash))} has the name of a field of the item",
                argument="model_specific_data",
            )

    def __getattr__(self, name: str) -> Any:
        # Reached only where ordinary lookup fails: the model's own fields.
        if not name.startswith("_"):
            data = self.model_specific_data
            if name in data:
                return data[name]
            known = ", ".join(sorted(data)) or "none"
            raise AttributeError(f"item has no field {name!r}; its model fields: {known}")
        raise AttributeError(name)

    def get(self, name: str) -> Any:
        """A model field, or None where the item was made without it."""
        return self.model_specific_data.get(name)

    def set(self, name: str, value: Any) -> None:
        """Change a model field that the item was made with.

        Raises:
            UsageError: the item was made without such a field.
        """
        if name not in self.model_specific_data:
            known = ", ".join(sorted(self.model_specific_data)) or "none"
            raise UsageError(f"item has no model field {name!r}; it was made with: {known}", argument=name)
        self.model_specific_data[name] = value

    def set_hash(self, value: int) -> None:
        """Take a plain 64-bit hash (higher bits are dropped) and its sentinels; the identity is left unset.

        A router that injects SGLang's hashes uses this.
        """
        self.identity = None
        self.hash = value % (1 << 64)
        self._set_pad_values(pad_values_from_hash(self.hash))

    def set_identity(self, identity: bytes) -> None:
        """Take an identity, its hash and its sentinels.

        Args:
            identity: 32 bytes.

        Raises:
            UsageError: it has another length.
        """
        if len(identity) != 32:
            raise UsageError(f"an identity has 32 bytes, not {len(identity)}", argument="identity")
        self.identity = bytes(identity)
        self.hash = int.from_bytes(self.identity[:8], "big")
        self._set_pad_values(pad_values_from_identity(self.identity))

    def _set_pad_values(self, values: PadValues) -> None:
        self.pad_values = values
        self.pad_value = values[0]

    def padding_values(self) -> PadValues:
        """The four sentinels.

        Raises:
            UsageError: the item has neither identity nor hash yet.
        """
        if self.pad_values is None:
            raise UsageError("the item has no identity yet: call set_identity or set_hash", argument="identity")
        return self.pad_values

    def padding_sequence(self, length: int) -> np.ndarray:
        """The sentinels of a span of `length` tokens.

        Shape:
            returns [length] int64.
        """
        return sentinel_sequence(self.padding_values(), length)

    @property
    def num_tokens(self) -> int:
        """Rows that the item takes in the expanded prompt."""
        return sum(end - start + 1 for start, end in self.offsets)

    def is_modality(self, *modalities: Modality) -> bool:
        """Whether the item is one of these."""
        return self.modality in modalities

    def is_valid(self) -> bool:
        """Whether the item can be padded and encoded: it has sentinels, ordered disjoint spans, and exactly one source of rows."""
        if self.pad_values is None or not self.offsets:
            return False
        if (self.feature is None) == (self.precomputed_embeddings is None):
            return False
        last = -1
        for start, end in self.offsets:
            if start <= last or end < start:
                return False
            last = end
        return True


def checked_spans(items: Sequence[MultimodalDataItem], seq: int) -> list[tuple[int, int, MultimodalDataItem]]:
    """All spans of all items, sorted by start: (start, end inclusive, item).

    Raises:
        SpanError: two overlap, one leaves the sequence, or one is empty.
    """
    spans = sorted(
        ((start, end, index) for index, item in enumerate(items) for start, end in item.offsets),
    )
    last = -1
    for start, end, index in spans:
        if start < 0 or end < start or end >= seq:
            raise SpanError(f"mm_items[{index}]: span ({start}, {end}) does not lie in {seq} tokens")
        if start <= last:
            raise SpanError(f"mm_items[{index}]: span ({start}, {end}) overlaps the one that ends at {last}")
        last = end
    return [(start, end, items[index]) for start, end, index in spans]
