"""Embeds requests in chunks and counts encoder calls, for tests of a plugin's encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mm_plugin.embed.routine import embed_mm_inputs
from mm_plugin.embed.rows import EmbedOutput
from mm_plugin.encoder.base import Encoder
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.inputs.processed import MultimodalProcessorOutput


class CallCounter:
    """Counts the calls of an encoder; pass `as_mapping()` wherever an encoder is accepted.

    Attributes:
        calls: items in each call.
        seen: (identity, number of embeddings) of every item, in the order in which they were encoded.

    `CallCounter(encoder).as_mapping()` replaces `encoder` in a call of `embed_mm_inputs`; `calls` then says how often it ran.

    Example:
        >>> from mm_plugin import Encoder, EncodesImages
        >>> class Rows(Encoder, EncodesImages):
        ...     @classmethod
        ...     def load(cls, checkpoint, device, dtype):
        ...         return cls()
        ...
        ...     def get_image_feature(self, items):
        ...         return [item.feature for item in items]
        >>> counter = CallCounter(Rows())
        >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature="rows")
        >>> counter.as_mapping()[Modality.IMAGE]([item])
        ['rows']
        >>> counter.calls
        [1]
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.calls: list[int] = []
        self.seen: list[tuple[bytes | None, int]] = []

    def as_mapping(self) -> dict[Modality, Any]:
        """The encoder as callables by modality, each call counted."""
        return {modality: partial(self._encode, modality) for modality in Modality}

    def _encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> Sequence[Any]:
        self.calls.append(len(items))
        self.seen += [(item.identity, item.num_tokens) for item in items]
        return self._encoder.encode(modality, items)


def chunks(inputs: MultimodalInputs, size: int) -> Iterator[tuple[int, int]]:
    """(prefix length, extend length) of each chunk of a prompt, tokens.

    Args:
        inputs: of the request. No chunk cuts a span that must stay whole; one that is longer than a chunk gets one of its own.
        size: of a chunk, tokens; those before such a span, and the last, may be shorter.

    >>> import numpy as np
    >>> ids = np.arange(7)
    >>> list(chunks(MultimodalInputs(mm_items=[], input_ids=ids, padded_input_ids=ids, token_modalities=ids), 3))
    [(0, 3), (3, 3), (6, 1)]
    """
    at, length = 0, len(inputs.input_ids)
    while at < length:
        taken = inputs.clip_chunk(at, min(size, length - at))
        taken = taken or next(last + 1 - at for first, last, _ in inputs.spans if first == at)
        yield at, taken
        at += taken


def embed_in_chunks(
    output: MultimodalProcessorOutput,
    input_embedding: Any,
    encoder: Any,
    *,
    size: int,
    cache: EmbeddingCache | None = None,
) -> torch.Tensor:
    """Embed one request chunk by chunk, as a server with chunked prefill does, and concatenate the chunks.

    Args:
        output: the processed request.
        input_embedding: the model's text embedding.
        encoder: as for `embed_mm_inputs`.
        size: as for `chunks`.
        cache: keeps embeddings across requests; none are kept where None.

    Shape:
        returns [N, hidden].

    Raises:
        MMPluginError: an item failed.
    """
    import torch

    inputs = MultimodalInputs.from_processor_output(output)
    media = RequestMedia(inputs)
    ids = torch.from_numpy(output.padded_input_ids)
    parts = []
    for prefix, extend in chunks(inputs, size):
        batch = ForwardBatch([media], [prefix], [extend])
        step: EmbedOutput = embed_mm_inputs(ids[prefix : prefix + extend], batch, input_embedding, encoder, cache)
        if step.failed:
            raise step.failed[0].error
        parts.append(step.input_embeds)
    return torch.cat(parts)
