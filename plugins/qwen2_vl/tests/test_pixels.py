"""Pixels whose digests were recorded elsewhere, from both of transformers' backends and before normalization."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin import ModelProcessor

PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>b"


def golden_cases() -> list[str]:
    return [
        "synth_rgb_84x56|default", "synth_rgb_61x45|default", "gray_L_90x70|default", "rgba_gradient_alpha_100x70|default",
        "palette_P_120x90|default", "palette_P_transparency_90x64|default", "bilevel_1_80x70|default", "tall_28x300|default",
    ]  # fmt: skip


def test_every_golden_case_is_tested(golden: Callable[[str], Any]) -> None:
    assert [case["id"] for case in golden("pixels.json")["cases"]] == golden_cases()


@pytest.mark.parametrize("name", golden_cases())
def test_pixels_have_the_digests_of_both_backends(
    golden: Callable[[str], Any],
    name: str,
    pillow: ModelProcessor,
    exact: ModelProcessor,
    processor: ModelProcessor,
) -> None:
    data = golden("pixels.json")
    (case,) = [case for case in data["cases"] if case["id"] == name]
    file = base64.b64decode(data["images"][case["image"]])
    for opened, key in (
        (pillow, "pillow_sha256"),
        (exact, "torchvision_sha256"),
        (processor, "uint8_patches_sha256"),
    ):
        for image in (file, Image.open(io.BytesIO(file))):
            (item,) = opened.process(PROMPT, [image], **case["options"]).mm_items
            assert item.image_grid_thw.tolist() == [case["grid_thw"]]
            assert hashlib.sha256(np.ascontiguousarray(item.feature).tobytes()).hexdigest() == case[key]
