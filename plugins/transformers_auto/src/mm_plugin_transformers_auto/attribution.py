"""Whose fault an error of a checkpoint's processor is: the media input's, the request's arguments', or the plugin's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mm_plugin import Modality, RequestError
from mm_plugin.errors import PlaceholderError, SizeError
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.runner import ProcessorRaised
from mm_plugin_transformers_auto.single_item import NotComposable
from mm_plugin_transformers_auto.traits import Kwargs, ModalityTraits

T = TypeVar("T")


def try_single(
    model: ProbedModel, traits: ModalityTraits, size: tuple[int, ...], kwargs: Kwargs, step: Callable[[], T]
) -> T:
    """Do something with one media input.

    Args:
        model: what was learned about the checkpoint.
        traits: how the processor takes the modality of the media input.
        size: (height, width) of an image, pixels; (samples,) of audio.
        kwargs: the request's arguments for the processor's part.
        step: what to do.

    Raises:
        RequestError: it fails because of the arguments.
        SizeError: it fails because of the media input.
        ProcessorRaised, NotComposable: it fails whatever the request.
    """
    try:
        return step()
    except ProcessorRaised as error:
        if kwargs and _works(lambda: model.layout(traits, size, {})):
            raise RequestError(f"options: {error}", path="options") from error
        if _works_on_sample(model, traits):
            raise SizeError(str(error)) from error
        raise
    except NotComposable as error:
        if not kwargs:
            raise
        raise _not_composable(str(error)) from error


def check_composable(model: ProbedModel, kwargs: Mapping[Modality, Kwargs]) -> None:
    """Check that media inputs do not depend on one another under a request's arguments.

    Raises:
        RequestError: they do, or the processor raises because of the arguments.
        ProcessorRaised: the processor raises whatever the request.
    """
    try:
        reason = model.check_kwargs(kwargs)
    except ProcessorRaised as error:
        if _works_on_samples(model):
            raise RequestError(f"options: {error}", path="options") from error
        raise
    if reason is not None:
        raise _not_composable(reason)


def run_jointly(
    model: ProbedModel,
    text: str,
    media: Mapping[Modality, Sequence[Any]],
    kwargs: Mapping[Modality, Kwargs],
    *,
    special: bool | None,
) -> dict[str, Any]:
    """Run the processor on a whole request; see `ProcessorRunner.run`.

    Raises:
        RequestError: it fails because of the arguments.
        PlaceholderError: it fails because of this prompt and these media inputs.
        ProcessorRaised: it fails whatever the request.
    """
    run = model.runner.run
    try:
        return run(text, media, kwargs, special=special)
    except ProcessorRaised as error:
        if any(kwargs.values()) and _works(lambda: run(text, media, {}, special=special)):
            raise RequestError(f"options: {error}", path="options") from error
        if _works_on_samples(model):
            raise PlaceholderError(f"prompt: {error}", path="prompt") from error
        raise


def _not_composable(reason: str) -> RequestError:
    return RequestError(
        f"options: expected arguments under which media inputs can be prepared one by one, got others ({reason})",
        path="options",
    )


def _works_on_samples(model: ProbedModel) -> bool:
    return all(_works_on_sample(model, traits) for traits in model.traits.values())


def _works_on_sample(model: ProbedModel, traits: ModalityTraits) -> bool:
    """Whether the processor still does what it did when the checkpoint was opened."""
    return _works(lambda: model.sample_output(traits))


def _works(step: Callable[[], Any]) -> bool:
    try:
        step()
    except (ProcessorRaised, NotComposable, SizeError):
        return False
    return True
