"""The row of a fresh process: how long until it knows every architecture that is served."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import Bar, Row

KNOWN = """
import sys
from mm_plugin import discover
print(",".join(sorted(discover().architectures)), "torch" in sys.modules, "transformers" in sys.modules)
"""
IMPORTED = "import mm_plugin, importlib_metadata, msgspec, packaging.requirements, packaging.markers, pluggy"


def rows() -> Iterator[Row]:
    """A whole process each time, its start included."""
    claimed = sorted(entry.name for entry in importlib.metadata.entry_points(group="mm_plugin.architectures"))

    def check(ours: str, reference: str, floor: str) -> None:
        assert "Qwen2VLForConditionalGeneration" in claimed
        assert ours == f"{','.join(claimed)} False False"
        assert reference == floor == ""

    yield Row(
        "a fresh process knows every architecture, no torch",
        lambda: _run(KNOWN),
        check,
        Bar(150, "ms"),
        ("imports alone", lambda: _run(IMPORTED)),
        ("bare interpreter", lambda: _run("pass")),
    )


def _run(code: str) -> Any:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
