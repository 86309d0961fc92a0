"""Audio inputs: PCM by arithmetic, resampling by formula and against scipy's, lengths exactly, limits counted."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from typing import Any

import av
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.media import AudioSamples, AudioSize, audio, open_audio, probe
from mm_plugin.settings import Settings

SETTINGS = Settings()


def opened(value: Any, **limits: Any) -> Any:
    return open_audio(value, path="audios[0]", settings=Settings(**limits))


def samples_of(value: Any, rate: int) -> np.ndarray:
    source = opened(value)
    size = source.probe(rate)
    media_input = source.decode(size)
    assert media_input.size == size == AudioSize(len(media_input.samples), rate)
    assert media_input.samples.dtype == np.float32
    assert media_input.samples.ndim == 1
    return media_input.samples


def wav(data: bytes, rate: int, channels: int, bits: int, *, kind: int = 1, extra: bytes = b"") -> bytes:
    """A WAV file, written by hand; kind 1 is whole numbers, 3 floats."""
    align = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + extra + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def written(levels: np.ndarray, form: str) -> tuple[bytes, int, int]:
    """Levels -1..1 [num_samples, channels] as bytes of a form: (bytes, bits, kind)."""
    if form == "f32":
        return levels.astype("<f4").tobytes(), 32, 3
    if form == "f64":
        return levels.astype("<f8").tobytes(), 64, 3
    if form == "u8":
        return np.round(levels * 127 + 128).astype("u1").tobytes(), 8, 1
    bits = int(form[1:])
    whole = np.round(levels * (2 ** (bits - 1) - 1)).astype("<i8")
    return b"".join(int(one).to_bytes(bits // 8, "little", signed=True) for one in whole.ravel()), bits, 1


def expected_levels(data: bytes, bits: int, kind: int, channels: int) -> np.ndarray:
    """What the bytes stand for, full scale 1, as exact as float64 is: [num_samples, channels]."""
    if kind == 3:
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float64).reshape(-1, channels)
    if bits == 8:
        return (np.frombuffer(data, "u1").astype(np.float64) - 128).reshape(-1, channels) / 128
    width = bits // 8
    whole = [int.from_bytes(data[at : at + width], "little", signed=True) for at in range(0, len(data), width)]
    return np.array(whole, dtype=np.float64).reshape(-1, channels) / 2 ** (bits - 1)


FORMS = ["u8", "s16", "s24", "s32", "f32", "f64"]


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000, 96000])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("form", FORMS)
def test_pcm_of_the_right_rate_keeps_its_samples(form: str, channels: int, rate: int) -> None:
    levels = np.random.default_rng(channels).uniform(-1, 1, (5000, channels))
    data, bits, kind = written(levels, form)
    expected = expected_levels(data, bits, kind, channels)
    found = samples_of(wav(data, rate, channels, bits, kind=kind), rate)
    assert len(found) == 5000
    if channels == 1:
        assert np.array_equal(found, expected[:, 0].astype(np.float32))
    else:
        assert np.abs(found - expected.mean(axis=1)).max() < 1e-6


def encoded(
    samples: np.ndarray, rate: int, container: str, codec: str, layout: str = "mono", form: str = "s16"
) -> bytes:
    """[num_samples, channels] int16 in a file."""
    file = io.BytesIO()
    options = {}
    if codec == "vorbis":  # FFmpeg's own encoder, of two channels alone
        samples, layout, options = np.repeat(samples, 2, axis=1), "stereo", {"strict": "experimental"}
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout, options=options)
        stream.format = form
        resampler = av.AudioResampler(format=form, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.reshape(1, -1)), format="s16", layout=layout)
        frame.sample_rate = rate
        fifo = av.AudioFifo()
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            part.pts = None
            fifo.write(part)
        size = stream.codec_context.frame_size or 4096
        while (part := fifo.read(size, partial=True)) is not None:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def sine(rate: int, seconds: float, tone: float = 440.0, height: float = 0.5) -> np.ndarray:
    return height * np.sin(2 * np.pi * tone * np.arange(round(rate * seconds)) / rate)


def whole_numbers(levels: np.ndarray) -> np.ndarray:
    return np.round(levels * 32767).astype(np.int16)


@pytest.mark.parametrize("channels", [1, 2])
def test_flac_is_exact(channels: int) -> None:
    levels = np.random.default_rng(1).integers(-32768, 32768, (9001, channels)).astype(np.int16)
    found = samples_of(encoded(levels, 44100, "flac", "flac", "mono" if channels == 1 else "stereo"), 44100)
    assert np.abs(found - (levels / 32768.0).mean(axis=1)).max() < 1e-7


LOSSY = [
    ("mp3", "libmp3lame", "s16p", 44100),
    ("ogg", "vorbis", "fltp", 44100),
    ("ogg", "libopus", "flt", 48000),
    ("mp4", "aac", "fltp", 44100),
    ("matroska", "libopus", "flt", 48000),
]


@pytest.mark.parametrize(("container", "codec", "form", "rate"), LOSSY)
def test_lossy_audios_are_near_what_they_were(container: str, codec: str, form: str, rate: int) -> None:
    levels = sine(rate, 1.5)
    data = encoded(whole_numbers(levels)[:, None], rate, container, codec, form=form)
    found = samples_of(data, rate)
    assert abs(len(found) - len(levels)) <= 3 * 1152  # a codec's own delay and last frame
    spectrum = np.abs(np.fft.rfft(found[:rate]))
    assert np.argmax(spectrum) == 440
    assert np.abs(found[rate // 2 : rate]).max() == pytest.approx(0.5, abs=0.03)
    # The head is near what is decoded.
    header = opened(data).probe()
    assert header.sampling_rate == rate
    assert abs(header.num_samples - len(found)) <= 3 * 1152
    assert probe(data, modality="audio") == header


@pytest.mark.parametrize(
    ("rate", "wanted"), [(44100, 16000), (48000, 16000), (8000, 16000), (16000, 24000), (96000, 16000), (11025, 16000)]
)
def test_resampling_agrees_with_the_formula(rate: int, wanted: int) -> None:
    levels = sine(rate, 2.0).astype(np.float32)
    found = samples_of(AudioSamples(levels, rate), wanted)
    expected = sine(wanted, 2.0)
    assert len(found) == len(expected)
    inside = slice(wanted // 50, -wanted // 50)
    assert np.abs(found - expected)[inside].max() < 2e-3


def test_resampling_is_near_scipy_s() -> None:
    signal = pytest.importorskip("scipy.signal")
    levels = sine(44100, 2.0).astype(np.float32)
    found = samples_of(AudioSamples(levels, 44100), 16000)
    other = signal.resample_poly(levels, 160, 441)
    assert len(other) == len(found)
    assert np.abs(found - other)[320:-320].max() < 5e-3


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 48000)])
def test_what_cannot_be_heard_at_the_new_rate_is_filtered_out(rate: int, wanted: int) -> None:
    tone = 11_000.0 if wanted < rate else 3_000.0
    found = samples_of(AudioSamples(sine(rate, 1.0, tone).astype(np.float32), rate), wanted)
    middle = np.abs(found[wanted // 10 : -wanted // 10]).max()
    assert middle < 0.01 if tone > wanted / 2 else middle == pytest.approx(0.5, abs=0.02)


def rounded_up(count: int, rate: int, wanted: int) -> int:
    return -(-count * wanted // rate)


@given(count=st.integers(1, 5000), rate=st.integers(1, 200_000), wanted=st.integers(1, 60_000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_length_is_that_of_arithmetic(count: int, rate: int, wanted: int) -> None:
    size = AudioSize(count, rate).at(wanted)
    assert size.num_samples == rounded_up(count, rate, wanted)
    if max(rate, wanted) / min(rate, wanted) < 64 and min(rate, wanted) >= 1000:
        assert len(samples_of(AudioSamples(np.ones(count, np.float32), rate), wanted)) == size.num_samples


@pytest.mark.parametrize("count", [1, 2, 100, audio._PIECE - 1, audio._PIECE, audio._PIECE + 1, 3 * audio._PIECE])
def test_lengths_around_the_pieces(count: int) -> None:
    levels = np.linspace(-1, 1, count, dtype=np.float32)
    for rate, wanted in ((44100, 16000), (16000, 44100), (16000, 16000)):
        found = samples_of(AudioSamples(levels, rate), wanted)
        assert len(found) == rounded_up(count, rate, wanted)
        if count > 1000:  # a straight line stays one across the pieces' ends
            line = np.linspace(-1, 1, count)
            at = np.arange(len(found)) * rate / wanted
            inside = (at > 200) & (at < count - 200)
            assert np.abs(found - np.interp(at, np.arange(count), line))[inside].max() < 2e-3


def test_a_file_and_its_samples_are_resampled_alike() -> None:
    levels = whole_numbers(sine(44100, 1.7))
    from_file = samples_of(wav(levels.astype("<i2").tobytes(), 44100, 1, 16), 16000)
    given_samples = samples_of(AudioSamples(levels, 44100), 16000)
    assert np.array_equal(from_file, given_samples)


# ------------------------------------------------------------------ given samples


def test_samples_in_every_form() -> None:
    levels = np.random.default_rng(2).uniform(-1, 1, (2, 1000)).astype(np.float32)
    mono = levels.mean(axis=0, dtype=np.float32)
    forms: list[tuple[Any, np.ndarray]] = [
        (levels[0], levels[0]),
        (levels, mono),
        (torch.from_numpy(levels), mono),
        (torch.from_numpy(levels[0]).double(), levels[0]),
        (torch.from_numpy(levels[0]).requires_grad_(), levels[0]),
        (torch.from_numpy(levels[0]).half(), levels[0].astype(np.float16).astype(np.float32)),
        (torch.from_numpy(levels[0]).bfloat16(), torch.from_numpy(levels[0]).bfloat16().float().numpy()),
        (levels.astype(np.float64), mono),
        (levels[0].tolist(), levels[0]),
        (levels[:1], levels[0]),
        (levels[0][::-1], levels[0][::-1]),
        (np.array([-32768, 0, 16384], dtype=np.int16), np.array([-1, 0, 0.5], dtype=np.float32)),
    ]
    for given_samples, expected in forms:
        found = samples_of(AudioSamples(given_samples, 16000), 16000)
        assert np.abs(found - expected).max() < 1e-6
    mine = levels[0].copy()
    source = opened(AudioSamples(mine, 16000))
    before = source.digest()
    mine[:] = 0
    assert source.digest() == before
    assert np.array_equal(source.decode(source.probe(16000)).samples, levels[0])


WRONG: dict[str, tuple[Any, str]] = {
    "bare": (np.zeros(9, np.float32), "metadata"),
    "bare list": ([0.0, 1.0], "metadata"),
    "none": (None, "type"),
    "no samples": (AudioSamples(np.zeros(0, np.float32), 16000), "array"),
    "no channels": (AudioSamples(np.zeros((0, 9), np.float32), 16000), "array"),
    "three axes": (AudioSamples(np.zeros((1, 1, 9), np.float32), 16000), "array"),
    "a number": (AudioSamples(np.float32(1), 16000), "array"),
    "whole numbers of another size": (AudioSamples(np.zeros(9, np.int32), 16000), "array"),
    "bools": (AudioSamples(np.zeros(9, bool), 16000), "array"),
    "complex": (AudioSamples(np.zeros(9, complex), 16000), "array"),
    "objects": (AudioSamples(np.array([None] * 9), 16000), "array"),
    "words": (AudioSamples(["a", "b"], 16000), "array"),
    "ragged": (AudioSamples([[0.0], [0.0, 1.0]], 16000), "array"),
    "sparse": (AudioSamples(torch.zeros(9).to_sparse(), 16000), "array"),
    "nan": (AudioSamples(np.array([0, np.nan], np.float32), 16000), "samples"),
    "inf": (AudioSamples(np.array([0, np.inf], np.float32), 16000), "samples"),
    "too large for float32": (AudioSamples(np.array([0, 1e300]), 16000), "samples"),
    "no rate": (AudioSamples(np.zeros(9, np.float32), 0), "metadata"),
    "a rate below nothing": (AudioSamples(np.zeros(9, np.float32), -16000), "metadata"),
    "half a rate": (AudioSamples(np.zeros(9, np.float32), 16000.5), "metadata"),  # type: ignore[arg-type]
    "a rate that nobody sells": (AudioSamples(np.zeros(9, np.float32), 10**9), "metadata"),
    "truth for a rate": (AudioSamples(np.zeros(9, np.float32), True), "metadata"),
    "nothing": (b"", "empty"),
    "text": (b"hello, this is text, no audio!" * 9, "format"),
    "head only": (wav(b"", 16000, 1, 16), "empty"),
    "nan in a file": (wav(np.array([0, np.nan], "<f4").tobytes(), 16000, 1, 32, kind=3), "samples"),
    "inf in a file": (wav(np.array([0, np.inf], "<f8").tobytes(), 16000, 1, 64, kind=3), "samples"),
    "no rate in a file": (wav(b"\0" * 100, 0, 1, 16), "rate"),
    "no channels in a file": (wav(b"\0" * 100, 16000, 0, 16), "broken"),
    "a rate of billions in a file": (wav(b"\0" * 100, 2**31 - 1, 1, 16), "rate"),
}


@pytest.mark.parametrize("wanted", [16000, 44100])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_audios_are_refused(name: str, wanted: int) -> None:
    value, reason = WRONG[name]
    with pytest.raises(MediaError) as caught:
        samples_of(value, wanted)
    assert caught.value.path == "audios[0]"
    assert "audios[0]" in str(caught.value)
    if "in a file" not in name:
        assert caught.value.reason == reason


def test_a_video_without_audio_and_a_rare_codec_are_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.height = stream.width = 32
        out.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        out.mux(stream.encode(None))
    with pytest.raises(MediaError, match="no audio"):
        samples_of(file.getvalue(), 16000)
    rare = encoded(whole_numbers(sine(8000, 0.5))[:, None], 8000, "matroska", "pcm_s16le")
    rare = rare.replace(b"A_PCM/INT/LIT", b"A_REAL/28_8\0\0")
    with pytest.raises(MediaError, match="codec"):
        samples_of(rare, 16000)


@pytest.mark.parametrize(
    ("container", "codec", "form", "rate"), [*LOSSY, ("flac", "flac", "s16", 44100), ("wav", "pcm_s16le", "s16", 44100)]
)
def test_an_audio_that_is_cut_anywhere_gives_its_beginning_or_an_error(
    container: str, codec: str, form: str, rate: int
) -> None:
    data = encoded(whole_numbers(sine(rate, 0.4))[:, None], rate, container, codec, form=form)
    expected = samples_of(data, rate)
    for at in [0, 1, 11, 12, 50, *range(100, len(data), max(1, len(data) // 12)), len(data) - 1]:
        paths: list[Any] = []
        try:
            found = samples_of(data[:at], rate)
            common = min(len(found), len(expected)) - 2400
            assert common < 0 or np.array_equal(found[:common], expected[:common])
        except MediaError as error:
            paths.append(error.path)
        assert paths in ([], ["audios[0]"])


# ------------------------------------------------------------------ limits


@pytest.fixture
def decoded_samples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each decoded piece had."""
    seen: list[int] = []
    original = audio._averaged

    def averaged(waveform: Any) -> np.ndarray:
        seen.append(waveform.samples)
        return original(waveform)

    monkeypatch.setattr(audio, "_averaged", averaged)
    return seen


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_a_long_audio_stops_at_the_limit(form: str, decoded_samples: list[int]) -> None:
    silence = np.zeros((16000 * 60, 1), np.int16)
    data = wav(silence.tobytes(), 16000, 1, 16) if form == "wav" else encoded(silence, 16000, "flac", "flac")
    with pytest.raises(LimitError) as caught:
        opened(data, max_audio_seconds=2.0).probe(16000)
    assert (caught.value.path, caught.value.setting) == ("audios[0]", "max_audio_seconds")
    assert sum(decoded_samples) <= 2 * 16000
    decoded_samples.clear()
    assert opened(data, max_audio_seconds=60.0).probe(16000).num_samples == 16000 * 60
    assert sum(decoded_samples) == 16000 * 60


def test_limits_of_given_samples_and_of_bytes() -> None:
    long = AudioSamples(np.zeros(16000 * 3, np.float32), 16000)
    with pytest.raises(LimitError) as caught:
        opened(long, max_audio_seconds=2.9)
    assert (caught.value.path, caught.value.setting) == ("audios[0]", "max_audio_seconds")
    opened(long, max_audio_seconds=3.0)
    with pytest.raises(LimitError) as caught:
        opened(wav(b"\0" * 100, 16000, 1, 16), max_media_bytes=100)
    assert caught.value.setting == "max_media_bytes"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_a_fast_audio_is_kept_at_the_model_s_rate_alone(fresh: Callable[..., Any], tmp_path: Any) -> None:
    """Ten minutes at 192 kHz are 460 MB of float32; at 16 kHz they are 38."""
    data = encoded(np.zeros((192_000, 1), np.int16), 192_000, "flac", "flac")
    file = tmp_path / "audio"
    frames = data[data.index(b"\xff\xf8") :]
    assert len(frames) < 10_000
    file.write_bytes(data + frames * 599)
    code = f"""
import json
from pathlib import Path
import av, numpy
from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio
from mm_plugin.settings import Settings
def probe(data):
    return open_audio(data, path="audio", settings=Settings()).probe(16000).num_samples
data = Path({str(file)!r}).read_bytes()
def peak():  # of this process alone; what getrusage tells begins with what the parent had
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
probe(data[:{len(data)}])
before = peak()
found = probe(data)
print(json.dumps([found, (peak() - before) // 1024]))
"""
    found, megabytes = fresh(code)
    assert found >= 9 * 60 * 16000
    assert megabytes < 200


# ------------------------------------------------------------------ heads


def test_heads_tell_the_length_without_decoding(decoded_samples: list[int]) -> None:
    levels = whole_numbers(sine(44100, 1.25))[:, None]
    for data in (wav(levels.astype("<i2").tobytes(), 44100, 1, 16), encoded(levels, 44100, "flac", "flac")):
        assert opened(data).probe() == AudioSize(len(levels), 44100)
    assert opened(AudioSamples(levels[:, 0], 44100)).probe() == AudioSize(len(levels), 44100)
    assert decoded_samples == []


def id3(count: int) -> bytes:
    frames = b"".join(b"TXXX" + struct.pack(">I", 12) + b"\0\0\0%08x\0" % place for place in range(count))
    size = bytes(len(frames) >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + frames


def chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def tagged(count: int) -> bytes:
    """A FLAC file with so many tags."""
    data = encoded(whole_numbers(sine(16000, 0.5))[:, None], 16000, "flac", "flac")
    tags = struct.pack("<II", 0, count) + b"".join(struct.pack("<I", 9) + b"%07x=a" % place for place in range(count))
    return data[:4] + bytes([data[4] & 0x7F]) + data[5:42] + b"\x04" + len(tags).to_bytes(3, "big") + tags + data[42:]


def test_tags_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg compares each tag with all others: 60,000 of them, a megabyte, take it a minute."""
    levels = whole_numbers(sine(16000, 0.5))
    plain = wav(levels.tobytes(), 16000, 1, 16)
    after = wav(levels.tobytes(), 16000, 1, 16, extra=chunk(b"id3 ", id3(60_000)))
    assert np.array_equal(samples_of(after, 16000), samples_of(plain, 16000))
    mp3 = encoded(levels[:, None], 16000, "mp3", "libmp3lame", form="s16p")
    assert np.array_equal(samples_of(id3(60_000) + mp3, 16000), samples_of(mp3, 16000))
    assert len(samples_of(tagged(4000), 16000)) == 8000
    with pytest.raises(MediaError, match="tags"):
        samples_of(tagged(60_000), 16000)
    names = b"INFO" + b"".join(chunk(b"%04x" % place, b"a\0") for place in range(65_000))
    named = wav(levels.tobytes(), 16000, 1, 16, extra=chunk(b"LIST", names))
    assert np.array_equal(samples_of(named, 16000), samples_of(plain, 16000))


def test_samples_of_one_tick_are_counted_by_chunk() -> None:
    """PCM in mov tells every sample; a camera's minutes of it are not a hostile file, chunks without end are."""
    levels = np.zeros((1_500_000, 1), np.int16)
    data = encoded(levels, 48000, "mov", "pcm_s16le")
    assert len(samples_of(data, 48000)) == 1_500_000
    hostile = bytearray(data)
    struct.pack_into(">IIII", hostile, data.index(b"stsc") + 8, 1, 1, 0x7FFFFFFF, 1)
    with pytest.raises(MediaError, match="packets"):
        samples_of(bytes(hostile), 48000)


@pytest.mark.parametrize("junk", [b"APETAGEX" + bytes(200), b"TAG" + bytes(125), bytes(1000), b"\xff\xfb\x90\x64" * 50])
def test_what_stands_after_an_mp3_is_passed_over(junk: bytes) -> None:
    mp3 = encoded(whole_numbers(sine(44100, 0.5))[:, None], 44100, "mp3", "libmp3lame", form="s16p")
    expected = samples_of(mp3, 44100)
    found = samples_of(mp3 + junk, 44100)
    assert np.array_equal(found[: len(expected) - 1152], expected[: len(expected) - 1152])


def test_the_rate_that_is_heard_counts() -> None:
    """Opus is decoded at 48 kHz, whatever its container says; so is the whole band of HE-AAC, of which the head tells half."""
    data = encoded(whole_numbers(sine(48000, 1.0))[:, None], 48000, "matroska", "libopus", form="flt")
    reported = b"\xb5\x88" + struct.pack(">d", 48000.0)
    assert reported in data
    other = data.replace(reported, b"\xb5\x88" + struct.pack(">d", 24000.0))
    assert np.array_equal(samples_of(other, 48000), samples_of(data, 48000))
    assert np.array_equal(samples_of(other, 16000), samples_of(data, 16000))


# ------------------------------------------------------------------ digests


def test_what_tells_audios_apart() -> None:
    levels = np.linspace(-1, 1, 100, dtype=np.float32)
    base = opened(AudioSamples(levels, 16000)).digest()
    assert (
        base
        == opened(AudioSamples(levels.copy(), 16000)).digest()
        == opened(AudioSamples(torch.from_numpy(levels), 16000)).digest()
    )
    others = [AudioSamples(levels, 8000), AudioSamples(levels[::-1], 16000), AudioSamples(levels[:99], 16000)]
    assert len({base, *(opened(one).digest() for one in others)}) == 4
    data = wav(b"\0" * 100, 16000, 1, 16)
    assert opened(data).digest() == opened(memoryview(data)).digest() != opened(data + b"\0").digest()


def test_a_source_decodes_once_for_its_length_and_its_samples(decoded_samples: list[int]) -> None:
    source = opened(wav(whole_numbers(sine(16000, 1)).tobytes(), 16000, 1, 16))
    size = source.probe(16000)
    assert source.probe(16000) == size
    source.decode(size)
    assert sum(decoded_samples) == 16000
    assert source.probe(8000).num_samples == 8000
    assert sum(decoded_samples) == 32000
