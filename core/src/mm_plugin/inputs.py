"""What travels of a request: processor output, scheduler inputs, batch, encoder result, and media inputs that came prepared."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.items import Modality, MultimodalDataItem, checked_spans


class ProcessorOutput(msgspec.Struct, frozen=True, eq=False):
    """One media input that a processor prepared already, given in place of the raw one.

    Attributes:
        fields: the feature under its reference's name, such as `pixel_values`, and the model fields, such as `image_grid_thw`.
    """

    fields: Mapping[str, Any]


class PrecomputedEmbeddings(msgspec.Struct, frozen=True, eq=False):
    """One media input that an encoder encoded already, given in place of the raw one.

    Attributes:
        embeddings: [num_embeddings, hidden], floating point, numpy or torch.
        fields: the model fields, such as `image_grid_thw`.
        identity: 32 bytes by which the caller knows these embeddings; their own digest where None.
    """

    embeddings: Any
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
            keyed by `embedding_key`.
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
    held_rows: dict[bytes, Any] = msgspec.field(default_factory=dict)
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
