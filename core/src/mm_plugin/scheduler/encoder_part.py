"""The encoder part of models that attend to it apart from the text: its lengths, and a step without it."""

from __future__ import annotations

import msgspec
import numpy as np

from mm_plugin.embed.plan import check_batch
from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs import ForwardBatch, MultimodalInputs


class SeparatePart(msgspec.Struct, frozen=True, eq=False):
    """A step of a model whose encoder part is separate (cross-attention): its ids and lengths without that part.

    Attributes:
        input_ids: [total] int64, the flat extends of the text alone.
        extend_prefix_lens: per request, text tokens that are computed already.
        extend_seq_lens: per request, text tokens that this step computes.
        encoder_lens: per request, tokens of its encoder part.
        encoder_cached: per request, whether its encoder part is computed already (or there is none).
    """

    input_ids: np.ndarray
    extend_prefix_lens: list[int]
    extend_seq_lens: list[int]
    encoder_lens: list[int]
    encoder_cached: list[bool]


def encoder_len(inputs: MultimodalInputs | None) -> int:
    """Tokens of a request's separate encoder part: its media, which must stand together at the start of the prompt.

    Raises:
        SpanError: they do not.
    """
    spans = sorted(span for item in inputs.mm_items for span in item.offsets) if inputs is not None else []
    cursor = 0
    for start, end in spans:
        if start != cursor:
            raise SpanError(
                f"a separate encoder part leads the prompt; a span begins at {start}, where {cursor} was expected"
            )
        cursor = end + 1
    return cursor


def strip_encoder_part(input_ids: np.ndarray, batch: ForwardBatch) -> SeparatePart:
    """Take the encoder part out of a step of a model that attends to it apart from the text.

    Args:
        input_ids: [total] int64, the flat extends; never changed.
        batch: what is extended, encoder parts included.

    Raises:
        SpanError: a prefix, or a step, cuts an encoder part in two; or its media do not lead the prompt.
        UsageError: ids and batch differ in length, or the batch's lists do.
    """
    check_batch(batch)
    if len(input_ids) != sum(batch.extend_seq_lens):
        raise UsageError(
            f"input_ids has {len(input_ids)} ids, the batch extends {sum(batch.extend_seq_lens)}", argument="input_ids"
        )
    kept: list[np.ndarray] = []
    prefixes, extends, lens, cached = [], [], [], []
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        length = encoder_len(inputs)
        done = prefix >= length
        if not done and (prefix > 0 or 0 < extend < length):  # a request that stands still cuts nothing
            raise SpanError(
                f"request {request}: its encoder part has {length} tokens, a step from {prefix} to {prefix + extend} cuts it in two"
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
