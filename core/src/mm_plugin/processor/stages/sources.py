"""A media input opened, with what it takes counted against the limits on the whole request."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from mm_plugin.media.audio import AudioSource
from mm_plugin.media.declared import check_declared_format
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.limits import Arrived, check_bytes
from mm_plugin.media.source import MediaSize, MediaSource, SamplingRules
from mm_plugin.media.sources import is_encoded, is_remote, read_bytes
from mm_plugin.media.types import AudioSize, VideoFrames
from mm_plugin.media.video import GivenFrames
from mm_plugin.processor.budget import Intake
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import ReadItem
from mm_plugin.settings import Settings


def open_item(model: OpenModel, item: ReadItem, intake: Intake) -> MediaSource:
    """Open a media input; what is read for it is counted, and what a client declared of it is compared with what it is.

    Args:
        model: the open model.
        item: the media input; a URL was fetched, and counted, before.
        intake: of the request.

    Raises:
        RequestError: it cannot be opened, takes more than a limit allows, or is not what a client declared.
    """
    source = _open(item, model.settings, intake)
    if item.form is not None:
        if isinstance(source, AudioSource) and item.form.format is not None:
            check_declared_format(source.head, item.form.format, f"{item.form.path}.format")
        if isinstance(source, GivenFrames) and source.sampled:
            model.item_options.check_sampling(item.form, item.modality, item.path)
    return source


def _open(item: ReadItem, settings: Settings, intake: Intake) -> MediaSource:
    value, arrived = item.value, partial(intake.add_bytes, item.path)
    if is_encoded(value) and not item.is_fetched:
        value = read_bytes(value, item.path, settings, arrived)
    elif isinstance(value, VideoFrames):
        value = _with_frames_read(value, item.path, settings, arrived)
    return MEDIA_KINDS[item.modality].open(value, path=item.path, settings=settings)


def _with_frames_read(video: VideoFrames, path: str, settings: Settings, arrived: Arrived) -> VideoFrames:
    """The frames that came as files, read; what is wrong with any is left to `open_video`."""
    frames = video.frames
    if not isinstance(frames, list | tuple) or len(frames) > settings.max_video_frames:
        return video
    read: list[Any] = []
    total = 0
    for frame in frames:
        if is_encoded(frame) and not is_remote(frame):
            data = read_bytes(frame, path, settings, arrived)
            total += len(data)
            check_bytes(path, total, settings)
            read.append(data)
        else:
            read.append(frame)
    return msgspec.structs.replace(video, frames=read)


def size_of(item: ReadItem, source: MediaSource, rules: SamplingRules, intake: Intake) -> MediaSize:
    """The size of a media input that was opened; audio, which is decoded for it, is counted.

    Raises:
        RequestError: it cannot be measured, or takes more than a limit allows.
    """
    if not isinstance(source, AudioSource):
        return source.size(rules)
    claimed = intake.claim_audio(item.path, source)
    size: AudioSize = source.size(rules)
    intake.settle_audio(item.path, size, claimed)
    return size
