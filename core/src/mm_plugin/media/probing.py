"""How large a media input is, without decoding it."""

from __future__ import annotations

from typing import Any

from mm_plugin.items import Modality
from mm_plugin.media.audio import open_audio
from mm_plugin.media.images import open_image
from mm_plugin.media.types import (
    AudioSize,
    Size,
    VideoSize,
)
from mm_plugin.media.video import open_video
from mm_plugin.settings import Settings


def probe(
    value: Any, *, modality: Modality | str = Modality.IMAGE, settings: Settings | None = None
) -> Size | VideoSize | AudioSize:
    """How large a media input is, without decoding it: what `ModelProcessor.count` takes.

    Args:
        value: anything that `open_image`, `open_video` or `open_audio` takes.
        modality: what it is.
        settings: limits; the defaults where None.

    Returns:
        A `Size` in pixels; a `VideoSize` with frames and fps; or an `AudioSize` at the file's own rate, as its head tells it.

    Raises:
        MediaError: it cannot be opened.
        LimitError: it is larger than a limit allows.
    """
    modality = Modality.parse(modality)
    settings = Settings() if settings is None else settings
    path = modality.name.lower()
    if modality is Modality.IMAGE:
        return open_image(value, path=path, settings=settings).probe()
    if modality is Modality.VIDEO:
        return open_video(value, path=path, settings=settings).probe()
    return open_audio(value, path=path, settings=settings).header()
