"""Media inputs that were prepared or encoded elsewhere, given in place of raw ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ProcessorOutput(msgspec.Struct, frozen=True, eq=False):
    """One media input that a processor prepared already.

    Attributes:
        fields: the feature under its reference's name, such as `pixel_values`, and the model fields, such as `image_grid_thw`.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import ProcessorOutput
        >>> patches = np.zeros((16, 1176), np.float32)
        >>> ready = ProcessorOutput({"pixel_values": patches, "image_grid_thw": [[1, 4, 4]]})
        >>> sorted(ready.fields)
        ['image_grid_thw', 'pixel_values']
    """

    fields: Mapping[str, Any]


class PrecomputedEmbeddings(msgspec.Struct, frozen=True, eq=False):
    """One media input that an encoder encoded already.

    Attributes:
        embeddings: [num_embeddings, hidden], floating point, numpy or torch.
        fields: the model fields, such as `image_grid_thw`.
        identity: 32 bytes by which the caller knows these embeddings; where None, it is computed from their content.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import PrecomputedEmbeddings
        >>> ready = PrecomputedEmbeddings(np.zeros((4, 64), np.float32), {"image_grid_thw": [[1, 4, 4]]})
        >>> ready.embeddings.shape
        (4, 64)
    """

    embeddings: Any
    fields: Mapping[str, Any]
    identity: bytes | None = None
