"""Every accepted kind of media input ends in the same pixels; everything else ends in an error that names its place."""

import base64
import io
import os
import random
import struct
import threading
import time
import tracemalloc
import urllib.parse
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.media import ImageSource, normalize_image, open_image
from mm_plugin.settings import Settings

PATH = "images[2]"
STORED = (np.arange(16 * 24 * 3) * 37 % 256).astype(np.uint8).reshape(16, 24, 3)  # [height, width, 3]
SETTINGS = Settings()


def encode(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def take(value: Any, settings: Settings = SETTINGS) -> ImageSource:
    return open_image(value, path=PATH, settings=settings)


def pixels(value: Any, settings: Settings = SETTINGS, **options: Any) -> np.ndarray:
    """The pixels of a value, after a check that the size was reported rightly before."""
    source = take(value, settings)
    size = source.probe()
    out = source.decode(**options).pixels
    assert out.dtype == np.uint8
    assert out.shape == (size.height, size.width, 3)
    assert out.flags.c_contiguous
    return out


def refused(value: Any, settings: Settings = SETTINGS) -> MediaError:
    """The error of opening or decoding a value, which must name its place."""
    with pytest.raises(MediaError) as caught:
        take(value, settings).decode()
    assert caught.value.path == PATH
    assert str(caught.value).startswith(PATH)
    return caught.value


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(data).decode()}"


# --- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("1.2")
@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: memoryview(b"".join(bytes([b, 0]) for b in data))[::2],
        data_url,
        lambda data: Image.open(io.BytesIO(data)),
        lambda data: np.array(Image.open(io.BytesIO(data))),
    ],
    ids=["bytes", "bytearray", "memoryview", "strided memoryview", "data URL", "PIL", "numpy"],
)
def test_every_kind_of_one_image_has_the_same_pixels(wrap: Callable[[bytes], Any]) -> None:
    assert np.array_equal(pixels(wrap(encode(STORED))), STORED)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG2000"])
def test_lossless_formats_keep_every_pixel(format: str) -> None:
    gray = np.repeat(STORED[:, :, :1], 3, axis=2)  # GIF keeps 256 colors
    assert np.array_equal(pixels(encode(gray, format, **({"lossless": True} if format == "WEBP" else {}))), gray)


@pytest.mark.parametrize(
    "value",
    [None, 3, 1.5, [1, 2], {}, object(), io.BytesIO(b"x"), (b"a", b"b")],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_are_refused_by_their_type(value: Any) -> None:
    error = refused(value)
    assert error.reason == "type"
    assert type(value).__name__ in str(error)


@pytest.mark.case("1.12")
@pytest.mark.parametrize("shape", [(480, 640, 3), (3, 4, 3), (1, 1, 3)])
def test_the_size_of_an_array_is_height_then_width(shape: tuple[int, int, int]) -> None:
    size = take(np.zeros(shape, np.uint8)).probe()
    assert (size.height, size.width) == shape[:2]


@pytest.mark.case("1.6")
@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((1, 8, 8), np.uint8),
        np.zeros((8, 8, 1), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((2, 8, 8, 3), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((8, 0, 3), np.uint8),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8, 3), np.int8),
        np.zeros((8, 8, 3), bool),
        np.zeros((8, 8, 3), np.uint16),
        np.zeros((), np.uint8),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_arrays_of_other_shapes_and_dtypes_are_refused_not_guessed(array: np.ndarray) -> None:
    assert refused(array).reason == "array"


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::-1], np.s_[::2, ::3], np.s_[:, :, ::-1]], ids=str)
def test_views_of_arrays_are_taken_as_they_look(view: Any) -> None:
    assert np.array_equal(pixels(STORED[view]), STORED[view])
    assert take(STORED[view]).digest() == take(STORED[view].copy()).digest()


def test_nothing_is_written_into_what_was_given() -> None:
    image = Image.fromarray(np.dstack([STORED, STORED[:, :, :1]]))
    image.info["exif"] = exif(6).tobytes()
    array = STORED.copy()
    before = (image.tobytes(), image.mode, image.size, dict(image.info))
    pixels(image)
    pixels(array)
    assert (image.tobytes(), image.mode, image.size, dict(image.info)) == before
    assert np.array_equal(array, STORED)


# --- orientation -------------------------------------------------------------------------------------------------------

SEEN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda s: s,
    2: lambda s: s[:, ::-1],
    3: lambda s: s[::-1, ::-1],
    4: lambda s: s[::-1],
    5: lambda s: s.swapaxes(0, 1),
    6: lambda s: np.rot90(s, -1),  # clockwise
    7: lambda s: s[::-1, ::-1].swapaxes(0, 1),
    8: lambda s: np.rot90(s, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {"PNG": {}, "JPEG": {"quality": 90}, "WEBP": {"lossless": True}, "TIFF": {}}


@pytest.mark.case("1.1")
@pytest.mark.case("1.2")
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", OPTIONS)
def test_an_image_is_seen_as_a_viewer_shows_it(format: str, orientation: int) -> None:
    flat = np.array(Image.open(io.BytesIO(encode(STORED, format, **OPTIONS[format]))))
    expected = SEEN[orientation](flat)
    data = encode(STORED, format, exif=exif(orientation), **OPTIONS[format])
    size = take(data).probe()
    assert (size.height, size.width) == expected.shape[:2]
    opened = Image.open(io.BytesIO(data))
    loaded = Image.open(io.BytesIO(data))
    loaded.load()
    for value in (data, data_url(data), opened, loaded):
        assert np.array_equal(pixels(value), expected)
    assert np.array_equal(normalize_image(Image.open(io.BytesIO(data))), expected)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    assert np.array_equal(pixels(encode(STORED, exif=exif(orientation))), STORED)


@pytest.mark.parametrize("block", [b"", b"Exif\0\0", b"Exif\0\0MM", b"garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_a_broken_exif_block_does_not_refuse_the_image(block: bytes) -> None:
    assert np.array_equal(pixels(encode(STORED, exif=block)), STORED)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(
    "late",
    [
        chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0")),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
    ],
    ids=["eXIf", "iTXt"],
)
def test_a_png_that_says_only_after_its_pixels_how_it_is_turned_is_turned(late: bytes) -> None:
    plain = encode(STORED)
    data = plain[:-12] + late + plain[-12:]
    assert data.index(late) > data.index(b"IDAT")
    expected = np.rot90(STORED, -1)
    size = take(data).probe()
    assert (size.height, size.width) == expected.shape[:2]
    assert np.array_equal(pixels(data), expected)
    assert np.array_equal(take(data).decode().pixels, expected)  # without asking for the size first
    assert np.array_equal(pixels(Image.open(io.BytesIO(data))), expected)


def test_one_lazily_opened_object_gives_two_threads_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Image.Exif.load

    def slow(self: Image.Exif, data: bytes) -> None:
        time.sleep(0.02)  # so that the threads do meet where the block is being read
        original(self, data)

    monkeypatch.setattr(Image.Exif, "load", slow)
    image = Image.open(io.BytesIO(encode(STORED, exif=exif(6))))
    sources = [take(image) for _ in range(4)]
    barrier = threading.Barrier(len(sources))
    found: list[Any] = []

    def work(source: ImageSource) -> None:
        barrier.wait()
        try:
            found.append(source.decode().pixels)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [isinstance(one, np.ndarray) and np.array_equal(one, np.rot90(STORED, -1)) for one in found] == [True] * 4


# --- transparency ------------------------------------------------------------------------------------------------------

HIDDEN, SHOWN = (10, 20, 30), (200, 100, 50)


def palette_image(mode: str = "P") -> Image.Image:
    """Two pixels: the first of color 0, the second of color 1."""
    image = Image.new("P", (2, 1))
    image.putpalette([*HIDDEN, *SHOWN])
    image.putdata([0, 1])
    if mode == "PA":
        # Pillow makes PA from P with transparency only
        image.info["transparency"] = 0
        image = image.convert("PA")
    return image


def two_pixels(mode: str, first: Any, second: Any) -> Image.Image:
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), first)
    image.putpixel((1, 0), second)
    return image


def trns_gray16() -> bytes:
    """A PNG of 16-bit gray, two pixels, whose level 2570 is transparent."""
    rows = zlib.compress(b"\0" + struct.pack(">2H", 2570, 51400))
    head = chunk(b"IHDR", struct.pack(">2I5B", 2, 1, 16, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + chunk(b"tRNS", struct.pack(">H", 2570))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


SHOWN_GRAY = (200, 200, 200)
ALPHA: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "RGBA": (two_pixels("RGBA", (*HIDDEN, 0), (*SHOWN, 255)), SHOWN),
    "RGBA png": (encode(two_pixels("RGBA", (*HIDDEN, 0), (*SHOWN, 255))), SHOWN),
    "RGBA webp": (encode(two_pixels("RGBA", (*HIDDEN, 0), (*SHOWN, 255)), "WEBP", lossless=True, exact=True), SHOWN),
    "RGBa": (two_pixels("RGBA", (*HIDDEN, 0), (*SHOWN, 255)).convert("RGBa"), SHOWN),
    "LA": (two_pixels("LA", (10, 0), (200, 255)), SHOWN_GRAY),
    "LA png": (encode(two_pixels("LA", (10, 0), (200, 255))), SHOWN_GRAY),
    "La": (two_pixels("LA", (10, 0), (200, 255)).convert("La"), SHOWN_GRAY),
    "P with an index": (encode(palette_image(), transparency=0), SHOWN),
    "P with a table": (encode(palette_image(), transparency=b"\0\xff"), SHOWN),
    "P gif": (encode(palette_image(), "GIF", transparency=0), SHOWN),
    "PA": (palette_image("PA"), SHOWN),
    "RGB with a color": (encode(two_pixels("RGB", HIDDEN, SHOWN), transparency=HIDDEN), SHOWN),
    "L with a level": (encode(two_pixels("L", 10, 200), transparency=10), SHOWN_GRAY),
    "1 with a level": (encode(two_pixels("1", 0, 255), transparency=0), (255, 255, 255)),
    "16-bit gray with a level": (trns_gray16(), SHOWN_GRAY),
}


@pytest.mark.case("1.4")
@pytest.mark.parametrize("background", [(255, 255, 255), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", ALPHA)
def test_after_transparent_pixels_is_the_background(kind: str, background: tuple[int, int, int]) -> None:
    value, shown = ALPHA[kind]
    assert pixels(value, background=background).tolist() == [[list(background), list(shown)]]
    if isinstance(value, bytes):
        assert pixels(Image.open(io.BytesIO(value)), background=background).tolist() == [
            [list(background), list(shown)]
        ]


def test_the_background_is_white_unless_reported() -> None:
    assert pixels(ALPHA["RGBA"][0])[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("alpha", [1, 64, 127, 128, 200, 254])
def test_half_transparent_pixels_are_mixed(alpha: int) -> None:
    value = two_pixels("RGBA", (*SHOWN, alpha), (*SHOWN, 255))
    mixed = pixels(value, background=(9, 90, 250))[0, 0].astype(float)
    exact = [(alpha * front + (255 - alpha) * back) / 255 for front, back in zip(SHOWN, (9, 90, 250), strict=True)]
    assert np.abs(mixed - exact).max() <= 1


def test_transparency_and_orientation_meet_in_the_right_order() -> None:
    image = two_pixels("RGBA", (*HIDDEN, 0), (*SHOWN, 255))
    data = encode(image, exif=exif(6))
    assert pixels(data).tolist() == [[[255, 255, 255]], [list(SHOWN)]]


# --- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("1.6")
@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (two_pixels("L", 7, 200), [[7] * 3, [200] * 3]),
        (two_pixels("1", 0, 255), [[0] * 3, [255] * 3]),
        (two_pixels("CMYK", (0, 0, 0, 0), (255, 0, 0, 0)), [[255, 255, 255], [0, 255, 255]]),
        (two_pixels("CMYK", (0, 0, 0, 255), (0, 255, 255, 0)), [[0, 0, 0], [255, 0, 0]]),
        (two_pixels("YCbCr", (0, 128, 128), (255, 128, 128)), [[0, 0, 0], [255, 255, 255]]),
        (two_pixels("HSV", (0, 255, 255), (0, 0, 128)), [[255, 0, 0], [128, 128, 128]]),
        (palette_image(), [list(HIDDEN), list(SHOWN)]),
        (two_pixels("RGBX", (1, 2, 3, 0), (4, 5, 6, 9)), [[1, 2, 3], [4, 5, 6]]),
    ],
    ids=["L", "1", "CMYK", "CMYK black", "YCbCr", "HSV", "P", "RGBX"],
)
def test_every_mode_becomes_rgb(image: Image.Image, expected: list[list[int]]) -> None:
    assert pixels(image).tolist() == [expected]


@pytest.mark.case("1.6")
@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpegs_of_other_modes_have_three_channels(mode: str) -> None:
    data = encode(Image.new(mode, (8, 8), 200 if mode == "L" else (0, 255, 255, 0)), "JPEG", quality=100)
    assert Image.open(io.BytesIO(data)).mode == mode
    expected = [200] * 3 if mode == "L" else [255, 0, 0]
    assert np.abs(pixels(data).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L", "I"])
def test_gray_of_16_bits_is_scaled_to_8(mode: str) -> None:
    levels = [0, 128, 129, 257, 32896, 65406, 65407, 65535]
    image = Image.new(mode, (8, 1))
    for x, level in enumerate(levels):
        image.putpixel((x, 0), level)
    # (level + 128) // 257 by hand
    expected = [0, 0, 1, 1, 128, 254, 255, 255]
    assert pixels(image)[0].tolist() == [[level] * 3 for level in expected]


@pytest.mark.parametrize(
    "image",
    [
        Image.new("F", (2, 2)),
        two_pixels("I", 0, 65536),
        two_pixels("I", -1, 0),
        two_pixels("I", -(2**31), 2**31 - 1),
    ],
    ids=["float", "32 bits", "negative", "extremes"],
)
def test_levels_without_a_scale_are_refused(image: Image.Image) -> None:
    assert refused(image).reason == "mode"
    assert refused(encode(image, "TIFF")).reason == "mode"


# --- broken, huge and foreign files ------------------------------------------------------------------------------------


@pytest.mark.case("1.7")
@pytest.mark.parametrize("wrap", [bytes, data_url], ids=["bytes", "data URL"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(STORED, "JPEG")[:-128], "broken"),
        (encode(STORED)[:-40], "broken"),
        (encode(STORED)[:20], "format or broken"),
        (encode(STORED, "GIF")[:-60], "broken"),
        (random.Random(0).randbytes(1000), "format"),
        (b"", "empty"),
        (b"\xff", "format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "format"),
        (encode(STORED).replace(b"IDAT", b"IDAX"), "format or broken"),
    ],
    ids=["cut JPEG", "cut PNG", "cut header", "cut GIF", "random", "empty", "one byte", "SVG", "no pixels"],
)
def test_broken_files_are_the_client_s_fault(data: bytes, reason: str, wrap: Callable[[bytes], Any]) -> None:
    error = refused(wrap(data))
    assert error.reason in reason.split(" or ")  # which of two parts of Pillow notices it first is Pillow's affair


@pytest.mark.case("1.7")
def test_a_truncated_file_in_a_lazy_object_is_the_client_s_fault() -> None:
    image = Image.open(io.BytesIO(encode(STORED, "JPEG")[:-128]))
    source = take(image)
    for call in (source.probe, source.decode, source.digest):
        with pytest.raises(MediaError, match=r"images\[2\]"):
            call()


def test_a_closed_object_is_refused() -> None:
    image = Image.open(io.BytesIO(encode(STORED)))
    image.close()
    refused(image)


def bomb(width: int, height: int) -> bytes:
    head = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        pytest.fail("the pixels were loaded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", load)


@pytest.mark.case("1.8")
@pytest.mark.parametrize("late", [b"", chunk(b"eXIf", b"II*\0\x08\0\0\0\0\0")], ids=["plain", "with a late chunk"])
def test_an_image_that_only_promises_many_pixels_is_refused_before_they_are_allocated(
    monkeypatch: pytest.MonkeyPatch, late: bytes
) -> None:
    data = bomb(9000, 9000)
    data = data[:-12] + late + data[-12:]
    forbid_loading(monkeypatch)
    tracemalloc.start()
    try:
        for call in ("probe", "decode"):
            source = take(data, Settings(max_image_pixels=1_000_000))
            with pytest.raises(LimitError, match=r"images\[2\].* 1000000 pixels.* 9000 x 9000 ") as caught:
                getattr(source, call)()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    error = caught.value
    assert (error.path, error.setting, error.limit, error.value) == (PATH, "max_image_pixels", 1_000_000, 81_000_000)


@pytest.mark.case("1.8")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(13_500, 13_500), (65_535, 65_535), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_more_pixels_than_pillow_opens_are_refused_too(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    forbid_loading(monkeypatch)
    source = take(bomb(*size))
    with pytest.raises((MediaError, LimitError), match=r"images\[2\]"):
        source.decode()


@pytest.mark.case("1.8")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_between_the_default_limit_and_pillow_s_is_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_loading(monkeypatch)
    source = take(bomb(10_000, 9_000))
    with pytest.raises(LimitError, match="89478485") as caught:
        source.probe()
    assert caught.value.limit == 89_478_485


@pytest.mark.parametrize(
    "make",
    [bytes, lambda data: Image.open(io.BytesIO(data)), lambda data: np.array(Image.open(io.BytesIO(data)))],
    ids=["bytes", "PIL", "numpy"],
)
def test_the_limit_of_pixels_holds_for_every_kind_and_is_inclusive(make: Callable[[bytes], Any]) -> None:
    data = encode(STORED)  # 16 x 24 = 384
    assert np.array_equal(pixels(make(data), Settings(max_image_pixels=384)), STORED)
    with pytest.raises(LimitError) as caught:
        take(make(data), Settings(max_image_pixels=383)).probe()
    assert (caught.value.setting, caught.value.value) == ("max_image_pixels", 384)


@pytest.mark.parametrize("wrap", ["bytes", "base64", "wrapped base64", "percent", "percent base64", "path"])
def test_the_limit_of_bytes_holds_for_every_kind_and_is_inclusive(wrap: str, tmp_path: Path) -> None:
    data = encode(STORED)
    digits = base64.b64encode(data).decode()
    (tmp_path / "a.png").write_bytes(data)
    value: Any = {
        "bytes": data,
        "base64": data_url(data),
        "wrapped base64": "data:;base64," + "\n".join(digits),
        "percent": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
        "percent base64": "data:;base64," + "".join(f"%{ord(digit):02x}" for digit in digits),
        "path": "a.png",
    }[wrap]
    root = str(tmp_path)
    assert np.array_equal(pixels(value, Settings(max_media_bytes=len(data), media_root=root)), STORED)
    with pytest.raises(LimitError, match=r"images\[2\]") as caught:
        take(value, Settings(max_media_bytes=len(data) - 1, media_root=root))
    assert (caught.value.setting, caught.value.limit) == ("max_media_bytes", len(data) - 1)


def test_a_long_data_url_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *a, **k: pytest.fail("decoded"))
    with pytest.raises(LimitError):
        take("data:;base64," + "A" * 4000, Settings(max_media_bytes=1000))


@pytest.mark.parametrize("format", ["EPS", "ICNS", "TGA", "PCX", "DDS", "SGI", "MSP", "XBM"])
def test_formats_that_run_programs_or_nest_images_are_not_opened(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: pytest.fail("a program was run"))
    image = Image.new("1" if format in ("MSP", "XBM") else "RGB", (32, 32))
    assert refused(encode(image, format)).reason == "format"


# --- data URLs ---------------------------------------------------------------------------------------------------------

PNG = encode(STORED)
B64 = base64.b64encode(PNG).decode()


@pytest.mark.case("1.13")
@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{B64}",
        f"data:image/jpeg;charset=utf-8;base64,{B64}",
        f"data:image/png;name=a.png;x=y;base64,{B64}",
        f"data:;base64,{B64}",
        f"DATA:image/png;BASE64,{B64}",
        f"data:image/png; Base64 ,{B64}",
        f"data:image/png;base64,{B64[:40]}\r\n {B64[40:]}",
        f"data:image/png;base64,{urllib.parse.quote(B64, safe='')}",
        f"data:image/png,{urllib.parse.quote_from_bytes(PNG, safe='')}",
        f"data:,{urllib.parse.quote_from_bytes(PNG, safe='')}",
    ],
    ids=[
        "plain",
        "parameter",
        "parameters",
        "no type",
        "upper case",
        "spaces",
        "wrapped",
        "escaped",
        "percent",
        "bare",
    ],
)
def test_data_urls_of_every_form_are_read(url: str) -> None:
    assert np.array_equal(pixels(url), STORED)


@pytest.mark.case("1.13")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png", "url"),
        ("data:", "url"),
        ("data:image/png;base64", "url"),
        ("data:,", "empty"),
        ("data:;base64,", "empty"),
        ("data:;base64,A", "url"),
        ("data:;base64,AAA", "format"),
        ("data:;base64,AA=A", "url"),
        ("data:;base64,!!!!", "url"),
        ("data:;base64,ÄÖÜß", "url"),
        (f"data:image/png;base64,{B64}?", "url"),
        (f"data:image/png,{B64}", "format"),
        (f"data:image/png;base64;charset=utf-8,{B64}", "format"),
        ("data:,\ud800", "url"),
        ("data:;base64,\ud800", "url"),
    ],
)
def test_malformed_data_urls_are_refused(url: str, reason: str) -> None:
    error = refused(url)
    assert error.reason == reason
    assert B64[:40] not in str(error)


# --- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rooted(tmp_path: Path) -> tuple[Path, Settings]:
    """A media root with an image in it and one outside of it."""
    root = tmp_path / "media"
    (root / "in").mkdir(parents=True)
    (tmp_path / "media2").mkdir()
    for place in (root / "a.png", root / "in" / "b.png", tmp_path / "out.png", tmp_path / "media2" / "c.png"):
        place.write_bytes(PNG)
    return root, Settings(media_root=str(root))


def test_files_below_the_root_are_read(rooted: tuple[Path, Settings]) -> None:
    root, settings = rooted
    (root / "link.png").symlink_to(root / "in" / "b.png")
    for value in (
        "a.png",
        "in/b.png",
        Path("in/b.png"),
        root / "a.png",
        str(root / "a.png"),
        "in/../a.png",
        "link.png",
    ):
        assert np.array_equal(pixels(value, settings), STORED)


def test_a_file_has_the_digest_of_its_bytes(rooted: tuple[Path, Settings]) -> None:
    assert take("a.png", rooted[1]).digest() == take(PNG).digest() == take(data_url(PNG)).digest()


@pytest.mark.parametrize(
    "value",
    [
        "../out.png",
        "in/../../out.png",
        "../media2/c.png",
        "escape.png",
        "escape/out.png",
        "loop",
        "in",
        "",
        ".",
        "missing.png",
        "a.png/x",
        "a\0.png",
        "x." * 2500,
        "pipe",
        "file:///etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "\ud800.png",
    ],
)
def test_whatever_is_no_file_below_the_root_is_refused(rooted: tuple[Path, Settings], value: str) -> None:
    root, settings = rooted
    (root / "escape.png").symlink_to(root.parent / "out.png")
    (root / "escape").symlink_to(root.parent)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    error = refused(value, settings)
    assert error.reason == "path"
    assert str(root) not in str(error)


def test_an_absolute_path_outside_the_root_is_refused(rooted: tuple[Path, Settings]) -> None:
    assert refused(rooted[0].parent / "out.png", rooted[1]).reason == "path"


@pytest.mark.parametrize("value", ["a.png", Path("a.png")])
def test_without_a_root_no_path_is_read(rooted: tuple[Path, Settings], value: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(rooted[0])
    error = refused(value, Settings())
    assert "MM_PLUGIN_MEDIA_ROOT" in str(error)
    assert refused(rooted[0] / "a.png", Settings()).reason == "path"


def test_a_root_that_is_missing_reads_nothing(tmp_path: Path) -> None:
    assert refused("a.png", Settings(media_root=str(tmp_path / "none"))).reason == "path"


def test_a_path_of_bytes_is_refused(rooted: tuple[Path, Settings]) -> None:
    class Odd(os.PathLike[bytes]):
        def __fspath__(self) -> bytes:
            return b"a.png"

    assert refused(Odd(), rooted[1]).reason == "path"


# --- digests -----------------------------------------------------------------------------------------------------------


def palettes(first: list[int]) -> Image.Image:
    image = palette_image()
    image.putpalette([*first, *SHOWN])
    return image


def with_info(image: Image.Image, **info: Any) -> Image.Image:
    image = image.copy()
    image.info.update(info)
    return image


@pytest.mark.case("3.6")
def test_whatever_decides_the_pixels_is_in_the_digest() -> None:
    flat = bytes(range(250)) * 36
    values = [
        Image.frombytes("RGB", (30, 100), flat),
        Image.frombytes("RGB", (100, 30), flat),
        Image.frombytes("L", (100, 90), flat),
        Image.frombytes("P", (100, 90), flat),
        palettes([1, 2, 3]),
        palettes([3, 2, 1]),
        with_info(palette_image(), transparency=0),
        with_info(palette_image(), transparency=1),
        with_info(palette_image(), transparency=b"\0\x80"),
        palette_image(),
        with_info(palette_image(), exif=exif(3).tobytes()),
        np.frombuffer(flat, np.uint8).reshape(100, 30, 3),
        np.frombuffer(flat, np.uint8).reshape(30, 100, 3),
        PNG,
        PNG + b"\0",
        encode(STORED, compress_level=0),
    ]
    digests = [take(value).digest() for value in values]
    assert len(set(digests)) == len(values)
    assert {len(one) for one in digests} == {32}
    assert [take(value).digest() for value in values] == digests


def test_a_lazy_object_has_the_digest_of_a_loaded_one() -> None:
    loaded = Image.open(io.BytesIO(PNG))
    loaded.load()
    assert take(Image.open(io.BytesIO(PNG))).digest() == take(loaded).digest() == take(loaded.copy()).digest()


@pytest.mark.parametrize("transparency", [3, bytes(range(0, 80, 10))], ids=["one level", "table"])
def test_the_callers_palette_is_not_changed_by_decoding(transparency: Any) -> None:
    image = Image.frombytes("P", (4, 2), bytes(range(8)))
    image.putpalette(bytes(range(24)))
    image.info["transparency"] = transparency
    before, key = image.getpalette("RGBA"), take(image).digest()
    take(image).decode()
    assert image.getpalette("RGBA") == before
    assert take(image).digest() == key
