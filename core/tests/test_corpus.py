"""The corpus: every entry, by every way in, ends as it must; corrupted ones end well; and nothing is allocated on a file's word."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.items import Modality
from mm_plugin.media import image_headers, open_audio, open_image, open_video
from mm_plugin.settings import Settings
from mm_plugin.testing import corpus
from mm_plugin.testing.corpus import CorpusEntry
from mm_plugin.testing.corpus.formats import box, png, tiff, wav

pytest.importorskip("av")

OPENERS: dict[Modality, Callable[..., Any]] = {
    Modality.IMAGE: open_image,
    Modality.VIDEO: open_video,
    Modality.AUDIO: open_audio,
}
IMAGES = [
    "jpeg", "png", "gif", "webp", "tiff", "bmp", "ico", "ppm", "pgm", "pbm", "pfm", "jpeg2000", "avif", "PIL", "numpy", "torch",
    "broken", "type", "url", "path", "bomb", "heic", "foreign", "polyglot",
]  # fmt: skip
VIDEOS = ["mp4", "webm", "matroska", "mov", "mpegts", "mpeg", "avi", "flv", "gif", "frames", "mp3", "wav"]
VIDEOS += ["broken", "bomb", "type", "url", "path", "foreign"]
AUDIOS = ["wav", "flac", "m4a", "aiff", "mp3", "ogg", "webm", "mp4", "samples", "bare", "ts", "flv", "avi"]
AUDIOS += ["broken", "bomb", "type", "url", "path", "foreign"]
CASES = {
    "jpeg": ("1.1", "1.2", "1.6"), "png": ("1.2", "1.4"), "tiff": ("1.1",), "PIL": ("1.2", "1.4"), "numpy": ("1.12",),
    "torch": ("1.6", "1.12"), "broken": ("1.7",), "bomb": ("1.8",), "url": ("1.13",),
}  # fmt: skip


def kinds(names: list[str], marked: bool = False) -> list[Any]:
    return [
        pytest.param(name, id=name, marks=[pytest.mark.case(case) for case in CASES.get(name, ())] if marked else ())
        for name in names
    ]


class World:
    """Every entry, made once, by the first word of its name."""

    def __init__(self) -> None:
        self.images, self.videos, self.audios = list(corpus.images()), list(corpus.videos()), list(corpus.audios())

    def of(self, entries: Iterable[CorpusEntry], kind: str) -> list[CorpusEntry]:
        found = [entry_ for entry_ in entries if entry_.name.split("/")[0] == kind]
        assert found
        return found


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def complaints(entries: Iterable[CorpusEntry], folder: Path) -> list[str]:
    """What is wrong with any form of these."""
    settings = Settings(media_root=str(folder))
    found = []
    for entry_ in entries:
        open_media = OPENERS[entry_.modality]
        digests = set()
        for form, value in corpus.forms(entry_, folder):
            try:
                corpus.check(entry_, value=value, settings=settings)
                if isinstance(entry_.value, bytes) and entry_.value and not form.startswith("PIL"):
                    digests.add(open_media(value, path="x", settings=settings).digest())
            except Exception as error:
                found.append(f"{form}: {type(error).__name__}: {error}")
        if len(digests) > 1:
            found.append(f"{entry_.name}: {len(digests)} digests of equal bytes")
    return found


# ---------------------------------------------------------------- every entry, every way in


@pytest.mark.parametrize("kind", kinds(IMAGES, marked=True))
def test_odd_images_are_read_or_refused_as_they_must(kind: str, world: World, tmp_path: Path) -> None:
    assert complaints(world.of(world.images, kind), tmp_path) == []


@pytest.mark.parametrize("kind", kinds(VIDEOS))
def test_odd_videos_are_read_or_refused_as_they_must(kind: str, world: World, tmp_path: Path) -> None:
    assert complaints(world.of(world.videos, kind), tmp_path) == []


@pytest.mark.parametrize("kind", kinds(AUDIOS))
def test_odd_audios_are_read_or_refused_as_they_must(kind: str, world: World, tmp_path: Path) -> None:
    assert complaints(world.of(world.audios, kind), tmp_path) == []


def test_there_are_enough_and_all_of_them_are_tried(world: World) -> None:
    for entries, tried, least in ((world.images, IMAGES, 60), (world.videos, VIDEOS, 15), (world.audios, AUDIOS, 10)):
        names = Counter(entry_.name for entry_ in entries)
        assert len(names) >= least
        assert set(names.values()) == {1}
        assert {name.split("/")[0] for name in names} == set(tried)
        assert all(bool(entry_.refused) != (entry_.expected is not None) for entry_ in entries)
        assert len([entry_ for entry_ in entries if entry_.expected is not None]) >= least // 2


def test_they_are_equal_each_time(world: World) -> None:
    def files(entries: Iterable[CorpusEntry]) -> dict[str, bytes]:
        return {entry_.name: entry_.value for entry_ in entries if isinstance(entry_.value, bytes)}

    for before, make in ((world.images, corpus.images), (world.videos, corpus.videos), (world.audios, corpus.audios)):
        assert files(make()) == files(before)


# ---------------------------------------------------------------- the checks can fail


def changed(entry_: CorpusEntry, **fields: Any) -> CorpusEntry:
    return msgspec.structs.replace(entry_, expected=msgspec.structs.replace(entry_.expected, **fields))


def named(entries: Iterable[CorpusEntry], name: str) -> CorpusEntry:
    (found,) = [entry_ for entry_ in entries if entry_.name == name]
    return found


def test_a_wrong_image_is_caught(world: World) -> None:
    right = named(world.images, "png/RGB")
    corpus.check(right)
    pixels = right.expected.pixels.copy()
    pixels[7, 7, 1] += 1
    with pytest.raises(AssertionError, match="png/RGB: off by 1 levels"):
        corpus.check(changed(right, pixels=pixels))
    with pytest.raises(AssertionError, match=r"png/RGB: \(16, 24, 3\), not \(15, 24, 3\)"):
        corpus.check(changed(right, pixels=pixels[1:]))


def test_a_wrong_video_is_caught(world: World) -> None:
    right = named(world.videos, "mp4/h264")
    corpus.check(right)
    frames, times = right.expected.frames, right.expected.timestamps
    with pytest.raises(AssertionError, match="frame 0 is off by"):
        corpus.check(changed(right, frames=frames[::-1]))
    with pytest.raises(AssertionError, match="frame 0 is off by"):
        corpus.check(changed(right, frames=frames[:, ::-1]))
    with pytest.raises(AssertionError, match="12 frames of 48 x 64, not 11"):
        corpus.check(changed(right, frames=frames[1:], timestamps=times[1:]))
    with pytest.raises(AssertionError, match="times are off"):
        corpus.check(changed(right, timestamps=times * 1.01))


def test_a_wrong_audio_is_caught(world: World) -> None:
    right = named(world.audios, "wav/16 bits")
    corpus.check(right)
    with pytest.raises(AssertionError, match="samples are off by"):
        corpus.check(changed(right, samples=right.expected.samples * 1.01))
    with pytest.raises(AssertionError, match="2000 samples, not 1999"):
        corpus.check(changed(right, num_samples=1999))
    with pytest.raises(AssertionError, match="a tone of"):
        corpus.check(changed(right, samples=None, hertz=500.0))


def test_a_wrong_end_is_caught(world: World) -> None:
    read, refused = named(world.images, "png/RGB"), named(world.images, "broken/random")
    assert isinstance(corpus.check(refused), MediaError)
    with pytest.raises(AssertionError, match="png/RGB: it was not refused"):
        corpus.check(msgspec.structs.replace(read, expected=None, refused=("format",)))
    with pytest.raises(AssertionError, match="broken/random: expected empty, got format"):
        corpus.check(msgspec.structs.replace(refused, refused=("empty",)))
    with pytest.raises(AssertionError, match="broken/random: it was refused"):
        corpus.check(msgspec.structs.replace(read, name=refused.name, value=refused.value))


@pytest.mark.parametrize("fault", ["none", "raises", "refuses", "takes"])
def test_a_sweep_finds_a_plugin_that_ends_otherwise(fault: str, world: World) -> None:
    entries = [named(world.images, name) for name in ("png/RGB", "broken/random", "png/1 x 300")]
    tried: list[Any] = []

    def prepare(modality: Modality, value: Any) -> None:
        tried.append(value)
        if fault == "raises" and value is entries[1].value:
            raise ZeroDivisionError
        if fault == "refuses" and value is entries[0].value:
            raise MediaError("images[0]: no", path="images[0]")
        if value is entries[2].value or (fault != "takes" and value is entries[1].value):
            raise MediaError("images[0]: no", path="images[0]")

    plugin: Any = SimpleNamespace(spec=SimpleNamespace(modalities=(Modality.IMAGE,)), prepare_item=prepare)
    reported = {
        "raises": "broken/random ended in ZeroDivisionError",
        "refuses": "png/RGB was refused",
        "takes": "broken/random was not refused",
    }
    if fault == "none":
        assert corpus.sweep(plugin, [*entries, world.videos[0]], may_refuse=["png/1 x 300"]) == ["png/RGB"]
        assert len(tried) == 3
    else:
        with pytest.raises(AssertionError, match=reported[fault]):
            corpus.sweep(plugin, entries, may_refuse=["png/1 x 300"])


# ---------------------------------------------------------------- nothing is allocated on a file's word

# Address space, not only what is touched: an allocation on a header's word fails here even if nobody ever writes into it.
FENCED = """
import json, resource, sys
import numpy, torch, PIL.Image
from mm_plugin.media import images
from mm_plugin.media import open_image
from mm_plugin.settings import Settings
from mm_plugin.testing import corpus
PIL.Image.init()
entries = list(corpus.images())
bombs = [entry for entry in entries if entry.name.startswith("bomb/") or "claims" in entry.name]
usual = {entry.name.split("/")[0]: entry for entry in entries if entry.expected is not None}
for entry in usual.values():
    corpus.check(entry)  # whatever is loaded once
space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (space + (32 << 20), space + (32 << 20)))

def failed():
    found = []
    for entry in bombs:
        try:
            corpus.check(entry)
        except AssertionError as error:
            found.append(str(error))
    return found

as_it_is = failed()
# Without the checks of what lies within a file.
images.inner_sizes = lambda data: ()
images.ImageSource._check_tiles = lambda *a: None
print(json.dumps({"bombs": len(bombs), "as it is": as_it_is, "without checks": failed()}))
"""


@pytest.fixture(scope="module")
def fenced() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", FENCED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.case("1.8")
def test_bombs_are_refused_with_32_mb_of_memory_to_spare(fenced: dict[str, Any]) -> None:
    assert fenced["bombs"] >= 15
    assert fenced["as it is"] == []


@pytest.mark.case("1.8")
def test_the_fence_can_be_hit(fenced: dict[str, Any]) -> None:
    assert len(fenced["without checks"]) >= 3


@pytest.mark.case("1.8")
def test_a_canvas_over_the_setting_is_not_made(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Pillow makes the canvas of a WebP as it opens the file, and compares its size with a limit of its own."""
    from PIL import WebPImagePlugin

    data = named(world.images, "webp/animated, the first frame").value
    opened: list[int] = []
    decoder = WebPImagePlugin._webp.WebPAnimDecoder
    monkeypatch.setattr(
        WebPImagePlugin, "_webp", SimpleNamespace(WebPAnimDecoder=lambda data: opened.append(1) or decoder(data))
    )
    with pytest.raises(LimitError):
        open_image(data, path="x", settings=Settings(max_image_pixels=383)).probe()
    assert opened == []
    open_image(data, path="x", settings=Settings(max_image_pixels=384)).probe()
    assert opened == [1]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("webp/lossless", {(16, 24)}),
        ("webp/lossy, flat", {(16, 24)}),
        ("webp/animated, the first frame", {(16, 24)}),
        ("avif/nearly lossless", {(16, 24)}),
        ("avif/animated, the first frame", {(16, 24)}),
        ("jpeg2000/lossless", {(16, 24)}),
        ("jpeg2000/bare codestream", {(16, 24)}),
        ("ico/two sizes, the largest", {(8, 8), (16, 16)}),
        ("ico/PNG inside", {(16, 16)}),
        ("png/RGB", set()),
    ],
)
def test_inner_sizes_are_those_of_the_images_within(name: str, sizes: set[tuple[int, int]], world: World) -> None:
    assert set(image_headers.inner_sizes(named(world.images, name).value)) == sizes


@pytest.mark.parametrize("pieces", [65_535, 3])
def test_an_avif_in_many_pieces_is_not_put_together_without_end(pieces: int) -> None:
    """Extents of no stated length, each of which is the whole file."""
    item = struct.pack(">3H", 1, 0, pieces)  # no field of an extent has any bits
    location = box(b"iloc", struct.pack(">I2BH", 0, 0, 0, 1), item)
    data = box(b"ftyp", b"avif\0\0\0\0avif") + box(b"meta", bytes(4), location) + box(b"mdat", bytes(100_000))

    def refuse() -> None:
        with pytest.raises(MediaError, match="too many pieces"):
            list(image_headers.inner_sizes(data))

    assert traced(refuse) < 3_000_000


def test_an_avif_of_many_units_is_not_followed_without_end() -> None:
    item = struct.pack(">3H", 1, 0, 1) + struct.pack(">2I", 0, 0)
    location = box(b"iloc", struct.pack(">I2BH", 0, 0x44, 0, 1), item)
    head = box(b"ftyp", b"avif\0\0\0\0avif")
    # The file from its beginning on is not an AV1 stream, so that only the item that lies in `mdat` counts.
    start = len(head) + len(box(b"meta", bytes(4), location)) + 8
    location = location[:-8] + struct.pack(">2I", start, 0)
    data = head + box(b"meta", bytes(4), location) + box(b"mdat", b"\x12\0" * 70_000)
    with pytest.raises(MediaError, match="too many pieces"):
        list(image_headers.inner_sizes(data))


@pytest.mark.parametrize("flags", range(8))
def test_the_sequence_header_is_read_in_its_long_form_too(flags: int) -> None:
    """Source: AV1 specification, section 5.5.1; timing, decoder model and display delay in all combinations that there are."""
    timing, model, delay = flags & 1, flags >> 1 & 1, flags >> 2 & 1
    bits = "000" + "0" + "0" + str(timing)
    if timing:
        bits += f"{1:032b}{25:032b}" + "1" + "00101" + str(model)  # equal intervals, of 5 ticks - 1
        if model:
            bits += f"{9:05b}{1:032b}{9:05b}{9:05b}"
    bits += str(delay) + f"{1:05b}"
    for level in (8, 3):
        bits += f"{0:012b}{level:05b}" + ("1" if level > 7 else "")
        if timing and model:
            bits += "1" + "0" * 20 + "1"
        if delay:
            bits += "1" + "0110"
    bits += f"{10:04b}{8:04b}" + f"{1279:011b}{479:09b}" + "0" * 40
    bits += "0" * (-len(bits) % 8)
    header = int(bits, 2).to_bytes(len(bits) // 8, "big")
    item = b"\x12\0" + bytes([0x0A, len(header)]) + header
    head = box(b"ftyp", b"avif\0\0\0\0avif")
    entry = struct.pack(">I2BH", 0, 0x44, 0, 1) + struct.pack(">3H", 1, 0, 1)
    start = len(head) + len(box(b"meta", bytes(4), box(b"iloc", entry, bytes(8)))) + 8
    meta = box(b"meta", bytes(4), box(b"iloc", entry, struct.pack(">2I", start, len(item))))
    assert list(image_headers.inner_sizes(head + meta + box(b"mdat", item))) == [(480, 1280)]


def test_a_file_of_16_gib_is_refused_after_its_first_bytes(tmp_path: Path) -> None:
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(1 << 34)
    settings = Settings(media_root=str(tmp_path), max_media_bytes=100_000)
    peak = traced(lambda: refused_by("max_media_bytes", "long.png", settings))
    assert peak < 200_000


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64," + "A" * 8_000_000,
        "data:," + "A" * 8_000_000,
        "A" * 8_000_000,
        "data:," + "%41" * 3_000_000,
    ],
    ids=["base64", "percent", "bare", "escapes"],
)
def test_long_text_is_refused_before_it_is_copied(text: str) -> None:
    assert traced(lambda: refused_by("max_media_bytes", text, Settings(max_media_bytes=100_000))) < 50_000


@pytest.mark.parametrize("text", ["A" * 60 + " " * 300_000 + "!", "=" * 300_000, "A" * 300_000 + "=" * 5])
def test_text_that_is_nearly_base64_takes_no_quadratic_time(text: str) -> None:
    # Tried from each of its places, 300,000 spaces would be 45 thousand million steps.
    with pytest.raises(MediaError):
        open_image(text, path="x", settings=Settings())


def test_accepted_text_is_held_a_few_times_over_and_no_more(world: World) -> None:
    data = wav(bytes(3_000_000), rate=16_000)
    text = next(
        value
        for form, value in corpus.forms(msgspec.structs.replace(world.audios[0], value=data), "/tmp")
        if form == "base64"
    )
    settings = Settings(max_media_bytes=len(data))
    assert traced(lambda: open_audio(text, path="x", settings=settings)) < 4 * len(data)


def refused_by(setting: str, value: Any, settings: Settings) -> None:
    with pytest.raises(LimitError) as caught:
        open_image(value, path="x", settings=settings)
    assert caught.value.setting == setting


def traced(call: Callable[[], Any]) -> int:
    """Bytes that Python allocated at most while this ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_released_memory_is_refused() -> None:
    view = memoryview(png(np.zeros((2, 2, 3), np.uint8)))
    view.release()
    with pytest.raises(MediaError, match="released"):
        open_image(view, path="images[0]", settings=Settings())


# ---------------------------------------------------------------- HEIC


def test_heic_is_refused_by_the_name_of_what_reads_it(world: World) -> None:
    error = corpus.check(named(world.images, "heic/no opener"))
    assert "pillow-heif" in str(error)


def test_heic_is_read_where_an_opener_is_registered(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """A stand-in for pillow-heif: an opener of that name, which reads what lies after the head as a TIFF."""
    from PIL import TiffImagePlugin

    heic = named(world.images, "heic/no opener").value
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    body = {256: 5, 257: 4, 258: [8, 8, 8], 259: 1, 262: 2, 277: 3, 278: 4}
    data = heic + tiff(pixels.tobytes(), body)

    def factory(file: Any, name: Any) -> Any:
        return TiffImagePlugin.TiffImageFile(io.BytesIO(file.read()[len(heic) :]))

    Image.init()
    monkeypatch.setitem(Image.OPEN, "HEIF", (factory, lambda prefix: prefix[4:12] == b"ftypheic"))
    assert np.array_equal(open_image(data, path="x", settings=Settings()).decode().pixels, pixels)


# ---------------------------------------------------------------- corrupted files

SMALL = Settings(max_image_pixels=200_000, max_video_frames=100, max_video_seconds=100.0, max_audio_seconds=60.0)


def fuzz(entries: list[CorpusEntry], count: int, seed: int) -> tuple[int, int]:
    """How many mutated files were read, and how many refused by their name; anything else is an error."""
    files = [one for one in entries if isinstance(one.value, bytes) and 0 < len(one.value) < 100_000]
    chooser = random.Random(seed)
    chooser.shuffle(files)
    read = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(count):
            entry_ = files[index % len(files)]
            data = corpus.mutated(entry_.value, chooser)
            try:
                media_input = corpus.read(entry_.modality, data, path="x[2]", settings=SMALL)
            except (MediaError, LimitError) as error:
                refused += error.path == "x[2]"
                continue
            read += 1
            if entry_.modality is Modality.IMAGE:
                same_by_an_opened_object(data, media_input.pixels)
    return read, refused


def same_by_an_opened_object(data: bytes, pixels: np.ndarray) -> None:
    """The same bytes through an object that the caller opened; a PNG's transparent level is lost in one."""
    image = Image.open(io.BytesIO(data))
    if image.format == "PNG" and "transparency" in image.info:
        return
    try:
        opened = open_image(image, path="x[2]", settings=SMALL).decode().pixels
    except MediaError:
        assert image.format == "BMP"  # whose run lengths Pillow itself refuses where they end early
        return
    assert np.array_equal(opened, pixels)


@pytest.mark.case("1.7")
@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
def test_300_corrupted_files_end_well(kind: str, world: World) -> None:
    read, refused = fuzz(getattr(world, kind), 300, 1)
    assert read + refused == 300
    assert min(read, refused) > 30


@pytest.mark.slow
@pytest.mark.case("1.7")
@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
def test_5000_corrupted_files_end_well(kind: str, world: World) -> None:
    read, refused = fuzz(getattr(world, kind), 5000, 2)
    assert read + refused == 5000
    assert min(read, refused) > 500


@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
def test_corrupted_files_leave_neither_memory_nor_open_files(kind: str, world: World) -> None:
    """The same 60 files thrice: what the first round leaves is warm-up, and a leak of 100 kB a file would show twelvefold."""
    entries = getattr(world, kind)
    fuzz(entries, 60, 3)
    before = resident(), open_files()
    fuzz(entries, 60, 3)
    fuzz(entries, 60, 3)
    after = resident(), open_files()
    assert after[1] == before[1]
    assert after[0] - before[0] < 12_000_000


def resident() -> int:
    """Bytes of memory in use."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
