"""Features on their way to a device: exact values, and no half of the buffer written before the copy out of it is done."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mm_plugin
from mm_plugin.embed import EncoderCalls, embed_mm_inputs
from mm_plugin.encoder import Encoder, EncodesImages, StagingBuffer
from mm_plugin.encoder.staging import DEFAULT_BYTES
from mm_plugin.inputs import Encoded, ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

COPY = torch.ops.aten.copy_.default
Half = tuple[int, int]


class Late(TorchDispatchMode):
    """A device whose copies out of the pinned halves happen as late as they may: when the event after them is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.halves: list[torch.Tensor] = []
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.log: list[str] = []
        self.events = 0
        self.working = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.halves.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.halves[-1]

    def event(self, kind: Callable[[Late, int], Event] | None = None) -> Event:
        self.events += 1
        return (kind or Event)(self, self.events - 1)

    def half_of(self, tensor: torch.Tensor) -> int | None:
        for index, half in enumerate(self.halves):
            if half.data_ptr() <= tensor.data_ptr() < half.data_ptr() + half.numel():
                return index
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY and not self.working:
            target, source = args[:2]
            if (half := self.half_of(source)) is not None:
                self.log.append(f"out {half}")
                self.begun.append((target, source))
                return target
            if (half := self.half_of(target)) is not None:
                self.log.append(f"in {half}")
        return func(*args, **(kwargs or {}))

    def finish(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The device does some of its copies, with what their sources hold by now."""
        self.working = True
        for target, source in copies:
            target.copy_(source)
        self.working = False
        self.begun = [pair for pair in self.begun if all(pair is not other for other in copies)]

    def drain(self) -> None:
        """The device gets to the end of its work."""
        self.finish(list(self.begun))


class Event:
    """What is recorded covers all copies begun before; waiting for it does them."""

    def __init__(self, device: Late, index: int) -> None:
        self.device, self.index = device, index
        self.covered: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self) -> None:
        self.device.log.append(f"record {self.index}")
        self.covered = list(self.device.begun)

    def synchronize(self) -> None:
        self.device.log.append(f"wait {self.index}")
        begun = self.device.begun
        self.device.finish([pair for pair in self.covered if any(pair is other for other in begun)])
        self.covered = []


class Careless(Event):
    """An event that says at once that all is done."""

    def synchronize(self) -> None:
        self.device.log.append(f"wait {self.index}")


def send(
    tensors: Sequence[torch.Tensor], num_bytes: int, event: type[Event] = Event
) -> tuple[list[torch.Tensor], Late]:
    device = Late()
    buffer = StagingBuffer("cpu", num_bytes, allocate=device.allocate, event=lambda: device.event(event))
    with device:
        out = buffer.send(tensors)
    device.drain()
    return out, device


def sequence(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) % 251).to(dtype)


@pytest.mark.parametrize("num_bytes", [2, 6, 16, 1000])
@pytest.mark.parametrize("counts", [[1], [7, 7, 7], [40, 3, 0, 25]], ids=str)
def test_values_are_exact_however_late_the_copies_happen(counts: list[int], num_bytes: int) -> None:
    given = [sequence(count, torch.uint8) for count in counts]
    out, _ = send(given, num_bytes)
    assert [tensor.tolist() for tensor in out] == [[value % 251 for value in range(count)] for count in counts]


def test_a_half_that_is_not_waited_for_gives_other_values() -> None:
    """The device above tells a careless buffer from a careful one."""
    out, _ = send([sequence(40, torch.uint8)], 8, Careless)
    assert out[0].tolist() != [value % 251 for value in range(40)]


def test_a_half_is_written_again_only_after_the_event_of_its_last_copy_was_waited_for() -> None:
    _, device = send([sequence(10, torch.uint8), sequence(5, torch.uint8)], 8)
    # Pieces of 4, 4, 2 and 4, 1 bytes take turns.
    turns = [["wait 0", "in 0", "out 0", "record 0"], ["wait 1", "in 1", "out 1", "record 1"]]
    assert device.log == [*turns[0], *turns[1], *turns[0], *turns[1], *turns[0]]
    assert [half.numel() for half in device.halves] == [4, 4]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4, 2)], ids=str)
def test_dtype_shape_and_bits_stay(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=np.int64))
    given = (torch.arange(count) % 2 if dtype is torch.bool else torch.arange(count) + 1).to(dtype).reshape(shape)
    before = given.clone()
    (out,), _ = send([given], 6)
    assert (out.dtype, out.shape) == (dtype, shape)
    assert out.tolist() == before.tolist()
    assert given.tolist() == before.tolist()
    assert out.data_ptr() != given.data_ptr() or not count


@pytest.mark.parametrize(
    "cut",
    [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[2:4], lambda t: t[:1].expand(5, 6)],
    ids=["transposed", "strided", "offset", "expanded"],
)
def test_views_arrive_as_they_look(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = cut(torch.arange(30.0).reshape(5, 6))
    expected = given.tolist()
    (out,), _ = send([given], 10)
    assert out.tolist() == expected
    assert out.is_contiguous()


def test_the_buffer_is_made_once_and_never_grows() -> None:
    device = Late()
    buffer = StagingBuffer("cpu", 32, allocate=device.allocate, event=device.event)
    assert device.halves == []  # not before it is needed
    with device:
        for count in (100, 1, 1000):
            buffer.send([sequence(count, torch.float32)])
    assert [half.numel() for half in device.halves] == [16, 16]
    assert device.events == 2
    assert DEFAULT_BYTES == 64 * 1024 * 1024


def test_without_pinned_memory_tensors_go_as_they_are() -> None:
    given = torch.arange(5.0)
    (out,) = StagingBuffer("cpu").send([given])
    assert out is given


def test_what_is_not_on_the_host_is_not_staged() -> None:
    device = Late()
    buffer = StagingBuffer("meta", 8, allocate=device.allocate, event=device.event)
    given = torch.empty(3, device="meta")
    assert buffer.send([given])[0] is given
    assert device.halves == []


def test_threads_that_send_at_once_get_their_own_values() -> None:
    class Counting:
        """An event of a device that copies at once."""

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    buffer = StagingBuffer(
        "cpu", 64, allocate=lambda size: torch.zeros(size, dtype=torch.uint8), event=lambda: Counting()
    )
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(value: int) -> None:
        start.wait()
        given = [torch.full((97,), value, dtype=torch.int64), torch.full((3, 5), value, dtype=torch.float32)]
        for _ in range(60):
            if any(set(out.flatten().tolist()) != {value} for out in buffer.send(given)):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_encoder_reads_the_copy_and_the_item_keeps_its_own(kind: str) -> None:
    device = Late()
    staging = StagingBuffer("cpu", 8, allocate=device.allocate, event=device.event)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(0, 1)],
        feature=array if kind == "numpy" else torch.from_numpy(array),
        model_specific_data={"grid": (1, 2, 1)},
    )
    item.set_identity(b"i" * 32)
    own, seen = item.feature, []

    def encode(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        device.drain()
        seen.extend(items)
        return [torch.as_tensor(one.feature).clone() for one in items]

    calls = EncoderCalls(
        {Modality.IMAGE: encode}, hidden=3, dtype=torch.float32, device=torch.device("cpu"), staging=staging
    )
    with device:
        (result,) = calls.encode(Modality.IMAGE, [item])
    assert isinstance(result, Encoded)
    assert result.embeddings.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert item.feature is own
    (given,) = seen
    assert given is not item
    assert given.feature is not own
    assert (given.identity, given.offsets, given.grid) == (item.identity, item.offsets, (1, 2, 1))


def test_a_feature_that_is_no_array_fails_its_item_alone() -> None:
    staging = StagingBuffer("cpu", 8)
    items = []
    for index, feature in enumerate((np.ones(3, np.float32), {"not": "an array"}, np.ones(3, np.float32))):
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(index, index)], feature=feature)
        item.set_identity(bytes([index]) * 32)
        items.append(item)
    encode = {Modality.IMAGE: lambda given: [one.feature.reshape(1, 3) for one in given]}
    calls = EncoderCalls(encode, hidden=3, dtype=torch.float32, device=torch.device("cpu"), staging=staging)
    results = calls.encode(Modality.IMAGE, items)
    assert [isinstance(result, Encoded) for result in results] == [True, False, True]


# ------------------------------------------------------------------ whose buffer it is


class Noting(Encoder, EncodesImages):
    """Notes the features that it gets."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Noting:
        return cls()

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        self.seen += [one.feature for one in items]
        return [torch.zeros(one.num_tokens, 3) for one in items]


def one_item() -> MultimodalDataItem:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=np.arange(6, dtype=np.float32))
    item.set_identity(b"i" * 32)
    return item


def one_step(encoder: Any, **options: Any) -> None:
    ids = np.zeros(2, np.int64)
    inputs = MultimodalInputs(mm_items=[one_item()], input_ids=ids, padded_input_ids=ids, token_modalities=ids)
    batch = ForwardBatch([RequestMedia(inputs)], [0], [2])
    out = embed_mm_inputs(torch.zeros(2, dtype=torch.int64), batch, torch.nn.Embedding(4, 3), encoder, **options)
    assert out.failed == ()


def test_an_encoder_that_is_bound_to_a_gpu_has_one_buffer_of_its_own_and_pins_nothing_before_it_is_used() -> None:
    first, second = Noting(), Noting()
    for encoder in (first, second):
        encoder.bind(version="1", device="cuda:0", owner={})
    assert isinstance(first.staging, StagingBuffer)
    assert first.staging.device == torch.device("cuda:0")
    assert first.staging is first.staging
    assert first.staging is not second.staging
    assert first.staging._halves == []


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "meta"], ids=str)
def test_an_encoder_elsewhere_has_none(device: Any) -> None:
    encoder = Noting()
    assert encoder.staging is None
    encoder.bind(version="1", device=device, owner={})
    assert encoder.staging is None


@pytest.mark.parametrize("bound", [False, True], ids=["given to the step", "the encoder's"])
def test_features_go_through_the_buffer_that_is_given_or_the_encoder_s(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    class Watched(StagingBuffer):
        def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            sent.extend(tensors)
            return [tensor + 1 for tensor in tensors]

    encoder = Noting()
    if bound:
        monkeypatch.setattr(Noting, "staging", Watched("cpu"))
        one_step(encoder)
    else:
        one_step({Modality.IMAGE: encoder.get_image_feature}, staging=Watched("cpu"))
    assert [tensor.tolist() for tensor in sent] == [[0, 1, 2, 3, 4, 5]]
    assert [tensor.tolist() for tensor in encoder.seen] == [[1, 2, 3, 4, 5, 6]]


def test_without_a_buffer_features_are_moved_to_where_the_encoder_reads_them() -> None:
    encoder = Noting()
    one_step(encoder)
    assert isinstance(encoder.seen[0], np.ndarray)  # on the CPU nothing is moved
    encoder.device = torch.device("meta")
    one_step(encoder)
    assert encoder.seen[1].device.type == "meta"


def test_no_module_keeps_a_buffer_a_lock_or_a_table_that_grows() -> None:
    """What a worker keeps is in its objects: two workers of one process share none of it."""
    for name in ("embed", "encoder", "scheduler", "inputs"):
        for file in (Path(mm_plugin.__file__).parent / name).glob("*.py"):
            module = importlib.import_module(f"mm_plugin.{name}.{file.stem}")
            for key, value in vars(module).items():
                assert not isinstance(value, (StagingBuffer, torch.Tensor, type(threading.Lock()))), (module, key)
                assert not isinstance(value, (dict, list, set)) or key.startswith("__"), (module, key)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bound", [False, True], ids=["moved directly", "through the encoder's buffer"])
def test_on_a_gpu_the_encoder_reads_the_feature_there_and_its_rows_are_exact(bound: bool) -> None:
    class Reading(Noting):
        def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
            self.seen += [one.feature for one in items]
            return [one.feature.reshape(2, 3) for one in items]

    encoder, ids = Reading(), np.zeros(2, np.int64)
    if bound:
        encoder.bind(version="1", device="cuda", owner={})
    inputs = MultimodalInputs(mm_items=[one_item()], input_ids=ids, padded_input_ids=ids, token_modalities=ids)
    table = torch.nn.Embedding(4, 3, device="cuda")
    batch = ForwardBatch([RequestMedia(inputs)], [0], [2])
    out = embed_mm_inputs(torch.zeros(2, dtype=torch.int64, device="cuda"), batch, table, encoder)
    assert out.failed == ()
    assert encoder.seen[0].device.type == "cuda"
    assert isinstance(inputs.mm_items[0].feature, np.ndarray)
    assert out.input_embeds.tolist() == [[0, 1, 2], [3, 4, 5]]
