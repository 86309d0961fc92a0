"""Framed digests: two different values never share an encoding, one value has one digest everywhere."""

import io
import itertools
import logging
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
from PIL import Image

from mm_plugin import identity
from mm_plugin.errors import PluginError, UsageError
from mm_plugin.identity import Digests, digest, feature_digest, feature_digests, frame, item_identity, source_key


class Color(IntEnum):
    RED = 1
    BLUE = 2


class Shade(Enum):
    BLUE = 1


class Options(msgspec.Struct, frozen=True):
    a: int = 1


class Tagged(msgspec.Struct, frozen=True, tag="one"):
    a: int = 1


class Retagged(msgspec.Struct, frozen=True, tag="two"):
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
    Shade.BLUE,
    ["RED", 1],
    Options(),
    Options(a=2),
    Tagged(),
    Retagged(),
    ["Options", {"a": 1}],
    [None, {"a": 1}],
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
    with pytest.raises(UsageError, match=r"cannot be framed|cannot be digested|nested"):
        frame(value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be digested"):
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
    with pytest.raises(UsageError, match="expected a numpy array or torch tensor"):
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
print(source_key("m", 1, 1, b"f" * 32, b"o" * 32, {"z": 1, "y": 2, "fields": fields}).hex())
"""


@pytest.mark.case("3.2")
@pytest.mark.case("3.5")
def test_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    fields = {"nested": {"a": None, "b": 1}, "array": np.arange(5), "name": "x", "grid": [1, 4, 6]}
    here = [
        feature_digest(BASE).hex(),
        item_identity("m", 1, 1, "normal", b"f" * 32, fields, salt="t").hex(),
        source_key("m", 1, 1, b"f" * 32, b"o" * 32, {"y": 2, "fields": fields, "z": 1}).hex(),
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
        "options": b"o" * 32,
        "context": {},
        "salt": None,
    }
    changes = [
        ("spec_name", "n"),
        ("output_version", 2),
        ("modality", 2),
        ("source", b"g" * 32),
        ("options", b"p" * 32),
        ("context", {"crop": True}),
        ("context", {"crop": False}),
        ("context", None),
        ("salt", "tenant"),
    ]
    made = [source_key(**base)] + [source_key(**(base | {name: value})) for name, value in changes]
    assert len(set(made)) == len(made)


def test_an_identity_is_never_a_source_key_of_the_same_values() -> None:
    identity = item_identity("m", 1, 1, "normal", b"f" * 32, {}, salt=None)
    assert identity != source_key("m", 1, 1, b"f" * 32, b"o" * 32, None)


# ------------------------------------------------------------------ images, videos and audio inputs


def colored(mode: str, data: bytes, size: tuple[int, int] = (4, 4), **info: Any) -> Image.Image:
    image = Image.frombytes(mode, size, data)
    image.info.update(info)
    return image


def paletted(colors: list[int], mode: str = "P", size: tuple[int, int] = (4, 4), **info: Any) -> Image.Image:
    image = Image.frombytes(mode, size, bytes([0, 1, 0, 1] * 4))
    image.putpalette(colors)
    image.info.update(info)
    return image


GRAY = bytes(range(16))
IMAGES = [
    colored("L", GRAY),
    colored("L", GRAY, (2, 8)),
    colored("L", GRAY, (8, 2)),
    colored("L", bytes([1, *range(1, 16)])),
    colored("L", GRAY, transparency=0),
    colored("L", GRAY, transparency=1),
    colored("LA", GRAY * 2),
    colored("RGB", GRAY * 3),
    colored("RGB", GRAY * 3, transparency=(0, 1, 2)),
    colored("YCbCr", GRAY * 3),
    colored("HSV", GRAY * 3),
    colored("RGBA", GRAY * 4),
    colored("CMYK", GRAY * 4),
    colored("RGBX", GRAY * 4),
    colored("F", GRAY * 4),
    colored("I", GRAY * 4),
    colored("I;16", GRAY * 2),
    colored("1", bytes(range(4))),
    colored("L", bytes([0, 1, 0, 1] * 4)),
    paletted([0, 0, 0, 255, 0, 0]),
    paletted([0, 0, 0, 0, 255, 0]),
    paletted([255, 0, 0, 0, 0, 0]),
    paletted([0, 0, 0, 255, 0, 0], transparency=0),
    paletted([0, 0, 0, 255, 0, 0], transparency=1),
    paletted([0, 0, 0, 255, 0, 0], transparency=b"\x00\xff"),
    paletted([0, 0, 0, 255, 0, 0], transparency=b"\xff\x00"),
]


@pytest.mark.case("3.6")
def test_images_that_differ_in_anything_that_shows_have_different_frames() -> None:
    frames = [frame(img) for img in IMAGES]
    clashes = [(i, j) for i, j in itertools.combinations(range(len(frames)), 2) if frames[i] == frames[j]]
    assert clashes == []
    assert len({len(part) for part in frames}) > 1
    assert [frame(img.copy()) for img in IMAGES] == frames
    assert not {frame(np.asarray(img)) for img in IMAGES} & set(frames)


@pytest.mark.case("3.5")
@pytest.mark.parametrize("kind", ["TIFF", "PNG", "GIF", "JPEG"])
def test_an_image_has_one_frame_before_and_after_it_is_loaded(kind: str) -> None:
    file = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    colored("RGB", bytes(range(24)), (4, 2)).save(file, kind, **({} if kind == "GIF" else {"exif": turned}))
    lazy, loaded = (Image.open(io.BytesIO(file.getvalue())) for _ in range(2))
    loaded.load()
    assert frame(lazy) == frame(loaded)


@pytest.mark.case("3.2")
@pytest.mark.case("3.6")
def test_a_uniform_image_is_distinguished_by_its_grid() -> None:
    rows = np.full((64, 12), 7, np.uint8)  # 64 patches, whether they lie 4 x 16 or 16 x 4
    feature = feature_digest(rows)
    grids = [[1, 4, 16], [1, 16, 4], [1, 8, 8], [1, 64, 1], [4, 4, 4]]
    made = {item_identity("m", 1, 1, "normal", feature, {"image_grid_thw": np.array([grid])}) for grid in grids}
    assert len(made) == len(grids)
    two, eight = (feature_digest(np.arange(16, dtype=np.uint8).reshape(shape)) for shape in ((2, 8), (8, 2)))
    assert two != eight


def test_an_image_is_no_video_of_one_frame() -> None:
    pixels = np.full((4, 6, 3), 9, np.uint8)
    grid = {"grid": np.array([[1, 4, 6]])}
    as_image, as_video = (
        {item_identity("m", 1, modality, "normal", feature_digest(value), grid) for value in (pixels, pixels[None])}
        for modality in (1, 2)
    )
    assert len(as_image | as_video) == 4
    assert frame(pixels) != frame(pixels[None]) != frame([pixels]) != frame([[pixels]])


def test_audio_is_its_samples_and_their_rate() -> None:
    samples = np.arange(8, dtype=np.int16)
    audios: list[Any] = [
        {"samples": samples, "rate": 16_000},
        {"samples": samples, "rate": 16_000.0},
        {"samples": samples, "rate": 8_000},
        {"samples": samples.astype(np.float32), "rate": 16_000},
        {"samples": samples.reshape(2, 4), "rate": 16_000},
        {"samples": samples.reshape(4, 2), "rate": 16_000},
        {"samples": samples},
        samples,
        [samples, 16_000],
    ]
    assert len({frame(audio) for audio in audios}) == len(audios)
    assert frame({"rate": 16_000, "samples": torch.from_numpy(samples)}) == frame(audios[0])


def test_frames_of_a_video_are_distinguished_by_order_and_number() -> None:
    first, second = np.zeros((2, 2), np.uint8), np.ones((2, 2), np.uint8)
    videos: list[Any] = [[first, second], [second, first], [first], [first, first], np.stack([first, second]), []]
    assert len({frame(video) for video in videos}) == len(videos)


@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4).flatmap(
        lambda shape: st.tuples(hnp.arrays(np.int16, shape), st.permutations(range(len(shape))), st.integers(1, 3))
    )
)
def test_strides_do_not_count_and_shapes_do(drawn: tuple[np.ndarray, list[int], int]) -> None:
    array, axes, step = drawn
    moved = np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))
    spread = np.repeat(array, step, axis=0)[::step]
    raw = array.astype("<i2").tobytes()
    expected = blake3(frame(["int16", list(array.shape), blake3(raw).digest()])).digest()
    assert feature_digest(array) == feature_digest(moved) == feature_digest(spread) == expected
    assert feature_digest(torch.from_numpy(moved.copy(order="K"))) == expected
    for shape in {(array.size,), (1, *array.shape), (*array.shape, 1)} - {array.shape}:
        assert feature_digest(array.reshape(shape)) != expected


MORE = """
import sys
import numpy as np
from PIL import Image
from mm_plugin.identity import caller_identity, frame
image = Image.new("P", (3, 2), 1)
image.putpalette([1, 2, 3, 4, 5, 6])
value = {"words": {"b": 1, "a": [1.0, True, None]}, "set": ("x", b"x"), "image": image, "bytes": b"q", 3: 2**70}
print(frame(value).hex())
print(caller_identity("m", 1, 1, 2**70, b"o" * 32, {"many": True, "few": False}, salt=b"s").hex())
"""


@pytest.mark.case("3.2")
def test_frames_and_identities_are_equal_under_every_hash_seed() -> None:
    reported = []
    for seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        reported.append(
            subprocess.run(
                [sys.executable, "-c", MORE], env=environment, capture_output=True, text=True, check=True, timeout=120
            ).stdout
        )
    assert len(set(reported)) == 1
    assert len(reported[0].split()) == 2


@pytest.mark.case("3.5")
def test_threads_get_the_digests_that_one_gets() -> None:
    large = [np.arange(600_000, dtype=np.float32) + index for index in range(4)]  # above the bytes that are split
    mixed: list[Any] = [*large, *(torch.from_numpy(array) for array in large), *DISTINCT_ARRAYS]
    expected = [feature_digest(value) for value in mixed]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(feature_digest, mixed * 4)) == expected * 4
        assert list(pool.map(lambda _: feature_digests(mixed), range(4))) == [expected] * 4
    by_hand = blake3(frame(["float32", [600_000], blake3(large[0].tobytes()).digest()])).digest()
    assert expected[0] == expected[4] == by_hand


DISTINCT_ARRAYS = [value for value in DISTINCT if isinstance(value, np.ndarray | torch.Tensor)]


# ------------------------------------------------------------------ other devices


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device, which this machine need not have."""

    where = torch.device("xpu:0")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    def cpu(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def away(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(Elsewhere)


@pytest.fixture(autouse=True)
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensor.to(device)` reaches the device that is not there."""
    original = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return away(self) if arguments and arguments[0] == Elsewhere.where else original(self, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)


class Hasher:
    """What a plugin offers for a device; remembers what it was asked."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[list[int]] = []
        self.answer = answer

    def __call__(self, tensors: Any) -> Any:
        assert all(type(tensor) is Elsewhere and tensor.dtype == torch.uint8 and tensor.ndim == 1 for tensor in tensors)
        self.calls.append([len(tensor) for tensor in tensors])
        right = [blake3(bytes(tensor.cpu().tolist())).digest() for tensor in tensors]
        return right if self.answer is None else self.answer(tensors, right)


FEATURES = [torch.arange(6.0).reshape(2, 3), torch.zeros(0, 4, dtype=torch.bfloat16), torch.tensor(True)]


def test_tensors_of_one_device_are_hashed_by_its_function_together_and_where_they_lie() -> None:
    hasher = Hasher()
    digests = Digests({"xpu": hasher})
    expected = [feature_digest(feature) for feature in FEATURES]
    mixed = [away(FEATURES[0]), FEATURES[1], away(FEATURES[2]), FEATURES[0].numpy(), away(FEATURES[1])]
    found = feature_digests(mixed, digests)
    assert found == [expected[0], expected[1], expected[2], expected[0], expected[1]]
    checked, asked = hasher.calls
    assert sorted(checked) == sorted(entry["length"] for entry in identity.test_vectors()["blake3"])
    assert asked == [24, 1, 0]
    assert feature_digest(away(FEATURES[0]), digests) == expected[0]
    assert hasher.calls[2:] == [[24]]  # it is not checked again
    assert digests.copied == frozenset()


def cut(tensors: Any, right: list[bytes]) -> list[bytes]:
    """Wrong for a large buffer alone."""
    return [b"\0" * 32 if len(tensor) > 100_000 else answer for tensor, answer in zip(tensors, right, strict=True)]


@pytest.mark.parametrize(
    "answer",
    [
        lambda tensors, right: [blake3(answer).digest() for answer in right],
        lambda tensors, right: right[::-1],
        lambda tensors, right: [answer[:16] for answer in right],
        lambda tensors, right: [answer.hex() for answer in right],
        lambda tensors, right: right[:-1],
        lambda tensors, right: [*right, right[0]],
        lambda tensors, right: [],
        lambda tensors, right: [None for _ in right],
        cut,
    ],
    ids=["other", "reversed", "short", "text", "too few", "too many", "none", "nothing", "large ones"],
)
def test_a_function_that_hashes_wrongly_is_refused_before_its_first_answer(answer: Any) -> None:
    hasher = Hasher(answer)
    digests = Digests({"xpu": hasher})
    for _ in range(2):
        with pytest.raises(PluginError, match="xpu"):
            feature_digest(away(FEATURES[0]), digests)
    assert all(len(call) == len(identity.test_vectors()["blake3"]) for call in hasher.calls)


def test_a_device_without_a_function_is_copied_which_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    digests = Digests()
    with caplog.at_level(logging.WARNING, "mm_plugin"):
        for _ in range(3):
            assert feature_digests([away(FEATURES[0])] * 2, digests) == [feature_digest(FEATURES[0])] * 2
    assert digests.copied == {"xpu"}
    (record,) = caplog.records
    assert "xpu" in record.getMessage()
    assert feature_digest(FEATURES[0], digests) == feature_digest(FEATURES[0])
    assert Digests().copied == frozenset()


def test_many_threads_check_a_function_once() -> None:
    hasher = Hasher()
    digests = Digests({"xpu": hasher})
    meeting = threading.Barrier(8)

    def ask(_: int) -> bytes:
        meeting.wait(10)
        return feature_digest(away(FEATURES[0]), digests)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {feature_digest(FEATURES[0])}
    assert sorted(map(len, hasher.calls)) == [1] * 8 + [len(identity.test_vectors()["blake3"])]


DIGESTS = """
from blake3 import blake3
from mm_plugin import hookimpl

def right(tensors):
    return [blake3(bytes(tensor.cpu().tolist())).digest() for tensor in tensors]

def wrong(tensors):
    return [bytes(32) for tensor in tensors]

@hookimpl
def mm_register_digests():
    return {"xpu": NAME}
"""


def test_a_plugin_brings_a_function_for_a_device(site: Any, open_registry: Any) -> None:
    site.install("hasher", DIGESTS.replace("NAME", "right"), digests=["xpu"])
    registry = open_registry()
    assert site.imports("hasher") == 0
    digests = registry.digests
    assert site.imports("hasher") == 1
    assert registry.digests is digests
    assert feature_digest(away(FEATURES[0]), digests) == feature_digest(FEATURES[0])
    assert digests.copied == frozenset()


def test_a_plugins_function_that_hashes_wrongly_is_refused_on_first_use(site: Any, open_registry: Any) -> None:
    site.install("hasher", DIGESTS.replace("NAME", "wrong"), digests=["xpu"])
    digests = open_registry().digests
    with pytest.raises(PluginError, match="xpu"):
        feature_digest(away(FEATURES[0]), digests)


@pytest.mark.parametrize(
    "source", ["raise OSError('lost')\n", DIGESTS.replace("NAME", "3")], ids=["import", "no function"]
)
def test_where_the_plugin_is_broken_tensors_are_copied_and_the_record_says_why(
    site: Any, open_registry: Any, source: str
) -> None:
    site.install("hasher", source, digests=["xpu"])
    registry = open_registry()
    assert feature_digest(away(FEATURES[0]), registry.digests) == feature_digest(FEATURES[0])
    assert registry.digests.copied == {"xpu"}
    assert {record.state for record in registry.plugins if record.name == "hasher"} == {"failed"}


def test_of_two_plugins_for_one_device_neither_is_taken(site: Any, open_registry: Any) -> None:
    for name in ("hasher-1", "hasher-2"):
        site.install(name, DIGESTS.replace("NAME", "right"), digests=["xpu"])
    assert feature_digest(away(FEATURES[0]), open_registry().digests) == feature_digest(FEATURES[0])
    one = open_registry(disabled=("hasher_2",)).digests
    feature_digest(away(FEATURES[0]), one)
    assert one.copied == frozenset()
