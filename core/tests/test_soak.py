"""A busy server under faults, cancellations, forks and closings: no deadlock, no wrong answer, exact books, no leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
FOLDER = Path(__file__).parent


def soak(seed: int, requests: int, limit: int) -> Any:
    """What a server of its own process found; one that is not done in time says where its threads stand."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, str(FOLDER / "soak.py"), str(seed), str(requests), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit + 60)
    assert done.returncode == 0, done.stderr[-20_000:]
    return json.loads(done.stdout)


def check(found: Any) -> None:
    assert found["faults"] == []
    counts = found["counts"]
    # Every kind of end was met, so that the soak is one.
    assert {"served", "cancelled", "forked", "ProcessorError", "UsageError executor"} <= set(counts), counts


@pytest.mark.parametrize("seed", [1])
def test_a_busy_server_gives_right_answers_and_keeps_exact_books(seed: int) -> None:
    check(soak(seed, requests=800, limit=120))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_memory_after_3000_requests_is_that_after_300(seed: int) -> None:
    found = soak(seed, requests=3_000, limit=900)
    check(found)
    assert found["memory"][-1] <= found["memory"][0] * 1.05, found["memory"]
