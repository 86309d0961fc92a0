"""The largest media inputs that a model may be sent, for sizing buffers and budgets before the first request."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from mm_plugin.errors import RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media.source import MediaSize
from mm_plugin.media.types import AudioSamples, AudioSize, SampledVideo, Size, VideoFrames, VideoSize
from mm_plugin.processor.mixins import AcceptsAudio, KnowsLargest
from mm_plugin.processor.opened import OpenModel
from mm_plugin.settings import Settings

# What is tried for models that do not say which sizes are largest.
_SIDES = (28, 112, 224, 448, 672, 1344, 2688)  # pixels
_FRAMES = (2, 8, 32, 128)
_SECONDS = (1, 10, 30, 60, 300)

Count = Callable[[Any], tuple[int, int]]


class LargestMedia(msgspec.Struct, frozen=True, eq=False):
    """A media input that takes as many embeddings as any that the model may be sent.

    Attributes:
        modality: what it is.
        size: of an image, a video whose frames are chosen, or audio.
        num_embeddings: how many it takes.
        num_prompt_tokens: of the expanded prompt, those around its embeddings included.
    """

    modality: Modality
    size: MediaSize | VideoSize
    num_embeddings: int
    num_prompt_tokens: int

    def media(self) -> bytes | VideoFrames | AudioSamples:
        """A media input of this size, black or silent, as `Processor.process` takes it."""
        size = self.size
        if isinstance(size, AudioSize):
            return AudioSamples(np.zeros(size.num_samples, dtype=np.int16), size.sampling_rate)
        file = io.BytesIO()
        Image.new("L", (size.width, size.height)).save(file, "PNG")
        if isinstance(size, Size):
            return file.getvalue()
        times = {"fps": size.fps} if isinstance(size, VideoSize) else {"timestamps": size.timestamps.tolist()}
        return VideoFrames([file.getvalue()] * size.frames, **times, sampled=isinstance(size, SampledVideo))


class DummyRequest(msgspec.Struct, frozen=True, eq=False):
    """A request with the largest media inputs: `processor.process(**request.arguments())`.

    Attributes:
        prompt: token ids, with a placeholder for each media input.
        media: the media inputs by modality.
    """

    prompt: list[int]
    media: Mapping[Modality, list[Any]]

    def arguments(self) -> dict[str, Any]:
        """Arguments of `Processor.process`."""
        return {"prompt": self.prompt, **{modality.argument: found for modality, found in self.media.items()}}


def find_largest(model: OpenModel, modality: Modality, options: Any, count: Count) -> LargestMedia:
    """The media input with most embeddings among the sizes that the author names, or else among some that are tried.

    Args:
        model: the open model.
        modality: what it is.
        options: the author's `Options`, all resolved.
        count: embeddings and prompt tokens of a size; raises a `RequestError` where there can be none.

    Raises:
        UsageError: no size can be served.
    """
    author, best = model.author, None
    if isinstance(author.model, KnowsLargest):
        knows, settings = author.model, model.runtime.settings
        sizes: Iterable[Any] = author.call(
            "largest_sizes", lambda: list(knows.largest_sizes(modality, options, settings))
        )
    else:
        sizes = _tried(model, modality, options)
    for size in sizes:
        try:
            found = LargestMedia(modality, size, *count(size))
        except RequestError:
            continue
        # Of equal ones the first, which an author names in the order of what they cost.
        if best is None or found.num_embeddings > best.num_embeddings:
            best = found
    if best is None:
        raise UsageError(
            f"{modality.argument}: expected a size that the limits leave, got none; raise max_item_tokens, or the limits of "
            f"{modality.argument}",
            argument="modality",
        )
    return best


def dummy_request(model: OpenModel, largest: Iterable[tuple[LargestMedia, int]]) -> DummyRequest:
    """A request with media inputs, each so many times."""
    prompt: list[int] = []
    media: dict[Modality, list[Any]] = {}
    pair = next(iter(model.special_tokens.pairs), None)
    for found, count in largest:
        placeholder = model.special_tokens.placeholders[found.modality]
        prompt += ([placeholder] if pair is None else [pair[0], placeholder, pair[1]]) * count
        media[found.modality] = [found.media()] * count
    return DummyRequest(prompt, media)


def _tried(model: OpenModel, modality: Modality, options: Any) -> Iterator[MediaSize | VideoSize]:
    settings, author = model.runtime.settings, model.author.model
    if modality is Modality.AUDIO:
        assert isinstance(author, AcceptsAudio)
        rate = model.author.sampling_rate(options)
        longest = min(settings.max_audio_seconds, settings.max_request_audio_seconds)
        for seconds in (*(each for each in _SECONDS if each < longest), longest):
            yield AudioSize(int(seconds * rate), rate)
        return
    for height, width in itertools.product(_SIDES, _SIDES):
        if height * width > settings.max_image_pixels:
            continue
        if modality is Modality.IMAGE:
            yield Size(height, width)
        elif height == width:
            for frames in _FRAMES:
                if frames <= _most_frames(settings, height * width):
                    yield VideoSize(height, width, frames, 2.0)


def _most_frames(settings: Settings, pixels: int) -> int:
    return min(settings.max_video_frames, settings.max_request_pixels // pixels, int(settings.max_video_seconds * 2))
