"""The sweeps that every plugin's tests run: options and source keys, chat messages and special tokens."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from mm_plugin import Modality, ModelProcessor, Registry
from mm_plugin.demo import sample_images
from mm_plugin.testing import corpus, sweep_options, sweep_provenance

IMAGE_OPTIONS = {"background", "min_pixels", "max_pixels", "resize", "feature_format"}
VIDEO_OPTIONS = {
    "fps", "num_frames", "min_frames", "max_frames", "frame_rule", "video_min_pixels", "video_max_pixels",
    "video_total_pixels", "feature_format",
}  # fmt: skip


def see_through() -> bytes:
    """A PNG that is half transparent, 300 x 200 pixels (width x height)."""
    image = Image.open(io.BytesIO(sample_images()[0][1])).convert("RGBA").crop((0, 0, 300, 200))
    image.putalpha(128)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.case("3.7")
@pytest.mark.case("9.5")
def test_every_option_that_changes_a_media_changes_its_source_key(
    registry: Registry, checkpoint: Path, video: Callable[..., bytes]
) -> None:
    trials = sweep_options(
        lambda **options: registry.load_processor(checkpoint, **options),
        {Modality.IMAGE: see_through(), Modality.VIDEO: video(72, 24)},
        values={
            "max_pixels": [28 * 28 * 16, 28 * 28 * 40],
            "min_pixels": [400 * 400],
            "fps": [1.0, 4.0],
            "num_frames": [4, 10],
            "min_frames": [8],
            "max_frames": [4],
            "video_min_pixels": [28 * 28 * 200],
            "video_max_pixels": [28 * 28 * 130],
            "video_total_pixels": [28 * 28 * 6, 28 * 28 * 400],
        },
    )
    changed = {(trial.modality, trial.option) for trial in trials if trial.changed}
    assert {option for modality, option in changed if modality is Modality.IMAGE} == IMAGE_OPTIONS
    # This video is small enough for both rules of size; `test_videos` tells them apart.
    assert {option for modality, option in changed if modality is Modality.VIDEO} >= VIDEO_OPTIONS - {
        "video_max_pixels", "video_total_pixels"
    }  # fmt: skip


@pytest.mark.case("2.1")
def test_no_text_in_a_message_becomes_a_token_of_the_model(compact: ModelProcessor) -> None:
    assert sweep_provenance(compact, media=sample_images()[1][1], rounds=150) == 0


@pytest.mark.case("1.7")
@pytest.mark.case("1.10")
def test_every_odd_image_is_taken_or_refused_as_it_must(compact: ModelProcessor) -> None:
    thin = ("png/1 x 300", "png/300 x 1")  # a side over 200 times the other
    taken = corpus.sweep(compact, corpus.images(), may_refuse=thin)
    assert len(taken) > 100
    assert not set(thin) & set(taken)


@pytest.mark.case("9.1")
def test_every_odd_video_is_taken_or_refused_as_it_must(compact: ModelProcessor) -> None:
    pytest.importorskip("av")
    assert len(corpus.sweep(compact, corpus.videos())) > 30
