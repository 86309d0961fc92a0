"""Thousands of files with headers of random pieces and hostile numbers: each ends in time, in memory, and in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from header_grammar.serve import BUILDERS, build

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
FOLDER = Path(__file__).parent
SECONDS, BYTES = 2.0, 256 << 20  # of one file, beyond what there was
BATCH = 250  # files of one child


def work(first: int, last: int) -> list[dict[str, Any]]:
    """What became of the files of these seeds; one that ends the child, or hangs, is a finding, and the next child goes on."""
    found: list[dict[str, Any]] = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    while first < last:
        command = [sys.executable, "-W", "ignore", "-m", "header_grammar.serve", str(first), str(last)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 + (last - first))
            lines, code = done.stdout.splitlines(), done.returncode
        except subprocess.TimeoutExpired as late:
            lines, code = (late.stdout or b"").decode().splitlines(), -9
        facts = [json.loads(line) for line in lines if line.endswith("}")]
        found += [fact for fact in facts if "seconds" in fact]
        if code == 0:
            break
        assert facts, f"the child ended with {code}"
        found.append(facts[-1] | {"wrong": f"the process ended with {code}", "seconds": 0.0, "peak": 0})
        first = facts[-1]["seed"] + 1
    return found


def findings(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fact for fact in facts if "wrong" in fact or fact["seconds"] > SECONDS or fact["peak"] > BYTES]


def check(first: int, last: int) -> None:
    facts = [fact for start in range(first, last, BATCH) for fact in work(start, min(last, start + BATCH))]
    assert findings(facts) == []
    assert {fact["container"] for fact in facts} == set(BUILDERS)
    # The files are not just noise: many are refused for what stands in them, and some can be decoded.
    ends = Counter(fact["end"] for fact in facts)
    assert ends["decoded"] > len(facts) // 500, ends
    assert len(ends) > 5, ends


def test_a_seed_is_a_file() -> None:
    assert [build(seed) for seed in range(40)] == [build(seed) for seed in range(40)]
    assert {build(seed)[0] for seed in range(40)} == set(BUILDERS)


def test_headers_of_random_pieces_cost_little_and_end_in_words() -> None:
    check(0, 500)


@pytest.mark.slow
def test_10000_headers_of_random_pieces_cost_little_and_end_in_words() -> None:
    check(500, 10_500)
