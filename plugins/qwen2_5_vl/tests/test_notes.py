"""Videos whose temporal patches share a position along time are served as the released code does, and a note says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mm_plugin import Modality, SampledVideo, Sampling, VideoFrames, VideoSize
from mm_plugin.testing.plugin_tests import moving_frames
from mm_plugin_qwen25vl.testing import TINY

PROMPT = "<|vision_start|><|video_pad|><|vision_end|>"


# Released checkpoints count 2 positions a second; a temporal patch of 2 frames takes 2 / fps seconds, so that from more than 4
# frames per second on two of them share one.
@pytest.mark.parametrize(
    ("fps", "frames", "apart"),
    [
        (1.0, 8, None),
        (2.0, 8, None),
        (4.0, 8, None),  # 0, 1, 2, 3
        (4.01, 8, 3),  # 0, 0.998, 1.995, 2.993 -> 0, 0, 1, 2
        (6.0, 8, 3),  # 0, 0.67, 1.33, 2 -> 0, 0, 1, 2
        (8.0, 8, 2),  # 0, 0.5, 1, 1.5 -> 0, 0, 1, 1
        (30.0, 8, 1),  # all within the first half second
        (30.0, 2, None),  # one patch shares with none
        (3.0, 5, None),  # an odd frame fills a patch by itself
        (100.0, 5, 1),
    ],
)
def test_shared_positions_are_noted_and_are_those_of_the_output(
    processor: Any, fps: float, frames: int, apart: int | None
) -> None:
    for _ in ("prepared", "from the cache"):
        output = processor.process(PROMPT, videos=[VideoFrames(moving_frames(frames, 56, 56), fps=fps)])
        (item,) = output.mm_items
        start, end = item.offsets[0]
        steps = -(-frames // 2)
        positions = len(set(output.mrope_positions[0, start : end + 1].tolist()))
        assert positions == (steps if apart is None else apart)
        notes = [note for note in item.notes if "positions along time" in note]
        assert len(notes) == (apart is not None)
        for note in notes:
            assert f"{steps} temporal patches" in note
            assert f"only {apart} positions" in note


def test_the_note_agrees_with_the_positions_for_any_rate(processor: Any) -> None:
    rate = float(processor.config["vision_config"]["tokens_per_second"])
    for fps in np.geomspace(0.25, 240, 60).tolist():
        for frames in (1, 2, 3, 7, 40):
            whole = VideoSize(56, 56, frames, fps)
            video = SampledVideo.of(whole, Sampling.of(whole, np.arange(frames)))
            fields = processor.model.layout(Modality.VIDEO, video, processor.options, None)
            seconds = np.float32(2 / fps)
            found = [int(np.float32(np.float32(step) * seconds) * np.float32(rate)) for step in range(-(-frames // 2))]
            assert any("along time" in note for note in fields.notes) == (len(set(found)) < len(found))


def test_a_thin_image_and_too_many_frames_are_noted_by_an_open_model(processor: Any) -> None:
    video = VideoFrames(moving_frames(6, 56, 56), fps=2.0, sampled=False)
    # 28 pixels are the least of a side: sqrt(1400 * 21 / 3136) = 3.06 and 1400 / 3.06 / 28 = 16.3, so 448 x 28 pixels.
    thin = np.zeros((1400, 21, 3), np.uint8)
    prompt = PROMPT.replace("video", "image") + PROMPT
    output = processor.process(prompt, [thin], [video], min_pixels=784, max_pixels=3136, num_frames=32)
    image, moving = output.mm_items
    (note,) = image.notes
    assert note.startswith("max_pixels=3136 was asked, 12544 pixels are used: 448 x 28 pixels")
    assert [note for note in moving.notes if note.startswith("num_frames=32 was asked, 6 frames are used")]


def test_the_tiny_checkpoint_counts_as_released_ones_do() -> None:
    assert TINY.config(TINY.tokenizer()).vision_config.tokens_per_second == 2
