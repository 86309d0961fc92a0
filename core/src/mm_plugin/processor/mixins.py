"""What a processor may be able to do beside images: mixins that an author adds to `ModelProcessor`. Nothing is done here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mm_plugin.items import Modality
from mm_plugin.media.types import DecodedMedia, Sampling, VideoSize
from mm_plugin.processor.joint_output import JointOutput
from mm_plugin.settings import Settings

Fields = Mapping[str, Any]


class AcceptsVideos(ABC):
    """For processors that take videos. Only the frames that `sample` names are decoded, and only they are reported later.

    Example:
        >>> from mm_plugin import Sampling
        >>> import numpy as np
        >>> class EverySecondFrame(AcceptsVideos):
        ...     def sample(self, size, options):
        ...         return Sampling.of(size, np.arange(0, size.frames, 2))
        >>> from mm_plugin import VideoSize
        >>> EverySecondFrame().sample(VideoSize(48, 64, 5, 10.0), None).indices.tolist()
        [0, 2, 4]
    """

    @abstractmethod
    def sample(self, size: VideoSize, options: Any) -> Sampling:
        """Which frames of a video are used. Not asked for a video whose frames were chosen before it came.

        Args:
            size: of the whole video.
            options: an `Options`, all resolved.

        Returns:
            Frames and times; with `notes` where they are chosen otherwise than asked, such as fewer than an option names.

        Raises:
            SizeError: no frames of such a video can be used.
        """


class AcceptsAudio(ABC):
    """For processors that take audio.

    Example:
        >>> class Listens(AcceptsAudio):
        ...     def sampling_rate(self, options):
        ...         return 16_000
        >>> Listens().sampling_rate(None)
        16000
    """

    @abstractmethod
    def sampling_rate(self, options: Any) -> int:
        """Samples per second at which `prepare` wants an audio input.

        Args:
            options: an `Options`, all resolved.
        """


class AcceptsPrecomputed(ABC):
    """For processors that also take media that are prepared already (`ProcessorOutput`, `PrecomputedEmbeddings`).

    Everything there comes from a client, so nothing of it is believed. A client gives the feature under the name that
    `ModelSpec.feature_names` has for it, which such a plugin must declare.

    Example:
        >>> from mm_plugin.errors import SizeError
        >>> class Rows(AcceptsPrecomputed):
        ...     def check_fields(self, modality, fields):
        ...         if not 0 < fields["rows"] <= 1024:
        ...             raise SizeError(f"rows must be from 1 to 1024, got {fields['rows']}")
        ...         return int(fields["rows"])
        ...
        ...     def check_feature(self, modality, feature, fields):
        ...         if len(feature) != fields["rows"]:
        ...             raise SizeError(f"expected {fields['rows']} rows, got {len(feature)}")
        >>> Rows().check_fields(None, {"rows": 7})
        7
    """

    @abstractmethod
    def check_fields(self, modality: Modality, fields: Fields) -> int:
        """How many rows the fields stand for, by arithmetic alone; nothing of that size may be made here.

        Args:
            modality: what it is.
            fields: the declared fields; arrays are numpy, whole numbers int64.

        Raises:
            SizeError: they stand for no media input that the model can take.
        """

    @abstractmethod
    def check_feature(self, modality: Modality, feature: Any, fields: Fields) -> None:
        """Compare a feature with its fields.

        Args:
            modality: what it is.
            feature: a dense numpy array or torch tensor.
            fields: as `check_fields` accepted them.

        Raises:
            SizeError: they do not fit together.
        """


def required_mixins(modalities: Sequence[Modality]) -> tuple[type, ...]:
    """The mixins that a processor needs for the modalities of its spec."""
    needed = {Modality.VIDEO: AcceptsVideos, Modality.AUDIO: AcceptsAudio}
    return tuple(needed[modality] for modality in modalities if modality in needed)


class ProcessesJointly(ABC):
    """For processors some of whose models take a request's media only together, because one changes what becomes of another.

    Such a request gives one item for each modality. It is exact, and nothing of it is remembered: no media input has a source key.

    Example:
        >>> class Mosaic(ProcessesJointly):
        ...     def is_joint(self):
        ...         return True
        ...
        ...     def prepare_jointly(self, text, media, options, *, rendered):
        ...         raise NotImplementedError("a JointOutput is shown in its own example")
        >>> Mosaic().is_joint()
        True
    """

    @abstractmethod
    def is_joint(self) -> bool:
        """Whether this open model is one of them; asked once, when it is opened."""

    @abstractmethod
    def prepare_jointly(
        self, text: str, media: Mapping[Modality, Sequence[DecodedMedia]], options: Any, *, rendered: bool
    ) -> JointOutput:
        """Ids and items of a request with media.

        Args:
            text: the prompt, with placeholders as the model writes them.
            media: decoded and normalized, in order, by modality.
            options: an `Options`, all resolved.
            rendered: the text is a rendered chat template and has its special tokens already.

        Raises:
            PlaceholderError: text and media do not fit.
        """


class PreparesBatches(ABC):
    """For processors that prepare several media inputs in one call, such as on a GPU.

    It is asked for the media inputs of one request that the cache does not have; `prepare` still serves one alone.

    >>> class Batches(PreparesBatches):
    ...     def prepare_batch(self, decoded, layouts, options):
    ...         return [media.pixels.mean(axis=(0, 1)) for media in decoded]
    """

    @abstractmethod
    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Fields], options: Any) -> Sequence[Any]:
        """A feature for each media input, equal to what `prepare` gives for it alone.

        Args:
            decoded: the media inputs, of any mix of modalities.
            layouts: what `layout` returned for each.
            options: an `Options`, all resolved.
        """


class KnowsLargest(ABC):
    """For processors that know which sizes take most embeddings; of others, some sizes are tried.

    Example:
        >>> from mm_plugin import Size
        >>> class Square(KnowsLargest):  # one embedding for each 32 x 32 pixels
        ...     def largest_sizes(self, modality, options, settings):
        ...         side = min(1024, 32 * int(settings.max_image_pixels**0.5 / 32))
        ...         return [Size(side, side)]
        >>> from mm_plugin import Settings
        >>> Square().largest_sizes(None, None, Settings(max_image_pixels=10_000))
        [Size(height=96, width=96)]
    """

    @abstractmethod
    def largest_sizes(self, modality: Modality, options: Any, settings: Settings) -> Iterable[Any]:
        """Sizes, one of which takes as many embeddings as any that the limits leave; each is measured by `layout`.

        Args:
            modality: what it is.
            options: an `Options`, all resolved.
            settings: limits: `max_image_pixels` and `max_item_tokens`, and those of frames and seconds.

        Returns:
            `Size`s of images, `SampledVideo`s or `VideoSize`s, `AudioSize`s; of equal ones the cheapest first.
        """
