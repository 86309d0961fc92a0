"""Embeddings checked against their items: those that an encoder returned, and those that came with an item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_plugin.arrays import is_dense, is_floating
from mm_plugin.encoder.base import own_storage
from mm_plugin.errors import EncoderError, UsageError
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.items import MultimodalDataItem
from mm_plugin.tensors import tensor_of

if TYPE_CHECKING:
    import torch


def checked_embeddings(
    result: Any,
    items: Sequence[MultimodalDataItem],
    *,
    hidden: int | None,
    dtype: Any,
    device: Any,
    owner: Mapping[str, Any],
) -> list[Encoded]:
    """What an encoder returned, ready to be written and kept.

    Each entry owns its storage, so keeping one never keeps a larger buffer.

    Args:
        result: what `get_image_feature` or its like returned.
        items: the items that it was called with.
        hidden: width that embeddings must have; None for any.
        dtype: torch dtype to which they are converted.
        device: torch device to which they are moved.
        owner: plugin, distribution and version of the encoder, for errors.

    Raises:
        EncoderError: the counts or shapes differ from those of the items, or embeddings are not floating point.
    """
    import torch

    if isinstance(result, torch.Tensor) or not isinstance(result, Sequence):
        raise EncoderError(f"the encoder: expected a list with an entry per item, got {type(result).__name__}", **owner)
    if len(result) != len(items):
        raise EncoderError(f"the encoder: expected {len(items)} results, one per item, got {len(result)}", **owner)
    return [
        _checked(
            entry,
            f"{item.modality.name.lower()} {index} of {len(items)}",
            (item.num_tokens, hidden),
            dtype,
            device,
            owner,
        )
        for index, (entry, item) in enumerate(zip(result, items, strict=True))
    ]


def _checked(
    entry: Any, what: str, expected: tuple[int, int | None], dtype: Any, device: Any, owner: Mapping[str, Any]
) -> Encoded:
    """One entry of a result, of an item that takes [num_tokens, hidden], of any width where that is None."""
    import torch

    def refuse(part: str, wanted: str, found: Any) -> EncoderError:
        got = f"{list(found.shape)} {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
        got += "" if is_dense(found) or not isinstance(found, torch.Tensor) else ", which is not dense"
        return EncoderError(f"{what}: expected {part} {wanted} from the encoder, got {got}", **owner)

    encoded = entry if isinstance(entry, Encoded) else Encoded(entry)
    embeddings, deepstack, kept = encoded.embeddings, encoded.deepstack, encoded.kept
    count, hidden = expected
    if not _is_floating(embeddings) or not _has_shape(embeddings, expected):
        raise refuse("embeddings", f"{_shape(count, hidden)} floating point", embeddings)
    expected = (count, embeddings.shape[1])
    if deepstack is not None:
        if not _is_floating(deepstack) or tuple(deepstack.shape[1:]) != expected:
            raise refuse("deepstack", f"[n_layers, {count}, {expected[1]}] floating point", deepstack)
        deepstack = own_storage(deepstack, device, dtype)
    if kept is not None:
        if (
            not isinstance(kept, torch.Tensor)
            or not is_dense(kept)
            or kept.dtype != torch.int64
            or tuple(kept.shape) != expected[:1]
        ):
            raise refuse("kept", f"[{count}] int64", kept)
        kept = own_storage(kept, device, kept.dtype)
    return Encoded(own_storage(embeddings, device, dtype), deepstack, kept)


def given_embeddings(
    item: MultimodalDataItem,
    *,
    hidden: int | None,
    dtype: Any,
    device: Any,
    send: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Encoded:
    """The embeddings that came with an item.

    Args:
        item: with `precomputed_embeddings`.
        hidden: width that they must have; None for any.
        dtype: torch dtype to which they are converted.
        device: torch device to which they are moved.
        send: brings a host tensor to the device first; where None, they are moved directly.

    Raises:
        UsageError: they do not fit the item's span.
    """
    given = item.precomputed_embeddings
    # Counted first: a view may stand for more rows than there is memory.
    if not is_dense(given) or not is_floating(given) or not _has_shape(given, (item.num_tokens, hidden)):
        got = f"{list(given.shape)} {given.dtype}" if is_dense(given) else f"a {type(given).__name__} that is not dense"
        raise UsageError(
            f"precomputed_embeddings: expected {_shape(item.num_tokens, hidden)} floating point for the item's span, got {got}",
            argument="precomputed_embeddings",
        )
    embeddings = as_tensor(given)
    sent = embeddings if send is None else send(embeddings)
    return Encoded(sent.to(device=device, dtype=dtype))


def as_tensor(value: Any) -> torch.Tensor:
    """An array or tensor as a tensor, over the same memory."""
    found: torch.Tensor = tensor_of(value)
    return found


def _shape(count: int, hidden: int | None) -> str:
    return f"[{count}, {'hidden' if hidden is None else hidden}]"


def _has_shape(value: Any, expected: tuple[int, int | None]) -> bool:
    """Whether an array or tensor is [num_tokens, hidden]; of any width where that is None."""
    return len(value.shape) == 2 and value.shape[0] == expected[0] and expected[1] in (None, value.shape[1])


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and is_dense(value) and value.is_floating_point()
