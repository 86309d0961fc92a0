"""Chat messages: content parts and their media, as a template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_plugin.errors import PlaceholderError, RequestError
from mm_plugin.items import Modality
from mm_plugin.media.types import VideoFrames
from mm_plugin.prompt.masking import cleaned

_PART_TYPES = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
    "audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}


_DEEPEST = 64  # levels of nesting in a message


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def plain_message(message: Any, index: int, media: dict[Modality, list[Any]]) -> dict[str, Any]:
    """A message as the template takes it, its media moved into `media`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PlaceholderError(f"messages[{index}]: a message is an object with a role", path=f"messages[{index}]")
    content = message.get("content")
    plain = {cleaned(str(name), index): _copied(part, index) for name, part in message.items() if name != "content"}
    if content is None or isinstance(content, str):
        return plain | {"content": cleaned(content or "", index)}
    if not isinstance(content, Sequence):
        raise PlaceholderError(
            f"messages[{index}].content: expected text or a list of parts", path=f"messages[{index}]"
        )
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        path = f"messages[{index}].content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": cleaned(part["text"], index)})
        elif isinstance(kind, str) and kind in _PART_TYPES:
            modality = _PART_TYPES[kind]
            value = part.get(kind, part.get(modality.name.lower()))
            if isinstance(value, Mapping):
                # `input_audio` has its base64 under `data`.
                value = value.get("url", value.get("data"))
                if value is None:
                    raise PlaceholderError(f"{path}.{kind}: an object there has a url, or data", path=path)
            if modality is Modality.VIDEO and isinstance(value, list | tuple):
                value = VideoFrames(value, fps=part.get("fps"), timestamps=part.get("timestamps"))
            media[modality].append(value)
            parts.append({"type": modality.name.lower()})
        else:
            known = ", ".join(("text", *_PART_TYPES))
            raise PlaceholderError(f"{path}: a part has one of the types {known}, with its content", path=path)
    return plain | {"content": parts}


def _copied(value: Any, index: int, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise RequestError(f"messages[{index}]: nested more than {_DEEPEST} deep", path=f"messages[{index}]")
    if isinstance(value, str):
        return cleaned(value, index)
    if isinstance(value, Mapping):
        return {cleaned(str(name), index): _copied(part, index, depth + 1) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_copied(part, index, depth + 1) for part in value]
    return value
