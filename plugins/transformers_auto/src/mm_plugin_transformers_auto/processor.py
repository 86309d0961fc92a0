"""Media and requests through the checkpoint's own processor, as learned when the checkpoint was opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from mm_plugin import (
    AcceptsAudio,
    BaseOptions,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    JointItem,
    JointOutput,
    MediaError,
    Modality,
    ModelProcessor,
    ProcessesJointly,
    Replacement,
    Size,
)
from mm_plugin.errors import SizeError
from mm_plugin_transformers_auto.attribution import check_composable, run_jointly, try_single
from mm_plugin_transformers_auto.kwargs import check_image_sizes, check_names
from mm_plugin_transformers_auto.options import TransformersOptions
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.runner import ids_of
from mm_plugin_transformers_auto.single_item import IDS, NotComposable
from mm_plugin_transformers_auto.traits import Kwargs


class TransformersProcessor(ModelProcessor, AcceptsAudio, ProcessesJointly):
    """Serves any model whose processor transformers can open. Which modalities it takes, the spec says."""

    Options: ClassVar[type[BaseOptions]] = TransformersOptions

    @cached_property
    def _probed(self) -> ProbedModel:
        return ProbedModel.of(self.checkpoint)

    def context(self, counts: Mapping[Modality, int]) -> str:
        """The digest of the processor's settings and version, which checkpoints with the same config.json may differ in."""
        return self._probed.digest

    def sampling_rate(self, options: Any) -> int:
        """The sampling rate that the processor's audio part expects, samples per second."""
        rate = self._probed.runner.sampling_rate
        assert rate is not None
        return rate

    # ---------------------------------------------------------------- one by one

    def layout(self, modality: Modality, size: Any, options: TransformersOptions, context: str) -> Mapping[str, Any]:
        """`prompt_ids` [n] int64 and the tensors beside the feature, as a blank media input of this size gives them."""
        probed, kwargs = self._probed, self._checked_kwargs(options)
        if kwargs:
            check_composable(probed, kwargs)
        traits, shape, own = probed.traits[modality], _shape_of(modality, size, options), kwargs.get(modality, {})
        return try_single(probed, traits, shape, own, lambda: probed.layout(traits, shape, own))

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: TransformersOptions) -> torch.Tensor:
        """The processor's feature of this media input, provided that tokens and fields are those of `layout`."""
        probed, modality = self._probed, decoded.modality
        own = options.kwargs(probed.traits).get(modality, {})
        traits, shape = probed.traits[modality], _shape_of(modality, decoded.size, options)
        found = try_single(
            probed, traits, shape, own, lambda: probed.single.run(traits, _for_transformers(decoded), own)
        )
        for name, value in found.fields(traits).items():
            if not np.array_equal(value, layout[name]):
                raise NotComposable(
                    f"{probed.opened.label} returned another {name} than for a blank media input of this size"
                )
        return found.tensors[traits.feature_name]

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        """The processor's tokens, with embeddings where the model itself writes them."""
        ids = layout[IDS]
        return Replacement(ids, np.isin(ids, [traits.embed_token_id for traits in self._probed.traits.values()]))

    # ---------------------------------------------------------------- jointly

    def is_joint(self) -> bool:
        """Whether a media input may depend on the request that it is part of."""
        return self._probed.joint_reason is not None

    def prepare_jointly(
        self,
        text: str,
        media: Mapping[Modality, Sequence[DecodedMedia]],
        options: TransformersOptions,
        *,
        rendered: bool,
    ) -> JointOutput:
        """The processor's output for the whole request."""
        kwargs = self._checked_kwargs(options)
        _check_shapes(media, options)
        native = {modality: [_for_transformers(decoded) for decoded in given] for modality, given in media.items()}
        out = run_jointly(self._probed, text, native, kwargs, special=False if rendered else None)
        ids = ids_of(out)
        return JointOutput(ids, [self._joint_item(modality, ids, out) for modality in media])

    def _joint_item(self, modality: Modality, ids: np.ndarray, out: Mapping[str, Any]) -> JointItem:
        traits = self._probed.traits[modality]
        is_embed = ids == traits.embed_token_id
        if not is_embed.any():
            raise _size_error(modality, 0, f"no token stands for {modality.argument} of this size")
        fields = {name: out[name].numpy() for name in traits.field_names}
        return JointItem(modality, is_embed, out[traits.feature_name], fields)

    # ---------------------------------------------------------------- arguments

    def _checked_kwargs(self, options: TransformersOptions) -> dict[Modality, Kwargs]:
        kwargs = options.kwargs(self._probed.traits)
        check_names(self._probed.runner, kwargs)
        check_image_sizes(kwargs.get(Modality.IMAGE, {}), self.options.images_kwargs, self.settings.max_image_pixels)
        return kwargs


def _shape_of(modality: Modality, size: Any, options: TransformersOptions) -> tuple[int, ...]:
    """(height, width) of an image, (samples,) of audio.

    Raises:
        SizeError: one side of an image is too long for the other.
    """
    if modality is Modality.AUDIO:
        return (int(size.num_samples),)
    assert isinstance(size, Size)
    height, width = int(size.height), int(size.width)
    if max(height, width) > options.max_aspect_ratio * min(height, width):
        raise SizeError(
            f"the longer side must be at most {options.max_aspect_ratio:g} times the shorter one (max_aspect_ratio), got "
            f"{height} x {width} pixels (height x width)"
        )
    return height, width


def _check_shapes(media: Mapping[Modality, Sequence[DecodedMedia]], options: TransformersOptions) -> None:
    for modality, given in media.items():
        for index, decoded in enumerate(given):
            try:
                _shape_of(modality, decoded.size, options)
            except SizeError as error:
                raise _size_error(modality, index, error.message) from error


def _size_error(modality: Modality, index: int, said: str) -> MediaError:
    path = f"{modality.argument}[{index}]"
    return MediaError(f"{path}: {said}", path=path, reason="size")


def _for_transformers(decoded: DecodedMedia) -> Any:
    """A media input as transformers' processors take it."""
    if isinstance(decoded, DecodedAudio):
        return decoded.samples
    assert isinstance(decoded, DecodedImage)
    return Image.fromarray(decoded.pixels)
