"""Odd videos: containers, codecs and clocks that people send, and what must be refused. Needs the extra `video`."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from mm_plugin.items import Modality
from mm_plugin.media.types import VideoFrames
from mm_plugin.testing.corpus.encoders import SIDES, encoded, encoded_audio, head_first, images, tone
from mm_plugin.testing.corpus.entries import CorpusEntry, ExpectedVideo, refuses
from mm_plugin.testing.corpus.formats import box, gif, noise, png, wav

_LOSSY = 6.0  # levels, on average over a frame
_refuses = functools.partial(refuses, Modality.VIDEO)


def videos() -> Iterator[CorpusEntry]:
    """Every odd video, equal bytes each time.

    Raises:
        UsageError: PyAV is not installed.
    """
    for family in (_times, _containers, _rotations, _given, _streams, _broken, _foreign):
        yield from family()


def _video(
    name: str,
    value: Any,
    frames: np.ndarray,
    times: Any = None,
    *,
    rate: Fraction | int = 24,
    tolerance: float = _LOSSY,
    note: str = "",
) -> CorpusEntry:
    if times is None:
        times = np.arange(len(frames)) / float(rate)
    expected = ExpectedVideo(np.ascontiguousarray(frames), np.asarray(times, np.float64), tolerance)
    return CorpusEntry(name, Modality.VIDEO, value, expected, note=note)


# ---------------------------------------------------------------- time


def _times() -> Iterator[CorpusEntry]:
    twelve = images(12)
    yield _video("mp4/h264", encoded(twelve), twelve)
    for count in (1, 2, 7):
        some = images(count)
        yield _video(f"mp4/{count} frames", encoded(some), some)
    for rate, name in ((1, "1"), (Fraction(30_000, 1001), "29.97"), (60, "60")):
        yield _video(f"mp4/{name} frames per second", encoded(twelve, rate=rate), twelve, rate=rate)
    ticks = [0, 40, 80, 500, 520, 540, 1500, 1533, 2000, 2001, 2900, 3000]
    thousandth = Fraction(1, 1000)
    uneven = encoded(twelve, ticks=ticks, base=thousandth)
    yield _video("mp4/uneven times", uneven, twelve, np.array(ticks) / 1000)
    uneven = encoded(twelve, "webm", "libvpx", ticks=ticks, base=thousandth)
    yield _video("webm/uneven times", uneven, twelve, np.array(ticks) / 1000)
    late = [5000 + tick for tick in range(0, 12 * 40, 40)]
    yield _video(
        "mp4/first frame after five seconds", encoded(twelve, ticks=late, base=thousandth), twelve,
        np.arange(12) * 0.04, note="times count from the first frame; an edit list delays it",
    )  # fmt: skip
    cut = encoded(twelve, muxer={"use_editlist": "0"}, options={"x264-params": "log-level=none:threads=1:bframes=2"})
    yield _video("mp4/frames out of order, no edit list", cut, twelve)
    many = images(60)
    gops = "log-level=none:threads=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"
    yield _video("mp4/open groups", encoded(many, options={"x264-params": f"{gops}:open-gop=1"}), many)
    yield _video("mp4/closed groups", encoded(many, options={"x264-params": f"{gops}:open-gop=0"}), many)
    live = encoded(twelve, "webm", "libvpx", muxer={"live": "1"}, seekable=False)
    yield _video("webm/no duration", live, twelve)
    piped = encoded(twelve, "matroska", "libx264", seekable=False)
    yield _video("matroska/no duration and no index", piped, twelve)


# ---------------------------------------------------------------- containers and codecs


def _containers() -> Iterator[CorpusEntry]:
    twelve = images(12)
    yield _video("webm/vp8", encoded(twelve, "webm", "libvpx"), twelve)
    yield _video("webm/vp9", encoded(twelve, "webm", "libvpx-vp9"), twelve)
    yield _video("matroska/h264", encoded(twelve, "matroska"), twelve)
    yield _video("mov/h264", encoded(twelve, "mov"), twelve)
    fragments = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    yield _video("mp4/fragments", encoded(twelve, muxer=fragments, seekable=False), twelve)
    yield _video("mp4/head first", head_first(encoded(twelve)), twelve)
    yield _video("mpegts/h264", encoded(twelve, "mpegts"), twelve)
    yield _video("mpegts/mpeg2", encoded(twelve, "mpegts", "mpeg2video", rate=25), twelve, rate=25)
    yield _video("mpeg/mpeg2", encoded(twelve, "mpeg", "mpeg2video", rate=25), twelve, rate=25)
    yield _video("avi/mpeg4", encoded(twelve, "avi", "mpeg4"), twelve)
    jpegs = encoded(twelve, "avi", "mjpeg", pix_fmt="yuvj420p")
    yield _video("avi/mjpeg", jpegs, twelve)
    yield _video("flv/h264", encoded(twelve, "flv", rate=25), twelve, rate=25)
    odd = images(5, (17, 33))
    yield _video("mp4/odd sides", encoded(odd, pix_fmt="yuv444p"), odd)
    palette = [level for place in range(128) for level in (place * 2, 255 - place, place)]
    table = np.array(palette, np.uint8).reshape(128, 3)
    indices = (np.arange(3 * 16 * 24) * 5 % 128).reshape(3, 16, 24)
    moving = gif([(0, 0, frame) for frame in indices], palette, size=(16, 24), transparent=5)
    seen = table[indices]
    seen[indices == 5] = 255
    yield _video("gif/transparent", moving, seen, rate=10, tolerance=0.5)
    still = gif([(0, 0, indices[0])], palette, size=(16, 24))
    yield _video("gif/one frame", still, table[indices[:1]], [0.0], tolerance=0.5)
    alpha = np.full((12, *SIDES, 1), 255, np.uint8)
    alpha[:, :, 32:] = 0
    sheer = np.concatenate([twelve, alpha], axis=3)
    white = twelve.copy()
    white[:, :, 32:] = 255
    yield _video("mov/prores with alpha", encoded(sheer, "mov", "prores_ks", pix_fmt="yuva444p10le"), white)


def _rotations() -> Iterator[CorpusEntry]:
    twelve = images(12)
    for degrees in (90, 180, 270):
        data = encoded(twelve, rotation=degrees)
        yield _video(f"mp4/turned by {degrees} degrees", data, np.rot90(twelve, degrees // 90, axes=(1, 2)))
    yield _video("mov/turned by 90 degrees", encoded(twelve, "mov", rotation=90), np.rot90(twelve, 1, axes=(1, 2)))


def _given() -> Iterator[CorpusEntry]:
    five = images(5)
    listed = list(five)
    yield _video("frames/array", VideoFrames(five, fps=2.0), five, rate=2, tolerance=0)
    yield _video("frames/list of arrays", VideoFrames(listed, fps=2.0), five, rate=2, tolerance=0)
    files = [png(frame) for frame in five]
    yield _video("frames/list of files", VideoFrames(files, fps=2.0), five, rate=2, tolerance=0)
    times = [3.0, 3.5, 3.6, 9.0, 9.25]
    yield _video("frames/timestamps", VideoFrames(five, timestamps=times), five, np.array(times) - 3, tolerance=0)
    yield _video("frames/one", VideoFrames(five[:1], timestamps=[7.0]), five[:1], [0.0], tolerance=0)
    yield _refuses("frames/bare list", listed, "metadata")
    yield _refuses("frames/bare array", five, "metadata")
    yield _refuses("frames/no time", VideoFrames(five), "metadata")
    yield _refuses("frames/two times", VideoFrames(five, fps=2.0, timestamps=times), "metadata")
    yield _refuses("frames/too few timestamps", VideoFrames(five, timestamps=times[:4]), "metadata")
    yield _refuses("frames/timestamps that fall", VideoFrames(five, timestamps=times[::-1]), "metadata")
    yield _refuses("frames/timestamps that stand still", VideoFrames(five, timestamps=[0.0] * 5), "metadata")
    yield _refuses(
        "frames/timestamps of no number", VideoFrames(five, timestamps=[0, 1, 2, 3, float("nan")]), "metadata"
    )
    yield _refuses("frames/fps of 0", VideoFrames(five, fps=0.0), "metadata")
    yield _refuses("frames/fps below 0", VideoFrames(five, fps=-1.0), "metadata")
    yield _refuses("frames/fps without end", VideoFrames(five, fps=float("inf")), "metadata")
    yield _refuses("frames/none", VideoFrames([], fps=2.0), "empty")
    yield _refuses("frames/two sizes", VideoFrames([five[0], five[1][:9]], fps=2.0), "size")
    yield _refuses("frames/a broken file", VideoFrames([files[0], files[1][:60]], fps=2.0), "broken", "format")
    yield _refuses("frames/a number", VideoFrames(3, fps=2.0), "type")
    yield _refuses("frames/floats", VideoFrames(five.astype(np.float32), fps=2.0), "array")
    yield _refuses("frames/three hours", VideoFrames(five, timestamps=[0, 1, 2, 3, 10_800]), "max_video_seconds")


# ---------------------------------------------------------------- streams


def _streams() -> Iterator[CorpusEntry]:
    twelve = images(12)
    yield _video("mp4/with audio", encoded(twelve, audio=True), twelve)
    yield _refuses("mp4/audio only", _tone("mp4", "aac", "fltp"), "format")
    yield _refuses("webm/audio only", _tone("webm", "libopus", "s16"), "format")
    yield _refuses("mp3/audio with a cover", _with_cover(), "format", note="a cover is not a moving image")
    yield _refuses("wav/audio", wav(bytes(2000), rate=8000), "format")
    lossless = encoded(twelve, "mov", "png", pix_fmt="rgb24")
    yield _refuses("mov/a codec that is not decoded", lossless, "codec")


def _tone(container: str, codec: str, format: str) -> bytes:
    levels = tone(9_600, 48_000)
    levels = levels.astype(np.float32) if format == "fltp" else np.rint(levels * 32_767).astype(np.int16)
    return encoded_audio(levels, 48_000, container, codec, format)


def _with_cover() -> bytes:
    """An mp3 after an ID3v2.3 tag with an image. Source: ID3v2.3.0, sections 3.1 and 4.15."""
    image = b"\0image/png\0\x03\0" + png(images(1)[0])
    tag = b"APIC" + struct.pack(">IH", len(image), 0) + image
    size = bytes(len(tag) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + tag + _tone("mp3", "libmp3lame", "s16p")


# ---------------------------------------------------------------- what must be refused


def _broken() -> Iterator[CorpusEntry]:
    twelve = images(12)
    whole = encoded(twelve)
    broken = ("format", "broken", "empty")
    yield _refuses(
        "broken/mp4 without its end", whole[: whole.index(b"moov") - 4], *broken, note="its head is at its end"
    )
    first = head_first(encoded(twelve))
    yield _refuses("broken/mp4 without half of its frames", first[: (first.index(b"mdat") + len(first)) // 2], "broken")
    yield _refuses("broken/mp4 of a head alone", first[: first.index(b"mdat") - 4], *broken)
    yield _refuses("broken/empty", b"", "empty")
    yield _refuses("broken/random", noise(4000, 3), "format")
    yield _refuses("broken/zeros", bytes(4000), "format")
    none = encoded(twelve[:0], muxer={"movflags": "empty_moov+frag_keyframe"})
    yield _refuses("broken/mp4 without frames", none, *broken)
    yield _refuses("broken/mp4 whose frames are noise", _noise(whole), "broken")
    limit = "max_image_pixels"
    yield _refuses("bomb/mp4 whose header promises 65535 x 65535", _huge_entry(whole), limit, "broken")
    vp8 = encoded(images(1), "webm", "libvpx")
    at = vp8.index(b"\x9d\x01\x2a") + 3
    huge = vp8[:at] + struct.pack("<HH", 16_383, 16_383) + vp8[at + 4 :]
    yield _refuses("bomb/webm whose frame is 16383 x 16383", huge, limit, "broken", "size")
    screen = gif([(0, 0, np.zeros((2, 2), int))], [9] * 384, size=(65_535, 65_535))
    yield _refuses("bomb/gif of 65535 x 65535", screen, limit, "broken")
    odd: dict[str, Any] = {"None": None, "a number": 3, "a dict": {}, "an open file": io.BytesIO(whole)}
    for name, value in odd.items():
        yield _refuses(f"type/{name}", value, "type")
    yield _refuses("url/no base64", "data:video/mp4;base64,!!!!", "url")
    yield _refuses("path/missing", "there/is/no/such.mp4", "path")


def _noise(mp4: bytes) -> bytes:
    start, end = mp4.index(b"mdat") + 4, mp4.index(b"moov") - 4
    return mp4[:start] + noise(end - start, 4) + mp4[end:]


def _huge_entry(mp4: bytes) -> bytes:
    at = mp4.index(b"avc1", mp4.index(b"stsd")) + 28  # of the sample entry: width and height
    return mp4[:at] + b"\xff\xff\xff\xff" + mp4[at + 4 :]


def _foreign() -> Iterator[CorpusEntry]:
    named = b"file:///etc/passwd"
    for name, data in {
        "hls playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n" + named + b"\n#EXT-X-ENDLIST\n",
        "concat list": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "dash manifest": b'<?xml version="1.0"?><MPD><Period><BaseURL>' + named + b"</BaseURL></Period></MPD>",
        "session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
        "ismv manifest": b"<SmoothStreamingMedia></SmoothStreamingMedia>",
        "avisynth script": b'AVISource("/etc/passwd")\n',
        "subtitles": b"1\n00:00:00,000 --> 00:00:01,000\nhello\n",
        "jpeg": b"\xff\xd8\xff\xe0" + bytes(200) + b"\xff\xd9",
        "png": png(images(1)[0]),
        "html": b"<!doctype html><title>404</title>",
        "text": b"an ordinary sentence, longer than forty characters, and no path",
    }.items():
        yield _refuses(f"foreign/{name}", data, "format", note="no other file is opened")
    # A movie that says that its frames lie in another file.
    elsewhere = box(b"url ", b"\0\0\0\0" + named + b"\0")
    whole = encoded(images(3))
    at = whole.index(b"url ")
    own = whole[at - 4 : at + 8]
    assert own == box(b"url ", b"\0\0\0\1")
    grown = len(elsewhere) - len(own)
    data = whole[: at - 4] + elsewhere + whole[at + 8 :]
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        place = data.index(kind) - 4
        size = int.from_bytes(data[place : place + 4], "big") + grown
        data = data[:place] + struct.pack(">I", size) + data[place + 4 :]
    yield _video("mp4/frames said to lie in another file", data, images(3), note="they are read here, and nowhere else")
