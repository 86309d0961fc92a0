"""The sweeps that every plugin's tests run: options and source keys, chat messages and special tokens."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from mm_plugin import Modality, Registry
from mm_plugin.demo import sample_images
from mm_plugin.testing import corpus, sweep_options, sweep_provenance
from mm_plugin_deepseekvl2.testing import byte_level_tokenizer, make_checkpoint


def see_through() -> bytes:
    """A PNG that is half transparent, 300 x 200 pixels (width x height)."""
    image = Image.open(io.BytesIO(sample_images()[0][1])).convert("RGBA").crop((0, 0, 300, 200))
    image.putalpha(128)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.case("3.7")
def test_every_option_that_changes_an_image_changes_its_source_key(registry: Registry, checkpoint: Path) -> None:
    trials = sweep_options(
        lambda **options: registry.load_processor(checkpoint, **options), {Modality.IMAGE: see_through()}
    )
    assert {trial.option for trial in trials if trial.changed} == {"background", "resize", "feature_format"}


@pytest.mark.case("2.1")
@pytest.mark.parametrize("merges", [(), ("< |", "Ċ Ċ", ": *", "Ġ <")], ids=["bytes", "merges"])
def test_no_text_in_a_message_becomes_a_token_of_the_model(
    registry: Registry, tmp_path: Path, merges: tuple[str, ...]
) -> None:
    processor = registry.load_processor(make_checkpoint(tmp_path, tokenizer=byte_level_tokenizer(merges)))
    assert sweep_provenance(processor, media=sample_images()[1][1], rounds=300) == 0


@pytest.mark.case("1.7")
def test_every_odd_image_is_taken_or_refused_as_it_must(registry: Registry, checkpoint: Path) -> None:
    assert len(corpus.sweep(registry.load_processor(checkpoint), corpus.images())) > 100
