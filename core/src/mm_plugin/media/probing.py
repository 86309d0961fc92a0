"""How large a media input is, without decoding it."""

from __future__ import annotations

from typing import Any

from mm_plugin.items import Modality
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.types import AudioSize, Size, VideoSize
from mm_plugin.settings import Settings


def probe(
    value: Any, *, modality: Modality | str = Modality.IMAGE, settings: Settings | None = None
) -> Size | VideoSize | AudioSize:
    """How large a media input is, without decoding it: what `count` of a processor takes.

    Args:
        value: anything that `open_image`, `open_video` or `open_audio` takes.
        modality: which of the three.
        settings: limits; the defaults where None.

    Returns:
        A `Size` in pixels; a `VideoSize` with frames and fps; or an `AudioSize` at the file's own rate, as its header says.

    Raises:
        MediaError: it cannot be opened.
        LimitError: it is larger than a limit allows.

    Examples:
        >>> import numpy as np
        >>> from mm_plugin.media import VideoFrames, probe
        >>> probe(np.zeros((4, 6, 3), np.uint8))
        Size(height=4, width=6)
        >>> probe(VideoFrames(np.zeros((8, 4, 6, 3), np.uint8), fps=2), modality="video").duration
        4.0
    """
    modality = Modality.parse(modality)
    settings = Settings() if settings is None else settings
    return MEDIA_KINDS[modality].open(value, path=modality.name.lower(), settings=settings).probe()
