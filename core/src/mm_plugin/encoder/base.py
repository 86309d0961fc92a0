"""`Encoder` and its mixins: what an author subclasses to turn items into embeddings. Knows no chunk, cache or text embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import msgspec

from mm_plugin.errors import EncoderError
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.items import Modality, MultimodalDataItem

if TYPE_CHECKING:
    import torch

    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.encoder.staging import StagingBuffer
    from mm_plugin.events import Observers


# A model's own way to embed, named by `ModelSpec.embed`: (text_embeds, plan, embeddings, input_ids) -> (input_embeds, extra).
EmbedRoutine = Callable[..., tuple[Any, Any]]


class _Binding(msgspec.Struct, frozen=True, eq=False):
    """What the registry adds to an encoder, in one place that an author's attributes cannot collide with."""

    owner: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    observers: Any = None
    embed: Any = None
    staging: Any = None
    strict: bool = False
    dtype: Any = None


class Encoder(ABC):
    """Turns items into embeddings on one device. Abstract; combine it with the mixins for the modalities that the model takes.

    Attributes:
        version: changes when equal items would get other embeddings, as after reloaded weights; part of every cache key. The
            registry sets it from the checkpoint; whatever changes the weights must change it.
        device: torch device on which it reads features; the registry sets it. Where it is not the CPU, features are brought there.
        collective: whether several ranks enter a call together and must then agree on what failed.

    Example:
        >>> import torch
        >>> from mm_plugin import Encoder, EncodesImages, Modality, MultimodalDataItem
        >>> class Mean(Encoder, EncodesImages):
        ...     @classmethod
        ...     def load(cls, checkpoint, device, dtype):
        ...         return cls()
        ...
        ...     def get_image_feature(self, items):
        ...         return [torch.as_tensor(item.feature).mean(dim=1) for item in items]
        >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=torch.ones(2, 4, 8))
        >>> [tuple(embeddings.shape) for embeddings in Mean().encode(Modality.IMAGE, [item])]
        [(2, 8)]
    """

    version: str = ""
    device: Any = None
    collective: ClassVar[bool] = False
    _binding: _Binding = _Binding()

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> Encoder:
        """Build the encoder from the checkpoint's tensors, in inference mode.

        Args:
            checkpoint: an open checkpoint.
            device: torch device for the weights.
            dtype: torch dtype, or None for the checkpoint's own.
        """

    @final
    def bind(
        self,
        *,
        version: str,
        device: Any = None,
        dtype: Any = None,
        owner: Mapping[str, str | None],
        observers: Observers | None = None,
        embed: EmbedRoutine | None = None,
        strict: bool = False,
    ) -> None:
        """Set what the registry knows of the encoder: its weights' version, its place, whose it is.

        Args:
            version: as the attribute.
            device: as the attribute. On a CUDA device, the encoder gets a staging buffer, whose memory is pinned at first use.
            dtype: torch dtype with which it was loaded; None for the checkpoint's own.
            owner: plugin, distribution and version, for errors.
            observers: hear of every encoder call.
            embed: the function that `ModelSpec.embed` names, loaded; None where the spec names none.
            strict: items that it refuses together and encodes one by one have failed.
        """
        self.version, self.device = version, device
        self._binding = _Binding(owner, observers, embed, _staging_for(device), strict, dtype)

    @property
    @final
    def loaded_dtype(self) -> Any:
        """The torch dtype with which it was loaded; None for the checkpoint's own."""
        return self._binding.dtype

    @property
    @final
    def owner(self) -> Mapping[str, str | None]:
        """Plugin, distribution and version, for errors."""
        return self._binding.owner

    @property
    @final
    def observers(self) -> Observers | None:
        """What hears of encoder calls; None where nothing does."""
        return self._binding.observers  # type: ignore[no-any-return]

    @property
    @final
    def embed_routine(self) -> EmbedRoutine | None:
        """The model's own way to embed; None where embeddings replace the rows of placeholders."""
        return self._binding.embed  # type: ignore[no-any-return]

    @property
    @final
    def is_strict(self) -> bool:
        """Whether items have failed that it refuses together and encodes one by one."""
        return self._binding.strict

    @property
    @final
    def staging(self) -> StagingBuffer | None:
        """What brings features to the encoder's device; None where they are moved as they are."""
        return self._binding.staging  # type: ignore[no-any-return]

    @final
    def encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Embeddings of each item, by the mixin of its modality. `checked_embeddings` checks the result; this does not.

        Raises:
            EncoderError: the encoder has no mixin for this modality.
        """
        for mixin, kind, method in _MIXINS:
            if kind is modality and isinstance(self, mixin):
                return getattr(self, method)(items)  # type: ignore[no-any-return]
        raise EncoderError(f"{type(self).__name__} does not encode {modality.argument}", **self.owner)


class EncodesImages(ABC):
    """For encoders that encode images.

    Example:
        >>> import torch
        >>> from mm_plugin import EncodesImages, Modality, MultimodalDataItem
        >>> class Means(EncodesImages):  # beside Encoder
        ...     def get_image_feature(self, items):
        ...         return [item.feature.mean(dim=1) for item in items]
        >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=torch.ones(2, 4, 8))
        >>> [tuple(embeddings.shape) for embeddings in Means().get_image_feature([item])]
        [(2, 8)]
    """

    @abstractmethod
    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Embeddings of images.

        Args:
            items: images, of one request or of several; their features are on the encoder's device.

        Shape:
            returns a list aligned with `items`; each [num_tokens, hidden], floating point, on the encoder's device.
        """


class EncodesVideos(ABC):
    """For encoders that encode videos.

    Example:
        >>> import torch
        >>> from mm_plugin import EncodesVideos, Modality, MultimodalDataItem
        >>> class Pairs(EncodesVideos):  # beside Encoder; one embedding for two frames
        ...     def get_video_feature(self, items):
        ...         return [item.feature.unflatten(0, (-1, 2)).mean(dim=1) for item in items]
        >>> item = MultimodalDataItem(modality=Modality.VIDEO, offsets=[(0, 2)], feature=torch.ones(6, 8))
        >>> [tuple(embeddings.shape) for embeddings in Pairs().get_video_feature([item])]
        [(3, 8)]
    """

    @abstractmethod
    def get_video_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Embeddings of videos; shaped as in `EncodesImages`."""


class EncodesAudio(ABC):
    """For encoders that encode audio.

    Example:
        >>> import torch
        >>> from mm_plugin import EncodesAudio, Modality, MultimodalDataItem
        >>> class Frames(EncodesAudio):  # beside Encoder
        ...     def get_audio_feature(self, items):
        ...         return [item.feature.T for item in items]
        >>> item = MultimodalDataItem(modality=Modality.AUDIO, offsets=[(0, 4)], feature=torch.ones(8, 5))
        >>> [tuple(embeddings.shape) for embeddings in Frames().get_audio_feature([item])]
        [(5, 8)]
    """

    @abstractmethod
    def get_audio_feature(self, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """Embeddings of audio; shaped as in `EncodesImages`."""


# A mapping of callables is taken in place of an `Encoder`.
EncoderLike = Encoder | Mapping[Modality, Callable[[Sequence[MultimodalDataItem]], Sequence[Any]]]


# Takes one rank's outcome of a call and returns the worst of all ranks.
Agree = Callable[[int], int]


_MIXINS: tuple[tuple[type, Modality, str], ...] = (
    (EncodesImages, Modality.IMAGE, "get_image_feature"),
    (EncodesVideos, Modality.VIDEO, "get_video_feature"),
    (EncodesAudio, Modality.AUDIO, "get_audio_feature"),
)


def required_mixins(modalities: Sequence[Modality]) -> tuple[type, ...]:
    """The mixins that an encoder needs for the modalities of its spec."""
    return tuple(mixin for mixin, modality, _ in _MIXINS if modality in modalities)


def own_storage(tensor: torch.Tensor, device: Any, dtype: Any) -> torch.Tensor:
    """A tensor on a device in a dtype, detached and contiguous, in storage of its own."""
    import torch

    base = tensor.detach() if tensor.requires_grad else tensor
    moved = base.to(device=device, dtype=dtype)
    # What was not copied on the way is the encoder's own buffer, which its next call may write to.
    return moved.clone(memory_format=torch.contiguous_format) if moved is base else moved.contiguous()


def _staging_for(device: Any) -> StagingBuffer | None:
    if device is None:
        return None
    import torch

    if torch.device(device).type != "cuda":
        return None
    from mm_plugin.encoder.staging import StagingBuffer

    return StagingBuffer(device)
