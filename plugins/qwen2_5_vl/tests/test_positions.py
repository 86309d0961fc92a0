"""Position ids: those that were written down, transformers' for images, and the paper's rule, token by token, for videos."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_plugin import Modality, ModelProcessor, MultimodalDataItem, MultimodalInputs, VideoFrames
from mm_plugin.errors import SpanError
from mm_plugin.positions import batch_positions, extend_positions, slice_positions
from mm_plugin.testing.plugin_tests import moving_frames
from mm_plugin_qwen25vl.positions import positions

TEXT, START, END, IMAGE, VIDEO = 5, 1, 2, 3, 4
Grid = tuple[int, int, int]
ONE_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def config(tokens_per_second: float = 2) -> dict[str, Any]:
    return {"vision_config": {"spatial_merge_size": 2, "tokens_per_second": tokens_per_second}}


def make_item(kind: str, start: int, grid: Sequence[int], seconds: float | None = None) -> MultimodalDataItem:
    t, h, w = grid
    video = kind.startswith("video")
    fields: dict[str, Any] = {"video_grid_thw" if video else "image_grid_thw": np.array([grid])}
    if video and seconds is not None:
        fields["second_per_grid_ts"] = np.array([seconds])
    return MultimodalDataItem(
        modality=Modality.VIDEO if video else Modality.IMAGE,
        offsets=[(start, start + t * h * w // 4 - 1)],
        model_specific_data=fields,
    )


def laid_out(segments: Sequence[Any], seconds: Sequence[float]) -> tuple[list[MultimodalDataItem], int]:
    """Items and length of a prompt written as [kind, number of tokens or grid]; `_raw` has no tokens around it."""
    items, cursor, rest = [], 0, iter(seconds)
    for kind, value in segments:
        if kind == "text":
            cursor += value
            continue
        wrapped = not kind.endswith("_raw")
        cursor += wrapped
        items.append(make_item(kind, cursor, value, next(rest) if kind.startswith("video") else None))
        cursor = items[-1].offsets[0][1] + 1 + wrapped
    return items, cursor


def by_the_paper(segments: Sequence[Any], seconds: Sequence[float], rate: float) -> list[list[int]]:
    """Token by token: text counts on from the largest id so far; a video's time is its seconds times a rate."""
    ids: list[list[int]] = [[], [], []]
    rest = iter(seconds)

    def text(count: int) -> None:
        for _ in range(count):
            free = max((max(axis) for axis in ids if axis), default=-1) + 1
            for axis in ids:
                axis.append(free)

    for kind, value in segments:
        if kind == "text":
            text(value)
            continue
        text(1)
        t, h, w = value
        step = np.float32(next(rest)) if kind == "video" else np.float32(0)
        free = max(max(axis) for axis in ids) + 1
        for frame in range(t):
            time = int(np.float32(np.float32(frame) * step) * np.float32(rate))
            for row in range(h // 2):
                for column in range(w // 2):
                    for axis, offset in zip(ids, (time, row, column), strict=True):
                        axis.append(free + offset)
        text(1)
    return ids


def golden_cases() -> list[str]:
    return [
        "one_image_middle|tps25|spgNone", "image_at_end|tps2|spgNone", "two_images_text_between|tps2|spgNone",
        "two_images_adjacent_wrapped|tps25|spgNone", "three_images|tps2|spgNone", "raw_image_first_token|tps2|spgNone",
        "video_t2|tps2|spg[0.5]", "video_t2|tps2|spg[1.0]", "video_t2|tps25|spg[0.5]", "video_t2|tps25|spg[2.0]",
        "video_t2|tps2|spgNone", "video_long_small_frames|tps2|spg[1.0]", "video_long_small_frames|tps25|spg[1.0]",
        "video_long_small_frames|tps2|spg[0.0834168]", "video_long_small_frames|tps25|spg[0.06666667]",
        "video_long_small_frames|tps2|spg[0.833333333]", "video_long_small_frames|tps25|spg[0.08]",
        "video_at_start|tps2|spg[1.0]", "video_at_end|tps2|spg[2.0]", "image_then_video|tps2|spg[1.0]",
        "image_then_video|tps25|spg[0.5]", "video_then_image|tps25|spg[2.0]", "video_image_video|tps25|spg[1.0, 0.5]",
        "two_videos_adjacent_wrapped|tps2|spg[2.0, 0.5]", "two_videos_adjacent_wrapped|tps25|spgNone",
        "image_video_image_video|tps2|spg[1.0, 2.0]", "image_video_image_video|tps25|spg[0.5, 0.5]", "video_t1|tps2|spg[1.0]",
        "video_wider_than_long|tps2|spg[1.0]", "raw_image_raw_video_adjacent|tps2|spg[1.0]",
    ]  # fmt: skip


def test_every_golden_case_is_tested(golden: Callable[[str], Any]) -> None:
    assert [case["id"] for case in golden("models.json")["mrope"]] == golden_cases()


@pytest.mark.parametrize("name", golden_cases())
def test_positions_are_those_that_were_written_down(golden: Callable[[str], Any], name: str) -> None:
    (case,) = [case for case in golden("models.json")["mrope"] if case["id"] == name]
    seconds = case["seconds"] or [1.0] * 4  # those without were written down with a second a step
    items, seq = laid_out(case["segments"], seconds)
    assert seq == case["seq"]
    found, delta = positions(items, seq=seq, config=config(case["tokens_per_second"]), options={})
    assert found.dtype == np.int64
    assert found.tolist() == case["positions"]
    assert (delta, type(delta)) == (case["delta"], int)


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.integers(1, 5)),
        st.tuples(st.just("image"), st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6))),
        st.tuples(st.just("video"), st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))),
    ),
    min_size=1,
    max_size=6,
).map(lambda parts: [(kind, v if kind == "text" else (v[0], 2 * v[1], 2 * v[2])) for kind, v in parts])  # type: ignore[index]


@settings(max_examples=150)
@given(PARTS, st.lists(st.floats(0, 10), min_size=6, max_size=6), st.sampled_from([1, 2, 2.5, 4, 25]))
def test_positions_follow_the_paper_token_by_token(
    segments: list[tuple[str, Any]], seconds: list[float], rate: float
) -> None:
    items, seq = laid_out(segments, seconds)
    found, delta = positions(items, seq=seq, config=config(rate), options={})
    assert found.tolist() == by_the_paper(segments, seconds, rate)
    assert delta == found.max() + 1 - seq


@settings(max_examples=100)
@given(PARTS, st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0]), min_size=6, max_size=6))
def test_spans_have_transformers_positions_and_images_the_text_after_them_too(
    model: Any, segments: list[tuple[str, Any]], seconds: list[float]
) -> None:
    ids: list[int] = []
    grids: dict[str, list[Any]] = {"image": [], "video": []}
    for kind, value in segments:
        if kind == "text":
            ids += [TEXT] * value
            continue
        grids[kind].append(value)
        t, h, w = value
        ids += [START, *[{"image": IMAGE, "video": VIDEO}[kind]] * (t * h * w // 4), END]
    items, seq = laid_out(segments, seconds)
    found, delta = positions(items, seq=seq, config=config(), options={})
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]], dtype=torch.int)
    expected, expected_delta = model.model.get_rope_index(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
        second_per_grid_ts=torch.tensor(seconds),
    )
    theirs = expected[:, 0].numpy()
    if not grids["video"]:
        assert found.tolist() == theirs.tolist()
        assert delta == int(expected_delta)
    for item in items:
        ((start, end),) = item.offsets
        left, right = (table[:, start : end + 1] - table[1, start] for table in (found, theirs))
        assert left.tolist() == right.tolist()


@pytest.mark.case("4.1")
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.5, [0, 1, 2, 3]), (1.5, [0, 3, 6, 9]), (0.25, [0, 0, 1, 1]), (0.75, [0, 1, 3, 4]), (0.0, [0, 0, 0, 0])],
)
def test_a_fraction_of_a_second_is_scaled_before_it_is_cut(seconds: float, expected: list[int]) -> None:
    items, seq = laid_out([("video", (4, 2, 2))], [seconds])
    found, _ = positions(items, seq=seq, config=config(), options={})
    assert (found[0, 1:-1] - 1).tolist() == expected


@pytest.mark.case("4.1")
@pytest.mark.parametrize(("fps", "expected"), [(4.0, [0, 1, 2, 3]), (2.0, [0, 2, 4, 6]), (1.0, [0, 4, 8, 12])])
def test_the_rate_of_the_sampled_frames_is_the_time_axis(
    processor: ModelProcessor, fps: float, expected: list[int]
) -> None:
    output = processor.process(ONE_VIDEO, videos=[VideoFrames(moving_frames(8), fps=fps)], video_min_pixels=28 * 28)
    assert output.mm_items[0].second_per_grid_ts.tolist() == [2 / fps]
    assert output.mrope_positions is not None
    times = np.unique(output.mrope_positions[0, output.token_modalities == 2])
    assert (times - times[0]).tolist() == expected


@pytest.mark.case("4.2")
def test_a_video_without_its_seconds_is_an_error() -> None:
    item = make_item("video", 0, (2, 2, 2))
    with pytest.raises(SpanError, match="no second_per_grid_ts"):
        positions([item], seq=4, config=config(), options={})


@pytest.mark.case("4.2")
@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_scheduler_gets_the_positions_that_the_processor_gave(processor: ModelProcessor, seconds: float) -> None:
    video = VideoFrames(moving_frames(6), fps=2 / seconds)
    output = processor.process(f"a {ONE_VIDEO} b", videos=[video], video_min_pixels=28 * 28)
    inputs = MultimodalInputs.from_processor_output(output)
    again, delta = positions(
        inputs.mm_items, seq=len(output.input_ids), config=dict(processor.checkpoint.config), options={}
    )
    assert np.array_equal(again, output.mrope_positions)
    assert delta == output.mrope_position_delta


@pytest.mark.case("4.4")
def test_a_request_does_not_pass_its_delta_on(processor: ModelProcessor) -> None:
    before = processor.process("a b c")
    video = processor.process(f"a {ONE_VIDEO}", videos=[VideoFrames(moving_frames(4), fps=1)])
    after = processor.process("a b c")
    assert video.mrope_position_delta not in (None, 0)
    for field in ("mrope_position_delta", "mrope_positions", "input_ids"):
        assert np.array_equal(getattr(before, field), getattr(after, field))


@pytest.mark.case("4.6")
@pytest.mark.parametrize("seconds", [0.1, 5.0])
def test_generation_continues_from_the_largest_of_all_axes_also_after_a_video_at_the_end(seconds: float) -> None:
    items, seq = laid_out([("text", 3), ("video_raw", (3, 4, 6))], [seconds])
    found, delta = positions(items, seq=seq, config=config(), options={})
    longer = extend_positions(found, delta, seq + 4)
    largest = int(found.max())
    assert largest == 3 + max(int(2 * seconds * 2), 2)
    assert longer[:, seq:].tolist() == [[largest + 1 + n for n in range(4)]] * 3
    for start in range(seq + 4):  # a prefill after a retraction, cut anywhere
        assert slice_positions(found, delta, start, seq + 4 - start).tolist() == longer[:, start:].tolist()
    assert batch_positions([found], [delta], [seq + 3], [1]).tolist() == [[largest + 4]] * 3


@pytest.mark.case("4.7")
def test_positions_and_delta_travel_with_the_request(processor: ModelProcessor) -> None:
    output = processor.process(f"a {ONE_VIDEO} b", videos=[VideoFrames(moving_frames(4), fps=1)])
    inputs = MultimodalInputs.from_processor_output(output)
    assert output.mrope_positions is not None
    # What a scheduler sends on: plain integers, so that any wire carries them.
    sent = msgspec.msgpack.encode(
        {
            "delta": inputs.mrope_position_delta,
            "shape": output.mrope_positions.shape,
            "ids": output.mrope_positions.tobytes(),
        }
    )
    got = msgspec.msgpack.decode(sent)
    table = np.frombuffer(got["ids"], dtype=np.int64).reshape(got["shape"])
    seq = len(output.input_ids)
    (decoded,) = {tuple(row) for row in batch_positions([table], [got["delta"]], [seq], [1]).tolist()}
    assert decoded == (int(output.mrope_positions.max()) + 1,)


@pytest.mark.case("4.9")
def test_one_video_at_two_rates_has_two_time_axes_and_two_identities(processor: ModelProcessor) -> None:
    outputs = [processor.process(ONE_VIDEO, videos=[VideoFrames(moving_frames(8), fps=fps)]) for fps in (1, 30)]
    slow, fast = (np.unique(output.mrope_positions[0, output.token_modalities == 2]) - 1 for output in outputs)
    assert slow.tolist() == [0, 4, 8, 12]
    assert fast.tolist() == [0]  # four steps of a fifteenth of a second, of which the model counts halves
    assert outputs[0].mm_items[0].identity != outputs[1].mm_items[0].identity
    assert np.array_equal(outputs[0].mm_items[0].feature, outputs[1].mm_items[0].feature)


def test_a_day_between_two_frames_makes_nothing_of_its_length() -> None:
    items, seq = laid_out([("text", 2), ("video", (3, 2, 2)), ("text", 2)], [86_400.0])
    tracemalloc.start()
    found, delta = positions(items, seq=seq, config=config(25), options={})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[0, 3:6].tolist() == [3, 3 + 25 * 86_400, 3 + 50 * 86_400]
    assert found[:, -1].tolist() == [3 + 50 * 86_400 + 3] * 3
    assert delta == found.max() + 1 - seq
    assert most < 1 << 16  # positions up to there would be 35 MB


def test_a_config_that_says_nothing_has_four_tokens_a_second() -> None:
    items, seq = laid_out([("video", (3, 2, 2))], [1.0])
    found, _ = positions(items, seq=seq, config={}, options={})
    assert found[0].tolist() == [0, 1, 5, 9, 10]


def test_a_span_that_does_not_fit_its_grid_is_refused() -> None:
    item = make_item("video", 0, (2, 4, 6), 1.0)
    item.offsets[:] = [(0, 3)]
    with pytest.raises(SpanError, match="span 0 must have 12 tokens for its grid 2 x 2 x 3, got 4"):
        positions([item], seq=9, config=config(), options={})


def test_text_alone_counts_on() -> None:
    found, delta = positions([], seq=4, config=config(), options={})
    assert found.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0
