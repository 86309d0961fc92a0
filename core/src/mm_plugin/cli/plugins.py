"""`mm-plugin list` and `mm-plugin doctor`: what is installed, what is broken, and what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mm_plugin.errors import UsageError
from mm_plugin.registry.records import PluginRecord
from mm_plugin.registry.registry import Registry, discover

BROKEN = ("failed", "conflict", "incompatible")
_COLORS = {"available": "green", "loaded": "green", "disabled": "yellow"}


def list_plugins(*, as_json: bool) -> int:
    """Show every installed plugin; nothing is imported."""
    registry = discover()
    if as_json:
        _print_json(registry.plugins, registry)
    else:
        console = Console()
        console.print(plugin_table(registry.plugins))
        _print_notices(console, registry)
    return 0


def doctor(name: str | None, *, as_json: bool, timeout: float) -> int:
    """Import plugins one by one, each in a process of its own, and say what, why, where and how to mend it.

    Args:
        name: this plugin only, or all where None.
        as_json: print JSON.
        timeout: seconds for one plugin.

    Returns:
        1 when something is broken, else 0.
    """
    registry = discover()
    found = [record for record in registry.plugins if name in (None, record.name)]
    if name is not None and not found:
        known = ", ".join(sorted({record.name for record in registry.plugins})) or "none"
        raise UsageError(f"no plugin {name!r} is installed; installed: {known}", argument="NAME")
    console = Console(stderr=as_json)
    records = []
    with console.status("") as status:
        for record in found:
            status.update(f"importing {record.name}")
            records.append(_examine(record, timeout) if record.state == "available" else record)
    if as_json:
        _print_json(records, registry)
    else:
        _print_findings(console, records)
        _print_notices(console, registry)
    return int(any(record.state in BROKEN for record in records) or bool(registry.notices))


def plugin_table(records: Iterable[PluginRecord]) -> Table:
    """Plugins as a table: who they are, what state they are in, what they serve."""
    table = Table(title="Plugins", title_justify="left")
    for column in ("name", "distribution", "state", "serves"):
        table.add_column(column, overflow="fold")
    for record in records:
        serves = [name for kind, names in record.claims.items() if kind != "fallback" for name in names]
        serves += ["whatever else it can open (fallback)"] * ("fallback" in record.claims)
        table.add_row(
            escape(record.name),
            escape(f"{record.distribution} {record.version}"),
            _colored(record.state),
            escape(", ".join(serves) or "nothing"),
        )
    if not table.rows:
        table.add_row("none", "", "", "try: pip install mm-plugin-qwen2vl")
    return table


def _colored(state: str) -> str:
    return f"[{_COLORS.get(state, 'red')}]{state}[/]"


def _print_findings(console: Console, records: Sequence[PluginRecord]) -> None:
    if not records:
        console.print("no plugin is installed")
    for record in records:
        head = escape(f"{record.name}  ({record.distribution} {record.version}, {record.entry_point})")
        console.print(f"{_colored(record.state)}  [bold]{head}[/]")
        kind = f"{record.error_type}: " if record.error_type else ""
        lines = {
            "what": f"{record.code} at {record.stage}" if record.code else None,
            "why": f"{kind}{record.error}" if record.error else None,
            "where": record.where,
            "missing": record.missing,
            "fix": record.hint,
            "report to": record.report_to if record.state in BROKEN else None,
            "took": f"{record.elapsed_ms:.0f} ms" if record.elapsed_ms is not None else None,
        }
        for label, text in lines.items():
            if text:
                console.print(f"  {label:<10}{escape(text)}", highlight=False)


def _print_notices(console: Console, registry: Registry) -> None:
    for notice in registry.notices:
        console.print(f"[yellow]note[/]  {escape(notice)}", highlight=False)


def _print_json(records: Sequence[PluginRecord], registry: Registry) -> None:
    report = {
        "plugins": list(records),
        "architectures": registry.architectures,
        "model_types": registry.model_types,
        "notices": registry.notices,
    }
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


def _examine(record: PluginRecord, timeout: float) -> PluginRecord:
    """The record after an import in another process, which may die or hang without harm to this one."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mm-plugin-") as folder:
        # The record comes back in a file: a plugin may print what it likes when it is imported.
        answer = Path(folder) / "record.json"
        command = [sys.executable, "-m", "mm_plugin.cli.probe", record.name, str(answer)]
        environment = {**os.environ, "MM_PLUGIN_STRICT": "0"}
        # What it prints goes to a file too: a process that it leaves behind would keep a pipe open.
        with (Path(folder) / "said.txt").open("wb+") as said:
            try:
                code = subprocess.run(  # noqa: S603
                    command,
                    env=environment,
                    stdout=said,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            if answer.is_file():
                return msgspec.json.decode(answer.read_bytes(), type=PluginRecord)
            if code is None:
                return _lost(record, "timeout", f"its import did not end in {timeout:.0f} seconds", began)
            said.seek(0)
            told = said.read().decode(errors="replace").strip()
    died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _lost(record, "crashed", f"its import ended the process with {died}", began, told)


def _lost(record: PluginRecord, code: str, error: str, began: float, said: str | None = None) -> PluginRecord:
    facts: dict[str, Any] = {
        "state": "failed",
        "stage": "import",
        "code": code,
        "error": error,
        "hint": f"MM_PLUGIN_DISABLED={record.name}, and report it",
        "traceback": said or None,
        "elapsed_ms": round((time.perf_counter() - began) * 1e3, 3),
    }
    return msgspec.structs.replace(record, **facts)
