"""The unit of work can leave the process: what a spawned worker prepares, by pickle or over the wire, equals what threads do."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker
from PIL import Image

import mm_plugin
import mm_plugin_deepseekvl2.testing
import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
import mm_plugin_transformers_auto.testing
from mm_plugin import AudioSamples, MediaError, MultimodalProcessorOutput, VideoFrames, wire
from mm_plugin.demo import sample_images
from mm_plugin.identity import feature_digest

FALLBACK = mm_plugin_transformers_auto.testing


class Elsewhere:
    """A `Preparer` in a spawned process."""

    def __init__(self, *, over_wire: bool) -> None:
        self.sent, self.over_wire = 0, over_wire
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context)

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        self.sent += len(tasks)
        if self.over_wire:
            data = b"".join(wire.pack(list(tasks)))
            arrived: list[Any] = wire.unpack(self._pool.submit(worker.prepare_packed, data).result(timeout=120))
            return arrived
        found: list[Any] = self._pool.submit(worker.prepare, list(tasks)).result(timeout=120)
        return found

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module", params=[False, True], ids=["pickled", "wire"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Elsewhere]:
    preparer = Elsewhere(over_wire=request.param)
    yield preparer
    preparer.close()


def png(seed: int, height: int = 60, width: int = 90) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def video(seed: int) -> VideoFrames:
    frames = np.random.default_rng(seed).integers(0, 256, (4, 56, 84, 3), dtype=np.uint8)
    return VideoFrames(frames, fps=2.0)


def images() -> list[Any]:
    return [sample_images()[0][1], png(1), Image.open(io.BytesIO(png(2))), np.asarray(Image.open(io.BytesIO(png(3))))]


QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
CASES: dict[str, tuple[Callable[[Path], Path], str, dict[str, Callable[[], list[Any]]]]] = {
    "qwen2_vl": (
        mm_plugin_qwen2vl.testing.make_checkpoint,
        QWEN * 4 + "<|vision_start|><|video_pad|><|vision_end|>",
        {"images": images, "videos": lambda: [video(1)]},
    ),
    "qwen2_5_vl": (
        mm_plugin_qwen25vl.testing.make_checkpoint,
        QWEN * 4 + "<|vision_start|><|video_pad|><|vision_end|>",
        {"images": images, "videos": lambda: [video(2)]},
    ),
    "deepseek_vl2": (mm_plugin_deepseekvl2.testing.make_checkpoint, "<image>" * 4, {"images": images}),
    "llava": (
        lambda folder: FALLBACK.make_checkpoint(folder, family="llava"),
        FALLBACK.FAMILIES["llava"].prompt(4),
        {"images": images},
    ),
    "paligemma": (
        lambda folder: FALLBACK.make_checkpoint(folder, family="paligemma"),
        FALLBACK.FAMILIES["paligemma"].prompt(2),
        {"images": lambda: images()[:2]},
    ),
    "qwen2_audio": (
        lambda folder: FALLBACK.make_checkpoint(folder, family="qwen2_audio"),
        FALLBACK.FAMILIES["qwen2_audio"].prompt(1),
        {"audios": lambda: [AudioSamples(np.sin(np.arange(8000, dtype=np.float32) / 9), 16_000)]},
    ),
}


def described(output: MultimodalProcessorOutput) -> list[Any]:
    """Everything of an output that a scheduler or a worker reads."""
    positions = output.mrope_positions
    return [
        output.input_ids.tolist(),
        output.padded_input_ids.tolist(),
        None if positions is None else positions.tolist(),
        [(item.identity, item.offsets, feature_digest(item.feature)) for item in output.mm_items],
        [sorted(item.model_specific_data) for item in output.mm_items],
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_spawned_worker_gives_what_threads_give(name: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    make, prompt, media = CASES[name]
    folder = make(tmp_path / "checkpoint")
    given = [{kind: values() for kind, values in media.items()} for _ in range(2)]
    with mm_plugin.discover() as here, mm_plugin.discover(preparer=elsewhere) as there:
        expected = described(here.load_processor(folder).process(prompt, **given[0]))
        sent = elsewhere.sent
        processor = there.load_processor(folder)
        assert described(processor.process(prompt, **given[1])) == expected
        assert elsewhere.sent > sent
        if name in ("paligemma",):
            return
        sent = elsewhere.sent
        again = {kind: values() for kind, values in media.items()}
        assert described(processor.process(prompt, **again)) == expected
        assert elsewhere.sent == sent  # what came back is in this process's cache


def test_an_error_of_a_worker_is_the_request_s_with_its_path(elsewhere: Elsewhere, tmp_path: Path) -> None:
    folder = mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path / "checkpoint")
    data = png(5, 300, 300)
    with mm_plugin.discover(preparer=elsewhere) as there:
        processor = there.load_processor(folder)
        with pytest.raises(MediaError) as caught:
            processor.process(QWEN * 2, [png(6), data[: len(data) // 2]])
        assert (caught.value.path, caught.value.reason) == ("images[1]", "broken")
        assert processor.cache_stats.pinned == 0
        assert len(processor.process(QWEN, [png(6)]).mm_items) == 1


def test_a_worker_is_another_process(elsewhere: Elsewhere) -> None:
    assert elsewhere._pool.submit(os.getpid).result(timeout=120) != os.getpid()
