"""Fixtures for the conftest.py of a plugin over patch grids. It imports them by name, and defines `tiny` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mm_plugin.registry import Registry
from mm_plugin.testing.patch_grid import PatchGridCheckpoints


@pytest.fixture(scope="session")
def checkpoint(tiny: PatchGridCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ordinary tiny checkpoint."""
    return tiny.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def model(tiny: PatchGridCheckpoints, checkpoint: Path) -> Any:
    """The whole model, opened by transformers from the same folder."""
    return tiny.model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def processor(registry: Registry, checkpoint: Path) -> Any:
    """The processor as it is opened without options, with compact features."""
    return registry.load_processor(checkpoint)


@pytest.fixture(scope="session")
def exact(registry: Registry, checkpoint: Path) -> Any:
    """The features of transformers' torchvision backend."""
    return registry.load_processor(checkpoint, resize="torch", feature_format="float32")


@pytest.fixture(scope="session")
def pillow(registry: Registry, checkpoint: Path) -> Any:
    """The features of transformers' Pillow backend."""
    return registry.load_processor(checkpoint, resize="pillow", feature_format="float32")


@pytest.fixture(scope="session")
def encoder(registry: Registry, checkpoint: Path) -> Any:
    """The vision tower alone."""
    return registry.load_encoder(checkpoint)
