"""Whose fault an error of a checkpoint's processor is: the media input's, the request's arguments', or the plugin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mm_plugin import MediaError, ProcessorError, RequestError, UsageError
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.single_item import NotComposable, SingleItemRunner
from mm_plugin_transformers_auto.testing import FAMILIES

Get = Callable[[str], Any]


class Breaks:
    """Makes a checkpoint's image processor raise where a test says so."""

    def __init__(self, model: ProbedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.when: Callable[[Any, dict[str, Any]], bool] = lambda image, kwargs: True
        cls = type(model.opened.processor.image_processor)
        original = cls.__call__

        def call(own: Any, images: Any, *arguments: Any, **kwargs: Any) -> Any:
            flat = [image for part in images for image in (part if isinstance(part, list) else [part])]
            if any(self.when(image, kwargs) for image in flat):
                raise IndexError("tuple index out of range")
            return original(own, images, *arguments, **kwargs)

        monkeypatch.setattr(cls, "__call__", call)


@pytest.fixture
def breaks(fresh: Any, probed: Get, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Breaks]]:
    def make(family: str) -> tuple[Any, Breaks]:
        processor = fresh(family)
        return processor, Breaks(probed(processor), monkeypatch)

    return make


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_processor_that_always_raises_is_the_plugins_fault_and_named(
    family: str, breaks: Any, make_image: Any
) -> None:
    processor, _ = breaks(family)
    cls = FAMILIES[family].processor["processor_class"]
    with pytest.raises(ProcessorError, match=rf"{cls} \(transformers [\d.]+\) raised IndexError") as caught:
        processor.process(FAMILIES[family].prompt(1), [make_image()], salt="broken")
    assert caught.value.plugin == "transformers_auto"
    assert caught.value.distribution == "mm-plugin-transformers-auto"


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_an_error_on_one_size_is_the_media_inputs_fault(family: str, breaks: Any, make_image: Any) -> None:
    processor, broken = breaks(family)
    broken.when = lambda image, kwargs: image.size == (77, 66)
    with pytest.raises(RequestError, match=rf"{FAMILIES[family].processor['processor_class']} .*IndexError"):
        processor.process(FAMILIES[family].prompt(2), [make_image(), make_image(0, 66, 77)])
    processor.process(FAMILIES[family].prompt(1), [make_image()])


def test_an_error_on_some_content_is_the_media_inputs_fault(breaks: Any, make_image: Any) -> None:
    processor, broken = breaks("llava")
    broken.when = lambda image, kwargs: image.getpixel((0, 0)) == (1, 2, 3)
    image = make_image()
    image.putpixel((0, 0), (1, 2, 3))
    with pytest.raises(MediaError, match=r"images\[1\]: LlavaProcessor"):
        processor.process("<image> <image>", [make_image(), image])


def test_tokens_that_depend_on_the_content_are_noticed(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, make_image: Any
) -> None:
    processor = fresh("llava")
    run = SingleItemRunner.run

    def other(self: SingleItemRunner, traits: Any, media_input: Any, kwargs: Any) -> Any:
        found = run(self, traits, media_input, kwargs)
        if media_input.getpixel((0, 0)) != (127, 127, 127):
            found = type(found)(np.append(found.ids, found.ids[-1:]), found.tensors, found.placeholder_affixes)
        return found

    monkeypatch.setattr(SingleItemRunner, "run", other)
    with pytest.raises(ProcessorError, match="returned another prompt_ids than for a blank media input of this size"):
        processor.process("<image>", [make_image()], salt="other")


def test_not_composable_is_not_an_error_of_the_package() -> None:
    assert not issubclass(NotComposable, RequestError | UsageError)
