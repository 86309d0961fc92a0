"""Fixtures for the conftest.py of a plugin, which imports them by name, before any of the shared test classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mm_plugin.registry import Registry, discover
from mm_plugin.settings import Settings

_MODULES = ("checkpoints", "encoders", "end_to_end", "patch_grid", "prepared", "schedules", "sweeps")

# A failed assertion of the shared tests then shows its values, as one in a test module does.
pytest.register_assert_rewrite(
    *(name for name in (f"mm_plugin.testing.plugin_tests.{module}" for module in _MODULES) if name not in sys.modules)
)


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    """What is installed."""
    with discover(Settings(threads=2)) as found:
        yield found
