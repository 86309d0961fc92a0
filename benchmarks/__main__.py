"""`python -m benchmarks [--only WORDS] [--rounds N]`: measure, print the table, write out/benchmarks.json."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import (
    chat_rows,
    embed_rows,
    identity_rows,
    pixel_rows,
    prompt_rows,
    start_rows,
    tile_rows,
    tower_rows,
    video_rows,
)
from benchmarks.harness import Result, Row, conditions, measure, report, settle_allocator
from mm_plugin import Registry, discover
from mm_plugin_deepseekvl2 import testing as deepseek_vl2
from mm_plugin_qwen2vl.testing import make_checkpoint

OUT = Path(__file__).parents[1] / "out" / "benchmarks.json"


def all_rows(registry: Registry, checkpoint: Path, tiled: Path) -> Iterator[Row]:
    """Every row, made only when it is measured, so that one at a time holds its arrays."""
    yield from prompt_rows.rows()
    yield from chat_rows.rows()
    yield from pixel_rows.rows(registry, checkpoint)
    yield from tile_rows.rows(registry, tiled)
    yield from video_rows.rows(registry, checkpoint)
    yield from tower_rows.rows(registry, checkpoint)
    yield from identity_rows.rows(registry, checkpoint)
    yield from embed_rows.rows()
    yield from start_rows.rows()


def main() -> None:
    """Measure every row, or those whose name contains the words."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose name contains these words")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds for the median")
    arguments = parser.parse_args()
    settle_allocator()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, discover() as registry, torch.no_grad():
        checkpoint = make_checkpoint(Path(folder) / "qwen2_vl")
        tiled = deepseek_vl2.make_checkpoint(Path(folder) / "deepseek_vl2")
        for row in all_rows(registry, checkpoint, tiled):
            if arguments.only.lower() in row.work.lower():
                print(row.work, "...", file=sys.stderr, flush=True)
                results.append(measure(row, rounds=arguments.rounds))
    report(results, conditions(arguments.rounds), OUT)


if __name__ == "__main__":
    main()
