"""What a worker keeps of requests that no processor made, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mm_plugin.inputs import MultimodalInputs, RequestMedia
from mm_plugin.items import MultimodalDataItem
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of


def media_of(items: Sequence[MultimodalDataItem], ids: np.ndarray) -> RequestMedia:
    """A request of these items, whose offsets lie in these model ids."""
    return RequestMedia(
        MultimodalInputs(
            mm_items=list(items),
            input_ids=ids,
            padded_input_ids=pad_by_offsets(ids, items),
            token_modalities=token_modalities_of(items, len(ids)),
        )
    )
