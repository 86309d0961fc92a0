"""Tasks over the wire: the receiver opens media with its own settings, and makes the options of plain values."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from test_wire import fuzz_values
from toy import PlainToy, audio, png, toy_spec

from mm_plugin import (
    AudioSamples,
    BaseOptions,
    LimitError,
    MediaError,
    Modality,
    MultimodalDataItem,
    OptionScope,
    Replacement,
    SampledVideo,
    Settings,
    Size,
    UsageError,
    VideoFrames,
    wire,
)
from mm_plugin.inputs import ItemContent
from mm_plugin.media import MEDIA_KINDS, MediaValue, PackedImage
from mm_plugin.tasks import JointTask, ModelRef, PrepareTask


class Options(BaseOptions, frozen=True, kw_only=True):
    """Options whose plain values are other classes than theirs."""

    pair: Annotated[tuple[int, float], OptionScope.request("image")] = (1, 2.5)
    raw: Annotated[bytes, OptionScope.request("image")] = b"\x00\xff"


def source(value: Any, modality: Modality = Modality.IMAGE) -> Any:
    return MEDIA_KINDS[modality].open(value, path=f"{modality.argument}[0]", settings=Settings())


def task(value: Any = None, **changed: Any) -> PrepareTask:
    fields: dict[str, Any] = {
        "model": ModelRef("/models/a", "toy"),
        "modality": Modality.IMAGE,
        "path": "images[0]",
        "source": source(png() if value is None else value),
        "size": Size(8, 8),
        "options": Options(),
        "fields": {"grid": (1, 2), "times": np.arange(3)},
        "replacement": Replacement.repeat(9, 4),
        "salt": b"tenant",
        "notes": ("one",),
    }
    return PrepareTask(**fields | changed)


def again(value: Any) -> Any:
    found = wire.unpack(b"".join(wire.pack(value)))
    assert wire.same(value, found)
    assert wire.same(value, wire.decode([bytes(frame) for frame in wire.encode(found)]))  # it can be sent on
    return found


class OverWire:
    """Prepares in another processor, with settings of its own; everything goes there and back as bytes."""

    def __init__(self, other: Any) -> None:
        self.other, self.seen = other, []

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        self.seen += (arrived := again(list(tasks)))
        found: list[Any] = again(self.other.prepare_tasks(arrived))
        return found


def test_a_task_comes_back_with_plain_options_and_the_value_of_its_source() -> None:
    found = again(task())
    assert isinstance(found.source, MediaValue)
    assert (found.source.path, found.source.media) == ("images[0]", png())
    assert found.options == {"background": (255, 255, 255), "pair": (1, 2.5), "raw": b"\x00\xff"}
    assert msgspec.convert(found.options, Options) == Options()
    assert (found.fields["grid"], found.salt, found.notes) == ((1, 2), b"tenant", ("one",))
    joint = JointTask(
        ModelRef("a", "b"), "text", True, {Modality.IMAGE: [(source(png()), Size(8, 8))]}, Options(), "salt"
    )
    arrived = again([joint])[0]
    assert (arrived.text, arrived.rendered, arrived.salt) == ("text", True, "salt")
    assert arrived.sources[Modality.IMAGE][0][0].media == png()


PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
VALUES: dict[str, tuple[Modality, Callable[[], Any]]] = {
    "file": (Modality.IMAGE, png),
    "array": (Modality.IMAGE, lambda: PIXELS),
    "tensor": (Modality.IMAGE, lambda: torch.arange(72, dtype=torch.uint8).reshape(3, 4, 6)),
    "PIL": (Modality.IMAGE, lambda: Image.fromarray(PIXELS)),
    "frames, rate": (Modality.VIDEO, lambda: VideoFrames(PIXELS[None].repeat(3, 0), fps=29.97)),
    "one frame": (Modality.VIDEO, lambda: VideoFrames(PIXELS[None], fps=24.0)),
    "frames, times": (Modality.VIDEO, lambda: VideoFrames(PIXELS[None].repeat(3, 0), timestamps=[1.1, 1.3, 7.7])),
    "listed frames": (
        Modality.VIDEO,
        lambda: VideoFrames([PIXELS, Image.fromarray(PIXELS), file_of(PIXELS)], fps=3, sampled=False),
    ),
    "samples": (Modality.AUDIO, lambda: AudioSamples(np.linspace(-1, 1, 800), 8000)),
    "two channels": (Modality.AUDIO, lambda: AudioSamples(np.ones((2, 80), np.int16), 8000)),
    "recording": (Modality.AUDIO, audio),
}


def file_of(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("name", VALUES)
def test_a_value_makes_the_same_source(name: str) -> None:
    modality, make = VALUES[name]
    one = source(make(), modality)
    other = source(again(one.value()), modality)
    assert other.digest() == one.digest()
    assert wire.same(other.value(), one.value())


def test_results_and_errors_equal_those_of_threads(open_words: Callable[..., Any]) -> None:
    spec = toy_spec(Modality.IMAGE, Modality.AUDIO)
    here, there = open_words(PlainToy, spec), open_words(PlainToy, spec)
    other = OverWire(there)
    here._preparer, plain = other, open_words(PlainToy, spec)
    prompt, media = "<image> word <audio> <image>", {"images": [png(1), png(2)], "audios": [audio()]}
    assert wire.same(here.process(prompt, **media), plain.process(prompt, **media))
    assert len(other.seen) == 3
    broken = png(3)[:40]
    with pytest.raises(MediaError) as expected:
        plain.process("<image>", [broken])
    with pytest.raises(MediaError) as caught:
        here.process("<image>", [broken])
    assert str(caught.value) == str(expected.value)


def test_too_little_memory_comes_back_as_that() -> None:
    class Own(MemoryError):
        """Such as numpy's."""

    found = wire.unpack(b"".join(wire.pack([MemoryError("no 5 GiB"), Own("x")])))
    assert [(type(one), str(one)) for one in found] == [(MemoryError, "no 5 GiB"), (MemoryError, "x")]


def test_the_receiver_s_limits_count(open_words: Callable[..., Any]) -> None:
    spec = toy_spec(Modality.IMAGE)
    here = open_words(PlainToy, spec)
    strict = open_words(PlainToy, spec, max_image_pixels=4)
    here._preparer = other = OverWire(strict)
    with pytest.raises(LimitError, match=r"images\[0\]") as caught:
        here.process("<image>", [png()])
    assert caught.value.setting == "max_image_pixels"
    # One above a limit leaves the others as they are, and an array is refused before it is copied.
    tasks = [*other.seen, msgspec.structs.replace(other.seen[0], source=MediaValue("images[0]", PIXELS[:2, :2]))]
    tasks = [msgspec.structs.replace(one, model=strict._opened.ref) for one in tasks]
    found = strict.prepare_tasks(tasks)
    assert [type(one).__name__ for one in found] == ["LimitError", "Prepared"]


@pytest.mark.parametrize("options", [{"background": [1, 2, 300]}, {"background": "white"}, {"background": [1, 2]}])
def test_options_of_another_model_are_refused(options: Any, open_words: Callable[..., Any]) -> None:
    processor = open_words(PlainToy, toy_spec(Modality.IMAGE))
    one = task(model=processor._opened.ref, options=options)
    (found,) = processor.prepare_tasks([wire.decode(wire.encode(one))])
    assert isinstance(found, UsageError)
    assert "expected options of" in str(found)


class Odd(BaseOptions, frozen=True, kw_only=True):
    """Options that plain values cannot give back."""

    extra: Any = None


@pytest.mark.parametrize("extra", [{1, 2}, object(), np.ones(2), Size(2, 3)], ids=["set", "object", "array", "tuple"])
def test_options_that_do_not_come_back_are_refused_when_they_are_sent(extra: Any) -> None:
    with pytest.raises(UsageError, match="options of Odd cannot be sent"):
        wire.encode(task(options=Odd(extra=extra)))


GOOD_VIDEO = {"height": 4, "width": 6, "indices": np.arange(2), "timestamps": np.arange(2.0), "fps": 1.0}
WRONG: dict[str, Callable[[], Any]] = {
    "a path for a source": lambda: MediaValue("images[0]", "/etc/passwd"),
    "a URL for a source": lambda: MediaValue("images[0]", "http://127.0.0.1/"),
    "a list for a source": lambda: MediaValue("images[0]", [1]),
    "nested frames": lambda: VideoFrames([VideoFrames([], fps=1)], fps=1),
    "frames by URL": lambda: VideoFrames(["http://127.0.0.1/"], fps=1),
    "size of another modality": lambda: task(size=GOOD_VIDEO and SampledVideo(**GOOD_VIDEO)),
    "descending frames": lambda: SampledVideo(**GOOD_VIDEO | {"indices": np.array([1, 0])}),
    "negative frames": lambda: SampledVideo(**GOOD_VIDEO | {"indices": np.array([-1, 0])}),
    "fewer times": lambda: SampledVideo(**GOOD_VIDEO | {"timestamps": np.arange(1.0)}),
    "no rate": lambda: SampledVideo(**GOOD_VIDEO | {"fps": 0.0}),
    "orientation": lambda: PackedImage(mode="L", width=1, height=1, data=b"1", orientation=9),
    "negative side": lambda: PackedImage(mode="L", width=-1, height=-1, data=b"1"),
    "frame of three": lambda: PackedImage(mode="L", width=1, height=1, data=b"1", frame=(1, 2, 3)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_of_a_task_that_encode_does_not_make_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"^frames: "):
        wire.decode(wire.encode(WRONG[name]()))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"mode": "L;16"}, MediaError),
        ({"mode": "EVIL"}, MediaError),
        ({"data": b"1"}, MediaError),
        ({"data": b"1" * 5000}, MediaError),
        ({"mode": "RGB"}, MediaError),
        ({"palette": ("nope", b"123")}, MediaError),
        ({"mode": "P", "palette": ("RGB", b"12345")}, None),
        ({"mode": "P", "palette": ("RGB", b"1" * 5000)}, MediaError),
        ({"width": 1 << 40, "height": 1 << 7}, LimitError),
        ({"width": 0, "data": b""}, MediaError),
        ({"frame": (5, 5, 1, 1)}, None),
        ({"frame": (0, 0, 1 << 40, 1 << 40)}, None),
        ({"file_palette": b"12"}, None),
        ({"transparency": b""}, None),
        ({"transparency": 1 << 40}, None),
        ({"transparency": (1, 2, 3, 4, 5)}, None),
    ],
    ids=repr,
)
def test_a_packed_image_is_right_or_refused(changed: Any, error: Any) -> None:
    fields: dict[str, Any] = {"mode": "L", "width": 3, "height": 2, "data": b"123456"}
    packed = again(PackedImage(**fields | changed))
    try:
        opened = source(packed)
        pixels = opened.decode(opened.size()).pixels
    except (MediaError, LimitError) as raised:
        assert error is None or isinstance(raised, error), raised  # noqa: PT017 - either outcome is right
        return
    assert error is None
    assert pixels.shape == (2, 3, 3)


def test_mutated_tasks_are_decoded_or_refused() -> None:
    joint = JointTask(ModelRef("a", "b"), "text", True, {Modality.IMAGE: [(source(png()), Size(8, 8))]}, Options())
    video = source(VideoFrames([PIXELS, PIXELS], fps=3), Modality.VIDEO)
    values = [
        task(),
        task(Image.fromarray(PIXELS)),
        joint,
        task(modality=Modality.VIDEO, source=video, size=SampledVideo(**GOOD_VIDEO)),
        MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 4)], task=task()),
        ItemContent(bytes(32), task=task(Image.fromarray(PIXELS))),
    ]
    fuzz_values(values, 1_500, 3)
