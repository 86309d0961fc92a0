"""Chat messages with content parts -> messages as a chat template reads them, and the media inputs inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_plugin.errors import PlaceholderError, RequestError
from mm_plugin.items import Modality
from mm_plugin.prompt.media_parts import MEDIA_PARTS, REFUSED_PARTS, read_media_part

_TEXT_PARTS = ("text", "input_text")
_MAX_DEPTH = 64  # levels of nesting in a message


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def plain_message(message: Any, index: int, media: dict[Modality, list[Any]]) -> dict[str, Any]:
    """A message as the template takes it, a copy; its media inputs are appended to `media`.

    Args:
        message: an object with a role, and text or content parts.
        index: its index in the prompt, for errors.
        media: by modality, the media inputs so far.

    Raises:
        PlaceholderError: it has another shape.
        RequestError: its text is not valid Unicode, or it is nested too deeply.

    Example:
        >>> from mm_plugin import Modality
        >>> from mm_plugin.prompt.messages import plain_message
        >>> parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What is this?"}]
        >>> media = {Modality.IMAGE: []}
        >>> plain_message({"role": "user", "content": parts}, 0, media)
        {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is this?'}]}
        >>> media
        {<Modality.IMAGE: 1>: ['a.png']}
    """
    path = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PlaceholderError(
            f"{path}: expected an object with a text role, got {type(message).__name__}",
            path=path,
        )
    content = message.get("content")
    # Null is absent, as in transformers: what serializers write for a field that was not set.
    plain = {
        checked_text(str(name), path): copied(part, path)
        for name, part in message.items()
        if name != "content" and part is not None
    }
    if content is None:
        return plain
    if isinstance(content, str):
        return plain | {"content": checked_text(content, path)}
    if not isinstance(content, Sequence):
        raise PlaceholderError(
            f"{path}.content: expected text or a list of parts, got {type(content).__name__}",
            path=path,
        )
    parts = [_plain_part(part, f"{path}.content[{number}]", path, media) for number, part in enumerate(content)]
    return plain | {"content": parts}


def _plain_part(part: Any, path: str, message: str, media: dict[Modality, list[Any]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": checked_text(part["text"], message)}
    if not isinstance(kind, str) or kind not in MEDIA_PARTS:
        known = ", ".join((*_TEXT_PARTS, *MEDIA_PARTS))
        why = f"; {REFUSED_PARTS[kind]}" if isinstance(kind, str) and kind in REFUSED_PARTS else ""
        raise PlaceholderError(
            f"{path}: expected a part of type {known}, with its content, got {_described(part)}{why}", path=path
        )
    modality, value = read_media_part(part, path)
    media[modality].append(value)
    return {"type": modality.name.lower()}


def copied(value: Any, path: str, depth: int = 0) -> Any:
    """A copy of what a client sent, with text that can be encoded.

    Args:
        value: what JSON can hold.
        path: where it stands, for errors.
        depth: levels above it.

    Raises:
        RequestError: its text is not valid Unicode, or it is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path}: must be nested at most {_MAX_DEPTH} levels deep", path=path)
    if isinstance(value, str):
        return checked_text(value, path)
    if isinstance(value, Mapping):
        return {checked_text(str(name), path): copied(part, path, depth + 1) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [copied(part, path, depth + 1) for part in value]
    return value


def checked_text(text: str, path: str) -> str:
    """Text that can be encoded.

    Raises:
        RequestError: it has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{path}: text must not contain lone surrogates; decode it as UTF-8", path=path) from None
    return text


def _described(part: Any) -> str:
    """The type of a part, for an error; its content is not shown."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"type {kind[:32]!r}" if isinstance(kind, str) else type(part).__name__
