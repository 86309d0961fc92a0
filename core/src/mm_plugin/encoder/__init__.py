"""`Encoder` and its mixins: what an author subclasses to turn items into rows. Knows no chunk, no cache and no text embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from mm_plugin.errors import EncoderError, UsageError
from mm_plugin.structs import Encoded, Modality, MultimodalDataItem

if TYPE_CHECKING:
    import torch

    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.events import Observers


class Encoder(ABC):
    """Turns items into rows on one device. Abstract; combine it with the mixins for what the model takes.

    Attributes:
        version: changes when equal items would get other rows, as after reloaded weights; part of every cache key. The
            registry sets it from the checkpoint; whoever changes the weights changes it.
        device: where it reads features; the registry sets it. Features are brought there for it where it is a GPU.
        collective: whether a call is entered by several ranks together, which must then agree on what failed.
    """

    version: str = ""
    device: Any = None
    collective: ClassVar[bool] = False
    _blame: Mapping[str, str | None] = {}
    _observers: Observers | None = None

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Encoder:
        """Build it from the checkpoint's tensors, in inference mode.

        Args:
            checkpoint: an open checkpoint.
            device: torch device for the weights.
            dtype: torch dtype, or None for the checkpoint's own.
        """

    @final
    def bind(
        self, *, version: str, device: Any = None, blame: Mapping[str, str | None], observers: Observers | None = None
    ) -> None:
        """Say which weights it holds and whose encoder it is; the registry does."""
        self.version, self.device = version, device
        self._blame, self._observers = blame, observers

    @property
    @final
    def blame(self) -> Mapping[str, str | None]:
        """plugin, distribution and version, for errors."""
        return self._blame

    @property
    @final
    def observers(self) -> Observers | None:
        """Those who hear events, or None."""
        return self._observers

    @final
    def encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Rows for each item, by the mixin of its modality. The result is not checked; `checked_rows` does that.

        Raises:
            EncoderError: the encoder has no mixin for this modality.
        """
        for mixin, kind, method in _MIXINS:
            if kind is modality and isinstance(self, mixin):
                return getattr(self, method)(items)  # type: ignore[no-any-return]
        raise EncoderError(f"{type(self).__name__} does not encode {modality.argument}", **self._blame)


class EncodesImages(ABC):
    """For encoders that take images."""

    @abstractmethod
    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Rows of images.

        Shape:
            returns a list aligned with `items`; each [num_tokens, hidden], floating point, on the encoder's device.
        """


class EncodesVideos(ABC):
    """For encoders that take videos."""

    @abstractmethod
    def get_video_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Rows of videos; shaped as in `EncodesImages`."""


class EncodesAudio(ABC):
    """For encoders that take audio."""

    @abstractmethod
    def get_audio_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Rows of audio; shaped as in `EncodesImages`."""


# A mapping of callables works in place of an `Encoder`.
EncoderLike = Encoder | Mapping[Modality, Callable[[Sequence[MultimodalDataItem]], Sequence[Any]]]
# Takes one rank's outcome of a call and returns the worst of all ranks.
Agree = Callable[[int], int]

_MIXINS: tuple[tuple[type, Modality, str], ...] = (
    (EncodesImages, Modality.IMAGE, "get_image_feature"),
    (EncodesVideos, Modality.VIDEO, "get_video_feature"),
    (EncodesAudio, Modality.AUDIO, "get_audio_feature"),
)


def checked_rows(
    result: Any, items: Sequence[MultimodalDataItem], *, hidden: int, dtype: Any, device: Any, blame: Mapping[str, Any]
) -> list[Encoded]:
    """What an encoder returned, as rows that are ready to be written and kept.

    Each result owns its storage, so keeping one never keeps a larger buffer.

    Args:
        result: what `get_image_feature` or its like returned.
        items: the items that it was called with.
        hidden: width that the rows must have.
        dtype: torch dtype to which rows are brought.
        device: torch device to which rows are brought.
        blame: whose encoder it was.

    Raises:
        EncoderError: another count of results, rows or columns, or rows that are not floating point.
    """
    import torch

    if isinstance(result, torch.Tensor) or not isinstance(result, Sequence):
        raise EncoderError(
            f"the encoder returned a {type(result).__name__}; it must return a list with an entry per item", **blame
        )
    if len(result) != len(items):
        raise EncoderError(f"the encoder returned {len(result)} results for {len(items)} items", **blame)
    checked: list[Encoded] = []
    for index, (entry, item) in enumerate(zip(result, items, strict=True)):
        encoded = entry if isinstance(entry, Encoded) else Encoded(entry)
        rows, expected = encoded.rows, (item.num_tokens, hidden)
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or tuple(rows.shape) != expected:
            found = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise EncoderError(
                f"{item.modality.name.lower()} {index} of {len(items)}: the encoder returned {found}, "
                f"its span takes [{expected[0]}, {expected[1]}] floating point",
                **blame,
            )
        deepstack = encoded.deepstack
        if deepstack is not None:
            if not isinstance(deepstack, torch.Tensor) or tuple(deepstack.shape[1:]) != expected:
                raise EncoderError(f"item {index}: deepstack rows must be [n_layers, {expected[0]}, {hidden}]", **blame)
            deepstack = _own(deepstack, device, dtype)
        kept = encoded.kept
        if kept is not None:
            if not isinstance(kept, torch.Tensor) or kept.dtype != torch.int64 or tuple(kept.shape) != expected[:1]:
                raise EncoderError(f"item {index}: kept must be {expected[0]} int64 indices", **blame)
            kept = _own(kept, device, kept.dtype)
        checked.append(Encoded(_own(rows, device, dtype), deepstack, kept))
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


def _own(rows: torch.Tensor, device: Any, dtype: Any) -> torch.Tensor:
    """The rows on a device, detached, in storage of their own."""
    import torch

    base = rows.detach() if rows.requires_grad else rows
    moved = base.to(device=device, dtype=dtype)
    # What was not copied on the way is the encoder's own buffer, which its next call may write into.
    return moved.clone(memory_format=torch.contiguous_format) if moved is base else moved.contiguous()
