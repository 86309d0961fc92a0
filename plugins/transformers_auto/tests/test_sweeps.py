"""The sweeps that every plugin's tests run: options and source keys, chat messages and special tokens."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from mm_plugin import Modality
from mm_plugin.demo import sample_images
from mm_plugin.testing import sweep_options, sweep_provenance

Get = Callable[[str], Any]


def see_through() -> bytes:
    """A PNG that is half transparent, 300 x 200 pixels (width x height)."""
    image = Image.open(io.BytesIO(sample_images()[0][1])).convert("RGBA").crop((0, 0, 300, 200))
    image.putalpha(128)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.case("3.7")
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_every_option_that_changes_an_image_changes_its_source_key(family: str, registry: Any, checkpoint: Get) -> None:
    trials = sweep_options(
        lambda **options: registry.load_processor(checkpoint(family), **options),
        {Modality.IMAGE: see_through()},
        values={"images_kwargs": [{"do_normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}, {"do_rescale": False}]},
    )
    changed = [trial for trial in trials if trial.changed]
    assert {trial.option for trial in changed} == {"background", "images_kwargs"}
    assert len(changed) == 4


@pytest.mark.case("2.1")
@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_no_text_in_a_message_becomes_a_token_of_the_model(family: str, opened: Get) -> None:
    assert sweep_provenance(opened(family), media=sample_images()[1][1], rounds=100) == 0
