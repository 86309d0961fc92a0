"""`mm-plugin list`: what is installed, from metadata alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.markup import escape

from mm_plugin.cli.tables import print_table
from mm_plugin.registry.records import PluginRecord
from mm_plugin.registry.registry import Registry, discover

_COLORS = {"available": "green", "loaded": "green", "disabled": "yellow"}


def list_plugins(*, as_json: bool) -> int:
    """Show every installed plugin, without importing any of them.

    Args:
        as_json: print JSON.

    Returns:
        0.
    """
    registry = discover()
    if as_json:
        print_json(registry.plugins, registry)
    else:
        console = Console()
        print_plugins(console, registry.plugins)
        for record in registry.plugins:
            if record.error and record.state != "disabled":
                console.print(f"{colored(record.state)}  {escape(record.summary())}", highlight=False)
        print_notices(console, registry)
    return 0


def print_plugins(console: Console, records: Iterable[PluginRecord]) -> None:
    """Plugins as a table: name and distribution, state, and what each serves."""
    rows = []
    for record in records:
        serves = [name for kind, names in record.claims.items() if kind != "fallback" for name in names]
        serves += ["models that no other plugin claims (fallback)"] * ("fallback" in record.claims)
        rows.append(
            [
                escape(record.name),
                escape(f"{record.distribution} {record.version}"),
                colored(record.state),
                escape(", ".join(serves) or "nothing"),
            ]
        )
    none = [["none", "", "", "try: pip install mm-plugin-qwen2vl"]]
    print_table(console, "Plugins", ("name", "distribution", "state", "serves"), rows or none)


def colored(state: str) -> str:
    """A plugin's state with rich's markup."""
    return f"[{_COLORS.get(state, 'red')}]{state}[/]"


def print_notices(console: Console, registry: Registry) -> None:
    """Print the faults that belong to no plugin."""
    for notice in registry.notices:
        console.print(f"[yellow]note[/]  {escape(notice)}", highlight=False)


def print_json(records: Sequence[PluginRecord], registry: Registry) -> None:
    """Print records and what the registry serves, as JSON."""
    report = {
        "plugins": list(records),
        "architectures": registry.architectures,
        "model_types": registry.model_types,
        "notices": registry.notices,
    }
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
