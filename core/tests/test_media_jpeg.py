"""JPEG files without their end marker: decoded where every pixel is there, refused where one is missing."""

from __future__ import annotations

import io
import random
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin.errors import MediaError
from mm_plugin.media import VideoFrames, open_image, open_video
from mm_plugin.settings import Settings

END = b"\xff\xd9"
RANDOM = np.random.default_rng(0)
SUBJECTS = {
    "blocks": np.kron(RANDOM.integers(0, 255, (5, 7, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8)),
    "noise": RANDOM.integers(0, 255, (37, 43, 3), dtype=np.uint8),
    "one color": np.full((33, 47, 3), 130, np.uint8),
    "one pixel": np.full((1, 1, 3), 90, np.uint8),
}
WRITERS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "fine": {"quality": 100, "subsampling": 0},
    "coarse": {"quality": 15},
    "own tables": {"optimize": True},
    "intervals of a block": {"restart_marker_blocks": 1},
    "intervals of three": {"restart_marker_blocks": 3, "quality": 95},
    "intervals of a row": {"restart_marker_rows": 1},
    "progressive": {"progressive": True},
    "progressive, fine": {"progressive": True, "quality": 100},
    "progressive, intervals": {"progressive": True, "restart_marker_rows": 1},
}
MODES = ("RGB", "L", "CMYK")


def written(subject: str, mode: str, writer: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(SUBJECTS[subject]).convert(mode).save(file, "JPEG", **WRITERS[writer])
    assert file.getvalue().endswith(END)
    return file.getvalue()


def reference(data: bytes) -> np.ndarray:
    """The complete file, by Pillow alone."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def pixels(data: bytes) -> np.ndarray:
    return open_image(data, path="images[0]", settings=Settings()).decode().pixels


def pixels_or_none(data: bytes) -> np.ndarray | None:
    try:
        return pixels(data)
    except MediaError:
        return None


ALL = [(subject, mode, writer) for subject in SUBJECTS for mode in MODES for writer in WRITERS]


@pytest.mark.parametrize(("subject", "mode", "writer"), ALL)
def test_a_file_without_its_end_marker_is_decoded(subject: str, mode: str, writer: str) -> None:
    data = written(subject, mode, writer)
    expected = reference(data)
    for ending in (b"", END[:1], END, END + b"garbage", b"\xff" + END):
        assert np.array_equal(pixels(data[:-2] + ending), expected), ending


@pytest.mark.parametrize(("subject", "mode", "writer"), ALL)
def test_a_file_that_is_cut_is_decoded_only_if_no_pixel_changes(subject: str, mode: str, writer: str) -> None:
    data = written(subject, mode, writer)
    expected, head = reference(data), data.rindex(b"\xff\xda")
    cuts = [*range(len(data) - 3, max(head, len(data) - 16), -1)]
    cuts += random.Random(0).sample(range(2, len(data) - 3), min(6, len(data) - 5))
    found = [(cut, pixels_or_none(data[:cut])) for cut in cuts]
    wrong = [len(data) - cut for cut, one in found if one is not None and not np.array_equal(one, expected)]
    assert not wrong
    assert any(one is None for _, one in found)


@pytest.mark.parametrize("writer", ["progressive", "progressive, fine", "progressive, intervals"])
def test_a_progressive_file_without_its_last_scans_is_refused(writer: str) -> None:
    data = written("blocks", "RGB", writer)
    starts = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    assert len(starts) > 5
    for start in starts:
        # A scan's Huffman table stands before it; without the marker after it, the file ends with a complete scan.
        table = data.rfind(b"\xff\xc4", 0, start)
        end = table if table > max([0, *(other for other in starts if other < start)]) else start
        assert pixels_or_none(data[:end]) is None
    # With the marker it is a whole file, however coarse, as every decoder takes it.
    assert pixels(data[: starts[-1]] + END).shape == (40, 56, 3)


# ------------------------------------------------------------------ a scan for each component, by hand


def segment(kind: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content


def scan(component: int, levels: Sequence[int]) -> bytes:
    """DC differences of blocks, each a category of four bits and its digits, and a bit that ends the block."""
    bits, before = "", 0
    for level in levels:
        step, before = level - before, level
        size = abs(step).bit_length()
        bits += f"{size:04b}" + (f"{step if step > 0 else step + (1 << size) - 1:0{size}b}" if size else "") + "0"
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return segment(0xDA, bytes((1, component, 0, 0, 63, 0))) + data


def planes(components: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """The head of a file of two blocks, 8 x 16 pixels, then a scan for each component. Source: ITU-T T.81, annex B."""
    count = len(components)
    frame = struct.pack(">BHHB", 8, 8, 16, count) + b"".join(bytes((number + 1, 0x11, 0)) for number in range(count))
    yield (
        b"\xff\xd8"
        + segment(0xDB, b"\0" + bytes([8] * 64))
        + segment(0xC0, frame)
        + segment(0xC4, b"\x00" + bytes([0, 0, 0, 12] + [0] * 12) + bytes(range(12)))
        + segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\0")
    )
    for number, levels in enumerate(components):
        yield scan(number + 1, levels)


def test_a_file_with_a_scan_for_each_component() -> None:
    parts = list(planes([(50, -70), (30, 0), (-20, 40)]))
    whole = b"".join(parts)
    # A DC of 1 in a table of 8 is one level. Source: JFIF, conversion of YCbCr.
    expected = []
    for luma, blue, red in ((50, 30, -20), (-70, 0, 40)):
        y = 128 + luma
        expected.append([y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue])
    for ending in (END, b""):
        found = pixels(whole + ending)
        assert np.abs(found[0, [0, 15]] - np.clip(expected, 0, 255)).max() <= 1
    for missing in (1, 2, 3):
        assert pixels_or_none(b"".join(parts[:missing])) is None
    for cut in range(1, len(parts[3])):
        assert pixels_or_none(whole[:-cut]) is None


# ------------------------------------------------------------------ elsewhere


def test_frames_of_a_video_too() -> None:
    data = written("blocks", "RGB", "progressive")
    source = open_video(VideoFrames([data[:-2], data], fps=1), path="videos[0]", settings=Settings())
    rules: Any = type("Rules", (), {})()
    first, second = source.decode(source.size(rules)).frames
    assert np.array_equal(first, second)
    cut = open_video(VideoFrames([data[:-40]], fps=1), path="videos[0]", settings=Settings())
    with pytest.raises(MediaError):
        list(cut.decode(cut.size(rules)).frames)


def test_a_file_of_countless_segments_is_not_followed_without_end() -> None:
    data = written("blocks", "RGB", "baseline")
    comments = b"\xff\xfe\0\2" * 200_000
    began = time.process_time()
    assert pixels_or_none(data[:2] + comments + data[2:-2]) is None
    assert time.process_time() - began < 10
    assert np.array_equal(pixels(data[:2] + comments[:400] + data[2:-2]), reference(data))


@pytest.mark.parametrize(
    "data", [b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xda\0\2", b"\xff\xd8\xff\xc0\0\2"]
)
def test_a_stump_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError):
        pixels(data)
