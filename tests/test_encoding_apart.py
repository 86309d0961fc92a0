"""Every shipped encoder encodes apart from steps, without a prompt, and from tensors that an engine has read: always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mm_plugin_deepseekvl2.testing
import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
import mm_plugin_transformers_auto.testing
from mm_plugin import (
    Encoded,
    ForwardBatch,
    MultimodalInputs,
    Registry,
    RequestMedia,
    VideoFrames,
    discover,
    embed_mm_inputs,
    encode_items,
)
from mm_plugin.cache import EmbeddingCache
from mm_plugin.encoder import EncoderModule
from mm_plugin.errors import EncoderError, UsageError

LLAVA = mm_plugin_transformers_auto.testing.FAMILIES["llava"]
QWEN = "<|vision_start|><|image_pad|><|vision_end|> a <|vision_start|><|image_pad|><|vision_end|>"
MAKERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "qwen2_vl": (mm_plugin_qwen2vl.testing.make_checkpoint, QWEN),
    "qwen2_5_vl": (mm_plugin_qwen25vl.testing.make_checkpoint, QWEN),
    "deepseek_vl2": (mm_plugin_deepseekvl2.testing.make_checkpoint, "<image> a <image>"),
    "llava": (
        lambda folder: mm_plugin_transformers_auto.testing.make_checkpoint(folder, family="llava"),
        LLAVA.prompt(2),
    ),
}


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with discover() as opened:
        yield opened


@pytest.fixture(scope="module", params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    make, prompt = MAKERS[request.param]
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    make(folder)
    return folder, prompt


def images() -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8) for seed in (1, 2)]


def rows_of(found: Any) -> torch.Tensor:
    assert isinstance(found, Encoded), found
    rows: torch.Tensor = found.embeddings
    return rows


def encoded(registry: Registry, encoder: Any, folder: Path, prompt: str) -> list[torch.Tensor]:
    items = registry.load_processor(folder).process(prompt, images()).mm_items
    return [rows_of(one) for one in encode_items(items, encoder, dtype=torch.float32)]


def test_a_step_and_encode_items_give_the_same_rows(registry: Registry, model: tuple[Path, str]) -> None:
    folder, prompt = model
    encoder = registry.load_encoder(folder, dtype=torch.float32)
    output = registry.load_processor(folder).process(prompt, images())
    inputs, length = MultimodalInputs.from_processor_output(output), len(output.input_ids)
    apart = torch.cat([rows_of(one) for one in encode_items(inputs.mm_items, encoder)])
    table = torch.nn.Embedding(int(output.input_ids.max()) + 1, apart.shape[1])
    batch = ForwardBatch([RequestMedia(inputs)], [0], [length])
    for cache in (None, EmbeddingCache(1 << 28)):
        step = embed_mm_inputs(torch.from_numpy(output.input_ids), batch, table, encoder, cache)
        assert step.failed == ()
        there = [range(first, last + 1) for first, last, _ in inputs.spans]
        assert torch.equal(step.input_embeds[[place for span in there for place in span]], apart)


def test_a_media_input_is_encoded_without_a_prompt(registry: Registry, model: tuple[Path, str]) -> None:
    """Equal to what a request gives, and found in the same cache."""
    folder, prompt = model
    encoder = registry.load_encoder(folder, dtype=torch.float32)
    processor = registry.load_processor(folder)
    cache = EmbeddingCache(1 << 28)
    one, two = (processor.prepare_item("image", image) for image in images())
    for found in (one, two):
        assert found.item.num_tokens == found.replacement.num_embeddings
        assert found.item.offsets == found.replacement.runs()
        assert (found.identity, found.fields.keys()) == (found.item.identity, found.item.model_specific_data.keys())
    alone = encode_items([one.item, two.item], encoder, cache)
    hits = cache.stats().hits
    in_request = encode_items(processor.process(prompt, images()).mm_items, encoder, cache)
    assert cache.stats().hits == hits + 2
    for mine, other in zip(alone, in_request, strict=True):
        assert torch.equal(rows_of(mine), rows_of(other))


def test_a_video_is_encoded_without_a_prompt(registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    mm_plugin_qwen2vl.testing.make_checkpoint(folder)
    frames = np.random.default_rng(3).integers(0, 256, (4, 56, 84, 3), dtype=np.uint8)
    processor, encoder = registry.load_processor(folder), registry.load_encoder(folder, dtype=torch.float32)
    video = VideoFrames(frames, fps=2.0)
    (alone,) = encode_items([processor.prepare_item("video", video).item], encoder)
    prompt = "<|vision_start|><|video_pad|><|vision_end|>"
    (within,) = encode_items(processor.process(prompt, videos=[video]).mm_items, encoder)
    assert torch.equal(rows_of(alone), rows_of(within))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("form", ["mapping", "pairs"])
def test_an_encoder_from_given_tensors_is_that_of_the_files(
    registry: Registry, model: tuple[Path, str], form: str
) -> None:
    folder, prompt = model
    from_files = registry.load_encoder(folder, dtype=torch.float32)
    given = weights(folder)
    passed: Any = given if form == "mapping" else iter(given.items())
    from_given = registry.load_encoder(folder, dtype=torch.float32, tensors=passed)
    assert from_given.version == from_files.version  # so both share what is cached
    for one, other in zip(*(encoded(registry, each, folder, prompt) for each in (from_files, from_given)), strict=True):
        assert torch.equal(one, other)


def test_given_tensors_are_used_in_place_of_the_files_and_name_another_version(
    registry: Registry, model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = model
    given = {name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in weights(folder).items()}
    plain = registry.load_encoder(folder, dtype=torch.float32)
    other = registry.load_encoder(folder, dtype=torch.float32, tensors=given)
    assert other.version != plain.version
    one, two = (encoded(registry, each, folder, prompt) for each in (plain, other))
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


def test_a_given_tensor_of_the_right_dtype_is_shared(registry: Registry, model: tuple[Path, str]) -> None:
    given = weights(model[0])
    encoder = registry.load_encoder(model[0], dtype=torch.float32, tensors=given)
    places = {tensor.data_ptr() for tensor in given.values()}
    own = dict(EncoderModule(encoder).named_parameters())
    assert own
    shared = [name for name, parameter in own.items() if parameter.data_ptr() in places]
    assert len(shared) >= len(own) // 2, set(own) - set(shared)


@pytest.mark.parametrize("wrong", ["missing", "shape", "twice", "no tensor", "no values", "no pairs", "number"])
def test_tensors_that_cannot_be_used_are_refused(registry: Registry, model: tuple[Path, str], wrong: str) -> None:
    folder, _ = model
    encoder = registry.load_encoder(folder, dtype=torch.float32)
    given = weights(folder)
    parameters = dict(EncoderModule(encoder).named_parameters())
    values = {parameter.cpu().numpy().tobytes() for parameter in parameters.values()}
    used = next(name for name, tensor in given.items() if tensor.float().numpy().tobytes() in values)
    passed: Any = {
        "missing": {name: tensor for name, tensor in given.items() if name != used},
        "shape": given | {used: torch.zeros(1, 2, 3)},
        "twice": [*given.items(), (used, given[used])],
        "no tensor": given | {used: given[used].float().numpy()},
        "no values": given | {used: given[used].to("meta")},
        "no pairs": list(given),
        "number": 5,
    }[wrong]
    with pytest.raises((UsageError, EncoderError)) as caught:
        registry.load_encoder(folder, dtype=torch.float32, tensors=passed)
    if wrong not in ("no pairs", "number"):
        assert used.rpartition(".")[2] in caught.value.message


def test_a_model_that_holds_a_shipped_encoder_sees_its_tower(registry: Registry, model: tuple[Path, str]) -> None:
    encoder = registry.load_encoder(model[0], dtype=torch.float32)
    module = EncoderModule(encoder)
    assert sum(parameter.numel() for parameter in module.parameters()) > 1000
    with pytest.raises(UsageError, match="load it there"):
        torch.nn.ModuleList([module]).half()
