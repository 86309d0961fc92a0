"""Keys of embeddings: what an item is, then which encoder encoded it. Pure functions."""

from __future__ import annotations

import functools

from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, frame
from mm_plugin.items import MultimodalDataItem

ITEM_KEY_BYTES = 32


def item_key(item: MultimodalDataItem) -> bytes:
    """The key of an item: with the same encoder, equal keys mean equal embeddings.

    Args:
        item: has an identity, or a hash.

    Returns:
        32 bytes.

    Example:
        >>> from mm_plugin.cache import item_key
        >>> from mm_plugin.items import Modality, MultimodalDataItem
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


@functools.lru_cache(maxsize=256)
def encoder_key(version: str, dtype: str) -> bytes:
    """The key of an encoder: other weights and other dtypes give other embeddings.

    Args:
        version: the encoder's version, made of the content of its weights.
        dtype: name of the dtype of the embeddings, such as `torch.bfloat16`.

    Returns:
        32 bytes.
    """
    return digest(frame(["mm-plugin/encoder", FORMAT_VERSION, version, dtype]))


def embedding_key(item: bytes, encoder: bytes) -> bytes:
    """The key under which embeddings are cached and held.

    Args:
        item: 32 bytes from `item_key`.
        encoder: 32 bytes from `encoder_key`.

    Returns:
        64 bytes, of which the first 32 are the item's key.
    """
    return item + encoder
