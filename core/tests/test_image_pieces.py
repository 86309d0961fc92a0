"""Image files of nothing but pieces: refused once they have more than an image has, and read while they have fewer."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import urllib.parse
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_plugin import MediaError, Settings
from mm_plugin.media import open_image, sources
from mm_plugin.media.image_pieces import MOST_PIECES


def encoded(name: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((16, 12), 50).convert(mode).save(file, name)
    return file.getvalue()


def inserted(data: bytes, at: int, piece: bytes) -> Callable[[int], bytes]:
    return lambda count: data[:at] + piece * count + data[at:]


def png_chunk(kind: bytes) -> bytes:
    return struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))


def webp(count: int) -> bytes:
    return WEBP[:4] + struct.pack("<I", len(WEBP) - 8 + 8 * count) + WEBP[8:] + b"prIv\0\0\0\0" * count


JPEG, PNG, WEBP, JPEG2000, AVIF = (encoded(name) for name in ("JPEG", "PNG", "WEBP", "JPEG2000", "AVIF"))
FREE = struct.pack(">I", 8) + b"free"
PPM = b"P6\n%s2 2\n255\n" + bytes(12)
MADE: dict[str, Callable[[int], bytes]] = {
    "jpeg fill bytes": inserted(JPEG, 2, b"\xff"),
    "jpeg fill bytes after the scan": inserted(JPEG, len(JPEG) - 2, b"\xff"),
    "jpeg comments": inserted(JPEG, 2, b"\xff\xfe\0\2"),
    "jpeg application segments": inserted(JPEG, 2, b"\xff\xe5\0\2"),
    "jpeg empty tables": inserted(JPEG, 2, b"\xff\xdb\0\2"),
    "jpeg restarts": inserted(JPEG, 2, b"\xff\xd0"),
    "png chunks": inserted(PNG, 33, png_chunk(b"prIv")),
    "png empty data": inserted(PNG, 33, png_chunk(b"IDAT")),
    "png chunks after the pixels": inserted(PNG, len(PNG) - 12, png_chunk(b"prIv")),
    "webp chunks": webp,
    "jp2 boxes": inserted(JPEG2000, JPEG2000.index(b"jp2h") - 4, FREE),
    "avif boxes": inserted(AVIF, len(AVIF), FREE),
    "ppm comments": lambda count: PPM % (b"#\n" * (count // 2)),
    "ppm spaces": lambda count: PPM % (b" " * count),
}  # fmt: skip


def pixels(data: bytes | str) -> np.ndarray:
    return open_image(data, path="images[0]", settings=Settings()).decode().pixels


@pytest.mark.parametrize("name", MADE)
def test_more_pieces_than_an_image_has_are_refused(name: str) -> None:
    with pytest.raises(MediaError, match="at most 65536 pieces") as caught:
        pixels(MADE[name](MOST_PIECES + 2))
    assert caught.value.reason == "broken"


@pytest.mark.parametrize("name", MADE)
def test_many_pieces_change_nothing(name: str) -> None:
    plain = pixels(MADE[name](0))
    assert np.array_equal(plain, pixels(MADE[name](2000)))


def test_scans_of_a_jpeg_are_counted() -> None:
    file = io.BytesIO()
    Image.effect_noise((16, 12), 50).convert("RGB").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    start, scan, end = data[:last], data[last:-2], data[-2:]
    others = start.count(b"\xff\xda")
    assert pixels(start + scan * (256 - others) + end).shape == (12, 16, 3)
    with pytest.raises(MediaError, match="at most 256 scans of a JPEG") as caught:
        pixels(start + scan * (257 - others) + end)
    assert caught.value.reason == "broken"


@pytest.mark.parametrize("after", [b"\xff\xda\0\2" * 300, b"\xff" * (MOST_PIECES + 2)], ids=["scans", "fill bytes"])
@pytest.mark.parametrize("within", [b"", b"\xff\xe1\0\6\xff\xd9\xff\xda"], ids=["plain", "thumbnail"])
def test_what_follows_a_jpeg_is_not_counted(after: bytes, within: bytes) -> None:
    """A camera appends a video, and a thumbnail has an end of its own."""
    data = JPEG[:2] + within + JPEG[2:]
    assert np.array_equal(pixels(data + after), pixels(JPEG))
    with pytest.raises(MediaError) as caught:
        pixels(data[:-2] + after + data[-2:])
    assert caught.value.reason == "broken"


@pytest.mark.parametrize(
    "body", [b"\1\1", b"\0\0", b"\0\2\0\0", b"\0\3\1\1\1\0"], ids=["runs", "rows", "moves", "indices"]
)
def test_runs_of_a_bitmap_are_counted(body: bytes) -> None:
    body *= (1 << 20) + 1
    info = struct.pack(
        "<IiiHHIIiiII", 40, 2000, 2_000_000 if body[:2] == b"\0\0" else 10_000, 1, 8, 1, len(body), 0, 0, 2, 0
    )
    if body[:2] == b"\0\0":
        info = struct.pack("<IiiHHIIiiII", 40, 1, 2_000_000, 1, 8, 1, len(body), 0, 0, 2, 0)
    data = b"BM" + struct.pack("<IHHI", 62 + len(body), 0, 0, 62) + info + bytes(8) + body
    with pytest.raises(MediaError, match="at most 1048576 runs") as caught:
        pixels(data)
    assert caught.value.reason == "broken"


# ---------------------------------------------------------------- percent escapes


@given(
    st.lists(st.sampled_from(["%", "%4", "%41", "%fF", "a", "g", "é", "€", "+", " "]), max_size=12), st.integers(3, 9)
)
def test_escapes_are_those_of_urllib_wherever_a_piece_ends(parts: list[str], piece: int) -> None:
    text, whole = "".join(parts), sources._PIECE
    sources._PIECE = piece
    try:
        assert sources._unescape(text) == urllib.parse.unquote_to_bytes(text)
    finally:
        sources._PIECE = whole


def test_a_long_url_of_escapes_takes_little_more_than_its_bytes() -> None:
    data = PNG + bytes(4 << 20)
    text = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    tracemalloc.start()
    try:
        shown = pixels(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(shown, pixels(PNG))
    assert np.array_equal(shown, pixels("data:image/png;base64," + base64.b64encode(PNG).decode()))
    assert peak < 8 * len(data)
