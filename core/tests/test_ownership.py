"""Nothing that a caller gave is kept: what it writes into its own memory afterwards changes neither features nor caches."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from toy import Toy, toy_spec

from mm_plugin.arrays import detached, is_dense, is_masked, owned
from mm_plugin.errors import MediaError, ProcessorError, RequestError, UsageError
from mm_plugin.identity import feature_digest
from mm_plugin.inputs import PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media import AudioSamples, VideoFrames, VideoSize, open_audio, open_image, open_video, probe
from mm_plugin.processor import AcceptsPrecomputed
from mm_plugin.settings import Settings

ALL = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
TOKENS = tuple(toy.TOKENS.values())


class Given(AcceptsPrecomputed, Toy):
    """Features come as `pixels`, a row for each token."""

    def check_fields(self, modality: Modality, fields: Mapping[str, Any]) -> int:
        return int(fields["rows"])

    def check_feature(self, modality: Modality, feature: Any, fields: Mapping[str, Any]) -> None:
        assert len(feature) == fields["rows"]


class AsDecoded(Given):
    """The feature is what was decoded, or a view of it."""

    def prepare(self, decoded: Any, layout: Mapping[str, Any], options: Any) -> Any:
        if decoded.modality is Modality.AUDIO:
            return decoded.samples[::-1]
        if decoded.modality is Modality.VIDEO:
            return next(iter(decoded.frames))[::-1]
        return decoded.pixels[::-1, :, ::-1]


@pytest.fixture
def open_given(open_words: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls=Given, **spec: open_words(
        cls, toy_spec(*ALL, feature_names=dict.fromkeys(ALL, "pixels"), **spec), TOKENS
    )


LEVELS = np.arange(24, dtype=np.float32).reshape(4, 6)


def layouts() -> dict[str, Callable[[], np.ndarray]]:
    """The same 4 x 6 numbers, in memory that looks otherwise each time."""
    return {
        "plain": LEVELS.copy,
        "mirrored": lambda: LEVELS[::-1, ::-1].copy()[::-1, ::-1],
        "column by column": lambda: np.asfortranarray(LEVELS),
        "every other": lambda: np.repeat(LEVELS, 2, axis=1)[:, ::2],
        "a view of more": lambda: np.pad(LEVELS, 3)[3:-3, 3:-3],
        "the other byte order": lambda: LEVELS.astype(">f4"),
        "unaligned": _unaligned,
        "a subclass": lambda: LEVELS.copy().view(np.memmap),
        "read-only": _read_only,
    }


def _unaligned() -> np.ndarray:
    found = np.frombuffer(bytearray(b"x" + LEVELS.tobytes()), np.uint8)[1:].view(np.float32).reshape(4, 6)
    assert not found.flags.aligned
    return found


def _read_only() -> np.ndarray:
    found = LEVELS.copy()
    found.flags.writeable = False
    return found


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.from_numpy(LEVELS.copy()),
    "tensor that needs a gradient": lambda: torch.from_numpy(LEVELS.copy()).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.from_numpy(LEVELS.copy())),
    "transposed tensor": lambda: torch.from_numpy(LEVELS.T.copy()).T,
    "negated tensor": lambda: torch.imag(torch.complex(torch.zeros(4, 6), torch.from_numpy(-LEVELS)).conj()),
    "inference tensor": lambda: _inferred(),
}


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.from_numpy(LEVELS.copy()).clone()


FORMS = {**layouts(), **TENSORS}


def overwrite(value: Any) -> None:
    """What a caller does that fills its buffer with the next request's numbers."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = 99
    else:
        with torch.inference_mode():
            value.fill_(99)


@pytest.mark.parametrize("kind", ["feature", "embeddings"])
@pytest.mark.parametrize("form", FORMS)
def test_a_prepared_input_is_kept_as_a_plain_copy(open_given: Callable[..., Any], form: str, kind: str) -> None:
    processor, value = open_given(), FORMS[form]()
    fields = {"rows": 4, "kind": 1}
    given = ProcessorOutput({"pixels": value, **fields}) if kind == "feature" else PrecomputedEmbeddings(value, fields)
    (item,) = processor.process("<image>", [given]).mm_items
    overwrite(value)
    kept = item.feature if kind == "feature" else item.precomputed_embeddings
    if isinstance(kept, np.ndarray):
        assert type(kept) is np.ndarray
        kept = torch.from_numpy(kept)  # refuses negative strides and other byte orders
    assert type(kept) is torch.Tensor
    assert not kept.requires_grad
    assert kept.is_contiguous()
    assert kept.tolist() == LEVELS.tolist()
    # Its identity is that of these numbers, in whatever memory they came.
    again = (
        ProcessorOutput({"pixels": LEVELS, **fields}) if kind == "feature" else PrecomputedEmbeddings(LEVELS, fields)
    )
    assert processor.process("<image>", [again]).mm_items[0].identity == item.identity


def test_given_fields_are_copied(open_given: Callable[..., Any]) -> None:
    rows = np.array(4)
    (item,) = open_given().process("<image>", [ProcessorOutput({"pixels": LEVELS, "rows": rows, "kind": 1})]).mm_items
    rows[...] = 9
    assert item.model_specific_data["rows"] == 4


class Stubborn(torch.Tensor):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.__name__ in ("clone", "detach"):
            raise ValueError("no")
        return super().__torch_function__(function, types, arguments, named or {})


@pytest.mark.parametrize("kind", ["feature", "embeddings"])
def test_a_tensor_that_cannot_be_copied_is_the_requests_fault(open_given: Callable[..., Any], kind: str) -> None:
    value, fields = torch.ones(4, 6).as_subclass(Stubborn), {"rows": 4, "kind": 1}
    given = ProcessorOutput({"pixels": value, **fields}) if kind == "feature" else PrecomputedEmbeddings(value, fields)
    with pytest.raises(MediaError, match="can be copied") as caught:
        open_given().process("<image>", [given])
    assert caught.value.path == "images[0]"


# ------------------------------------------------------------------ raw media inputs


def pil(mode: str) -> Image.Image:
    image = Image.fromarray(toy.img(1, 7, 9))
    return image.quantize(8) if mode == "P" else image.convert(mode)


def lazy(format: str) -> Image.Image:
    file = io.BytesIO()
    pil("RGB").save(file, format)
    file.seek(0)
    return Image.open(file)


IMAGES: dict[str, Callable[[], Any]] = {
    "array": lambda: toy.img(1, 7, 9),
    "mirrored array": lambda: toy.img(1, 7, 9)[::-1, :, ::-1],
    "tensor": lambda: torch.from_numpy(toy.img(1, 7, 9)).permute(2, 0, 1),
    **{f"PIL {mode}": lambda mode=mode: pil(mode) for mode in ("RGB", "L", "P", "RGBA", "CMYK", "1")},
    **{f"lazy {name}": lambda name=name: lazy(name) for name in ("PNG", "JPEG", "TIFF", "BMP")},
}


def blacken(value: Any) -> None:
    """Change every pixel in place."""
    if isinstance(value, Image.Image):
        value.load()
        value.paste(Image.new(value.mode, value.size))
    else:
        value[...] = 0


def in_video(make: Callable[[], Any]) -> Any:
    return VideoFrames([make(), make()], fps=1)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("video", [False, True], ids=["image", "frames"])
def test_what_is_prepared_is_what_was_digested(name: str, video: bool) -> None:
    make, place = IMAGES[name], {"path": "images[0]", "settings": Settings()}
    plain = (open_image if not video else open_video)(make() if not video else in_video(make), **place)
    rules: Any = type("All", (), {"sample": None})
    expected = np.stack(list(plain.decode(plain.size(rules)).frames)) if video else plain.decode().pixels
    value = make() if not video else in_video(make)
    source = (open_video if video else open_image)(value, **place)
    key = source.digest()
    for one in value.frames if video else [value]:
        blacken(one)
    found = np.stack(list(source.decode(source.size(rules)).frames)) if video else source.decode().pixels
    assert found.tolist() == expected.tolist()
    assert found.any()
    assert source.digest() == key == plain.digest()


@pytest.mark.parametrize("samples", [np.float32, np.float64, np.int16, "channels", "tensor"])
def test_samples_are_copied(samples: Any) -> None:
    values: Any = np.arange(1, 9)
    values = values.astype(samples) if isinstance(samples, type) else values.astype(np.float32)
    values = {"channels": np.stack([values, values]), "tensor": torch.from_numpy(values.astype(np.float32))}.get(
        str(samples), values
    )
    source = open_audio(AudioSamples(values, 8), path="audios[0]", settings=Settings())
    before = source.decode(source.probe()).samples.copy()
    values[...] = 0
    assert source.decode(source.probe()).samples.tolist() == before.tolist()
    assert before.all()


@pytest.mark.parametrize("modality", ALL, ids=lambda modality: modality.name.lower())
def test_a_feature_that_is_the_media_input_itself_does_not_reach_the_caller(
    open_given: Callable[..., Any], modality: Modality
) -> None:
    processor = open_given(AsDecoded)
    pixels, samples = toy.img(0, 3, 4), np.arange(3, dtype=np.float32)
    value = {
        Modality.IMAGE: pixels,
        Modality.VIDEO: VideoFrames(pixels[None], fps=1),
        Modality.AUDIO: AudioSamples(samples, toy.RATE),
    }[modality]
    feature = processor.prepare_item(modality, value).feature
    expected = {Modality.IMAGE: pixels[::-1, :, ::-1], Modality.VIDEO: pixels[::-1], Modality.AUDIO: samples[::-1]}
    assert feature.tolist() == expected[modality].tolist()
    torch.from_numpy(feature)
    assert not np.may_share_memory(feature, pixels)
    assert not np.may_share_memory(feature, samples)


def test_a_feature_is_copied_only_where_it_must_be() -> None:
    source, other = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)
    assert detached(other, source) is other
    tensor = torch.zeros(4)
    assert detached(tensor, source) is tensor
    for view in (source, source[1:], torch.from_numpy(source), torch.from_numpy(source)[1:, 1:]):
        copied = detached(view, other, source)
        assert copied is not view
        assert copied.tolist() == view.tolist()
        source[...] += 1
        assert copied.tolist() != view.tolist()
    assert detached("text", source) == "text"


@pytest.mark.parametrize("form", FORMS)
def test_owned_and_its_digest(form: str) -> None:
    value = FORMS[form]()
    copied = owned(value)
    assert feature_digest(copied) == feature_digest(value) == feature_digest(LEVELS)
    overwrite(value)
    assert feature_digest(copied) == feature_digest(LEVELS)


# ------------------------------------------------------------------ masks


def masked(shape: Sequence[int], dtype: Any) -> Any:
    found = np.ma.MaskedArray(np.ones(shape, dtype), mask=np.zeros(shape, bool))
    found[(0,) * len(shape)] = np.ma.masked
    return found


def masked_tensor(shape: Sequence[int], dtype: torch.dtype) -> Any:
    from torch.masked import masked_tensor as make

    value = torch.ones(*shape, dtype=dtype)
    return make(value, torch.ones_like(value, dtype=torch.bool))


MASKED: dict[str, tuple[str, Callable[[], Any]]] = {
    "image": ("image", lambda: masked((3, 4, 3), np.uint8)),
    "image without one masked pixel": ("image", lambda: np.ma.MaskedArray(np.ones((3, 4, 3), np.uint8))),
    "frames": ("video", lambda: VideoFrames(masked((2, 3, 4, 3), np.uint8), fps=1)),
    "one frame": ("video", lambda: VideoFrames([toy.img(), masked((3, 4, 3), np.uint8)], fps=1)),
    "times": ("video", lambda: VideoFrames([toy.img()] * 2, timestamps=np.ma.array([0.0, 1.0], mask=[0, 1]))),
    "samples": ("audio", lambda: AudioSamples(masked((8,), np.float32), 16)),
    "channels": ("audio", lambda: AudioSamples([masked((8,), np.float32), np.ones(8)], 16)),
    "int16": ("audio", lambda: AudioSamples(masked((2, 8), np.int16), 16)),
    "feature": ("image", lambda: ProcessorOutput({"pixels": masked((4, 2), np.float32), "rows": 4, "kind": 1})),
    "field": ("image", lambda: ProcessorOutput({"pixels": LEVELS, "rows": np.ma.array(4, mask=True), "kind": 1})),
    "field in a list": (
        "image",
        lambda: ProcessorOutput({"pixels": LEVELS, "rows": [[np.ma.array([4], mask=[1])]], "kind": 1}),
    ),
    "embeddings": ("image", lambda: PrecomputedEmbeddings(masked((4, 2), np.float32), {"rows": 4, "kind": 1})),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_array_is_refused(open_given: Callable[..., Any], name: str) -> None:
    modality, make = MASKED[name]
    with pytest.raises(MediaError) as caught:
        open_given().prepare_item(modality, make())
    assert "mask" in str(caught.value) or name == "embeddings"
    assert caught.value.reason in ("array", "fields", "rows")
    assert caught.value.path == f"{modality}s[0]"


@pytest.mark.filterwarnings("ignore:.*MaskedTensors is in prototype stage")
@pytest.mark.parametrize(
    ("modality", "make"),
    [
        ("audio", lambda: AudioSamples(masked_tensor((8,), torch.float32), 16)),
        ("image", lambda: ProcessorOutput({"pixels": masked_tensor((4, 2), torch.float32), "rows": 4, "kind": 1})),
        ("image", lambda: PrecomputedEmbeddings(masked_tensor((4, 2), torch.float32), {"rows": 4, "kind": 1})),
    ],
    ids=["samples", "feature", "embeddings"],
)
def test_a_masked_tensor_is_refused(open_given: Callable[..., Any], modality: str, make: Callable[[], Any]) -> None:
    with pytest.raises(MediaError):
        open_given().prepare_item(modality, make())


def test_masked_ids_and_sizes_are_the_callers_error(open_given: Callable[..., Any]) -> None:
    processor = open_given()
    with pytest.raises(UsageError, match="masked"):
        processor.process(np.ma.array([1, 1, 1], mask=[0, 1, 0]))
    times = np.ma.array([0.0, 1.0], mask=[0, 1])
    with pytest.raises(UsageError, match="timestamps"):
        processor.count("video", VideoSize(3, 4, 2, 1.0, times))


def test_a_masked_feature_is_the_plugins_error(open_given: Callable[..., Any]) -> None:
    class Masks(Given):
        def prepare(self, decoded: Any, layout: Mapping[str, Any], options: Any) -> Any:
            return np.ma.masked_less(decoded.pixels, 9)

    with pytest.raises(ProcessorError):
        open_given(Masks).prepare_item("image", toy.img())


@pytest.mark.parametrize("value", [masked((2,), np.float32), [masked((2,), np.float32)], [[masked((2,), np.float32)]]])
def test_is_masked(value: Any) -> None:
    assert is_masked(value)
    assert not is_dense(value)


def test_lists_that_are_nested_without_end_are_no_array() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert not is_masked(deep)
    with pytest.raises(RequestError):
        probe(AudioSamples(deep, 16), modality="audio")
    with pytest.raises(RequestError):
        probe(VideoFrames([toy.img()], timestamps=deep), modality="video")
