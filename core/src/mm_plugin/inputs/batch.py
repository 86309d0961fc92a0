"""`ForwardBatch`: what one forward step extends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mm_plugin.inputs.processed import MultimodalInputs
from mm_plugin.inputs.request_media import RequestMedia


class ForwardBatch(msgspec.Struct, frozen=True, eq=False):
    """What one forward step extends, one list entry per request.

    Attributes:
        mm_inputs: each request's `RequestMedia`, the same object in every step of the request; None for a request of text. Where
            a step is only planned (`plan_step`, `strip_encoder_part`), the request's `MultimodalInputs` serves as well.
        extend_prefix_lens: tokens of each request that are computed already.
        extend_seq_lens: tokens of each request that this step computes.

    Example:
        >>> from mm_plugin import ForwardBatch
        >>> from mm_plugin.embed import plan_step
        >>> batch = ForwardBatch([None, None], extend_prefix_lens=[0, 12], extend_seq_lens=[8, 1])
        >>> plan_step(batch).text_runs
        ((0, 9),)
    """

    mm_inputs: Sequence[RequestMedia | MultimodalInputs | None]
    extend_prefix_lens: Sequence[int]
    extend_seq_lens: Sequence[int]

    def inputs(self) -> list[MultimodalInputs | None]:
        """Each request's `MultimodalInputs` as they are now; None for a request of text."""
        return [media.inputs if isinstance(media, RequestMedia) else media for media in self.mm_inputs]
