"""Times ours, a reference and a floor alternately, and reports ratios. Knows no row.

Every round calls each contender once, in an order that rotates by one from round to round, so that a disturbance of a
shared machine affects all of them. A ratio is the median over rounds of the ratio within a round; a time is a median of its own, so
the quotient of two printed times may differ a little from the printed ratio.

pytest-benchmark is not used: it times one function to the end before the next begins, and what is between them is then part
of the ratio.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

Call = Callable[[], Any]

# A sample shorter than this is repeated until it is not, seconds: the clock and the loop then cost less than a thousandth.
_SAMPLE = 0.002


@dataclass(frozen=True)
class Bar:
    """What a row should reach.

    Attributes:
        limit: a ratio, milliseconds, or operations per second.
        of: against what; `ops` is the only one that must be reached from below.
    """

    limit: float
    of: Literal["floor", "reference", "ms", "ops"]

    def __str__(self) -> str:
        if self.of == "ops":
            return f">= {self.limit:,.0f}/s"
        return f"<= {self.limit:g} ms" if self.of == "ms" else f"<= {self.limit:g} x {self.of}"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: what is done.
        ours: does it with this project.
        check: is given the results of ours, reference and floor (None where a row has none) and raises where they do not agree.
        bar: what ours should reach, or None where the row only informs.
        reference: its name, and the same work done by it.
        floor: its name, and the least that gives the same result.
        threads: torch's threads within an operation; the machine's default where None.
        operations: how many operations one call does, where the bar counts operations.
    """

    work: str
    ours: Call
    check: Callable[[Any, Any, Any], None]
    bar: Bar | None
    reference: tuple[str, Call] | None = None
    floor: tuple[str, Call] | None = None
    threads: int | None = None
    operations: int = 1


@dataclass(frozen=True)
class Result:
    """What was measured of a row; times in milliseconds.

    Attributes:
        work: what is done.
        ours_ms: median.
        reference: its name.
        reference_ms: median.
        floor: its name.
        floor_ms: median.
        to_reference: ours over reference.
        to_floor: ours over floor.
        bar: in words.
        met: whether the bar was met, None without one.
        threads: torch's threads within an operation.
        ops: operations per second, where the bar counts them.
    """

    work: str
    ours_ms: float
    reference: str | None
    reference_ms: float | None
    floor: str | None
    floor_ms: float | None
    to_reference: float | None
    to_floor: float | None
    bar: str
    met: bool | None
    threads: int
    ops: float | None


def settle_allocator() -> None:
    """Bring glibc's allocator to where it comes by itself in a process that has run for a while.

    Until then, whether a freed array goes back to the system, to be faulted in again page by page, depends on what else was
    freed before: chance, and worth a factor of five on a one-megabyte array.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the most to which it rises
        libc.mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD, always twice the other


def measure(row: Row, *, rounds: int) -> Result:
    """Check that all contenders agree, then time them in turns.

    Raises:
        AssertionError: they do not agree; nothing is timed then.
    """
    contenders: dict[str, Call] = {"ours": row.ours}
    if row.reference:
        contenders["reference"] = row.reference[1]
    if row.floor:
        contenders["floor"] = row.floor[1]
    with _threads(row.threads) as threads:
        results = {name: call() for name, call in contenders.items()}  # also the warm-up
        row.check(results["ours"], results.get("reference"), results.get("floor"))
        del results
        repeats = {name: max(1, math.ceil(_SAMPLE / _sample(call, 1))) for name, call in contenders.items()}
        names = list(contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            for step in range(len(names)):
                name = names[(turn + step) % len(names)]
                seconds[name].append(_sample(contenders[name], repeats[name]))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        name: statistics.median(ours / other for ours, other in zip(seconds["ours"], seconds[name], strict=True))
        for name in names
        if name != "ours"
    }
    ops = row.operations / medians["ours"] if row.bar and row.bar.of == "ops" else None
    return Result(
        work=row.work,
        ours_ms=medians["ours"] * 1e3,
        reference=row.reference[0] if row.reference else None,
        reference_ms=medians["reference"] * 1e3 if row.reference else None,
        floor=row.floor[0] if row.floor else None,
        floor_ms=medians["floor"] * 1e3 if row.floor else None,
        to_reference=ratios.get("reference"),
        to_floor=ratios.get("floor"),
        bar=str(row.bar) if row.bar else "",
        met=_met(row.bar, medians["ours"] * 1e3, ratios, ops),
        threads=threads,
        ops=ops,
    )


def _met(bar: Bar | None, ours_ms: float, ratios: dict[str, float], ops: float | None) -> bool | None:
    if bar is None:
        return None
    if bar.of == "ops":
        return ops is not None and ops >= bar.limit
    return (ours_ms if bar.of == "ms" else ratios[bar.of]) <= bar.limit


def _sample(call: Call, repeats: int) -> float:
    """Seconds of one call. The garbage collector rests, and what the last call returned is freed outside the time.

    A call that is repeated is made once more before the clock starts: a long contender just before it emptied the caches.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        if repeats > 1:
            call()
        began = time.perf_counter()
        for _ in range(repeats - 1):
            call()
        kept = call()
        seconds = time.perf_counter() - began
        del kept
    finally:
        if enabled:
            gc.enable()
    return max(seconds / repeats, 1e-9)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def conditions(rounds: int) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "torch_threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "gpu": torch.cuda.is_available(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": rounds,
    }


def report(results: list[Result], facts: dict[str, Any], file: Path) -> None:
    """Print the table and write the same as JSON."""
    columns = ("work", "ours ms", "reference", "ms", "floor", "ms", "x ref", "x floor", "bar", "met")
    table = Table(title="ratios count, milliseconds do not travel", show_lines=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("ours ms", "ms", "x ref", "x floor") else "left")
    for result in results:
        met = {True: "[green]yes", False: "[bold red]no", None: ""}[result.met]
        bar = result.bar if result.ops is None else f"{result.bar} ({result.ops:,.0f})"
        table.add_row(
            result.work, _ms(result.ours_ms), result.reference or "", _ms(result.reference_ms), result.floor or "",
            _ms(result.floor_ms), _ratio(result.to_reference), _ratio(result.to_floor), bar, met,
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"conditions": facts, "rows": [vars(result) for result in results]}
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {file}", highlight=False)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
