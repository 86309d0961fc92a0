"""Odd audio inputs: every way to store samples that people send, and what must be refused. Needs the extra `video`."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from mm_plugin.items import Modality
from mm_plugin.media.types import AudioSamples
from mm_plugin.testing.corpus.encoders import HERTZ, encoded, encoded_audio, images, tone
from mm_plugin.testing.corpus.entries import CorpusEntry, ExpectedAudio, refuses
from mm_plugin.testing.corpus.formats import noise, png, samples_of, wav

_refuses = functools.partial(refuses, Modality.AUDIO)


def audios() -> Iterator[CorpusEntry]:
    """Every odd audio, equal bytes each time.

    Raises:
        UsageError: PyAV is not installed.
    """
    for family in (_waves, _lossless, _lossy, _given, _broken, _foreign, _streams):
        yield from family()


def _audio(
    name: str, value: Any, samples: np.ndarray, rate: int, tolerance: float = 0.0, note: str = ""
) -> CorpusEntry:
    hertz = HERTZ if len(samples) > rate // 20 else None
    expected = ExpectedAudio(len(samples), rate, samples.astype(np.float32), hertz, tolerance)
    return CorpusEntry(name, Modality.AUDIO, value, expected, note=note)


# ---------------------------------------------------------------- WAVE

_ROUNDING = 1e-6  # of a mean in float32


def _waves() -> Iterator[CorpusEntry]:
    for bits in (8, 16, 24, 32):
        whole = np.rint(tone(2000, 16_000) * ((1 << bits - 1) - 1)).astype(np.int64)
        data = wav(samples_of(whole, bits), rate=16_000, bits=bits)
        yield _audio(f"wav/{bits} bits", data, whole[:, 0] / (1 << bits - 1), 16_000, 0 if bits < 32 else 1e-7)
    for bits, kind in ((32, "<f4"), (64, "<f8")):
        floats = tone(2000, 16_000).astype(kind)
        data = wav(floats.tobytes(), rate=16_000, bits=bits, code=3)
        yield _audio(f"wav/floats of {bits} bits", data, floats[:, 0], 16_000, 0 if bits == 32 else 1e-7)
    for rate in (8_000, 22_050, 44_100, 48_000, 96_000):
        whole = np.rint(tone(rate // 5, rate) * 32_767).astype(np.int64)
        yield _audio(f"wav/{rate} Hz", wav(samples_of(whole, 16), rate=rate), whole[:, 0] / 32_768, rate)
    for channels in (2, 6, 8):
        whole = np.rint(tone(2000, 16_000, channels) * 32_767).astype(np.int64)
        data = wav(samples_of(whole, 16), rate=16_000, channels=channels)
        mean = whole.mean(axis=1) / 32_768
        yield _audio(f"wav/{channels} channels", data, mean, 16_000, _ROUNDING, "channels are averaged")
    loud = np.array([[2.0], [-3.0], [0.5]], "<f4")
    data = wav(loud.tobytes(), rate=8_000, bits=32, code=3)
    yield _audio("wav/floats beyond full scale", data, loud[:, 0], 8_000, note="kept: clipping is left to the model")
    one = wav(struct.pack("<h", 16_384), rate=8_000)
    yield _audio("wav/one sample", one, np.array([0.5]), 8_000)
    whole = np.rint(tone(2000, 16_000) * 32_767).astype(np.int64)
    raw = samples_of(whole, 16)
    shown = whole[:, 0] / 32_768
    yield _audio(
        "wav/declared length too large", wav(raw, rate=16_000, claimed=2**31), shown, 16_000, note="a stream's head"
    )
    yield _audio("wav/length unknown", wav(raw, rate=16_000, claimed=2**32 - 1), shown, 16_000, note="a stream's head")
    yield _audio("wav/cut within a sample", wav(raw[:-1], rate=16_000, claimed=4000), shown[:-1], 16_000)
    extra = b"LIST" + struct.pack("<I", 12) + b"INFOIART\0\0\0\0"
    plain = wav(raw, rate=16_000)
    yield _audio("wav/other chunks before its samples", plain[:12] + extra + plain[12:], shown, 16_000)


# ---------------------------------------------------------------- by PyAV


def _lossless() -> Iterator[CorpusEntry]:
    for channels in (1, 2):
        whole = np.rint(tone(9000, 44_100, channels) * 32_767).astype(np.int16)
        data = encoded_audio(whole, 44_100, "flac", "flac", "s16")
        mean = whole.astype(np.float64).mean(axis=1) / 32_768
        yield _audio(f"flac/{channels} channels", data, mean, 44_100, _ROUNDING)
    deep = (np.rint(tone(9000, 96_000) * 8_388_607).astype(np.int64) * 256).astype(np.int32)
    data = encoded_audio(deep, 96_000, "flac", "flac", "s32", {"bits_per_raw_sample": "24"})
    yield _audio("flac/24 bits, 96 kHz", data, deep[:, 0] / 2**31, 96_000, _ROUNDING)
    whole = np.rint(tone(8192, 44_100) * 32_767).astype(np.int16)
    data = encoded_audio(whole, 44_100, "ipod", "alac", "s16p")
    yield _audio("m4a/alac", data, whole[:, 0] / 32_768, 44_100)
    data = encoded_audio(whole, 44_100, "aiff", "pcm_s16be", "s16")
    yield _audio("aiff/16 bits", data, whole[:, 0] / 32_768, 44_100)


def _lossy() -> Iterator[CorpusEntry]:
    for name, container, codec, layout, rate, options in (
        ("mp3/44.1 kHz", "mp3", "libmp3lame", "s16p", 44_100, {}),
        ("mp3/8 kHz", "mp3", "libmp3lame", "s16p", 8_000, {}),
        ("ogg/opus", "ogg", "libopus", "s16", 48_000, {}),
        ("webm/opus", "webm", "libopus", "s16", 48_000, {}),
        ("ogg/vorbis", "ogg", "vorbis", "fltp", 44_100, {"strict": "-2"}),
        ("m4a/aac", "ipod", "aac", "fltp", 44_100, {}),
    ):
        channels = 2 if codec == "vorbis" else 1  # FFmpeg's own encoder knows stereo only
        wave = tone(rate // 2, rate)
        wave = np.repeat(wave, channels, axis=1)
        levels = wave.astype(np.float32) if layout == "fltp" else np.rint(wave * 32_767).astype(np.int16)
        data = encoded_audio(levels, rate, container, codec, layout, options)
        expected = ExpectedAudio(len(levels), rate, hertz=HERTZ, slack=4096)
        yield CorpusEntry(name, Modality.AUDIO, data, expected, note="codecs add silence at the ends")
    film = encoded(images(12), audio=True)
    expected = ExpectedAudio(24_576, 48_000, hertz=HERTZ, slack=2048)
    yield CorpusEntry("mp4/the audio of a film", Modality.AUDIO, film, expected)


def _given() -> Iterator[CorpusEntry]:
    wave = tone(4000, 16_000, 2)
    floats = wave.T.astype(np.float32)  # [channels, num_samples]
    yield _audio("samples/floats", AudioSamples(floats[0], 16_000), floats[0], 16_000)
    yield _audio("samples/two channels", AudioSamples(floats, 16_000), floats.mean(axis=0), 16_000, _ROUNDING)
    whole = np.rint(wave[:, 0] * 32_767).astype(np.int16)
    yield _audio("samples/int16", AudioSamples(whole, 16_000), whole / 32_768, 16_000)
    yield _audio("samples/float64", AudioSamples(wave[:, 0], 16_000), wave[:, 0], 16_000)
    yield _audio("samples/a list", AudioSamples(floats[0].tolist(), 16_000), floats[0], 16_000)
    yield _audio("samples/every second", AudioSamples(floats[0, ::2], 8_000), floats[0, ::2], 8_000)
    half = floats[0].astype(np.float16)
    yield _audio("samples/float16", AudioSamples(half, 16_000), half, 16_000)
    yield _refuses("samples/bare array", floats[0], "metadata")
    yield _refuses("samples/bare list", [0.0, 0.5], "metadata")
    for name, samples in {
        "none": np.zeros(0, np.float32),
        "three axes": np.zeros((1, 2, 3), np.float32),
        "int32": np.zeros(9, np.int32),
        "unsigned": np.zeros(9, np.uint8),
        "objects": np.full(9, None),
        "text": "loud",
        "uneven lists": [[0.0], [0.0, 1.0]],
    }.items():
        yield _refuses(f"samples/{name}", AudioSamples(samples, 16_000), "array", "empty")
    for name, rate in {"0": 0, "below 0": -1, "a float": 16_000.0, "none": None, "too many": 10**9}.items():
        yield _refuses(f"samples/rate, {name}", AudioSamples(floats[0], rate), "metadata")  # type: ignore[arg-type]
    for name, level in {"nan": np.nan, "infinite": np.inf}.items():
        odd = floats[0].copy()
        odd[7] = level
        yield _refuses(f"samples/{name}", AudioSamples(odd, 16_000), "samples")
    long = np.broadcast_to(np.float32(0), 8_000 * 3600)
    yield _refuses("samples/an hour", AudioSamples(long, 8_000), "max_audio_seconds")


# ---------------------------------------------------------------- what must be refused


def _broken() -> Iterator[CorpusEntry]:
    whole = samples_of(np.rint(tone(2000, 16_000) * 32_767).astype(np.int64), 16)
    plain = wav(whole, rate=16_000)
    yield _refuses("broken/empty", b"", "empty")
    yield _refuses("broken/random", noise(3000, 5), "format")
    yield _refuses("broken/half a head", plain[:30], "format", "empty", "broken")
    yield _refuses("broken/head alone", plain[:44], "empty", "broken", "format")
    yield _refuses("broken/no samples declared", wav(b"", rate=16_000), "empty", "format", "broken")
    for name, level in (("nan", np.nan), ("infinite", np.inf)):
        odd = np.array([0.1, level, 0.2], "<f4")
        yield _refuses(f"broken/wav of {name} floats", wav(odd.tobytes(), rate=8_000, bits=32, code=3), "samples")
    yield _refuses("broken/wav of 0 Hz", wav(whole, rate=0), "format", "rate", "broken")
    yield _refuses("broken/wav of 4 GHz", wav(whole, rate=2**32 - 1), "format", "rate", "broken")
    yield _refuses("broken/wav of 0 channels", wav(whole, rate=8_000, channels=0), "format", "broken", "codec", "rate")
    yield _refuses(
        "broken/wav of 65535 channels", wav(whole, rate=8_000, channels=65_535), "format", "broken", "empty", "codec"
    )
    yield _refuses("broken/wav of no known code", wav(whole, rate=8_000, code=0x7777), "codec", "format", "broken")
    flac = encoded_audio(np.rint(tone(9000, 44_100) * 32_767).astype(np.int16), 44_100, "flac", "flac", "s16")
    yield _refuses("broken/flac of a head alone", flac[:60], "empty", "format", "broken")
    yield _refuses("bomb/wav of an hour in 3600 bytes", wav(bytes(3600), rate=1, bits=8), "max_audio_seconds")
    others: dict[str, Any] = {"None": None, "a number": 3, "a dict": {}, "an open file": io.BytesIO(plain)}
    for name, value in others.items():
        yield _refuses(f"type/{name}", value, "type")
    yield _refuses("url/no base64", "data:audio/wav;base64,!!!!", "url")
    yield _refuses("path/missing", "there/is/no/such.wav", "path")


def _foreign() -> Iterator[CorpusEntry]:
    yield _coded("foreign/bare aac", "adts", "aac", "fltp", 44_100)
    yield _refuses("foreign/film without audio", encoded(images(3)), "format")
    yield _refuses("foreign/png", png(images(1)[0]), "format")
    yield _refuses("foreign/text", b"an ordinary sentence, longer than forty characters, and no path", "format")
    yield _refuses("foreign/midi", b"MThd" + struct.pack(">IHHH", 6, 0, 1, 96) + b"MTrk" + bytes(40), "format")
    yield _refuses("foreign/playlist", b"#EXTM3U\nfile:///etc/passwd\n", "format", note="no other file is opened")
    yield _refuses("foreign/playlist of mp3s", b"[playlist]\nFile1=/etc/passwd\n", "format")


# ---------------------------------------------------------------- streams and broadcasts


def _coded(name: str, container: str, codec: str, layout: str, rate: int) -> CorpusEntry:
    wave = tone(rate // 2, rate)
    levels = wave.astype(np.float32) if layout == "fltp" else np.rint(wave * 32_767).astype(np.int16)
    expected = ExpectedAudio(len(levels), rate, hertz=HERTZ, slack=4096)
    return CorpusEntry(name, Modality.AUDIO, encoded_audio(levels, rate, container, codec, layout, {}), expected)


def _streams() -> Iterator[CorpusEntry]:
    for name, container, codec, layout, rate in (
        ("bare/ac3", "ac3", "ac3", "fltp", 48_000),
        ("bare/eac3", "eac3", "eac3", "fltp", 48_000),
        ("bare/mp2", "mp2", "mp2", "s16", 48_000),
        ("ts/aac", "mpegts", "aac", "fltp", 48_000),
        ("flv/aac", "flv", "aac", "fltp", 44_100),
        ("avi/mp3", "avi", "libmp3lame", "s16p", 44_100),
    ):
        yield _coded(name, container, codec, layout, rate)
