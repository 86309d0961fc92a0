"""Packets that are not frames: fields, parameters, messages, nothing. Streams are written by hand; levels follow by arithmetic."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mm_plugin.errors import MediaError
from mm_plugin.media import SampledVideo, open_video, whole
from mm_plugin.media.video_packets import packets_of
from mm_plugin.settings import Settings

START = b"\0\0\0\1"


def decoded(data: bytes, threads: int = 2) -> tuple[Any, list[np.ndarray]]:
    source = open_video(data, path="videos[0]", settings=Settings(threads=threads))
    size = source.probe()
    everything = whole(size)
    sampled = SampledVideo(size.height, size.width, everything.indices, everything.timestamps, size.fps)
    return size, list(source.decode(sampled).frames)


def gray(luma: int) -> int:
    """The level of a luma of limited range without chroma."""
    return round((luma - 16) * 255 / 219)


# ------------------------------------------------------------------ H.264 by hand


class Bits:
    def __init__(self) -> None:
        self.text = ""

    def u(self, count: int, value: int) -> Bits:
        self.text += f"{value:0{count}b}"
        return self

    def ue(self, *values: int) -> Bits:
        for value in values:
            digits = f"{value + 1:b}"
            self.text += "0" * (len(digits) - 1) + digits
        return self

    def aligned(self) -> bytes:
        self.text += "0" * (-len(self.text) % 8)
        return int(self.text, 2).to_bytes(len(self.text) // 8, "big")

    def stopped(self) -> bytes:
        self.text += "1"
        return self.aligned()


def unit(head: int, body: bytes) -> bytes:
    """A NAL unit, kept free of start codes."""
    out, zeros = bytearray([head]), 0
    for byte in body:
        if zeros >= 2 and byte <= 3:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = 0 if byte else zeros + 1
    return START + bytes(out)


def parameters(fields: bool = True) -> bytes:
    """Main profile, 32 x 32 pixels, in fields or frames; images are displayed in the order in which they are stored."""
    rows = (0, 0) if fields else (1, 1)  # units of 32 or 16 rows, and whether there are frames only
    sequence = Bits().u(8, 77).u(8, 0).u(8, 30).ue(0, 0, 2, 1).u(1, 0).ue(1, rows[0]).u(1, rows[1])
    if fields:
        sequence.u(1, 0)
    sequence.u(1, 1).u(1, 0).u(1, 0)
    images = Bits().ue(0, 0).u(2, 0).ue(0, 0, 0).u(3, 0).ue(0, 0, 0).u(1, 1).u(2, 0)
    return unit(0x67, sequence.stopped()) + unit(0x68, images.stopped())


def image(number: int, luma: int, *, field: int | None, first: bool) -> bytes:
    """One field (0 the upper) or a whole frame of one luma, as uncompressed macroblocks."""
    bits = Bits().ue(0, 7, 0).u(4, number % 16)
    if field is not None:
        bits.u(1, 1).u(1, field)
    if first:
        bits.ue(0).u(2, 0)
    else:
        bits.u(1, 0)
    bits.ue(0, 1)
    body = b""
    for _ in range(2 if field is not None else 4):
        body += bits.ue(25).aligned() + bytes([luma]) * 256 + bytes([128]) * 128
        bits = Bits()
    return unit(0x65 if first else 0x61, body + b"\x80")


def muxed(packets: Sequence[bytes], container: str, *, rate: int = 50, keys: Sequence[int] = (0,)) -> bytes:
    """H.264 packets in a container, so many a second."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(b"".join(packets)), format="h264") as raw,
        av.open(
            file, "w", format=container, options={"video_track_timescale": "90000"} if container == "mp4" else {}
        ) as out,
    ):
        stream = out.add_stream_from_template(raw.streams.video[0])
        stream.time_base = Fraction(1, 90000)
        for place, data in enumerate(packets):
            packet = av.Packet(data)
            packet.pts, packet.duration = place * 90000 // rate, 90000 // rate
            packet.dts = packet.pts
            packet.time_base, packet.stream = Fraction(1, 90000), stream
            packet.is_keyframe = place in keys
            out.mux(packet)
    return file.getvalue()


LUMAS = [(16 + 8 * place, 235 - 8 * place) for place in range(11)]


def fields(order: tuple[int, int] = (0, 1)) -> list[bytes]:
    """Eleven frames, each as two fields; `order` says which parity comes first."""
    packets = []
    for place, lumas in enumerate(LUMAS):
        for at, parity in enumerate(order):
            begins = not place and not at
            head = parameters() if begins else b""
            packets.append(head + image(place, lumas[parity], field=parity, first=begins))
    return packets


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["upper first", "lower first"])
@pytest.mark.parametrize("container", ["mp4", "mov", "mpegts", "matroska"])
def test_two_fields_are_one_frame(container: str, order: tuple[int, int]) -> None:
    size, frames = decoded(muxed(fields(order), container))
    assert (size.frames, len(frames)) == (11, 11)
    assert size.fps == pytest.approx(25, rel=0.01)
    assert np.allclose(size.timestamps, np.arange(11) / 25, atol=0.001)
    for pixels, (upper, lower) in zip(frames, LUMAS, strict=True):
        assert np.abs(pixels[::2].astype(int) - gray(upper)).max() <= 1
        assert np.abs(pixels[1::2].astype(int) - gray(lower)).max() <= 1


@pytest.mark.parametrize("container", ["mp4", "mpegts"])
def test_fields_and_frames_may_alternate(container: str) -> None:
    """Frames in a sequence that may have fields, between pairs of fields."""
    bits = Bits()
    packets = fields()[:4]
    frame = Bits().ue(0, 7, 0).u(4, 2).u(1, 0).u(1, 0).ue(0, 1)
    body = b""
    for _ in range(4):
        body += frame.ue(25).aligned() + bytes([100]) * 256 + bytes([128]) * 128
        frame = Bits()
    assert not bits.text
    packets.append(unit(0x61, body + b"\x80"))
    packets += [image(3, 50, field=0, first=False), image(3, 60, field=1, first=False)]
    size, frames = decoded(muxed(packets, container))
    assert (size.frames, len(frames)) == (4, 4)
    assert np.abs(frames[2].astype(int) - gray(100)).max() <= 1
    assert np.abs(frames[3][1::2].astype(int) - gray(60)).max() <= 1


def test_fields_of_one_packet_are_one_frame() -> None:
    stored = fields()
    pairs = [stored[at] + stored[at + 1] for at in range(0, len(stored), 2)]
    size, frames = decoded(muxed(pairs, "matroska", rate=25))
    assert (size.frames, len(frames)) == (11, 11)


def plain(count: int = 12) -> list[bytes]:
    """Frames of one level each, the first with the parameters."""
    return [
        (b"" if place else parameters(False)) + image(place, 16 + 10 * place, field=None, first=not place)
        for place in range(count)
    ]


MESSAGE = unit(6, bytes([5, 18]) + bytes(range(16)) + b"hi" + b"\x80")


@pytest.mark.parametrize("extra", [parameters(False), MESSAGE, unit(9, b"\x10"), unit(12, b"\xff" * 20 + b"\x80")],
                         ids=["parameters", "message", "delimiter", "filler"])  # fmt: skip
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_packets_of_parameters_and_messages_are_no_frames(container: str, extra: bytes) -> None:
    packets = plain()
    for at in (9, 5, 5, 1):
        packets.insert(at, extra)
    size, frames = decoded(muxed(packets, container, rate=25))
    assert (size.frames, len(frames)) == (12, 12)
    for place, pixels in enumerate(frames):
        assert np.abs(pixels.astype(int) - gray(16 + 10 * place)).max() <= 1


# ------------------------------------------------------------------ other codecs


def encoded(container: str, codec: str, count: int = 20, *, options: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=25, options=options or {})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for place in range(count):
            out.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), 12 * place, np.uint8), format="rgb24"))
            )
        out.mux(stream.encode(None))
    return file.getvalue()


def remuxed(data: bytes, container: str, change: Any) -> bytes:
    """The file with each packet's bytes replaced by what `change(place, bytes)` returns."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as out:
        stream = source.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for place, packet in enumerate(packet for packet in source.demux(stream) if packet.size):
            changed = av.Packet(change(place, bytes(packet)))
            changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
            changed.stream, changed.is_keyframe = copy, packet.is_keyframe
            out.mux(changed)
    return file.getvalue()


def reference(data: bytes) -> list[np.ndarray]:
    """Every frame that FFmpeg gives, packets of nothing passed over."""
    frames: list[Any] = []
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            if packet.size:
                frames += packet.decode()
        frames += stream.codec_context.decode(None)
        return [frame.to_ndarray(format="rgb24") for frame in frames]


def same(data: bytes, count: int | None = None) -> None:
    expected = reference(data)
    size, frames = decoded(data)
    assert count is None or size.frames == count
    assert size.frames == len(frames) == len(expected)
    assert all(np.array_equal(one, other) for one, other in zip(frames, expected, strict=True))


@pytest.mark.parametrize("container", ["mp4", "avi", "matroska"])
@pytest.mark.parametrize("uncoded", [{3}, {3, 4, 9}, {19}, {7, 18, 19}], ids=str)
def test_mpeg4_frames_that_are_not_coded_leave_the_last_one(container: str, uncoded: set[int]) -> None:
    def change(place: int, data: bytes) -> bytes:
        if place not in uncoded:
            return data
        # A predicted image, no whole second, then the marker, the time in 5 bits, the marker, and: not coded.
        return b"\0\0\1\xb6" + bytes([0b01_0_1_0000, 0b0_1_0_11111])

    data = remuxed(encoded(container, "mpeg4", options={"g": "12", "bf": "0"}), container, change)
    same(data)


def test_mpeg4_headers_are_no_frames() -> None:
    whole_file = encoded("matroska", "mpeg4", options={"g": "100"})
    with av.open(io.BytesIO(whole_file)) as container:
        header = container.streams.video[0].codec_context.extradata
    reader = packets_of("mpeg4", header)
    assert reader.read(header).frames == 0
    with av.open(io.BytesIO(whole_file)) as container:
        assert [reader.read(bytes(packet)).frames for packet in container.demux(video=0) if packet.size] == [1] * 20


@pytest.mark.parametrize("codec", ["mpeg1video", "mpeg2video"])
def test_headers_of_mpeg_video_are_no_frames(codec: str) -> None:
    data = encoded("matroska", codec, options={"g": "5"})
    with av.open(io.BytesIO(data)) as container:
        first = next(bytes(packet) for packet in container.demux(video=0))
    header = first[: first.index(b"\0\0\1\0")]
    assert packets_of(codec, b"").read(header).frames == 0
    assert packets_of(codec, b"").read(first).frames == 1


def empty_blocks(data: bytes, places: set[int]) -> bytes:
    """A Matroska file in which blocks have no bytes of a frame; the element after each fills the gap."""
    changed = bytearray(data)
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    for place in places:
        at = data.index(packets[place])
        # SimpleBlock: A3, size, track, time in two bytes, flags. It keeps those four bytes; the rest becomes a Void element.
        start = data.rindex(b"\xa3", 0, at - 4)
        rest = at + len(packets[place]) - (start + 2 + 4)
        changed[start + 1 : start + 6] = b"\x84" + data[at - 4 : at]
        changed[start + 6 : start + 6 + 9] = b"\xec\x01" + (rest - 9).to_bytes(7, "big")
    return bytes(changed)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "libvpx"])
def test_empty_packets_are_passed_over(codec: str) -> None:
    options = {
        "libx264": {"x264-params": "log=0:keyint=1"},
        "mpeg4": {"g": "1"},
        "libvpx": {"g": "1", "lag-in-frames": "0"},
    }
    data = empty_blocks(encoded("matroska", codec, options=options[codec]), {4, 5, 12})
    same(data, 17)


def gif(images: int, *, comments: Sequence[int] = (), cut: int = 0) -> bytes:
    """A GIF with a comment after these images (numbered from 1), and without its last bytes."""
    file = io.BytesIO()
    levels = [Image.new("P", (16, 16), place) for place in range(images)]
    for level in levels:
        level.putpalette([byte for entry in range(256) for byte in (entry * 20 % 256, 0, 0)])
    levels[0].save(file, "GIF", save_all=True, append_images=levels[1:], duration=100, optimize=False)
    data = file.getvalue()
    comment = b"\x21\xfe\x05hello\x00"
    starts = [at for at in range(len(data)) if data.startswith(b"\x21\xf9\x04", at)]
    for number in sorted(comments, reverse=True):
        at = starts[number] if number < len(starts) else len(data) - 1
        data = data[:at] + comment + data[at:]
    return data[: len(data) - cut]


@pytest.mark.parametrize("comments", [(), (5,), (1,), (2, 5), (1, 2, 3, 4, 5)], ids=str)
def test_comments_in_a_gif_are_no_frames(comments: tuple[int, ...]) -> None:
    size, frames = decoded(gif(5, comments=comments))
    assert size.frames == 5
    assert [int(pixels[0, 0, 0]) for pixels in frames] == [0, 20, 40, 60, 80]


def test_a_gif_that_is_cut_in_an_image_is_served_without_it() -> None:
    data = gif(5)
    source = open_video(data[:-6], path="videos[0]", settings=Settings())
    size = source.probe()
    assert size.frames == 4
    everything = whole(size)
    video = source.decode(SampledVideo(16, 16, everything.indices, everything.timestamps, size.fps))
    assert [int(pixels[0, 0, 0]) for pixels in video.frames] == [0, 20, 40, 60]
    assert len(video.notes) == 1


def vp9(*, shown: bool, existing: bool = False, profile: int = 0) -> bytes:
    bits = Bits().u(2, 2).u(1, profile & 1).u(1, profile >> 1)
    if profile == 3:
        bits.u(1, 0)
    bits.u(1, existing).u(1, 0).u(1, shown).u(1, 0)
    return bits.aligned() + b"\1\2\3"


@pytest.mark.parametrize("profile", range(4))
def test_vp9_frames_that_are_not_displayed(profile: int) -> None:
    reader = packets_of("vp9", b"")
    shown, hidden = vp9(shown=True, profile=profile), vp9(shown=False, profile=profile)
    existing = vp9(shown=False, existing=True, profile=profile)
    assert [reader.read(data).frames for data in (shown, hidden, existing)] == [1, 0, 1]
    for parts, count in (([hidden, shown], 1), ([hidden, hidden], 0), ([shown, existing], None)):
        marker = bytes([0xC0 | len(parts) - 1])
        index = marker + bytes(len(part) for part in parts) + marker
        assert reader.read(b"".join(parts) + index).frames == count


def test_av1_packets_without_a_frame() -> None:
    reader = packets_of("av1", b"")
    delimiter, sequence, frame = b"\x12\0", b"\x0a\3abc", b"\x32\2ab"
    assert reader.read(delimiter + sequence).frames == 0
    assert reader.read(delimiter + sequence + frame).frames == 1
    assert reader.read(b"\x16\0\0" + frame).frames == 1  # with an extension


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("codec", ["h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "gif", "theora"])
def test_noise_is_read_without_an_error(codec: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    reader = packets_of(codec, random.bytes(40))
    for _ in range(200):
        head = random.choice([b"", START, b"\0\0\0\5", b"\0\0\1\xb6", b"GIF89a"])
        assert reader.read(bytes(head) + random.bytes(int(random.integers(1, 60)))).frames in (0, 1, None)


def test_hevc_leading_frames_that_cannot_be_decoded_are_not_counted() -> None:
    def nal(kind: int) -> bytes:
        return START + bytes([kind << 1, 1, 0x80, 7, 7])

    cra, leading, decodable, plain_frame, end, idr = (
        nal(21),
        nal(8),
        nal(6),
        nal(1),
        START + bytes([36 << 1, 1]),
        nal(19),
    )
    for packets, expected in (
        ([cra, leading, decodable, plain_frame], [1, 0, 1, 1]),
        ([idr, plain_frame, cra, leading, leading], [1, 1, 1, 1, 1]),
        ([idr, plain_frame + end, cra, leading, plain_frame], [1, 1, 1, 0, 1]),
        ([idr, nal(16), leading], [1, 1, 0]),
    ):
        reader = packets_of("hevc", b"")
        assert [reader.read(data).frames for data in packets] == expected


def test_a_frame_that_is_lost_hides_what_may_refer_to_it() -> None:
    """A packet that cannot be decoded: frames until the next key frame are refused, later ones are served."""
    data = encoded("matroska", "libvpx", options={"g": "5", "keyint_min": "5", "lag-in-frames": "0"})
    with av.open(io.BytesIO(data)) as container:
        packets = [(bytes(packet), packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    keys = [place for place, (_, key) in enumerate(packets) if key]
    assert len(keys) >= 3
    broken = bytearray(data)
    at = data.index(packets[keys[1]][0])
    broken[at + 3 : at + 6] = b"\0\0\0"  # the start code of a key frame of VP8
    source = open_video(bytes(broken), path="videos[0]", settings=Settings())
    size = source.probe()
    expected = reference(data)

    def frame(place: int) -> np.ndarray:
        chosen = np.array([place])
        (pixels,) = source.decode(SampledVideo(64, 64, chosen, size.times(chosen), size.fps)).frames
        return pixels

    for place in range(len(packets)):
        if keys[1] <= place < keys[2]:
            with pytest.raises(MediaError) as caught:
                frame(place)
            assert caught.value.reason == "broken"
        else:
            assert np.array_equal(frame(place), expected[place])
