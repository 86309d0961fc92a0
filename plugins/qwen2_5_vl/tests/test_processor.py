"""Images: pixels, grids and counts are those of transformers, bit for bit; a count is what processing yields at every size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin import MediaError, ModelProcessor, RequestError, UsageError
from mm_plugin_qwen25vl.testing import PREPROCESSOR

SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
SIDES = [1, 5, 13, 28, 57, 161, 333, 640, 999, 1414, 2000]


@functools.cache
def reference() -> Any:
    """Transformers' Pillow backend with the settings of the checkpoint."""
    size = {"shortest_edge": PREPROCESSOR["min_pixels"], "longest_edge": PREPROCESSOR["max_pixels"]}
    return Qwen2VLImageProcessorPil(size=size)


def take(processor: ModelProcessor, image: Any, **options: Any) -> Any:
    (item,) = processor.process(SLOT, [image], **options).mm_items
    return item


@settings(max_examples=40)
@given(height=st.integers(1, 260), width=st.integers(1, 260), budget=st.sampled_from([(3136, 12845056), (784, 50176)]))
def test_pixel_values_equal_transformers_at_any_size(
    pillow: ModelProcessor, height: int, width: int, budget: tuple[int, int]
) -> None:
    image = Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))
    least, most = budget
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(MediaError, match="ratio"):
            pillow.process(SLOT, [image])
        return
    size = {"shortest_edge": least, "longest_edge": most}
    expected = reference()(images=image.copy(), return_tensors="np", size=size)
    item = take(pillow, image, min_pixels=least, max_pixels=most)
    assert item.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
    assert np.array_equal(item.feature, expected["pixel_values"])


@pytest.mark.parametrize("size", [(61, 45), (42, 200), (300, 213), (28, 28), (56, 84)], ids=str)
def test_the_torch_rule_is_plain_torch_arithmetic(
    torch_float: ModelProcessor, compact: ModelProcessor, size: tuple[int, int], make_image: Callable[..., Image.Image]
) -> None:
    image = make_image(0, *size)
    item, small = take(torch_float, image), take(compact, image)
    _, rows, columns = item.image_grid_thw[0].tolist()
    planar = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
    if planar.shape[2:] != (rows * 14, columns * 14):
        planar = torch.nn.functional.interpolate(planar, (rows * 14, columns * 14), mode="bicubic", antialias=True)
    mean, std = (torch.tensor(PREPROCESSOR[name])[:, None, None] * 255 for name in ("image_mean", "image_std"))

    def cut(img: torch.Tensor) -> torch.Tensor:
        blocks = img[0].reshape(3, rows // 2, 2, 14, columns // 2, 2, 14)
        return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 196)

    floats = cut((planar.float() - mean) / std)
    assert torch.equal(torch.from_numpy(item.feature), torch.stack([floats, floats], dim=2).flatten(1))
    assert torch.equal(torch.from_numpy(small.feature), cut(planar))


@pytest.mark.case("2.8")
@pytest.mark.case("1.10")
@pytest.mark.parametrize("height", SIDES)
def test_a_count_is_what_processing_yields_at_every_size(compact: ModelProcessor, height: int) -> None:
    small = {"max_pixels": 28 * 28 * 30}
    for width in SIDES:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        if max(height, width) / min(height, width) > 200:
            for call in (lambda w=width: compact.count("image", (height, w)), lambda i=image: take(compact, i)):
                with pytest.raises(MediaError, match="ratio"):
                    call()
            continue
        patches = reference().get_number_of_image_patches(height, width, {"min_pixels": 3136, "max_pixels": 12845056})
        assert compact.count("image", (height, width)) == (patches // 4, patches // 4)
        item = take(compact, image, **small)
        assert compact.count("image", (height, width), **small) == (item.num_tokens, item.num_tokens)
        assert len(item.feature) == 4 * item.num_tokens == int(item.image_grid_thw.prod())


@pytest.mark.parametrize(
    ("options", "error"),
    [({"max_pixel": 5}, UsageError), ({"resize": "pillow"}, UsageError), ({"patch_size": 16}, UsageError),
     ({"max_pixels": 0}, RequestError), ({"min_pixels": 5000, "max_pixels": 4000}, RequestError),
     ({"max_pixels": "1000"}, RequestError)],
    ids=str,
)  # fmt: skip
def test_options_that_a_call_may_not_give(
    compact: ModelProcessor, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        compact.process(SLOT, [np.zeros((56, 56, 3), np.uint8)], **options)
    assert any(name in str(caught.value) for name in options)
