"""AVIF and HEIF by all their brands, whichever stands in front."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import AvifImagePlugin, Image, TiffImagePlugin

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.media import open_image
from mm_plugin.media.isobmff import brands_of, with_major_brand
from mm_plugin.settings import Settings
from mm_plugin.testing.corpus.formats import box

LEVELS = np.kron(np.array([[10, 200, 90], [240, 60, 130]], np.uint8), np.ones((8, 8), np.uint8))
PIXELS = np.stack([LEVELS, LEVELS // 2, 255 - LEVELS], axis=2)


def avif(**arguments: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "AVIF", quality=100, subsampling="4:4:4", speed=10, **arguments)
    return file.getvalue()


STILL = avif()
MOVING = avif(save_all=True, append_images=[Image.fromarray(PIXELS[::-1])])


def branded(data: bytes, major: bytes, others: Sequence[bytes], header: int = 8) -> bytes:
    """The same file with these brands; the places that its items name move with the length of the box."""
    size = struct.unpack(">I", data[:4])[0]
    content = major + bytes(4) + b"".join(others)
    missing = size - header - len(content)
    assert missing >= 0, "no place for so many brands"
    content += b"free" * (missing // 4)
    head = struct.pack(">I", size) + b"ftyp" if header == 8 else struct.pack(">I4sQ", 1, b"ftyp", size)
    return head + content + data[size:]


def decoded(data: bytes) -> np.ndarray:
    source = open_image(data, path="images[0]", settings=Settings())
    size = source.probe()
    assert (size.height, size.width) == PIXELS.shape[:2]
    return source.decode().pixels


def refused(data: bytes) -> MediaError:
    with pytest.raises(MediaError) as caught:
        open_image(data, path="images[0]", settings=Settings()).decode()
    return caught.value


CONTAINER = [b"mif1", b"msf1", b"miaf", b"MA1B", b"MA1A", b"MiPr", b"xxxx", b"isom"]


@pytest.mark.parametrize("header", [8, 16])
@pytest.mark.parametrize("major", [b"avif", b"avis", *CONTAINER])
@pytest.mark.parametrize("name", ["still", "moving"])
def test_an_avif_is_known_by_any_of_its_brands(name: str, major: bytes, header: int) -> None:
    data = {"still": STILL, "moving": MOVING}[name]
    if name == "still" and major == b"avis":
        return  # it has no track
    coding = [b"avif"] if name == "still" else [b"avis", b"avif"]
    for others in itertools.permutations([*coding, b"mif1"] if header == 8 else coding):
        found = decoded(branded(data, major, others[: 3 if header == 8 else 2], header))
        assert np.abs(found.astype(int) - PIXELS).max() <= 3, (major, others)


@pytest.mark.parametrize("major", [b"mif1", b"miaf", b"MiPr"])
def test_an_avif_that_names_its_container_alone_is_known_by_what_it_holds(major: bytes) -> None:
    assert np.abs(decoded(branded(STILL, major, [b"mif1"])).astype(int) - PIXELS).max() <= 3


@pytest.mark.parametrize("major", [b"msf1", b"mif1"])
def test_a_sequence_alone_is_known_by_its_brand(major: bytes) -> None:
    assert np.abs(decoded(branded(MOVING, major, [b"avis", b"msf1"])).astype(int) - PIXELS).max() <= 3


def test_a_limit_holds_whatever_the_brand() -> None:
    data = branded(STILL, b"miaf", [b"avif", b"mif1"])
    with pytest.raises(LimitError):
        open_image(data, path="images[0]", settings=Settings(max_image_pixels=383)).probe()


def test_an_avif_without_a_codec_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    for data in (STILL, branded(STILL, b"mif1", [b"avif"])):
        error = refused(data)
        assert error.reason == "format"
        assert "AVIF needs" in str(error)


# ------------------------------------------------------------------ HEIF

HEVC = [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"]
OTHER = [b"avci", b"avcs", b"jpeg", b"jpgs", b"j2ki", b"vvic", b"unif", b"mif2", b"MiHE", b"MiHB"]


def heif(major: bytes, *others: bytes) -> bytes:
    return box(b"ftyp", major + bytes(4) + b"".join(others)) + box(b"meta", bytes(40))


ALL_HEIF = [
    *(heif(brand) for brand in [*HEVC, *OTHER, b"mif1", b"msf1", b"miaf"]),
    *(heif(major, b"miaf", brand) for major in (b"mif1", b"msf1", b"xxxx", b"MiHE", b"isom") for brand in HEVC),
]


@pytest.mark.parametrize("data", ALL_HEIF, ids=lambda data: "+".join(brand.decode() for brand in brands_of(data)))
def test_heif_says_what_opens_it(data: bytes) -> None:
    error = refused(data)
    assert error.reason == "format"
    assert "pillow_heif.register_heif_opener" in str(error)


@pytest.mark.parametrize("data", ALL_HEIF, ids=lambda data: "+".join(brand.decode() for brand in brands_of(data)))
def test_heif_reaches_its_opener(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A stand-in for pillow-heif, which looks at the first brand alone and knows these; it reads what follows as a TIFF."""
    known = {*HEVC, b"mif1", b"msf1"}
    opened: list[bytes] = []

    def factory(file: Any, _: Any) -> Any:
        content = file.read()
        opened.append(content[8:12])
        return TiffImagePlugin.TiffImageFile(io.BytesIO(content[len(data) :]))

    Image.init()
    monkeypatch.setitem(Image.OPEN, "HEIF", (factory, lambda head: head[4:8] == b"ftyp" and head[8:12] in known))
    tiff = io.BytesIO()
    Image.fromarray(PIXELS).save(tiff, "TIFF")
    assert decoded(data + tiff.getvalue()).tolist() == PIXELS.tolist()
    (major,) = opened
    assert major == data[8:12] or data[8:12] not in known


def test_a_file_of_both_is_what_it_holds() -> None:
    both = branded(STILL, b"heic", [b"avif", b"mif1"])
    assert np.abs(decoded(both).astype(int) - PIXELS).max() <= 3
    error = refused(heif(b"avif", b"heic", b"mif1"))
    assert "pillow-heif" in str(error)


@pytest.mark.parametrize("brand", [b"isom", b"mp42", b"qt  ", b"M4A ", b"3gp5", b"dash"])
def test_a_movie_is_called_one(brand: bytes) -> None:
    for data in (heif(brand), heif(b"xxxx", b"yyyy", brand)):
        error = refused(data)
        assert error.reason == "format"
        assert "movie" in str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\x08ftyp",
        b"\0\0\0\0ftyp",
        b"\0\0\0\x01ftyp\0\0",
        b"\0\0\0\x04ftypavif",
        b"\0\0\0\x10ftypcrx \0\0\0\0",
        b"\0\0\0\x0dftypa",
    ],
)
def test_a_short_box_of_brands_is_refused(data: bytes) -> None:
    assert refused(data).reason in ("format", "broken")


def test_a_brand_in_front_moves_nothing() -> None:
    data = heif(b"mif1", b"avif", b"miaf") + b"rest"
    changed = with_major_brand(data, b"avif")
    assert brands_of(changed) == [b"avif", b"avif", b"miaf"]
    assert changed[12:] == data[12:]
    long = struct.pack(">I4sQ", 1, b"ftyp", 28) + b"mif1\0\0\0\0avif" + b"rest"
    changed = with_major_brand(long, b"avif")
    assert brands_of(changed) == [b"avif", b"mif1", b"avif", b"avif"]
    assert (len(changed), changed[28:]) == (len(long), b"rest")
    assert with_major_brand(changed, b"avif") == changed
