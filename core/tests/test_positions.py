"""M-RoPE positions against published values and a loop over tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.errors import SpanError
from mm_plugin.positions import batch_positions, extend_positions, mrope_positions, slice_positions

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "qwen2vl_mrope.json").read_text())

Grid = tuple[int, int, int]
Layout = tuple[list[tuple[int, int]], list[Grid], int, list[list[int] | None]]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_positions_equal_the_reference(case: dict[str, Any]) -> None:
    spans, grids = [tuple(span) for span in case["spans"]], [tuple(grid) for grid in case["grids"]]
    ids, delta = mrope_positions(spans, grids, seq=case["seq"])
    assert ids.dtype == np.int64
    assert ids.tolist() == case["positions"]
    assert delta == case["delta"]
    assert type(delta) is int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    seq = 0
    spans: list[tuple[int, int]] = []
    grids: list[Grid] = []
    times: list[list[int] | None] = []
    for _ in range(draw(st.integers(0, 4))):
        seq += draw(st.integers(0, 3))
        t, h, w = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
        spans.append((seq, seq + t * h * w - 1))
        grids.append((t, h, w))
        times.append(draw(st.none() | st.lists(st.integers(0, 30), min_size=t, max_size=t).map(sorted)))
        seq += t * h * w
    return spans, grids, seq + draw(st.integers(0, 3)), times


def slow_positions(layout: Layout) -> list[tuple[int, int, int]]:
    """One token after another: text takes one more than the largest value so far, an item counts from there."""
    spans, grids, seq, times = layout
    out: list[tuple[int, int, int]] = []
    starts = {span[0]: index for index, span in enumerate(spans)}
    while len(out) < seq:
        base = max((max(position) for position in out), default=-1) + 1
        index = starts.get(len(out))
        if index is None:
            out.append((base, base, base))
            continue
        t, h, w = grids[index]
        clock = times[index] or list(range(t))
        out += [(base + clock[i], base + j, base + k) for i in range(t) for j in range(h) for k in range(w)]
    return out


def compute(layout: Layout) -> tuple[np.ndarray, int]:
    spans, grids, seq, times = layout
    return mrope_positions(spans, grids, seq=seq, times=[None if t is None else np.array(t) for t in times])


@given(layouts())
def test_positions_equal_a_loop_over_tokens(layout: Layout) -> None:
    ids, delta = compute(layout)
    slow = slow_positions(layout)
    assert ids.shape == (3, layout[2])
    assert [tuple(column) for column in ids.T.tolist()] == slow
    assert delta == max((max(position) for position in slow), default=-1) + 1 - len(slow)


@pytest.mark.case("4.6")
@given(layouts(), st.integers(0, 5))
def test_generated_tokens_go_on_from_the_maximum_over_all_axes(layout: Layout, generated: int) -> None:
    ids, delta = compute(layout)
    seq = layout[2]
    longer = extend_positions(ids, delta, seq + generated)
    assert longer[:, :seq].tolist() == ids.tolist()
    first = int(ids.max()) + 1 if seq else 0
    assert longer[:, seq:].tolist() == [list(range(first, first + generated))] * 3
    assert not np.shares_memory(longer, ids)


@given(layouts(), st.integers(0, 5), st.data())
def test_a_slice_is_a_part_of_the_extended_positions(layout: Layout, generated: int, data: st.DataObject) -> None:
    ids, delta = compute(layout)
    length = layout[2] + generated
    prefix = data.draw(st.integers(0, length))
    extend = data.draw(st.integers(0, length - prefix))
    part = slice_positions(ids, delta, prefix, extend)
    assert part.tolist() == extend_positions(ids, delta, length)[:, prefix : prefix + extend].tolist()
    assert part.shape == (3, extend)
    assert not np.shares_memory(part, ids)


@given(layouts(), st.integers(1, 9))
def test_chunks_of_any_size_join_to_the_whole(layout: Layout, chunk: int) -> None:
    ids, delta = compute(layout)
    total = layout[2] + 4
    parts = [slice_positions(ids, delta, at, min(chunk, total - at)) for at in range(0, total, chunk)]
    assert np.concatenate(parts, axis=1).tolist() == extend_positions(ids, delta, total).tolist()


@pytest.mark.parametrize(
    ("spans", "grids", "message"),
    [
        ([(0, 3)], [], "each of 1 spans, got 0"),
        ([(0, 3)], [(1, 2, 3)], "must have 6 tokens for its grid 1 x 2 x 3, got 4"),
        ([(0, 3)], [(0, 2, 2)], "span 0"),
        ([(0, 3)], [(-1, -2, 2)], "span 0"),
        ([(0, 3), (3, 6)], [(1, 2, 2), (1, 2, 2)], "span 1"),
        ([(4, 7), (0, 3)], [(1, 2, 2), (1, 2, 2)], "span 1"),
        ([(7, 10)], [(1, 2, 2)], "span 0"),
        ([(-1, 2)], [(1, 2, 2)], "span 0"),
    ],
)
def test_spans_and_grids_that_do_not_fit_are_refused(
    spans: list[tuple[int, int]], grids: list[Grid], message: str
) -> None:
    with pytest.raises(SpanError, match=message):
        mrope_positions(spans, grids, seq=10)


@pytest.mark.parametrize("times", [[np.arange(3)], [np.zeros((1, 2))], []])
def test_other_counts_of_times_are_refused(times: list[np.ndarray]) -> None:
    with pytest.raises(SpanError):
        mrope_positions([(0, 3)], [(2, 1, 2)], seq=4, times=times)


def test_positions_are_not_extended_to_less_than_the_prompt() -> None:
    with pytest.raises(SpanError, match="at least the prompt's 4 tokens, got 3"):
        extend_positions(np.zeros((3, 4), np.int64), 0, 3)


# ------------------------------------------------------------------ batches


@pytest.mark.case("4.4")
@pytest.mark.case("4.6")
@given(
    st.lists(st.tuples(st.none() | layouts(), st.integers(0, 5), st.integers(0, 12), st.integers(0, 12)), max_size=5)
)
def test_positions_of_a_batch_equal_a_loop_over_its_tokens(batch: list[tuple[Layout | None, int, int, int]]) -> None:
    tables: list[np.ndarray | None] = []
    deltas: list[int | None] = []
    prefixes, extends = [], []
    expected: list[tuple[int, int, int]] = []
    for layout, generated, prefix, extend in batch:
        table, delta = (None, None) if layout is None else compute(layout)
        tables.append(table)
        deltas.append(delta)
        slow = [] if layout is None else slow_positions(layout)
        while len(slow) < prefix + extend + generated:  # generated tokens are text
            base = max((max(position) for position in slow), default=-1) + 1
            slow.append((base, base, base))
        prefixes.append(prefix)
        extends.append(extend)
        expected += slow[prefix : prefix + extend]
    ids = batch_positions(tables, deltas, prefixes, extends)
    assert ids.dtype == np.int64
    assert ids.shape == (3, sum(extends))
    assert [tuple(column) for column in ids.T.tolist()] == expected


@pytest.mark.case("4.4")
def test_a_decode_step_by_hand() -> None:
    # An image of 1 x 2 x 3 first: positions up to 2, six tokens; then text. A long image: 1 x 2 x 2 after one token.
    first, second = mrope_positions([(0, 5)], [(1, 2, 3)], seq=6), mrope_positions([(1, 4)], [(1, 2, 2)], seq=7)
    ids = batch_positions([first[0], None, second[0]], [first[1], None, second[1]], [6, 9, 8], [1, 1, 1])
    # The first goes on from 3; text alone is at its index; the second stood at 0, 1..2, 3, 4 and has one token after that.
    assert ids.tolist() == [[3, 9, 6]] * 3


def test_a_batch_leaves_its_tables_alone() -> None:
    table, delta = mrope_positions([(0, 3)], [(1, 2, 2)], seq=5)
    before = table.copy()
    batch_positions([table], [delta], [0], [5])[:] = -7
    assert table.tolist() == before.tolist()
    assert batch_positions([], [], [], []).shape == (3, 0)


@pytest.mark.parametrize("lengths", [(1, 1, 1, 2), (1, 2, 1, 1), (0, 1, 1, 1), (1, 1, 2, 1)], ids=str)
def test_lists_of_other_lengths_are_refused(lengths: tuple[int, int, int, int]) -> None:
    tables, deltas, prefixes, extends = ([None] * lengths[0], [None] * lengths[1], [0] * lengths[2], [1] * lengths[3])
    with pytest.raises(SpanError, match="one table, delta"):
        batch_positions(tables, deltas, prefixes, extends)
