"""Calls of an encoder: how they are split, what a failure costs, how ranks agree, and what the cache counts and keeps."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from embed_media import media_of

from mm_plugin.cache import EmbeddingCache, MemoryStore
from mm_plugin.embed import EmbedOutput, embed_mm_inputs
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.errors import EncoderError
from mm_plugin.events import EncodeBatch, Event, Observers
from mm_plugin.inputs import Encoded, ForwardBatch, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

HIDDEN = 3


@pytest.fixture
def table() -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(torch.full((8, HIDDEN), -1.0))


def make_media(*items_of: tuple[int, int]) -> RequestMedia:
    """Items (seed, rows) one after another, without text."""
    cursor, items = 0, []
    for seed, count in items_of:
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(cursor, cursor + count - 1)])
        item.feature = np.array([seed])
        item.set_identity(seed.to_bytes(32, "big"))
        items.append(item)
        cursor += count
    return media_of(items, np.zeros(cursor, np.int64))


def rows(item: MultimodalDataItem) -> torch.Tensor:
    return torch.full((item.num_tokens, HIDDEN), float(item.feature[0]))


def expected(media: RequestMedia, failed: Sequence[int] = ()) -> list[list[float]]:
    return [
        [0.0 if index in failed else float(item.feature[0])] * HIDDEN
        for index, item in enumerate(media.inputs.mm_items)
        for _ in range(item.offsets[0][1] + 1 - item.offsets[0][0])
    ]


class Recorder(Encoder, EncodesImages):
    """Notes the seeds of every call; `fault` may raise or change what is returned."""

    def __init__(self, fault: Callable[[list[int], list[Any]], Any] = lambda seeds, result: result) -> None:
        self.calls: list[list[int]] = []
        self.fault = fault

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Recorder:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        self.calls.append([int(item.feature[0]) for item in items])
        return self.fault(self.calls[-1], [rows(item) for item in items])


class Collective(Recorder):
    collective = True


def step(
    media: Sequence[RequestMedia], table: Any, encoder: Any, cache: EmbeddingCache | None = None, **options: Any
) -> EmbedOutput:
    ids = torch.from_numpy(np.concatenate([each.inputs.padded_input_ids for each in media]))
    lengths = [len(each.inputs.padded_input_ids) for each in media]
    out = embed_mm_inputs(ids, ForwardBatch(media, [0] * len(media), lengths), table, encoder, cache, **options)
    if cache is not None:
        assert cache.stats().pinned == 0
    return out


def raising(error: BaseException, seed: int) -> Callable[[list[int], list[Any]], Any]:
    def fault(seeds: list[int], result: list[Any]) -> Any:
        if seed in seeds:
            raise error
        return result

    return fault


def replacing(value: Any, seed: int) -> Callable[[list[int], list[Any]], Any]:
    return lambda seeds, result: [value if each == seed else row for each, row in zip(seeds, result, strict=True)]


# ------------------------------------------------------------------ splitting


@pytest.mark.parametrize(
    ("most", "calls"),
    [
        (None, [[1, 2, 3, 4, 5]]),
        (100, [[1, 2, 3, 4, 5]]),
        (12, [[1, 2, 3, 4, 5]]),
        (11, [[1, 2, 3, 4], [5]]),
        (5, [[1, 2], [3], [4, 5]]),
        (3, [[1], [2], [3], [4], [5]]),
        (1, [[1], [2], [3], [4], [5]]),
    ],
)
def test_calls_are_split_by_rows_and_an_oversize_item_is_alone(
    most: int | None, calls: list[list[int]], table: torch.nn.Embedding
) -> None:
    media = make_media((1, 2), (2, 2), (3, 4), (4, 2), (5, 2))
    encoder, events = Recorder(), list[Event]()
    out = step([media], table, encoder, max_encode_tokens=most, observers=Observers([events.append]))
    assert encoder.calls == calls
    assert out.input_embeds.tolist() == expected(media)
    heard = [(event.num_items, event.num_tokens) for event in events if isinstance(event, EncodeBatch)]
    counts = {1: 2, 2: 2, 3: 4, 4: 2, 5: 2}
    assert heard == [(len(call), sum(counts[seed] for seed in call)) for call in calls]


def test_a_failure_in_one_part_of_a_split_call_touches_no_other_part(table: torch.nn.Embedding) -> None:
    media = make_media((1, 2), (2, 2), (3, 2), (4, 2))
    encoder = Recorder(raising(ValueError("x"), 2))
    out = step([media], table, encoder, max_encode_tokens=4)
    assert encoder.calls == [[1, 2], [1], [2], [3, 4]]
    assert out.input_embeds.tolist() == expected(media, failed=[1])


# ------------------------------------------------------------------ failures


def counts_after_oom(items: int, most: int) -> list[int]:
    """Sizes of calls when a device takes `most` items: the rule in words, halves of a call until it fits or is one."""
    sizes = [items]
    if items > most and items > 1:
        start, half = 0, items // 2
        while start < items:
            sizes += counts_after_oom(min(half, items - start), most)
            start += half
    return sizes


@pytest.mark.parametrize(("items", "most"), [(8, 3), (7, 2), (5, 1), (3, 1), (1, 1), (6, 6)])
def test_out_of_memory_halves_until_it_fits(items: int, most: int, table: torch.nn.Embedding) -> None:
    def fault(seeds: list[int], result: list[Any]) -> Any:
        if len(seeds) > most:
            raise torch.OutOfMemoryError("full")
        return result

    media, encoder = make_media(*((seed, 1) for seed in range(1, items + 1))), Recorder(fault)
    out = step([media], table, encoder)
    assert [len(call) for call in encoder.calls] == counts_after_oom(items, most)
    assert out.failed == ()
    assert out.input_embeds.tolist() == expected(media)


def test_out_of_memory_of_one_item_alone_fails_it_after_log_many_calls(table: torch.nn.Embedding) -> None:
    media = make_media(*((seed, 1) for seed in range(1, 5)))
    encoder = Recorder(raising(torch.OutOfMemoryError("full"), 3))
    out = step([media], table, encoder)
    assert encoder.calls == [[1, 2, 3, 4], [1, 2], [3, 4], [3], [4]]
    assert [failure.item for failure in out.failed] == [2]
    assert out.input_embeds.tolist() == expected(media, failed=[2])


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    "fault",
    [
        raising(RuntimeError("no such kernel"), 2),
        raising(SystemExit(3), 2),
        raising(AssertionError(), 2),
        raising(EncoderError("own error"), 2),
        replacing(torch.zeros(1, HIDDEN), 2),
        replacing(torch.zeros(2, HIDDEN + 1), 2),
        replacing(torch.zeros(2 * HIDDEN), 2),
        replacing(torch.zeros(2, HIDDEN, dtype=torch.int32), 2),
        replacing(None, 2),
        replacing(Encoded(torch.zeros(2, HIDDEN), deepstack=torch.zeros(2, HIDDEN)), 2),
    ],
    ids=["error", "exit", "assertion", "plugin error", "rows", "width", "shape", "dtype", "none", "deepstack"],
)
def test_another_failure_is_tried_item_by_item_once_and_fails_that_item_only(
    fault: Any, table: torch.nn.Embedding
) -> None:
    media, other = make_media((1, 2), (2, 2), (3, 2)), make_media((4, 1))
    encoder, cache = Recorder(fault), EmbeddingCache(1 << 16)
    out = step([media, other], table, encoder, cache)
    assert encoder.calls == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert [(failure.request, failure.item) for failure in out.failed] == [(0, 1)]
    assert isinstance(out.failed[0].error, EncoderError)
    assert out.input_embeds.tolist() == expected(media, failed=[1]) + expected(other)
    assert cache.stats().entries == 3


@pytest.mark.parametrize(
    "shorten",
    [lambda seeds, result: result[:-1], lambda seeds, result: [*result, result[0]]],
    ids=["too few", "too many"],
)
def test_a_wrong_count_is_tried_item_by_item(shorten: Any, table: torch.nn.Embedding) -> None:
    def fault(seeds: list[int], result: list[Any]) -> Any:
        return shorten(seeds, result) if len(seeds) > 1 else result

    media, encoder = make_media((1, 1), (2, 1)), Recorder(fault)
    out = step([media], table, encoder)
    assert encoder.calls == [[1, 2], [1], [2]]
    assert out.input_embeds.tolist() == expected(media)


@pytest.mark.case("5.5")
def test_a_released_feature_does_not_force_the_others_into_single_calls(table: torch.nn.Embedding) -> None:
    media, encoder = make_media((1, 1), (2, 1), (3, 1), (4, 1)), Recorder()
    wanted = expected(media, failed=[1])
    media.inputs.mm_items[1].feature = None
    out = step([media], table, encoder)
    assert encoder.calls == [[1, 3, 4]]
    assert [failure.item for failure in out.failed] == [1]
    assert out.input_embeds.tolist() == wanted


def test_an_item_that_two_requests_show_fails_in_both(table: torch.nn.Embedding) -> None:
    encoder = Recorder(raising(ValueError("x"), 2))
    out = step([make_media((2, 1), (1, 1)), make_media((2, 1))], table, encoder)
    assert [(failure.request, failure.item) for failure in out.failed] == [(0, 0), (1, 0)]
    assert encoder.calls == [[2, 1], [2], [1]]


# ------------------------------------------------------------------ ranks


class Barrier:
    """What a collective maximum does: every rank waits for all, and gets the worst."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.said = [0] * ranks

    def of(self, rank: int) -> Callable[[int], int]:
        def agree(outcome: int) -> int:
            self.said[rank] = outcome
            self.barrier.wait()
            worst = max(self.said)
            self.barrier.wait()
            return worst

        return agree


def ranks_of(
    faults: Sequence[Any], table: torch.nn.Embedding, kind: type[Recorder] = Collective, **options: Any
) -> tuple[list[Recorder], list[Any]]:
    """One step of the same request on every rank, each with a fault of its own."""
    barrier, outs = Barrier(len(faults)), [None] * len(faults)
    encoders = [kind(*([fault] if fault else [])) for fault in faults]

    def work(rank: int) -> None:
        media = make_media((1, 2), (2, 1), (3, 1), (4, 2))
        try:
            outs[rank] = step([media], table, encoders[rank], agree=barrier.of(rank), **options)
        finally:
            if outs[rank] is None:
                barrier.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(faults))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return encoders, outs


@pytest.mark.parametrize(
    ("fault", "calls"),
    [
        (raising(RuntimeError("x"), 3), [[1, 2, 3, 4], [1], [2], [3], [4]]),
        (raising(torch.OutOfMemoryError("full"), 3), [[1, 2, 3, 4], [1, 2], [3, 4], [3], [4]]),
        (replacing(torch.zeros(5, 5), 3), [[1, 2, 3, 4], [1], [2], [3], [4]]),
    ],
    ids=["error", "memory", "shape"],
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_on_one_rank_leads_all_ranks_to_the_same_calls_and_the_same_failed_items(
    fault: Any, calls: list[list[int]], which: int, table: torch.nn.Embedding
) -> None:
    encoders, outs = ranks_of([fault if rank == which else None for rank in range(2)], table)
    for encoder, out in zip(encoders, outs, strict=True):
        assert encoder.calls == calls
        assert [(failure.request, failure.item) for failure in out.failed] == [(0, 2)]
        assert out.input_embeds.tolist() == expected(make_media((1, 2), (2, 1), (3, 1), (4, 2)), failed=[2])
    assert "another rank" in outs[1 - which].failed[0].error.message


def test_out_of_memory_here_and_a_failure_there_count_as_the_failure(table: torch.nn.Embedding) -> None:
    faults = [raising(torch.OutOfMemoryError("full"), 3), raising(ValueError("x"), 1)]
    encoders, outs = ranks_of(faults, table)
    for encoder, out in zip(encoders, outs, strict=True):
        assert encoder.calls == [[1, 2, 3, 4], [1], [2], [3], [4]]
        assert [failure.item for failure in out.failed] == [0, 2]


def test_ranks_agree_on_every_part_of_a_split_call(table: torch.nn.Embedding) -> None:
    encoders, outs = ranks_of([None, raising(ValueError("x"), 4)], table, max_encode_tokens=3)
    for encoder, out in zip(encoders, outs, strict=True):
        assert encoder.calls == [[1, 2], [3, 4], [3], [4]]
        assert [failure.item for failure in out.failed] == [3]


def test_an_encoder_that_is_not_collective_asks_nobody(table: torch.nn.Embedding) -> None:
    asked: list[int] = []
    for kind, count in ((Recorder, 0), (Collective, 1)):
        step([make_media((1, 1), (2, 1))], table, kind(), agree=lambda outcome: asked.append(outcome) or outcome)
        assert asked == [0] * count


# ------------------------------------------------------------------ check_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_flag_says_whether_all_rows_of_media_are_finite(bad: float, table: torch.nn.Embedding) -> None:
    good = step([make_media((1, 2), (2, 1))], table, Recorder(), check_finite=True)
    assert good.finite.dtype == torch.bool
    assert good.finite.shape == ()
    assert good.finite.tolist() is True
    value = torch.zeros(2, HIDDEN)
    value[1, 2] = bad
    out = step([make_media((1, 1), (2, 2))], table, Recorder(replacing(value, 2)), check_finite=True)
    assert out.finite.tolist() is False
    assert out.failed == ()
    assert step([make_media((1, 1))], table, Recorder()).finite is None


def test_a_step_without_media_is_finite(table: torch.nn.Embedding) -> None:
    out = embed_mm_inputs(
        torch.zeros(2, dtype=torch.int64), ForwardBatch([None], [0], [2]), table, {}, check_finite=True
    )
    assert out.finite.tolist() is True


# ------------------------------------------------------------------ what is kept


def test_kept_rows_own_their_storage(table: torch.nn.Embedding) -> None:
    """One tensor of a whole call, cut into views, is the usual way of an encoder."""

    def fault(seeds: list[int], result: list[Any]) -> Any:
        whole = torch.cat(result)
        stack = torch.stack([whole, whole])
        cuts = np.cumsum([0, *(len(part) for part in result)])
        return [
            Encoded(whole[a:b], deepstack=stack[:, a:b], kept=torch.arange(len(whole))[a:b])
            for a, b in itertools.pairwise(cuts)
        ]

    media, cache = make_media((1, 2), (2, 5), (3, 1)), EmbeddingCache(1 << 16)
    out = step([media], table, Recorder(fault), cache)
    assert out.failed == ()
    found = {entry[0][0].embeddings.shape[0]: entry[0][0] for entry in cache.store._entries.values()}  # type: ignore[attr-defined]
    assert sorted(found) == [1, 2, 5]
    for count, encoded in found.items():
        assert encoded.embeddings.untyped_storage().nbytes() == count * HIDDEN * 4
        assert encoded.deepstack.untyped_storage().nbytes() == 2 * count * HIDDEN * 4
        assert encoded.kept.untyped_storage().nbytes() == count * 8
    assert cache.stats().bytes == sum(count * (3 * HIDDEN * 4 + 8) for count in found)


def test_held_embeddings_own_their_storage_and_carry_no_gradient(table: torch.nn.Embedding) -> None:
    weight = torch.nn.Parameter(torch.ones(HIDDEN))

    class Live(Recorder):
        def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
            with torch.enable_grad():
                return list((torch.cat([rows(item) for item in items]) * weight).split([i.num_tokens for i in items]))

    media = make_media((1, 4), (2, 4))
    ids = torch.from_numpy(media.inputs.padded_input_ids)
    embed_mm_inputs(ids[:6], ForwardBatch([media], [0], [6]), table, Live())
    (held,) = media.held_embeddings.values()
    assert held.embeddings.tolist() == [[2.0] * HIDDEN] * 4
    assert held.embeddings.untyped_storage().nbytes() == 4 * HIDDEN * 4
    assert not held.embeddings.requires_grad


def test_stats_of_a_scripted_run(table: torch.nn.Embedding) -> None:
    size = 2 * HIDDEN * 4
    cache, encoder = EmbeddingCache(2 * size), Recorder()
    step([make_media((1, 2), (1, 2)), make_media((1, 2), (2, 2))], table, encoder, cache)  # two misses, two joins
    step([make_media((1, 2))], table, encoder, cache)  # a hit; 1 is the youngest
    step([make_media((3, 2))], table, encoder, cache)  # a miss that evicts 2
    step([make_media((1, 2), (3, 2))], table, encoder, cache)  # two hits
    step([make_media((4, 9))], table, encoder, cache)  # a miss, larger than the cache
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.joins) == (3, 4, 2)
    assert (stats.evictions, stats.rejected, stats.mismatches) == (1, 1, 0)
    assert (stats.entries, stats.pinned, stats.bytes) == (2, 0, 2 * size)
    assert encoder.calls == [[1, 2], [3], [4]]
    cache.invalidate()
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)
    step([make_media((1, 2))], table, encoder, cache)
    assert encoder.calls[-1] == [1]


@pytest.mark.case("5.7")
def test_what_a_step_uses_is_not_evicted_before_it_ends(table: torch.nn.Embedding) -> None:
    """A cache of two: a step that has both and brings a third keeps both, and the third goes unkept."""
    size = HIDDEN * 4
    cache, encoder = EmbeddingCache(2 * size), Recorder()
    step([make_media((1, 1), (2, 1))], table, encoder, cache)
    step([make_media((1, 1), (2, 1), (3, 1))], table, encoder, cache)
    assert encoder.calls == [[1, 2], [3]]
    assert cache.stats().evictions == 0
    step([make_media((1, 1), (2, 1))], table, encoder, cache)
    assert encoder.calls == [[1, 2], [3]]


def test_pins_are_taken_during_the_step_and_given_back_after_any_end(table: torch.nn.Embedding) -> None:
    cache, seen = EmbeddingCache(1 << 16), []
    step([make_media((1, 1))], table, Recorder(), cache)

    def interrupted(seeds: list[int], result: list[Any]) -> Any:
        seen.append(cache.stats().pinned)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step([make_media((1, 1), (2, 1))], table, Recorder(interrupted), cache)
    assert seen == [1]
    assert cache.stats().pinned == 0

    class Broken(MemoryStore):
        def put(self, key: Any, value: Any, num_bytes: int) -> bool:
            if num_bytes > HIDDEN * 4:
                raise OSError("the store is gone")
            return super().put(key, value, num_bytes)

    cache = EmbeddingCache(0, store=Broken(1 << 16))
    media = make_media((1, 1), (2, 2))
    assert step([media], table, Recorder(), cache).input_embeds.tolist() == expected(media)
    assert (cache.stats().entries, cache.stats().pinned, cache.stats().errors) == (1, 0, 1)


# ------------------------------------------------------------------ other weights


def test_rows_of_other_weights_are_never_used(table: torch.nn.Embedding) -> None:
    encoder, cache = (
        Recorder(lambda seeds, result: [row + len(encoder.version) for row in result]),
        EmbeddingCache(4096),
    )
    for version, shift in (("", 0), ("b", 1), ("cc", 2), ("b", 1)):
        encoder.version = version
        out = step([make_media((1, 2))], table, encoder, cache)
        assert out.input_embeds.tolist() == [[1.0 + shift] * HIDDEN] * 2
    assert len(encoder.calls) == 3  # the last finds what the second left


def test_rows_that_a_request_holds_from_older_weights_are_not_lent_to_another(table: torch.nn.Embedding) -> None:
    encoder = Recorder(lambda seeds, result: [row + len(encoder.version) for row in result])
    first, second = make_media((1, 4)), make_media((1, 4))
    ids = torch.from_numpy(first.inputs.padded_input_ids)
    embed_mm_inputs(ids[:2], ForwardBatch([first], [0], [2]), table, encoder)
    encoder.version = "new"
    out = embed_mm_inputs(torch.cat([ids[2:], ids]), ForwardBatch([first, second], [2, 0], [2, 4]), table, encoder)
    assert out.input_embeds.tolist() == [[4.0] * HIDDEN] * 6
    assert len(encoder.calls) == 2


def test_rows_of_another_dtype_are_not_mixed_in(table: torch.nn.Embedding) -> None:
    cache, encoder = EmbeddingCache(1 << 16), Recorder()
    for kind in (torch.float32, torch.bfloat16, torch.float32):
        out = step([make_media((1, 2))], table.to(kind), encoder, cache)
        assert out.input_embeds.dtype == kind
    assert encoder.calls == [[1], [1]]
    assert cache.stats().mismatches == 0


# ------------------------------------------------------------------ other ways in


def test_a_mapping_of_callables_is_treated_as_an_encoder_is(table: torch.nn.Embedding) -> None:
    seen: list[int] = []

    def encode(items: Sequence[MultimodalDataItem]) -> tuple[Any, ...]:
        seen.append(len(items))
        if len(items) > 2:
            raise torch.OutOfMemoryError("full")
        return tuple(Encoded(rows(item)) if item.feature[0] % 2 else rows(item) for item in items)

    media, cache = make_media((1, 1), (2, 2), (3, 1), (4, 1)), EmbeddingCache(1 << 16)
    for _ in range(2):
        out = step([media], table, {Modality.IMAGE: encode}, cache)
        assert out.input_embeds.tolist() == expected(media)
    assert seen == [4, 2, 2]


def test_requests_that_share_their_inputs_do_not_drop_one_anothers_rows(table: torch.nn.Embedding) -> None:
    media, encoder = make_media((1, 6)), Recorder()
    ids = torch.from_numpy(media.inputs.padded_input_ids)
    embed_mm_inputs(torch.cat([ids[:3], ids]), ForwardBatch([media, media], [0, 0], [3, 6]), table, encoder)
    out = embed_mm_inputs(ids[3:], ForwardBatch([media], [3], [3]), table, encoder)
    assert out.input_embeds.tolist() == [[1.0] * HIDDEN] * 3
    assert encoder.calls == [[1]]


def test_given_rows_that_cannot_be_written_are_read_without_a_warning(table: torch.nn.Embedding) -> None:
    array = np.ones((2, HIDDEN), np.float32)
    array.setflags(write=False)
    media = make_media((1, 2))
    media.inputs.mm_items[0].feature, media.inputs.mm_items[0].precomputed_embeddings = None, array
    torch.set_warn_always(True)  # torch would say it once in a process
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = step([media], table, {})
    finally:
        torch.set_warn_always(False)
    assert [str(warning.message) for warning in caught] == []
    assert out.failed == ()
    assert out.input_embeds.tolist() == [[1.0] * HIDDEN] * 2
