"""What of a TIFF is decoded, and whether Pillow decodes it rightly: read from its directories, before any pixel.

Pillow reads one directory after the other and knows some layouts of samples; others it does not open, or opens and decodes wrongly.
Those are refused here with the reason. Source: TIFF 6.0; Adobe's technical notes on TIFF 6.0 for directories below others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from PIL.TiffImagePlugin import IFDRational

from mm_plugin.errors import MediaError

_SUBFILE, _OLD_SUBFILE, _WIDTH = 254, 255, 256
_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL, _SAMPLES, _PLANAR = 258, 259, 262, 266, 277, 284
_COLOR_MAP, _BELOW, _INKS, _EXTRA, _FORMAT, _SUBSAMPLING = 320, 330, 332, 338, 339, 530
_COEFFICIENTS, _REFERENCE = 529, 532
# Numerators and denominators. Source: TIFF 6.0, section 21.
_USUAL_YCBCR = {
    _COEFFICIENTS: (299, 1000, 587, 1000, 114, 1000),
    _REFERENCE: (0, 1, 255, 1, 128, 1, 255, 1, 128, 1, 255, 1),
}
_READ = frozenset({
    _COEFFICIENTS, _REFERENCE,
    _SUBFILE, _OLD_SUBFILE, _WIDTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL, _SAMPLES, _PLANAR, _COLOR_MAP, _BELOW, _INKS, _EXTRA,
    _FORMAT, _SUBSAMPLING,
})  # fmt: skip
_BYTE, _SHORT, _RATIONAL = 1, 3, 5
_TYPES = {_BYTE: "B", _SHORT: "H", 4: "I", _RATIONAL: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
_NOT_WHOLE = (2, 7, 10, 11, 12)  # text, bytes of unknown meaning, signed fractions and floats
_MOST_DIRECTORIES = 65_536
_MOST_BELOW = 64
_MOST_VALUES = 3 << 16  # of a color map

_WHITE_IS_ZERO, _GRAY, _RGB, _PALETTE, _CMYK, _YCBCR, _LAB = 0, 1, 2, 3, 5, 6, 8
_COLORS = {_WHITE_IS_ZERO: 1, _GRAY: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3, _LAB: 3}
_NAMES = {
    4: "a transparency mask",
    32803: "the raw data of a camera's sensor",
    34892: "the raw data of a camera's sensor",
}
_JPEGS = (6, 7)
# Those of the libtiff within Pillow's wheels: none, CCITT (3), LZW, JPEG (2), deflate (2), PackBits, LZMA, Zstandard.
_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32946, 32773, 34925, 50000)
_NONE = 1
_UNSIGNED, _SIGNED, _FLOAT, _UNDEFINED = 1, 2, 3, 4

Tags = Mapping[int, tuple[int, ...]]


class Levels(msgspec.Struct, frozen=True):
    """How the gray levels of more than 8 bits, as Pillow decodes them, become those of 8.

    Attributes:
        bits: of a sample; the largest level is white, or black.
        inverted: whether 0 is white.
    """

    bits: int = 16
    inverted: bool = False


class Directory(msgspec.Struct, frozen=True):
    """One image of a TIFF.

    Attributes:
        offset: of the directory in the file, bytes.
        tags: those that are read here, with their values.
        entries: (offset in the file, type of the values) of each of them.
        unread: tags that matter here, whose values are of a type that they cannot have.
    """

    offset: int
    tags: Tags
    entries: Mapping[int, tuple[int, int]]
    unread: tuple[int, ...] = ()

    @property
    def is_reduced(self) -> bool:
        """Whether it is marked as a smaller version of another image."""
        return bool(_first(self.tags, _SUBFILE, 0) & 1) or _first(self.tags, _OLD_SUBFILE, 1) == 2

    @property
    def is_mask(self) -> bool:
        """Whether it is marked as the transparency mask of another image."""
        return bool(_first(self.tags, _SUBFILE, 0) & 4) or _first(self.tags, _PHOTOMETRIC, 0) == 4


class TiffFile(msgspec.Struct, frozen=True, eq=False):
    """The image of a TIFF that is served.

    Attributes:
        data: the file, with the directory of that image first.
        tags: of that directory.
        notes: what else the file holds.
    """

    data: bytes
    tags: Tags
    notes: tuple[str, ...] = ()


def is_tiff(data: bytes) -> bool:
    """Whether a file has the signature of a TIFF, classic or of 64-bit offsets."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def choose(data: bytes) -> TiffFile | None:
    """The first full image of a TIFF: not a thumbnail, nor a mask, while there is another. None where its directories are broken.

    Raises:
        MediaError: the image is of a layout that cannot be decoded rightly.
    """
    reader = _Reader(data)
    try:
        main = list(reader.chain())
        full = [one for one in main if not one.is_reduced and not one.is_mask]
        below = [] if full else [one for one in reader.below(main) if not one.is_reduced and not one.is_mask]
    except (struct.error, IndexError, KeyError, OverflowError):
        return None
    chosen = next(iter([*full, *below, *main]), None)
    if chosen is None:
        return None
    if data[:4] == b"MM\0+":
        _refuse("has 64-bit offsets in big-endian order")
    notes = (f"page 1 of {len(full)} was used",) if len(full) > 1 else ()
    if chosen.is_reduced:
        notes = ("its only image is declared a thumbnail",)
    try:
        _check_types(chosen.unread)
        check(chosen.tags, is_little=data[:2] == b"II")
    except MediaError as error:
        if chosen is main[0] or not main[0].is_reduced:
            raise
        raise MediaError(f"{error.message}; what could be decoded is a thumbnail", reason=error.reason) from error
    patched = reader.beginning_with(chosen) if chosen is not main[0] else data
    return TiffFile(reader.with_shorts(patched, chosen, _as_pillow_knows(chosen)), chosen.tags, notes)


def _as_pillow_knows(chosen: Directory) -> dict[int, int]:
    """Values of tags in place of those in the file, which say the same in the way that Pillow reads."""
    tags = chosen.tags
    # Pillow takes a number of type BYTE for text, and passes over what it does not know of planes.
    found = {tag: tags[tag][0] for tag, (_, kind) in chosen.entries.items() if kind == _BYTE and len(tags[tag]) == 1}
    if _first(tags, _PLANAR, 1) == 2 and _first(tags, _SAMPLES, 1) == 1:
        found[_PLANAR] = 1  # one plane is the same as no planes, which Pillow does not know
    if levels_of(tags) == Levels(16, inverted=True):
        found[_PHOTOMETRIC] = _GRAY  # Pillow knows this layout in one of the byte orders alone, and inverts nothing
    return found


def tags_of(image: Any) -> Tags:
    """The tags that are read here, of an image that Pillow opened."""
    found: dict[int, tuple[int, ...]] = {}
    for tag in _READ & set(image.tag_v2):
        value = image.tag_v2[tag]
        values = value if isinstance(value, tuple) else (value,)
        if tag in _USUAL_YCBCR and all(isinstance(one, IFDRational) for one in values):
            values = tuple(half for one in values for half in (one.numerator, one.denominator))
        if all(isinstance(one, int) for one in values):
            found[tag] = values
    return found


def check_opened(image: Any) -> None:
    """Refuse an image that Pillow opened, for the reasons of `check`.

    Raises:
        MediaError: as for `check`.
    """
    tags = tags_of(image)
    _check_types(sorted(_READ & set(image.tag_v2) - set(tags)))
    check(tags)
    if _first(tags, _PLANAR, 1) == 2 and _first(tags, _COMPRESSION, 1) == _NONE and _first(tags, _SAMPLES, 1) == 1:
        _refuse("has its samples in one plane, which Pillow misreads; pass the file itself")


def levels_of(tags: Tags) -> Levels:
    """How gray levels of more than 8 bits are read."""
    return Levels(_first(tags, _BITS, 1), _first(tags, _PHOTOMETRIC, 0) == _WHITE_IS_ZERO)


def short_palette(tags: Tags) -> bytes | None:
    """The palette as bytes, red then green then blue, where its levels were written as 0 to 255 in place of 0 to 65535."""
    colors = tags.get(_COLOR_MAP, ())
    is_short = bool(colors) and 0 <= min(colors) <= max(colors) <= 255 and _first(tags, _PHOTOMETRIC, 0) == _PALETTE
    return bytes(colors) if is_short else None


def check(tags: Tags, *, is_little: bool = True) -> None:
    """Refuse a layout of samples that Pillow does not decode, or decodes wrongly.

    Args:
        tags: of the directory.
        is_little: whether the file is in little-endian order.

    Raises:
        MediaError: its message says what the layout is; the reason is `mode`.
    """
    photometric, samples = _first(tags, _PHOTOMETRIC, 0), _first(tags, _SAMPLES, 1)
    compression, planar = _first(tags, _COMPRESSION, 1), _first(tags, _PLANAR, 1) == 2 and samples > 1
    if photometric in _NAMES:
        _refuse(f"holds {_NAMES[photometric]}")
    if compression not in _COMPRESSIONS:
        _refuse(f"is compressed by method {compression}")
    if compression in _JPEGS:
        return  # libtiff decodes these, colors and all
    if photometric not in _COLORS:
        _refuse(f"has the photometric interpretation {photometric}")
    bits = tags.get(_BITS, (1,))
    bits = bits[:samples] if len(bits) > 1 else bits * min(samples, 16)
    formats = set(tags.get(_FORMAT, (_UNSIGNED,)))
    if _FLOAT in formats:
        _refuse("has floating-point samples, whose scale is unknown")
    if not formats <= {_UNSIGNED, _UNDEFINED}:
        _refuse("has signed or complex samples, whose scale is unknown")
    if len(set(bits)) != 1:
        _refuse(f"has samples of {', '.join(map(str, bits))} bits")
    extra = tags.get(_EXTRA, ())
    if not _is_known(photometric, bits[0], samples, extra) or (bits[0] == 12 and not is_little):
        kind = f"{samples} samples of {bits[0]} bits and photometric interpretation {photometric}"
        _refuse(f"has {kind}" + (f" and extra samples {extra}" if extra else ""))
    if _first(tags, _FILL, 1) == 2 and (bits[0] == 16 or (photometric == _WHITE_IS_ZERO and bits[0] == 8)):
        _refuse(f"has samples of {bits[0]} bits, each byte with its last bit first")
    if photometric == _CMYK and _first(tags, _INKS, 1) != 1:
        _refuse("has inks other than cyan, magenta, yellow and black")
    if photometric == _YCBCR and samples > 1 and compression == _NONE:
        if tags.get(_SUBSAMPLING, (2, 2)) != (1, 1):
            _refuse("has uncompressed YCbCr samples of several resolutions")
        if any(_ratios(tags.get(tag, usual)) != _ratios(usual) for tag, usual in _USUAL_YCBCR.items()):
            _refuse("has uncompressed YCbCr samples with coefficients or reference levels of its own")
    known = extra in ((), (2,)) or (compression != _NONE and set(extra) == {0})
    if planar and (bits[0] == 16 or photometric not in (_RGB, _CMYK) or not known):
        _refuse(f"has its {samples} samples of {bits[0]} bits in separate planes")


def _check_types(unread: Sequence[int]) -> None:
    if unread:
        _refuse(f"has tag {unread[0]} with values of a type that it cannot have")


def _ratios(values: tuple[int, ...]) -> list[float]:
    return [top / max(1, bottom) for top, bottom in zip(values[::2], values[1::2], strict=False)]


def _is_known(photometric: int, bits: int, samples: int, extra: tuple[int, ...]) -> bool:
    """Whether Pillow has this layout, and decodes it rightly."""
    others = samples - _COLORS[photometric]
    if photometric in (_WHITE_IS_ZERO, _GRAY):
        if others == 1:
            return photometric == _GRAY and bits == 8 and extra in ((0,), (1,), (2,))
        return others == 0 and bits in ((1, 2, 4, 8, 16) if photometric == _WHITE_IS_ZERO else (1, 2, 4, 8, 12, 16))
    if photometric == _PALETTE:
        return bits in (1, 2, 4, 8) if others == 0 else others == 1 and bits == 8 and extra in ((0,), (2,))
    if photometric == _RGB:
        if bits == 8:
            return others <= 3 and (len(extra) == others or (others == 1 and not extra))
        return bits == 16 and others <= 1
    if photometric == _CMYK:
        return (bits == 8 and others <= 2 and set(extra) <= {0}) or (bits == 16 and others == 0)
    return bits == 8 and (others == 0 or (photometric == _YCBCR and samples == 1))


def _refuse(what: str) -> None:
    raise MediaError(f"the TIFF {what}; convert it to 8 bits per sample, gray or RGB", reason="mode")


def _first(tags: Tags, tag: int, otherwise: int) -> int:
    values = tags.get(tag, ())
    return values[0] if values else otherwise


class _Reader:
    """The directories of one file. Raises `struct.error`, `IndexError` or `KeyError` where they are broken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._order = "<" if data[:2] == b"II" else ">"
        self._is_big = data[2:4] in (b"+\0", b"\0+")
        self._left = _MOST_DIRECTORIES

    def chain(self) -> Iterator[Directory]:
        """The directories from the first on, each of which names the next."""
        seen = set()
        (offset,) = self._unpack("Q" if self._is_big else "I", 8 if self._is_big else 4)
        while offset and offset not in seen:
            seen.add(offset)
            found, offset = self._directory(offset)
            yield found

    def below(self, directories: list[Directory]) -> Iterator[Directory]:
        """The directories that others name as belonging to them."""
        for directory in directories:
            for offset in directory.tags.get(_BELOW, ())[:_MOST_BELOW]:
                yield self._directory(offset)[0]

    def _directory(self, offset: int) -> tuple[Directory, int]:
        self._left -= 1
        if self._left < 0:
            raise MediaError(f"expected at most {_MOST_DIRECTORIES} TIFF directories, got more", reason="broken")
        count_code, entry, value_code = ("Q", 20, "Q") if self._is_big else ("H", 12, "I")
        (count,) = self._unpack(count_code, offset)
        start = offset + struct.calcsize(count_code)
        if start + count * entry > len(self._data):
            raise IndexError
        tags, entries, unread = {}, {}, []
        for at in range(start, start + count * entry, entry):
            tag, kind = self._unpack("HH", at)
            if tag in _READ and (kind in _NOT_WHOLE or (kind == _RATIONAL and tag not in _USUAL_YCBCR)):
                unread.append(tag)
            elif tag in _READ and kind in _TYPES:
                (length,) = self._unpack(value_code, at + 4)
                at_value = at + entry - struct.calcsize(value_code)
                code = f"{min(length, _MOST_VALUES) * (2 if kind == _RATIONAL else 1)}{_TYPES[kind]}"
                if struct.calcsize("=" + code) > struct.calcsize("=" + value_code):
                    (at_value,) = self._unpack(value_code, at_value)
                tags[tag], entries[tag] = self._unpack(code, at_value), (at, kind)
        (following,) = self._unpack(value_code, start + count * entry)
        return Directory(offset, tags, entries, tuple(unread)), following

    def _unpack(self, code: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(self._order + code, self._data, offset)

    def beginning_with(self, directory: Directory) -> bytes:
        """The file with this directory as its first."""
        code, at = ("Q", 8) if self._is_big else ("I", 4)
        number = struct.pack(self._order + code, directory.offset)
        return self._data[:at] + number + self._data[at + len(number) :]

    def with_shorts(self, data: bytes, directory: Directory, values: Mapping[int, int]) -> bytes:
        """A file in which tags of a directory have one value of 16 bits each, and those named are these."""
        known = {tag: value for tag, value in values.items() if tag in directory.entries}
        if not known:
            return data
        patched = bytearray(data)
        for tag, value in known.items():
            code = "HHQH6x" if self._is_big else "HHIH2x"
            struct.pack_into(self._order + code, patched, directory.entries[tag][0], tag, _SHORT, 1, value)
        return bytes(patched)
