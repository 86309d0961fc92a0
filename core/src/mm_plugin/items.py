"""One image, video or audio of a request as it travels: the item, its spans, its key. Knows nothing of requests."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, frame
from mm_plugin.sentinels import PadValues, pad_values_from_hash, pad_values_from_identity, sentinel_sequence


class Modality(enum.IntEnum):
    """What kind of media an item is. Its value is what `token_modalities` holds for the item's tokens; 0 there is text.

    Example:
        >>> from mm_plugin import Modality
        >>> Modality.parse("video"), Modality.VIDEO.argument, int(Modality.VIDEO)
        (<Modality.VIDEO: 2>, 'videos', 2)
    """

    IMAGE = 1
    VIDEO = 2
    AUDIO = 3

    @property
    def argument(self) -> str:
        """The argument of `process` that takes this modality, which also begins its error paths: `images`."""
        return f"{self.name.lower()}s"

    @classmethod
    def parse(cls, value: Modality | str | int) -> Modality:
        """A member from a member, its value, or its name in any case.

        Raises:
            UsageError: the value names no modality.
        """
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            names = ", ".join(member.name.lower() for member in cls)
            raise UsageError(f"modality: expected one of {names}, got {value!r}", argument="modality") from None


class MultimodalInputFormat(enum.Enum):
    """The form in which a media input came: raw media, a processor's output, or embeddings that need no encoder.

    Example:
        >>> from mm_plugin import MultimodalInputFormat
        >>> [form.value for form in MultimodalInputFormat]
        ['normal', 'processor_output', 'precomputed_embedding']
    """

    NORMAL = "normal"
    PROCESSOR_OUTPUT = "processor_output"
    PRECOMPUTED_EMBEDDING = "precomputed_embedding"


Offset = tuple[int, int]

# How the tokens of an item's span attend to one another: to those before them, so that a chunk may end anywhere, or all to all.
Attention = Literal["causal", "whole"]

# Length of an `item_key`, which begins the key of the item's embeddings.
ITEM_KEY_BYTES = 32


class MultimodalDataItem(msgspec.Struct, eq=False, kw_only=True):
    """One image, one video or one audio of a request.

    Model fields (`model_specific_data`) are read as attributes. Assigning to a name that is not a field of the struct fails, so
    that a misspelled field cannot become data; a model field is changed with `set`.

    Attributes:
        modality: the kind of media.
        hash: 64-bit hash; the first eight bytes of the identity where there is one.
        pad_value: the first sentinel.
        offsets: runs of tokens in the expanded ids that the item's embeddings are written to; inclusive at both ends.
        format: the form in which the media input came.
        feature: what the encoder reads, [n_patches, ...], numpy or torch; None once released, and where embeddings or a task came
            instead.
        task: the `PrepareTask` that makes the feature where the item is encoded (`process(..., prepare="worker")`); else None.
        precomputed_embeddings: [num_tokens, hidden], floating point, numpy or torch; such an item skips the encoder.
        keep_device_embedding: whether embeddings stay on the device that made them when the item is copied or sent.
        model_specific_data: the fields that the plugin declared, such as `image_grid_thw`.
        identity: 32 bytes; equal identity means equal embeddings and equal positions.
        pad_values: the four sentinels.
        attention: `whole` where one chunk must hold each of its spans as a whole, since its tokens attend to all of the span.
        notes: what was served otherwise than asked or expected, one sentence each; no part of the identity.

    Example:
        >>> from mm_plugin import Modality, MultimodalDataItem
        >>> item = MultimodalDataItem(
        ...     modality=Modality.IMAGE, offsets=[(2, 5)], model_specific_data={"image_grid_thw": (1, 4, 4)}
        ... )
        >>> item.set_identity(bytes(32))
        >>> item.num_tokens, item.image_grid_thw, item.pad_value == item.pad_values[0]
        (4, (1, 4, 4), True)
    """

    modality: Modality
    hash: int | None = None
    pad_value: int | None = None
    offsets: list[Offset] = msgspec.field(default_factory=list)
    format: MultimodalInputFormat = MultimodalInputFormat.NORMAL
    feature: Any = None
    task: Any = None
    precomputed_embeddings: Any = None
    keep_device_embedding: bool = False
    model_specific_data: dict[str, Any] = msgspec.field(default_factory=dict)
    identity: bytes | None = None
    pad_values: PadValues | None = None
    attention: Attention = "causal"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hash is not None:
            self.hash %= 1 << 64
        if self.num_contents > 1:
            raise UsageError(
                "item: expected a feature, a task that makes it, or precomputed embeddings, got more than one; drop the others",
                argument="precomputed_embeddings",
            )
        clash = set(self.model_specific_data) & set(self.__struct_fields__)
        if clash:
            raise UsageError(
                f"item: model field {', '.join(sorted(clash))} has the name of a field of the item; rename it",
                argument="model_specific_data",
            )

    def __getattr__(self, name: str) -> Any:
        # Called only where ordinary lookup fails: the model's own fields.
        if not name.startswith("_"):
            data = self.model_specific_data
            if name in data:
                return data[name]
            known = ", ".join(sorted(data)) or "none"
            raise AttributeError(f"item has no field {name!r}; its model fields: {known}")
        raise AttributeError(name)

    def get(self, name: str) -> Any:
        """A model field; None where the item was made without it."""
        return self.model_specific_data.get(name)

    def set(self, name: str, value: Any) -> None:
        """Change a model field that the item was made with.

        Raises:
            UsageError: the item was made without such a field.
        """
        if name not in self.model_specific_data:
            known = ", ".join(sorted(self.model_specific_data)) or "none"
            raise UsageError(f"item: unknown model field {name!r}; it was made with: {known}", argument=name)
        self.model_specific_data[name] = value

    def set_hash(self, value: int) -> None:
        """Set a plain 64-bit hash (higher bits are dropped) and its sentinels, and clear the identity.

        For routers that inject SGLang's hashes.
        """
        self.identity = None
        self.hash = value % (1 << 64)
        self._set_pad_values(pad_values_from_hash(self.hash))

    def set_identity(self, identity: bytes) -> None:
        """Set the identity with its hash and its sentinels.

        Args:
            identity: 32 bytes.

        Raises:
            UsageError: the length differs.
        """
        if len(identity) != 32:
            raise UsageError(f"identity: expected 32 bytes, got {len(identity)}", argument="identity")
        self.identity = bytes(identity)
        self.hash = int.from_bytes(self.identity[:8], "big")
        self._set_pad_values(pad_values_from_identity(self.identity))

    @property
    def identity_hex(self) -> str | None:
        """The identity as 64 hexadecimal digits, in which form engines keep it; None where there is none.

        Example:
            >>> from mm_plugin import Modality, MultimodalDataItem
            >>> item = MultimodalDataItem(modality=Modality.IMAGE)
            >>> item.set_identity(bytes(range(32)))
            >>> item.identity_hex[:8], len(item.identity_hex)
            ('00010203', 64)
        """
        return None if self.identity is None else self.identity.hex()

    def _set_pad_values(self, values: PadValues) -> None:
        self.pad_values = values
        self.pad_value = values[0]

    def padding_values(self) -> PadValues:
        """The four sentinels.

        Raises:
            UsageError: the item has neither identity nor hash yet.
        """
        if self.pad_values is None:
            raise UsageError("item: no identity is set yet; call set_identity or set_hash first", argument="identity")
        return self.pad_values

    def padding_sequence(self, length: int) -> np.ndarray:
        """The sentinels of a span of `length` tokens.

        Shape:
            returns [length] int64.
        """
        return sentinel_sequence(self.padding_values(), length)

    @property
    def num_tokens(self) -> int:
        """Tokens of the expanded prompt that take an embedding of the item; equals the number of its embeddings."""
        return sum(end - start + 1 for start, end in self.offsets)

    def is_modality(self, *modalities: Modality) -> bool:
        """Whether the item's modality is one of these."""
        return self.modality in modalities

    @property
    def num_contents(self) -> int:
        """How many it has of a feature, a task that makes it, and precomputed embeddings: one, until it is released."""
        return sum(content is not None for content in (self.feature, self.task, self.precomputed_embeddings))

    def release(self) -> None:
        """Drop its content."""
        self.feature = self.task = self.precomputed_embeddings = None

    def is_valid(self) -> bool:
        """Whether the item can be padded and embedded: it has sentinels, ordered disjoint spans, and one kind of content."""
        if self.pad_values is None or not self.offsets or self.num_contents != 1:
            return False
        return span_fault(self.offsets) is None


def are_notes(value: Any) -> bool:
    """Whether a value is a list or tuple of texts, none of them empty, such as the notes of an item."""
    return isinstance(value, list | tuple) and all(isinstance(note, str) and note.strip() for note in value)


def join_notes(*groups: Sequence[str]) -> tuple[str, ...]:
    """Notes of several origins, in order, each once."""
    return tuple(dict.fromkeys(note for group in groups for note in group))


def span_fault(offsets: Any) -> str | None:
    """What is wrong with an item's spans, in words; None where they are pairs of integers that ascend and do not overlap.

    Args:
        offsets: any value.

    Example:
        >>> span_fault([(0, 3), (5, 5)]) is None, span_fault([(0, 3), (3, 5)])
        (True, 'expected spans that ascend and do not overlap, got (3, 5) after 3')
    """
    if not isinstance(offsets, list | tuple):
        return f"expected a list of (first, last) pairs, got {type(offsets).__name__}"
    previous = -1
    for span in offsets:
        if not isinstance(span, list | tuple) or len(span) != 2:
            return f"expected (first, last) pairs, got {type(span).__name__}"
        first, last = span
        for end in (first, last):
            if type(end) is not int and not isinstance(end, np.integer):
                return f"expected pairs of integers, got {type(end).__name__}"
        if first < 0 or last < first:
            return f"expected a first token from 0 to the last one, got ({first}, {last})"
        if first <= previous:
            return f"expected spans that ascend and do not overlap, got ({first}, {last}) after {previous}"
        previous = last
    return None


def checked_spans(items: Sequence[MultimodalDataItem], seq: int) -> list[tuple[int, int, MultimodalDataItem]]:
    """All spans of all items, sorted by start: (start, end inclusive, item).

    Raises:
        SpanError: two spans overlap, or one is empty or leaves the sequence.
    """
    spans = sorted(
        ((start, end, index) for index, item in enumerate(items) for start, end in item.offsets),
    )
    last = -1
    for start, end, index in spans:
        if start < 0 or end < start or end >= seq:
            raise SpanError(f"mm_items[{index}]: expected a span within {seq} tokens, got ({start}, {end})")
        if start <= last:
            raise SpanError(f"mm_items[{index}]: span ({start}, {end}) overlaps the span that ends at {last}")
        last = end
    return [(start, end, items[index]) for start, end, index in spans]


def item_key(item: MultimodalDataItem) -> bytes:
    """The key of an item: with the same encoder, equal keys mean equal embeddings.

    Args:
        item: has an identity, or a hash.

    Returns:
        32 bytes.

    Example:
        >>> from mm_plugin.items import Modality, MultimodalDataItem, item_key
        >>> one = MultimodalDataItem(modality=Modality.IMAGE, hash=7, offsets=[(3, 6)])
        >>> elsewhere = MultimodalDataItem(modality=Modality.IMAGE, hash=7, offsets=[(10, 13)])
        >>> item_key(one) == item_key(elsewhere)
        True
    """
    return _item_key(int(item.modality), item.hash if item.identity is None else item.identity, item.num_tokens)


# Every step asks for the keys of its items again; a digest takes twenty times as long as finding it here.
@functools.lru_cache(maxsize=16_384)
def _item_key(modality: int, known: bytes | int | None, num_tokens: int) -> bytes:
    return digest(frame(["mm-plugin/item-embedding", FORMAT_VERSION, modality, known, num_tokens]))
