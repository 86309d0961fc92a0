"""The pages about several processes, and the programs in `examples/`: their code runs."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin import (
    ForwardBatch,
    MediaError,
    MultimodalInputs,
    RequestMedia,
    discover,
    embed_mm_inputs,
    wire,
)
from mm_plugin.demo import sample_images
from mm_plugin_qwen2vl.testing import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run_page(name: str, names: dict[str, Any]) -> None:
    """Run a page's Python blocks one after another."""
    page = ROOT / "docs" / name
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, name, "exec"), names)


def test_the_page_of_the_wire_runs(checkpoint: Path) -> None:
    image = sample_images()[0][1]
    with discover() as registry:
        names: dict[str, Any] = {"processor": registry.load_processor(checkpoint), "image": image}
        run_page("wire.md", names)
        assert len(names["to_scheduler"]) < 1 << 16
        whole = names["MultimodalInputs"].from_processor_output(names["output"])
        assert wire.same(names["kept"], whole)
        with discover(preparer=names["OverWire"]()) as other:
            found = other.load_processor(checkpoint).process("<|vision_start|><|image_pad|><|vision_end|>", [image])
        expected = names["processor"].process("<|vision_start|><|image_pad|><|vision_end|>", [image])
        assert wire.same(found, expected)


def test_the_page_of_processes_runs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with discover() as registry:
        names: dict[str, Any] = {"processor": registry.load_processor(checkpoint), "image": sample_images()[0][1]}
        names |= {"registry": registry, "checkpoint": checkpoint}
        run_page("processes.md", names)
    assert names["found"].embeddings.shape[0] == names["output"].mm_items[0].num_tokens
    assert names["hit"] == len(names["output"].input_ids) - 1


def test_the_page_of_processes_says_how_much_a_token_takes(checkpoint: Path) -> None:
    """Three arrays of int64 and three axes of positions."""
    with discover() as registry:
        output = registry.load_processor(checkpoint).process("word " * 1000)
    assert len(b"".join(wire.pack(output.split()[0]))) - 48 * len(output.input_ids) < 2048


# ---------------------------------------------------------------- examples


def test_three_processes_serve_what_one_does(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("three_processes")
    image, prompt = sample_images()[0][1], "<|vision_start|><|image_pad|><|vision_end|>What is this?"
    request = {"prompt": prompt, "images": [image]}
    broken = {"prompt": prompt, "images": [image[:60]]}
    other = {"prompt": prompt, "images": [sample_images()[1][1]]}
    first, again, failed, second = example.serve(str(checkpoint), [request, request, broken, other])
    with discover() as registry:
        output = registry.load_processor(checkpoint).process(prompt, [image])
        encoder = registry.load_encoder(checkpoint, device="cpu", dtype=torch.float32)
        embedding = example.text_embedding(str(checkpoint))
        ids = torch.from_numpy(output.input_ids)
        media = RequestMedia(MultimodalInputs.from_processor_output(output))
        whole = embed_mm_inputs(ids, ForwardBatch([media], [0], [len(ids)]), embedding, encoder).input_embeds
    assert np.array_equal(first["rows"], whole.numpy(force=True))
    assert np.array_equal(again["rows"], whole[-1:].numpy(force=True))
    assert (first["hit"], again["hit"], first["torch"]) == (0, len(ids) - 1, False)
    assert len(first["chunks"]) > 1
    assert isinstance(failed, MediaError)
    assert failed.path == "images[0]"
    assert second["hit"] == 1  # the start token: the images differ


def test_the_prefix_tree_is_short() -> None:
    assert len((ROOT / "examples" / "prefix_tree.py").read_text().splitlines()) <= 100


def shared(one: list[int], other: list[int]) -> int:
    """How many of the first ids are equal."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(4, 30))
def test_the_prefix_tree_finds_the_longest_prefix(prompts: list[list[int]], capacity: int) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        tree_class = importlib.import_module("prefix_tree").PrefixTree
    finally:
        sys.path.pop(0)
    endless, small = tree_class(1 << 30), tree_class(capacity)
    seen: list[list[int]] = []
    for prompt in prompts:
        ids = np.array(prompt)
        expected = max((shared(prompt, one) for one in seen), default=0)
        assert endless.match(ids) == expected
        assert small.match(ids) <= expected
        endless.insert(ids)
        small.insert(ids)
        seen.append(prompt)
        assert small.size <= capacity
        assert endless.size == len({tuple(one[:end]) for one in seen for end in range(1, len(one) + 1)})
