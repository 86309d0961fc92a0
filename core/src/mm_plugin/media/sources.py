"""Where encoded bytes come from: bytes, a file below the media root, `data:`, `file:` and `http(s):` URLs, bare base64.

Knows no format, and never reads more than `max_media_bytes`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np

from mm_plugin.errors import MediaError
from mm_plugin.files import open_regular
from mm_plugin.media.limits import Arrived, check_bytes, uncounted
from mm_plugin.settings import Settings

_PIECE = 1 << 20  # characters of a data: URL that are unescaped together
# The value of each hexadecimal digit, by its character.
_NO_DIGIT = 16
_HEX = np.full(256, _NO_DIGIT, np.uint8)
for _value, _digits in enumerate(
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "aA", "bB", "cC", "dD", "eE", "fF"]
):
    _HEX[list(_digits.encode())] = _value
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # two letters at least: one is a drive of Windows
# In one of the two alphabets of RFC 4648. Possessive: a long run of spaces must not be matched again from each of its places.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/\s]++|[A-Za-z0-9_\s-]++)(?:=\s*+){0,2}+", re.ASCII)
_SPACES = b" \t\n\r\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
# The smallest image has more characters than this in base64, and a short path may look like base64.
_LEAST_BASE64 = 40
_LONGEST_PATH = 4096


def is_remote(value: Any) -> bool:
    """Whether a media input has to be fetched over a network."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def is_encoded(value: Any) -> bool:
    """Whether a value is one of the forms in which an encoded file may come."""
    return isinstance(value, bytes | bytearray | memoryview | str | os.PathLike)


def read_bytes(value: Any, path: str, settings: Settings, arrived: Arrived = uncounted) -> bytes:
    """The encoded file that a value holds or names.

    Args:
        value: bytes, a path below `media_root`, a URL, or base64 text.
        path: where it stands in the request, for messages.
        settings: limits.
        arrived: called with the number of bytes before so many are read or copied, for limits on the whole request; what it raises
            comes through. Of text, bytes are counted once they are decoded.

    Raises:
        MediaError: it cannot be read, or is empty.
        LimitError: it has more bytes than `max_media_bytes`.
    """
    if isinstance(value, str):
        data = _read_text(value, path, settings, arrived)
    elif isinstance(value, os.PathLike):
        data = _read_file(value, path, settings, arrived)
    else:
        try:
            size = memoryview(value).nbytes
            check_bytes(path, size, settings)
            arrived(size)
            data = value if isinstance(value, bytes) else bytes(value)
        except ValueError as error:
            raise MediaError(
                f"{path}: the memoryview was released before it was read", path=path, reason="type"
            ) from error
    check_bytes(path, len(data), settings)
    if not data:
        raise MediaError(f"{path}: the file is empty", path=path, reason="empty")
    return data


def _read_text(value: str, path: str, settings: Settings, arrived: Arrived) -> bytes:
    if is_remote(value):
        # The extra `http` is needed for URLs alone.
        from mm_plugin.media.http import fetch

        return fetch(value, path, settings, arrived)
    scheme = _SCHEME.match(value[:16])
    if scheme is None:
        return _read_bare(value, path, settings, arrived)
    if scheme[0].lower() == "data:":
        return _counted(_read_data_url(value, path, settings), arrived)
    if scheme[0].lower() == "file:":
        return _read_file(_path_of_url(value, path), path, settings, arrived)
    raise MediaError(
        f"{path}: unsupported URL scheme {scheme[0]}; supported are data:, file:, http: and https:",
        path=path,
        reason="url",
    )


def _counted(data: bytes, arrived: Arrived) -> bytes:
    arrived(len(data))
    return data


def _read_bare(value: str, path: str, settings: Settings, arrived: Arrived) -> bytes:
    """A path, or base64 without a prefix. An existing file has precedence over text that could be either."""
    looks_encoded = len(value) >= _LEAST_BASE64 and _BASE64.fullmatch(value) is not None
    if not looks_encoded:
        return _read_file(value, path, settings, arrived)
    if len(value) <= _LONGEST_PATH and settings.media_root:
        try:
            return _read_file(value, path, settings, arrived)
        except MediaError:
            pass
    _check_text(value, 4, path, settings)
    fault = "expected a path below media_root or base64, got malformed base64"
    return _counted(_decode_base64(value.encode(), path, settings, fault), arrived)


def _path_of_url(value: str, path: str) -> str:
    """The path in a `file:` URL of this machine."""
    try:
        parts = urllib.parse.urlsplit(value)
        local = parts.netloc.lower() in ("", "localhost") and not parts.query and not parts.fragment
        name = urllib.parse.unquote(parts.path, errors="strict")
    except ValueError:  # UnicodeDecodeError is one
        local, name = False, ""
    if not local:
        raise MediaError(f"{path}: expected a file: URL of the form file:///folder/name", path=path, reason="url")
    return name


def _read_file(value: str | os.PathLike[str], path: str, settings: Settings, arrived: Arrived) -> bytes:
    """A regular file below the media root, links resolved, no more bytes than the limit."""
    if not settings.media_root:
        raise MediaError(
            f"{path}: paths are not read: media_root is empty; set MM_PLUGIN_MEDIA_ROOT", path=path, reason="path"
        )
    try:
        root = Path(settings.media_root).resolve(strict=True)
        file = (root / os.fspath(value)).resolve(strict=True)
        if not file.is_relative_to(root) or not file.is_file():
            raise MediaError(f"{path}: expected a regular file below media_root", path=path, reason="path")
        with open_regular(file, follow=False) as opened:
            size = os.fstat(opened.fileno()).st_size
            check_bytes(path, size, settings)
            arrived(size)
            # One byte above the limit, since the file may have grown.
            data = opened.read(settings.max_media_bytes + 1)
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise MediaError(
            f"{path}: the file cannot be read ({type(error).__name__})", path=path, reason="path"
        ) from error
    return data


def _read_data_url(value: str, path: str, settings: Settings) -> bytes:
    """RFC 2397: `data:[type][;parameter]*[;base64],data`; the last parameter says whether it is base64, in any case."""
    comma = value.find(",")
    if comma < 0:
        raise MediaError(
            f"{path}: expected a data: URL of the form data:image/png;base64,..., got one without a comma",
            path=path,
            reason="url",
        )
    # Nothing of the text is copied before its length is checked.
    is_base64 = value[max(0, value.rfind(";", 0, comma)) : comma].strip("; ").lower() == "base64"
    _check_text(value, 4 if is_base64 else 3, path, settings)
    fault = "the data: URL's base64 is malformed"
    try:
        plain = _unescape(value[comma + 1 :])
    except ValueError as error:
        raise MediaError(f"{path}: {fault}", path=path, reason="url") from error
    return _decode_base64(plain, path, settings, fault) if is_base64 else plain


def _check_text(value: str, characters: int, path: str, settings: Settings) -> None:
    """Refuse text that is too long before it is copied: a byte takes at most three characters, or four of escaped base64."""
    limit = settings.max_media_bytes
    if len(value) > characters * limit + 1024:
        check_bytes(path, max(len(value) // 4, limit + 1), settings)


def _decode_base64(text: bytes, path: str, settings: Settings, fault: str) -> bytes:
    """Base64 in either alphabet, with the padding or without it, white space anywhere; bits after the last byte are ignored."""
    digits = text.translate(None, _SPACES)
    check_bytes(path, len(digits) * 3 // 4 - 2, settings)  # the fewest bytes that so many digits encode
    if b"-" in digits or b"_" in digits:
        mixed = b"+" in digits or b"/" in digits
        digits = b"!" if mixed else digits.translate(_URL_SAFE)  # no digit of either alphabet
    if not digits.endswith(b"="):
        digits += b"=" * (-len(digits) % 4)
    try:
        return base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{path}: {fault}", path=path, reason="url") from error


def _unescape(text: str) -> bytes:
    """Percent escapes resolved, piece by piece: urllib's own function makes a list of them all. A `%` without two digits stays."""
    if "%" not in text:
        return text.encode()
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE
        while end < len(text) and text[end] != "%" and "%" in text[end - 2 : end]:
            end += 1  # never within an escape
        pieces.append(_unescape_piece(text[start:end].encode()))
        start = end
    return b"".join(pieces)


def _unescape_piece(data: bytes) -> bytes:
    given = np.frombuffer(data, np.uint8)
    padded = np.concatenate([given, np.zeros(2, np.uint8)])
    high, low = _HEX[padded[1:-1]], _HEX[padded[2:]]
    escapes = (given == ord("%")) & (high < _NO_DIGIT) & (low < _NO_DIGIT)
    kept = np.ones(len(padded), bool)
    kept[1:-1][escapes] = False
    kept[2:][escapes] = False
    return np.where(escapes, high << 4 | low & 15, given)[kept[: len(given)]].tobytes()
