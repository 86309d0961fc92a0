"""What a model that takes a request's media only together makes of it (`ProcessesJointly`), and whether that can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.errors import SpanError
from mm_plugin.items import Modality, MultimodalDataItem, are_notes, join_notes
from mm_plugin.placeholders import Replacement
from mm_plugin.sentinels import MM_PAD_SHIFT_VALUE
from mm_plugin.spec import ModelSpec


class JointItem(msgspec.Struct, frozen=True, eq=False):
    """All media of one modality in a request that was prepared as a whole.

    Attributes:
        modality: what they are.
        is_embed: [N] bool, True where a token of the prompt takes a row of theirs, in the order of the rows.
        feature: what the encoder reads.
        fields: the model fields that the spec declares.
        notes: what is served otherwise than asked, one sentence each.
    """

    modality: Modality
    is_embed: np.ndarray
    feature: Any
    fields: Mapping[str, Any]
    notes: Sequence[str] = ()


class JointOutput(msgspec.Struct, frozen=True, eq=False):
    """A request that was prepared as a whole.

    Attributes:
        ids: [N] int64, the expanded prompt.
        items: one for each modality that the request has media of.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import Modality
        >>> ids = np.array([5, 9, 9, 6])
        >>> images = JointItem(Modality.IMAGE, ids == 9, np.zeros((2, 3), np.float32), {})
        >>> output = JointOutput(ids, [images])
        >>> int(output.items[0].is_embed.sum())
        2
    """

    ids: np.ndarray
    items: Sequence[JointItem]


def check_joint_output(
    found: Any, spec: ModelSpec, given: Sequence[Modality]
) -> tuple[np.ndarray, list[MultimodalDataItem]]:
    """Ids, and an item for each modality, without identity yet.

    Args:
        found: what `prepare_jointly` returned.
        spec: the model's declaration.
        given: modalities that the request has media of.

    Raises:
        SpanError: it is no `JointOutput` that fits the request and the declaration.
    """
    if not isinstance(found, JointOutput):
        raise SpanError(f"prepare_jointly returned a {type(found).__name__}; it must return JointOutput")
    ids = found.ids
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype != np.int64:
        raise SpanError("prepare_jointly must give ids [N] int64")
    if len(ids) and not 0 <= ids.min() <= ids.max() < MM_PAD_SHIFT_VALUE:
        raise SpanError(f"prepare_jointly must give ids from 0 to {MM_PAD_SHIFT_VALUE - 1}")
    parts: Sequence[Any] = found.items if isinstance(found.items, list | tuple) else [None]
    if not all(isinstance(part, JointItem) and isinstance(part.fields, Mapping) for part in parts):
        raise SpanError("prepare_jointly must give items as a list of JointItem, each with a mapping of fields")
    if sorted(str(part.modality) for part in parts) != sorted(map(str, given)):
        raise SpanError(f"prepare_jointly must give one item for each of {[modality.argument for modality in given]}")
    items = []
    for part in parts:
        declared = set(spec.fields[part.modality])
        if set(part.fields) != declared:
            raise SpanError(f"prepare_jointly gave fields {sorted(part.fields)}, the spec declares {sorted(declared)}")
        is_embed = part.is_embed
        if not isinstance(is_embed, np.ndarray) or is_embed.dtype != np.bool_ or is_embed.shape != ids.shape:
            raise SpanError(f"prepare_jointly must give is_embed [{len(ids)}] bool")
        if not are_notes(part.notes):
            raise SpanError(f"prepare_jointly must give notes that are texts, got {part.notes!r}")
        item = MultimodalDataItem(
            modality=part.modality,
            offsets=Replacement(ids, is_embed).runs(),
            feature=part.feature,
            model_specific_data=dict(part.fields),
            attention=spec.attention.get(part.modality, "causal"),
            notes=join_notes(part.notes),
        )
        if not item.offsets:
            raise SpanError(f"prepare_jointly gave {part.modality.argument} no token that takes a row")
        items.append(item)
    return ids, items
