"""`MediaSource`: what image, video and audio inputs share once they are opened. Opens and decodes nothing.

A request takes every media input through the same calls, whatever its modality (see `media.kinds` for how one is opened):

    source = MEDIA_KINDS[modality].open(value, path="videos[0]", settings=settings)
    key = source.digest()                                    # before anything is decoded
    size = source.size(rules)                                # what `layout` gets
    decoded = source.decode(size, background=(255, 255, 255))    # what `prepare` gets

A source can be pickled: it then carries the encoded bytes, or the pixels, frames or samples that were given, and no open decoder,
lock or decoded data. Its copy gives the same digest, size and decoded media. Across machines its `value` travels (see
`mm_plugin.wire`), of which the receiver opens a source with its own settings.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from mm_plugin.arrays import owned
from mm_plugin.media.types import (
    WHITE,
    AudioSamples,
    AudioSize,
    Color,
    DecodedMedia,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    VideoSize,
)

MediaSize = Size | SampledVideo | AudioSize


class SamplingRules(Protocol):
    """What a model decides about a media input before its size is known; asked only by sources that need it."""

    def sample(self, size: VideoSize) -> Sampling:
        """Which frames of a video are used.

        Args:
            size: of the whole video.
        """

    def sampling_rate(self) -> int:
        """Samples per second at which the model takes audio."""


class MediaValue(msgspec.Struct, frozen=True, eq=False):
    """The value of a source that came from another process, until it is opened here.

    Attributes:
        path: where it stands in the request, such as `images[2]`.
        media: what `MediaSource.value` returned.
    """

    path: str
    media: Any

    def value(self) -> Any:
        """See `MediaSource.value`."""
        return self.media


def owned_value(value: Any) -> Any:
    """What `MediaSource.value` returned, in memory that nobody else writes to."""
    if isinstance(value, VideoFrames):
        return msgspec.structs.replace(value, frames=owned_value(value.frames))
    if isinstance(value, AudioSamples):
        return msgspec.structs.replace(value, samples=owned_value(value.samples))
    if isinstance(value, list | tuple):
        return [owned_value(part) for part in value]
    return owned(value)  # encoded bytes and packed images cannot be written to


class MediaSource(Protocol):
    """One media input, opened and not decoded yet.

    Attributes:
        path: where it stands in the request, such as `images[2]`.
    """

    path: str

    def value(self) -> Any:
        """What another process opens this source from: `MEDIA_KINDS[modality].open` makes an equal one of it, with its own limits.

        Returns:
            Encoded bytes; an array or a `PackedImage` for an image; `VideoFrames` or `AudioSamples`. It is not a copy.
        """

    def digest(self) -> bytes:
        """What distinguishes this source from others: 32 bytes, of the encoded bytes, or of what was given in their place."""

    def probe(self) -> Size | VideoSize | AudioSize:
        """How large the media input is, as its header says; nothing of it is decoded where the header is complete."""

    def size(self, rules: SamplingRules) -> MediaSize:
        """The size that `layout` gets: of a video with its frames chosen, of audio at the rate that the model takes."""

    def decode(self, size: Any, *, background: Color = WHITE) -> DecodedMedia:
        """The decoded media input.

        Args:
            size: what `size` returned.
            background: RGB levels shown through transparent pixels; without effect on audio.
        """
