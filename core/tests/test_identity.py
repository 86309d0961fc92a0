"""Framed digests: two different values never share an encoding, one value has one digest everywhere."""

import itertools
import os
import struct
import subprocess
import sys
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mm_plugin.errors import UsageError
from mm_plugin.identity import digest, feature_digest, frame, item_identity, source_key


class Color(IntEnum):
    RED = 1
    BLUE = 2


class Shade(Enum):
    RED = 1


class Options(msgspec.Struct, frozen=True):
    a: int = 1


class Others(msgspec.Struct, frozen=True):
    a: int = 1


ZERO = np.zeros(1, np.float32)
# Pairwise different values, near to one another in some way.
DISTINCT: list[Any] = [
    None,
    False,
    True,
    0,
    1,
    -1,
    255,
    256,
    -256,
    2**64,
    2**64 + 1,
    1.0,
    0.0,
    -0.0,
    float("inf"),
    float("nan"),
    5e-324,
    "",
    "1",
    "abc",
    b"abc",
    b"",
    "None",
    "\x00",
    "\ud800",
    [],
    [[]],
    [[], []],
    [None],
    [1],
    [True],
    [1.0],
    ["abc"],
    ["a", "bc"],
    ["ab", "c"],
    [[1, 2], [3]],
    [[1], [2, 3]],
    [1, 2, 3],
    [[1, 2], [3, 4, 5]],
    [[1, 2, 3], [4, 5]],
    {},
    {"a": 1},
    {"a": 1.0},
    {"a": None},
    {"b": 1},
    {b"a": 1},
    {1: "a"},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {"a": {"b": 2}},
    [["a", 1]],
    Color.RED,
    Color.BLUE,
    Shade.RED,
    ["Color", "RED"],
    Options(),
    Options(a=2),
    Others(),
    ["Options", {"a": 1}],
    np.arange(16),
    np.arange(16).reshape(4, 4),
    np.arange(16, dtype=np.int32),
    np.arange(16, dtype=np.uint64),
    np.arange(16, dtype=np.float64),
    np.arange(15),
    np.zeros(0),
    np.zeros((0, 3)),
    np.zeros((3, 0)),
    np.zeros(0, np.int8),
    ZERO,
    -ZERO,
    np.zeros((), np.float32),
    np.zeros((1, 1), np.float32),
    np.zeros(1, np.int32),
    np.zeros(4, np.uint8),
    np.zeros(4, bool),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.float16),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
    torch.zeros(2, dtype=torch.float8_e5m2),
    torch.zeros(2, dtype=torch.uint8),
    torch.zeros(2, dtype=torch.bool),
    np.complex64(1),
    feature_digest(ZERO),
]


@pytest.mark.case("3.2")
def test_near_equal_values_have_different_frames() -> None:
    frames = [frame(value) for value in DISTINCT]
    clashes = [(i, j) for i, j in itertools.combinations(range(len(frames)), 2) if frames[i] == frames[j]]
    assert clashes == []


@pytest.mark.case("3.2")
def test_no_frame_is_the_beginning_of_another() -> None:
    # So frames that are joined can be taken apart again, and no list can pass for another.
    frames = sorted(frame(value) for value in DISTINCT)
    assert [(a, b) for a, b in itertools.pairwise(frames) if b.startswith(a)] == []


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """A form in which `==` tells 1, 1.0 and True, and 0.0 and -0.0, from one another."""
    if isinstance(value, list):
        return ("list", tuple(typed(part) for part in value))
    if isinstance(value, dict):
        return ("dict", frozenset((typed(key), typed(part)) for key, part in value.items()))
    if isinstance(value, float):
        return ("float", struct.pack("d", value))
    return (type(value).__name__, value)


@given(values, values)
def test_frames_are_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    assert (frame(one) == frame(other)) == (typed(one) == typed(other))


@given(st.dictionaries(st.text(max_size=3) | st.integers(), scalars, max_size=5), st.randoms())
def test_the_order_of_a_mapping_does_not_count(mapping: dict[Any, Any], random: Any) -> None:
    pairs = list(mapping.items())
    random.shuffle(pairs)
    assert frame(dict(pairs)) == frame(mapping)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, "a"], (1, "a")),
        (b"ab", bytearray(b"ab")),
        (b"ab", memoryview(b"xaxb")[1::2]),
        (np.arange(3), torch.arange(3)),
        (1.5, np.float64(1.5)),
    ],
    ids=["list and tuple", "bytes and bytearray", "bytes and memoryview", "numpy and torch", "float and float64"],
)
def test_spellings_of_one_value_share_a_frame(one: Any, other: Any) -> None:
    assert frame(one) == frame(other)


def test_frames_are_what_the_documentation_says() -> None:
    length = struct.Struct(">Q").pack
    assert frame(None) == b"N"
    assert frame([True, False]) == b"l" + length(2) + b"TF"
    assert frame(-258) == b"i-" + length(2) + b"\x01\x02"
    assert frame(0) == b"i+" + length(0)
    assert frame(1.0) == b"f\x3f\xf0" + b"\0" * 6
    assert frame("é") == b"s" + length(2) + b"\xc3\xa9"
    assert frame(b"\xff") == b"b" + length(1) + b"\xff"
    assert frame({"b": None, "a": True}) == b"d" + length(2) + frame("a") + b"T" + frame("b") + b"N"
    assert frame(Color.RED) == b"e" + frame(["Color", "RED"])
    assert frame(Options()) == b"m" + frame(["Options", {"a": 1}])
    raw = blake3(struct.pack("<2h", 1, -2)).digest()
    by_hand = blake3(b"l" + length(3) + frame("int16") + frame([2]) + frame(raw)).digest()
    assert frame(np.array([1, -2], np.int16)) == b"a" + by_hand


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        [object()],
        {"a": {1}},
        range(3),
        1j,
        np.array([None]),
        np.array(["a"]),
        np.array(["2020"], "M8[D]"),
        np.zeros(1, [("a", "i4")]),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        torch.zeros(2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_what_has_no_identity_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"no identity|nested"):
        frame(value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="no identity"):
        feature_digest(torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8))


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(UsageError, match="nested too deeply"):
        frame(value)
    # Taken apart from outside in, for a deep list can overflow the stack when it is freed at once.
    while value:
        value = value[0]


@pytest.mark.parametrize("value", [[1, 2], "abc", 1.0, None, b"abc"])
def test_a_feature_is_an_array(value: Any) -> None:
    with pytest.raises(UsageError, match="no array"):
        feature_digest(value)


BASE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.case("3.5")
@pytest.mark.parametrize(
    "same",
    [
        BASE.copy(),
        np.asfortranarray(BASE),
        BASE.astype(">f4"),
        np.asfortranarray(BASE.astype(">f4")),
        np.repeat(BASE, 2, axis=2)[:, :, ::2],
        BASE[::-1].copy()[::-1],
        np.ascontiguousarray(BASE.transpose(2, 1, 0)).transpose(2, 1, 0),
        torch.from_numpy(BASE.copy()),
        torch.from_numpy(BASE.copy()).permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.from_numpy(np.repeat(BASE, 2, axis=0))[::2],
        torch.from_numpy(BASE.copy()).requires_grad_(),
        torch.nn.Parameter(torch.from_numpy(BASE.copy())),
    ],
    ids=[
        "copy",
        "fortran",
        "big-endian",
        "big-endian fortran",
        "strided",
        "reversed",
        "transposed",
        "torch",
        "torch permuted",
        "torch strided",
        "torch with gradient",
        "parameter",
    ],
)
def test_every_layout_of_one_array_has_one_digest(same: Any) -> None:
    raw = blake3(BASE.astype("<f4").tobytes()).digest()
    assert feature_digest(same) == blake3(frame(["float32", [2, 3, 4], raw])).digest()


def test_a_read_only_array_and_a_broadcast_one_have_digests() -> None:
    fixed = BASE.copy()
    fixed.flags.writeable = False
    assert feature_digest(fixed) == feature_digest(BASE)
    assert feature_digest(np.broadcast_to(ZERO, (3, 2))) == feature_digest(np.zeros((3, 2), np.float32))
    assert feature_digest(torch.zeros(1).expand(3, 2)) == feature_digest(np.zeros((3, 2), np.float32))


dtypes = st.sampled_from(
    ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
)


@given(dtypes.flatmap(lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_numpy_and_torch_agree_for_every_dtype_and_shape(array: np.ndarray) -> None:
    assert feature_digest(array) == feature_digest(torch.from_numpy(array.copy()))
    if array.dtype.itemsize > 1:
        assert feature_digest(array) == feature_digest(array.astype(array.dtype.newbyteorder(">")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_dtypes_that_numpy_lacks_are_digested_by_their_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6.0)[: int(np.prod(shape))].reshape(shape).to(dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    name = str(dtype).removeprefix("torch.")
    assert feature_digest(tensor) == blake3(frame([name, list(shape), blake3(raw).digest()])).digest()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_slices_with_long_strides_are_digested(length: int) -> None:
    tensor = torch.arange(8.0)[::3][:length]
    assert feature_digest(tensor) == feature_digest(np.array([0, 3][:length], np.float32))


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert feature_digest(tensor.conj()) == feature_digest(np.array([1 - 2j, 3 + 4j], np.complex64))
    assert feature_digest(tensor.conj().imag) == feature_digest(np.array([-2, 4], np.float32))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_the_digest_is_blake3_at_every_size(size: int) -> None:
    data = np.resize(np.arange(251, dtype=np.uint8), size).tobytes()
    assert digest(data) == digest(memoryview(data)) == digest(bytearray(data)) == blake3(data).digest()


def test_the_digest_of_nothing_is_the_published_one() -> None:
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


SCRIPT = """
import numpy as np, torch
from mm_plugin.identity import feature_digest, item_identity, source_key
fields = {"grid": (1, 4, 6), "name": "x", "array": torch.arange(5), "nested": {"b": 1, "a": None}}
print(feature_digest(torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)).hex())
print(item_identity("m", 1, 1, "normal", b"f" * 32, fields, salt="t").hex())
print(source_key("m", 1, 1, b"f" * 32, fields, {"z": 1, "y": 2}).hex())
"""


@pytest.mark.case("3.2")
@pytest.mark.case("3.5")
def test_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    fields = {"nested": {"a": None, "b": 1}, "array": np.arange(5), "name": "x", "grid": [1, 4, 6]}
    here = [
        feature_digest(BASE).hex(),
        item_identity("m", 1, 1, "normal", b"f" * 32, fields, salt="t").hex(),
        source_key("m", 1, 1, b"f" * 32, fields, {"y": 2, "z": 1}).hex(),
    ]
    environment = os.environ | {"PYTHONHASHSEED": "4321"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == here


ARGUMENTS: dict[str, Any] = {
    "spec_name": "m",
    "output_version": 1,
    "modality": 1,
    "format": "normal",
    "feature": b"f" * 32,
    "fields": {"grid": (1, 4, 6)},
    "salt": None,
}
CHANGES = [
    ("spec_name", "n"),
    ("output_version", 2),
    ("modality", 2),
    ("format", "processor_output"),
    ("feature", b"g" * 32),
    ("fields", {"grid": (1, 6, 4)}),
    ("fields", {}),
    ("salt", "tenant"),
    ("salt", ""),
    ("salt", b""),
]


@pytest.mark.case("3.7")
def test_everything_that_the_model_sees_is_in_the_identity() -> None:
    made = [item_identity(**ARGUMENTS)] + [item_identity(**(ARGUMENTS | {name: value})) for name, value in CHANGES]
    assert len(set(made)) == len(made)
    assert {len(identity) for identity in made} == {32}


@pytest.mark.case("3.9")
def test_everything_that_preparation_depends_on_is_in_the_source_key() -> None:
    base = {
        "spec_name": "m",
        "output_version": 1,
        "modality": 1,
        "source": b"f" * 32,
        "options": {"a": 1},
        "context": {},
        "salt": None,
    }
    changes = [
        ("spec_name", "n"),
        ("output_version", 2),
        ("modality", 2),
        ("source", b"g" * 32),
        ("options", {"a": True}),
        ("options", {}),
        ("context", {"crop": True}),
        ("context", {"crop": False}),
        ("context", None),
        ("salt", "tenant"),
    ]
    made = [source_key(**base)] + [source_key(**(base | {name: value})) for name, value in changes]
    assert len(set(made)) == len(made)


def test_an_identity_is_never_a_source_key_of_the_same_values() -> None:
    identity = item_identity("m", 1, 1, "normal", b"f" * 32, {}, salt=None)
    assert identity != source_key("m", 1, 1, b"f" * 32, {}, None)
