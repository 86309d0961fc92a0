"""`python -m mm_plugin.cli.probe NAME FILE`: import one plugin and all that it names, and write its record to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from mm_plugin.registry.diagnosis import check_plugin
from mm_plugin.registry.registry import discover


def main(name: str, answer: str) -> None:
    """Import the plugin and everything that it names, and write the record as JSON.

    Args:
        name: the plugin's name.
        answer: path of the file to write.
    """
    record = check_plugin(discover().catalog, name)
    Path(answer).write_bytes(msgspec.json.encode(record))


if __name__ == "__main__":
    main(*sys.argv[1:3])
