"""Checks of the arguments that a request gives for a processor's parts: their names, and the size of images they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_plugin import LimitError, Modality, RequestError
from mm_plugin_transformers_auto.runner import ProcessorRunner
from mm_plugin_transformers_auto.traits import Kwargs


def check_names(runner: ProcessorRunner, kwargs: Mapping[Modality, Kwargs]) -> None:
    """Check that the processor's parts have these arguments.

    Raises:
        RequestError: a part has no such argument, or a request may not give it; the message names those it may.
    """
    for modality, given in kwargs.items():
        known = runner.known_kwargs(modality)
        for name in given:
            if name not in known:
                part = type(runner.part(modality)).__name__
                raise RequestError(
                    f"options: expected arguments of {part}, got {name!r}; supported: {', '.join(known)}",
                    path="options",
                )


def check_image_sizes(given: Kwargs, at_load: Kwargs, max_image_pixels: int) -> None:
    """Check that a request does not have images made that are larger than those it may send.

    Every number counts as a side in pixels, or as an area if the argument's name says so. Values that were given when the model
    was opened are not checked.

    Args:
        given: arguments for the image part.
        at_load: the arguments that were given when the model was opened.
        max_image_pixels: the most pixels of one image.

    Raises:
        LimitError: a number stands for more pixels.
    """
    for name, value in given.items():
        if at_load.get(name) == value:
            continue
        most = max(map(abs, _numbers(value)), default=0)
        if (most if "pixels" in name else most**2) > max_image_pixels:
            raise LimitError(
                f"options: {name} asks for more than {max_image_pixels} pixels; pass it when the model is opened",
                path="options",
                setting="max_image_pixels",
                limit=max_image_pixels,
                value=int(most),
            )


def _numbers(value: Any) -> list[float]:
    """Every number in a plain value, at any depth."""
    if isinstance(value, Mapping):
        return [number for part in value.values() for number in _numbers(part)]
    if isinstance(value, list | tuple):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []
