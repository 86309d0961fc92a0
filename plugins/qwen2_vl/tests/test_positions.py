"""Position ids are those of transformers' `get_rope_index`, at test time and as they were written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin import Modality, MultimodalDataItem
from mm_plugin.errors import SpanError
from mm_plugin.positions import extend_positions
from mm_plugin_qwen2vl.positions import positions

CONFIG = {"vision_config": {"spatial_merge_size": 2}}
TEXT, START, END, PAD = 5, 1, 2, 3
Grid = tuple[int, int, int]


def make_item(start: int, grid: Sequence[int], *, video: bool = False) -> MultimodalDataItem:
    t, h, w = grid
    return MultimodalDataItem(
        modality=Modality.VIDEO if video else Modality.IMAGE,
        offsets=[(start, start + t * h * w // 4 - 1)],
        model_specific_data={"video_grid_thw" if video else "image_grid_thw": np.array([grid])},
    )


def laid_out(segments: Sequence[Any]) -> tuple[list[MultimodalDataItem], int]:
    """Items and length of a prompt written as [kind, number of tokens or grid]."""
    items, cursor = [], 0
    for kind, value in segments:
        if kind == "text":
            cursor += value
            continue
        wrapped = not kind.endswith("_raw")
        cursor += wrapped
        items.append(make_item(cursor, value, video=kind.startswith("video")))
        cursor = items[-1].offsets[0][1] + 1 + wrapped
    return items, cursor


MROPE_CASES = [
    "one_image_middle", "image_at_start", "image_at_end", "raw_image_first_token", "two_images_text_between",
    "two_images_adjacent_wrapped", "two_images_adjacent_raw", "three_images", "tall_image", "one_token_image", "four_images_text",
    "video_t2", "video_long_small_frames", "video_at_start", "image_then_video", "video_then_image",
    "image_video_adjacent_wrapped", "two_videos_adjacent_wrapped", "image_video_image_video", "raw_image_raw_video_adjacent",
]  # fmt: skip


def test_every_golden_case_is_tested(golden: Callable[[str], Any]) -> None:
    assert [case["id"] for case in golden("models.json")["mrope"]] == MROPE_CASES


@pytest.mark.parametrize("name", MROPE_CASES)
def test_positions_are_those_that_were_written_down(golden: Callable[[str], Any], name: str) -> None:
    (case,) = [case for case in golden("models.json")["mrope"] if case["id"] == name]
    items, seq = laid_out(case["segments"])
    assert seq == case["seq"]
    found, delta = positions(items, seq=seq, config=CONFIG, options={})
    assert found.dtype == np.int64
    assert found.tolist() == case["positions"]
    assert (delta, type(delta)) == (case["delta"], int)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 5), st.tuples(st.just(1), st.integers(1, 8), st.integers(1, 8))), max_size=5
    ),
    tail=st.integers(0, 5),
)
def test_positions_equal_transformers(model: Any, parts: list[tuple[int, Grid]], tail: int) -> None:
    ids: list[int] = []
    segments: list[tuple[str, Any]] = []
    grids = [[t, 2 * h, 2 * w] for _, (t, h, w) in parts]
    for (text, (t, h, w)), grid in zip(parts, grids, strict=True):
        ids += [TEXT] * text + [START] + [PAD] * (t * h * w) + [END]
        segments += [("text", text), ("image", grid)]
    ids += [TEXT] * tail
    segments.append(("text", tail))
    if not ids:
        return
    items, seq = laid_out(segments)
    found, delta = positions(items, seq=seq, config=CONFIG, options={})
    expected, expected_delta = model.model.get_rope_index(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(token == PAD) for token in ids]], dtype=torch.int),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    assert found.tolist() == expected[:, 0].tolist()
    assert delta == int(expected_delta)


def test_the_merge_size_is_the_configs() -> None:
    item = make_item(0, (1, 3, 3))
    item.offsets[:] = [(0, 8)]
    found, delta = positions([item], seq=9, config={"vision_config": {"spatial_merge_size": 1}}, options={})
    assert found.tolist() == [[0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3]
    assert delta == 3 - 9


def test_a_span_that_does_not_fit_its_grid_is_refused() -> None:
    item = make_item(0, (1, 4, 6))
    item.offsets[:] = [(0, 3)]
    with pytest.raises(SpanError, match="span 0 must have 6 tokens for its grid 1 x 2 x 3, got 4"):
        positions([item], seq=9, config=CONFIG, options={})


def test_text_alone_counts_on() -> None:
    found, delta = positions([], seq=4, config=CONFIG, options={})
    assert found.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_text_continues_from_the_largest_of_all_axes(parts: list[tuple[bool, int, int, int, int]]) -> None:
    """The paper's rule, token by token; time is one of the axes, which transformers 5.24 ignores after a video."""
    segments: list[tuple[str, Any]] = []
    expected: list[tuple[int, int, int]] = []

    def text(count: int) -> None:
        for _ in range(count):
            expected.append((max(map(max, expected), default=-1) + 1,) * 3)

    for video, words, t, h, w in parts:
        segments += [("text", words), ("video" if video else "image", (t if video else 1, 2 * h, 2 * w))]
        text(words + 1)
        free = max(map(max, expected)) + 1
        expected += [
            (free + i, free + j, free + k) for i in range(t if video else 1) for j in range(h) for k in range(w)
        ]
        text(1)
    items, seq = laid_out(segments)
    found, delta = positions(items, seq=seq, config=CONFIG, options={})
    assert found.T.tolist() == [list(one) for one in expected]
    assert delta == found.max() + 1 - seq


@pytest.mark.case("4.6")
def test_generation_continues_after_a_long_video_at_the_end() -> None:
    items, seq = laid_out([("text", 3), ("video_raw", (7, 4, 6))])
    found, delta = positions(items, seq=seq, config=CONFIG, options={})
    assert extend_positions(found, delta, seq + 2)[:, seq:].tolist() == [[3 + 7, 3 + 7 + 1]] * 3
