"""What the encoder has to do for a step, and chunks that keep it within a budget. Runs in a scheduler: no torch, no processor."""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from mm_plugin.embed.admission import item_fault
from mm_plugin.embed.plan import plan_step
from mm_plugin.errors import UsageError
from mm_plugin.foreign import shown
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.items import ITEM_KEY_BYTES, MultimodalDataItem, item_key


class EncodeWork(msgspec.Struct, frozen=True):
    """What the encoder has to do for a step.

    Attributes:
        num_tokens: embeddings that it makes: all of an item's, also where the step needs a few of them.
        keys: the `item_key` of each item that it encodes, once, in the order of the step.

    Example:
        >>> encode_work(ForwardBatch([None], [0], [8]))  # text alone
        EncodeWork(num_tokens=0, keys=())
    """

    num_tokens: int
    keys: tuple[bytes, ...]


def encode_work(batch: ForwardBatch, cache: Container[bytes] = ()) -> EncodeWork:
    """What the encoder has to do for a step; `count_mm_tokens_in_extend` counts the embeddings that the step consumes instead.

    Nothing has to be done for precomputed embeddings, for what a `RequestMedia` of the batch holds, and for what is in `cache`.

    Args:
        batch: what is extended. In a worker, with each request's `RequestMedia`; in a scheduler, its `MultimodalInputs` serve.
        cache: the `item_key` of everything that is encoded already: `EmbeddingCache.items(encoder.version, dtype)` in a worker; in
            a scheduler, a set of the keys that it knows its worker to have, those of items that a chunk has cut among them.

    Raises:
        UsageError: the batch's lists do not fit together.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs
        >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2, 91)])
        >>> image.set_identity(bytes(32))
        >>> ids = np.zeros(100, np.int64)
        >>> inputs = MultimodalInputs(mm_items=[image], input_ids=ids, padded_input_ids=ids, token_modalities=ids)
        >>> work = encode_work(ForwardBatch([inputs], [0], [4]))  # two rows are needed, ninety are made
        >>> work.num_tokens, encode_work(ForwardBatch([inputs], [0], [4]), set(work.keys)).num_tokens
        (90, 0)
    """
    plan, inputs = plan_step(batch), batch.inputs()
    held = {key for media in batch.mm_inputs for key in _held(media)}
    items = []
    for request, index in dict.fromkeys(piece.place for piece in plan.pieces):
        of_request = inputs[request]
        assert of_request is not None  # a piece is of a request that has items
        items.append(of_request.mm_items[index])
    found: dict[bytes, int] = {}
    for item in items:
        key = _key(item)
        if key is not None and key not in held and key not in cache:
            found[key] = item.num_tokens
    return EncodeWork(sum(found.values()), tuple(found))


def limit_chunk(
    inputs: RequestMedia | MultimodalInputs,
    prefix: int,
    length: int,
    *,
    max_encode_tokens: int,
    cache: Container[bytes] = (),
) -> int:
    """How many tokens the next chunk of a request may have, so that it cuts no whole span and stays within a budget of encoding.

    A step of several requests passes what is left of its budget on from one to the next: `encode_work` says what a chunk takes, and
    its `keys` belong to `cache` for those that follow.

    Args:
        inputs: of the request, or its `RequestMedia`.
        prefix: tokens that are computed already.
        length: tokens for which the step has space.
        max_encode_tokens: embeddings that the encoder may still make.
        cache: as for `encode_work`.

    Returns:
        At most `length`: that, or the tokens before the first item that does not fit. 0 where it begins at `prefix`; an item of
        more than a whole step's budget never fits, so a budget is at least `Processor.largest(modality).num_embeddings`.

    Raises:
        SpanError, UsageError: as for `MultimodalInputs.clip_chunk`; or the budget is not a number from 0.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import Modality, MultimodalDataItem, MultimodalInputs
        >>> images = []
        >>> for seed, span in enumerate([(2, 5), (10, 15)]):
        ...     images.append(MultimodalDataItem(modality=Modality.IMAGE, offsets=[span]))
        ...     images[-1].set_identity(bytes([seed]) * 32)
        >>> ids = np.zeros(20, np.int64)
        >>> inputs = MultimodalInputs(mm_items=images, input_ids=ids, padded_input_ids=ids, token_modalities=ids)
        >>> [limit_chunk(inputs, 0, 20, max_encode_tokens=most) for most in (3, 4, 9, 10)]
        [2, 10, 10, 20]
    """
    if isinstance(max_encode_tokens, bool) or not isinstance(max_encode_tokens, int) or max_encode_tokens < 0:
        raise UsageError(
            f"max_encode_tokens: expected a number of embeddings from 0, got {shown(max_encode_tokens)}",
            argument="max_encode_tokens",
        )
    held = set(_held(inputs))
    request = inputs.inputs if isinstance(inputs, RequestMedia) else inputs
    allowed = request.clip_chunk(prefix, length)
    left, seen = max_encode_tokens, set[bytes]()
    for first, last, index in request.spans:
        if last < prefix or first >= prefix + allowed:
            continue
        item = request.mm_items[index]
        key = _key(item)
        if key is None or key in seen or key in held or key in cache:
            continue
        if item.num_tokens > left:
            return max(0, first - prefix)
        left -= item.num_tokens
        seen.add(key)
    return allowed


def _key(item: MultimodalDataItem) -> bytes | None:
    """The key of an item that needs the encoder; None where it needs none, or cannot be encoded."""
    return None if item.precomputed_embeddings is not None or item_fault(item) is not None else item_key(item)


def _held(media: RequestMedia | MultimodalInputs | None) -> Iterator[bytes]:
    if isinstance(media, RequestMedia):
        yield from (key[:ITEM_KEY_BYTES] for key in media.held_embeddings)
