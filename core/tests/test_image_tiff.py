"""TIFF: every layout of samples is decoded to the levels that arithmetic gives, or refused with the reason; never anything else."""

from __future__ import annotations

import io
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiff_files import RATIONAL, linked, tiff

from mm_plugin import MediaError, Settings
from mm_plugin.media import open_image, probe

HEIGHT, WIDTH = 5, 11


def pixels(value: Any) -> np.ndarray:
    return open_image(value, path="images[0]", settings=Settings()).decode().pixels


def outcome(value: Any) -> np.ndarray | str | None:
    """The pixels, or the reason why there are none."""
    try:
        return pixels(value)
    except MediaError as error:
        return error.reason if error.path == "images[0]" else "no path"


def levels(bits: int, samples: int, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).integers(0, 1 << bits, (HEIGHT, WIDTH, samples))
    found[0, 0], found[0, 1] = (1 << bits) - 1, 0
    return found


def spread(values: np.ndarray, bits: int) -> np.ndarray:
    """Levels of so many bits over 0 to 255, rounded."""
    return np.floor(values * 255 / ((1 << bits) - 1) + 0.5).astype(np.uint8)


def gray(values: np.ndarray, bits: int) -> np.ndarray:
    return np.repeat(spread(values[..., :1], bits), 3, axis=2)


def over_white(colors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.asarray(colors * share + 255 * (1 - share))


def assert_near(found: Any, wanted: np.ndarray, tolerance: float) -> None:
    assert isinstance(found, np.ndarray), found
    assert found.shape == wanted.shape
    assert np.abs(found.astype(float) - wanted).max() <= tolerance


STORED = [
    pytest.param({"little": little, "compression": compression, "tile": tile, "rows": None if tile else 2}, id=name)
    for name, (little, compression, tile) in {
        f"{'II' if little else 'MM'} {compression} {'tiles' if tile else 'strips'}": (little, compression, tile)
        for little, compression, tile in itertools.product((True, False), (1, 8, 32773), (None, (16, 16)))
    }.items()
]
# How Pillow opens the file: on the bytes, and as an object of the caller's.
FORMS = pytest.mark.parametrize("form", [bytes, lambda data: Image.open(io.BytesIO(data))], ids=["file", "object"])
stored = pytest.mark.parametrize("how", STORED)


@stored
@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("bits", range(1, 17))
def test_gray_of_every_depth_is_scaled_by_its_own_bits(bits: int, photometric: int, how: dict[str, Any]) -> None:
    values = levels(bits, 1)
    shown = (1 << bits) - 1 - values if photometric == 0 else values
    for planar in (1, 2):  # one plane is the same as none
        found = outcome(tiff(values, bits=bits, photometric=photometric, planar=planar, **how))
        if bits in (1, 2, 4, 8, 16) or (bits == 12 and photometric == 1 and how["little"]):
            assert_near(found, gray(shown, bits), 0)
        else:
            assert found == "mode"


@FORMS
@pytest.mark.parametrize("predictor", [1, 2])
@pytest.mark.parametrize("photometric", [0, 1])
def test_gray_of_16_bits_that_was_opened_by_the_caller(form: Any, photometric: int, predictor: int) -> None:
    values = levels(16, 1)
    for compression in (1, 8):
        data = tiff(
            values,
            bits=16,
            photometric=photometric,
            compression=compression,
            predictor=predictor if compression == 8 else 1,
        )
        assert_near(pixels(form(data)), gray(65535 - values if photometric == 0 else values, 16), 0)


@FORMS
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_inverted_image_is_turned_too(form: Any, orientation: int) -> None:
    values = levels(16, 1)
    turned = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: a[::-1].transpose(1, 0, 2),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: a[:, ::-1].transpose(1, 0, 2),
    }[orientation](gray(65535 - values, 16))
    data = tiff(values, bits=16, photometric=0, tags=[(274, 3, [orientation])])
    size = probe(data)
    assert (size.height, size.width) == turned.shape[:2]  # type: ignore[union-attr]
    assert_near(pixels(form(data)), turned, 0)


@stored
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize("bits", [4, 8, 10, 12, 14, 16, 32])
def test_colors_of_every_depth_and_order_are_right_or_refused(bits: int, planar: int, how: dict[str, Any]) -> None:
    colors = levels(bits, 6)
    kinds: dict[str, tuple[int, int, tuple[int, ...]]] = {
        "rgb": (2, 3, ()),
        "rgba": (2, 4, (2,)),
        "rgb and more": (2, 4, (0,)),
        "rgb and two more": (2, 5, (0, 0)),
        "cmyk": (5, 4, ()),
        "cmyk and alpha": (5, 5, (2,)),
        "cmyk and more": (5, 5, (0,)),
        "gray and alpha": (1, 2, (2,)),
        "gray and more": (1, 2, (0,)),
    }
    served = set()
    for name, (photometric, samples, extra) in kinds.items():
        found = outcome(
            tiff(colors[..., :samples], bits=bits, photometric=photometric, planar=planar, extra=extra, **how)
        )
        if isinstance(found, str):
            assert found == "mode", name
            continue
        served.add(name)
        narrow = spread(colors, bits).astype(float)
        wanted = {
            "rgb": narrow[..., :3],
            "rgba": over_white(narrow[..., :3], narrow[..., 3]),
            "cmyk": (255 - narrow[..., :3]) * (255 - narrow[..., 3:4]) / 255,
            "gray": np.repeat(narrow[..., :1], 3, axis=2),
        }
        kind = name if name in wanted else name.split(" ")[0]
        if name == "gray and alpha":
            assert_near(found, over_white(wanted["gray"], narrow[..., 1]), 1)
        else:
            assert_near(found, wanted[kind], 2)
    if bits == 8:
        assert {"rgb", "rgba", "cmyk"} <= served
        assert planar == 2 or {"rgb and more", "rgb and two more", "cmyk and more", "gray and alpha"} <= served
    elif bits == 16:
        assert planar == 2 or {"rgb", "rgba", "rgb and more", "cmyk"} <= served
    else:
        assert not served
    assert "cmyk and alpha" not in served


@FORMS
@pytest.mark.parametrize("planar", [1, 2])
def test_planes_of_16_bits_are_never_noise(form: Any, planar: int) -> None:
    colors = levels(16, 3)
    found = outcome(form(tiff(colors, bits=16, photometric=2, planar=planar)))
    assert found == "mode" if planar == 2 else np.abs(found.astype(int) - (colors >> 8)).max() == 0  # type: ignore[union-attr]


@FORMS
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("extra", [(), (2,), (0,)])
def test_palettes_of_either_scale_give_their_colors(form: Any, bits: int, extra: tuple[int, ...]) -> None:
    if extra and bits < 8:
        pytest.skip("an index beside another sample takes 8 bits")
    indices = levels(bits, 1 + len(extra))
    wide = np.random.default_rng(1).integers(0, 1 << 16, (1 << bits, 3))
    for palette, shown in ((wide, wide >> 8), (wide >> 8, wide >> 8)):
        data = tiff(indices, bits=bits, photometric=3, palette=palette, extra=extra)
        colors = shown[indices[..., 0]].astype(float)
        wanted = over_white(colors, indices[..., 1]) if extra == (2,) else colors
        assert_near(pixels(form(data)), wanted, 1)


@FORMS
@pytest.mark.parametrize("sample_format", [2, 3, 5, 6])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_samples_of_unknown_scale_are_refused(form: Any, bits: int, sample_format: int) -> None:
    for photometric, samples in ((1, 1), (0, 1), (2, 3)):
        data = tiff(levels(bits, samples), bits=bits, photometric=photometric, sample_format=sample_format)
        try:
            value = form(data)
        except OSError:
            continue  # Pillow does not open it
        assert outcome(value) == "mode"


@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_bytes_with_the_last_bit_first_are_right_or_refused(bits: int, photometric: int, little: bool) -> None:
    values = levels(bits, 1)
    shown = (1 << bits) - 1 - values if photometric == 0 else values
    found = outcome(tiff(values, bits=bits, photometric=photometric, little=little, fill_order=2))
    if bits == 16 or (bits == 8 and photometric == 0):
        assert found == "mode"
    else:
        assert_near(found, gray(shown, bits), 0)


def test_ycbcr_of_one_resolution_is_converted_and_other_is_refused() -> None:
    values = levels(8, 3)
    luma, blue, red = (values[..., channel].astype(float) for channel in range(3))
    blue, red = blue - 128, red - 128
    wanted = np.stack([luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue], axis=2)
    found = outcome(tiff(values, photometric=6, tags=[(530, 3, [1, 1])]))
    assert_near(found, np.clip(wanted, 0, 255), 1.5)
    assert outcome(tiff(values, photometric=6, tags=[(530, 3, [2, 2])])) == "mode"
    assert outcome(tiff(values, photometric=6)) == "mode"  # the default is two


USUAL = {
    529: (299, 1000, 587, 1000, 114, 1000),
    532: (0, 1, 255, 1, 128, 1, 255, 1, 128, 1, 255, 1),
}  # TIFF 6.0, section 21


@FORMS
@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("tag", USUAL)
def test_ycbcr_with_numbers_of_its_own_is_refused(tag: int, little: bool, form: Any) -> None:
    def outcome_of(kind: int, numbers: Any) -> Any:
        return outcome(
            form(tiff(levels(8, 3), photometric=6, little=little, tags=[(530, 3, [1, 1]), (tag, kind, numbers)]))
        )

    plain = outcome(tiff(levels(8, 3), photometric=6, tags=[(530, 3, [1, 1])]))
    usual = USUAL[tag]
    assert_near(outcome_of(RATIONAL, usual), plain, 0)
    assert_near(outcome_of(RATIONAL, [7 * number for number in usual]), plain, 0)  # the same fractions
    for place in range(0, len(usual), 2):
        assert outcome_of(RATIONAL, [number + (index == place) for index, number in enumerate(usual)]) == "mode"
    assert outcome_of(RATIONAL, usual[:-2]) == "mode"
    fractions = [top / bottom for top, bottom in zip(usual[::2], usual[1::2], strict=True)]
    for kind in (11, 12):
        assert outcome_of(kind, fractions) == "mode"


# Types of the same whole number: byte, short, long, signed short, signed long.
WHOLE = pytest.mark.parametrize("kind", [1, 3, 4, 8, 9])


@WHOLE
@pytest.mark.parametrize("little", [True, False])
def test_a_number_counts_whatever_its_type(little: bool, kind: int) -> None:
    plane, inverted = levels(8, 1), levels(16, 1)
    how = {"little": little}
    assert_near(outcome(tiff(plane, tags=[(284, kind, [2])], **how)), gray(plane, 8), 0)
    found = outcome(tiff(inverted, bits=16, tags=[(262, kind, [0])], **how))
    assert_near(found, gray(65535 - inverted, 16), 0)
    colors = levels(8, 3)
    assert_near(outcome(tiff(colors, photometric=2, planar=2, tags=[(284, kind, [2])], **how)), colors, 0)
    wide = tiff(levels(16, 3), bits=16, photometric=2, planar=2, tags=[(284, kind, [2])], **how)
    assert outcome(wide) == "mode"
    assert outcome(tiff(plane, tags=[(339, kind, [2])], **how)) == "mode"  # signed samples


@FORMS
@pytest.mark.parametrize("kind", [RATIONAL, 11, 12])
def test_a_number_of_another_type_is_refused(form: Any, kind: int) -> None:
    one = [2, 1] if kind == RATIONAL else [2]
    for tag, planar in ((284, 2), (339, 1)):
        data = tiff(levels(8, 3), photometric=2, planar=planar, tags=[(tag, kind, one)])
        try:
            value = form(data)
        except OSError:
            continue  # Pillow does not open it
        with pytest.raises(MediaError, match=f"tag {tag} with values of a type") as caught:
            pixels(value)
        assert caught.value.reason == "mode"


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ([(332, 3, [2])], "inks other than"),
        ([(259, 3, [50001])], "compressed by method 50001"),
        ([(262, 3, [32803])], "raw data of a camera"),
        ([(262, 3, [4])], "transparency mask"),
        ([(262, 3, [999])], "photometric interpretation 999"),
    ],
)
def test_what_is_not_decoded_is_named(tags: list[Any], said: str) -> None:
    replaced = {tag for tag, _, _ in tags}
    data = bytearray(tiff(levels(8, 4), photometric=5, tags=[entry for entry in tags if entry[0] == 332]))
    (at,) = struct.unpack_from("<I", data, 4)
    for index in range(struct.unpack_from("<H", data, at)[0]):
        place = at + 2 + 12 * index
        (tag,) = struct.unpack_from("<H", data, place)
        if tag in replaced:
            struct.pack_into("<H", data, place + 8, next(values[0] for one, _, values in tags if one == tag))
    with pytest.raises(MediaError, match=said) as caught:
        pixels(bytes(data))
    assert caught.value.reason == "mode"


# ---------------------------------------------------------------- several directories


REDUCED, PAGE, MASK = (254, 4, [1]), (254, 4, [2]), (254, 4, [4])


def two(first: Any, second: Any, *, little: bool = True) -> bytes:
    """A file of two images, each with the tags that say what it is."""
    small, small_tags = first
    large, large_tags = second
    head = tiff(small, tags=small_tags, little=little)
    return linked(head, tiff(large, tags=large_tags, little=little, offset=len(head)), little)


SMALL, LARGE = levels(8, 1, 1)[:3, :4], levels(8, 1, 2)


@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("declared", [REDUCED, (255, 3, [2]), MASK], ids=["reduced", "reduced, as of old", "mask"])
def test_the_full_image_is_served_and_not_its_thumbnail(declared: Any, little: bool) -> None:
    data = two((SMALL, [declared]), (LARGE, []), little=little)
    size = probe(data)
    assert (size.height, size.width) == (HEIGHT, WIDTH)  # type: ignore[union-attr]
    assert_near(pixels(data), gray(LARGE, 8), 0)
    assert open_image(data, path="x", settings=Settings()).decode().notes == ()


def test_of_several_pages_the_first_is_served_and_that_is_noted() -> None:
    data = two((SMALL, [PAGE]), (LARGE, [PAGE]))
    decoded = open_image(data, path="x", settings=Settings()).decode()
    assert_near(decoded.pixels, gray(SMALL, 8), 0)
    assert decoded.notes == ("page 1 of 2 was used",)


def test_a_full_image_below_the_thumbnail_is_served() -> None:
    head = tiff(SMALL, tags=[REDUCED, (330, 4, [0])])
    below = tiff(LARGE, offset=len(head))
    entry = head.index(struct.pack("<HHI", 330, 4, 1))
    data = head[: entry + 8] + struct.pack("<I", len(head)) + head[entry + 12 :] + below[len(head) :]
    assert_near(pixels(data), gray(LARGE, 8), 0)


def test_a_raw_image_with_a_thumbnail_is_refused_by_what_it_is() -> None:
    data = two((SMALL, [REDUCED]), (LARGE, []))
    second = data.index(struct.pack("<HHI", 262, 3, 1), len(tiff(SMALL, tags=[REDUCED])))
    raw = data[: second + 8] + struct.pack("<H", 32803) + data[second + 10 :]
    with pytest.raises(
        MediaError, match=r"raw data of a camera's sensor.*what could be decoded is a thumbnail"
    ) as caught:
        pixels(raw)
    assert caught.value.reason == "mode"


def test_a_thumbnail_alone_is_served_and_noted() -> None:
    decoded = open_image(tiff(SMALL, tags=[REDUCED]), path="x", settings=Settings()).decode()
    assert_near(decoded.pixels, gray(SMALL, 8), 0)
    assert decoded.notes == ("its only image is declared a thumbnail",)


def test_directories_in_a_circle_end() -> None:
    data = bytearray(two((SMALL, [PAGE]), (LARGE, [PAGE])))
    (first,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    (second,) = struct.unpack_from("<I", data, first + 2 + 12 * count)
    (count,) = struct.unpack_from("<H", data, second)
    struct.pack_into("<I", data, second + 2 + 12 * count, first)
    assert_near(pixels(bytes(data)), gray(SMALL, 8), 0)


def test_what_libtiff_has_to_say_does_not_reach_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(tiff(levels(8, 1), compression=8, rows=1))
    data[-40:] = bytes(40)
    assert outcome(bytes(data)) == "broken"
    assert capfd.readouterr().err == ""
