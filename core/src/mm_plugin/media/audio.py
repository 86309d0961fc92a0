"""Audio: encoded files and given samples -> [num_samples] float32, mono, at the sampling rate that a model takes.

Channels are averaged, then the audio is resampled. Audio that already has the right rate keeps its samples exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mm_plugin.arrays import is_dense, is_tensor
from mm_plugin.errors import MediaError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.media.audio_tracks import (
    BARE_FORMATS,
    CUT_FORMATS,
    FORMATS,
    HEADERLESS_FORMATS,
    MOST_CHANNELS,
    AudioTrack,
    choose_track,
)
from mm_plugin.media.encryption import is_encrypted
from mm_plugin.media.limits import check_audio_samples, check_request_bytes, check_unmasked
from mm_plugin.media.pyav import CheckedFile, av_decoding, import_av, open_container
from mm_plugin.media.source import SamplingRules
from mm_plugin.media.sources import is_encoded, read_bytes
from mm_plugin.media.types import WHITE, AudioSamples, AudioSize, Color, DecodedAudio
from mm_plugin.settings import Settings

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet

_MOST_RATE = 768_000  # Hz; the fastest converters that are sold
_PIECE = 1 << 16  # samples that are resampled together
_MOST_PLANES = 8
_CUT_PACKETS = 8  # at each end of a recording, which may begin and end within a frame
# Full scale of whole numbers, and the level of silence.
_SCALES = {"u": (128.0, 128.0), "i2": (32768.0, 0.0), "i4": (2147483648.0, 0.0), "i8": (9223372036854775808.0, 0.0)}


class _Decoded(NamedTuple):
    """Samples at a rate, and what was served otherwise than asked."""

    samples: np.ndarray
    rate: int
    notes: tuple[str, ...]


class AudioSource:
    """One audio input, its kind and size in bytes checked, not decoded yet. Final; made by `open_audio`; a `MediaSource`.

    Attributes:
        path: where it stands in the request, such as `audios[0]`.
    """

    def __init__(
        self, path: str, settings: Settings, *, data: bytes | None = None, given: tuple[np.ndarray, int] | None = None
    ) -> None:
        self.path, self._settings, self._data, self._given = path, settings, data, given
        self._decoded: _Decoded | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoded": None}

    @property
    def head(self) -> bytes:
        """The first bytes of the encoded file; empty for given samples."""
        return (self._data or b"")[:64]

    def _checked(self) -> CheckedFile:
        return CheckedFile(self._data or b"", path=self.path, settings=self._settings)

    def value(self) -> bytes | AudioSamples:
        """See `MediaSource.value`."""
        return (self._data or b"") if self._given is None else AudioSamples(*self._given)

    def digest(self) -> bytes:
        """What distinguishes this audio from others: the digest of its encoded bytes, or of the given samples; 32 bytes."""
        if self._given is not None:
            return digest(frame(["samples", feature_digest(self._given[0]), self._given[1]]))
        return digest(frame(["bytes", digest(self._data or b"")]))

    def probe(self, sampling_rate: int | None = None) -> AudioSize:
        """How many samples it has.

        Args:
            sampling_rate: at this rate, by decoding it: no header is exact, and samples take little memory. At its own rate where
                None, as the header says, without decoding it; a file without a header is decoded all the same.

        Raises:
            MediaError: it is not audio that can be opened or decoded, or its header does not say how long it is.
            LimitError: it is longer than `max_audio_seconds`.
        """
        if sampling_rate is None:
            return self._header()
        return AudioSize(len(self._at_rate(sampling_rate).samples), sampling_rate)

    def size(self, rules: SamplingRules) -> AudioSize:
        """How many samples it has at the rate of the rules; raises as `probe` does."""
        return self.probe(rules.sampling_rate())

    def decode(self, size: AudioSize, *, background: Color = WHITE) -> DecodedAudio:
        """Every sample of it.

        Args:
            size: the size at the rate that is asked for.
            background: without effect.
        """
        decoded = self._at_rate(size.sampling_rate)
        self._decoded = None  # the samples are held no longer than this call
        return DecodedAudio(size, decoded.samples, decoded.notes)

    def _header(self) -> AudioSize:
        if self._given is not None:
            return AudioSize(len(self._given[0]), self._given[1])
        with av_decoding(self.path, "audio"), open_container(self._checked(), FORMATS) as container:
            track = choose_track(container, self._data or b"")
            stream = track.stream
            if container.format.name in HEADERLESS_FORMATS or not stream.rate:
                return self._counted(_audios(container, track, []))
            _checked_rate(stream.rate)
            seconds = stream.duration * stream.time_base if stream.duration and stream.time_base else None
            if seconds is None and container.duration:
                seconds = Fraction(container.duration, 1_000_000)
            if not seconds or seconds < 0:
                raise MediaError("the file's header does not say how long the audio is", reason="duration")
            return AudioSize(round(seconds * stream.rate), stream.rate)

    def _at_rate(self, sampling_rate: int) -> _Decoded:
        """The samples at a rate, decoded once for the size and for what is prepared."""
        decoded = self._decoded
        if decoded is None or decoded.rate != sampling_rate:
            with av_decoding(self.path, "audio"):
                self._decoded = decoded = self._samples(sampling_rate)
        return decoded

    def _samples(self, sampling_rate: int) -> _Decoded:
        if self._given is not None:
            return _Decoded(_at_rate([self._given[0]], self._given[1], sampling_rate), sampling_rate, ())
        with open_container(self._checked(), FORMATS) as container:
            track = choose_track(container, self._data or b"")
            notes = list(track.notes)
            audios = _audios(container, track, notes)
            first = next(audios, None)
            if first is None:
                raise MediaError("expected at least one sample, got none", reason="empty")
            # The header may have another rate: for HE-AAC that of its core, half of what is heard.
            rate = _checked_rate(first.sample_rate)
            samples = _at_rate(self._pieces(itertools.chain([first], audios), rate), rate, sampling_rate)
            return _Decoded(samples, sampling_rate, tuple(notes))

    def _counted(self, audios: Iterator[AudioFrame]) -> AudioSize:
        """Of a file that has no header: by decoding it, without keeping its samples."""
        first = next(audios, None)
        if first is None:
            raise MediaError("expected at least one sample, got none", reason="empty")
        rate = _checked_rate(first.sample_rate)
        return AudioSize(sum(map(len, self._pieces(itertools.chain([first], audios), rate))), rate)

    def _pieces(self, audios: Iterable[AudioFrame], rate: int) -> Iterator[np.ndarray]:
        """Decoded samples, channels averaged."""
        count = 0
        for waveform in audios:
            if waveform.sample_rate != rate:
                raise MediaError(
                    f"expected one sampling rate, got {rate} and later {waveform.sample_rate} Hz", reason="rate"
                )
            count += waveform.samples
            check_audio_samples(self.path, count, rate, self._settings)
            yield _averaged(waveform)


def open_audio(value: Any, *, path: str, settings: Settings) -> AudioSource:
    """Open audio in any accepted form, without decoding it.

    Args:
        value: encoded audio in any form that an encoded image may have, or `AudioSamples`.
        path: where it stands in the request, for messages.
        settings: limits.

    Raises:
        MediaError: the value is of another kind, cannot be read, or has samples without their rate.
        LimitError: it has more bytes or seconds than a limit allows.
    """
    if is_encoded(value):
        return AudioSource(path, settings, data=read_bytes(value, path, settings))
    if isinstance(value, AudioSamples):
        return AudioSource(path, settings, given=_checked(value, path, settings))
    if isinstance(value, list | tuple) or hasattr(value, "shape"):
        raise MediaError(
            f"{path}: expected samples with their rate, got samples alone; pass AudioSamples(samples, sampling_rate)",
            path=path,
            reason="metadata",
        )
    raise MediaError(
        f"{path}: expected bytes, a path, a URL, base64 or AudioSamples, got {type(value).__name__}",
        path=path,
        reason="type",
    )


def _checked(value: AudioSamples, path: str, settings: Settings) -> tuple[np.ndarray, int]:
    """Given samples as [num_samples] float32 of their own memory, and their rate."""
    samples, rate = value.samples, value.sampling_rate
    check_unmasked(path, samples)
    if is_tensor(samples) and is_dense(samples):
        try:
            samples = samples.detach().cpu()
            samples = samples.float().numpy() if samples.is_floating_point() else samples.numpy()
        except Exception as error:  # one without memory, such as on the device `meta`
            raise MediaError(
                f"{path}: the tensor cannot be read ({type(error).__name__})", path=path, reason="array"
            ) from error
    if isinstance(samples, list | tuple):
        try:
            samples = np.array(samples, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            samples = None
    good = isinstance(samples, np.ndarray) and samples.ndim in (1, 2) and samples.dtype.kind in "fi"
    if not good or (samples.dtype.kind == "i" and samples.dtype != np.int16) or 0 in samples.shape:
        found = f"{list(samples.shape)} {samples.dtype}" if isinstance(samples, np.ndarray) else type(samples).__name__
        raise MediaError(
            f"{path}: samples must be [num_samples] or [channels, num_samples], floats or int16, got {found}",
            path=path,
            reason="array",
        )
    if type(rate) is not int or not 0 < rate <= _MOST_RATE:
        got = rate if type(rate) is int and abs(rate) < 1 << 63 else type(rate).__name__
        raise MediaError(
            f"{path}: sampling rate must be an int from 1 to {_MOST_RATE} Hz, got {got}",
            path=path,
            reason="metadata",
        )
    if samples.ndim == 2 and len(samples) > MOST_CHANNELS:
        raise MediaError(
            f"{path}: samples must have at most {MOST_CHANNELS} channels, got {len(samples)}; pass [channels, num_samples]",
            path=path,
            reason="array",
        )
    check_audio_samples(path, samples.shape[-1], rate, settings)
    check_request_bytes(path, samples.nbytes, settings)  # of a broadcast view, what its copy takes
    floats = _as_floats(samples)
    mono = floats.mean(axis=0, dtype=np.float32) if floats.ndim == 2 else floats.copy()
    if not np.isfinite(mono).all():
        raise MediaError(f"{path}: samples must be finite, got infinity or NaN", path=path, reason="samples")
    return mono, rate


def _as_floats(samples: np.ndarray) -> np.ndarray:
    """Samples with full scale -1..1 as float32."""
    kind = samples.dtype.kind if samples.dtype.kind in "fu" else f"i{samples.dtype.itemsize}"
    if kind == "f":
        with np.errstate(over="ignore"):
            return samples.astype(np.float32, copy=False)
    scale, silence = _SCALES[kind]
    return ((samples.astype(np.float64) - silence) / scale).astype(np.float32)


def _checked_rate(rate: int) -> int:
    if not 0 < rate <= _MOST_RATE:
        raise MediaError(f"sampling rate must be from 1 to {_MOST_RATE} Hz, got {rate}", reason="rate")
    return rate


def _audios(container: InputContainer, track: AudioTrack, notes: list[str]) -> Iterator[AudioFrame]:
    """Every decoded piece of a track; what could not be decoded, and may be passed over, is noted once all are read.

    Raises:
        MediaError: a packet is encrypted, or the decoder lacks what the file uses.
        FFmpegError: a packet that may not be passed over cannot be decoded.
    """
    errors = import_av().error
    # AC-3 and AAC report a frame whose beginning is broken by numbers that PyAV has no class for.
    broken, lacking = (errors.InvalidDataError, errors.UndefinedError), errors.PatchWelcomeError
    name = container.format.name
    started, skipped, last = False, 0, 0
    failure: Exception | None = None  # of the packets in a row that were not decoded, at the end so far
    for packet in container.demux(track.stream):
        if is_encrypted(packet):
            raise MediaError("the audio is encrypted; send it decrypted", reason="encrypted")
        try:
            decoded = _pause(packet, track) or packet.decode()
        except lacking as error:
            raise MediaError(
                "the audio uses a feature that the decoder lacks; convert it to FLAC", reason="codec"
            ) from error
        except broken as error:
            skipped, last, failure = skipped + 1, last + 1, error
            within = name in BARE_FORMATS or (name in CUT_FORMATS and last <= _CUT_PACKETS)
            if not within:
                raise
            continue
        if decoded and failure is not None and started and name not in BARE_FORMATS:
            raise failure
        if decoded:
            started, last, failure = True, 0, None
        yield from decoded
    if skipped:
        packets = "1 packet of the audio" if skipped == 1 else f"{skipped} packets of the audio"
        notes.append(f"left out what could not be decoded: {packets}")


def _pause(packet: Packet[AudioStream], track: AudioTrack) -> list[AudioFrame]:
    """The silence that a packet of AMR stands for where nobody speaks; empty where it holds speech.

    FFmpeg's decoders refuse such packets, and what follows would come too early. The noise of a line is not imitated.
    Source: 3GPP TS 26.101, table 1a, and TS 26.201, table 1a: 20 ms a frame, kinds from 8 and from 9 on hold no speech.
    """
    codec = track.stream.codec_context.codec.canonical_name
    speech, rate = {"amr_nb": (8, 8_000), "amr_wb": (9, 16_000)}.get(codec, (16, 0))
    if not 0 < packet.size <= 8 or memoryview(packet)[0] >> 3 & 15 < speech:
        return []
    silence = import_av().AudioFrame.from_ndarray(np.zeros((1, rate // 50), np.float32), format="fltp", layout="mono")
    silence.sample_rate = rate
    return [silence]


def _averaged(waveform: AudioFrame) -> np.ndarray:
    """One decoded piece, [num_samples] float32."""
    channels = waveform.layout.nb_channels
    packed = _packed(waveform) if waveform.format.is_planar and channels >= _MOST_PLANES else waveform
    floats = _as_floats(packed.to_ndarray())
    if not packed.format.is_planar:  # channels follow one another sample by sample
        floats = floats.reshape(-1, channels).T
    averaged: np.ndarray = floats[0] if channels == 1 else floats.mean(axis=0, dtype=np.float32)
    return averaged


def _packed(waveform: AudioFrame) -> AudioFrame:
    """The same samples in one plane. PyAV reads past the end of a list of 8 planes, which is as long as FFmpeg's longest own."""
    waveform.pts = None
    form = waveform.format.packed.name
    packed: AudioFrame
    (packed,) = (
        import_av().AudioResampler(format=form, layout=waveform.layout, rate=waveform.sample_rate).resample(waveform)
    )
    return packed


def _at_rate(pieces: Iterable[np.ndarray], rate: int, wanted: int) -> np.ndarray:
    """The whole audio at another rate. Pieces are resampled as they come, so no more is held than the result."""
    count = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal count
        for piece in pieces:
            count += len(piece)
            if not np.isfinite(piece).all():  # a filter may make them finite again
                raise MediaError("samples must be finite, got infinity or NaN", reason="samples")
            yield piece

    held = bytearray()  # grows in place; a list of pieces would be held beside the result
    for part in counted() if rate == wanted else _resampled(counted(), rate, wanted):
        held += part.tobytes()
    if not count:
        raise MediaError("expected at least one sample, got none", reason="empty")
    # As many as the rates imply, whatever the filter's ends: silence is added, or its tail is dropped.
    size = AudioSize(count, rate).at(wanted).num_samples * np.dtype(np.float32).itemsize
    del held[size:]
    held += bytes(size - len(held))
    out = np.frombuffer(held, dtype=np.float32)
    if not np.isfinite(out).all():
        raise MediaError("samples must be finite, got infinity or NaN", reason="samples")
    return out


def _resampled(pieces: Iterable[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    """The audio at another rate, by FFmpeg's resampler, piece by piece."""
    av = import_av()
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=wanted)
    for piece in pieces:
        for start in range(0, len(piece), _PIECE):
            part = np.ascontiguousarray(piece[start : start + _PIECE], dtype=np.float32)
            waveform = av.AudioFrame.from_ndarray(part[None], format="fltp", layout="mono")
            waveform.sample_rate = rate
            for done in resampler.resample(waveform):
                yield done.to_ndarray()[0]
    for done in resampler.resample(None):
        yield done.to_ndarray()[0]
