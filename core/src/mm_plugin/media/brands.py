"""AVIF and HEIF by all brands of a file, as its `ftyp` box lists them, in whatever order a writer put them. Decodes nothing.

Sources: ISO/IEC 14496-12, section 4.3; ISO/IEC 23008-12, annexes B to L; the AVIF specification, section 6.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from PIL import AvifImagePlugin

from mm_plugin.errors import MediaError
from mm_plugin.media.isobmff import brands_of, with_major_brand

_AVIF = (b"avif", b"avis")
# HEVC, in still images and in sequences.
_HEVC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
# Images coded otherwise: AVC, JPEG, JPEG 2000, VVC, EVC, uncompressed.
_OTHER_HEIF = (
    *(b"avci", b"avcs", b"jpeg", b"jpgs", b"j2ki", b"j2is", b"vvic", b"vvis", b"evbi", b"evbs", b"evmi", b"evms"),
    *(b"unif", b"mif2", b"mif3"),
)
# Of the container, whatever the codec.
_HEIF = (b"mif1", b"msf1", b"miaf", b"MiHE", b"MiHB", b"MiHA", b"MiPr", b"MA1B", b"MA1A")
_MOVIES = (
    *(
        b"isom",
        b"iso2",
        b"iso3",
        b"iso4",
        b"iso5",
        b"iso6",
        b"mp41",
        b"mp42",
        b"avc1",
        b"qt  ",
        b"M4V ",
        b"M4A ",
        b"M4B ",
    ),
    *(b"3gp4", b"3gp5", b"3gp6", b"3g2a", b"dash", b"MSNV", b"f4v ", b"F4V "),
)
_AV1 = re.compile(rb"infe[\x02\x03].{3}(?:..|....)..av01|stsd.{12}av01", re.DOTALL)  # an item or a track
_SEQUENCES = (b"msf1", b"avis")


def as_pillow_reads(data: bytes, formats: list[str]) -> tuple[bytes, list[str]]:
    """A file and the formats that it may be, with the brand in front by which Pillow's openers know it; others as they are.

    An opener looks at the first brand alone, and a file may begin with that of its container, or of a profile.

    Args:
        data: the file.
        formats: what Pillow can open here.

    Raises:
        MediaError: it is HEIF or AVIF and nothing here opens that, or it is a movie.
    """
    if data[4:8] != b"ftyp":
        return data, formats
    brands = brands_of(data)
    name = _format_of(brands, data)
    if name == "AVIF":
        if not AvifImagePlugin.SUPPORTED:
            raise MediaError(
                "AVIF needs a Pillow that was built with its codec; install a wheel of Pillow", reason="format"
            )
        return _led_by(data, brands, b"avis" if _is_sequence(brands, data) else b"avif", _AVIF), ["AVIF"]
    if name == "HEIF":
        if "HEIF" not in formats:
            raise MediaError(
                "HEIF (HEIC) needs an opener; install pillow-heif and call pillow_heif.register_heif_opener()",
                reason="format",
            )
        first = next((brand for brand in brands if brand in _HEVC), b"mif1")
        return _led_by(data, brands, first, (*_HEVC, b"mif1", b"msf1")), ["HEIF"]
    if any(brand in _MOVIES for brand in brands):
        raise MediaError(
            "the file is a movie (MP4, MOV or M4A), not an image; pass it as a video or audio", reason="format"
        )
    return data, formats


def _format_of(brands: Sequence[bytes], data: bytes) -> str | None:
    avif, hevc = (any(brand in known for brand in brands) for known in (_AVIF, _HEVC))
    if avif != hevc:
        return "AVIF" if avif else "HEIF"
    if not avif and not any(brand in (*_HEIF, *_OTHER_HEIF) for brand in brands):
        return None
    # Either both or none of the codecs is named: what the file holds decides.
    return "AVIF" if _AV1.search(data) else "HEIF"


def _is_sequence(brands: Sequence[bytes], data: bytes) -> bool:
    """Whether the images of a track come first: the brand in front says so, or none stands for a still image."""
    named = brands[0] in _SEQUENCES or (b"avif" not in brands and any(brand in _SEQUENCES for brand in brands))
    return named and b"moov" in data


def _led_by(data: bytes, brands: Sequence[bytes], brand: bytes, known: Sequence[bytes]) -> bytes:
    """The file with a brand in front, unless one that is known there leads it already, where openers look for it."""
    return data if brands[0] in known and data[8:12] == brands[0] else with_major_brand(data, brand)
