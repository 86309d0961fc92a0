"""Sentinels: equal bit for bit to the published scheme, above every vocabulary."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.sentinels import (
    MM_PAD_SHIFT_VALUE,
    check_vocabulary,
    lay_sentinels,
    pad_values_from_hash,
    pad_values_from_identity,
    sentinel_sequence,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sglang_sentinels.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["identities"], ids=lambda case: case["id"])
def test_identity_gives_the_reference_values(case: dict[str, Any]) -> None:
    assert pad_values_from_identity(bytes.fromhex(case["identity_hex"])) == tuple(map(int, case["pad_values"]))


@pytest.mark.parametrize("case", GOLDEN["hashes"], ids=lambda case: case["id"])
def test_hash_gives_the_reference_values(case: dict[str, Any]) -> None:
    assert pad_values_from_hash(int(case["hash_in"])) == tuple(map(int, case["pad_values"]))


@pytest.mark.parametrize("case", GOLDEN["items"], ids=lambda case: f"item{case['item']}")
def test_item_identities_give_the_reference_values(case: dict[str, Any]) -> None:
    identity = hashlib.sha256(f"item{case['item']}".encode()).digest()
    assert pad_values_from_identity(identity) == tuple(map(int, case["pad_values"]))


@pytest.mark.parametrize(
    ("case", "length"),
    [(case, n) for case in GOLDEN["padding_sequences"] if "identity_hex" in case for n in range(10)],
    ids=lambda value: value["id"] if isinstance(value, dict) else str(value),
)
def test_sequence_repeats_the_four_values_as_the_reference_does(case: dict[str, Any], length: int) -> None:
    values = pad_values_from_identity(bytes.fromhex(case["identity_hex"]))
    sequence = sentinel_sequence(values, length)
    assert sequence.dtype == np.int64
    assert sequence.tolist() == list(map(int, case["padding_sequence"][str(length)]))


@given(st.binary(max_size=64))
def test_every_sentinel_lies_above_the_shift_and_fits_int64(identity: bytes) -> None:
    for value in pad_values_from_identity(identity):
        assert 1_000_000 <= value < 1_000_000 + 2**62


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_laying_touches_the_span_only_and_begins_again_at_its_start(before: int, length: int, after: int) -> None:
    values = (11, 22, 33, 44)
    out = np.full(before + length + after, -1, dtype=np.int64)
    lay_sentinels(out, before, before + length, values)
    assert out.tolist() == [-1] * before + [values[i % 4] for i in range(length)] + [-1] * after


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(SpanError, match="-1"):
        sentinel_sequence((1, 2, 3, 4), -1)


@pytest.mark.case("3.1")
def test_a_vocabulary_that_reaches_the_shift_is_refused_and_one_below_is_not() -> None:
    assert MM_PAD_SHIFT_VALUE == 1_000_000
    check_vocabulary(1_000_000)  # ids 0 to 999,999
    with pytest.raises(UsageError, match="1000001") as caught:
        check_vocabulary(1_000_001)
    assert caught.value.argument == "vocab_size"
