"""`ModelProcessor`: the class that an author writes for a model. Knows no request and no cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from mm_plugin.inputs.processed import SpecialTokens
from mm_plugin.items import Modality
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.mixins import Fields
from mm_plugin.processor.options import BaseOptions

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.settings import Settings
    from mm_plugin.spec import ModelSpec


class ModelProcessor(ABC):
    """What an author writes for a model: its options, and how one media input becomes tokens and a feature. Abstract.

    A server never calls it: `Registry.load_processor` returns a `Processor`, whose `.model` it is. Its methods may be called from
    any number of threads at the same time. An author overrides `Options`, `context`, `layout`, `prepare` and `replacement`, adds
    mixins for what else the model takes, and nothing else. What is needed once per checkpoint is a `functools.cached_property`.

    Attributes:
        spec: the plugin's declaration.
        checkpoint: the opened checkpoint.
        config: its config.json.
        settings: limits and switches.
        special_tokens: ids of placeholders and pairs.
        options: the options that are in force where a request gives none.

    >>> import numpy as np
    >>> from mm_plugin import BaseOptions, Replacement
    >>> class Rows(ModelProcessor):
    ...     Options = BaseOptions
    ...
    ...     def context(self, counts):
    ...         return None
    ...
    ...     def layout(self, modality, size, options, context):
    ...         return {"rows": size.height}
    ...
    ...     def prepare(self, decoded, layout, options):
    ...         return decoded.pixels.mean(axis=1)
    ...
    ...     def replacement(self, layout):
    ...         return Replacement.repeat(9, layout["rows"])
    """

    Options: ClassVar[type[BaseOptions]]

    @final
    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, settings: Settings, special_tokens: SpecialTokens, options: Any
    ) -> None:
        self.spec, self.checkpoint, self.config = spec, checkpoint, checkpoint.config
        self.settings, self.special_tokens = settings, special_tokens
        self.options: Any = options

    @abstractmethod
    def context(self, counts: Mapping[Modality, int]) -> Any:
        """Request-level facts that an item depends on, such as whether there are more than two images; None where there are none.

        Args:
            counts: media in the request, by modality.
        """

    @abstractmethod
    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> Fields:
        """The model fields of one media input, from its size alone: exactly the names that the spec declares for the modality.

        Args:
            modality: what it is.
            size: of an image a `Size`; of a video a `SampledVideo`, the frames that `sample` chose; of audio an `AudioSize` at
                the rate that `sampling_rate` gave.
            options: an `Options`, all resolved.
            context: what `context` returned.

        Returns:
            A dict, or `NotedFields` where the media input is served otherwise than asked, such as larger than an option allows.
        """

    @abstractmethod
    def prepare(self, decoded: Any, layout: Fields, options: Any) -> Any:
        """The feature that the encoder reads, a numpy array or torch tensor of its own.

        Args:
            decoded: a `DecodedImage`, a `DecodedVideo` whose frames are decoded while they are iterated, or a `DecodedAudio`.
            layout: what `layout` returned.
            options: an `Options`, all resolved.
        """

    @abstractmethod
    def replacement(self, layout: Fields) -> Replacement:
        """The tokens that stand for one media input in the expanded prompt.

        Args:
            layout: what `layout` returned.
        """
