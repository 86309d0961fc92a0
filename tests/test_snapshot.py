"""What the framework produces is, byte for byte, what it produced when tests/snapshot/snapshot.json was written.

Where a change of output is meant, write that file again and look at what moved:

    python tests/make_snapshot.py
    git diff --stat tests/snapshot/snapshot.json

Every run feeds each entry of the corpus to some variant, and makes every request; with `-m slow` each entry goes to every variant.
"""

from __future__ import annotations

from typing import Any

import pytest
from snapshot.framework import corpus
from snapshot.records import ASPECTS
from snapshot.run import compute, entries, moved, read, unlike
from snapshot.variants import VARIANTS

SHOWN = 12


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return read()


def compare(name: str, expected: dict[str, Any], *, part: bool) -> None:
    other = unlike(name, expected["environment"])
    if other:
        pytest.skip(f"snapshot.json was written elsewhere: {'; '.join(other)}")
    found = moved(expected["records"][name], compute(name, part=part), part=part)
    shown = "\n".join(found[:SHOWN])
    assert not found, f"{name}: {len(found)} records moved, the first are\n{shown}"


def test_it_holds_the_variants_and_aspects_that_are_computed(expected: dict[str, Any]) -> None:
    assert list(expected["records"]) == list(VARIANTS)
    assert expected["aspects"] == list(ASPECTS)


def test_every_run_feeds_every_entry_of_the_corpus() -> None:
    fed = {entry for name in VARIANTS for entry, _, _ in entries(name, part=True)}
    assert fed == {f"corpus/{kind} {index:03d}" for kind, found in corpus().items() for index in range(len(found))}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_part_of_the_output_is_as_it_was(name: str, expected: dict[str, Any]) -> None:
    compare(name, expected, part=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_all_output_is_as_it_was(name: str, expected: dict[str, Any]) -> None:
    compare(name, expected, part=False)
