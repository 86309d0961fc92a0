"""`CorpusEntry`: the forms in which it can be sent, and the check of what it decodes to. Makes no entries."""

from __future__ import annotations

import base64
import io
import random
import urllib.parse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from mm_plugin.errors import LimitError, RequestError
from mm_plugin.items import Modality
from mm_plugin.media.audio import open_audio
from mm_plugin.media.images import open_image
from mm_plugin.media.types import AudioSize, DecodedAudio, DecodedImage, DecodedMedia, DecodedVideo, SampledVideo, whole
from mm_plugin.media.video import open_video
from mm_plugin.settings import Settings


class ExpectedImage(msgspec.Struct, frozen=True, eq=False):
    """What an image must decode to.

    Attributes:
        pixels: [height, width, 3] uint8 RGB on a white background.
        tolerance: levels by which any pixel may differ.
    """

    pixels: np.ndarray
    tolerance: int = 0


class ExpectedVideo(msgspec.Struct, frozen=True, eq=False):
    """What a video must decode to.

    Attributes:
        frames: [n, height, width, 3] uint8 RGB of every frame on a white background.
        timestamps: [n] float64, seconds from the first frame.
        tolerance: levels by which a frame may differ on average.
    """

    frames: np.ndarray
    timestamps: np.ndarray
    tolerance: float = 0.0


class ExpectedAudio(msgspec.Struct, frozen=True, eq=False):
    """What an audio input must decode to.

    Attributes:
        num_samples: at its own rate.
        sampling_rate: samples per second.
        samples: [num_samples] float32, mono; None where a lossy codec leaves only the tone.
        hertz: the frequency of its tone; None where it is not a tone.
        tolerance: how much a sample may differ; full scale is 1.
        slack: samples by which its length may differ, since lossy codecs add silence at the ends.
    """

    num_samples: int
    sampling_rate: int
    samples: np.ndarray | None = None
    hertz: float | None = None
    tolerance: float = 0.0
    slack: int = 0


class CorpusEntry(msgspec.Struct, frozen=True, eq=False):
    """One odd media input, with what it must decode to under the default settings, or how it must be refused.

    Attributes:
        name: unique, such as `png/palette with a table of alpha`.
        modality: the modality as which it is sent.
        value: encoded bytes, or any other form that a request may hold.
        expected: what it decodes to; None where it is refused.
        refused: the accepted refusals, each the `reason` of a `MediaError` or the `setting` of a `LimitError`; empty where it is
            read.
        note: why, where that is not obvious.
        encoded_only: whether a PIL object of these bytes has lost what is needed to show it correctly.
    """

    name: str
    modality: Modality
    value: Any
    expected: ExpectedImage | ExpectedVideo | ExpectedAudio | None = None
    refused: tuple[str, ...] = ()
    note: str = ""
    encoded_only: bool = False


def shows(
    name: str, value: Any, pixels: np.ndarray, tolerance: int = 0, note: str = "", *, encoded_only: bool = False
) -> CorpusEntry:
    """An entry for an image that is read."""
    img = ExpectedImage(np.ascontiguousarray(pixels), tolerance)
    return CorpusEntry(name, Modality.IMAGE, value, img, note=note, encoded_only=encoded_only)


def refuses(modality: Modality, name: str, value: Any, *reasons: str, note: str = "") -> CorpusEntry:
    """An entry for a media input that is refused."""
    return CorpusEntry(name, modality, value, refused=reasons, note=note)


def forms(entry: CorpusEntry, folder: Path | str) -> Iterator[tuple[str, Any]]:
    """Every form in which an entry can be sent: (name, value). Settings need `folder` as their `media_root`.

    Args:
        entry: any; one that is not an encoded file has one form.
        folder: an existing folder, to which encoded bytes are written.
    """
    data = entry.value
    yield "value", data
    if not isinstance(data, bytes):
        return
    digits = base64.b64encode(data).decode()
    yield "bytearray", bytearray(data)
    yield "memoryview", memoryview(data)
    yield "data URL", f"data:application/octet-stream;charset=x;base64,{digits}"
    yield "data URL, percent", f"data:,{urllib.parse.quote_from_bytes(data)}"
    if len(digits) >= 40:  # shorter text counts as a path
        yield "base64", digits
    file = Path(folder).resolve() / "entry"
    file.write_bytes(data)
    yield "path", str(file)
    yield "Path", file
    yield "file: URL", file.as_uri()
    if entry.modality is Modality.IMAGE and entry.expected is not None and not entry.encoded_only:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened, loaded = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))
            loaded.load()
        yield "PIL", opened
        yield "PIL, loaded", loaded


def check(entry: CorpusEntry, *, value: Any = None, settings: Settings | None = None) -> DecodedMedia | RequestError:
    """Open and decode an entry, and compare the result with what is expected.

    Args:
        entry: the entry.
        value: another form of it, from `forms`; its own where None.
        settings: the defaults where None.

    Returns:
        The decoded media input, or the expected error.

    Raises:
        AssertionError: the result differs; the message says how.
    """
    settings = Settings() if settings is None else settings
    value = entry.value if value is None else value
    path = f"{entry.modality.argument}[0]"
    prefix = f"{entry.name}: "
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about much that it still reads
            found = read(entry.modality, value, path=path, settings=settings, rate=_rate(entry))
    except RequestError as error:
        _check_refusal(prefix, entry.refused, path, error)
        return error
    assert not entry.refused, f"{prefix}it was not refused"
    if isinstance(entry.expected, ExpectedImage) and isinstance(found, DecodedImage):
        _check_image(prefix, entry.expected, found.pixels)
    elif isinstance(entry.expected, ExpectedVideo) and isinstance(found, DecodedVideo):
        _check_video(prefix, entry.expected, found)
    elif isinstance(entry.expected, ExpectedAudio) and isinstance(found, DecodedAudio):
        _check_audio(prefix, entry.expected, found.samples)
        if entry.expected.hertz is not None:
            other = read(entry.modality, value, path=path, settings=settings, rate=16_000)
            assert isinstance(other, DecodedAudio)
            size = AudioSize(len(found.samples), entry.expected.sampling_rate).at(16_000)
            assert other.size == size, f"{prefix}{other.size} at 16 kHz, not {size}"
            _check_tone(prefix, entry.expected.hertz, other.samples, 16_000)
    else:
        assert entry.expected is None, f"{prefix}decoded to a {type(found).__name__}"
    return found


def read(modality: Modality, value: Any, *, path: str, settings: Settings, rate: int = 16_000) -> DecodedMedia:
    """One media input, decoded completely: every frame of a video.

    Raises:
        RequestError: it is refused.
        AssertionError: the size reported before decoding was wrong.
    """
    if modality is Modality.IMAGE:
        image = open_image(value, path=path, settings=settings)
        assert len(image.digest()) == 32
        size = image.probe()
        decoded = image.decode()
        assert decoded.size == size, f"{path}: {size} before it is decoded, {decoded.size} after"
        _check_array(path, decoded.pixels, (size.height, size.width, 3))
        return decoded
    if modality is Modality.VIDEO:
        video = open_video(value, path=path, settings=settings)
        assert len(video.digest()) == 32
        measured = video.probe()
        every = whole(measured)
        assert every.timestamps[0] == 0, f"{path}: expected times from 0, got {every.timestamps[0]}"
        assert (np.diff(every.timestamps) > 0).all(), f"{path}: times do not ascend"
        sampled = SampledVideo(measured.height, measured.width, every.indices, every.timestamps, every.fps)
        frames = []
        for pixels in video.decode(sampled).frames:
            _check_array(path, pixels, (measured.height, measured.width, 3))
            frames.append(pixels)
        assert len(frames) == measured.frames, f"{path}: expected {measured.frames} frames, got {len(frames)}"
        return DecodedVideo(sampled, frames)
    audio = open_audio(value, path=path, settings=settings)
    assert len(audio.digest()) == 32
    length = audio.probe(rate)
    samples = audio.decode(length).samples
    assert samples.dtype == np.float32
    assert samples.shape == (length.num_samples,)
    assert np.isfinite(samples).all()
    return DecodedAudio(length, samples)


def mutated(data: bytes, chooser: random.Random) -> bytes:
    """A file with a few faults: flipped bits, wrong lengths, pieces lost, repeated or cut off; more of them near its start."""
    out = bytearray(data)
    for _ in range(chooser.choice((1, 1, 2, 5, 20))):
        at = chooser.randrange(len(out)) if chooser.random() < 0.5 else chooser.randrange(min(len(out), 64))
        match chooser.randrange(6):
            case 0:
                out[at] ^= 1 << chooser.randrange(8)
            case 1:
                out[at] = chooser.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                out[at : at + 4] = chooser.choice(
                    (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\x10\0")
                )
            case 3:
                out[at:at] = out[at : at + chooser.randrange(1, 30)]
            case 4:
                del out[at : at + chooser.randrange(1, 30)]
            case _:
                del out[max(at, 1) :]
        if not out:
            return b"\0"
    return bytes(out)


def _rate(entry: CorpusEntry) -> int:
    return entry.expected.sampling_rate if isinstance(entry.expected, ExpectedAudio) else 16_000


def _check_refusal(prefix: str, reasons: tuple[str, ...], path: str, error: RequestError) -> None:
    reason = error.setting if isinstance(error, LimitError) else getattr(error, "reason", None)
    assert reasons, f"{prefix}it was refused: {error}"
    assert reason in reasons, f"{prefix}expected {' or '.join(reasons)}, got {reason}: {error}"
    assert error.path == path, f"{prefix}expected the error to name {path}, got {error.path}"
    assert error.message.startswith(path), f"{prefix}the message does not begin with the path: {error}"


def _check_array(path: str, pixels: np.ndarray, shape: tuple[int, ...]) -> None:
    assert pixels.dtype == np.uint8, f"{path}: pixels are {pixels.dtype}"
    assert pixels.shape == shape, f"{path}: expected pixels {shape}, got {pixels.shape}"
    assert pixels.flags.c_contiguous, f"{path}: pixels are not contiguous"


def _check_image(prefix: str, expected: ExpectedImage, pixels: np.ndarray) -> None:
    assert pixels.shape == expected.pixels.shape, f"{prefix}{pixels.shape}, not {expected.pixels.shape}"
    off = np.abs(pixels.astype(np.int16) - expected.pixels).max()
    assert off <= expected.tolerance, f"{prefix}off by {off} levels, {expected.tolerance} are allowed"


def _check_video(prefix: str, expected: ExpectedVideo, decoded: DecodedVideo) -> None:
    count, height, width, _ = expected.frames.shape
    size = decoded.size
    assert (size.frames, size.height, size.width) == (count, height, width), (
        f"{prefix}{size.frames} frames of {size.height} x {size.width}, not {count} of {height} x {width}"
    )
    late = np.abs(size.timestamps - expected.timestamps).max()
    assert late <= 1e-3, f"{prefix}times are off by {late:.4f} seconds"  # containers round to a thousandth
    for place, (found, wanted) in enumerate(zip(decoded.frames, expected.frames, strict=True)):
        off = np.abs(found.astype(np.int16) - wanted).mean()
        assert off <= expected.tolerance, f"{prefix}frame {place} is off by {off:.2f} levels on average"


def _check_audio(prefix: str, expected: ExpectedAudio, samples: np.ndarray) -> None:
    extra = len(samples) - expected.num_samples
    assert abs(extra) <= expected.slack, f"{prefix}{len(samples)} samples, not {expected.num_samples}"
    if expected.samples is not None:
        off = float(np.abs(samples - expected.samples).max())
        assert off <= expected.tolerance, f"{prefix}samples are off by {off}"
    if expected.hertz is not None:
        _check_tone(prefix, expected.hertz, samples, expected.sampling_rate)


def _check_tone(prefix: str, hertz: float, samples: np.ndarray, rate: int) -> None:
    strength = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    found = float(np.argmax(strength)) * rate / len(samples)
    assert abs(found - hertz) <= 2 * rate / len(samples) + 1, f"{prefix}a tone of {found:.0f} Hz, not {hertz:.0f}"
