"""The options of every model that this plugin serves. Those of a modality that a model does not take are unknown to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from mm_plugin import BaseOptions, Checkpoint, Modality, OptionScope
from mm_plugin.identity import frame
from mm_plugin_transformers_auto.traits import Kwargs

_NAMES = {Modality.IMAGE: "images_kwargs", Modality.AUDIO: "audio_kwargs"}


class TransformersOptions(BaseOptions, frozen=True, kw_only=True):
    """Options of a model.

    Attributes:
        images_kwargs: arguments for the processor's image part, by transformers' own names; plain values.
        audio_kwargs: arguments for the processor's audio part, by transformers' own names; plain values.
        max_aspect_ratio: highest ratio of an image's longer side to its shorter side. Many processors first scale the shorter
            side to a fixed number of pixels: an image one pixel high would take as many gigabytes as it is wide.

    Example:
        >>> TransformersOptions(images_kwargs={"do_normalize": False}).kwargs([Modality.IMAGE])
        {<Modality.IMAGE: 1>: {'do_normalize': False}}
    """

    images_kwargs: Annotated[dict[str, Any], OptionScope.request("image", per_item=False)] = msgspec.field(
        default_factory=dict
    )
    audio_kwargs: Annotated[dict[str, Any], OptionScope.request("audio", per_item=False)] = msgspec.field(
        default_factory=dict
    )
    max_aspect_ratio: Annotated[float, msgspec.Meta(ge=1), OptionScope.load("image")] = 100.0

    def __post_init__(self) -> None:
        for name in _NAMES.values():
            _check_plain(name, getattr(self, name))

    @classmethod
    def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> dict[str, Any]:  # noqa: ARG003
        """Nothing: the checkpoint's own processor reads its settings."""
        return {}

    def kwargs(self, modalities: Iterable[Modality]) -> dict[Modality, Kwargs]:
        """The arguments for each of these modalities that has any.

        Args:
            modalities: the modalities that the model takes.
        """
        found = {modality: getattr(self, _NAMES[modality]) for modality in modalities}
        return {modality: kwargs for modality, kwargs in found.items() if kwargs}


def _check_plain(name: str, given: dict[str, Any]) -> None:
    try:
        msgspec.json.encode(given)
        frame(given)
    except Exception as error:
        raise ValueError(
            f"{name}: expected plain values (numbers, text, lists and objects of them), got others"
        ) from error
