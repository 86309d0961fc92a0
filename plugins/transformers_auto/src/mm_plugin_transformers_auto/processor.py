"""Media and requests through the checkpoint's own processor, as it was learned when the checkpoint was opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from PIL import Image

from mm_plugin import (
    AcceptsAudio,
    BaseOptions,
    Checkpoint,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    JointItem,
    JointOutput,
    LimitError,
    MediaError,
    Modality,
    ModelProcessor,
    OptionScope,
    ProcessesJointly,
    Replacement,
    RequestError,
    Size,
)
from mm_plugin.errors import PlaceholderError, SizeError
from mm_plugin.identity import frame
from mm_plugin_transformers_auto.learning import (
    IDS,
    Kind,
    Kwargs,
    Model,
    ProcessorRaised,
    Unlike,
    fields_of,
    model_of,
    probe_media,
)

T = TypeVar("T")
Arguments = dict[str, Any]


class ImagesOptions(BaseOptions, frozen=True, kw_only=True):
    """Options of models that take images.

    Attributes:
        images_kwargs: arguments for the processor's image part, under transformers' own names; of plain values.
        max_aspect_ratio: longer side of an image over its shorter one, at most. Many processors first scale the shorter side
            to a fixed number of pixels: an image of one row would become as many gigabytes as it is long.
    """

    @classmethod
    def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> dict[str, Any]:  # noqa: ARG003
        """None: the checkpoint's own processor reads them."""
        return {}

    images_kwargs: Annotated[Arguments, OptionScope.request("image")] = msgspec.field(default_factory=dict)
    max_aspect_ratio: Annotated[float, msgspec.Meta(ge=1), OptionScope.load("image")] = 100.0

    def __post_init__(self) -> None:
        _check_plain("images_kwargs", self.images_kwargs)


class AudioOptions(BaseOptions, frozen=True, kw_only=True):
    """Options of models that take audio.

    Attributes:
        audio_kwargs: arguments for the processor's audio part, under transformers' own names; of plain values.
    """

    @classmethod
    def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> dict[str, Any]:  # noqa: ARG003
        """None: the checkpoint's own processor reads them."""
        return {}

    audio_kwargs: Annotated[Arguments, OptionScope.request("audio")] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_plain("audio_kwargs", self.audio_kwargs)


class ImagesAndAudioOptions(ImagesOptions, frozen=True, kw_only=True):
    """Options of models that take both.

    Attributes:
        audio_kwargs: as in `AudioOptions`.
    """

    audio_kwargs: Annotated[Arguments, OptionScope.request("audio")] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_plain("images_kwargs", self.images_kwargs)
        _check_plain("audio_kwargs", self.audio_kwargs)


def _check_plain(name: str, given: Arguments) -> None:
    try:
        msgspec.json.encode(given)
        frame(given)
    except Exception as error:
        raise ValueError(f"{name} must hold plain values: numbers, text, lists and objects of them") from error


class TransformersProcessor(ModelProcessor, ProcessesJointly):
    """What every model has in common; the classes below say what it takes."""

    def context(self, counts: Mapping[Modality, int]) -> str:
        """The processor's settings and version: two checkpoints with one config.json may differ in nothing else."""
        return self._learnt.digest

    def layout(self, modality: Modality, size: Any, options: Any, context: str) -> Mapping[str, Any]:
        """`prompt_ids` [n] int64 and the tensors beside the feature, as a blank media input of this size gives them."""
        kind, kwargs = self._learnt.kinds[modality], self._kwargs(options)
        self._check_kwargs(kwargs)
        measures = _measures(modality, size, options)
        return self._trying(
            kind, measures, kwargs, lambda: self._learnt.layout(kind, measures, kwargs.get(modality, {}))
        )

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> torch.Tensor:
        """The processor's tensor of this media input, if tokens and fields are those of `layout`."""
        kind, kwargs = self._learnt.kinds[decoded.modality], self._kwargs(options)
        found = self._trying(
            kind,
            _measures(decoded.modality, decoded.size, options),
            kwargs,
            lambda: self._learnt.alone(kind, _native(decoded), kwargs.get(decoded.modality, {})),
        )
        for name, value in fields_of(kind, found).items():
            if not np.array_equal(value, layout[name]):
                raise Unlike(
                    f"{self._learnt.opened.author} gives another {name} than for a blank media input of this size"
                )
        return found.tensors[kind.features[0]]

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        """The processor's tokens; those at whose places the model writes rows take rows."""
        ids = layout[IDS]
        return Replacement(ids, np.isin(ids, [kind.row_token for kind in self._learnt.kinds.values()]))

    # ---------------------------------------------------------------- as a whole

    def is_joint(self) -> bool:
        """Whether what a media input becomes could not be told from the media input alone."""
        return self._learnt.unlike is not None

    def prepare_jointly(
        self, text: str, media: Mapping[Modality, Sequence[DecodedMedia]], options: Any, *, rendered: bool
    ) -> JointOutput:
        """The processor on the whole request."""
        learnt, kwargs = self._learnt, self._kwargs(options)
        self._check_names(kwargs)
        native = {modality: [_native(decoded) for decoded in given] for modality, given in media.items()}
        for modality, given in media.items():
            for index, decoded in enumerate(given):
                try:
                    _measures(modality, decoded.size, options)
                except SizeError as error:
                    path = f"{modality.argument}[{index}]"
                    raise MediaError(f"{path}: {error.message}", path=path, reason="size") from error
        try:
            out = learnt.run(text, native, kwargs, special=not rendered)
        except ProcessorRaised as error:
            if any(kwargs.values()) and self._works(lambda: learnt.run(text, native, {}, special=not rendered)):
                raise RequestError(f"options: {error}", path="options") from error
            if all(self._works_on_a_plain_one(kind) for kind in learnt.kinds.values()):
                raise PlaceholderError(f"prompt: {error}", path="prompt") from error
            raise
        ids = np.asarray(out["input_ids"], dtype=np.int64).reshape(-1)
        items = []
        for modality in media:
            kind = learnt.kinds[modality]
            if not (ids == kind.row_token).any():
                path = f"{modality.argument}[0]"
                raise MediaError(
                    f"{path}: no token stands for {modality.argument} of this size", path=path, reason="size"
                )
            fields = {name: out[name].numpy() for name in kind.fields}
            items.append(JointItem(modality, ids == kind.row_token, out[kind.features[0]], fields))
        return JointOutput(ids, items)

    # ---------------------------------------------------------------- whose fault it is

    def _trying(
        self, kind: Kind, measures: tuple[int, ...], kwargs: Mapping[Modality, Kwargs], step: Callable[[], T]
    ) -> T:
        """A step over one media input: what only this media input or these arguments bring about is the request's fault."""
        learnt, own = self._learnt, kwargs.get(kind.modality, {})
        try:
            return step()
        except ProcessorRaised as error:
            if own and self._works(lambda: learnt.layout(kind, measures, {})):
                raise RequestError(f"options: {error}", path="options") from error
            if self._works_on_a_plain_one(kind):
                raise SizeError(str(error)) from error
            raise
        except Unlike as error:
            if not own:
                raise
            raise RequestError(
                f"options: with these arguments media cannot be prepared one by one: {error}", path="options"
            ) from error

    def _works_on_a_plain_one(self, kind: Kind) -> bool:
        """Whether the processor still does what it did when the model was opened."""
        learnt = self._learnt
        media_input = probe_media(kind.modality, 0, learnt)
        return self._works(lambda: learnt.run(kind.example, {kind.modality: [media_input]}, {}))

    @staticmethod
    def _works(step: Callable[[], Any]) -> bool:
        try:
            step()
        except (ProcessorRaised, Unlike, SizeError):
            return False
        return True

    # ---------------------------------------------------------------- arguments

    def _kwargs(self, options: Any) -> dict[Modality, Kwargs]:
        names = {Modality.IMAGE: "images_kwargs", Modality.AUDIO: "audio_kwargs"}
        found = {modality: getattr(options, names[modality]) for modality in self._learnt.kinds}
        return {modality: kwargs for modality, kwargs in found.items() if kwargs}

    def _check_names(self, kwargs: Mapping[Modality, Kwargs]) -> None:
        for modality, given in kwargs.items():
            known = self._learnt.known_kwargs(modality)
            for name in given:
                if name not in known:
                    part = type(self._learnt.part(modality)).__name__
                    raise RequestError(
                        f"options: {part} has no argument {name!r} that a request may give; there are: {', '.join(known)}",
                        path="options",
                    )
                self._check_size(modality, name, given[name])

    def _check_size(self, modality: Modality, name: str, value: Any) -> None:
        """A request may not have images made that are larger than those it may send; what was given at load may.

        Raises:
            LimitError: a number, taken for a side in pixels, is of a square over `max_image_pixels`.
        """
        if modality is not Modality.IMAGE or self.options.images_kwargs.get(name) == value:
            return
        limit, most = self.settings.max_image_pixels, max(map(abs, _numbers(value)), default=0)
        if (most if "pixels" in name else most**2) > limit:
            raise LimitError(
                f"options: {name} asks for more than {limit} pixels; give it when the model is opened",
                path="options",
                setting="max_image_pixels",
                limit=limit,
                value=int(most),
            )

    def _check_kwargs(self, kwargs: Mapping[Modality, Kwargs]) -> None:
        """Arguments must be known, and leave media independent of one another."""
        if not kwargs:
            return
        self._check_names(kwargs)
        try:
            why = self._learnt.check_kwargs(kwargs)
        except ProcessorRaised as error:
            if all(self._works_on_a_plain_one(kind) for kind in self._learnt.kinds.values()):
                raise RequestError(f"options: {error}", path="options") from error
            raise
        if why is not None:
            raise RequestError(
                f"options: with these arguments media cannot be prepared one by one: {why}", path="options"
            )

    @cached_property
    def _learnt(self) -> Model:
        return model_of(self.checkpoint)


class ImagesProcessor(TransformersProcessor):
    """Any model that takes images."""

    Options: ClassVar[type[BaseOptions]] = ImagesOptions


class AudioProcessor(TransformersProcessor, AcceptsAudio):
    """Any model that takes audio."""

    Options: ClassVar[type[BaseOptions]] = AudioOptions

    def sampling_rate(self, options: Any) -> int:
        """The rate of the checkpoint's feature extractor."""
        return self._learnt.sampling_rate


class ImagesAndAudioProcessor(AudioProcessor):
    """Any model that takes both."""

    Options: ClassVar[type[BaseOptions]] = ImagesAndAudioOptions


def _numbers(value: Any) -> list[float]:
    """Every number in a plain value, however deep."""
    if isinstance(value, Mapping):
        return [number for part in value.values() for number in _numbers(part)]
    if isinstance(value, list | tuple):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _measures(modality: Modality, size: Any, options: Any) -> tuple[int, ...]:
    """(height, width) of an image, (samples,) of an audio input.

    Raises:
        SizeError: an image is too long for its width, or too wide for its height.
    """
    if modality is Modality.AUDIO:
        return (int(size.num_samples),)
    assert isinstance(size, Size)
    height, width = int(size.height), int(size.width)
    if max(height, width) > options.max_aspect_ratio * min(height, width):
        raise SizeError(
            f"{height} x {width} pixels (height x width): one side is more than {options.max_aspect_ratio:g} times the other "
            "(max_aspect_ratio)"
        )
    return height, width


def _native(decoded: DecodedMedia) -> Any:
    """A media input as transformers' processors take it."""
    if isinstance(decoded, DecodedAudio):
        return decoded.samples
    assert isinstance(decoded, DecodedImage)
    return Image.fromarray(decoded.pixels)
