"""Keys of embeddings: the item's key (`items.item_key`), then which encoder encoded it. Pure functions."""

from __future__ import annotations

import functools

from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import FORMAT_VERSION, frame


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
