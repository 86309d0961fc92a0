"""`mm-plugin settings`: the settings in force, and where each comes from."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from mm_plugin.cli.tables import print_table
from mm_plugin.settings import PREFIX, Settings, unknown_variables


def show_settings(*, as_json: bool) -> int:
    """Show the settings that a process with this environment has.

    Args:
        as_json: print JSON.

    Returns:
        0; 1 if a variable has the prefix of the settings and is not one of them.

    Raises:
        UsageError: a variable has an invalid value.
    """
    settings, wrong = Settings.from_env(), unknown_variables(os.environ)
    found: dict[str, dict[str, Any]] = {}
    for name in Settings.__struct_fields__:
        variable = PREFIX + name.upper()
        source = "environment" if os.environ.get(variable, "").strip() else "default"
        found[name] = {"value": getattr(settings, name), "from": source, "variable": variable}
    if as_json:
        report = msgspec.json.encode({"settings": found, "notices": wrong})
        sys.stdout.write(msgspec.json.format(report, indent=2).decode() + "\n")
        return int(bool(wrong))
    console = Console()
    rows = [[name, entry["from"], entry["variable"], escape(_shown(entry["value"]))] for name, entry in found.items()]
    print_table(console, "Settings", ("setting", "from", "variable", "value"), rows)
    for message in wrong:
        console.print(f"[yellow]note[/]  {escape(message)}", highlight=False, soft_wrap=True)
    return int(bool(wrong))


def _shown(value: Any) -> str:
    """A value as its variable would be written."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)
