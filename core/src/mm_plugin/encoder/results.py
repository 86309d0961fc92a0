"""What an encoder returned, checked against its items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import EncoderError, UsageError
from mm_plugin.inputs import Encoded
from mm_plugin.items import MultimodalDataItem

if TYPE_CHECKING:
    import torch

from mm_plugin.encoder.base import own_rows


def checked_rows(
    result: Any, items: Sequence[MultimodalDataItem], *, hidden: int, dtype: Any, device: Any, owner: Mapping[str, Any]
) -> list[Encoded]:
    """What an encoder returned, as rows that are ready to be written and kept.

    Each result owns its storage, so keeping one never keeps a larger buffer.

    Args:
        result: what `get_image_feature` or its like returned.
        items: the items that it was called with.
        hidden: width that the rows must have.
        dtype: torch dtype to which rows are brought.
        device: torch device to which rows are brought.
        owner: whose encoder it was.

    Raises:
        EncoderError: another count of results, rows or columns, or rows that are not floating point.
    """
    import torch

    if isinstance(result, torch.Tensor) or not isinstance(result, Sequence):
        raise EncoderError(
            f"the encoder returned a {type(result).__name__}; it must return a list with an entry per item", **owner
        )
    if len(result) != len(items):
        raise EncoderError(f"the encoder returned {len(result)} results for {len(items)} items", **owner)
    checked: list[Encoded] = []
    for index, (entry, item) in enumerate(zip(result, items, strict=True)):
        encoded = entry if isinstance(entry, Encoded) else Encoded(entry)
        rows, expected = encoded.rows, (item.num_tokens, hidden)
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or tuple(rows.shape) != expected:
            found = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise EncoderError(
                f"{item.modality.name.lower()} {index} of {len(items)}: the encoder returned {found}, "
                f"its span takes [{expected[0]}, {expected[1]}] floating point",
                **owner,
            )
        deepstack = encoded.deepstack
        if deepstack is not None:
            if not isinstance(deepstack, torch.Tensor) or tuple(deepstack.shape[1:]) != expected:
                raise EncoderError(f"item {index}: deepstack rows must be [n_layers, {expected[0]}, {hidden}]", **owner)
            deepstack = own_rows(deepstack, device, dtype)
        kept = encoded.kept
        if kept is not None:
            if not isinstance(kept, torch.Tensor) or kept.dtype != torch.int64 or tuple(kept.shape) != expected[:1]:
                raise EncoderError(f"item {index}: kept must be {expected[0]} int64 indices", **owner)
            kept = own_rows(kept, device, kept.dtype)
        checked.append(Encoded(own_rows(rows, device, dtype), deepstack, kept))
    return checked


def given_rows(
    item: MultimodalDataItem,
    *,
    hidden: int,
    dtype: Any,
    device: Any,
    send: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Encoded:
    """The rows that came with an item.

    Args:
        item: with `precomputed_embeddings`.
        hidden: width that they must have.
        dtype: torch dtype to which they are brought.
        device: torch device to which they are brought.
        send: brings a host tensor to the device first; they go directly where None.

    Raises:
        UsageError: they do not fit its span.
    """
    rows = as_tensor(item.precomputed_embeddings)
    if not rows.is_floating_point() or tuple(rows.shape) != (item.num_tokens, hidden):
        raise UsageError(
            f"precomputed embeddings are {list(rows.shape)} {rows.dtype}, the span takes [{item.num_tokens}, {hidden}]",
            argument="precomputed_embeddings",
        )
    sent = rows if send is None else send(rows)
    return Encoded(sent.to(device=device, dtype=dtype))


def as_tensor(value: Any) -> torch.Tensor:
    """An array or tensor as a tensor; one that cannot be written (torch warns of those) as a copy."""
    import numpy as np
    import torch

    return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value)
