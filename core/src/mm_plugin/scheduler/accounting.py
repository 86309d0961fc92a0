"""How many tokens of an extend belong to media. Runs in a scheduler: no torch, no processor."""

from __future__ import annotations

from collections.abc import Sequence

from mm_plugin.errors import SpanError
from mm_plugin.items import Offset


def count_mm_tokens_in_extend(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], offsets: Sequence[Sequence[Offset]]
) -> int:
    """Tokens of one step that take an embedding of an item.

    Args:
        prefix_lens: per request, tokens that are computed already.
        extend_lens: per request, tokens that the step computes.
        offsets: per request, the spans of all its items, inclusive at both ends.

    Raises:
        SpanError: the lists differ in length.
    """
    if not len(prefix_lens) == len(extend_lens) == len(offsets):
        raise SpanError(
            f"expected one entry per request in each list, got {len(prefix_lens)} prefixes, {len(extend_lens)} extends and "
            f"{len(offsets)} lists of offsets"
        )
    total = 0
    for prefix, extend, spans in zip(prefix_lens, extend_lens, offsets, strict=True):
        for start, end in spans:
            total += max(0, min(end + 1, prefix + extend) - max(start, prefix))
    return total
