"""`MediaSource` and the table of modalities: one way to open, measure and decode, and sources that travel."""

from __future__ import annotations

import io
import pickle
import random
import threading
import warnings
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import MediaError, Modality, Settings, wire
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.media import (
    MEDIA_KINDS,
    AudioSamples,
    AudioSize,
    MediaSource,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
    whole,
)
from mm_plugin.testing import corpus

SETTINGS = Settings()
RATE = 16_000


class Rules:
    """Every second frame; 16 kHz."""

    def sample(self, size: VideoSize) -> Sampling:
        return Sampling.of(size, np.arange(0, size.frames, 2))

    def sampling_rate(self) -> int:
        return RATE


def opened(modality: Modality, value: Any) -> MediaSource:
    return MEDIA_KINDS[modality].open(value, path=f"{modality.argument}[0]", settings=SETTINGS)


def contents(source: MediaSource) -> tuple[Any, ...]:
    """Digest, header, size and decoded arrays of a source, or the errors in their places."""
    found: list[Any] = []
    size: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in ("digest", "probe", "size", "decode"):
            try:
                if step == "size":
                    size = value = source.size(Rules())
                elif step == "decode":
                    value = None if size is None else source.decode(size, background=(10, 20, 30))
                else:
                    value = getattr(source, step)()
                found.append(plain(value))
            except RequestError as error:
                found.append((type(error), error.message))
    return tuple(found)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if hasattr(value, "frames") and not isinstance(value.frames, int):
        return plain(value.size), [plain(frame) for frame in value.frames]
    if hasattr(value, "__struct_fields__"):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    return value


def pickled(modality: Modality, source: Any) -> Any:
    return pickle.loads(pickle.dumps(source))


def sent(modality: Modality, source: Any) -> Any:
    """Opened again of its value, which went as bytes and not as a pickle."""
    value = wire.decode([bytes(frame) for frame in wire.encode(source.value())])
    return opened(modality, value)


JOURNEYS = (pickled, sent)
MAKE = {Modality.IMAGE: corpus.images, Modality.VIDEO: corpus.videos, Modality.AUDIO: corpus.audios}


def check_travels(entry: Any, value: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source, used = opened(entry.modality, value), opened(entry.modality, value)
            expected = contents(used)
            again = [journey(entry.modality, which) for which in (source, used) for journey in JOURNEYS]
    except RequestError:
        assert entry.refused or not isinstance(value, bytes), entry.name
        return
    for copied in again:
        assert type(copied) is type(source)
        assert copied.path == source.path
        assert contents(copied) == expected, entry.name
    assert contents(source) == expected, entry.name  # pickling changed nothing


def check_all_travel(entries: list[Any], folder: Path) -> None:
    for entry in entries:
        check_travels(entry, entry.value)
        if entry.modality is Modality.IMAGE:
            for name, value in corpus.forms(entry, folder):
                if name.startswith("PIL"):
                    check_travels(entry, value)


@pytest.mark.parametrize(("modality", "count"), [(Modality.IMAGE, 80), (Modality.VIDEO, 12), (Modality.AUDIO, 16)])
def test_a_source_travels(modality: Modality, count: int, tmp_path: Path) -> None:
    check_all_travel(random.Random(7).sample(list(MAKE[modality]()), count), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("modality", MAKE)
def test_every_source_travels(modality: Modality, tmp_path: Path) -> None:
    check_all_travel(list(MAKE[modality]()), tmp_path)


@pytest.mark.parametrize(
    ("modality", "value"),
    [
        (Modality.IMAGE, np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)),
        (Modality.IMAGE, torch.arange(4 * 6 * 3, dtype=torch.uint8).reshape(3, 4, 6)),
        (Modality.VIDEO, VideoFrames(np.zeros((5, 4, 6, 3), np.uint8), fps=2, sampled=False)),
        (Modality.VIDEO, VideoFrames([Image.new("RGB", (6, 4), c) for c in ("red", "blue")], timestamps=[0, 3])),
        (Modality.AUDIO, AudioSamples(np.linspace(-1, 1, 800), 8000)),
    ],
    ids=["array", "tensor", "frames", "list of PIL images", "samples"],
)
def test_given_arrays_travel(modality: Modality, value: Any) -> None:
    source = opened(modality, value)
    expected = contents(source)
    for journey in JOURNEYS:
        assert contents(journey(modality, source)) == expected


def palette_image(**info: Any) -> Image.Image:
    image = Image.frombytes("P", (4, 2), bytes(range(8)))
    image.putpalette(bytes(range(24)))
    image.info |= info
    return image


def rgba_palette_image() -> Image.Image:
    image = Image.frombytes("P", (4, 2), bytes(range(8)))
    image.putpalette(bytes(range(100, 132)), "RGBA")
    return image


def rotated() -> Image.Image:
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.frombytes("RGB", (3, 2), bytes(range(18))).save(out, "PNG", exif=exif)
    return Image.open(out)


MODES = (
    "1",
    "L",
    "LA",
    "La",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "I;16B",
    "F",
    "PA",
)


@pytest.mark.parametrize(
    "make",
    [
        palette_image,
        lambda: palette_image(transparency=3),
        lambda: palette_image(transparency=bytes(range(0, 80, 10))),
        rgba_palette_image,
        rotated,
        lambda: Image.new("L", (3, 2), 7),
        *(lambda mode=mode: Image.new(mode, (3, 2)) for mode in MODES),
    ],
    ids=["P", "P, one level", "P, table", "P, RGBA", "turned", "L, gray", *MODES],
)
def test_a_pil_image_travels_with_all_that_it_shows(make: Any) -> None:
    source = opened(Modality.IMAGE, make())
    expected = contents(source)
    for journey in JOURNEYS:
        copied = journey(Modality.IMAGE, source)
        assert contents(copied) == expected
        assert contents(copied) == expected  # it can be decoded again
        assert contents(journey(Modality.IMAGE, copied)) == expected
        assert type(copied._value) is Image.Image


def test_a_broken_pil_image_is_refused_while_it_is_packed() -> None:
    out = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(out, "PNG")
    source = opened(Modality.IMAGE, Image.open(io.BytesIO(out.getvalue()[:500])))
    with pytest.raises(MediaError, match=r"images\[0\]"):
        pickle.dumps(source)


def test_what_was_decoded_does_not_travel() -> None:
    samples = np.zeros(RATE * 60, np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    source = opened(Modality.AUDIO, out.getvalue())
    source.size(Rules())
    assert len(pickle.dumps(source)) < len(out.getvalue()) + 5000


def test_many_threads_pickle_one_lazily_opened_image() -> None:
    out = io.BytesIO()
    Image.effect_noise((300, 200), 50).save(out, "PNG")
    image = Image.open(io.BytesIO(out.getvalue()))
    expected = opened(Modality.IMAGE, out.getvalue())
    wanted = plain(expected.decode(expected.size(Rules())))
    found: list[Any] = []

    def travel() -> None:
        copied = pickle.loads(pickle.dumps(opened(Modality.IMAGE, image)))
        found.append(plain(copied.decode(copied.size(Rules()))))

    threads = [threading.Thread(target=travel) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 8


# ------------------------------------------------------------------ the table


def test_every_modality_is_a_row() -> None:
    assert set(MEDIA_KINDS) == set(Modality)
    assert all(kind.modality is modality for modality, kind in MEDIA_KINDS.items())


def test_a_size_has_its_frames_chosen_and_its_rate() -> None:
    frames = VideoFrames(np.zeros((5, 4, 6, 3), np.uint8), fps=2, sampled=False)
    assert opened(Modality.VIDEO, frames).size(Rules()).indices.tolist() == [0, 2, 4]
    chosen = VideoFrames(np.zeros((5, 4, 6, 3), np.uint8), fps=2)
    assert opened(Modality.VIDEO, chosen).size(Rules()).indices.tolist() == [0, 1, 2, 3, 4]
    assert opened(Modality.AUDIO, AudioSamples(np.zeros(8000), 8000)).size(Rules()) == AudioSize(RATE, RATE)
    assert opened(Modality.IMAGE, np.zeros((4, 6, 3), np.uint8)).size(Rules()) == Size(4, 6)


def test_pixels_and_arrays_that_may_be_the_callers() -> None:
    video = VideoSize(4, 6, 5, 2.0)
    assert MEDIA_KINDS[Modality.IMAGE].pixels(Size(4, 6)) == 24
    assert MEDIA_KINDS[Modality.VIDEO].pixels(SampledVideo.of(video, whole(video))) == 24  # one frame at a time
    assert MEDIA_KINDS[Modality.AUDIO].pixels(AudioSize(4, 6)) == 0
    image = opened(Modality.IMAGE, np.zeros((4, 6, 3), np.uint8)).decode(None)
    (pixels,) = MEDIA_KINDS[Modality.IMAGE].arrays(image)
    assert pixels is image.pixels


@pytest.mark.parametrize(
    ("modality", "size"),
    [
        (Modality.IMAGE, (4,)),
        (Modality.IMAGE, (4, 6, 3)),
        (Modality.IMAGE, (4.5, 6)),
        (Modality.IMAGE, VideoSize(4, 6, 5, 2.0)),
        (Modality.VIDEO, Size(4, 6)),
        (Modality.VIDEO, VideoSize(4.0, 6, 5, 2.0)),  # type: ignore[arg-type]
        (Modality.AUDIO, (4, 6)),
    ],
)
def test_a_size_of_another_kind_is_the_callers_fault(modality: Modality, size: Any) -> None:
    with pytest.raises(UsageError, match="size: "):
        MEDIA_KINDS[modality].known_size(size, Rules(), "x[0]", SETTINGS)


@pytest.mark.parametrize(
    ("modality", "size", "message"),
    [
        (Modality.IMAGE, (0, 6), r"x\[0\]: expected at least 1 x 1 pixels, got 0 x 6"),
        (Modality.VIDEO, VideoSize(4, 6, 0, 24.0), r"x\[0\]: expected at least one frame and a positive fps, got 0 frames at 24"),
        (Modality.AUDIO, AudioSize(0, 8000), r"x\[0\]: expected at least one sample .* got 0 samples at 8000 Hz"),
    ],
)  # fmt: skip
def test_an_empty_size_is_the_clients_fault(modality: Modality, size: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        MEDIA_KINDS[modality].known_size(size, Rules(), "x[0]", SETTINGS)
