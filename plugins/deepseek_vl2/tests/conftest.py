"""Fixtures for all tests of this plugin: a registry, a tiny checkpoint, what is opened from it, images, recorded numbers."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from PIL import Image

import mm_plugin
from mm_plugin.testing.plugin_tests import recorded_numbers
from mm_plugin.testing.plugin_tests.fixtures import registry
from mm_plugin_deepseekvl2.testing import make_checkpoint

__all__ = ["registry"]

DATA = Path(__file__).parent / "data"

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Numbers that the model's own code gave, by file name."""
    return recorded_numbers(DATA)


@pytest.fixture(scope="session")
def image() -> Callable[[str], Image.Image]:
    """An image by the name that the recorded cases give it, opened again each time."""
    return lambda name: Image.open(io.BytesIO((DATA / name).read_bytes()))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ordinary tiny checkpoint, with the released models' tiles."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def processor(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.ModelProcessor:
    """The processor as it is opened without options."""
    return registry.load_processor(checkpoint)


@pytest.fixture(scope="session")
def exact(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.ModelProcessor:
    """The model's own processor, bit for bit."""
    return registry.load_processor(checkpoint, feature_format="float32")


@pytest.fixture(scope="session")
def encoder(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.Encoder:
    """The vision part alone."""
    return registry.load_encoder(checkpoint)


@pytest.fixture(scope="session")
def sha256() -> Callable[[np.ndarray], str]:
    """Of an array's bytes in C order."""
    return lambda array: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.fixture(scope="session")
def runs() -> Callable[[Any], list[list[int]]]:
    """Run lengths, [[value, count], ...]."""

    def count(values: Any) -> list[list[int]]:
        found: list[list[int]] = []
        for value in np.asarray(values).tolist():
            if found and found[-1][0] == value:
                found[-1][1] += 1
            else:
                found.append([int(value), 1])
        return found

    return count


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image of which no two parts are alike."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


@pytest.fixture(scope="session")
def noisy() -> Callable[..., Image.Image]:
    """See `noise`."""
    return noise
