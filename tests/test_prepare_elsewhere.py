"""Media inputs prepared where they are encoded: everything but the identity is what preparing at once gives, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_tasks import CASES, QWEN, png

import mm_plugin_qwen2vl.testing
from mm_plugin import (
    Encoded,
    ForwardBatch,
    LimitError,
    MediaError,
    MultimodalInputs,
    Registry,
    RequestMedia,
    UsageError,
    discover,
    embed_mm_inputs,
    encode_items,
    wire,
)
from mm_plugin.cache import EmbeddingCache
from mm_plugin.scheduler import Lifecycle

ITEMWISE = {name: case for name, case in CASES.items() if name != "paligemma"}


@pytest.fixture(scope="module")
def here() -> Iterator[Registry]:
    with discover() as opened:
        yield opened


@pytest.fixture(scope="module")
def worker() -> Iterator[Registry]:
    """What another process would have: a registry of its own."""
    with discover() as opened:
        yield opened


@pytest.fixture(scope="module", params=ITEMWISE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any]:
    make, prompt, media = ITEMWISE[request.param]
    return make(tmp_path_factory.mktemp(request.param) / "checkpoint"), prompt, media


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path_factory.mktemp("qwen") / "checkpoint")


def fresh(media: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {kind: values() for kind, values in media.items()}


def rows_of(found: Any) -> torch.Tensor:
    assert isinstance(found, Encoded), found
    rows: torch.Tensor = found.embeddings
    return rows


def test_all_but_the_identity_and_the_feature_is_equal(model: Any, here: Registry, worker: Registry) -> None:
    folder, prompt, media = model
    processor = here.load_processor(folder)
    now = processor.process(prompt, **fresh(media))
    later, again = (
        each.load_processor(folder).process(prompt, **fresh(media), prepare="worker") for each in (here, worker)
    )
    assert np.array_equal(now.input_ids, later.input_ids)
    assert np.array_equal(now.token_modalities, later.token_modalities)
    assert (now.mrope_positions is None) == (later.mrope_positions is None)
    if now.mrope_positions is not None:
        assert np.array_equal(now.mrope_positions, later.mrope_positions)
    assert (now.mrope_position_delta, now.usage) == (later.mrope_position_delta, later.usage)
    for one, two, three in zip(now.mm_items, later.mm_items, again.mm_items, strict=True):
        assert (one.modality, one.offsets, one.attention) == (two.modality, two.offsets, two.attention)
        assert one.model_specific_data.keys() == two.model_specific_data.keys()
        for name, value in one.model_specific_data.items():
            assert np.array_equal(value, two.model_specific_data[name])
        assert (two.feature, two.precomputed_embeddings) == (None, None)
        assert two.is_valid()
        assert two.identity != one.identity  # a kind of its own
        assert two.identity == three.identity  # equal on every machine
        assert two.pad_values is not None
    assert len({item.identity for item in later.mm_items}) == len(later.mm_items)


@pytest.mark.parametrize("over_wire", [False, True])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "split"])
def test_embeddings_are_equal_bit_for_bit(
    model: Any, here: Registry, worker: Registry, over_wire: bool, parts: bool
) -> None:
    folder, prompt, media = model
    processor = here.load_processor(folder)
    encoder = worker.load_encoder(folder, dtype=torch.float32)
    expected = [rows_of(one) for one in encode_items(processor.process(prompt, **fresh(media)).mm_items, encoder)]
    output = processor.process(prompt, **fresh(media), prepare="worker")
    inputs, contents = output.split() if parts else (MultimodalInputs.from_processor_output(output), [])
    if over_wire:
        inputs, contents = wire.unpack(b"".join(wire.pack([inputs, contents])))
    if parts:
        assert all(item.task is None for item in inputs.mm_items)
        inputs.attach(contents)
    there = worker.load_processor(**output.mm_items[0].task.model.arguments())
    cache = EmbeddingCache(1 << 28)
    found = encode_items(inputs.mm_items, encoder, cache, prepare=there.prepare_tasks)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(rows_of(mine), other)
    # A step finds them, chunk by chunk, and prepares nothing.
    length, hidden = len(inputs.input_ids), expected[0].shape[1]
    table = torch.nn.Embedding(int(inputs.input_ids.max()) + 1, hidden)
    media_of, rows = RequestMedia(inputs), []
    for start in range(0, length, 7):
        ids = torch.from_numpy(inputs.input_ids[start : start + 7].copy())
        batch = ForwardBatch([media_of], [start], [len(ids)])
        step = embed_mm_inputs(ids, batch, table, encoder, cache)
        assert step.failed == ()
        rows.append(step.input_embeds)
    places = [place for first, last, _ in inputs.spans for place in range(first, last + 1)]
    ordered = [expected[index] for index in dict.fromkeys(index for _, _, index in inputs.spans)]
    assert torch.equal(torch.cat(rows)[places], torch.cat(ordered))


def test_chunks_of_a_request_prepare_and_encode_an_item_once(here: Registry, qwen: Path) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)
    asked: list[int] = []

    def prepare(tasks: Any) -> Any:
        asked.append(len(tasks))
        return processor.prepare_tasks(tasks)

    def rows(**more: Any) -> tuple[torch.Tensor, Any]:
        output = processor.process(QWEN * 3, [png(1), png(2), png(1)], **more)
        inputs = MultimodalInputs.from_processor_output(output)
        media, found = Lifecycle().admit(inputs), []
        torch.manual_seed(0)
        table = torch.nn.Embedding(int(inputs.input_ids.max()) + 1, 64)
        for start in range(0, len(inputs.input_ids), 4):
            ids = torch.from_numpy(inputs.input_ids[start : start + 4])
            batch = ForwardBatch([media], [start], [len(ids)])
            step = embed_mm_inputs(ids, batch, table, encoder, prepare=prepare)
            assert step.failed == ()
            found.append(step.input_embeds)
            media.advance(start + len(ids))
        return torch.cat(found), media

    expected, _ = rows()
    assert asked == []
    found, media = rows(prepare="worker")
    assert torch.equal(found, expected)
    assert asked == [1, 1, 1]  # the third has the first one's content, which nothing kept: there is no cache
    assert all(item.task is not None for item in media.inputs.mm_items)  # for a retract
    media.finish()
    assert not any(item.num_contents for item in media.inputs.mm_items)


def test_what_only_decoding_shows_fails_that_item_alone(here: Registry, qwen: Path) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)
    data = png(3, 300, 300)
    broken = data[: len(data) // 2]
    with pytest.raises(MediaError):
        processor.process(QWEN * 2, [png(1), broken])
    items = processor.process(QWEN * 2, [png(1), broken], prepare="worker").mm_items
    good, error = encode_items(items, encoder, prepare=processor.prepare_tasks)
    assert torch.equal(rows_of(good), rows_of(encode_items(processor.process(QWEN, [png(1)]).mm_items, encoder)[0]))
    assert isinstance(error, MediaError)
    assert (error.path, error.reason) == ("images[1]", "broken")


def test_nothing_of_the_callers_memory_is_kept(here: Registry, qwen: Path) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)
    pixels = np.asarray(Image.open(io.BytesIO(png(4)))).copy()
    given = [
        pixels,
        Image.fromarray(pixels.copy()),
        bytearray(png(4)),
        torch.from_numpy(pixels.copy()).permute(2, 0, 1),
    ]
    expected = encode_items(processor.process(QWEN * len(given), given).mm_items, encoder)
    items = processor.process(QWEN * len(given), given, prepare="worker").mm_items
    pixels[:] = 0
    given[1].paste((0, 0, 0), (0, 0, *given[1].size))
    given[2][:] = bytes(len(given[2]))
    given[3].zero_()
    found = encode_items(items, encoder, prepare=processor.prepare_tasks)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(
            rows_of(mine), rows_of(other), atol=1e-5
        )  # in batches of other sizes: items of one identity are one


def test_the_preprocess_cache_has_no_part_in_it(qwen: Path) -> None:
    with discover() as registry:
        processor = registry.load_processor(qwen)
        first = processor.process(QWEN, [png(7)], prepare="worker")
        assert processor.cache_stats.entries == 0
        processor.process(QWEN, [png(7)])
        second = processor.process(QWEN, [png(7)], prepare="worker")
        assert second.mm_items[0].task is not None
        assert second.mm_items[0].identity == first.mm_items[0].identity
        assert processor.cache_stats.pinned == 0


def test_options_salt_and_limits_count_as_ever(here: Registry, qwen: Path) -> None:
    processor = here.load_processor(qwen)

    def identity(**more: Any) -> Any:
        return processor.process(QWEN, [png(8, 200, 200)], prepare="worker", **more).mm_items[0].identity

    found = {identity(), identity(salt="a"), identity(salt="b"), identity(max_pixels=56 * 56)}
    assert len(found) == 4
    with pytest.raises(LimitError, match="max_prompt_tokens"):
        identity(max_prompt_tokens=5)
    named = processor.process(QWEN, [png(8)], prepare="worker", mm_hashes=["request-1/a"])
    assert named.mm_items[0].identity not in found


def test_without_a_way_to_prepare_the_error_says_what_to_pass(here: Registry, qwen: Path) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)
    (item,) = processor.process(QWEN, [png(1)], prepare="worker").mm_items
    (error,) = encode_items([item], encoder)
    assert isinstance(error, UsageError)
    assert error.message.endswith("pass prepare=processor.prepare_tasks")


@pytest.mark.parametrize("fault", ["raises", "exits", "too few", "nonsense", "memory"])
def test_a_way_to_prepare_that_fails_fails_the_items_alone(here: Registry, qwen: Path, fault: str) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)

    def prepare(tasks: Any) -> Any:
        if fault == "exits":
            raise SystemExit
        if fault == "raises":
            raise ValueError("no")
        return {"too few": [], "nonsense": [5] * len(tasks), "memory": [MemoryError("no")] * len(tasks)}[fault]

    later = processor.process(QWEN, [png(1)], prepare="worker").mm_items
    now = processor.process(QWEN, [png(2)]).mm_items
    good, error = encode_items([*now, *later], encoder, prepare=prepare)
    assert isinstance(good, Encoded)
    assert not isinstance(error, Encoded)


def test_a_task_for_another_model_is_refused(here: Registry, qwen: Path) -> None:
    processor, encoder = here.load_processor(qwen), here.load_encoder(qwen, dtype=torch.float32)
    other = here.load_processor(qwen, max_pixels=56 * 56)
    (item,) = processor.process(QWEN, [png(1)], prepare="worker").mm_items
    (error,) = encode_items([item], encoder, prepare=other.prepare_tasks)
    assert isinstance(error, UsageError)
    assert "expected tasks of" in error.message


@pytest.mark.parametrize("prepare", ["there", None, True, 5])
def test_another_place_is_refused(here: Registry, qwen: Path, prepare: Any) -> None:
    with pytest.raises(UsageError, match="prepare"):
        here.load_processor(qwen).process(QWEN, [png(1)], prepare=prepare)


def test_a_model_that_prepares_jointly_cannot(here: Registry, tmp_path: Path) -> None:
    make, prompt, media = CASES["paligemma"]
    folder = make(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match=r"prepare: .* prepares the media inputs of a request together"):
        here.load_processor(folder).process(prompt, **fresh(media), prepare="worker")
