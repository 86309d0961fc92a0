"""Numbers that were recorded elsewhere, read from a plugin's own test data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file


def recorded_numbers(folder: Path) -> Callable[[str], Any]:
    """Reads .npz, .safetensors and .json files of a folder by name, each once.

    Args:
        folder: of the data.
    """

    @functools.cache
    def read(name: str) -> Any:
        if name.endswith(".npz"):
            with np.load(folder / name) as arrays:
                return dict(arrays)
        if name.endswith(".safetensors"):
            return load_file(folder / name)
        return json.loads((folder / name).read_text(encoding="utf-8"))

    return read
