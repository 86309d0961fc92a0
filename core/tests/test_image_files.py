"""Bitmaps, icons, GIF, PNG and JPEG 2000 that Pillow reads otherwise than their formats say: right, or refused with the reason."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin import LimitError, MediaError, Settings
from mm_plugin.media import open_image, probe

HEIGHT, WIDTH = 5, 7


def pixels(value: Any, **settings: Any) -> np.ndarray:
    return open_image(value, path="images[0]", settings=Settings(**settings)).decode().pixels


def sent(data: bytes) -> Any:
    """As an object that came from another process."""
    return open_image(Image.open(io.BytesIO(data)), path="images[0]", settings=Settings()).value()


# The forms in which a file is given.
FORMS = pytest.mark.parametrize(
    "form", [bytes, lambda data: Image.open(io.BytesIO(data)), sent], ids=["file", "object", "sent"]
)


def reason(value: Any) -> str | None:
    with pytest.raises(MediaError) as caught:
        pixels(value)
    assert caught.value.path == "images[0]"
    return caught.value.reason


# ---------------------------------------------------------------- bitmaps


def bitmap(
    body: bytes,
    bits: int,
    *,
    compression: int = 0,
    header: int = 40,
    masks: Sequence[int] = (),
    palette: bytes = b"",
    height: int = HEIGHT,
    colors: int = 0,
    file: bool = True,
) -> bytes:
    """A Windows bitmap; the masks lie in the header, or after one of 40 bytes."""
    info = struct.pack("<IiiHHIIiiII", header, WIDTH, height, 1, bits, compression, len(body), 0, 0, colors, 0)
    inside = struct.pack(f"<{len(masks)}I", *masks)
    info += inside if header == 40 else inside.ljust(header - 40, b"\0")
    data = info + palette + body
    return b"BM" + struct.pack("<IHHI", 14 + len(data), 0, 0, 14 + len(info) + len(palette)) + data if file else data


def rows(values: np.ndarray, bits: int, *, upright: bool = False) -> bytes:
    """Rows of packed values, each filled to a multiple of 4 bytes, the last row first."""
    ordered = values if upright else values[::-1]
    if bits in (16, 32):
        raw = np.ascontiguousarray(ordered.astype(f"<u{bits // 8}")).view(np.uint8).reshape(len(values), -1)
    else:
        single = ordered[:, :, None] >> np.arange(bits - 1, -1, -1) & 1
        raw = np.packbits(single.reshape(len(values), -1).astype(np.uint8), axis=1)
    return np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4))).tobytes()


def mask_of(shift: int, count: int) -> int:
    return ((1 << count) - 1) << shift if count else 0


# Bits of red, green, blue and alpha, from the highest down.
LAYOUTS = {
    16: [
        (5, 5, 5, 0),
        (5, 6, 5, 0),
        (5, 5, 5, 1),
        (4, 4, 4, 0),
        (4, 4, 4, 4),
        (2, 3, 1, 0),
        (8, 8, 0, 0),
        (1, 9, 2, 4),
    ],
    32: [(8, 8, 8, 0), (8, 8, 8, 8), (11, 11, 10, 0), (10, 10, 10, 2), (6, 1, 7, 5), (16, 8, 8, 0), (5, 6, 5, 0)],
}
ORDERS = list(itertools.permutations(range(4)))[::5]


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("header", [40, 52, 56, 108, 124])
@pytest.mark.parametrize(
    ("bits", "layout"), [(bits, layout) for bits, found in LAYOUTS.items() for layout in found], ids=str
)
def test_channels_of_any_masks_are_spread_over_all_levels(
    bits: int, layout: tuple[int, ...], header: int, upright: bool
) -> None:
    if layout[3] and header < 56:
        pytest.skip("this header has no alpha mask")
    for seed, order in enumerate(ORDERS):
        masks, shift = [0] * 4, 0
        for channel in order:
            masks[channel] = mask_of(shift, layout[channel])
            shift += layout[channel]
        values = np.random.default_rng(seed).integers(0, 1 << bits, (HEIGHT, WIDTH))
        values[0, 0] = (1 << bits) - 1
        levels = []
        for mask in masks:
            low = (mask & -mask).bit_length() - 1
            largest = mask >> low if mask else 1
            levels.append(np.floor(((values & mask) >> max(0, low)) * 255 / largest + 0.5))
        wanted = np.stack(levels[:3], axis=2)
        if layout[3]:
            share = levels[3][..., None] / 255
            wanted = wanted * share + 255 * (1 - share)
        data = bitmap(
            rows(values, bits, upright=upright),
            bits,
            compression=3,
            header=header,
            masks=masks if header >= 56 else masks[:3],
            height=-HEIGHT if upright else HEIGHT,
        )
        found = pixels(data)
        size = probe(data)
        assert (size.height, size.width) == found.shape[:2] == (HEIGHT, WIDTH)  # type: ignore[union-attr]
        assert np.abs(found - wanted).max() <= (1.01 if layout[3] else 0)


@pytest.mark.parametrize("header", [40, 52, 56, 108, 124])
def test_masks_count_up_to_the_bits_of_a_pixel(header: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (HEIGHT, WIDTH))
    masks = [0x7C00, 0x3E0, 0x1F, 0]
    for above in (0x10000, 0xFFFF0000):
        wide = [mask | above for mask in masks][: 4 if header >= 56 else 3]
        data = bitmap(rows(values, 16), 16, compression=3, header=header, masks=wide)
        wanted = np.stack([np.floor((values >> shift & 31) * 255 / 31 + 0.5) for shift in (10, 5, 0)], axis=2)
        assert np.array_equal(pixels(data), wanted)
    # A channel without a bit is 0 everywhere.
    data = bitmap(rows(values, 16), 16, compression=3, header=header, masks=[0xFF00, 0x10000, 0xFF])
    assert np.array_equal(pixels(data), np.stack([values >> 8, 0 * values, values & 255], axis=2))


def test_a_mask_with_a_gap_is_refused() -> None:
    data = bitmap(rows(np.zeros((HEIGHT, WIDTH), int), 32), 32, compression=3, masks=(0xFF0FF, 0xFF0000, 0xFF000000))
    assert reason(data) == "mode"


@pytest.mark.parametrize("header", [56, 108, 124])
@pytest.mark.parametrize("within", ["bitmap", "icon"])
@FORMS
def test_an_alpha_of_0_everywhere_counts_as_absent(form: Any, within: str, header: int) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3))
    for alpha in (0, 1):
        values = colors[..., 0] << 16 | colors[..., 1] << 8 | colors[..., 2]
        values[0, 0] |= alpha << 24
        body = rows(values, 32)
        if within == "icon":
            data: Any = icon([(bitmap(body + bytes(4 * HEIGHT), 32, height=2 * HEIGHT, file=False), 32)])
        else:
            masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
            data = bitmap(body, 32, compression=3, header=header, masks=masks)
        found = pixels(form(data))
        if alpha:
            assert (found.reshape(-1, 3)[1:] == 255).all()  # one pixel has an alpha, so those of others count too
        else:
            assert np.array_equal(found, colors)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palettes_of_every_depth_show_their_colors(bits: int) -> None:
    indices = np.random.default_rng(0).integers(0, 1 << bits, (HEIGHT, WIDTH))
    colors = np.random.default_rng(1).integers(0, 256, (1 << bits, 3))
    palette = np.concatenate([colors[:, ::-1], np.zeros((len(colors), 1), int)], axis=1).astype(np.uint8).tobytes()
    for height, upright in ((HEIGHT, False), (-HEIGHT, True)):
        data = bitmap(rows(indices, bits, upright=upright), bits, palette=palette, height=height)
        assert np.array_equal(pixels(data), colors[indices])
    # A header that claims more colors than there can be, and a palette that is short: its colors count, others are black.
    assert np.array_equal(pixels(bitmap(rows(indices, bits), bits, palette=palette, colors=1 << 30)), colors[indices])
    short = bitmap(rows(indices, bits), bits, palette=palette[:4], colors=1)
    assert np.array_equal(pixels(short), np.where(indices[..., None] == 0, colors[0], 0))


GREEN, RED, BLUE = (0, 200, 0), (200, 0, 0), (0, 0, 200)
PALETTE = bytes([0, 200, 0, 0, 0, 0, 200, 0, 200, 0, 0, 0])


@pytest.mark.parametrize("bits", [4, 8])
def test_run_lengths_set_what_they_name_and_leave_the_rest_at_0(bits: int) -> None:
    def run(count: int, index: int) -> bytes:
        return bytes([count, index * 17 if bits == 4 else index])

    absolute = bytes([0, 3, 0x12, 0x10, 0, 0][: 4 if bits == 4 else 0] or [0, 3, 1, 2, 1, 0])
    body = run(3, 1) + absolute + b"\0\0"  # row 0: 111 121
    body += b"\0\0"  # row 1: empty
    body += b"\0\2\2\1" + run(2, 2) + b"\0\1"  # two to the right, one up: row 3; then the end, early
    data = bitmap(body, bits, compression={8: 1, 4: 2}[bits], palette=PALETTE, colors=3)
    wanted = np.zeros((HEIGHT, WIDTH), int)
    wanted[0, :6] = [1, 1, 1, 1, 2, 1]
    wanted[3, 2:4] = 2
    assert np.array_equal(pixels(data), np.array([GREEN, RED, BLUE])[wanted[::-1]])
    for cut in range(1, len(body)):  # a file that ends within its runs shows those that are there
        assert pixels(bitmap(body[:cut], bits, compression={8: 1, 4: 2}[bits], palette=PALETTE, colors=3)).shape == (
            HEIGHT,
            WIDTH,
            3,
        )


@pytest.mark.parametrize(("bits", "compression"), [(24, 4), (24, 5), (1, 3), (3, 0), (64, 0)])
def test_other_compressions_and_depths_of_bitmaps_are_named(bits: int, compression: int) -> None:
    assert reason(bitmap(bytes(1000), bits, compression=compression)) == "mode"


def test_a_bitmap_that_ends_early_is_broken() -> None:
    body = rows(np.zeros((HEIGHT, WIDTH), int), 16)
    assert reason(bitmap(body[:-20], 16, compression=3, masks=(0xF00, 0xF0, 0xF))) == "broken"


# ---------------------------------------------------------------- icons


def icon(images: Sequence[tuple[bytes, int]], side: int = 0) -> bytes:
    """An icon file of images, each with the bits that its directory claims."""
    head, at, out = struct.pack("<HHH", 0, 1, len(images)), 6 + 16 * len(images), b""
    for body, bits in images:
        head += struct.pack("<BBBBHHII", side or WIDTH, side or HEIGHT, 0, 0, 1, bits, len(body), at + len(out))
        out += body
    return head + out


def icon_image(bits: int, level: int) -> bytes:
    """A bitmap of one color within an icon: of 1, 4 and 8 bits the color is the first of the palette."""
    color = bytes([level, level, level, 255])
    mask = bytes(4 * HEIGHT)
    if bits <= 8:
        body = rows(np.zeros((HEIGHT, WIDTH), int), bits)
        return bitmap(body + mask, bits, palette=color + bytes(4 * ((1 << bits) - 1)), height=2 * HEIGHT, file=False)
    value = int.from_bytes(color, "little")
    if bits == 24:
        raw = np.tile(np.frombuffer(color[:3], np.uint8), (HEIGHT, WIDTH))
        body = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4))).tobytes()
    else:
        body = rows(np.full((HEIGHT, WIDTH), value), 32)
    return bitmap(body + mask, bits, height=2 * HEIGHT, file=False)


@pytest.mark.parametrize("claimed", [True, False], ids=["claimed", "claims 0"])
@pytest.mark.parametrize("depths", list(itertools.permutations((1, 4, 8, 24, 32), 3))[::3], ids=str)
def test_of_several_depths_the_best_is_served(depths: tuple[int, ...], claimed: bool) -> None:
    images = [(icon_image(bits, 10 * index + 10), bits if claimed else 0) for index, bits in enumerate(depths)]
    found = pixels(icon(images))
    assert (found == 10 * int(np.argmax(depths)) + 10).all()


def test_the_largest_is_served_before_the_deepest() -> None:
    small, large = io.BytesIO(), io.BytesIO()
    Image.new("RGBA", (4, 4), (1, 2, 3, 255)).save(small, "PNG")
    Image.new("L", (16, 16), 9).save(large, "PNG")
    assert (pixels(icon([(small.getvalue(), 32), (large.getvalue(), 8)], side=16)) == 9).all()


@FORMS
def test_an_alpha_of_0_everywhere_counts_in_a_png_within_an_icon(form: Any) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (WIDTH, HEIGHT), (1, 2, 3, 0)).save(file, "PNG")
    assert (pixels(form(icon([(file.getvalue(), 32)]))) == 255).all()


# ---------------------------------------------------------------- GIF


def gif(*frames: tuple[np.ndarray, tuple[int, int]], transparent: int | None, disposal: int, background: int) -> bytes:
    """A GIF of frames, each with its (top, left), on a screen of HEIGHT x WIDTH, with the palette green, red, blue, gray."""
    data = b"GIF89a" + struct.pack("<HHBBB", WIDTH, HEIGHT, 0xF1, background, 0) + bytes(GIF_COLORS.reshape(-1))
    for indices, (top, left) in frames:
        data += b"\x21\xf9\x04" + bytes([disposal << 2 | (transparent is not None), 0, 0, transparent or 0, 0])
        data += b"," + struct.pack("<HHHHB", left, top, indices.shape[1], indices.shape[0], 0)
        codes = [code for index in indices.reshape(-1) for code in (4, int(index))] + [5]  # a clear code before each
        bits = "".join(f"{code:03b}"[::-1] for code in codes)
        packed = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
        data += b"\2" + bytes([len(packed)]) + packed + b"\0"
    return data + b";"


GIF_COLORS = np.array([GREEN, RED, BLUE, (7, 7, 7)], np.uint8)


@FORMS
@pytest.mark.parametrize("disposal", range(4))
@pytest.mark.parametrize("transparent", [None, 0, 2])
def test_what_a_frame_leaves_open_of_its_screen_is_transparent(
    form: Any, transparent: int | None, disposal: int
) -> None:
    indices = np.array([[1, 2, 3], [0, 2, 1]])
    for top, left in ((1, 2), (0, 0), (HEIGHT - 2, WIDTH - 3)):
        wanted = np.full((HEIGHT, WIDTH, 3), (9, 8, 7))
        shown = GIF_COLORS[indices]
        if transparent is not None:
            shown[indices == transparent] = (9, 8, 7)
        wanted[top : top + 2, left : left + 3] = shown
        data = gif((indices, (top, left)), transparent=transparent, disposal=disposal, background=1)
        source = open_image(form(data), path="x", settings=Settings())
        assert np.array_equal(source.decode(background=(9, 8, 7)).pixels, wanted)


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("transparent", [None, 0])
def test_of_an_object_the_frame_is_taken_that_was_sought(transparent: int | None, is_sent: bool) -> None:
    whole = np.random.default_rng(0).integers(0, 4, (HEIGHT, WIDTH))
    part = np.array([[1, 2, 3], [0, 2, 1]])
    data = gif((whole, (0, 0)), (part, (1, 2)), transparent=transparent, disposal=1, background=1)
    frames = [np.where((whole == transparent)[..., None], 255, GIF_COLORS[whole])]
    frames.append(frames[0].copy())
    shown = part != transparent
    frames[1][1:3, 2:5][shown] = GIF_COLORS[part][shown]
    for order in ((0,), (1,), (0, 1), (1, 0), (1, 0, 1)):
        image = Image.open(io.BytesIO(data))
        for index in order:
            image.seek(index)
        source = open_image(image, path="x", settings=Settings())
        found = pixels(source.value()) if is_sent else source.decode().pixels
        assert np.array_equal(found, frames[order[-1]])


# ---------------------------------------------------------------- PNG


def png(kind: bytes = b"", body: bytes = b"", *, broken: bytes = b"") -> bytes:
    """A PNG of 2 x 2 gray pixels with one more chunk; the checksum of chunks of kind `broken` is wrong."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data) ^ (0xFFFF if name == broken else 0)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    more = chunk(kind, body) if kind else b""
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0))
    return head + more + chunk(b"IDAT", zlib.compress(b"\0\1\2\0\3\4")) + chunk(b"IEND", b"")


def colored(values: np.ndarray, bits: int, key: Sequence[int], *, interlaced: bool = False) -> bytes:
    """A PNG of gray or RGB levels of so many bits, one of which is transparent; an interlaced one has a single pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = values.shape[:2]
    single = values.reshape(height, -1, 1) >> np.arange(bits - 1, -1, -1) & 1
    raw = np.packbits(single.reshape(height, -1).astype(np.uint8), axis=1)
    color = 2 if values.ndim == 3 else 0
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlaced))
        + chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
        + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in raw)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("key", [(0x1234, 0x5678, 0x9ABC), (0, 0, 0), (0xFF00, 0xFF, 0xFFFF), (7, 7, 7)])
def test_of_16_bit_colors_the_one_is_transparent_that_equals_the_key_in_all_bits(
    key: tuple[int, ...], interlaced: bool
) -> None:
    """Colors that differ in one byte are opaque, though Pillow reads the upper one alone."""
    near = [tuple(level ^ (bit if place == channel else 0) for place, level in enumerate(key))
            for channel in range(3) for bit in (1, 0x80, 0x100, 0x8000)]  # fmt: skip
    swapped = tuple((level & 255) * 257 for level in key)
    values = np.array([[key, *near, *([swapped] if swapped != key else [])]])
    for at in range(values.shape[1]) if interlaced else [slice(None)]:
        some = values[:, at].reshape(1, -1, 3)
        wanted = np.where((some == key).all(axis=2)[..., None], (9, 8, 7), some >> 8)
        source = open_image(colored(some, 16, key, interlaced=interlaced), path="x", settings=Settings())
        assert source.probe() == probe(colored(some, 16, key))
        assert np.array_equal(source.decode(background=(9, 8, 7)).pixels, wanted)


@pytest.mark.parametrize("loaded", [False, True])
def test_an_object_of_16_bit_colors_with_a_key_is_refused(loaded: bool) -> None:
    key = (0x1234, 0x5678, 0x9ABC)
    image = Image.open(io.BytesIO(colored(np.array([[key]]), 16, key)))
    if loaded:
        image.load()
    source = open_image(image, path="images[0]", settings=Settings())
    for read in (source.probe, source.digest, source.decode, source.value):
        with pytest.raises(MediaError, match=r"images\[0\]: the PNG has a transparent color of 16 bits") as caught:
            read()
        assert caught.value.reason == "mode"
    assert image.info["transparency"] == key
    eight = colored(np.array([[(1, 2, 3), (3, 2, 1)]]), 8, (1, 2, 3))
    assert np.array_equal(pixels(Image.open(io.BytesIO(eight))), [[(255, 255, 255), (3, 2, 1)]])


@FORMS
@pytest.mark.parametrize("above", [False, True])  # bits of the key above those of a level, which do not count
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_of_gray_levels_of_every_depth_one_is_transparent(bits: int, above: bool, form: Any) -> None:
    largest = (1 << bits) - 1
    values = np.arange(1 << bits)[:: 257 if bits == 16 else 1].reshape(1, -1)
    shown = np.floor(values * 255 / largest + 0.5)
    for key in {0, 1, largest // 2, largest} & set(values[0].tolist()):
        wanted = np.where(values == key, 255, shown)
        given = form(colored(values, bits, [key | (1 << bits if above and 1 < bits < 16 else 0)]))
        before = given.info.copy() if isinstance(given, Image.Image) else None
        assert np.array_equal(pixels(given)[..., 0], wanted)
        assert before is None or given.info == before  # the caller's


ANCILLARY = {
    b"tEXt": b"Title\0x",
    b"zTXt": b"Title\0\0" + zlib.compress(b"x"),
    b"iTXt": b"Title\0\0\0\0\0x",
    b"iCCP": b"name\0\0" + zlib.compress(b"x"),
    b"pHYs": bytes(9),
    b"gAMA": bytes(4),
    b"tIME": bytes(7),
    b"eXIf": b"MM\0*\0\0\0\x08\0\0",
    b"sRGB": b"\0",
    b"prIv": b"own",
}


@pytest.mark.parametrize("kind", ANCILLARY)
def test_a_wrong_checksum_in_a_chunk_that_no_pixel_needs_is_passed_over(kind: bytes) -> None:
    wanted = np.repeat(np.array([[1, 2], [3, 4]])[:, :, None], 3, axis=2)
    assert np.array_equal(pixels(png(kind, ANCILLARY[kind])), wanted)
    assert np.array_equal(pixels(png(kind, ANCILLARY[kind], broken=kind)), wanted)


@pytest.mark.parametrize(("kind", "body"), [(b"IHDR", b""), (b"tRNS", b"\0\1")])
def test_a_wrong_checksum_in_a_chunk_that_pixels_need_is_refused(kind: bytes, body: bytes) -> None:
    assert reason(png(kind if body else b"", body, broken=kind)) == "broken"


def test_chunks_are_counted() -> None:
    data = png()
    tiny = struct.pack(">I", 0) + b"prIv" + struct.pack(">I", zlib.crc32(b"prIv"))
    with pytest.raises(MediaError, match="at most 65536 pieces") as caught:
        pixels(data[:33] + tiny * 70_000 + data[33:])
    assert caught.value.reason == "broken"


# ---------------------------------------------------------------- JPEG 2000


def jpeg2000(mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((16, 12), 50).convert(mode).save(file, "JPEG2000")
    return file.getvalue()


def with_channels(data: bytes, *channels: tuple[int, int, int]) -> bytes:
    """The file with a box that says what each channel is."""
    body = struct.pack(">H", len(channels)) + b"".join(struct.pack(">3H", *one) for one in channels)
    box = struct.pack(">I", 8 + len(body)) + b"cdef" + body
    at = data.index(b"jp2h") - 4
    (size,) = struct.unpack_from(">I", data, at)
    whole = bytearray(data[at : at + size])
    while b"cdef" in whole:  # the one that Pillow wrote
        old = whole.index(b"cdef") - 4
        del whole[old : old + struct.unpack_from(">I", whole, old)[0]]
    head = struct.pack(">I", len(whole) + len(box)) + bytes(whole[4:]) + box
    return data[:at] + head + data[at + size :]


def test_channels_in_their_order_are_decoded_and_others_refused() -> None:
    plain, alpha = jpeg2000(), jpeg2000("RGBA")
    in_order = [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    assert np.array_equal(pixels(with_channels(plain, *in_order)), pixels(plain))
    assert np.array_equal(pixels(with_channels(alpha, *in_order, (3, 1, 0))), pixels(alpha))
    for wrong in (
        [(0, 0, 3), (1, 0, 2), (2, 0, 1)],
        [(0, 0, 1), (1, 0, 3), (2, 0, 2)],
        [*in_order, (3, 2, 0)],
        [(0, 1, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3)],
        [*in_order, (3, 65535, 65535)],
    ):
        assert reason(with_channels(plain if len(wrong) == 3 else alpha, *wrong)) == "mode"


@pytest.mark.parametrize(
    ("across", "down", "fills"), [(2, 2, True), (2, 1, True), (3, 1, False), (1, 5, False), (5, 5, False)]
)
def test_components_that_do_not_fill_the_sides_are_refused(across: int, down: int, fills: bool) -> None:
    """16 x 12 pixels; the header alone decides, before anything is decoded."""
    data = bytearray(jpeg2000())
    components = data.index(b"\xff\x4f\xff\x51") + 42
    for index in (1, 2):
        data[components + 3 * index + 1 : components + 3 * index + 3] = bytes([across, down])
    try:
        pixels(bytes(data))
    except MediaError as error:
        assert (error.reason == "mode") == (not fills)  # noqa: PT017 - what remains is a codestream that was not written so


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["JPEG2000", "codestream"])
def test_levels_of_other_than_8_bits_and_signed_ones_are_refused(kind: str, mode: str) -> None:
    """Pillow wraps the levels of colors that have more, so that white is black, and shifts those that have fewer."""
    whole = jpeg2000(mode)
    start = whole.index(b"\xff\x4f\xff\x51")
    for signed in (0, 0x80):
        for bits in range(1, 17):
            if (bits == 8 or (bits > 8 and mode == "L")) and not signed:
                continue  # right, and gray of more is scaled by its bits
            for index in range(len(mode)):
                data = bytearray(whole)
                data[start + 42 + 3 * index] = signed | (bits - 1)
                with pytest.raises(
                    MediaError, match=f"components of {bits} bits" + " with a sign" * (signed > 0)
                ) as caught:
                    pixels(bytes(data if kind == "JPEG2000" else data[start:]))
                assert caught.value.reason == "mode"


# ---------------------------------------------------------------- reasons and memory


def whole_files() -> dict[str, bytes]:
    image = Image.effect_noise((32, 24), 60)
    found = {}
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO"):
        file = io.BytesIO()
        image.convert("RGB").save(file, name, **({"sizes": [(16, 16)]} if name == "ICO" else {}))
        found[name] = file.getvalue()
    return found


@pytest.mark.parametrize("name", whole_files())
def test_a_damaged_file_of_a_served_format_is_broken_and_not_another_format(name: str) -> None:
    data = whole_files()[name]
    signature = {"PPM": 3, "ICO": 10, "JPEG": 3, "BMP": 18}.get(name, 12)
    for damage in (
        data[: signature + 8],
        data[: len(data) // 3],
        data[:signature] + bytes(len(data) - signature),
        data[:signature] + b"\xff" * (len(data) - signature),
    ):
        try:
            pixels(damage)
        except LimitError:
            continue  # the header claims a size above the limits
        except MediaError as error:
            assert error.reason in ("broken", "mode", "empty"), damage  # noqa: PT017 - some damage is shown as viewers show it
    for other in (b"nothing", b"BM is not a bitmap", b"P9 12 12", b"<svg/>", b"\0\0\1\0\0\0", b"II*x", b"GIF90a"):
        assert reason(other + bytes(40)) == "format"


@pytest.mark.parametrize("name", whole_files())
def test_memory_for_decoding_is_counted_before_it_is_taken(name: str) -> None:
    data = whole_files()[name]
    size = probe(data)
    area = size.height * size.width  # type: ignore[union-attr]
    for factor, right in ((30, True), (8, False)):
        if right:
            pixels(data, max_decode_bytes=factor * area)
        else:
            with pytest.raises(LimitError, match="bytes for decoding") as caught:
                pixels(data, max_decode_bytes=factor * area)
            assert caught.value.setting == "max_decode_bytes"
