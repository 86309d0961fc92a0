"""Start and end tokens of media inputs, as the chat template shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mm_plugin import AudioSamples

Get = Callable[[str], Any]


@pytest.mark.parametrize(
    ("family", "pairs"),
    [("llava", ()), ("gemma3", ()), ("qwen2_audio", (("<|audio_bos|>", "<|audio_eos|>"),))],
)
def test_pairs_are_those_that_the_template_writes_around_media_alone(family: str, pairs: Any, opened: Get) -> None:
    assert opened(family).spec.token_pairs == pairs


def test_a_dropped_audio_takes_its_start_and_end_tokens_along(opened: Get) -> None:
    processor = opened("qwen2_audio")
    audio = AudioSamples(np.ones(16_000, dtype=np.float32), 16_000)
    part = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    found = processor.process(
        f"a {part}b {part}c", audios=[audio, audio], max_prompt_tokens=40, on_overflow="drop_oldest"
    )
    assert found.dropped == ("audios[0]",)
    assert found.input_ids.tolist() == processor.process(f"a b {part}c", audios=[audio]).input_ids.tolist()
