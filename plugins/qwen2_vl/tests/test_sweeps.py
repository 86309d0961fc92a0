"""The sweeps that every plugin's tests run: options and source keys, chat messages and special tokens."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mm_plugin import Modality, Registry, discover
from mm_plugin.testing import photographs, sweep_options, sweep_provenance
from mm_plugin_qwen2vl.testing import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sweeps"))


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with discover() as opened:
        yield opened


def see_through() -> bytes:
    """A PNG that is half transparent, 300 x 200 pixels (width x height)."""
    image = Image.open(io.BytesIO(photographs()[0][1])).convert("RGBA").crop((0, 0, 300, 200))
    image.putalpha(128)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.case("3.7")
def test_every_option_that_changes_an_image_changes_its_source_key(registry: Registry, folder: Path) -> None:
    trials = sweep_options(
        lambda **options: registry.load_processor(folder, **options),
        {Modality.IMAGE: see_through()},
        values={
            "max_pixels": [28 * 28 * 16, 28 * 28 * 40],
            "min_pixels": [400 * 400],
            "fps": [1.0],
            "num_frames": [6],
            "video_total_pixels": [200_000],
        },
    )
    changed = {trial.option for trial in trials if trial.changed}
    assert changed == {"background", "min_pixels", "max_pixels", "resize", "feature_format"}


@pytest.mark.case("2.1")
def test_no_text_in_a_message_becomes_a_token_of_the_model(registry: Registry, folder: Path) -> None:
    assert sweep_provenance(registry.load_processor(folder), medium=photographs()[1][1], rounds=300) == 0
