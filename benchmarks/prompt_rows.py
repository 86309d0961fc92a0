"""Rows over token ids: sentinels, token modalities, M-RoPE positions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import ProcessorMixin, Qwen2_5_VLModel, Qwen2VLModel

from benchmarks.harness import Bar, Row
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of
from mm_plugin.positions import mrope_positions
from mm_plugin.scheduler import pad_token_pairs
from mm_plugin_qwen2vl.positions import positions
from mm_plugin_qwen2vl.testing import qwen_tokenizer, tiny_config
from mm_plugin_qwen25vl import positions as timed
from mm_plugin_qwen25vl import testing as qwen25vl

SEQ, ITEMS, ROWS, SIDE = 131_072, 64, 1_024, 32
PERIOD = SEQ // ITEMS
LEAD = PERIOD - ROWS - 1  # text before an item, its start token included; one end token follows the item


def rows() -> Iterator[Row]:
    """A prompt of 131,072 ids, half of them of 64 images, and a video of 32,768 tokens."""
    config = tiny_config(qwen_tokenizer())
    ids = _prompt(config)
    items = _items()
    spans = [item.offsets[0] for item in items]
    pads = [(start, end + 1, np.array(item.padding_values())) for item, (start, end) in zip(items, spans, strict=True)]
    pair = (config.vision_start_token_id, config.vision_end_token_id)

    def pad_floor() -> np.ndarray:
        out = ids.copy()
        for start, end, values in pads:
            out[start:end].reshape(-1, 4)[:] = values
        return out

    def scan() -> np.ndarray:
        out = ids.copy()
        edges = np.flatnonzero((ids == pair[0]) | (ids == pair[1])).tolist()
        for index, (_, _, values) in enumerate(pads):
            out[edges[2 * index] + 1 : edges[2 * index + 1]].reshape(-1, 4)[:] = values
        return out

    def equal(ours: Any, reference: Any, floor: Any) -> None:
        assert np.array_equal(ours, floor)
        assert reference is None or np.array_equal(ours, reference)
        assert np.array_equal(ours == ids, ids != config.image_token_id)

    yield Row(
        "sentinels into 131,072 ids, 64 items of 1,024: by offsets",
        lambda: pad_by_offsets(ids, items),
        equal,
        Bar(2, "floor"),
        floor=("numpy slices", pad_floor),
    )
    yield Row(
        "the same ids without offsets: token pairs",
        lambda: pad_token_pairs(ids, items, [pair])[0],
        equal,
        Bar(2, "floor"),
        ("numpy: one scan, no checks", scan),
        ("numpy slices", pad_floor),
    )
    yield _token_modalities(config, ids, items)
    model = Qwen2VLModel(config).eval()
    yield _image_positions(model, ids, items, spans)
    yield _video_positions(model)
    yield _timed_positions(Qwen2_5_VLModel(qwen25vl.tiny_config(qwen25vl.qwen_tokenizer())).eval())
    yield _frame_spans(model)


def _prompt(config: Any) -> np.ndarray:
    """Per item: text, start token, 1,024 placeholders, end token."""
    ids = np.random.default_rng(0).integers(0, 200, SEQ)
    for first in range(0, SEQ, PERIOD):
        ids[first + LEAD - 1] = config.vision_start_token_id
        ids[first + LEAD : first + LEAD + ROWS] = config.image_token_id
        ids[first + LEAD + ROWS] = config.vision_end_token_id
    return ids


def _items() -> list[MultimodalDataItem]:
    items = []
    for index in range(ITEMS):
        start = index * PERIOD + LEAD
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=[(start, start + ROWS - 1)],
            model_specific_data={"image_grid_thw": np.array([[1, 2 * SIDE, 2 * SIDE]])},
        )
        item.set_identity(index.to_bytes(32, "big"))
        items.append(item)
    return items


def _token_modalities(config: Any, ids: np.ndarray, items: list[MultimodalDataItem]) -> Row:
    spans = [item.offsets[0] for item in items]
    names = SimpleNamespace(
        image_token_ids=[config.image_token_id], video_token_ids=[config.video_token_id], audio_token_ids=[]
    )
    listed = [ids.tolist()]

    def floor() -> np.ndarray:
        out = np.zeros(SEQ, dtype=np.int64)
        for start, end in spans:
            out[start : end + 1] = 1
        return out

    def check(ours: Any, reference: Any, floor: Any) -> None:
        assert np.array_equal(ours, floor)
        assert ours.tolist() == reference[0]

    return Row(
        "token modalities of the same prompt",
        lambda: token_modalities_of(items, SEQ),
        check,
        Bar(2, "floor"),
        ("transformers token types", lambda: ProcessorMixin.create_mm_token_type_ids(names, listed)),
        ("numpy slices", floor),
    )


def _check_positions(ours: Any, reference: Any, floor: Any) -> None:
    ids, delta = ours
    assert np.array_equal(ids, floor[0])
    assert delta == floor[1]
    assert np.array_equal(ids, reference[0][:, 0].numpy())
    assert delta == reference[1].item()


def _positions_floor(spans: list[tuple[int, int]], grid: tuple[int, int, int], seq: int) -> tuple[np.ndarray, int]:
    """The least: one array, filled from slices of one range; every span has the same grid."""
    t, h, w = grid
    end = seq - len(spans) * (t * h * w - max(grid))
    out, steps = np.empty((3, seq), dtype=np.int64), np.arange(end)
    cursor = free = 0
    for start, last in spans:
        out[:, cursor:start] = steps[free : free + start - cursor]
        free += start - cursor
        block = out[:, start : last + 1].reshape(3, t, h, w)  # a view: only the last axis is split
        block[0] = steps[free : free + t, None, None]
        block[1] = steps[free : free + h, None]
        block[2] = steps[free : free + w]
        free += max(grid)
        cursor = last + 1
    out[:, cursor:] = steps[free:]
    return out, end - seq


def _image_positions(model: Any, ids: np.ndarray, items: list[MultimodalDataItem], spans: list[tuple[int, int]]) -> Row:
    config = {"vision_config": {"spatial_merge_size": 2}}
    tensor = torch.from_numpy(ids)[None]
    types = (tensor == model.config.image_token_id).int()
    grids = torch.tensor([[1, 2 * SIDE, 2 * SIDE]] * ITEMS)
    return Row(
        "M-RoPE positions of the same prompt",
        lambda: positions(items, seq=SEQ, config=config, options={}),
        _check_positions,
        Bar(1.5, "floor"),
        ("transformers get_rope_index", lambda: model.get_rope_index(tensor, types, image_grid_thw=grids)),
        ("numpy slices", lambda: _positions_floor(spans, (1, SIDE, SIDE), SEQ)),
    )


def _video_positions(model: Any) -> Row:
    rows, text = SIDE**3, 16
    seq, spans = rows + 2 * text, [(text, text + rows - 1)]
    types = torch.zeros((1, seq), dtype=torch.int)
    types[0, text:-text] = 2
    grid = torch.tensor([[SIDE, 2 * SIDE, 2 * SIDE]])
    return Row(
        "M-RoPE positions of one 32,768-token video",
        lambda: mrope_positions(spans, [(SIDE, SIDE, SIDE)], seq=seq),
        _check_positions,
        Bar(1.5, "floor"),
        (
            "transformers get_rope_index",
            lambda: model.get_rope_index(torch.zeros_like(types), types, video_grid_thw=grid),
        ),
        ("numpy slices", lambda: _positions_floor(spans, (SIDE, SIDE, SIDE), seq)),
    )


def _timed_positions(model: Any) -> Row:
    """The same video in Qwen2.5-VL, at two frames a second: half a second a step, which the model counts in halves."""
    rows, text = SIDE**3, 16
    seq, spans = rows + 2 * text, [(text, text + rows - 1)]
    types = torch.zeros((1, seq), dtype=torch.int)
    types[0, text:-text] = 2
    grid = torch.tensor([[SIDE, 2 * SIDE, 2 * SIDE]])
    fields = {"video_grid_thw": grid.numpy(), "second_per_grid_ts": np.array([0.5])}
    item = MultimodalDataItem(modality=Modality.VIDEO, offsets=spans, model_specific_data=fields)
    config = {"vision_config": {"spatial_merge_size": 2, "tokens_per_second": 2}}
    seconds = torch.tensor([0.5])
    return Row(
        "M-RoPE positions of that video by its seconds (Qwen2.5-VL)",
        lambda: timed.positions([item], seq=seq, config=config, options={}),
        _check_positions,
        Bar(1.5, "floor"),
        (
            "transformers get_rope_index",
            lambda: model.get_rope_index(
                torch.zeros_like(types), types, video_grid_thw=grid, second_per_grid_ts=seconds
            ),
        ),
        ("numpy slices", lambda: _positions_floor(spans, (SIDE, SIDE, SIDE), seq)),
    )


def _frame_spans(model: Any) -> Row:
    """A video whose frames stand one by one between their times in words: 128 spans of 256 tokens, 8 tokens of text before each."""
    count, side, text = 128, 16, 8
    period = text + side * side
    spans = [(index * period + text, (index + 1) * period - 1) for index in range(count)]
    seq, grids = count * period + text, [(1, side, side)] * count
    types = torch.zeros((1, seq), dtype=torch.int)
    for start, last in spans:
        types[0, start : last + 1] = 1
    patches = torch.tensor([[1, 2 * side, 2 * side]] * count)
    return Row(
        "M-RoPE positions of a video as 128 frame spans",
        lambda: mrope_positions(spans, grids, seq=seq),
        _check_positions,
        Bar(1, "ms"),
        (
            "transformers get_rope_index",
            lambda: model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=patches),
        ),
        ("numpy slices", lambda: _positions_floor(spans, (1, side, side), seq)),
    )
