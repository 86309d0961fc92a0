"""Tensors of several items as one, and differences by rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mm_plugin_transformers_auto.tensors import is_same, join, rounding_difference


@pytest.mark.parametrize(
    ("shapes", "axis", "expected"),
    [
        ([(2, 3)], 0, (2, 3)),
        ([(2, 3), (1, 3)], 0, (3, 3)),
        ([(1, 3, 2), (1, 2, 5)], 0, (2, 3, 5)),
        ([(1, 3, 2), (1, 2, 5)], 1, (1, 5, 5)),
    ],
)
def test_join_pads_with_zeros_at_the_end(shapes: list[tuple[int, ...]], axis: int, expected: tuple[int, ...]) -> None:
    parts = [torch.full(shape, index + 1.0) for index, shape in enumerate(shapes)]
    found = join(parts, axis)
    assert tuple(found.shape) == expected
    start = 0
    for part in parts:
        place = tuple(slice(start, start + size) if n == axis else slice(0, size) for n, size in enumerate(part.shape))
        assert torch.equal(found[place], part)
        start += part.shape[axis]
    assert float(found.sum()) == sum(float(part.sum()) for part in parts)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 2.5]), False),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), False),
        (torch.tensor([[1.0, 2.0]]), False),
        (None, False),
    ],
    ids=str,
)
def test_tensors_are_the_same_in_every_bit(other: Any, same: bool) -> None:
    assert is_same(torch.tensor([1.0, 2.0]), other) is same


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (torch.tensor([1.0, -8.0]), 0.0),
        (torch.tensor([1.0 + 2**-23, -8.0]), 2**-23),
        (torch.tensor([1.0 + 2**-16, -8.0]), 2**-16),  # sixteen units at the largest element, 8
        (torch.tensor([1.0 + 2**-15, -8.0]), None),
        (torch.tensor([1.0, float("nan")]), None),
        (torch.tensor([1.0, -8.0], dtype=torch.float64), None),
        (torch.tensor([[1.0, -8.0]]), None),
        (None, None),
    ],
    ids=str,
)
def test_what_counts_as_rounding(other: Any, expected: float | None) -> None:
    assert rounding_difference(torch.tensor([1.0, -8.0]), other) == expected


def test_whole_numbers_and_nothing_are_not_rounded() -> None:
    assert rounding_difference(torch.tensor([1]), torch.tensor([1])) is None
    assert rounding_difference(torch.zeros(0), torch.zeros(0)) is None
