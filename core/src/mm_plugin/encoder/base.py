"""`Encoder` and its mixins: what an author subclasses to turn items into embeddings. Knows no chunk, cache or text embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from mm_plugin.errors import EncoderError
from mm_plugin.inputs import Encoded
from mm_plugin.items import Modality, MultimodalDataItem

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
    _owner: Mapping[str, str | None] = {}
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
        self, *, version: str, device: Any = None, owner: Mapping[str, str | None], observers: Observers | None = None
    ) -> None:
        """Say which weights it holds and whose encoder it is; the registry does."""
        self.version, self.device = version, device
        self._owner, self._observers = owner, observers

    @property
    @final
    def owner(self) -> Mapping[str, str | None]:
        """plugin, distribution and version, for errors."""
        return self._owner

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
        raise EncoderError(f"{type(self).__name__} does not encode {modality.argument}", **self._owner)


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


def own_rows(rows: torch.Tensor, device: Any, dtype: Any) -> torch.Tensor:
    """The rows on a device, detached, in storage of their own."""
    import torch

    base = rows.detach() if rows.requires_grad else rows
    moved = base.to(device=device, dtype=dtype)
    # What was not copied on the way is the encoder's own buffer, which its next call may write into.
    return moved.clone(memory_format=torch.contiguous_format) if moved is base else moved.contiguous()
