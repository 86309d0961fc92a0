"""Rows of the GPU worker: cached rows written into text embeddings, and the cache itself. On the CPU, with one thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Row
from mm_plugin.cache import EmbeddingCache, embedding_key, encoder_key
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

REQUESTS, IMAGES, ROWS, EXTEND = 8, 3, 256, 1_024
VOCABULARY, PLACEHOLDER = 32_000, 31_999
OPERATIONS = 10_000


def rows() -> Iterator[Row]:
    """One step of eight requests, wide and narrow, and 10,000 operations of the cache."""
    work = "embedding, 8 requests x 3 images x 256 rows into 8,192 x"
    yield _step(f"{work} 1,024 bf16, all cached, 1 thread", 1_024, Bar(1.3, "floor"))
    yield _step("the same with hidden 8 (pure overhead)", 8, Bar(0.5, "ms"))
    yield _growth()
    yield from _cache()


def _item(index: int, offset: int) -> MultimodalDataItem:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(offset, offset + ROWS - 1)], feature=index)
    item.set_identity(index.to_bytes(32, "big"))
    return item


def _step(work: str, hidden: int, bar: Bar) -> Row:
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Embedding(VOCABULARY, hidden, dtype=torch.bfloat16)
    weight = table.weight.detach()
    total = REQUESTS * EXTEND
    model_ids = torch.randint(0, PLACEHOLDER, (total,), generator=generator)
    cache_ids = model_ids.clone()
    images = [torch.randn(ROWS, hidden, generator=generator).bfloat16() for _ in range(REQUESTS * IMAGES)]
    media, spans, text, cursor = [], [], [], 0
    for request in range(REQUESTS):
        items = [_item(request * IMAGES + image, 64 + image * (ROWS + 64)) for image in range(IMAGES)]
        for item in items:
            start, end = (request * EXTEND + bound for bound in item.offsets[0])
            model_ids[start : end + 1] = PLACEHOLDER
            cache_ids[start : end + 1] = torch.from_numpy(item.padding_sequence(ROWS))
            text.append((cursor, start))
            spans.append((start, end + 1))
            cursor = end + 1
        empty = np.zeros(EXTEND, dtype=np.int64)
        inputs = MultimodalInputs(mm_items=items, input_ids=empty, padded_input_ids=empty, token_modalities=empty)
        media.append(RequestMedia(inputs))
    text.append((cursor, total))
    batch = ForwardBatch(media, [0] * REQUESTS, [EXTEND] * REQUESTS)
    cache = EmbeddingCache(1 << 30)

    def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        return [images[item.feature] for item in items]

    def refuse(_items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        raise AssertionError("everything is cached")

    embed_mm_inputs(cache_ids, batch, table, {Modality.IMAGE: encode}, cache)

    def ours() -> torch.Tensor:
        output = embed_mm_inputs(cache_ids, batch, table, {Modality.IMAGE: refuse}, cache)
        assert not output.failed
        return output.input_embeds

    def merge() -> torch.Tensor:
        with torch.no_grad():
            embeds = table(model_ids)
            mask = (model_ids == PLACEHOLDER)[:, None].expand_as(embeds)
            return embeds.masked_scatter(mask, torch.cat(images))

    def floor() -> torch.Tensor:
        out = torch.empty((total, hidden), dtype=torch.bfloat16)
        for start, end in text:
            torch.index_select(weight, 0, model_ids[start:end], out=out[start:end])
        for (start, end), rows_of in zip(spans, images, strict=True):
            out[start:end].copy_(rows_of)
        return out

    def check(found: Any, expected: Any, least: Any) -> None:
        assert torch.equal(found, expected)
        assert torch.equal(found, least)

    return Row(work, ours, check, bar, ("masked_scatter merge", merge), ("index_select, slices", floor), threads=1)


def _growth() -> Row:
    """One prompt of 32,768 tokens with 63 images, in 64 chunks that cut each, against whole: the price of a chunk."""
    hidden, images, rows_of_one, chunk = 256, 63, 448, 512
    total = 32_768
    generator = torch.Generator().manual_seed(1)
    table = torch.nn.Embedding(VOCABULARY, hidden)
    ids = torch.randint(0, PLACEHOLDER, (total,), generator=generator)
    encoded = [torch.randn(rows_of_one, hidden, generator=generator) for _ in range(images)]
    items = []
    for index in range(images):
        start = 300 + index * chunk
        item = MultimodalDataItem(
            modality=Modality.IMAGE, offsets=[(start, start + rows_of_one - 1)], feature=np.array(index)
        )
        item.set_identity(index.to_bytes(32, "big"))
        items.append(item)
    empty = np.zeros(total, dtype=np.int64)

    def encode(called: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        return [encoded[int(item.feature)] for item in called]

    def run(size: int) -> torch.Tensor:
        inputs = MultimodalInputs(mm_items=items, input_ids=empty, padded_input_ids=empty, token_modalities=empty)
        media, parts = RequestMedia(inputs), []
        for start in range(0, total, size):
            batch = ForwardBatch([media], [start], [min(size, total - start)])
            step = embed_mm_inputs(ids[start : start + size], batch, table, {Modality.IMAGE: encode})
            parts.append(step.input_embeds)
        return torch.cat(parts)

    def check(found: Any, expected: Any, _floor: Any) -> None:
        assert torch.equal(found, expected)

    return Row(
        "one prompt of 32,768 tokens with 63 images, in 64 chunks that cut each, no cache",
        lambda: run(chunk),
        check,
        Bar(2, "reference"),
        ("the same whole", lambda: run(total)),
        threads=1,
    )


def _cache() -> Iterator[Row]:
    """1,000 keys in turns, all of which fit."""
    rows_of = torch.zeros(4, 8)
    encoded, dtype, device = Encoded(rows_of), rows_of.dtype, rows_of.device
    keys = [embedding_key(index.to_bytes(32, "big"), encoder_key("version", "torch.float32")) for index in range(1_000)]
    asked = keys * (OPERATIONS // len(keys))
    cache = EmbeddingCache(1 << 30)
    entries: OrderedDict[Any, Any] = OrderedDict()
    lock = threading.Lock()

    def put() -> int:
        for key in asked:
            cache.put(key, encoded)
        return cache.stats().entries

    def put_floor() -> int:
        for key in asked:
            with lock:
                entries[key] = encoded
                entries.move_to_end(key)
        return len(entries)

    def get() -> Any:
        for key in asked:
            found = cache.get(key, num_tokens=4, hidden=8, dtype=dtype, device=device)
        return found

    def get_floor() -> Any:
        for key in asked:
            with lock:
                found = entries[key]
                entries.move_to_end(key)
        return found

    def count(ours: Any, _reference: Any, floor: Any) -> None:
        assert ours == floor == len(keys)

    def same(ours: Any, _reference: Any, floor: Any) -> None:
        assert ours is floor is encoded

    floor = "OrderedDict and a lock"
    yield Row(
        "embedding cache, 10,000 sets", put, count, Bar(500_000, "ops"), floor=(floor, put_floor), operations=OPERATIONS
    )
    yield Row(
        "embedding cache, 10,000 gets", get, same, Bar(2e6, "ops"), floor=(floor, get_floor), operations=OPERATIONS
    )
