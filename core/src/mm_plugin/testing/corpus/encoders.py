"""Videos and audio inputs written with PyAV, equal bytes each time. Reads nothing; needs the extra `video`."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mm_plugin.media.pyav import import_av

SIDES = (48, 64)  # height and width of a frame
HERTZ = 440.0


def images(count: int, size: tuple[int, int] = SIDES) -> np.ndarray:
    """Frames [n, height, width, 3] that tell themselves apart: a gray that grows, one that falls, and red in a corner."""
    height, width = size
    out = np.empty((count, height, width, 3), np.uint8)
    for place in range(count):
        out[place, :, : width // 2] = 40 + place * 150 // max(1, count - 1)
        out[place, :, width // 2 :] = 210 - place * 150 // max(1, count - 1)
        out[place, : height // 2, : width // 4] = (200, 40, 40)
    return out


def encoded(
    frames: np.ndarray,
    container: str = "mp4",
    codec: str = "libx264",
    *,
    rate: Fraction | int = 24,
    ticks: Sequence[int] | None = None,
    base: Fraction | None = None,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
    rotation: int = 0,
    audio: bool = False,
    seekable: bool = True,
) -> bytes:
    """Frames as a file, equal bytes each time.

    Args:
        frames: [n, height, width, 3] or [n, height, width, 4] uint8.
        container: FFmpeg's name of the format.
        codec: FFmpeg's name of the encoder.
        rate: frames per second.
        ticks: when each frame is shown, in units of `base`; one after another where None.
        base: seconds of a tick.
        pix_fmt: FFmpeg's name of the layout of a pixel.
        options: of the encoder.
        muxer: of the container.
        rotation: degrees counterclockwise by which a viewer must turn the frames.
        audio: whether a tone goes with it.
        seekable: whether the muxer may go back to write into the head what it learns at the end.
    """
    av = import_av()
    buffer: Any = io.BytesIO()
    if not seekable:
        buffer = _Pipe()
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact", **(muxer or {})}) as out:
        stream: Any = out.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pix_fmt
        stream.codec_context.thread_count = 1
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        stream.options = {**_ENCODERS.get(codec, {}), **(options or {})}
        if base is not None:
            stream.codec_context.time_base = base
        if rotation:
            stream.set_display_rotation(rotation)
        if audio:
            track: Any = out.add_stream("aac", rate=48_000, layout="mono")
            track.codec_context.flags |= av.codec.context.Flags.bitexact
        out.start_encoding()
        if audio:
            _write_audio(out, track, tone(24_576, 48_000).astype(np.float32), "fltp")
        for place, pixels in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24")
            shown.pts = place if ticks is None else ticks[place]
            shown.time_base = base or 1 / Fraction(rate)
            out.mux(stream.encode(shown))
        out.mux(stream.encode(None))
        data = None if seekable else buffer
    return bytes(buffer.getvalue()) if data is None else bytes(buffer.data)


def head_first(mp4: bytes) -> bytes:
    """An mp4 file with its head moved to its front."""
    at, start = mp4.index(b"moov") - 4, mp4.index(b"mdat") - 4
    head = bytearray(mp4[at : at + int.from_bytes(mp4[at : at + 4], "big")])
    place = head.find(b"stco")
    while place >= 0:  # every offset into the frames grows by the head's length
        count = int.from_bytes(head[place + 8 : place + 12], "big")
        for entry in range(place + 12, place + 12 + 4 * count, 4):
            struct.pack_into(">I", head, entry, int.from_bytes(head[entry : entry + 4], "big") + len(head))
        place = head.find(b"stco", place + 4)
    return mp4[:start] + bytes(head) + mp4[start:at]


class _Pipe:
    """A file that only grows."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


_ENCODERS: dict[str, dict[str, str]] = {
    "libx264": {"crf": "8", "x264-params": "log-level=none:threads=1", "preset": "veryfast"},
    "libvpx": {"crf": "8", "b": "2M", "deadline": "good", "cpu-used": "5"},
    "libvpx-vp9": {"crf": "12", "b": "0", "cpu-used": "8", "row-mt": "0"},
    "mpeg4": {"qscale": "2", "flags": "+qscale", "global_quality": "236"},
    "mpeg2video": {"flags": "+qscale", "global_quality": "236"},
    "mjpeg": {"flags": "+qscale", "global_quality": "236"},
}


def tone(count: int, rate: int, channels: int = 1) -> np.ndarray:
    """A tone [num_samples, channels] float64 of half the full scale, each channel weaker than the one before."""
    wave = np.sin(np.arange(count) * (2 * np.pi * HERTZ / rate)) / 2
    found: np.ndarray = wave[:, None] / np.arange(1, channels + 1)
    return found


def encoded_audio(
    levels: np.ndarray, rate: int, container: str, codec: str, format: str, options: dict[str, str] | None = None
) -> bytes:
    """Levels [num_samples, channels] as a file, equal bytes each time.

    Args:
        levels: in the type of `format`.
        rate: samples per second.
        container: FFmpeg's name of the format.
        codec: FFmpeg's name of the encoder.
        format: FFmpeg's name of the layout of a sample.
        options: of the encoder.
    """
    av = import_av()
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}[levels.shape[1]]
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=layout, options=options or {})
        stream.codec_context.format = format
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        out.start_encoding()
        _write_audio(out, stream, levels, format)
    return buffer.getvalue()


def _write_audio(out: Any, stream: Any, levels: np.ndarray, format: str) -> None:
    av = import_av()
    size = stream.codec_context.frame_size or 1024
    layout = stream.codec_context.layout.name
    for start in range(0, len(levels), size):
        part = levels[start : start + size]
        packed = part.T if format.endswith("p") else part.reshape(1, -1)
        piece = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), format=format, layout=layout)
        piece.sample_rate, piece.pts = stream.codec_context.sample_rate, start
        out.mux(stream.encode(piece))
    out.mux(stream.encode(None))
