"""`python -m mm_plugin.cli.probe NAME FILE`: import one plugin and all that it names, and write its record to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from mm_plugin.demo.base import Demo
from mm_plugin.encoder.base import Encoder
from mm_plugin.processor.model import ModelProcessor
from mm_plugin.registry import discover

# What a spec's fields must name; None is a function.
BASES = {
    "processor": ModelProcessor,
    "encoder": Encoder,
    "padding": None,
    "positions": None,
    "tokenizer": None,
    "embed": None,
    "demo": Demo,
    "specialize": None,
}


def main(name: str, answer: str) -> None:
    """Import the plugin, everything that it names, and write the record as JSON."""
    record = discover().check_plugin(name, BASES)
    Path(answer).write_bytes(msgspec.json.encode(record))


if __name__ == "__main__":
    main(*sys.argv[1:3])
