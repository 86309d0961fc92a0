"""Writes tests/snapshot/snapshot.json again: `python tests/make_snapshot.py`, or `make snapshot`."""

from __future__ import annotations

import time

from snapshot.run import FILE, write

if __name__ == "__main__":
    began = time.perf_counter()
    counts = write()
    for variant, count in counts.items():
        print(f"{count:5d} {variant}")
    print(
        f"{sum(counts.values()):5d} records, {FILE.stat().st_size:,} bytes, {time.perf_counter() - began:.0f} seconds"
    )
