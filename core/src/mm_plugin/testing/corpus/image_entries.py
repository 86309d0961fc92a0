"""Odd images: every format and mode that is in use, and what must be refused. Decodes nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, features

from mm_plugin.testing.corpus.entries import CorpusEntry, shows
from mm_plugin.testing.corpus.formats import (
    exif,
)
from mm_plugin.testing.corpus.image_content import (
    BLOCKS,
    FINE,
    GRAY,
    SEEN,
    gray_to_rgb,
    jpeg_bytes,
    over_white,
    printed_inks,
    refuses_image,
    to_inks,
    to_ycc,
)
from mm_plugin.testing.corpus.image_refusals import bomb_entries, broken_entries, foreign_entries, webp_bomb_entries
from mm_plugin.testing.corpus.raster_formats import (
    avif_entries,
    bmp_entries,
    icon_entries,
    jpeg2000_entries,
    netpbm_entries,
    tiff_entries,
)
from mm_plugin.testing.corpus.web_formats import gif_entries, jpeg_entries, odd_png_entries, png_entries, webp_entries


def images() -> Iterator[CorpusEntry]:
    """Every odd image, equal bytes each time; formats are left out whose libraries Pillow was built without."""
    always = (
        jpeg_entries,
        png_entries,
        odd_png_entries,
        gif_entries,
        bmp_entries,
        icon_entries,
        netpbm_entries,
        _pil,
        _arrays,
        broken_entries,
        bomb_entries,
        foreign_entries,
    )
    optional = {
        "webp": (webp_entries, webp_bomb_entries),
        "libtiff": (tiff_entries,),
        "jpg_2000": (jpeg2000_entries,),
        "avif": (avif_entries,),
    }
    for family in always:
        yield from family()
    for feature, families in optional.items():
        if features.check(feature):
            for family in families:
                yield from family()


def _pil() -> Iterator[CorpusEntry]:
    image = Image.fromarray(FINE)
    yield shows("PIL/RGB", image, FINE)
    yield shows("PIL/L", Image.fromarray(GRAY), gray_to_rgb(GRAY))
    yield shows("PIL/1", Image.fromarray(GRAY > 99), gray_to_rgb(np.where(GRAY > 99, 255, 0).astype(np.uint8)))
    turned = Image.fromarray(FINE)
    turned.info["exif"] = b"Exif\0\0" + exif(6)
    yield shows("PIL/made here, with Exif", turned, SEEN[6](FINE))
    alpha = (np.arange(16 * 24) * 11 % 256).astype(np.uint8).reshape(16, 24)
    sheer = Image.fromarray(np.dstack([FINE, alpha]))
    yield shows("PIL/RGBA", sheer, over_white(FINE, alpha), 1)
    yield shows("PIL/RGBa", sheer.convert("RGBa"), over_white(FINE, alpha), 2, "multiplied before")
    gray = Image.fromarray(np.dstack([GRAY, alpha]))
    yield shows("PIL/LA", gray, over_white(gray_to_rgb(GRAY), alpha), 1)
    yield shows("PIL/CMYK", to_inks(FINE), printed_inks(FINE), 2)
    ycc = Image.frombytes("YCbCr", (24, 16), to_ycc(BLOCKS).astype(np.uint8).tobytes())
    yield shows("PIL/YCbCr", ycc, BLOCKS, 2)
    wide = (np.arange(10 * 7) * 947 % 65536).astype(np.uint16).reshape(10, 7)
    narrow = gray_to_rgb(np.rint(wide / 257).astype(np.uint8))
    for mode, kind in (("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")):
        yield shows(f"PIL/{mode}", Image.frombytes(mode, (7, 10), wide.astype(kind).tobytes()), narrow)
    yield refuses_image("PIL/F", Image.new("F", (3, 2)), "mode")
    yield refuses_image("PIL/I of 32 bits", Image.new("I", (3, 2), 70_000), "mode")
    yield refuses_image("PIL/no pixels", Image.new("RGB", (0, 5)), "empty")
    yield refuses_image("PIL/of a cut file", Image.open(io.BytesIO(jpeg_bytes(FINE)[:-128])), "broken")


def _arrays() -> Iterator[CorpusEntry]:
    yield shows("numpy/height, width, 3", FINE, FINE)
    yield shows("numpy/a mirrored view", FINE[:, ::-1], FINE[:, ::-1])
    yield shows("numpy/3 x 3 x 3", FINE[:3, :3], FINE[:3, :3], note="channels last, not guessed from the shape")
    yield shows("numpy/read only", np.frombuffer(FINE.tobytes(), np.uint8).reshape(FINE.shape), FINE)
    for name, array in {
        "channels first": np.ascontiguousarray(np.moveaxis(FINE, -1, 0)),
        "gray": GRAY,
        "RGBA": np.zeros((4, 4, 4), np.uint8),
        "floats": np.zeros((4, 4, 3), np.float32),
        "16 bits": np.zeros((4, 4, 3), np.uint16),
        "no pixels": np.zeros((0, 4, 3), np.uint8),
        "a batch": np.zeros((1, 4, 4, 3), np.uint8),
        "objects": np.full((4, 4, 3), None),
    }.items():
        yield refuses_image(f"numpy/{name}", array, "array")
    try:
        import torch
    except ImportError:  # the corpus itself needs none
        return
    first = torch.from_numpy(FINE).permute(2, 0, 1)
    yield shows("torch/3, height, width", first, FINE)
    yield shows("torch/contiguous", first.contiguous(), FINE)
    for name, tensor in {
        "channels last": torch.from_numpy(FINE),
        "floats": first.float(),
        "sparse": first.float().to_sparse(),
        "no pixels": first[:, :0],
        "without memory": torch.empty((3, 5, 4), dtype=torch.uint8, device="meta"),
    }.items():
        yield refuses_image(f"torch/{name}", tensor, "array")
