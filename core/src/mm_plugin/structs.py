"""The data that travels between tokenizer process, scheduler and GPU worker. Knows no model and imports no torch.

Ids, offsets, positions and marks are numpy int64; features are numpy or torch and are never changed. `offsets` are inclusive at
both ends, every other interval in this package is half-open.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.sentinels import PadValues, pad_values_from_hash, pad_values_from_identity, sentinel_sequence


class Modality(enum.IntEnum):
    """What a medium is. The value is its mark in `token_modalities`, where 0 is text."""

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
    """In which form a medium came: raw media, a processor's output, or rows that need no encoder."""

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


class ProcessorOutput(msgspec.Struct, frozen=True, eq=False):
    """One medium that a processor prepared already, given in place of the raw one.

    Attributes:
        fields: the feature under its reference's name, such as `pixel_values`, and the model fields, such as `image_grid_thw`.
    """

    fields: Mapping[str, Any]


class PrecomputedRows(msgspec.Struct, frozen=True, eq=False):
    """One medium that an encoder encoded already, given in place of the raw one.

    Attributes:
        rows: [num_rows, hidden], floating point, numpy or torch.
        fields: the model fields, such as `image_grid_thw`.
        identity: 32 bytes by which the caller knows these rows; their own digest where None.
    """

    rows: Any
    fields: Mapping[str, Any]
    identity: bytes | None = None


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that a scheduler or a model dispatches on; None where the model has no such token.

    Attributes:
        placeholders: the id that stands for one row, by modality.
        pairs: (start, end) ids around media, as the plugin declared them.
    """

    placeholders: Mapping[Modality, int] = msgspec.field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def im_token_id(self) -> int | None:
        """The id that stands for one row of an image."""
        return self.placeholders.get(Modality.IMAGE)

    @property
    def video_token_id(self) -> int | None:
        """The id that stands for one row of a video."""
        return self.placeholders.get(Modality.VIDEO)

    @property
    def audio_token_id(self) -> int | None:
        """The id that stands for one row of an audio."""
        return self.placeholders.get(Modality.AUDIO)


class MultimodalProcessorOutput(msgspec.Struct, eq=False, kw_only=True):
    """What `ModelProcessor.process` returns: all that a scheduler and a GPU worker need of one request.

    Two views of the ids exist and never mix: `input_ids` are *model ids*, for whatever looks up an embedding;
    `padded_input_ids` are *cache ids*, with sentinels, for prefix matching.

    Attributes:
        input_ids: [N] int64, the expanded prompt.
        padded_input_ids: [N] int64, the same with each span overwritten by its item's sentinels.
        token_modalities: [N] int64, 0 for text, else `Modality`.
        mm_items: the items in prompt order.
        special_tokens: ids of placeholders and pairs.
        mrope_positions: [3, N] int64, or None for a model with ordinary positions.
        mrope_position_delta: added to a token's index to get its position after the prompt; None as above.
        dropped: paths of media that were left out because the prompt was too long, such as `images[0]`.
    """

    input_ids: np.ndarray
    padded_input_ids: np.ndarray
    token_modalities: np.ndarray
    mm_items: list[MultimodalDataItem]
    special_tokens: SpecialTokens = SpecialTokens()
    mrope_positions: np.ndarray | None = None
    mrope_position_delta: int | None = None
    dropped: tuple[str, ...] = ()


# Guards held rows: a request may be aborted in one thread while a step of it runs in another.
HELD_LOCK = threading.Lock()


class MultimodalInputs(msgspec.Struct, eq=False, kw_only=True):
    """What a scheduler keeps of one request. Integers and items; no processor is needed to use it.

    Attributes:
        mm_items: the items in prompt order.
        padded_input_ids: [N] int64, cache ids.
        token_modalities: [N] int64.
        special_tokens: ids of placeholders and pairs.
        mrope_positions: [3, N] int64 or None.
        mrope_position_delta: int or None.
        num_image_tokens: rows of images in the prompt.
        num_video_tokens: rows of videos.
        num_audio_tokens: rows of audio.
        num_dropped: items that came empty and without a span, and were dropped.
        held_rows: rows of spans that were only partly consumed, kept by `embed` until their last row is written;
            keyed by (modality, identity or hash, rows, encoder version, dtype).
        retain_rows: keep held rows after their last row is written, until the request ends.
        ended: the request is over, and a step that still runs holds nothing for it.
    """

    mm_items: list[MultimodalDataItem]
    padded_input_ids: np.ndarray
    token_modalities: np.ndarray
    special_tokens: SpecialTokens = SpecialTokens()
    mrope_positions: np.ndarray | None = None
    mrope_position_delta: int | None = None
    num_image_tokens: int = 0
    num_video_tokens: int = 0
    num_audio_tokens: int = 0
    num_dropped: int = 0
    held_rows: dict[tuple[Any, ...], Any] = msgspec.field(default_factory=dict)
    retain_rows: bool = False
    ended: bool = False

    @classmethod
    def from_processor_output(cls, output: MultimodalProcessorOutput) -> MultimodalInputs:
        """A plain copy: the caller's lists and arrays can change afterwards without a change here. Features are shared.

        An item without a span and without content is dropped and counted.

        Raises:
            SpanError: an item with content has no span, an item with a span has no content, or spans overlap or leave the ids.
        """
        if not isinstance(output, MultimodalProcessorOutput):
            raise UsageError(f"expected a MultimodalProcessorOutput, not {type(output).__name__}", argument="output")
        items: list[MultimodalDataItem] = []
        totals = dict.fromkeys(Modality, 0)
        dropped = 0
        for index, item in enumerate(output.mm_items):
            empty = item.feature is None and item.precomputed_embeddings is None
            if empty and not item.offsets:
                dropped += 1
                continue
            if not item.is_valid():
                raise SpanError(f"mm_items[{index}]: an item needs content, sentinels and ordered spans in the prompt")
            copy = msgspec.structs.replace(
                item, offsets=list(item.offsets), model_specific_data=dict(item.model_specific_data)
            )
            items.append(copy)
            totals[copy.modality] += copy.num_tokens
        checked_spans(items, len(output.padded_input_ids))
        positions = output.mrope_positions
        return cls(
            mm_items=items,
            padded_input_ids=output.padded_input_ids.copy(),
            token_modalities=output.token_modalities.copy(),
            special_tokens=output.special_tokens,
            mrope_positions=None if positions is None else positions.copy(),
            mrope_position_delta=output.mrope_position_delta,
            num_image_tokens=totals[Modality.IMAGE],
            num_video_tokens=totals[Modality.VIDEO],
            num_audio_tokens=totals[Modality.AUDIO],
            num_dropped=dropped,
        )

    @property
    def num_mm_tokens(self) -> int:
        """Rows of all items."""
        return self.num_image_tokens + self.num_video_tokens + self.num_audio_tokens

    def release_features(self) -> None:
        """Let go of features, rows and held rows; ids, spans and positions stay. Calling it twice is harmless."""
        for item in self.mm_items:
            item.feature = None
            item.precomputed_embeddings = None
        with HELD_LOCK:
            self.held_rows.clear()


class Encoded(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """What an encoder returns for one item.

    Attributes:
        rows: [num_tokens, hidden], torch.
        deepstack: [n_layers, num_tokens, hidden] for models that add rows in several layers, else None.
        kept: int64 indices of the rows that a pruning encoder kept, on its device, else None.
    """

    rows: Any
    deepstack: Any = None
    kept: Any = None


class ForwardBatch(msgspec.Struct, frozen=True, eq=False):
    """What one forward step extends, a list entry per request.

    Attributes:
        mm_inputs: the request's media, or None for a text-only request.
        extend_prefix_lens: tokens that are computed already.
        extend_seq_lens: tokens that this step computes.
    """

    mm_inputs: Sequence[MultimodalInputs | None]
    extend_prefix_lens: Sequence[int]
    extend_seq_lens: Sequence[int]


def as_ids(value: Any, *, what: str = "input_ids") -> np.ndarray:
    """Any one-dimensional integer sequence, array or tensor as int64; always a new array.

    Shape:
        returns [n] int64.

    Raises:
        UsageError: it is not one-dimensional, or not integers.
    """
    if isinstance(value, AbstractSet | Mapping):
        raise UsageError(f"{what}: a {type(value).__name__} has no order", argument=what)
    try:
        if hasattr(value, "detach"):  # a torch tensor, without importing torch
            value = value.detach().cpu().numpy()
        array = np.asarray(value if isinstance(value, np.ndarray | Sequence) else list(value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(f"{what}: {type(value).__name__} is no sequence of integers", argument=what) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{what}: expected one dimension of integers, got {array.dtype} {array.shape}", argument=what)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{what}: an id does not fit 64 bits with a sign", argument=what)
    return array.astype(np.int64, copy=True)
