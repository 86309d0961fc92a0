"""Fixtures for all tests of this plugin: a registry, a tiny checkpoint, what is opened from it, recorded numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from mm_plugin.testing import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests import recorded_numbers
from mm_plugin.testing.plugin_tests.fixtures import registry
from mm_plugin.testing.plugin_tests.patch_grid.fixtures import checkpoint, encoder, exact, model, pillow, processor
from mm_plugin_qwen2vl.testing import TINY

__all__ = ["checkpoint", "encoder", "exact", "model", "pillow", "processor", "registry"]

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def tiny() -> PatchGridCheckpoints:
    """Makes the tiny checkpoints."""
    return TINY


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Numbers that were recorded elsewhere, by file name."""
    return recorded_numbers(Path(__file__).parent / "data")
