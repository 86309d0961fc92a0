"""A processed request: what a processor returns of it, and what a scheduler keeps. Integers and items; needs no processor."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.items import Modality, MultimodalDataItem, checked_spans, item_key


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids that a scheduler or a model dispatches on; None where the model has no such token.

    Attributes:
        placeholders: by modality, the id that stands for one embedding.
        pairs: (start, end) ids around a media input, as the plugin declared them.
    """

    placeholders: Mapping[Modality, int] = msgspec.field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def im_token_id(self) -> int | None:
        """The id that stands for one embedding of an image."""
        return self.placeholders.get(Modality.IMAGE)

    @property
    def video_token_id(self) -> int | None:
        """The id that stands for one embedding of a video."""
        return self.placeholders.get(Modality.VIDEO)

    @property
    def audio_token_id(self) -> int | None:
        """The id that stands for one embedding of an audio."""
        return self.placeholders.get(Modality.AUDIO)


class PromptUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt are what: each token counts once, for the media input whose embedding it takes or as text.

    Attributes:
        text: tokens of text, the start and end tokens of media inputs among them.
        image: tokens that take an embedding of an image.
        video: of a video.
        audio: of an audio input.

    Example:
        >>> import numpy as np
        >>> PromptUsage.of(np.array([0, 0, 1, 1, 0]))
        PromptUsage(text=3, image=2, video=0, audio=0)
    """

    text: int = 0
    image: int = 0
    video: int = 0
    audio: int = 0

    @classmethod
    def of(cls, token_modalities: np.ndarray) -> PromptUsage:
        """The usage of a prompt.

        Args:
            token_modalities: as in `MultimodalProcessorOutput`.

        Shape:
            token_modalities [N] int64.
        """
        found = {modality.name.lower(): int(np.count_nonzero(token_modalities == modality)) for modality in Modality}
        return cls(text=len(token_modalities) - sum(found.values()), **found)

    @property
    def total(self) -> int:
        """All tokens of the prompt."""
        return self.text + self.image + self.video + self.audio


class MultimodalProcessorOutput(msgspec.Struct, eq=False, kw_only=True):
    """What a processor's `process` returns: all that a scheduler and a GPU worker need of one request.

    Two views of the ids exist and never mix: `input_ids` are *model ids*, for whatever looks up an embedding;
    `padded_input_ids` are *cache ids*, with sentinels, for prefix matching.

    Attributes:
        input_ids: [N] int64, model ids: the expanded prompt.
        padded_input_ids: [N] int64, cache ids: the same with each span overwritten by its item's sentinels.
        token_modalities: [N] int64, 0 for text, else the value of the token's `Modality`.
        mm_items: the items in prompt order.
        special_tokens: ids of placeholders and pairs.
        mrope_positions: [3, N] int64, or None for a model with ordinary positions.
        mrope_position_delta: added to a token's index to get its position after the prompt; None as above.
        position_options: by name, the options given at load that `ModelSpec.positions` may depend on; a scheduler that computes
            positions itself passes them as `options`.
        dropped: paths of media inputs that were left out because the prompt was too long, such as `images[0]`.
        usage: how many prompt tokens are text, image, video and audio.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import MultimodalProcessorOutput
        >>> ids = np.array([5, 6, 7])
        >>> output = MultimodalProcessorOutput(
        ...     input_ids=ids, padded_input_ids=ids.copy(), token_modalities=np.zeros(3, np.int64), mm_items=[]
        ... )
        >>> output.mrope_positions is None, output.dropped
        (True, ())
    """

    input_ids: np.ndarray
    padded_input_ids: np.ndarray
    token_modalities: np.ndarray
    mm_items: list[MultimodalDataItem]
    special_tokens: SpecialTokens = SpecialTokens()
    mrope_positions: np.ndarray | None = None
    mrope_position_delta: int | None = None
    position_options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    usage: PromptUsage = PromptUsage()

    def split(self) -> tuple[MultimodalInputs, list[ItemContent]]:
        """What a scheduler keeps, a few kilobytes, and what only the worker needs; `MultimodalInputs.attach` joins them there.

        This output stays as it is.

        Returns:
            `MultimodalInputs.from_processor_output` of this output without the content of its items; and that, one entry for each
            of them.

        Raises:
            SpanError, UsageError: as for `from_processor_output`.

        Example:
            >>> import numpy as np
            >>> from mm_plugin import Modality, MultimodalDataItem, MultimodalProcessorOutput
            >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=np.ones((2, 8)))
            >>> item.set_identity(bytes(32))
            >>> ids = np.array([9, 9])
            >>> output = MultimodalProcessorOutput(
            ...     input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0 + 1, mm_items=[item]
            ... )
            >>> inputs, contents = output.split()
            >>> inputs.mm_items[0].feature is None
            True
            >>> inputs.attach(contents)
            >>> inputs.mm_items[0].feature is item.feature
            True
        """
        inputs = MultimodalInputs.from_processor_output(self)
        contents = [
            ItemContent(item_key(item), item.feature, item.precomputed_embeddings, item.task)
            for item in inputs.mm_items
        ]
        inputs.release_features()
        return inputs, contents


class ItemContent(msgspec.Struct, frozen=True, eq=False):
    """What only a GPU worker needs of an item.

    Attributes:
        key: the item's `mm_plugin.items.item_key`, by which a worker knows that it belongs to the item.
        feature: as in `MultimodalDataItem`.
        precomputed_embeddings: as in `MultimodalDataItem`.
        task: as in `MultimodalDataItem`.
    """

    key: bytes
    feature: Any = None
    precomputed_embeddings: Any = None
    task: Any = None


class NextTurn(enum.Enum):
    """How a field of `MultimodalInputs` goes on when a session's next turn follows; `mm_plugin.scheduler.merge` applies it.

    Every field names its rule in its annotation, and `merge` cannot be imported while one does not.
    """

    ITEMS = "the items of both, those of the turn with shifted offsets"
    IDS = "the ids of both, generated ids in between"
    MODALITIES = "the token modalities of both, text in between"
    POSITIONS = "the positions of both, those of the turn going on from the largest so far"
    DELTA = "what is added to an index after both"
    SUM = "the sum of both"
    LATEST = "that of the turn"


class MultimodalInputs(msgspec.Struct, eq=False, kw_only=True):
    """What a scheduler keeps of one request: ids, spans, identities, positions.

    Embeddings that a GPU worker holds are not here but in its `RequestMedia`.

    Attributes:
        mm_items: the items in prompt order.
        input_ids: [N] int64, model ids, for whatever looks up an embedding.
        padded_input_ids: [N] int64, cache ids, for prefix matching.
        token_modalities: [N] int64, 0 for text, else the value of the token's `Modality`.
        special_tokens: ids of placeholders and pairs.
        mrope_positions: [3, N] int64, or None for a model with ordinary positions.
        mrope_position_delta: added to a token's index to get its position after the prompt; None as above.
        position_options: what `ModelSpec.positions` takes as `options`.
        num_image_tokens: tokens of the prompt that take an embedding of an image.
        num_video_tokens: those of videos.
        num_audio_tokens: those of audio.
        num_dropped: items that came without content and without a span, and were left out.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import Modality, MultimodalDataItem, MultimodalInputs, MultimodalProcessorOutput
        >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 3)], feature=np.zeros((3, 8)))
        >>> item.set_identity(bytes(32))
        >>> ids = np.array([5, 9, 9, 9, 6])
        >>> cache_ids = ids.copy()
        >>> cache_ids[1:4] = item.padding_sequence(3)
        >>> output = MultimodalProcessorOutput(
        ...     input_ids=ids, padded_input_ids=cache_ids, token_modalities=np.array([0, 1, 1, 1, 0]), mm_items=[item]
        ... )
        >>> inputs = MultimodalInputs.from_processor_output(output)
        >>> inputs.num_image_tokens, inputs.input_ids.tolist(), int(inputs.padded_input_ids[1]) == item.pad_value
        (3, [5, 9, 9, 9, 6], True)
    """

    mm_items: Annotated[list[MultimodalDataItem], NextTurn.ITEMS]
    input_ids: Annotated[np.ndarray, NextTurn.IDS]
    padded_input_ids: Annotated[np.ndarray, NextTurn.IDS]
    token_modalities: Annotated[np.ndarray, NextTurn.MODALITIES]
    special_tokens: Annotated[SpecialTokens, NextTurn.LATEST] = SpecialTokens()
    mrope_positions: Annotated[np.ndarray | None, NextTurn.POSITIONS] = None
    mrope_position_delta: Annotated[int | None, NextTurn.DELTA] = None
    position_options: Annotated[Mapping[str, Any], NextTurn.LATEST] = msgspec.field(default_factory=dict)
    num_image_tokens: Annotated[int, NextTurn.SUM] = 0
    num_video_tokens: Annotated[int, NextTurn.SUM] = 0
    num_audio_tokens: Annotated[int, NextTurn.SUM] = 0
    num_dropped: Annotated[int, NextTurn.SUM] = 0

    @classmethod
    def from_processor_output(cls, output: MultimodalProcessorOutput) -> MultimodalInputs:
        """A copy: the caller's lists and arrays may change afterwards without a change here. Features are shared.

        Fields that bear one name in both structs are taken over. An item without a span and without content is left out and
        counted.

        Raises:
            SpanError: an item with content has no span, an item with a span has no content, or spans overlap or leave the ids.
            UsageError: `output` is of another class.
        """
        if not isinstance(output, MultimodalProcessorOutput):
            raise UsageError(f"expected a MultimodalProcessorOutput, got {type(output).__name__}", argument="output")
        items: list[MultimodalDataItem] = []
        totals = dict.fromkeys(Modality, 0)
        for index, item in enumerate(output.mm_items):
            if not item.num_contents and not item.offsets:
                continue
            if not item.is_valid():
                raise SpanError(
                    f"mm_items[{index}]: expected content, sentinels and ordered spans in the prompt; one of them is missing"
                )
            copy = msgspec.structs.replace(
                item, offsets=list(item.offsets), model_specific_data=dict(item.model_specific_data)
            )
            items.append(copy)
            totals[copy.modality] += copy.num_tokens
        checked_spans(items, len(output.padded_input_ids))
        shared = {name: _copy(getattr(output, name)) for name in cls.__struct_fields__ if hasattr(output, name)}
        own = {
            "mm_items": items,
            "num_image_tokens": totals[Modality.IMAGE],
            "num_video_tokens": totals[Modality.VIDEO],
            "num_audio_tokens": totals[Modality.AUDIO],
            "num_dropped": len(output.mm_items) - len(items),
        }
        return cls(**shared | own)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Every span as (first token, last token, index of its item), in prompt order."""
        return sorted((start, end, index) for index, item in enumerate(self.mm_items) for start, end in item.offsets)

    def clip_chunk(self, prefix: int, length: int) -> int:
        """How many tokens the next chunk may have, so that it cuts no span whose tokens attend to one another.

        Args:
            prefix: tokens that are computed already.
            length: tokens for which the step has space.

        Returns:
            At most `length`: that, or the tokens before the first span that does not fit. 0 where such a span begins at `prefix`
            and is longer than `length`; it needs a step with more space.

        Raises:
            SpanError: `prefix` itself lies within such a span.
            UsageError: an argument is not a number of tokens.

        Example:
            >>> import numpy as np
            >>> from mm_plugin import Modality, MultimodalDataItem, MultimodalInputs
            >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2, 5)], attention="whole")
            >>> ids = np.arange(8)
            >>> inputs = MultimodalInputs(mm_items=[image], input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0)
            >>> [inputs.clip_chunk(0, length) for length in (2, 3, 5, 6, 8)], inputs.clip_chunk(2, 3)
            ([2, 2, 2, 6, 8], 0)
        """
        given: dict[str, Any] = {"prefix": prefix, "length": length}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
                raise UsageError(f"{name}: expected a number of tokens from 0, got {value!r}", argument=name)
        cut = cut_span(self, prefix)
        if cut is not None:
            raise SpanError(
                f"mm_items[{cut[2]}]: expected a prefix that does not cut the span ({cut[0]}, {cut[1]}), whose tokens attend to "
                f"one another, got {prefix}"
            )
        cut = cut_span(self, prefix + length)
        return length if cut is None else cut[0] - prefix

    @property
    def num_mm_tokens(self) -> int:
        """Tokens of the prompt that take an embedding of any item."""
        return self.num_image_tokens + self.num_video_tokens + self.num_audio_tokens

    def attach(self, contents: Sequence[ItemContent]) -> None:
        """Give the items their content, which came on another way; see `split`.

        Args:
            contents: one for each item, in order.

        Raises:
            UsageError: they are not of these items.
        """
        keys = [item_key(item) for item in self.mm_items]
        if [getattr(content, "key", None) for content in contents] != keys:
            raise UsageError(
                f"contents: expected those of the {len(keys)} items of these inputs in order, got {len(contents)} of others",
                argument="contents",
            )
        for item, content in zip(self.mm_items, contents, strict=True):
            item.feature, item.task = content.feature, content.task
            item.precomputed_embeddings = content.precomputed_embeddings

    def release_features(self) -> None:
        """Drop the items' content; ids, spans and positions stay. Calling it twice is harmless."""
        for item in self.mm_items:
            item.release()


def whole_spans(inputs: MultimodalInputs) -> list[tuple[int, int, int]]:
    """The spans that no chunk may cut, as in `MultimodalInputs.spans`."""
    return sorted(
        (start, end, index)
        for index, item in enumerate(inputs.mm_items)
        if item.attention == "whole"
        for start, end in item.offsets
    )


def cut_span(inputs: MultimodalInputs, border: int) -> tuple[int, int, int] | None:
    """The span, as in `MultimodalInputs.spans`, that must stay whole and has tokens on both sides of a border between tokens."""
    return next((span for span in whole_spans(inputs) if span[0] < border <= span[1]), None)


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return dict(value) if isinstance(value, Mapping) else value
