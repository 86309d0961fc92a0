"""Pruned video: how many rows stay by hand, which ones by a slow loop, and any mix of pruned and whole in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from embed_media import media_of
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs, kept_per_frame, kept_positions, place_kept_positions, prune_video
from mm_plugin.errors import SizeError, SpanError
from mm_plugin.events import DeviceSync, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.positions import batch_positions, mrope_positions
from mm_plugin.transforms import retained_video_tokens

Grid = tuple[int, int, int]
GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))

# ------------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("grid", "rate", "total"),
    [
        ((4, 2, 3), 0.0, 24),
        ((4, 2, 3), 0.5, 12),
        ((4, 2, 3), 0.7, 7),  # 24 * 0.3 = 7.2
        ((4, 2, 3), 0.75, 6),
        ((4, 2, 3), 0.9, 6),  # 2.4, but one frame has 6
        ((1, 2, 3), 0.5, 6),  # one frame is never pruned
        ((8, 16, 16), 0.75, 512),
        ((3, 1, 1), 0.5, 1),  # 1.5
    ],
)
def test_the_kept_total_by_hand(grid: Grid, rate: float, total: int) -> None:
    assert retained_video_tokens(grid, rate) == total


@given(GRIDS, st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_the_kept_total_is_the_floor_of_the_share_and_at_least_a_frame(grid: Grid, rate: float) -> None:
    t, h, w = grid
    assert retained_video_tokens(grid, rate) == max(h * w, t * h * w * int(4 - 4 * rate) // 4)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_outside_of_zero_to_one_is_refused(rate: float) -> None:
    with pytest.raises(SizeError):
        retained_video_tokens((2, 2, 2), rate)


@pytest.mark.parametrize("grid", [(0, 2, 2), (2, -1, 2), (2, 2, 0)], ids=str)
def test_a_side_that_is_not_positive_is_refused(grid: Grid) -> None:
    with pytest.raises(SizeError):
        retained_video_tokens(grid, 0.5)


# ------------------------------------------------------------------ which


def slow_kept(rows: list[list[float]], grid: Grid, total: int) -> list[int]:
    """Of all places, those that differ most from the same place a frame earlier, the first frame before all, ties by place."""
    _, h, w = grid
    scored = []
    for place, row in enumerate(rows):
        if place < h * w:
            scored.append((-math.inf, place))
            continue
        other = rows[place - h * w]
        dot = sum(a * b for a, b in zip(row, other, strict=True))
        length = math.sqrt(sum(a * a for a in row)) * math.sqrt(sum(b * b for b in other))
        scored.append((-(1 - dot / length), place))
    return sorted(place for _, place in sorted(scored)[:total])


@given(GRIDS, st.integers(0, 2**31 - 1), st.data())
def test_the_rows_that_are_kept_are_those_of_a_slow_loop(grid: Grid, seed: int, data: st.DataObject) -> None:
    t, h, w = grid
    count = t * h * w
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32))
    total = data.draw(st.integers(1, count))
    kept_rows, kept = prune_video(rows, grid, total)
    expected = slow_kept(rows.double().tolist(), grid, total)
    assert kept.tolist() == expected
    assert kept.dtype == torch.int64
    assert kept_rows.tolist() == [rows[place].tolist() for place in expected]


def test_what_stands_still_goes_and_what_moves_stays() -> None:
    still, moved = [1.0, 0.0], [0.0, 1.0]
    # Frames of four places; place 2 changes in the second frame, place 0 in the third.
    rows = torch.tensor([still] * 4 + [still, still, moved, still] + [moved, still, moved, still])
    assert prune_video(rows, (3, 2, 2), 6)[1].tolist() == [0, 1, 2, 3, 6, 8]
    assert prune_video(rows, (3, 2, 2), 4)[1].tolist() == [0, 1, 2, 3]
    assert prune_video(rows, (3, 2, 2), 12)[1].tolist() == list(range(12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_kept_rows_have_the_type_and_the_bits_of_the_given_ones(dtype: torch.dtype) -> None:
    rows = torch.arange(1, 25.0).reshape(12, 2).to(dtype)
    kept_rows, kept = prune_video(rows, (3, 2, 2), 7)
    assert kept_rows.dtype == dtype
    assert torch.equal(kept_rows, rows[kept])


@pytest.mark.parametrize(("count", "total"), [(11, 4), (12, 0), (12, 13), (12, -1)])
def test_numbers_that_do_not_fit_together_are_refused(count: int, total: int) -> None:
    with pytest.raises(SpanError):
        prune_video(torch.zeros(count, 2), (3, 2, 2), total)


# ------------------------------------------------------------------ positions


@given(GRIDS, st.integers(0, 50), st.data())
def test_positions_of_kept_rows_are_those_of_the_whole_grid(grid: Grid, first: int, data: st.DataObject) -> None:
    t, h, w = grid
    count = t * h * w
    kept = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    whole, _ = mrope_positions([(first, first + count - 1)], [grid], seq=first + count)
    found = kept_positions(torch.tensor(kept), grid, first=first)
    assert found.dtype == torch.int64
    assert found.tolist() == whole[:, first:][:, kept].tolist()


# ------------------------------------------------------------------ in a batch

HIDDEN = 2
GRID: Grid = (3, 2, 2)
TOTAL = 6


def frames(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((12, HIDDEN)).astype(np.float32)


def encode_videos(items: Sequence[MultimodalDataItem]) -> list[Any]:
    out = []
    for item in items:
        rows, kept = prune_video(torch.from_numpy(item.feature), GRID, item.num_tokens)
        out.append(Encoded(rows, kept=kept))
    return out


def make_media(seq: int, *items_of: tuple[Modality, int, tuple[int, int]]) -> RequestMedia:
    items = []
    for modality, seed, span in items_of:
        feature = frames(seed) if modality is Modality.VIDEO else np.full((span[1] + 1 - span[0], HIDDEN), seed, "f")
        item = MultimodalDataItem(modality=modality, offsets=[span], feature=feature)
        item.set_identity(bytes([modality, seed]) * 16)
        items.append(item)
    return media_of(items, np.zeros(seq, np.int64))


ENCODERS = {
    Modality.VIDEO: encode_videos,
    Modality.IMAGE: lambda items: [torch.from_numpy(item.feature) for item in items],
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 11])
def test_a_pruned_video_is_chunked_beside_other_requests(size: int, cached: bool) -> None:
    assert retained_video_tokens(GRID, 0.5) == TOTAL
    pruned = make_media(11, (Modality.IMAGE, 9, (0, 1)), (Modality.VIDEO, 1, (3, 3 + TOTAL - 1)))
    whole = make_media(11, (Modality.VIDEO, 1, (0, 5)), (Modality.VIDEO, 2, (6, 9)))
    table = torch.nn.Embedding.from_pretrained(torch.full((5, HIDDEN), -1.0))
    cache = EmbeddingCache(1 << 16) if cached else None
    kept = {seed: slow_kept(frames(seed).astype(float).tolist(), GRID, total) for seed, total in ((1, 6), (2, 4))}
    rows = {seed: frames(seed)[kept[seed]].tolist() for seed in kept}
    expected = {
        0: [[9.0] * 2] * 2 + [[-1.0] * 2] + rows[1] + [[-1.0] * 2] * 2,
        1: rows[1] + rows[2] + [[-1.0] * 2],
        2: [[-1.0] * 2] * 11,
    }
    for start in range(0, 11, size):
        extend = min(size, 11 - start)
        ids = [media.inputs.padded_input_ids[start : start + extend] for media in (pruned, whole)]
        flat = torch.from_numpy(np.concatenate([*ids, np.zeros(extend, np.int64)]))
        out = embed_mm_inputs(
            flat, ForwardBatch([pruned, whole, None], [start] * 3, [extend] * 3), table, ENCODERS, cache
        )
        assert out.failed == ()
        found = out.input_embeds.tolist()
        for request in range(3):
            assert found[request * extend : (request + 1) * extend] == expected[request][start : start + extend]
        for request, item, span, seed in ((0, 1, (3, 8), 1), (1, 0, (0, 5), 1), (1, 1, (6, 9), 2)):
            meets = span[0] < start + extend and start <= span[1]
            assert ((request, item) in out.kept) == meets
            if meets:
                assert out.kept[request, item].tolist() == kept[seed]
        assert (0, 0) not in out.kept


def test_kept_indices_are_kept_without_a_larger_buffer_and_are_counted() -> None:
    indices = torch.arange(1000)

    def encode(items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        return [Encoded(torch.zeros(item.num_tokens, HIDDEN), kept=indices[: item.num_tokens]) for item in items]

    media, cache = make_media(6, (Modality.VIDEO, 1, (0, 5))), EmbeddingCache(1 << 16)
    table = torch.nn.Embedding(5, HIDDEN)
    out = embed_mm_inputs(
        torch.zeros(6, dtype=torch.int64), ForwardBatch([media], [0], [6]), table, {Modality.VIDEO: encode}, cache
    )
    assert out.kept[0, 0].tolist() == list(range(6))
    assert out.kept[0, 0].untyped_storage().nbytes() == 6 * 8
    assert cache.stats().bytes == 6 * HIDDEN * 4 + 6 * 8


@pytest.mark.parametrize(
    "kept", [torch.arange(5), torch.arange(6).float(), torch.zeros(6, 1, dtype=torch.int64), list(range(6))], ids=str
)
def test_kept_indices_that_do_not_fit_the_rows_fail_the_item(kept: Any) -> None:
    media = make_media(6, (Modality.VIDEO, 1, (0, 5)))
    encode = {Modality.VIDEO: lambda items: [Encoded(torch.zeros(6, HIDDEN), kept=kept)]}
    out = embed_mm_inputs(
        torch.zeros(6, dtype=torch.int64), ForwardBatch([media], [0], [6]), torch.nn.Embedding(5, HIDDEN), encode
    )
    assert [(failure.request, failure.item) for failure in out.failed] == [(0, 0)]


def test_a_pruned_span_has_its_place_in_the_prompt_and_its_positions_on_the_device() -> None:
    grid, kept = (4, 2, 3), torch.tensor([0, 1, 2, 3, 4, 5, 8, 13, 22])
    full, full_delta = mrope_positions([(2, 25)], [grid], seq=30)
    table, delta = mrope_positions([(2, 2 + len(kept) - 1)], [grid], seq=30 - 24 + len(kept), pruned=[True])
    # The kept columns of the whole video's positions, and text before and after as if nothing were missing.
    expected = np.concatenate([full[:, :2], full[:, 2:26][:, kept.numpy()], full[:, 26:]], axis=1)
    assert full_delta - delta == len(kept) - 24
    item = MultimodalDataItem(modality=Modality.VIDEO, offsets=[(2, 2 + len(kept) - 1)], feature=np.zeros(1))
    item.set_identity(b"v" * 32)
    seq = table.shape[1]
    ids = np.zeros(seq, np.int64)
    media = RequestMedia(
        MultimodalInputs(
            mm_items=[item],
            input_ids=ids,
            padded_input_ids=ids,
            token_modalities=ids,
            mrope_positions=table,
            mrope_position_delta=delta,
        )
    )
    encoder = {Modality.VIDEO: lambda items: [Encoded(torch.zeros(len(kept), 4), kept=kept) for _ in items]}
    for size in (1, 4, 7, seq):
        columns = []
        for start in range(0, seq, size):
            extend = min(size, seq - start)
            batch = ForwardBatch([None, media], [5, start], [2, extend])
            flat = torch.zeros(2 + extend, dtype=torch.int64)
            out = embed_mm_inputs(flat, batch, torch.nn.Embedding(3, 4), encoder)
            step = batch_positions([None, table], [None, delta], [5, start], [2, extend])
            positions = torch.from_numpy(step)
            place_kept_positions(positions, batch, out.kept, lambda _: grid)
            assert positions[:, :2].tolist() == [[5, 6]] * 3  # the other request's are left alone
            columns.append(positions[:, 2:])
        assert np.array_equal(torch.cat(columns, dim=1).numpy(), expected)


def test_a_pruned_span_is_shorter_than_its_grid_and_others_are_not() -> None:
    for spans, pruned in (([(0, 7)], [False]), ([(0, 24)], [True]), ([(0, 7)], None), ([(0, 7)], [True, True])):
        with pytest.raises(SpanError):
            mrope_positions(spans, [(4, 2, 3)], seq=30, pruned=pruned)


def test_rows_of_each_frame_are_read_back_and_reported() -> None:
    heard: list[object] = []
    counts = kept_per_frame(torch.tensor([0, 1, 5, 8, 22]), (4, 2, 3), Observers([heard.append]))
    assert counts == [3, 1, 0, 1]
    assert [type(event) for event in heard] == [DeviceSync]
