"""Frames: everything comes back equal, no buffer is copied, and nothing but what `encode` makes is decoded."""

from __future__ import annotations

import gc
import json
import random
import struct
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import PlainToy, audio, png, toy_spec

from mm_plugin import (
    AudioSize,
    Encoded,
    EncoderError,
    LimitError,
    MediaError,
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalInputs,
    MultimodalProcessorOutput,
    ProcessorError,
    Replacement,
    SampledVideo,
    Size,
    UsageError,
    errors,
    wire,
)
from mm_plugin.inputs import SpecialTokens
from mm_plugin.tasks import JointPrepared, ModelRef, Prepared
from mm_plugin.wire.structs import RULES

NUMPY = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
NUMPY += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
TORCH = [*NUMPY, "bfloat16", *(f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))]


def again(value: Any, kind: Any = None) -> Any:
    """The value after a journey as bytes, whose buffers nothing else keeps alive."""
    frames = [bytes(frame) for frame in wire.encode(value)]
    found = wire.decode(frames, kind)
    del frames
    assert wire.same(value, found)
    assert wire.same(value, wire.unpack(b"".join(wire.pack(value)), kind))
    return found


def item(seed: int = 1, first: int = 1, count: int = 3, **fields: Any) -> MultimodalDataItem:
    made = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(first, first + count - 1)],
        feature=np.full((count, 4), seed, np.float32),
        model_specific_data={"image_grid_thw": (1, 2, seed), **fields},
    )
    made.set_identity(bytes([seed]) * 32)
    return made


def output(**changed: Any) -> MultimodalProcessorOutput:
    ids = np.arange(10)
    fields: dict[str, Any] = {
        "input_ids": ids,
        "padded_input_ids": ids + 1,
        "token_modalities": ids % 2,
        "mm_items": [item(1, 1), item(2, 5)],
        "special_tokens": SpecialTokens(placeholders={Modality.IMAGE: 9}, pairs=((3, 4),)),
        "mrope_positions": np.arange(30).reshape(3, 10),
        "mrope_position_delta": -4,
        "position_options": {"fps": 2.0},
        "dropped": ("images[0]",),
    }
    return MultimodalProcessorOutput(**fields | changed)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("name", NUMPY)
def test_arrays_come_back_with_dtype_shape_and_bytes(name: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(name)
    for one in (
        array,
        array.astype(array.dtype.newbyteorder(">")),
        np.asfortranarray(array),
        array[..., ::-1] if shape else array,
    ):
        found = again(one)
        assert (found.dtype, found.shape) == (np.dtype(name), one.shape)
        assert np.array_equal(found, one)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("name", TORCH)
def test_tensors_come_back_with_dtype_shape_and_bytes(name: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * torch.empty((), dtype=getattr(torch, name)).element_size()
    raw = torch.arange(count, dtype=torch.uint8) % (2 if name == "bool" else 120)
    tensor = raw.view(getattr(torch, name)).reshape(shape) if count else torch.empty(shape, dtype=getattr(torch, name))
    for one in (tensor, tensor.mT if len(shape) > 1 else tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = again(one)
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in (found, one)] if count else [found, one]
        assert torch.equal(flat[0].reshape(-1), flat[1].reshape(-1)) or not count


def test_conjugates_and_gradients_are_resolved() -> None:
    for one in (
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor([1 + 2j]).conj().imag,
    ):
        assert torch.equal(again(one), one.detach().resolve_conj().resolve_neg())


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=3000)
    | st.sampled_from([*Modality, *MultimodalInputFormat, np.float32(1.5), np.int64(-3), np.bool_(True)]),
    lambda part: (
        st.lists(part, max_size=4)
        | st.lists(part, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.sampled_from(Modality), part, max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_classes(value: Any) -> None:
    found = again(value)
    assert repr(found) == repr(value)


def test_an_output_comes_back_whole() -> None:
    found = again(output(), MultimodalProcessorOutput)
    assert found.mm_items[1].offsets == [(5, 7)]
    assert found.mm_items[0].image_grid_thw == (1, 2, 1)
    assert found.mm_items[0].padding_values() == item(1).padding_values()
    assert (found.mrope_position_delta, found.dropped, found.position_options) == (-4, ("images[0]",), {"fps": 2.0})
    assert found.special_tokens == output().special_tokens
    inputs = again(MultimodalInputs.from_processor_output(found), MultimodalInputs)
    assert (inputs.num_image_tokens, inputs.num_dropped) == (6, 0)


def test_items_of_every_format_come_back() -> None:
    hashed = item(3)
    hashed.set_hash((1 << 64) - 1)
    given = MultimodalDataItem(
        modality=Modality.AUDIO,
        offsets=[(0, 0), (2, 3)],
        format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING,
        precomputed_embeddings=torch.ones(3, 4, dtype=torch.bfloat16),
        keep_device_embedding=True,
    )
    for one in (item(), hashed, given, MultimodalDataItem(modality=Modality.VIDEO)):
        again(one, MultimodalDataItem)


def test_results_of_workers_come_back_errors_among_them() -> None:
    repeated = Replacement.repeat(9, 4)  # takes no memory here, and does when it arrives
    prepared = Prepared({"rows": 4}, repeated, np.ones((4, 2)), b"i" * 32, seconds=1)
    joint = JointPrepared(np.arange(4), [item()], 0.5)
    encoded = Encoded(torch.ones(3, 4), deepstack=torch.zeros(2, 3, 4), kept=torch.tensor([0, 2, 3]))
    failed: list[Exception] = [
        MediaError("images[0]: no", path="images[0]", reason="broken"),
        LimitError("images[1]: large", path="images[1]", setting="max_image_pixels", limit=3, value=4),
        ProcessorError("p failed", plugin="p", distribution="d", version="1"),
        EncoderError("e failed", plugin="p"),
    ]
    sizes = [Size(2, 3), SampledVideo(2, 3, np.arange(2), np.arange(2.0), 2.0), AudioSize(5, 16_000)]
    ref = ModelRef("/models/a", "toy", options={"resize": "pillow"})
    found = again([prepared, joint, encoded, *failed, *sizes, ref])
    for error, one in zip(failed, found[3:7], strict=True):
        assert (type(one), str(one), vars(one)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("name", sorted(name for name in vars(errors) if name.endswith("Error")))
def test_an_error_travels_or_is_refused(name: str) -> None:
    cls = getattr(errors, name)
    if issubclass(cls, errors.RequestError | errors.PluginError | errors.UsageError):
        assert type(again(cls("message"))) is cls

        class Own(cls):  # type: ignore[misc, valid-type]
            """A plugin's own error, whose class the receiver may not have."""

        assert type(wire.decode(wire.encode(Own("message")))) is cls
    else:
        with pytest.raises(UsageError, match="cannot be sent"):
            wire.encode(cls("message"))


def test_a_real_request_comes_back_equal(open_words: Callable[..., Any]) -> None:
    processor = open_words(PlainToy, toy_spec(Modality.IMAGE, Modality.AUDIO))
    made = processor.process("<image> word <audio>", [png()], audios=[audio()])
    found = again(made, MultimodalProcessorOutput)
    assert [one.identity for one in found.mm_items] == [one.identity for one in made.mm_items]


# ---------------------------------------------------------------- what it costs


def test_no_buffer_is_copied() -> None:
    """64 items of 600 kB: far less than one of them is allocated on either side."""
    items = [item(seed, 4 * seed) for seed in range(64)]
    for one in items:
        one.feature = np.zeros((400, 384), np.float32)
    tracemalloc.start()
    try:
        frames = wire.encode(items)
        found = wire.decode(frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400_000
    for one, other, frame in zip(items, found, frames[1:], strict=True):
        assert frame.nbytes == 400 * 384 * 4
        assert np.shares_memory(one.feature, np.frombuffer(frame, np.uint8))
        assert np.shares_memory(one.feature, other.feature)


def test_tensors_over_read_only_frames_share_their_memory_without_a_warning() -> None:
    frames = [bytes(frame) for frame in wire.encode(torch.arange(6.0))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = wire.decode(frames)
    assert found.data_ptr() == np.frombuffer(frames[1], np.uint8).ctypes.data
    del frames
    gc.collect()
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_scheduler_decodes_without_torch() -> None:
    code = (
        "import sys; from mm_plugin import wire; data = sys.stdin.buffer.read(); found = wire.unpack(data)\n"
        "import json; print(json.dumps([len(found.mm_items), int(found.input_ids[3]), 'torch' in sys.modules]))"
    )
    data = b"".join(wire.pack(MultimodalInputs.from_processor_output(output())))
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [2, 3, False]


def test_packed_frames_are_aligned() -> None:
    data = np.frombuffer(
        b"".join([bytes(1), *wire.pack({"a": np.arange(3), "b": b"x" * 2001, "c": np.arange(5.0)})]), np.uint8
    )
    found = wire.unpack(data[1:].copy().data)
    start = data[1:].copy().ctypes.data % 64
    for name in ("a", "c"):
        assert found[name].flags.aligned or start


# ---------------------------------------------------------------- what is refused


class Custom:
    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_refused() -> None:
    for value in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        with pytest.raises(UsageError, match="cannot be sent"):
            wire.encode([value])


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        {1, 2},
        np.array([Custom()]),
        np.array(["text"]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, [("a", "i4")]),
        np.ma.MaskedArray([1, 2], [True, False]),
        torch.zeros(2, device="meta"),
        "\ud800",
        {"\ud800": 1},
        1 << 10_000,
        Modality,
        ValueError("no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_refused_when_it_is_sent(value: Any) -> None:
    for nested in (value, [value], {"a": (value,)}, item(x=value)):
        with pytest.raises(UsageError) as caught:
            wire.encode(nested)
        assert caught.value.argument == "value"


def test_deep_values_are_refused_on_both_sides() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    with pytest.raises(UsageError, match="nested more than 64 deep"):
        wire.encode(value)
    for deep in (100, 100_000):
        body = b"\x92" + b"\x92\x00" * deep + b"\x01" + b"\x90"
        with pytest.raises(UsageError, match=r"^frames: "):
            wire.decode([b"mmpw\x01" + body])


def header(value: Any, *lengths: int) -> bytes:
    return b"mmpw\x01" + msgspec.msgpack.encode([value, lengths])


HUGE = 1 << 40
REFUSED: dict[str, tuple[list[bytes], str]] = {
    "nothing": ([], "header"),
    "empty": ([b""], "header"),
    "other magic": ([b"nope\x01" + b"\x92\xc0\x90"], "header"),
    "pickle": ([b"\x80\x04N."], "header"),
    "version": ([b"mmpw\x02" + b"\x92\xc0\x90"], "expected version 1, got 02"),
    "no version": ([b"mmpw"], "version"),
    "no body": ([b"mmpw\x01"], "corrupted"),
    "a number": ([b"mmpw\x01\x05"], "corrupted"),
    "absurd list": ([b"mmpw\x01\xdd\xff\xff\xff\xff"], "corrupted"),
    "absurd bytes": ([b"mmpw\x01\x92\xc6\xff\xff\xff\xff"], "corrupted"),
    "fewer buffers": ([header([3, "uint8", [4], 0], 4)], "other buffers"),
    "more buffers": ([header(None), b"1234"], "other buffers"),
    "truncated buffer": ([header([3, "uint8", [4], 0], 4), b"123"], "other buffers"),
    "shape above bytes": ([header([3, "uint8", [5], 0], 4), b"1234"], "does not have 4 bytes"),
    "shape below bytes": ([header([3, "uint8", [3], 0], 4), b"1234"], "does not have 4 bytes"),
    "negative sides": ([header([3, "uint8", [-2, -2], 0], 4), b"1234"], "does not have"),
    "huge empty": ([header([3, "float64", [0, HUGE, HUGE], 0], 0), b""], "cannot be made"),
    "many sides": ([header([3, "uint8", [1] * 40, 0], 1), b"1"], "does not have"),
    "object dtype": ([header([3, "object", [1], 0], 8), bytes(8)], "does not have"),
    "structured dtype": ([header([3, "i4,i4", [1], 0], 8), bytes(8)], "does not have"),
    "bfloat16 for numpy": ([header([3, "bfloat16", [4], 0], 8), bytes(8)], "does not have"),
    "unknown to torch": ([header([4, "float3", [4], 0], 8), bytes(8)], "does not have"),
    "no such buffer": ([header([3, "uint8", [4], 1], 4), b"1234"], "no buffer 1"),
    "negative buffer": ([header([9, -1], 4), b"1234"], "no buffer -1"),
    "unknown tag": ([header([77])], "unknown tag"),
    "untagged": ([header([])], "tagged list"),
    "a map": ([header({"a": 1})], "tagged list"),
    "unknown struct": ([header([5, "os.system", {"a": "x"}])], "unknown struct"),
    "missing fields": ([header([5, "size", {"height": 3}])], "other fields"),
    "other fields": ([header([5, "size", {"height": 3, "width": 4, "depth": 5}])], "other fields"),
    "negative size": ([header([5, "size", {"height": -3, "width": 4}])], "size.height cannot be a int"),
    "absurd size": ([header([5, "size", {"height": 1 << 60, "width": 4}])], "size.height"),
    "true for a count": ([header([5, "size", {"height": True, "width": 4}])], "size.height cannot be a bool"),
    "unknown enum": ([header([8, "os", "system"])], "unknown enum"),
    "unknown member": ([header([8, "modality", "SMELL"])], "unknown enum or member"),
    "odd mapping": ([header([2, 1, 2, 3])], "a value for each key"),
    "unhashable key": ([header([2, [0], 2])], "a value for each key"),
    "unknown error": ([header([5, "error", {"name": "SystemExit", "message": "", "attributes": [2]}])], "error.name"),
    "error's attribute": (
        [header([5, "error", {"name": "MediaError", "message": "", "attributes": [2, "x", 1]}])], "attribute"
    ),
    "scalar's bytes": ([header([7, "int64", b"1234"])], "a dtype and its bytes"),
    "long int": ([header([6, bytes(5000)])], "the bytes of an int"),
    "one bytes object": (b"mmpw\x01\x92\xc0\x90", "several frames"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_frames_that_encode_does_not_make_are_refused(name: str) -> None:
    frames, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        wire.decode(frames)
    assert caught.value.argument == "frames"


@pytest.mark.parametrize(
    "changed",
    [
        {"padded_input_ids": np.arange(9)},
        {"mrope_positions": np.zeros((3, 9), np.int64)},
        {"mrope_positions": np.zeros((2, 10), np.int64)},
        {"input_ids": np.arange(10.0)},
        {"input_ids": np.arange(10, dtype=np.int32)},
        {"input_ids": np.arange(10).reshape(2, 5)},
        {"mm_items": [item(1, 9)]},
        {"mm_items": [item(1, 1), item(2, 2)]},
        {"mm_items": [5]},
        {"mm_items": (item(),)},
        {"dropped": ["images[0]"]},
        {"special_tokens": None},
        {"mrope_position_delta": 1.5},
        {"position_options": [1]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_output_whose_parts_do_not_fit_is_refused(changed: dict[str, Any]) -> None:
    frames = wire.encode(output(**changed))
    with pytest.raises(UsageError, match=r"^frames: output"):
        wire.decode(frames)


@pytest.mark.parametrize(
    "changed",
    [
        {"offsets": [(-1, 3)]},
        {"offsets": [(3, 1)]},
        {"offsets": [(1.0, 3.0)]},
        {"offsets": [(1, 1 << 60)]},
        {"offsets": ((1, 3),)},
        {"identity": b"short"},
        {"identity": "x" * 32},
        {"pad_values": (1, 2, 3)},
        {"pad_value": 1 << 70},
        {"modality": 1},
        {"format": "normal"},
        {"feature": [1, 2]},
        {"precomputed_embeddings": np.zeros(2, complex), "feature": None},
        {"model_specific_data": {3: 4}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_item_with_wrong_parts_is_refused(changed: dict[str, Any]) -> None:
    one = item()
    for name, value in changed.items():
        setattr(one, name, value)
    with pytest.raises(UsageError, match=r"^frames: item"):
        wire.decode(wire.encode(one))


def test_another_kind_than_expected_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a MultimodalInputs, got a MultimodalProcessorOutput"):
        wire.decode(wire.encode(output()), MultimodalInputs)


def test_more_bytes_than_allowed_are_refused() -> None:
    frames = wire.encode(np.zeros(1000))
    assert wire.decode(frames, max_bytes=9000) is not None
    with pytest.raises(UsageError, match=r"at most 8000 bytes.*raise max_bytes"):
        wire.decode(frames, max_bytes=8000)
    with pytest.raises(UsageError, match=r"at most 8000 bytes.*raise max_bytes"):
        wire.unpack(b"".join(wire.pack(np.zeros(1000))), max_bytes=8000)


def test_packed_bytes_are_checked() -> None:
    data = b"".join(wire.pack(output()))
    for at in range(0, len(data), max(1, len(data) // 300)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        try:
            found = wire.unpack(flipped)
        except UsageError:
            continue
        assert wire.same(found, output())  # the bytes between two frames
    for cut in (0, 3, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(UsageError, match=r"^frames: "):
            wire.unpack(data[:cut])
    count = struct.pack("<I", 0xFFFFFFFF)
    with pytest.raises(UsageError, match="truncated"):
        wire.unpack(data[:37] + count + data[41:])


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Frames with a few of their bytes changed, cut, doubled or exchanged."""
    found = [bytearray(frame) for frame in frames]
    for _ in range(chance.randint(1, 4)):
        frame = found[0 if chance.random() < 0.8 else chance.randrange(len(found))]
        at = chance.randrange(len(frame) + 1)
        match chance.randrange(5):
            case 0 if at < len(frame):
                frame[at] = chance.randrange(256)
            case 1:
                del frame[at : at + chance.randint(1, 8)]
            case 2:
                frame[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                chance.shuffle(found)
            case _:
                frame[at : at + 4] = chance.choice([b"\xff" * 4, b"\xdd\x7f\xff\xff", b"\x80\x00\x00\x00"])
    return [bytes(frame) for frame in found]


def fuzz(count: int, seed: int) -> None:
    values = [
        output(),
        item(),
        [Size(2, 3), MediaError("no", path="images[0]")],
        MultimodalInputs.from_processor_output(output()),
    ]
    fuzz_values(values, count, seed)


def fuzz_values(values: list[Any], count: int, seed: int) -> None:
    """Mutated frames of values are decoded, and can be sent on then, or refused."""
    encoded = [[bytes(frame) for frame in wire.encode(value)] for value in values]
    chance, decoded = random.Random(seed), 0
    tracemalloc.start()
    try:
        for _ in range(count):
            try:
                found = wire.decode(mutated(chance.choice(encoded), chance))
            except UsageError as error:
                assert error.argument == "frames"  # noqa: PT017 - either outcome is right
                continue
            decoded += 1
            wire.encode(found)  # whatever was decoded can be sent on
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000
    assert decoded < count


def test_mutated_frames_are_decoded_or_refused() -> None:
    fuzz(1_000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_mutated_frames_are_decoded_or_refused(seed: int) -> None:
    fuzz(20_000, seed)


def test_every_struct_of_the_table_is_named_once() -> None:
    classes = [rule.cls for rule in RULES.values()]
    assert len(classes) == len(set(classes))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], (1,)),
        (1, 1.0),
        (1, True),
        (np.ones(2), torch.ones(2, dtype=torch.float64)),
        (np.ones(2), np.ones(2, np.float32)),
        (np.ones(2), np.ones((2, 1))),
        (0.0, -0.0),
        ({"a": 1}, {"a": 2}),
        (item(1), item(2)),
        (MediaError("a", path="x"), MediaError("a", path="y")),
    ],
    ids=repr,
)
def test_values_that_differ_are_not_the_same(one: Any, other: Any) -> None:
    assert not wire.same(one, other)
    assert wire.same(one, one)
    assert wire.same(other, other)


def test_the_order_of_keys_does_not_matter() -> None:
    assert wire.same({"a": np.ones(2), "b": np.zeros(3)}, {"b": np.zeros(3), "a": np.ones(2)})
    assert wire.same(float("nan"), float("nan"))
