"""32 bytes or a 64-bit hash -> four sentinels, laid over a span. Knows no item and no modality.

The scheme is published and fixed: SHA-256 over the tag and the identity, cut into four big-endian words of 64 bits, each
reduced to 62 bits and raised above every vocabulary. A router that injects SGLang's hashes gets SGLang's sentinels bit for bit.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from mm_plugin.errors import SpanError, UsageError

MM_PAD_SHIFT_VALUE = 1_000_000
TAG = b"sglang-mm-wide-pad-v1"
_MASK = (1 << 62) - 1
_WORDS = struct.Struct(">4Q")

PadValues = tuple[int, int, int, int]


def pad_values_from_identity(identity: bytes) -> PadValues:
    """Four sentinels for an identity.

    Args:
        identity: any number of bytes; items use 32.

    Returns:
        Four ints from `MM_PAD_SHIFT_VALUE` to `MM_PAD_SHIFT_VALUE` + 2**62 - 1.
    """
    first, second, third, fourth = _WORDS.unpack(hashlib.sha256(TAG + identity).digest())
    return (
        (first & _MASK) + MM_PAD_SHIFT_VALUE,
        (second & _MASK) + MM_PAD_SHIFT_VALUE,
        (third & _MASK) + MM_PAD_SHIFT_VALUE,
        (fourth & _MASK) + MM_PAD_SHIFT_VALUE,
    )


def pad_values_from_hash(value: int) -> PadValues:
    """Four sentinels for a plain hash, of which the low 64 bits count."""
    return pad_values_from_identity((value % (1 << 64)).to_bytes(8, "big"))


def sentinel_sequence(pad_values: PadValues, length: int) -> np.ndarray:
    """The four sentinels, repeated cyclically.

    Shape:
        returns [length] int64.

    Raises:
        SpanError: `length` is negative.
    """
    if length < 0:
        raise SpanError(f"a span cannot hold {length} tokens")
    out = np.empty(length, dtype=np.int64)
    lay_sentinels(out, 0, length, pad_values)
    return out


def lay_sentinels(out: np.ndarray, start: int, end: int, pad_values: PadValues) -> None:
    """Write the sentinels over `out[start:end]`, beginning again at `start`.

    Args:
        out: [n] int64, contiguous, changed in place.
        start: first index, inclusive.
        end: last index, exclusive.
        pad_values: the four sentinels of one item.
    """
    values = np.array(pad_values, dtype=np.int64)
    whole = start + (end - start) // 4 * 4
    out[start:whole].reshape(-1, 4)[:] = values  # one broadcast is three times faster than four strided writes
    if whole < end:
        out[whole:end] = values[: end - whole]


def check_vocabulary(size: int) -> None:
    """Refuse a vocabulary that could hold a sentinel.

    Args:
        size: token ids in the vocabulary, padded rows of the embedding table included.

    Raises:
        UsageError: an id could equal a sentinel, so two prompts could share a prefix by accident.
    """
    if size > MM_PAD_SHIFT_VALUE:
        raise UsageError(
            f"the vocabulary has {size} ids (padding included), sentinels begin at {MM_PAD_SHIFT_VALUE}: "
            "a token could be taken for an image; this model cannot be served with these sentinels",
            argument="vocab_size",
        )
