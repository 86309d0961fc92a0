"""Media parts of chat messages, in the forms of OpenAI's two APIs, of transformers and of released utilities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from mm_plugin.errors import PlaceholderError
from mm_plugin.items import Modality
from mm_plugin.media.types import VideoFrames
from mm_plugin.media.with_options import WithOptions

MEDIA_PARTS: Mapping[str, Modality] = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "input_image": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
    "audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
# What a part may be named that names no media input, and what to send in its place.
REFUSED_PARTS: Mapping[str, str] = {
    "file": "documents are not media inputs; send their pages as images, or their text as text",
    "input_file": "documents are not media inputs; send their pages as images, or their text as text",
}
# The keys that may hold the content of a part.
_ANYWHERE = ("url", "path", "base64")
_CONTENT: Mapping[Modality, tuple[str, ...]] = {
    Modality.IMAGE: ("image", "image_url", *_ANYWHERE),
    Modality.VIDEO: ("video", "video_url", *_ANYWHERE),
    Modality.AUDIO: ("audio", "audio_url", "input_audio", *_ANYWHERE),
}
# Types of parts that may hold a place for a media input that is given beside the messages.
_PLACES = frozenset({"image", "video", "audio"})
# The same beside content, or inside its object.
_BESIDE: Mapping[Modality, str] = {Modality.IMAGE: "detail", Modality.AUDIO: "format"}
_FRAME_TIMES = ("fps", "sample_fps", "timestamps")


def read_media_part(part: Mapping[str, Any], path: str) -> tuple[Modality, Any]:
    """The media input of a part: its value, a `WithOptions` where it has options, None where it only holds a place.

    Args:
        part: its `type` is one of `MEDIA_PARTS`.
        path: where it stands, for errors.

    Raises:
        PlaceholderError: it has no content, content under two keys, or a malformed one.

    Example:
        >>> read_media_part({"type": "image", "path": "a.png"}, "messages[0].content[0]")
        (<Modality.IMAGE: 1>, PurePosixPath('a.png'))
        >>> _, image = read_media_part({"type": "image", "url": "a.png", "max_pixels": 3136}, "messages[0].content[0]")
        >>> image.value, image.options
        ('a.png', {'max_pixels': 3136})
    """
    kind = part["type"]
    modality = MEDIA_PARTS[kind]
    # What serializers write for a field that was not set.
    given = {_key(name): value for name, value in part.items() if name != "type" and value is not None}
    found = [name for name in _CONTENT[modality] if name in given]
    if len(found) > 1:
        raise _fault(path, f"expected content under one key, got {' and '.join(found)}")
    if not found and (kind not in _PLACES or "file_id" in given):
        why = "; stored files are not supported" if "file_id" in given else ""
        raise _fault(
            path, f"expected the content of a part of type {kind} under {_listed(_CONTENT[modality])}, got none{why}"
        )
    value, inside = (None, {}) if not found else _content(found[0], given.pop(found[0]), modality, path)
    for name, beside in inside.items():
        if given.setdefault(name, beside) != beside:
            raise _fault(f"{path}.{name}", f"expected one value, got another in {found[0]}")
    declared = given.pop("format", None) if modality is Modality.AUDIO else None
    if modality is Modality.VIDEO and isinstance(value, list | tuple):
        value = _frames(value, given, path)
    if not given and declared is None:
        return modality, value
    return modality, WithOptions.of_part(value, given, path, declared)


def _content(name: str, value: Any, modality: Modality, path: str) -> tuple[Any, dict[str, Any]]:
    """A media input in a form that sources take, and what stands inside its object beside it."""
    inside: dict[str, Any] = {}
    where = f"{path}.{name}"
    if isinstance(value, Mapping):
        inside = {_key(key): part for key, part in value.items() if part is not None}
        keys = [key for key in ("url", "data", "path", "base64") if key in inside]
        if len(keys) != 1:
            raise _fault(where, f"expected an object with url or data, got {_listed(sorted(inside)) or 'an empty one'}")
        name, value = keys[0], inside.pop(keys[0])
        unknown = [key for key in inside if key != _BESIDE.get(modality)]
        if unknown:
            raise _fault(
                f"{where}.{unknown[0]}", f"unknown key; options of the {_name(modality)} stand in the part itself"
            )
        where = f"{where}.{name}"
    if name == "path":
        if not isinstance(value, str | PurePath):
            raise _fault(where, f"expected a path as text, got {type(value).__name__}")
        value = PurePath(value)  # never read as base64 or a URL
    elif name == "base64":
        if not isinstance(value, str):
            raise _fault(where, f"expected base64 as text, got {type(value).__name__}")
        value = value if value[:5].lower() == "data:" else f"data:;base64,{value}"  # never read as a path
    return value, inside


def _frames(value: Any, given: dict[str, Any], path: str) -> VideoFrames:
    """A video that came as its frames; their times are taken out of the options."""
    times = {name: given.pop(name) for name in _FRAME_TIMES if name in given}
    if "fps" in times and "sample_fps" in times:
        raise _fault(path, "fps and sample_fps are two names for the rate of the frames; give one of them")
    return VideoFrames(value, fps=times.get("fps", times.get("sample_fps")), timestamps=times.get("timestamps"))


def _key(name: Any) -> str:
    """A key as an error may name it: valid Unicode, and not longer than any that is known."""
    return str(name).encode("utf-8", "backslashreplace").decode()[:64]


def _fault(path: str, message: str) -> PlaceholderError:
    return PlaceholderError(f"{path}: {message}", path=path)


def _listed(names: Any) -> str:
    *first, last = names or [""]
    return f"{', '.join(first)} or {last}" if first else last


def _name(modality: Modality) -> str:
    return modality.name.lower()
