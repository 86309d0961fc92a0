"""The example of a request's life: whatever befalls requests, every row is what one step over the whole prompt gives."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import mm_plugin_qwen2vl.testing
from mm_plugin import ForwardBatch, MultimodalInputs, Registry, RequestMedia, discover, embed_mm_inputs
from mm_plugin.demo import sample_images
from mm_plugin.scheduler import LiveMedia, merge

ROOT = Path(__file__).parents[1]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
NOTHING = LiveMedia(requests=0, features=0, feature_bytes=0, held=0, held_bytes=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path_factory.mktemp("life") / "checkpoint")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with discover() as opened:
        yield opened


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("request_life")


class World:
    """A worker over a checkpoint, and what every prompt's rows must be."""

    def __init__(self, example: ModuleType, registry: Registry, checkpoint: Path) -> None:
        self.processor = registry.load_processor(checkpoint)
        self.encoder = registry.load_encoder(checkpoint, dtype=torch.float32)
        self.embedding = example.text_embedding(str(checkpoint))
        self.worker = example.Worker(registry, self.encoder, self.embedding, 100_000, 2_000)

    def inputs(self, prompt: str, images: Sequence[Any]) -> MultimodalInputs:
        return MultimodalInputs.from_processor_output(self.processor.process(prompt, images))

    def expected(self, inputs: MultimodalInputs) -> torch.Tensor:
        ids = torch.from_numpy(inputs.input_ids)
        batch = ForwardBatch([RequestMedia(inputs)], [0], [len(ids)])
        rows: torch.Tensor = embed_mm_inputs(ids, batch, self.embedding, self.encoder).input_embeds.detach()
        return rows


@pytest.fixture
def world(example: ModuleType, registry: Registry, checkpoint: Path) -> World:
    return World(example, registry, checkpoint)


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (84, 140, 3), dtype=np.uint8)


def near(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for how many images the encoder had in one call."""
    return rows.shape == expected.shape and torch.allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_share_prefixes_are_computed_right_in_any_order(world: World, seed: int) -> None:
    chance = np.random.default_rng(seed)
    worker, waiting = world.worker, []
    for _ in range(8):
        count = int(chance.integers(0, 4))
        images = [pixels(int(chance.integers(0, 3))) for _ in range(count)]
        waiting.append(world.inputs("see " + " and ".join([IMAGE] * count) + " what", images))
    running: list[Any] = []
    while waiting or any(one.computed < one.length for one in running):
        if waiting and chance.random() < 0.5:
            running.append(worker.admit(waiting.pop()))
        under_way = [one for one in running if one.computed < one.length]
        if under_way:
            assert worker.step(under_way) == []
        if running and chance.random() < 0.2:
            worker.retract(running[int(chance.integers(len(running)))])
    for request in running:
        assert near(request.rows, world.expected(request.media.inputs))
        request.media.finish()
    assert worker.lifecycle.live() == NOTHING


def test_a_repeated_prompt_computes_its_last_token_alone(world: World) -> None:
    inputs = world.inputs(IMAGE + " what", [pixels(1)])
    one = world.worker.admit(inputs)
    assert world.worker.run([one]) == []
    two = world.worker.admit(world.inputs(IMAGE + " what", [pixels(1)]))
    assert two.computed == two.length - 1
    assert world.worker.run([two]) == []
    assert near(two.rows, world.expected(two.media.inputs))


def test_nothing_of_a_request_that_failed_is_found_again(world: World) -> None:
    good, bad = (world.inputs(IMAGE + " what", [pixels(seed)]) for seed in (1, 2))
    bad.mm_items[0].feature = np.zeros((1, 2, 3), np.uint8)  # as a broken transport would leave it
    running = [world.worker.admit(good), world.worker.admit(bad)]
    failed = world.worker.run(running)
    assert failed == [running[1]]
    assert running[1].media.ended
    assert near(running[0].rows, world.expected(good))
    again = world.worker.admit(world.inputs(IMAGE + " what", [pixels(2)]))
    assert again.computed <= 1 + IMAGE.count("<|vision_start|>")  # the text before the image at most
    assert world.worker.run([again]) == []
    assert near(again.rows, world.expected(again.media.inputs))


def test_a_session_goes_on_and_is_what_the_session_in_one_would_be(world: World) -> None:
    first = world.inputs(IMAGE + " what", [pixels(1)])
    request = world.worker.admit(first)
    world.worker.run([request])
    turn = world.inputs(IMAGE + " and", [pixels(2)])
    whole = merge(world.inputs(IMAGE + " what", [pixels(1)]), turn, generated=[3, 4])
    world.worker.next_turn(request, turn, [3, 4])
    assert request.length == len(whole.input_ids)
    world.worker.run([request])
    assert near(request.rows, world.expected(whole))
    world.worker.retract(request)
    assert request.computed == request.length - 1
    request.media.abort()
    assert world.worker.lifecycle.live() == NOTHING


def test_the_program_runs(example: ModuleType, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(str(checkpoint), sample_images()[0][1])
    printed = capsys.readouterr().out
    assert "failed: []" in printed
    assert f"kept alive: {NOTHING}" in printed
