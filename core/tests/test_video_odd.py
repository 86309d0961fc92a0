"""Videos as they are found: turned, encrypted, cut, damaged, long; in memory one frame at a time, with any number of threads."""

from __future__ import annotations

import functools
import io
import itertools
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import av
import numpy as np
import pytest

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.media import SampledVideo, Sampling, VideoSize, open_video
from mm_plugin.media.pyav import CheckedFile, open_packets
from mm_plugin.media.turns import flipped_and_rotated
from mm_plugin.settings import Settings
from mm_plugin.transforms import sample_frames

SETTINGS = Settings(threads=2)
TEXTURE = np.kron(np.random.default_rng(5).integers(0, 256, (40, 60, 3), dtype=np.uint8), np.ones((4, 4, 1), np.uint8))


def encoded(
    container: str = "mp4",
    codec: str = "libx264",
    count: int = 24,
    *,
    size: tuple[int, int] = (48, 64),
    options: Mapping[str, str] | None = None,
    muxer: Mapping[str, str] | None = None,
) -> bytes:
    file = io.BytesIO()
    if codec == "libx264":
        options = {"x264-params": "log=0:keyint=12:" + (options or {}).get("x264-params", "")}
    with av.open(file, "w", format=container, options=dict(muxer or {})) as out:
        stream = out.add_stream(codec, rate=24, options=dict(options or {}))
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for place in range(count):
            drawn = np.ascontiguousarray(np.resize(TEXTURE[place % 40 :, 2 * place % 80 :], (*size, 3)))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(drawn, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def opened(data: bytes, settings: Settings = SETTINGS) -> Any:
    return open_video(data, path="videos[0]", settings=settings)


def frames_of(source: Any, indices: Sequence[int] | None = None) -> tuple[VideoSize, list[np.ndarray], Sequence[str]]:
    size = source.probe()
    places = np.arange(size.frames) if indices is None else np.array(indices)
    video = source.decode(SampledVideo(size.height, size.width, places, size.times(places), size.fps))
    return size, list(video.frames), video.notes


def stored(data: bytes) -> dict[float, np.ndarray]:
    """Every frame as FFmpeg decodes it in one thread, by its time from the first."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = {frame.time: frame.to_ndarray(format="rgb24") for frame in container.decode(stream)}
    return {time - min(frames): pixels for time, pixels in frames.items()}


# ------------------------------------------------------------------ orientation


def orientation(turned: int, *, mirrored: bool = False, upside_down: bool = False, cancel: bool = False) -> bytes:
    """A message of H.264 with a display orientation: quarters counterclockwise after flipping."""
    bits = "1" if cancel else f"0{mirrored:d}{upside_down:d}{turned * 0x4000:016b}" + "010" + "0"
    bits += "1"
    bits += "0" * (-len(bits) % 8)
    payload = int(bits, 2).to_bytes(len(bits) // 8, "big")
    body, zeros = bytearray(), 0
    for byte in bytes([47, len(payload)]) + payload + b"\x80":
        if zeros >= 2 and byte <= 3:
            body.append(3)
            zeros = 0
        body.append(byte)
        zeros = 0 if byte else zeros + 1
    return b"\0\0\1\x06" + bytes(body)


def with_messages(
    container: str, messages: Mapping[int, bytes], *, frames: str = "bframes=0", count: int = 24
) -> bytes:
    """A video with messages before the images that are displayed at these places."""
    source = encoded("matroska", options={"x264-params": frames}, count=count)
    file = io.BytesIO()
    with av.open(io.BytesIO(source)) as opened_source, av.open(file, "w", format=container) as out:
        stream = opened_source.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for packet in opened_source.demux(stream):
            if not packet.size:
                continue
            place = round(float(packet.pts * packet.time_base) * 24)
            data = bytes(packet)
            message = messages.get(place, b"")
            if message:
                data = struct.pack(">I", len(message) - 3) + message[3:] + data
            changed = av.Packet(data)
            changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
            changed.stream, changed.is_keyframe, changed.duration = copy, packet.is_keyframe, packet.duration
            out.mux(changed)
    return file.getvalue()


CONTAINERS = ["mp4", "matroska", "mpegts", "mov", "flv"]


@pytest.mark.parametrize("frames", ["bframes=0", "bframes=3"])
@pytest.mark.parametrize("turned", range(4))
@pytest.mark.parametrize("container", CONTAINERS)
def test_an_orientation_in_the_stream_holds_until_the_next(container: str, turned: int, frames: str) -> None:
    data = with_messages(container, {0: orientation(turned)}, frames=frames)
    expected = list(stored(data).values())
    for indices in (None, [0], [5, 20], [23]):
        size, found, _ = frames_of(opened(data), indices)
        assert (size.height, size.width) == ((64, 48) if turned % 2 else (48, 64))
        for place, pixels in zip(range(24) if indices is None else indices, found, strict=True):
            assert np.array_equal(pixels, np.rot90(expected[place], turned))


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_an_orientation_changes_where_the_stream_says_so(container: str) -> None:
    messages = {
        4: orientation(2),
        9: orientation(0, mirrored=True),
        15: orientation(0, cancel=True),
        20: orientation(2),
    }
    data = with_messages(container, messages)
    _, found, _ = frames_of(opened(data))
    for place, (pixels, plain) in enumerate(zip(found, stored(data).values(), strict=True)):
        turned = plain[::-1, ::-1] if 4 <= place < 9 or place >= 20 else plain[:, ::-1] if 9 <= place < 15 else plain
        assert np.array_equal(pixels, turned), place


def test_frames_that_are_turned_to_another_size_are_refused() -> None:
    with pytest.raises(MediaError, match="48 x 64 pixels") as caught:
        frames_of(opened(with_messages("mp4", {12: orientation(1)})))
    assert caught.value.reason == "size"


@pytest.mark.parametrize(("mirrored", "upside_down"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("turned", range(4))
def test_flips_come_before_the_rotation(turned: int, mirrored: bool, upside_down: bool) -> None:
    pixels = np.arange(12).reshape(3, 4)
    flipped = pixels[:: -1 if upside_down else 1, :: -1 if mirrored else 1]
    turn = flipped_and_rotated(mirrored, upside_down, turned / 4)
    assert np.array_equal(turn.apply(pixels), np.rot90(flipped, turned))
    assert turn.size(3, 4) == turn.apply(pixels).shape


MATRICES = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + kind + content


def with_chapters(data: bytes) -> bytes:
    """The file with two more tracks, of text and nothing else, whose matrices turn nothing."""
    at = data.index(b"moov") - 4
    size = struct.unpack_from(">I", data, at)[0]
    matrix = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    tracks = b""
    for number in (7, 8):
        head = box(b"tkhd", struct.pack(">IIIIII8x4H", 0, 0, 0, number, 0, 0, 0, 0, 0, 0) + matrix + bytes(8))
        tracks += box(b"trak", head + box(b"udta", box(b"free", matrix * 3)))
    assert at + size == len(data)  # nothing that offsets lead to comes later
    return data[:at] + struct.pack(">I", size + len(tracks)) + data[at + 4 :] + tracks


@pytest.mark.parametrize("chapters", [False, True])
@pytest.mark.parametrize("degrees", MATRICES)
@pytest.mark.parametrize("place", ["track", "movie"])
@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_a_track_is_turned_whatever_other_tracks_say(container: str, place: str, degrees: int, chapters: bool) -> None:
    plain = encoded(container)
    data = bytearray(plain)
    at = data.index(b"tkhd") + 4 + 40 if place == "track" else data.index(b"mvhd") + 4 + 36
    a, b, c, d = MATRICES[degrees]
    struct.pack_into(">9i", data, at, a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    turned = with_chapters(bytes(data)) if chapters else bytes(data)
    size, found, _ = frames_of(opened(turned))
    assert (size.height, size.width) == ((48, 64) if degrees == 180 else (64, 48))
    for pixels, expected in zip(found, stored(plain).values(), strict=True):
        assert np.array_equal(pixels, np.rot90(expected, -degrees // 90))


# ------------------------------------------------------------------ encryption


@functools.cache
def fragments() -> bytes:
    """Encoded once: x264 does not encode the same frames alike every time."""
    return encoded(
        muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"}, options={"x264-params": "bframes=0"}
    )


def encrypted(
    *, scheme: bytes = b"cenc", protected: int = 1, parts: Sequence[tuple[int, int]] = (), samples: bool = True
) -> bytes:
    """An MP4 in one fragment per group that is declared as encrypted; its bytes are not. Parts are clear and protected bytes."""
    data = fragments()
    at = data.index(b"avc1", data.index(b"stsd"))
    entry = data[at - 4 : at - 4 + struct.unpack_from(">I", data, at - 4)[0]]
    track = box(b"tenc", struct.pack(">IBBBB", 0, 0, 0, protected, 8 if protected else 0) + bytes(range(16)))
    sinf = box(
        b"sinf", box(b"frma", b"avc1") + box(b"schm", struct.pack(">I4sI", 0, scheme, 1 << 16)) + box(b"schi", track)
    )
    changed = box(b"encv", entry[8:] + sinf)
    out = data[: at - 4] + changed + data[at - 4 + len(entry) :]
    for kind in (b"stsd", b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        out = grown(out, kind, len(sinf))
    return _with_samples(out, parts) if samples else out


def grown(data: bytes, kind: bytes, by: int, start: int = 0) -> bytes:
    at = data.index(kind, start) - 4
    return data[:at] + struct.pack(">I", struct.unpack_from(">I", data, at)[0] + by) + data[at + 4 :]


def _with_samples(data: bytes, parts: Sequence[tuple[int, int]]) -> bytes:
    """Each fragment with a table of what is encrypted in its samples."""
    start = 0
    while (at := data.find(b"traf", start)) >= 0:
        run = data.index(b"trun", at)
        count = struct.unpack_from(">I", data, run + 8)[0]
        sample = bytes(8) + (
            struct.pack(">H", len(parts)) + b"".join(struct.pack(">HI", *part) for part in parts) if parts else b""
        )
        table = box(b"senc", struct.pack(">II", 2 if parts else 0, count) + sample * count)
        end = at - 4 + struct.unpack_from(">I", data, at - 4)[0]
        data = data[:end] + table + data[end:]
        data = grown(data, b"traf", len(table), at)
        moof = data.rindex(b"moof", 0, at)
        data = grown(data, b"moof", len(table), moof)
        offset = struct.unpack_from(">i", data, run + 12)[0]
        data = data[: run + 12] + struct.pack(">i", offset + len(table)) + data[run + 16 :]
        start = at + 4
    return data


@pytest.mark.parametrize("scheme", [b"cenc", b"cbcs", b"cens", b"cbc1"])
@pytest.mark.parametrize("parts", [(), ((4, 16),), ((30, 0), (1, 16))], ids=str)
def test_an_encrypted_video_is_refused_as_that(scheme: bytes, parts: Sequence[tuple[int, int]]) -> None:
    with pytest.raises(MediaError, match="encrypted") as caught:
        opened(encrypted(scheme=scheme, parts=parts)).probe()
    assert (caught.value.path, caught.value.reason) == ("videos[0]", "encrypted")


@pytest.mark.parametrize("scheme", [b"adkm", b"odkm", b"itun"])
def test_a_scheme_that_protects_whole_tracks_is_refused(scheme: bytes) -> None:
    with pytest.raises(MediaError) as caught:
        opened(encrypted(scheme=scheme, samples=False)).probe()
    assert caught.value.reason == "encrypted"


@pytest.mark.parametrize(
    "flags", [{"protected": 0, "samples": False}, {"parts": ((40, 0),)}], ids=["declared clear", "no protected bytes"]
)
def test_a_mark_that_protects_nothing_does_not_count(flags: dict[str, Any]) -> None:
    data = encrypted(**flags)
    _, found, _ = frames_of(opened(data))
    expected = stored(fragments())
    assert len(found) == 24
    assert all(np.array_equal(pixels, other) for pixels, other in zip(found, expected.values(), strict=True))


def scrambled(data: bytes, *, really: bool) -> bytes:
    """A transport stream whose packets of video say that they are scrambled, but for the beginnings of frames."""
    changed = bytearray(data)
    noise = np.random.default_rng(1)
    for at in range(0, len(data), 188):
        head = data[at : at + 4]
        if (head[1] & 0x1F) << 8 | head[2] == 0x100 and not head[1] & 0x40 and head[3] & 0x10:
            changed[at + 3] |= 0x80
            if really and not head[3] & 0x20:
                changed[at + 4 : at + 188] = noise.bytes(184)
    return bytes(changed)


def test_a_transport_stream_that_is_scrambled_is_refused_and_one_that_only_says_so_is_not() -> None:
    data = encoded("mpegts", size=(144, 176), options={"x264-params": "keyint=1:qp=10"})
    with pytest.raises(MediaError) as caught:
        frames_of(opened(scrambled(data, really=True)))
    assert caught.value.reason in ("encrypted", "broken")
    _, found, _ = frames_of(opened(scrambled(data, really=False)))
    assert all(np.array_equal(one, other) for one, other in zip(found, stored(data).values(), strict=True))


# ------------------------------------------------------------------ a cut end


CUT: dict[str, tuple[str, str, dict[str, str]]] = {
    "ts, h264": ("mpegts", "libx264", {"x264-params": "bframes=3"}),
    "ts, h264 in slices": ("mpegts", "libx264", {"x264-params": "slices=3:bframes=2"}),
    "ts, h264 without cabac": ("mpegts", "libx264", {"x264-params": "cabac=0"}),
    "ts, h264, one key frame": ("mpegts", "libx264", {"x264-params": "keyint=500"}),
    "ts, hevc": ("mpegts", "libx265", {"x265-params": "log-level=0:keyint=12"}),
    "ts, mpeg2": ("mpegts", "mpeg2video", {"g": "12", "bf": "2"}),
    "ts, mpeg4": ("mpegts", "mpeg4", {"g": "12"}),
    "ps, mpeg1": ("mpeg", "mpeg1video", {"g": "12", "bf": "2"}),
    "ps, mpeg2": ("vob", "mpeg2video", {"g": "12", "bf": "2"}),
    "flv, h264": ("flv", "libx264", {}),
    "mkv, h264": ("matroska", "libx264", {}),
    "avi, mpeg4": ("avi", "mpeg4", {"g": "12"}),
    "avi, mjpeg": ("avi", "mjpeg", {}),
}


@pytest.mark.parametrize("name", CUT)
def test_a_recording_that_was_cut_is_served_without_its_damaged_end(name: str) -> None:
    """At every place of its last third: each frame that is served is one of the whole recording, and few are missing."""
    container, codec, options = CUT[name]
    data = mjpeg() if codec == "mjpeg" else encoded(container, codec, 36, options=options)
    expected = stored(data)
    served = noted = 0
    for at in range(len(data) * 2 // 3, len(data), max(len(data) // 75, 1) | 1):
        source = opened(data[:at])
        try:
            size, found, notes = frames_of(source)
        except MediaError as error:
            if container != "avi":  # its index may be where it was cut
                raise AssertionError(at) from error
            continue
        served, noted = served + 1, noted + bool(notes)
        assert size.frames >= 15
        for time, shown in zip(size.timestamps.tolist(), found, strict=True):
            near = min(expected, key=lambda other: abs(other - time))
            assert abs(near - time) < 0.01
            assert np.array_equal(shown, expected[near]), (at, time)
    assert served > 10
    assert noted or container in ("matroska", "avi")


def mjpeg() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as out:
        stream = out.add_stream("mjpeg", rate=24)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuvj420p"
        for place in range(36):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(TEXTURE[place : place + 64, :64]), format="rgb24")
            out.mux(stream.encode(frame.reformat(format="yuvj420p")))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("name", [name for name in CUT if name.startswith(("ts", "ps"))])
def test_a_whole_recording_keeps_all_frames(name: str) -> None:
    container, codec, options = CUT[name]
    data = encoded(container, codec, 36, options=options)
    size, found, notes = frames_of(opened(data))
    if not notes:  # a frame may fill its last packet exactly
        assert size.frames == len(found) == 36


def test_damage_within_a_recording_is_refused_where_it_was_sampled() -> None:
    data = bytearray(encoded("mpegts", count=60, size=(144, 176), options={"x264-params": "bframes=0:keyint=10:qp=20"}))
    for at in range(len(data) // 2 // 188 * 188, len(data) // 2 // 188 * 188 + 188 * 4, 188):
        data[at + 60 : at + 188] = bytes(128)
    source = opened(bytes(data))
    with pytest.raises(MediaError) as caught:
        frames_of(source)
    assert caught.value.reason == "broken"
    size, found, notes = frames_of(source, [0, 5, 58])
    assert (size.frames, len(found), len(notes)) == (60, 3, 0)


# ------------------------------------------------------------------ threads and memory


@pytest.mark.parametrize("container", ["mpegts", "matroska", "mp4", "flv"])
def test_the_answer_does_not_depend_on_threads(container: str) -> None:
    data = encoded(container, count=40, size=(144, 176), options={"x264-params": "bframes=3:ref=4"})
    random = np.random.default_rng(3)
    for _ in range(6):
        changed = bytearray(data)
        for at in random.integers(len(data) // 3, len(data), 3).tolist():
            changed[at] ^= 0x55
        answers = set()
        for threads in (1, 2, 8, 2):
            try:
                size, found, notes = frames_of(opened(bytes(changed), Settings(threads=threads)))
                answers.add((size.frames, tuple(notes), b"".join(pixels.tobytes() for pixels in found)))
            except MediaError as error:
                answers.add((str(error), (), b""))
        assert len(answers) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("kind", ["turned", "key frames", "plain", "gif"])
def test_one_frame_is_in_memory_at_a_time(kind: str, fresh: Callable[..., Any], tmp_path: Any) -> None:
    """Without the cyclic collector, in a process of its own: 60 frames take hardly more than 6."""
    size = (480, 640)
    if kind == "gif":
        data = gif(60, size)
    elif kind == "key frames":
        data = encoded(count=60, size=size, options={"preset": "ultrafast", "x264-params": "keyint=1"})
    else:
        data = encoded(count=60, size=size, options={"preset": "ultrafast", "x264-params": "bframes=0"})
    if kind == "turned":
        changed = bytearray(data)
        struct.pack_into(">9i", changed, data.index(b"tkhd") + 44, 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
        data = bytes(changed)
    file = tmp_path / "video"
    file.write_bytes(data)
    code = f"""
import gc, json
from pathlib import Path
import av
import numpy as np
from mm_plugin.media import SampledVideo, open_video
gc.disable()
source = open_video(Path({str(file)!r}).read_bytes(), path="v", settings=__import__("mm_plugin").Settings(media_root="/"))
size = source.probe()
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
def read(count):
    places = np.arange(count)
    for pixels in source.decode(SampledVideo(size.height, size.width, places, size.times(places), size.fps)).frames:
        pass
    return peak()
few, many = read(6), read(60)
print(json.dumps([few, many, size.frames]))
"""
    few, many, count = fresh(code)
    assert count == 60
    assert many - few < 15  # megabytes; 54 frames more would be 50 of RGB and 25 as decoded


def gif(count: int, size: tuple[int, int]) -> bytes:
    from PIL import Image

    images = [Image.new("P", size[::-1], place) for place in range(count)]
    for one in images:
        one.putpalette([byte for entry in range(256) for byte in (entry, 0, 0)])
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100, optimize=False)
    return file.getvalue()


# ------------------------------------------------------------------ limits, and frames by their times


def test_decoding_is_bounded_by_its_own_setting() -> None:
    data = encoded(count=48, options={"x264-params": "min-keyint=12:scenecut=0:bframes=0"})
    pixels = 48 * 64
    for indices, frames in (([0], 1), ([5], 6), ([0, 47], 1 + 12), ([12, 13], 14), ([40], 5)):
        source = opened(data, Settings(max_decoded_pixels=frames * pixels))
        frames_of(source, indices)
        with pytest.raises(LimitError) as caught:
            frames_of(opened(data, Settings(max_decoded_pixels=frames * pixels - 1)), indices)
        assert (caught.value.setting, caught.value.path, caught.value.value) == (
            "max_decoded_pixels",
            "videos[0]",
            frames * pixels,
        )
    counted = encoded("avi", count=20)  # counted by decoding
    with pytest.raises(LimitError) as caught:
        opened(counted, Settings(max_decoded_pixels=10 * pixels)).probe()
    assert caught.value.setting == "max_decoded_pixels"


def test_what_the_default_allows() -> None:
    assert Settings().max_decoded_pixels >= 6 * 60 * 30 * 3840 * 2160  # six minutes of 4K
    assert Settings().max_decoded_pixels >= 3600 * 30 * 1920 * 1080
    assert Settings().max_media_packets >= 3600 * 60 + 6 * 3600 * 48_000 // 1024
    assert Settings().max_image_pixels >= 7680 * 4320


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_the_bound_on_packets_is_a_setting_that_its_error_names(container: str) -> None:
    data = encoded(container)
    opened(data, Settings(max_media_packets=24)).probe()
    with pytest.raises(LimitError, match="max_media_packets") as caught:
        opened(data, Settings(max_media_packets=23)).probe()
    assert (caught.value.path, caught.value.limit) == ("videos[0]", 23)
    few = Settings(max_media_packets=5)
    with pytest.raises(LimitError), open_packets(CheckedFile(data, path="x", settings=few), container) as (_, packets):
        list(packets)


def test_frames_that_crowd_are_sampled_by_number_or_by_time() -> None:
    # 100 frames in the first second, then one in each of nine seconds.
    times = np.concatenate([np.arange(100) / 100, np.arange(1, 10)])
    common: dict[str, Any] = {"fps": 1.0, "min_frames": 2, "max_frames": 10, "multiple": 2, "timestamps": times}
    by_number = sample_frames(109, 109 / 10, **common)
    assert by_number.tolist() == np.linspace(0, 108, 10).round().astype(int).tolist()
    by_time = sample_frames(109, 109 / 10, rule="time", **common)
    assert times[by_time].tolist() == list(range(10))
    # Where nothing is displayed after it, the last frame still is.
    held = np.array([0.0, 0.1, 0.2, 9.0])
    assert sample_frames(4, 0.4, rule="time", num_frames=4, **{**common, "timestamps": held}).tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize(("total", "count"), [(2, 2), (7, 4), (240, 24), (100_000, 768)])
def test_evenly_spaced_frames_are_the_same_by_time(total: int, count: int) -> None:
    times = np.arange(total) / 29.97
    chosen = sample_frames(total, 29.97, fps=1, num_frames=count, min_frames=2, max_frames=768, multiple=2, rule="time")
    given = sample_frames(
        total, 29.97, fps=1, num_frames=count, min_frames=2, max_frames=768, multiple=2, rule="time", timestamps=times
    )
    assert chosen.tolist() == given.tolist() == [place * (total - 1) // (count - 1) for place in range(count)]
    Sampling.of(VideoSize(4, 4, total, 29.97, times), given)
