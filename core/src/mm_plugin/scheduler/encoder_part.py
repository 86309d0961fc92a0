"""The separate encoder part of cross-attention models: its lengths, and a step without it."""

from __future__ import annotations

import msgspec
import numpy as np

from mm_plugin.embed.plan import check_batch
from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs


class SeparatePart(msgspec.Struct, frozen=True, eq=False):
    """A step of a model whose encoder part is separate (cross-attention): the ids and lengths of the text alone.

    Attributes:
        input_ids: [total] int64, the flat extends of the text alone.
        extend_prefix_lens: per request, text tokens that are computed already.
        extend_seq_lens: per request, text tokens that this step computes.
        encoder_lens: per request, tokens of its encoder part.
        encoder_cached: per request, whether its encoder part is computed already, or empty.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs
        >>> from mm_plugin.scheduler import strip_encoder_part
        >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 3)])
        >>> ids = np.array([9, 9, 9, 9, 5, 6])
        >>> inputs = MultimodalInputs(mm_items=[image], input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0)
        >>> part = strip_encoder_part(ids, ForwardBatch([inputs], [0], [6]))
        >>> part.input_ids.tolist(), part.extend_seq_lens, part.encoder_lens, part.encoder_cached
        ([5, 6], [2], [4], [False])
    """

    input_ids: np.ndarray
    extend_prefix_lens: list[int]
    extend_seq_lens: list[int]
    encoder_lens: list[int]
    encoder_cached: list[bool]


def encoder_len(inputs: MultimodalInputs | None) -> int:
    """Tokens of a request's separate encoder part: its media, which must come first in the prompt, without gaps.

    Raises:
        SpanError: text comes before or between them.
    """
    spans = sorted(span for item in inputs.mm_items for span in item.offsets) if inputs is not None else []
    cursor = 0
    for start, end in spans:
        if start != cursor:
            raise SpanError(
                f"expected a separate encoder part at the start of the prompt: the next span at {cursor}, got one at {start}"
            )
        cursor = end + 1
    return cursor


def strip_encoder_part(input_ids: np.ndarray, batch: ForwardBatch) -> SeparatePart:
    """Remove the encoder part from a step of a cross-attention model.

    Args:
        input_ids: [total] int64, the flat extends; not changed.
        batch: what is extended, encoder parts included.

    Raises:
        SpanError: a prefix or a step cuts an encoder part in two, or its media are not at the start of the prompt.
        UsageError: ids and batch differ in length, or the batch's lists do.
    """
    check_batch(batch)
    if len(input_ids) != sum(batch.extend_seq_lens):
        raise UsageError(
            f"input_ids: expected the {sum(batch.extend_seq_lens)} ids that the batch extends, got {len(input_ids)}",
            argument="input_ids",
        )
    kept: list[np.ndarray] = []
    prefixes, extends, lens, cached = [], [], [], []
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.inputs(), batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        length = encoder_len(inputs)
        done = prefix >= length
        if not done and (prefix > 0 or 0 < extend < length):  # a request that does not move cuts nothing
            raise SpanError(
                f"request {request}: its encoder part has {length} tokens; expected a step that takes all or none, got {prefix}:"
                f"{prefix + extend}"
            )
        skipped = 0 if done else min(length, extend)
        kept.append(np.asarray(input_ids[flat + skipped : flat + extend], dtype=np.int64))
        prefixes.append(prefix - length if done else 0)
        extends.append(extend - skipped)
        lens.append(length)
        cached.append(done)
        flat += extend
    ids = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    return SeparatePart(ids, prefixes, extends, lens, cached)
