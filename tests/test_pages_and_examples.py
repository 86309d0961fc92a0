"""The pages about several processes, and the programs in `examples/`: their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import discover, wire
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
