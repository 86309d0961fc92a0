"""What a client declares of encoded audio, compared with how its bytes begin. Decodes nothing."""

from __future__ import annotations

from typing import Any

from mm_plugin.errors import MediaError

# What a client may call a format: how files of it may begin. AAC comes in MP4 or in frames of its own (ADTS).
_FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("wav", "wave", "x-wav"), ("wav",)),
    **dict.fromkeys(("mp3", "mpeg", "mpga"), ("mp3",)),
    **dict.fromkeys(("flac", "x-flac"), ("flac",)),
    **dict.fromkeys(("ogg", "oga"), ("ogg",)),
    **dict.fromkeys(("opus", "vorbis"), ("ogg", "matroska")),
    **dict.fromkeys(("m4a", "mp4", "alac"), ("mp4",)),
    "aac": ("mp4", "adts"),
    **dict.fromkeys(("webm", "mka", "matroska"), ("matroska",)),
    **dict.fromkeys(("aiff", "aif"), ("aiff",)),
}
# Tags may stand before files of several formats.
_STARTS: dict[bytes, tuple[str, ...]] = {
    b"fLaC": ("flac",),
    b"OggS": ("ogg",),
    b"\x1aE\xdf\xa3": ("matroska",),
    b"RF64": ("wav",),
    b"ID3": ("mp3", "adts", "flac"),
}


def check_declared_format(head: bytes, declared: Any, path: str) -> None:
    """Refuse encoded audio that is not of the format that its client declares.

    Bytes that begin as no known format does are left to the decoder.

    Args:
        head: the first bytes of the file; empty where there is none.
        declared: such as `wav`; `audio/wav` is the same.
        path: where the declaration stands, for the message.

    Raises:
        MediaError: it is unknown, or the bytes are of another format.

    Examples:
        >>> check_declared_format(b"RIFF....WAVEfmt ", "wav", "messages[0].content[0].format")
        >>> check_declared_format(b"fLaC", "mp3", "messages[0].content[0].format")
        Traceback (most recent call last):
        ...
        mm_plugin.errors.MediaError: messages[0].content[0].format: expected mp3, as declared, got bytes of flac; ...
    """
    name = declared.lower().removeprefix("audio/") if isinstance(declared, str) else None
    if name not in _FORMATS:
        got = repr(declared[:32]) if isinstance(declared, str) else type(declared).__name__
        raise MediaError(
            f"{path}: expected a format such as wav or mp3, got {got}; send a file with a header",
            path=path,
            reason="format",
        )
    found = _formats_of(head)
    if found and not set(found) & set(_FORMATS[name]):
        raise MediaError(
            f"{path}: expected {name}, as declared, got bytes of {found[0]}; declare the format of the file",
            path=path,
            reason="format",
        )


def _formats_of(head: bytes) -> tuple[str, ...]:
    """The formats of files that begin so; none where that is open."""
    for start, names in _STARTS.items():
        if head.startswith(start):
            return names
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return ("wav",)
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return ("aiff",)
    if head[4:8] == b"ftyp":
        return ("mp4",)
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # Eleven bits of synchronization; the layer, which MPEG audio has and ADTS leaves 0, follows the version.
        return ("mp3",) if head[1] & 0x06 else ("adts",)
    return ()
