"""Videos: frames are those of a sequential decode, times those of arithmetic, and no more is decoded than is needed."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import av
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from PIL import Image

from mm_plugin.errors import LimitError, MediaError, MMPluginError
from mm_plugin.media import (
    SampledVideo,
    Sampling,
    VideoFrames,
    VideoSize,
    open_video,
    probe,
    video,
    video_frames,
    video_index,
    whole,
)
from mm_plugin.media.container_headers import check_head
from mm_plugin.settings import Settings

SETTINGS = Settings(threads=2)
X264 = "x264-params"
NTSC = Fraction(30000, 1001)
# A texture over which the window of a video moves, so that frames really refer to one another.
TEXTURE = np.kron(np.random.default_rng(7).integers(0, 256, (90, 130, 3), dtype=np.uint8), np.ones((4, 4, 1), np.uint8))


def image(place: int, height: int = 48, width: int = 64) -> np.ndarray:
    row, column = place % 150, 2 * place % 300
    return np.ascontiguousarray(TEXTURE[row : row + height, column : column + width])


def encode(
    count: int = 48,
    container: str = "mp4",
    codec: str = "libx264",
    *,
    rate: Any = 24,
    size: tuple[int, int] = (48, 64),
    pixels: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    muxer: Mapping[str, str] | None = None,
    pts: list[int] | None = None,
    time_base: Fraction | None = None,
    paint: Callable[[int, int, int], np.ndarray] = image,
) -> bytes:
    """A video of moving images."""
    file = io.BytesIO()
    if codec == "libx264":
        options = {X264: "log=0:keyint=12:" + (options or {}).get(X264, "")}
    with av.open(file, "w", format=container, options=dict(muxer or {})) as out:
        stream = out.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.height, stream.width = size
        stream.pix_fmt = pixels
        if time_base is not None:
            stream.codec_context.time_base = time_base
        for place in range(count):
            drawn = paint(place, *size)
            frame = av.VideoFrame.from_ndarray(drawn, format="rgba" if drawn.shape[2] == 4 else "rgb24")
            frame = frame.reformat(format=pixels)
            if pts is not None:
                frame.pts, frame.time_base = pts[place], time_base or Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


VIDEOS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mp4, open groups": {"options": {X264: "min-keyint=12:open-gop=1:scenecut=0:bframes=3"}},
    "mkv, open groups": {"container": "matroska", "options": {X264: "min-keyint=12:open-gop=1:scenecut=0"}},
    "mp4, no key frames after the first": {"options": {X264: "intra-refresh=1:bframes=0"}},
    "mp4, frames that refer far": {"options": {X264: "bframes=8:b-pyramid=normal:ref=6"}},
    "mp4, key frames only": {"options": {X264: "keyint=1"}},
    "mp4, groups of two": {"options": {X264: "keyint=2:bframes=1:open-gop=1:scenecut=0"}},
    "mp4, interlaced": {"options": {X264: "interlaced=1"}},
    "mp4 in fragments": {"muxer": {"movflags": "frag_keyframe+empty_moov"}},
    "mov": {"container": "mov"},
    "mkv": {"container": "matroska"},
    "mpeg-ts": {"container": "mpegts"},
    "flv": {"container": "flv"},
    "webm, vp8": {
        "container": "webm",
        "codec": "libvpx",
        "options": {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "realtime"},
    },
    "webm, vp9": {
        "container": "webm",
        "codec": "libvpx-vp9",
        "options": {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "cpu-used": "8"},
    },
    "avi, mpeg4": {"container": "avi", "codec": "mpeg4", "options": {"g": "12"}},
    "mp4, mpeg4": {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg-ps": {"container": "mpeg", "codec": "mpeg1video", "options": {"g": "12", "bf": "2"}},
    "vob": {"container": "vob", "codec": "mpeg2video", "options": {"g": "12", "bf": "2"}},
    "avi, mjpeg": {"container": "avi", "codec": "mjpeg", "pixels": "yuvj420p"},
    "gif": {"container": "gif", "codec": "gif", "pixels": "rgb8", "rate": 10},
    "3gp": {"container": "3gp", "codec": "mpeg4", "rate": 15, "size": (144, 176)},
    "odd sides and an odd count": {"size": (50, 66), "count": 49},
    "1 fps": {"rate": 1, "count": 30},
    "2 fps": {"rate": 2, "count": 31},
    "29.97 fps": {"rate": NTSC},
    "60 fps": {"rate": 60},
}


@functools.cache
def footage(name: str) -> bytes:
    return encode(**VIDEOS[name])


def sequential(data: bytes) -> list[np.ndarray]:
    """Every frame, as PyAV decodes one after another."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@functools.cache
def decoded(name: str) -> list[np.ndarray]:
    return sequential(footage(name))


def chosen(size: VideoSize, indices: Any) -> SampledVideo:
    places = np.array(indices, dtype=np.int64)
    return SampledVideo(size.height, size.width, places, size.times(places), size.fps)


def frames_of(source: Any, indices: Any, **arguments: Any) -> list[np.ndarray]:
    return list(source.decode(chosen(source.probe(), indices), **arguments).frames)


def every_frame(value: Any) -> list[np.ndarray]:
    source = opened(value)
    return frames_of(source, range(source.probe().frames))


def opened(data: Any, settings: Settings = SETTINGS) -> Any:
    return open_video(data, path="videos[0]", settings=settings)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each frame that a decoder gave while the test runs: its pts."""
    seen: list[int] = []
    original = video_index.open_container

    class Counting:
        def __init__(self, container: Any) -> None:
            self.container = container

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def decode(self, *streams: Any) -> Iterator[Any]:
            for frame in self.container.decode(*streams):
                seen.append(frame.pts)
                yield frame

    @contextlib.contextmanager
    def opens(*arguments: Any) -> Iterator[Any]:
        with original(*arguments) as container:
            yield Counting(container)

    monkeypatch.setattr(video_index, "open_container", opens)
    return seen


# ------------------------------------------------------------------ frames and times


@pytest.mark.parametrize("seek", [0, video_frames._WORTH_SEEKING])
@pytest.mark.parametrize("name", VIDEOS)
def test_any_frames_are_those_of_a_sequential_decode(name: str, seek: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_frames, "_WORTH_SEEKING", seek)
    expected, source = decoded(name), opened(footage(name))
    assert source.probe().frames == len(expected)
    random = np.random.default_rng(len(name) + seek)
    wanted = [[0], [len(expected) - 1], [0, len(expected) - 1], [3, 3, 5], list(range(len(expected)))]
    wanted += [sorted(random.choice(len(expected), count, replace=False).tolist()) for count in (1, 2, 2, 4, 8, 8)]
    for indices in wanted:
        found = frames_of(source, indices)
        assert len(found) == len(indices)
        for place, pixels in zip(indices, found, strict=True):
            assert pixels.dtype == np.uint8
            assert pixels.flags.c_contiguous
            assert np.array_equal(pixels, expected[place]), (indices, place)


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_subset_of_an_open_group_video_is_exact(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    monkeypatch.setattr(video_frames, "_WORTH_SEEKING", data.draw(st.sampled_from([0, 3, 16])))
    name = data.draw(st.sampled_from(["mp4, open groups", "mkv, open groups", "webm, vp8", "mp4, groups of two"]))
    expected = decoded(name)
    indices = sorted(data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=6)))
    found = frames_of(opened(footage(name)), indices)
    assert all(np.array_equal(pixels, expected[place]) for place, pixels in zip(indices, found, strict=True))


def test_frames_are_decoded_again_each_time_they_are_iterated() -> None:
    source = opened(footage("mp4"))
    media_input = source.decode(chosen(source.probe(), [2, 30]))
    first, second = list(media_input.frames), list(media_input.frames)
    assert len(media_input.frames) == 2
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.case("9.6")
@pytest.mark.parametrize(
    ("name", "rate"),
    [("mp4", 24), ("mpeg-ts", 24), ("1 fps", 1), ("2 fps", 2), ("29.97 fps", NTSC), ("60 fps", 60), ("gif", 10),
     ("webm, vp9", 24), ("avi, mpeg4", 24), ("mp4 in fragments", 24), ("mpeg-ps", 24)],
)  # fmt: skip
def test_times_are_those_of_arithmetic(name: str, rate: Any) -> None:
    size = probe(footage(name), modality="video", settings=SETTINGS)
    count = VIDEOS[name].get("count", 48)
    height, width = VIDEOS[name].get("size", (48, 64))
    assert (size.height, size.width, size.frames) == (height, width, count)
    assert size.fps == pytest.approx(float(rate), rel=1e-6)
    tick = 0.0005 if name.startswith("webm") else 1e-5  # webm writes whole milliseconds
    assert np.allclose(size.timestamps, np.arange(count) / float(rate), atol=tick, rtol=0)
    assert size.duration == pytest.approx(count / float(rate), abs=2 * tick)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_variable_rate_is_reported_frame_by_frame(container: str) -> None:
    shown = [0, 40, 50, 500, 501, 2000, 2040, 5000, 5001, 9000]
    data = encode(10, container, pts=shown, time_base=Fraction(1, 1000))
    size = probe(data, modality="video", settings=SETTINGS)
    assert np.allclose(size.timestamps, np.array(shown) / 1000, atol=1e-6)
    assert size.fps == pytest.approx(1.0)  # nine steps in nine seconds
    assert np.allclose(size.times(np.array([3, 7])), [0.5, 5.0])
    expected = sequential(data)
    assert all(np.array_equal(a, b) for a, b in zip(frames_of(opened(data), range(10)), expected, strict=True))


def test_a_video_that_begins_late_is_reported_from_its_first_frame() -> None:
    size = probe(encode(5, pts=[700, 800, 900, 1000, 1100], time_base=Fraction(1, 1000)), modality="video")
    assert np.allclose(size.timestamps, [0, 0.1, 0.2, 0.3, 0.4], atol=1e-6)


@pytest.mark.parametrize("name", ["mp4", "mkv", "gif", "webm, vp8", "mpeg-ts"])
def test_one_frame_is_a_video(name: str) -> None:
    source = opened(encode(**{**VIDEOS[name], "count": 1}))
    size = source.probe()
    assert (size.frames, size.timestamps.tolist()) == (1, [0.0])
    assert size.duration > 0
    assert len(frames_of(source, [0, 0])) == 2


def test_a_length_that_is_missing_is_counted() -> None:
    # The element of the length has another name now, which readers pass over.
    nameless = footage("mkv").replace(b"\x44\x89\x88", b"\x44\x8a\x88", 1)
    assert nameless != footage("mkv")
    size = probe(nameless, modality="video", settings=SETTINGS)
    assert (size.frames, size.duration) == (48, pytest.approx(2.0, abs=0.01))
    live = encode(48, "webm", "libvpx", options={"g": "12", "deadline": "realtime"}, muxer={"live": "1"})
    size = probe(live, modality="video", settings=SETTINGS)
    assert (size.frames, size.duration) == (48, pytest.approx(2.0, abs=0.01))


# ------------------------------------------------------------------ rotation


def rotated(a: int, b: int, c: int, d: int) -> tuple[bytes, np.ndarray]:
    """A video whose track has this matrix, written by hand, and its first frame as it is stored."""
    data = bytearray(footage("mp4"))
    at = data.index(b"tkhd") + 4 + 40  # version 0: the matrix follows forty bytes after the kind
    struct.pack_into(">9i", data, at, a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return bytes(data), decoded("mp4")[0]


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((1, 0, 0, 1), lambda pixels: pixels),
        ((0, 1, -1, 0), lambda pixels: np.rot90(pixels, -1)),  # a phone held upright: a quarter clockwise
        ((-1, 0, 0, -1), lambda pixels: np.rot90(pixels, 2)),
        ((0, -1, 1, 0), lambda pixels: np.rot90(pixels, 1)),
        ((-1, 0, 0, 1), lambda pixels: pixels[:, ::-1]),
        ((1, 0, 0, -1), lambda pixels: pixels[::-1]),
        ((0, 1, 1, 0), lambda pixels: pixels.swapaxes(0, 1)),
        ((0, -1, -1, 0), lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1)),
    ],
)  # fmt: skip
def test_a_frame_is_turned_as_its_track_says(
    matrix: tuple[int, int, int, int], turn: Callable[[np.ndarray], np.ndarray], counted: list[int]
) -> None:
    data, stored = rotated(*matrix)
    expected, source = turn(stored), opened(data)
    size = source.probe()
    assert (size.height, size.width) == expected.shape[:2]
    assert len(counted) == (0 if matrix == (1, 0, 0, 1) else 1)
    (pixels,) = frames_of(source, [0])
    assert np.array_equal(pixels, expected)
    assert pixels.flags.c_contiguous


def test_a_turn_is_known_where_a_frame_brings_things_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        rotation = -90

        @property
        def side_data(self) -> Any:
            raise ValueError("99 is not a valid Type")

    pixels = np.arange(12).reshape(3, 4)
    for rotation in (0, 90, 180, -90, -180):
        Frame.rotation = rotation
        turn = video_index.turn_of(Frame())  # type: ignore[arg-type]
        found = pixels.swapaxes(0, 1) if turn.exchanged else pixels
        found = found[:: -1 if turn.upwards else 1, :: -1 if turn.leftwards else 1]
        assert np.array_equal(found, np.rot90(pixels, rotation // 90))  # PyAV counts counterclockwise, as numpy does


# ------------------------------------------------------------------ what is odd


def test_a_transparent_gif_is_laid_over_the_background() -> None:
    file = io.BytesIO()
    shown = np.zeros((16, 16, 4), dtype=np.uint8)
    shown[:, :8] = (255, 0, 0, 255)
    images = [Image.fromarray(shown), Image.fromarray(shown[:, ::-1].copy())]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100, disposal=2)
    source = opened(file.getvalue())
    for background in ((255, 255, 255), (0, 0, 255)):
        first, second = frames_of(source, [0, 1], background=background)
        for pixels, solid in ((first, slice(0, 8)), (second, slice(8, 16))):
            expected = np.full((16, 16, 3), background, dtype=np.uint8)
            expected[:, solid] = (255, 0, 0)
            assert np.array_equal(pixels, expected)


def test_frames_of_vp8_that_are_only_referred_to_are_not_counted() -> None:
    data = bytearray(footage("webm, vp8"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    assert len(packets) >= 48
    shown = sum(bool(packet[0] & 0x10) for packet in packets)
    for packet in packets[20:24]:  # hide four more
        at = bytes(data).index(packet)
        data[at] &= ~0x10
    expected, source = sequential(bytes(data)), opened(bytes(data))
    assert source.probe().frames == len(expected) == shown - 4
    found = frames_of(source, range(len(expected)))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_broadcast_that_was_entered_in_the_middle_begins_with_its_first_whole_frame() -> None:
    data = footage("mpeg-ts")
    middle = len(data) // 3 // 188 * 188
    cut = data[: 3 * 188] + data[middle:]
    source, expected = opened(cut), sequential(cut)
    assert 12 < source.probe().frames < 48
    assert source.probe().frames == len(expected)
    found = frames_of(source, range(len(expected)))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_video_that_is_cut_out_without_new_encoding_begins_where_it_is_shown() -> None:
    """An edit list: frames from the key frame on are there, but shown only from the fifth on."""
    plain = encode(24, options={X264: "bframes=0"})
    data = bytearray(plain)
    at = data.index(b"elst") + 8  # then: count, length, first time shown
    length, first = struct.unpack_from(">Ii", data, at + 4)
    scale = 24 * 512
    assert (first, scale) == (0, 12288)
    struct.pack_into(">Ii", data, at + 4, length * 20 // 24, 4 * 512)
    source, expected = opened(bytes(data)), sequential(bytes(data))
    assert source.probe().frames == len(expected) == 20
    assert np.allclose(source.probe().timestamps, np.arange(20) / 24)
    assert np.array_equal(frames_of(source, [0])[0], sequential(plain)[4])
    found = frames_of(source, range(20))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def with_audio(*, codec: str = "libx264", images: int = 0, cover: bool = False) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4" if not cover else "mp3") as out:
        audio = out.add_stream("aac" if not cover else "libmp3lame", rate=16000, layout="mono")
        art = out.add_stream("mjpeg" if cover else codec, rate=1) if cover or images else None
        if art is not None:
            art.height, art.width = 48, 64
            art.pix_fmt = "yuvj420p" if cover else "yuv420p"
            if cover:
                from av.stream import Disposition

                art.disposition = Disposition.attached_pic
            for place in range(images or 1):
                frame = av.VideoFrame.from_ndarray(image(place), format="rgb24").reformat(format=art.pix_fmt)
                out.mux(art.encode(frame))
            out.mux(art.encode(None))
        for _ in range(20):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 16000
            out.mux(audio.encode(silence))
        out.mux(audio.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("cover", [False, True])
def test_a_file_without_moving_images_is_refused(cover: bool) -> None:
    with pytest.raises(MediaError) as caught:
        opened(with_audio(cover=cover)).probe()
    assert caught.value.path == "videos[0]"
    assert "videos[0]" in str(caught.value)


def test_audio_beside_the_images_changes_nothing() -> None:
    source = opened(with_audio(images=3))
    assert source.probe().frames == 3
    assert len(frames_of(source, [0, 2])) == 2


@pytest.mark.parametrize(
    "name", ["mp4", "mp4 in fragments", "mkv", "webm, vp8", "avi, mpeg4", "mpeg-ts", "mpeg-ps", "gif"]
)
def test_a_file_that_is_cut_anywhere_gives_true_frames_or_an_error(name: str) -> None:
    data, expected = footage(name), decoded(name)
    for at in [0, 1, 7, 12, 100, *range(200, len(data), max(1, len(data) // 15)), len(data) - 1]:
        paths: list[str | None] = []
        found: list[np.ndarray] = []
        whole = 0
        try:
            source = opened(data[:at])
            whole = max(0, source.probe().frames - 2)  # the last may be cut itself: FFmpeg makes up what it lacks
            found = frames_of(source, range(max(1, whole)))
        except (MediaError, LimitError) as error:
            paths.append(error.path)
        assert paths in ([], ["videos[0]"])
        assert all(np.array_equal(one, other) for one, other in zip(found[:whole], expected, strict=False))


@pytest.mark.parametrize(("codec", "container", "pixels"), [
    ("ffv1", "matroska", "yuv420p"), ("rawvideo", "avi", "yuv420p"), ("huffyuv", "avi", "yuv422p"), ("png", "mov", "rgb24"),
])  # fmt: skip
def test_rare_codecs_are_refused(codec: str, container: str, pixels: str) -> None:
    data = encode(2, container, codec, pixels=pixels)
    with pytest.raises(MediaError, match="codec") as caught:
        opened(data).probe()
    assert caught.value.path == "videos[0]"


# ------------------------------------------------------------------ only what is needed


def long_video() -> bytes:
    return encode(120 * 24, size=(32, 32), options={X264: "keyint=48:preset=ultrafast"})


def test_a_long_video_of_which_few_frames_are_sampled_is_hardly_decoded(counted: list[int]) -> None:
    data = long_video()
    source = opened(data)
    size = source.probe()
    assert (size.frames, counted) == (2880, [])
    indices = np.linspace(0, 2879, 8).round().astype(int).tolist()
    frames = source.decode(chosen(size, indices)).frames
    assert counted == []  # nothing before they are iterated
    held: list[weakref.ref[np.ndarray]] = []
    most = 0
    for pixels in frames:
        held.append(weakref.ref(pixels))
        del pixels
        most = max(most, sum(one() is not None for one in held))
        arrays = sum(type(one) is np.ndarray and one.shape == (32, 32, 3) for one in gc.get_objects())
        assert arrays <= 2
    assert len(held) == 8
    assert most == 1
    assert len(counted) <= 8 * 48 + 8 < 2880 // 6


def test_neighbors_are_reached_by_decoding_on(counted: list[int]) -> None:
    source = opened(footage("mp4"))
    frames_of(source, [0, 1, 2, 3])
    assert len(counted) == 4
    counted.clear()
    frames_of(source, [40, 41])  # one entry, at the key frame of 36
    assert len(counted) <= 6


@pytest.mark.parametrize("name", ["mp4", "mov", "mp4 in fragments", "29.97 fps"])
def test_an_ordinary_video_is_probed_without_decoding(name: str, counted: list[int]) -> None:
    source = opened(footage(name))
    for _ in range(3):
        source.probe()
    assert counted == []


@pytest.mark.parametrize("name", ["mkv", "webm, vp9", "avi, mpeg4", "gif", "mpeg-ts", "3gp"])
def test_where_a_head_leaves_the_size_open_one_frame_is_decoded(name: str, counted: list[int]) -> None:
    source = opened(footage(name))
    for _ in range(3):
        source.probe()
    assert len(counted) == 1


# ------------------------------------------------------------------ limits


def refused(data: Any, setting: str, counted: list[int], **limits: Any) -> LimitError:
    with pytest.raises(LimitError) as caught:
        opened(data, Settings(**limits)).probe()
    assert (caught.value.path, caught.value.setting) == ("videos[0]", setting)
    assert "videos[0]" in str(caught.value)
    assert counted == []
    return caught.value


def test_limits_hold_before_anything_is_decoded(counted: list[int]) -> None:
    data = footage("mp4")
    assert refused(data, "max_media_bytes", counted, max_media_bytes=len(data) - 1).value == len(data)
    assert refused(data, "max_image_pixels", counted, max_image_pixels=48 * 64 - 1).value == 48 * 64
    assert refused(data, "max_video_frames", counted, max_video_frames=47).value == 48
    refused(data, "max_video_seconds", counted, max_video_seconds=1.99)
    just = {"max_image_pixels": 48 * 64, "max_video_frames": 48, "max_video_seconds": 2.0, "max_media_bytes": len(data)}
    assert opened(data, Settings(**just)).probe().frames == 48


def resized(data: bytes, width: int, height: int) -> bytes:
    """The video whose container says another size; the stream of bits does not."""
    at = data.rindex(b"avc1") + 4 + 24
    assert struct.unpack_from(">HH", data, at) == (64, 48)
    return data[:at] + struct.pack(">HH", width, height) + data[at + 4 :]


def test_a_container_that_says_large_is_believed(counted: list[int]) -> None:
    refused(resized(footage("mp4"), 60000, 60000), "max_image_pixels", counted)


def test_a_container_that_says_small_is_found_out_before_memory_is_taken(counted: list[int]) -> None:
    data = encode(3, size=(1088, 1920))
    at = data.rindex(b"avc1") + 4 + 24
    data = data[:at] + struct.pack(">HH", 64, 48) + data[at + 4 :]
    source = opened(data, Settings(max_image_pixels=64 * 48))
    assert (source.probe().height, source.probe().width) == (48, 64)
    with pytest.raises(MediaError) as caught:
        frames_of(source, [0])
    assert caught.value.path == "videos[0]"
    assert counted == []  # the decoder itself was reported the limit
    # Within the limit it is decoded, and does not fit.
    with pytest.raises(MediaError, match="48 x 64 pixels"):
        frames_of(opened(data), [0])


def test_frames_that_change_their_size_are_refused() -> None:
    first, second = encode(3, "mpegts"), encode(3, "mpegts", size=(64, 64))
    with pytest.raises(MediaError) as caught:
        every_frame(first + second)
    assert caught.value.path == "videos[0]"


# ------------------------------------------------------------------ heads that would cost too much


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + kind + content


def element(kind: str, content: bytes) -> bytes:
    return bytes.fromhex(kind) + b"\x01" + len(content).to_bytes(7, "big") + content


def patched(data: bytes, kind: bytes, offset: int, layout: str, *values: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, data.index(kind) + offset, *values)
    return bytes(changed)


def many_samples(count: int) -> bytes:
    data = patched(encode(3), b"stsz", 8, ">II", 1, count)
    return patched(patched(data, b"stsc", 8, ">IIII", 1, 1, count, 1), b"stts", 8, ">III", 1, count, 512)


def many_in_a_fragment(count: int) -> bytes:
    data = encode(3, muxer={"movflags": "frag_keyframe+empty_moov"})
    return patched(patched(data, b"trun", 4, ">I", 0), b"trun", 8, ">I", count)


def in_segment(content: bytes) -> bytes:
    """A Matroska file of unknown length with more before its first cluster."""
    data = encode(3, "matroska")
    segment, cluster = data.index(bytes.fromhex("18538067")), data.index(bytes.fromhex("1F43B675"))
    return data[: segment + 4] + b"\x01" + b"\xff" * 7 + data[segment + 12 : cluster] + content + data[cluster:]


def laced(total: int) -> bytes:
    """Blocks of 256 frames that have no bytes each."""
    block = b"\xa3\x85\x81\x00\x00\x84\xff"
    return in_segment(element("1F43B675", b"\xe7\x81\x01" + block * (total // len(block))))


def tag(place: int) -> bytes:
    return element("67C8", element("45A3", b"%08x" % place) + element("4487", b"a"))


def information(count: int) -> bytes:
    entries = b"INFO" + b"".join(b"%04x" % (place % 65536) + struct.pack("<I", 2) + b"a\0" for place in range(count))
    data = footage("avi, mpeg4")
    lists = b"LIST" + struct.pack("<I", len(entries)) + entries
    return data[:12] + lists + data[12:]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "samples": lambda: many_samples(80_000_000),
    "samples of a fragment": lambda: many_in_a_fragment(80_000_000),
    "two fragments": lambda: many_in_a_fragment(600_000) + many_in_a_fragment(600_000),
    "compressed": lambda: box(b"ftyp", b"qt  \0\0\0\0") + box(b"moov", box(b"cmov", box(b"dcom", b"zlib"))),
    "entries of an index": lambda: in_segment(element("1C53BB6B", b"\xbb\x80" * 400_000)),
    "tags": lambda: in_segment(element("1254C367", element("7373", b"".join(map(tag, range(30_000)))))),
    "frames without bytes": lambda: laced(9_000_000),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_head_that_costs_too_much_is_refused(name: str, fresh: Callable[..., Any], tmp_path: Any) -> None:
    """In a process of its own, so that its memory can be seen; time is that of the processor, with wide margins."""
    file = tmp_path / "video"
    file.write_bytes(HOSTILE[name]())
    code = f"""
import json, time
from pathlib import Path
import av
from mm_plugin.media import probe
from mm_plugin.errors import MediaError
data = Path({str(file)!r}).read_bytes()
def peak():  # of this process alone; what getrusage tells begins with what the parent had
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before, began = peak(), time.process_time()
try:
    found = probe(data, modality="video").frames
except MediaError as error:
    found = [error.path, error.reason]
grown = (peak() - before) // 1024
print(json.dumps([found, grown, time.process_time() - began]))
"""
    found, megabytes, seconds = fresh(code)
    assert found[0] == "video"
    assert found[1] in ("head", "packets")
    assert megabytes < 200
    assert seconds < 20  # unguarded, each took this long or longer, or gigabytes


def test_tags_of_avi_cost_nothing() -> None:
    """FFmpeg compares each tag with all others; they are passed over, and the frames are the same."""
    tagged, plain = (probe(data, modality="video") for data in (information(65_000), footage("avi, mpeg4")))
    assert np.array_equal(tagged.timestamps, plain.timestamps)


def test_ordinary_heads_are_not_refused() -> None:
    for name in VIDEOS:
        check_head(footage(name))
    data = many_samples(900_000)  # a promise that is not kept costs little
    with pytest.raises(MediaError) as caught:
        opened(data).probe()
    assert caught.value.reason != "head"


# ------------------------------------------------------------------ references

PLAYLISTS = {
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{path}\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '{path}'\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet mimeType='
    b'"video/mp4"><Representation id="1" bandwidth="1"><BaseURL>file://{path}</BaseURL></Representation></AdaptationSet>'
    b"</Period></MPD>",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "asx": b'<asx version="3.0"><entry><ref href="file://{path}"/></entry></asx>',
    "text": b"file://{path}\n",
}


def external_reference(target: str) -> bytes:
    """An mp4 whose samples are said to lie in another file."""
    data = footage("mov")
    at = data.index(b"dref")
    name = target.encode()
    padded = struct.pack(">H", len(name)) + name + b"\0" * (len(name) % 2)
    entries = b"\0\2" + padded + b"\0\x12" + padded + b"\xff\xff\0\0"  # an absolute path, and one below a volume
    alias = box(b"alis", b"\0" * 154 + entries)
    old = struct.unpack_from(">I", data, at - 4)[0]
    new = box(b"dref", b"\0\0\0\0\0\0\0\1" + alias)
    changed = bytearray(data[: at - 4] + new + data[at - 4 + old :])
    for kind in (b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        place = data.index(kind) - 4
        struct.pack_into(">I", changed, place, struct.unpack_from(">I", changed, place)[0] + len(new) - old)
    return bytes(changed)


def test_no_file_that_a_video_names_is_opened(fresh: Callable[..., Any], tmp_path: Any) -> None:
    """Python's own openings are heard by an audit hook; FFmpeg's, in C, by the access time and by what comes of them."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(footage("mp4"))
    media = {name: text.replace(b"{path}", str(secret).encode()) for name, text in PLAYLISTS.items()}
    media["reference"] = external_reference(str(secret))
    folder = tmp_path / "media"
    folder.mkdir()
    for name, data in media.items():
        (folder / name).write_bytes(data)
    code = f"""
import json, os, sys
from pathlib import Path
import av, av.video.frame, av.sidedata.sidedata
from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio, open_video, whole, SampledVideo
from mm_plugin.settings import Settings
media = {{file.name: file.read_bytes() for file in Path({str(folder)!r}).iterdir()}}
warm = Path({str(secret)!r}).read_bytes()
def use(data, opener):
    try:
        source = opener(data, path="x", settings=Settings())
        if opener is open_audio:
            return source.probe(16000).num_samples
        size = source.probe()
        all_of = whole(size)
        sampled = SampledVideo(size.height, size.width, all_of.indices, all_of.timestamps, 1.0)
        return len(list(source.decode(sampled).frames))
    except MediaError as error:
        return error.reason
use(warm, open_video), use(warm, open_audio)
fifo = Path({str(secret)!r})
fifo.unlink()
os.mkfifo(fifo)  # whoever opens it for reading waits, and a writer can see that nobody does
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event in ("open", "socket.connect") else None)
found = {{name: [use(data, open_video), use(data, open_audio)] for name, data in media.items()}}
try:
    os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    reader = True
except OSError:
    reader = False
print(json.dumps([found, [name for name in opened if name != str(fifo)], reader]))
"""
    found, opened_files, reader = fresh(code)
    assert opened_files == []
    assert reader is False
    assert set(found) == {*PLAYLISTS, "reference"}
    for name in PLAYLISTS:
        assert found[name] == ["format", "format"], name
    assert all(isinstance(one, str) or one == 48 for one in found["reference"])


def test_attachments_are_passed_over(counted: list[int]) -> None:
    font = element(
        "61A7", element("466E", b"/etc/passwd") + element("4660", b"font/ttf") + element("465C", b"x" * 5000)
    )
    source = opened(in_segment(element("1941A469", font)))
    assert source.probe().frames == 3
    assert len(frames_of(source, [0, 1, 2])) == 3


# ------------------------------------------------------------------ given frames

STACK = np.stack([image(place, 20, 30) for place in range(6)])


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.case("9.5")
@pytest.mark.parametrize(
    "frames",
    [
        STACK,
        torch.from_numpy(STACK).permute(0, 3, 1, 2),
        list(STACK),
        [torch.from_numpy(one).permute(2, 0, 1) for one in STACK],
        [Image.fromarray(one) for one in STACK],
        tuple(png(one) for one in STACK),
        STACK[:, ::-1, ::-1][:, ::-1, ::-1],
    ],
    ids=["array", "tensor", "arrays", "tensors", "images", "files", "view"],
)
def test_frames_are_given_in_any_form(frames: Any) -> None:
    source = opened(VideoFrames(frames, fps=4))
    size = source.probe()
    assert (size.height, size.width, size.frames, size.fps) == (20, 30, 6, 4.0)
    assert np.allclose(size.timestamps, np.arange(6) / 4)
    assert source.sampled
    for indices in ([0], [1, 1, 4], range(6)):
        found = frames_of(source, indices)
        assert all(np.array_equal(pixels, STACK[place]) for place, pixels in zip(indices, found, strict=True))
        assert all(pixels.flags.c_contiguous for pixels in found)


def test_times_of_given_frames() -> None:
    size = opened(VideoFrames(STACK, timestamps=[10, 10.5, 11, 12, 13, 15], sampled=False)).probe()
    assert size.timestamps.tolist() == [0, 0.5, 1, 2, 3, 5]
    assert size.fps == 1.0
    assert not opened(VideoFrames(STACK, fps=1, sampled=False)).sampled
    one = opened(VideoFrames(STACK[:1], timestamps=[7.0])).probe()
    assert (one.frames, one.fps, one.timestamps.tolist()) == (1, 1.0, [0.0])
    everything = whole(size)
    assert everything.indices.tolist() == list(range(6))
    assert everything.timestamps.tolist() == size.timestamps.tolist()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "metadata"),
    "both": ({"fps": 1, "timestamps": [0, 1, 2, 3, 4, 5]}, "metadata"),
    "too few times": ({"timestamps": [0, 1, 2]}, "metadata"),
    "no times": ({"timestamps": []}, "metadata"),
    "nested times": ({"timestamps": [[0, 1, 2, 3, 4, 5]]}, "metadata"),
    "invalid times": ({"timestamps": [0, 1, float("nan"), 3, 4, 5]}, "metadata"),
    "endless times": ({"timestamps": [0, 1, 2, 3, 4, float("inf")]}, "metadata"),
    "only endless times": ({"timestamps": [float("-inf")] * 6}, "metadata"),
    "huge times": ({"timestamps": [-1.7e308, 0, 1, 2, 3, 1.7e308]}, "metadata"),
    "unordered times": ({"timestamps": [0, 2, 1, 3, 4, 5]}, "metadata"),
    "equal times": ({"timestamps": [0, 1, 1, 3, 4, 5]}, "metadata"),
    "words": ({"timestamps": list("abcdef")}, "metadata"),
    "no rate": ({"fps": 0}, "metadata"),
    "a rate below nothing": ({"fps": -1}, "metadata"),
    "an invalid rate": ({"fps": float("nan")}, "metadata"),
    "an endless rate": ({"fps": float("inf")}, "metadata"),
    "a word for a rate": ({"fps": "fast"}, "metadata"),
    "a huge rate": ({"fps": 10**400}, "metadata"),
    "no frames": ({"frames": [], "fps": 1}, "empty"),
    "an array without frames": ({"frames": STACK[:0], "fps": 1}, "array"),
    "no frames at all": ({"frames": None, "fps": 1}, "type"),
    "one image": ({"frames": STACK[0], "fps": 1}, "array"),
    "floats": ({"frames": STACK.astype(np.float32), "fps": 1}, "array"),
    "channels first in numpy": ({"frames": STACK.transpose(0, 3, 1, 2), "fps": 1}, "array"),
    "channels last in torch": ({"frames": torch.from_numpy(STACK), "fps": 1}, "array"),
    "two sizes": ({"frames": [STACK[0], STACK[1][:10]], "fps": 1}, "size"),
    "an invalid frame": ({"frames": [STACK[0], 5], "fps": 1}, "type"),
    "a broken frame": ({"frames": [png(STACK[0]), b"GIF89a"], "fps": 1}, "broken"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frames_and_times_are_refused(name: str) -> None:
    arguments, reason = WRONG[name]
    with pytest.raises(MediaError) as caught:
        every_frame(VideoFrames(**{"frames": STACK, **arguments}))
    assert caught.value.path == "videos[0]"
    assert caught.value.reason in (reason, "format" if reason == "broken" else reason)


def test_bare_frames_are_reported_what_is_missing() -> None:
    for value in (STACK, list(STACK), torch.from_numpy(STACK).permute(0, 3, 1, 2)):
        with pytest.raises(MediaError, match="frames with their times") as caught:
            opened(value)
        assert caught.value.reason == "metadata"
    for value in (None, 5, {"frames": STACK}):
        with pytest.raises(MediaError, match="expected bytes"):
            opened(value)


def test_limits_of_given_frames() -> None:
    def fault(value: VideoFrames, **limits: Any) -> str:
        with pytest.raises(LimitError) as caught:
            opened(value, Settings(**limits))
        assert caught.value.path == "videos[0]"
        return str(caught.value.setting)

    for frames in (STACK, list(STACK), torch.from_numpy(STACK).permute(0, 3, 1, 2)):
        assert fault(VideoFrames(frames, fps=1), max_video_frames=5) == "max_video_frames"
        assert fault(VideoFrames(frames, fps=1), max_video_seconds=5.9) == "max_video_seconds"
        assert fault(VideoFrames(frames, fps=1), max_image_pixels=599) == "max_image_pixels"
        assert fault(VideoFrames(frames, fps=1), max_request_pixels=6 * 600 - 1) == "max_request_pixels"
        opened(
            VideoFrames(frames, fps=1), Settings(max_request_pixels=6 * 600, max_video_frames=6, max_video_seconds=6)
        )
    assert fault(VideoFrames(STACK[:1], fps=5e-324)) == "max_video_seconds"
    files = [png(one) for one in STACK]
    most = sum(map(len, files)) - 1
    assert fault(VideoFrames(files, fps=1), max_media_bytes=most) == "max_media_bytes"


def test_the_same_array_again_and_again_is_not_copied_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    original = video.open_image

    def copying(value: Any, **arguments: Any) -> Any:
        copies.append(value)
        return original(value, **arguments)

    monkeypatch.setattr(video, "open_image", copying)
    with pytest.raises(LimitError):
        opened(VideoFrames([STACK[0]] * 100_000, fps=100), Settings(max_request_pixels=6000))
    assert len(copies) == 10


@pytest.mark.case("4.9")
def test_what_tells_videos_apart() -> None:
    base = opened(VideoFrames(STACK, fps=2)).digest()
    same = [
        VideoFrames(STACK.copy(), fps=2.0),
        VideoFrames(torch.from_numpy(STACK).permute(0, 3, 1, 2), fps=2),
        VideoFrames(STACK, timestamps=[0, 0.5, 1, 1.5, 2, 2.5]),
        VideoFrames(STACK, timestamps=np.arange(6) / 2 + 100),
    ]
    assert {opened(one).digest() for one in same} == {base}
    others = [
        VideoFrames(STACK, fps=1),
        VideoFrames(STACK, fps=30),
        VideoFrames(STACK, timestamps=[0, 0.5, 1, 1.5, 2, 2.6]),
        VideoFrames(STACK[::-1], fps=2),
        VideoFrames(STACK[:5], fps=2),
        VideoFrames(STACK ^ np.uint8(1), fps=2),
        VideoFrames(STACK, fps=2, sampled=False),
        VideoFrames(STACK.reshape(6, 30, 20, 3), fps=2),
    ]
    digests = {opened(one).digest() for one in others}
    assert len(digests | {base}) == len(others) + 1
    files = [png(one) for one in STACK]
    assert opened(VideoFrames(files, fps=2)).digest() == opened(VideoFrames(list(files), fps=2)).digest()
    assert opened(VideoFrames(files, fps=2)).digest() != opened(VideoFrames(files[::-1], fps=2)).digest()
    data = footage("mp4")
    assert opened(data).digest() == opened(bytearray(data)).digest() != opened(data + b"\0").digest()
    assert len({len(one) for one in (base, opened(data).digest())}) == 1


@pytest.mark.parametrize("form", [lambda array: array, list, lambda array: torch.from_numpy(array).permute(0, 3, 1, 2)])
def test_a_caller_may_change_its_frames_afterwards(form: Callable[[np.ndarray], Any]) -> None:
    mine = STACK.copy()
    source = opened(VideoFrames(form(mine), fps=2))
    before = source.digest()
    mine[:] = 0
    assert source.digest() == before
    assert all(np.array_equal(one, other) for one, other in zip(frames_of(source, range(6)), STACK, strict=True))


def test_nothing_but_our_errors_for_noise() -> None:
    random = np.random.default_rng(3)
    for magic in (
        b"",
        b"\0\0\0\x18ftypisom",
        b"\x1a\x45\xdf\xa3",
        b"RIFF\xff\xff\0\0AVI ",
        b"GIF89a",
        b"OggS\0\2",
        b"G",
        b"FLV\1\5",
    ):
        for _ in range(6):
            data = magic + random.integers(0, 256, 3000, dtype=np.uint8).tobytes()
            with pytest.raises(MMPluginError) as caught:
                every_frame(data)
            assert isinstance(caught.value, MediaError | LimitError)


@pytest.mark.parametrize("codec", ["libx264", "mpeg1video", "mpeg2video", "mpeg4"])
def test_frames_of_an_avi_are_those_that_are_shown_whatever_order_they_are_stored_in(codec: str) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream(codec, rate=24, options={"bf": "2"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for level in range(60):
            pixels = np.full((64, 64, 3), 4 * level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with av.open(io.BytesIO(file.getvalue())) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    source = opened(file.getvalue())
    size = source.probe()
    assert size.frames == len(expected)
    for indices in ([0, len(expected) - 1], [1], list(range(len(expected)))):
        chosen = Sampling.of(size, np.array(indices))
        sampled = SampledVideo(size.height, size.width, chosen.indices, chosen.timestamps, chosen.fps)
        for index, found in zip(indices, source.decode(sampled).frames, strict=True):
            assert np.array_equal(found, expected[index])
