"""The command `mm-plugin`: `list`, `doctor` and `demo`. Knows no model."""

from __future__ import annotations

from mm_plugin.cli.main import main

__all__ = ["main"]
