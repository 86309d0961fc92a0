"""Which audio is opened, and which track is used: containers and codecs against FFmpeg's own decoding; refusals by hand."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import pytest

from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio
from mm_plugin.settings import Settings


def decoded(value: bytes, rate: int) -> tuple[np.ndarray, Sequence[str]]:
    source = open_audio(value, path="audios[0]", settings=Settings())
    audio = source.decode(source.probe(rate))
    return audio.samples, audio.notes


def refused(value: bytes) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decoded(value, 16_000)
    assert caught.value.path == "audios[0]"
    return caught.value


def tone(rate: int, count: int, channels: int = 1) -> np.ndarray:
    """[count, channels] int16; each channel has its own height."""
    wave = np.sin(2 * np.pi * 440 * np.arange(count) / rate)
    return np.rint(np.stack([8000 * wave * (1 + place) / channels for place in range(channels)], 1)).astype(np.int16)


def encoded(tracks: Sequence[tuple[str, str, np.ndarray]], container: str, rate: int, layout: str = "mono") -> bytes:
    """Tracks as (codec, sample format, [count, channels] int16) in a file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        streams = []
        for codec, form, _ in tracks:
            stream = out.add_stream(codec, rate=rate, layout=layout, options={"strict": "-2"})
            stream.format = form
            streams.append(stream)
        for stream, (_, form, samples) in zip(streams, tracks, strict=True):
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(samples.reshape(1, -1)), format="s16", layout=layout
            )
            frame.sample_rate = rate
            resampler, fifo = av.AudioResampler(format=form, layout=layout, rate=rate), av.AudioFifo()
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                part.pts = None
                fifo.write(part)
            while (piece := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
                out.mux(stream.encode(piece))
            out.mux(stream.encode(None))
    return file.getvalue()


def one(container: str, codec: str, form: str, rate: int, count: int = 0) -> bytes:
    return encoded([(codec, form, tone(rate, count or rate))], container, rate)


def ffmpeg_s(data: bytes) -> np.ndarray:
    """The mean of the channels of every frame that FFmpeg decodes, converted by FFmpeg."""
    parts = []
    with av.open(io.BytesIO(data)) as container:
        resampler: Any = None
        for frame in container.decode(audio=0):
            frame.pts = None
            resampler = resampler or av.AudioResampler(format="flt", layout=frame.layout, rate=frame.sample_rate)
            channels = frame.layout.nb_channels
            parts += [part.to_ndarray().reshape(-1, channels).mean(axis=1) for part in resampler.resample(frame)]
    return np.concatenate(parts)


# ---------------------------------------------------------------- what is opened

KINDS = [
    ("avi", "pcm_s16le", "s16", 44_100), ("avi", "libmp3lame", "s16p", 44_100), ("avi", "ac3", "fltp", 48_000),
    ("flv", "aac", "fltp", 44_100), ("flv", "libmp3lame", "s16p", 44_100), ("flv", "adpcm_swf", "s16", 22_050),
    ("flv", "nellymoser", "flt", 8_000),
    ("mpegts", "aac", "fltp", 48_000), ("mpegts", "mp2", "s16", 48_000), ("mpegts", "ac3", "fltp", 48_000),
    ("mpegts", "eac3", "fltp", 48_000), ("mpegts", "libopus", "flt", 48_000),
    ("mpeg", "mp2", "s16", 48_000), ("vob", "ac3", "fltp", 48_000),
    ("adts", "aac", "fltp", 44_100), ("ac3", "ac3", "fltp", 48_000), ("eac3", "eac3", "fltp", 48_000),
    ("mp2", "mp2", "s16", 48_000),
    ("amr", "libopencore_amrnb", "s16", 8_000), ("3gp", "libopencore_amrnb", "s16", 8_000),
    ("caf", "pcm_s16be", "s16", 44_100), ("caf", "alac", "s16p", 44_100), ("au", "pcm_s16be", "s16", 44_100),
    ("au", "pcm_mulaw", "s16", 8_000), ("wav", "pcm_alaw", "s16", 8_000), ("wav", "adpcm_ms", "s16", 44_100),
    ("wav", "adpcm_ima_wav", "s16p", 44_100), ("wav", "g722", "s16", 16_000), ("mov", "adpcm_ima_qt", "s16p", 44_100),
    ("tta", "tta", "s16", 44_100), ("wv", "wavpack", "s16p", 44_100), ("matroska", "wavpack", "fltp", 44_100),
    ("mp4", "libopus", "flt", 48_000), ("mp4", "ac3", "fltp", 48_000), ("webm", "libopus", "flt", 48_000),
    ("aiff", "pcm_s24be", "s32", 44_100), ("w64", "pcm_f32le", "flt", 44_100),
]  # fmt: skip


@pytest.mark.parametrize(("container", "codec", "form", "rate"), KINDS, ids=lambda part: str(part))
def test_every_container_and_codec_gives_ffmpeg_s_samples(container: str, codec: str, form: str, rate: int) -> None:
    data = one(container, codec, form, rate)
    found, notes = decoded(data, rate)
    expected = ffmpeg_s(data)
    assert len(found) == len(expected)
    # Of MP2 there is a decoder of whole numbers and one of floats; which one FFmpeg takes depends on what it probes.
    assert np.abs(found - expected).max() < (1e-4 if codec == "mp2" else 1e-6)
    assert notes == ()
    assert np.argmax(np.abs(np.fft.rfft(found[-rate // 2 :]))) == 220  # half a second of 440 Hz
    probed = open_audio(data, path="a", settings=Settings()).probe()
    assert probed.sampling_rate == rate
    assert abs(probed.num_samples - len(found)) <= (
        0 if container in ("adts", "ac3", "eac3", "amr", "wv", "tta") else 6 * 1536
    )


@pytest.mark.parametrize("channels", [*range(1, 9), 16, 24, 64])
@pytest.mark.parametrize(("container", "codec", "form"), [("wv", "wavpack", "s16p"), ("w64", "pcm_s16le", "s16")])
def test_any_number_of_channels_is_averaged(container: str, codec: str, form: str, channels: int) -> None:
    """8 planes fill FFmpeg's own list, past whose end PyAV reads; more are elsewhere."""
    if codec == "wavpack" and channels > 16:
        pytest.skip("the encoder has fewer")
    layouts = ["mono", "stereo", "2.1", "quad", "5.0", "5.1", "6.1", "7.1"]
    layout = layouts[channels - 1] if channels <= 8 else "hexadecagonal" if channels == 16 else f"{channels} channels"
    samples = tone(48_000, 9600, channels)
    data = encoded([(codec, form, samples)], container, 48_000, layout)
    found, _ = decoded(data, 48_000)
    assert np.abs(found - samples.astype(np.float64).mean(axis=1) / 32_768).max() < 1e-6


def test_more_channels_than_anyone_records_are_refused() -> None:
    data = encoded([("pcm_s16le", "s16", tone(48_000, 100, 65))], "w64", 48_000, "65 channels")
    assert "channels" in str(refused(data))


def test_channels_may_change_within_a_stream() -> None:
    """A broadcast goes from one layout to another; each frame is averaged by itself."""
    parts = [
        encoded([("ac3", "fltp", tone(48_000, 15_360, n))], "ac3", 48_000, layout)
        for n, layout in ((6, "5.1"), (2, "stereo"), (1, "mono"))
    ]
    found, _ = decoded(b"".join(parts), 48_000)
    assert len(found) == sum(len(decoded(part, 48_000)[0]) for part in parts)
    assert np.abs(found[4096:12_000] - ffmpeg_s(parts[0])[4096:12_000]).max() < 1e-6
    last = ffmpeg_s(parts[2])
    assert np.abs(found[-8000:] - last[-8000:]).max() < 1e-3  # AC-3 fills what is not coded with noise


def test_flac_in_ogg() -> None:
    """PyAV's FFmpeg does not write it: the file is put together by hand, and compared with FLAC itself."""
    data = one("flac", "flac", "s16", 44_100)
    info, at = data[4:42], data.index(b"\xff\xf8")
    stream = [b"\x7fFLAC\1\0\0\1fLaC" + bytes([info[0] & 0x7F]) + info[1:], b"\x84\0\0\x08" + bytes(8)]
    with av.open(io.BytesIO(data)) as container:
        frames = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    pages = [page(stream[0], 0, 0, 2), page(stream[1], 1, 0, 0)]
    pages += [page(frame, 2 + place, min(4608 * (place + 1), 44_100), 0) for place, frame in enumerate(frames)]
    assert at > 42
    found, _ = decoded(b"".join(pages), 44_100)
    assert np.array_equal(found, decoded(data, 44_100)[0])


def page(packet: bytes, sequence: int, position: int, flags: int) -> bytes:
    """A page of Ogg with one packet. Source: RFC 3533, section 6."""
    sizes = [255] * (len(packet) // 255) + [len(packet) % 255]
    head = b"OggS\0" + struct.pack("<BqIIIB", flags, position, 1, sequence, 0, len(sizes)) + bytes(sizes)
    checksum = 0
    for byte in head + packet:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1 ^ (0x04C11DB7 if checksum & 0x80000000 else 0)) & 0xFFFFFFFF
    return head[:22] + struct.pack("<I", checksum) + head[26:] + packet


def test_pauses_of_amr_are_silence() -> None:
    """A line that says nothing sends frames of 15: FFmpeg's decoder leaves them out, and what follows would be too early."""
    data = one("amr", "libopencore_amrnb", "s16", 8_000)
    frames = [data[at : at + 13] for at in range(6, len(data), 13)]
    paused = data[:6] + b"".join(frames[:20]) + b"\x7c" * 10 + b"".join(frames[20:])
    found, _ = decoded(paused, 8_000)
    assert len(found) == len(decoded(data, 8_000)[0]) + 10 * 160
    assert not found[20 * 160 : 30 * 160].any()
    assert open_audio(paused, path="a", settings=Settings()).probe().num_samples == len(found)


# ---------------------------------------------------------------- which track


def matroska(tracks: Sequence[str]) -> bytes:
    """Tracks of PCM of different heights, renamed to a codec each."""
    data = encoded(
        [("pcm_s16le", "s16", tone(8_000, 8_000) // (1 + place)) for place in range(len(tracks))], "matroska", 8_000
    )
    for codec in tracks:
        data = (
            data.replace(b"A_PCM/INT/LIT", codec.encode().ljust(13, b"\0"), 1)
            if codec != "pcm"
            else data.replace(b"A_PCM/INT/LIT", b"A_pcm/int/lit", 1)
        )
    return data.replace(b"A_pcm/int/lit", b"A_PCM/INT/LIT")


@pytest.mark.parametrize("first", ["A_AC4", "A_REAL/28_8", "A_UNKNOWN"])
@pytest.mark.parametrize("passed", [0, 1, 2])
def test_the_first_track_that_can_be_decoded_is_used(first: str, passed: int) -> None:
    found, notes = decoded(matroska([first] * passed + ["pcm", "pcm"]), 8_000)
    expected = tone(8_000, 8_000)[:, 0] // (1 + passed) / 32_768
    assert np.abs(found - expected).max() < 1e-6
    assert len(notes) == (1 if passed else 0)
    if passed:
        assert f"audio track {passed + 1} was used" in notes[0]
        assert "track 1 is in an unsupported audio codec" in notes[0]


def test_without_a_track_that_can_be_decoded_the_error_is_about_the_first() -> None:
    error = refused(matroska(["A_REAL/28_8", "A_AC4"]))
    assert error.reason == "codec"
    assert "ra_288" in str(error)


# ---------------------------------------------------------------- cut and damaged streams


@pytest.mark.parametrize("container", ["mpegts", "mpeg"])
@pytest.mark.parametrize("cut", [0, 100, 1000, 3333])
def test_a_recording_may_begin_and_end_within_a_frame(container: str, cut: int) -> None:
    data = one(container, "mp2", "s16", 48_000)
    whole = decoded(data, 48_000)[0]
    found, notes = decoded(data[: len(data) - cut], 48_000)
    assert len(whole) - 5 * 1152 <= len(found) <= len(whole)
    common = len(found) - 1152
    assert np.array_equal(found[:common], whole[:common])
    assert all("left out" in note for note in notes)


def test_what_lies_between_bare_frames_is_passed_over_with_a_note() -> None:
    data = one("ac3", "ac3", "fltp", 48_000)
    half = len(data) // 768 // 2 * 768
    broken = bytearray(data[half : half + 768])
    broken[2:] = bytes(766)
    found, notes = decoded(data[:half] + bytes(broken) + data[half:], 48_000)
    assert len(found) >= len(decoded(data, 48_000)[0]) - 1536
    assert all("left out" in note for note in notes)


# ---------------------------------------------------------------- encrypted


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def marked(data: bytes, *, protected: bool) -> bytes:
    """An MP4 file of AAC whose sample entry says that samples are encrypted, each wholly or by ranges without an encrypted byte.

    Source: ISO/IEC 23001-7, sections 7 and 8.
    """
    at = data.index(b"mp4a", data.index(b"stsd"))
    size = struct.unpack(">I", data[at - 4 : at])[0]
    entry = data[at + 4 : at - 4 + size]
    tenc = box(b"tenc", struct.pack(">IBBBB", 0, 0, 0, 1, 8), bytes(range(16)))
    sinf = box(
        b"sinf", box(b"frma", b"mp4a"), box(b"schm", struct.pack(">I4sI", 0, b"cenc", 0x10000)), box(b"schi", tenc)
    )
    sizes = data.index(b"stsz")
    count = struct.unpack(">I", data[sizes + 12 : sizes + 16])[0]
    lengths = struct.unpack(f">{count}I", data[sizes + 16 : sizes + 16 + 4 * count])
    ranges = b"".join(
        bytes(8) + struct.pack(">HHI", 1, 0 if protected else length, length if protected else 0) for length in lengths
    )
    senc = box(b"senc", struct.pack(">II", 2, count), ranges)
    new = box(b"enca", entry, sinf)
    out = data[: at - 4] + new + data[at - 4 + size :]
    end = out.index(b"stsz") - 4
    out = out[:end] + senc + out[end:]
    for kind in (b"stsd", b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        place, extra = out.index(kind), len(new) - size + (len(senc) if kind != b"stsd" else 0)
        out = out[: place - 4] + struct.pack(">I", struct.unpack(">I", out[place - 4 : place])[0] + extra) + out[place:]
    return out


def test_encrypted_audio_of_mp4_is_refused_as_encrypted_and_flags_without_effect_are_not() -> None:
    data = one("mp4", "aac", "fltp", 44_100)
    assert data.index(b"mdat") < data.index(b"moov")  # so that samples stay where they are
    assert refused(marked(data, protected=True)).reason == "encrypted"
    found, _ = decoded(marked(data, protected=False), 44_100)
    assert np.array_equal(found, decoded(data, 44_100)[0])


def element(kind: str, *content: bytes) -> bytes:
    body = b"".join(content)
    return bytes.fromhex(kind) + struct.pack(">Q", len(body) | 1 << 56) + body


@pytest.mark.parametrize(("kind", "encrypted"), [(b"\1", True), (b"\0", False)])
def test_encrypted_audio_of_matroska(kind: bytes, encrypted: bool) -> None:
    """A header that is stored apart encrypts nothing."""
    how = (
        element("5035", element("47E1", b"\5"))
        if encrypted
        else element("5034", element("4254", b"\3"), element("4255", b""))
    )
    encoding = element("6D80", element("6240", element("5033", kind), how))
    pcm = element("E1", element("B5", struct.pack(">f", 8000)), element("9F", b"\1"), element("6264", b"\x10"))
    names = element("D7", b"\1"), element("73C5", b"\1"), element("83", b"\2"), element("86", b"A_PCM/INT/LIT")
    track = element("1654AE6B", element("AE", *names, pcm, encoding))
    info = element("1549A966", element("2AD7B1", b"\x0f\x42\x40"))
    cluster = element("1F43B675", element("E7", b"\0"), element("A3", b"\x81\0\0\x80" + tone(8_000, 1000).tobytes()))
    data = element("1A45DFA3", element("4282", b"matroska")) + element("18538067", info, track, cluster)
    if encrypted:
        assert refused(data).reason == "encrypted"
    else:
        assert len(decoded(data, 8_000)[0]) == 1000


def test_scrambled_transport_and_program_streams() -> None:
    ts = bytearray(one("mpegts", "mp2", "s16", 48_000))
    with av.open(io.BytesIO(bytes(ts))) as container:
        pid = container.streams.audio[0].id
    for at in range(0, len(ts), 188):
        if (ts[at + 1] & 0x1F) << 8 | ts[at + 2] == pid:
            ts[at + 3] |= 0x80
    assert refused(bytes(ts)).reason == "encrypted"
    ps = bytearray(one("vob", "mp2", "s16", 48_000))
    at = ps.find(b"\0\0\1\xc0")
    while at >= 0:
        ps[at + 6] |= 0x10 if ps[at + 6] & 0xC0 == 0x80 else 0
        at = ps.find(b"\0\0\1\xc0", at + 4)
    assert refused(bytes(ps)).reason == "encrypted"
    flv = bytearray(one("flv", "aac", "fltp", 44_100))
    at = 13
    while at < len(flv):
        flv[at] |= 0x20 if flv[at] == 8 else 0
        at += 15 + int.from_bytes(flv[at + 1 : at + 4], "big")
    assert refused(bytes(flv)).reason == "encrypted"


# ---------------------------------------------------------------- scenes of IAMF


def scene(substreams: int) -> bytes:
    """An MP4 file of PCM whose track holds an IAMF scene of mono substreams. Source: Immersive Audio Model and Formats 1.0."""

    def leb(number: int) -> bytes:
        return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])

    def obu(kind: int, content: bytes) -> bytes:
        return bytes([kind << 3]) + leb(len(content)) + content

    codec = obu(0, leb(0) + b"ipcm" + leb(16) + struct.pack(">h", 0) + bytes([1, 16]) + struct.pack(">I", 16_000))
    layout = bytes([{1: 0, 2: 1, 4: 2}[substreams] << 4, substreams, 0 if substreams < 4 else 2])
    ids = b"".join(map(leb, range(substreams)))
    element_ = obu(1, leb(0) + b"\0" + leb(0) + leb(substreams) + ids + leb(0) + bytes([1 << 5]) + layout)
    header = obu(31, b"iamf\0\0")
    iacb = box(b"iacb", b"\1", leb(len(header + codec + element_)), header, codec, element_)
    entry = box(b"iamf", bytes(6) + struct.pack(">H", 1) + bytes(20), iacb)
    frames = b"".join(obu(6 + place, tone(16_000, 16)[:, 0].tobytes()) for place in range(substreams))
    ftyp = box(b"ftyp", b"isom\0\0\0\0isomiamf")

    def full(kind: bytes, content: bytes) -> bytes:
        return box(kind, bytes(4), content)

    stbl = box(
        b"stbl", full(b"stsd", struct.pack(">I", 1) + entry), full(b"stts", struct.pack(">III", 1, 1, 16)),
        full(b"stsc", struct.pack(">IIII", 1, 1, 1, 1)), full(b"stsz", struct.pack(">III", 0, 1, len(frames))),
        full(b"stco", struct.pack(">II", 1, len(ftyp) + 8)),
    )  # fmt: skip
    hdlr = full(b"hdlr", bytes(4) + b"soun" + bytes(13))
    mdhd = full(b"mdhd", struct.pack(">IIIII", 0, 0, 16_000, 16, 0))
    trak = box(
        b"trak",
        full(b"tkhd", struct.pack(">IIIII", 0, 0, 1, 0, 16) + bytes(60)),
        box(b"mdia", mdhd, hdlr, box(b"minf", stbl)),
    )
    return (
        ftyp
        + box(b"mdat", frames)
        + box(b"moov", full(b"mvhd", struct.pack(">IIII", 0, 0, 16_000, 16) + bytes(80)), trak)
    )


@pytest.mark.parametrize("substreams", [2, 4])
def test_a_scene_of_several_substreams_is_refused_not_heard_in_part(substreams: int) -> None:
    error = refused(scene(substreams))
    assert error.reason == "codec"
    assert f"{substreams} substreams" in str(error)
