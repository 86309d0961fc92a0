"""`mm-plugin doctor`: imports each plugin in a process of its own, and says what is wrong and how to fix it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from mm_plugin.cli.list import colored, print_json, print_notices
from mm_plugin.errors import UsageError
from mm_plugin.registry.records import PluginRecord
from mm_plugin.registry.registry import discover

BROKEN = ("failed", "conflict", "incompatible", "shadowed")


def doctor(name: str | None, *, as_json: bool, timeout: float) -> int:
    """Import plugins one by one, each in a process of its own, and report what failed, why, where, and how to fix it.

    Args:
        name: the plugin to examine; all of them where None.
        as_json: print JSON.
        timeout: time for one plugin, seconds.

    Returns:
        1 when something is broken, else 0.

    Raises:
        UsageError: no plugin of this name is installed.
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
        print_json(records, registry)
    else:
        _print_findings(console, records)
        print_notices(console, registry)
    return int(any(record.state in BROKEN for record in records) or bool(registry.notices))


def _print_findings(console: Console, records: Sequence[PluginRecord]) -> None:
    if not records:
        console.print("no plugin is installed")
    for record in records:
        head = escape(f"{record.name}  ({record.distribution} {record.version}, {record.entry_point})")
        console.print(f"{colored(record.state)}  [bold]{head}[/]")
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


def _examine(record: PluginRecord, timeout: float) -> PluginRecord:
    """The record after an import in another process, which may crash or hang without affecting this one."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mm-plugin-") as folder:
        # The record comes back in a file: a plugin may print what it likes when it is imported.
        answer = Path(folder) / "record.json"
        # The same path as here: `-m` alone would put the current folder before it, and what lies there hides what is installed.
        here = {"", os.getcwd()} & set(sys.path)  # noqa: PTH109 - as Python itself writes it
        command = [sys.executable, *([] if here else ["-P"]), "-m", "mm_plugin.cli.probe", record.name, str(answer)]
        environment = {**os.environ, "MM_PLUGIN_STRICT": "0"}
        # What it prints goes to a file too: a process that it started and left running would keep a pipe open.
        with (Path(folder) / "output.txt").open("wb+") as output:
            try:
                code = subprocess.run(  # noqa: S603
                    command,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            if answer.is_file():
                return msgspec.json.decode(answer.read_bytes(), type=PluginRecord)
            if code is None:
                return _lost(record, "timeout", f"its import did not end within {timeout:.0f} seconds", began)
            output.seek(0)
            printed = output.read().decode(errors="replace").strip()
    died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _lost(record, "crashed", f"its import ended the process with {died}", began, printed)


def _lost(record: PluginRecord, code: str, error: str, began: float, printed: str | None = None) -> PluginRecord:
    facts: dict[str, Any] = {
        "state": "failed",
        "stage": "import",
        "code": code,
        "error": error,
        "hint": f"MM_PLUGIN_DISABLED={record.name}, and report it",
        "traceback": printed or None,
        "elapsed_ms": round((time.perf_counter() - began) * 1e3, 3),
    }
    return msgspec.structs.replace(record, **facts)
