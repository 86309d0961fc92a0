"""Images and videos in one prompt: rows and logits are transformers' own, whatever the order, at the positions of the paper."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import Modality, ModelProcessor, MultimodalProcessorOutput, VideoFrames
from mm_plugin.cache import EmbeddingCache
from mm_plugin.encoder import Encoder
from mm_plugin.testing import CallCounter, embed_in_chunks

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
PROMPTS = [
    "the thing is in the other one",
    f"{IMAGE}what is this?",
    f"{VIDEO}what happens?",
    f"see {IMAGE}{VIDEO} now",
    f"see {VIDEO}{IMAGE}",
    f"{VIDEO} then\n{VIDEO}{IMAGE} and {VIDEO}.",
    f"a {IMAGE} then {VIDEO}\n\n{IMAGE}. {VIDEO} the end",
]
SIZES = [(56, 56), (70, 100), (29, 120)]
VIDEOS = [(4, 56, 84, 2.0), (5, 84, 56, 0.5), (1, 56, 56, 1.0)]


def media(
    prompt: str, make_image: Callable[..., Image.Image], moving: Callable[..., np.ndarray]
) -> dict[str, list[Any]]:
    images, videos = itertools.cycle(enumerate(SIZES)), itertools.cycle(VIDEOS)
    given: dict[str, list[Any]] = {"images": [], "videos": []}
    for _ in range(prompt.count("image_pad")):
        index, size = next(images)
        given["images"].append(make_image(index, *size))
    for _ in range(prompt.count("video_pad")):
        *shape, fps = next(videos)
        given["videos"].append(VideoFrames(moving(*shape), fps=fps))
    return given


def reference(
    model: Any, output: MultimodalProcessorOutput, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and embeddings of transformers' model on its own reading of the same ids and float pixels, at these positions."""
    ids = torch.from_numpy(output.input_ids)[None]
    vision: dict[str, Any] = {}
    for modality, pixels, grid in (
        (Modality.IMAGE, "pixel_values", "image_grid_thw"),
        (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in output.mm_items if item.modality is modality]
        if items:
            vision[pixels] = torch.from_numpy(np.concatenate([item.feature for item in items]))
            vision[grid] = torch.from_numpy(np.concatenate([item.get(grid) for item in items]))
    token_types = torch.from_numpy(output.token_modalities.astype(np.int32))[None]
    caught: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _arguments, named: caught.append(named["inputs_embeds"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=token_types, position_ids=positions, **vision).logits[0]
    finally:
        hook.remove()
    return logits, caught[0][0]


def logits_of(model: Any, output: MultimodalProcessorOutput, embeds: torch.Tensor) -> torch.Tensor:
    assert output.mrope_positions is not None
    positions = torch.from_numpy(output.mrope_positions)[:, None]
    with torch.no_grad():
        logits: torch.Tensor = model(inputs_embeds=embeds[None], position_ids=positions).logits[0]
    return logits


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_logits_equal_transformers(
    prompt: str,
    torch_float: ModelProcessor,
    compact: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
) -> None:
    given = media(prompt, make_image, moving)
    small = {"video_min_pixels": 784} if given["videos"] else {}
    floats, output = (opened.process(prompt, **given, **small) for opened in (torch_float, compact))
    assert np.array_equal(floats.mrope_positions, output.mrope_positions)
    counter = CallCounter(encoder)
    embeds = embed_in_chunks(output, model.get_input_embeddings(), counter.as_mapping(), size=10_000)
    assert sorted(counter.calls) == sorted(len(part) for part in given.values() if part)  # one call a modality
    # Where a video is in it, the model gets our positions: this release numbers text after a video otherwise.
    positions = torch.from_numpy(output.mrope_positions)[:, None] if given["videos"] else None
    expected, rows = reference(model, floats, positions)
    assert torch.allclose(embeds, rows, rtol=0, atol=1e-5)
    found = logits_of(model, output, embeds)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    # The comparison can fail: other rows or other positions are far away.
    assert float(expected.std()) > 0.05
    if output.mm_items:
        without = embeds.clone()
        without[torch.from_numpy(output.token_modalities > 0)] = 0
        assert not torch.allclose(logits_of(model, output, without), expected, rtol=0, atol=1e-2)


def test_messages_interleave_images_and_videos(
    compact: ModelProcessor,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
    video: Callable[..., bytes],
) -> None:
    image, frames = make_image(0, 56, 84), VideoFrames(moving(4), fps=2)
    data = video(24, 24)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    parts = [
        {"type": "video", "video": frames},
        {"type": "text", "text": "and\n\n"},
        {"type": "image", "image": image},
        {"type": "video_url", "video_url": {"url": url}},
    ]
    found = compact.process([{"role": "user", "content": parts}])
    text = compact.checkpoint.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, parts[1], {"type": "image"}, {"type": "video"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = compact.process(text, [image], [frames, data])
    assert [item.modality.name for item in found.mm_items] == ["VIDEO", "IMAGE", "VIDEO"]
    assert [item.identity for item in found.mm_items] == [item.identity for item in expected.mm_items]
    for name in ("input_ids", "padded_input_ids", "mrope_positions", "token_modalities"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    again = compact.process(expected.input_ids, [image], [frames, data], expanded=True)
    assert [item.offsets for item in again.mm_items] == [item.offsets for item in expected.mm_items]


def test_every_chunk_size_gives_the_same_bits_from_one_call_a_modality(
    compact: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
) -> None:
    prompt = PROMPTS[5]
    output = compact.process(prompt, **media(prompt, make_image, moving), video_min_pixels=784)
    table, cache, counter = model.get_input_embeddings(), EmbeddingCache(1 << 24), CallCounter(encoder)
    whole = embed_in_chunks(output, table, counter.as_mapping(), size=10_000, cache=cache)
    for size in range(1, len(output.input_ids) + 1):
        assert torch.equal(embed_in_chunks(output, table, counter.as_mapping(), size=size, cache=cache), whole), size
    assert sorted(counter.calls) == [1, 3]
