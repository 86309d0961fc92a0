"""Options and arguments of the processor's parts: which there are, and what a request may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin import LimitError, Registry, RequestError, UsageError
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.runner import ProcessorRunner
from mm_plugin_transformers_auto.testing import FAMILIES

Get = Callable[[str], Any]


@pytest.mark.case("9.5")
def test_an_unknown_option_or_argument_is_refused_with_the_list_of_known_ones(opened: Get, make_image: Any) -> None:
    processor = opened("llava")
    with pytest.raises(UsageError, match=r"option 'do_resize' .* is unknown; options here: background, images_kwargs"):
        processor.process("<image>", [make_image()], do_resize=False)
    with pytest.raises(
        RequestError, match=r"of CLIPImageProcessor.*, got 'do_reisze'; supported: crop_size, .*do_resize"
    ):
        processor.process("<image>", [make_image()], images_kwargs={"do_reisze": False})
    with pytest.raises(RequestError, match="got 'return_tensors'"):
        processor.process("<image>", [make_image()], images_kwargs={"return_tensors": "np"})
    with pytest.raises(RequestError, match="plain values"):
        processor.process("<image>", [make_image()], images_kwargs={"size": object()})
    with pytest.raises(RequestError, match="got 'do_reisze'"):
        opened("paligemma").process("<image>", [make_image()], images_kwargs={"do_reisze": False})


def test_an_argument_reaches_the_processor(opened: Get, reference: Get, make_image: Any) -> None:
    output = opened("llava").process("<image>", [make_image()], images_kwargs={"do_normalize": False})
    whole = reference("llava")(text=["<image>"], images=[make_image()], return_tensors="pt", do_normalize=False)
    assert np.array_equal(output.mm_items[0].feature, whole["pixel_values"])
    output = opened("paligemma").process("<image>", [make_image()], images_kwargs={"do_normalize": False})
    whole = reference("paligemma")(text=["<image>"], images=[make_image()], return_tensors="pt", do_normalize=False)
    assert np.array_equal(output.mm_items[0].feature, whole["pixel_values"])


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_an_argument_of_a_wrong_kind_is_the_requests_fault(family: str, opened: Get, make_image: Any) -> None:
    with pytest.raises(RequestError, match=r"options: .* raised") as caught:
        opened(family).process(FAMILIES[family].prompt(1), [make_image()], images_kwargs={"size": {"height": "tall"}})
    assert caught.value.path == "options"


def test_arguments_under_which_media_are_not_independent_are_refused(opened: Get, make_image: Any) -> None:
    """Pan and scan writes a sentence around an image that is wide enough, so the text around images depends on them."""
    with pytest.raises(
        RequestError, match=r"can be prepared one by one, got others \(the text around images depends on"
    ):
        opened("gemma3").process("<start_of_image>", [make_image()], images_kwargs={"do_pan_and_scan": True})


def test_a_size_that_only_one_image_makes_depend_on_others_is_the_requests_fault(opened: Get) -> None:
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_ratio_to_activate": 5.0,
        "pan_and_scan_min_crop_size": 16,
    }
    with pytest.raises(RequestError, match="options: "):
        opened("gemma3").process("<start_of_image>", [Image.new("RGB", (600, 100))], images_kwargs=options)


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_request_has_no_image_made_larger_than_it_may_send(
    family: str, registry: Registry, checkpoint: Get, opened: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = opened(family)
    prompt = "<image>"
    monkeypatch.setattr(ProcessorRunner, "run", lambda *a, **k: pytest.fail("the processor ran"))
    monkeypatch.setattr(ProbedModel, "layout", lambda *a, **k: pytest.fail("the processor ran"))
    with pytest.raises(LimitError, match="more than 89478485 pixels") as caught:
        processor.process(prompt, [Image.new("RGB", (40, 30))], images_kwargs={"size": {"height": 60000, "width": 8}})
    assert caught.value.setting == "max_image_pixels"


@pytest.mark.parametrize(
    ("family", "unknown", "known"),
    [
        ("llava", {"audio_kwargs": {}}, r"background, images_kwargs"),
        ("qwen2_audio", {"images_kwargs": {}}, "audio_kwargs"),
        ("qwen2_audio", {"background": (0, 0, 0)}, "audio_kwargs"),
    ],
)
def test_an_option_of_a_modality_that_the_model_does_not_take_is_unknown(
    family: str, unknown: dict[str, Any], known: str, opened: Get, checkpoint: Get, registry: Registry
) -> None:
    (name,) = unknown
    with pytest.raises(UsageError, match=rf"option '{name}' of .* is unknown; options here: {known}$"):
        opened(family).process("nothing", **unknown)
    with pytest.raises(UsageError, match=rf"option '{name}' of .* is unknown"):
        registry.load_processor(checkpoint(family), **unknown)


def test_the_aspect_ratio_is_not_an_option_of_audio(checkpoint: Get, opened: Get, registry: Registry) -> None:
    assert opened("qwen2_audio")
    with pytest.raises(UsageError, match=r"option 'max_aspect_ratio' of .* is unknown; options here: audio_kwargs$"):
        registry.load_processor(checkpoint("qwen2_audio"), max_aspect_ratio=3.0)
