"""Limits and switches, one frozen struct, each also an environment variable `MM_PLUGIN_<NAME>`. Knows nothing of who reads them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from mm_plugin.errors import UsageError

PREFIX = "MM_PLUGIN_"

Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set. Every field is also an environment variable: `max_image_pixels` is `MM_PLUGIN_MAX_IMAGE_PIXELS`.

    Attributes:
        only: plugin names; when not empty, every other plugin is disabled. In the environment, separated by commas.
        disabled: plugin names that are disabled.
        strict: raise at the first broken plugin or wrong setting, instead of recording it. For developers.
        media_root: folder below which media may be read by path; empty refuses every path.
        allowed_hosts: hosts from which http(s) URLs are fetched, such as `images.example.org`, or `*.example.org` for every host
            below one; empty fetches nothing. In the environment, separated by commas.
        private_hosts: of those, the ones that may stand in a private network; every other that turns out to is refused.
        fetch_seconds: time in which a URL must be fetched whole.
        max_redirects: how often a URL may point to another.
        max_media_bytes: encoded bytes of one media input.
        max_image_pixels: height x width of one decoded image. The default is the size above which Pillow itself warns.
        max_video_frames: frames of one video, before any are sampled.
        max_video_seconds: length of one video.
        max_audio_seconds: length of one audio.
        max_request_pixels: height x width of all images and sampled frames that one request may have decoded.
        max_items: media in one request.
        max_images: images in one request.
        max_videos: videos in one request.
        max_audios: audio inputs in one request.
        max_item_tokens: prompt tokens that stand for one media input. The default holds the longest video of Qwen's own defaults.
        preprocess_cache_bytes: capacity of the preprocess cache, bytes.
        embedding_cache_bytes: capacity of an encoder's row cache, bytes.
        max_caller_hashes: caller hashes that are remembered with what they stood for, so that reuse for other media is found.
        store: kind of store behind the caches: `memory`, or one that a plugin offers.
        threads: worker threads of a registry's executor.
    """

    only: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    strict: bool = False
    media_root: str = ""
    allowed_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    fetch_seconds: Seconds = 10.0
    max_redirects: Bytes = 3
    max_media_bytes: Count = 64 * 1024 * 1024
    max_image_pixels: Count = 89_478_485
    max_video_frames: Count = 262_144
    max_video_seconds: Seconds = 7200.0
    max_audio_seconds: Seconds = 1800.0
    max_request_pixels: Count = 1 << 32
    max_items: Count = 256
    max_images: Count = 256
    max_videos: Count = 32
    max_audios: Count = 32
    max_item_tokens: Count = 131_072
    preprocess_cache_bytes: Bytes = 1024 * 1024 * 1024
    embedding_cache_bytes: Bytes = 1024 * 1024 * 1024
    max_caller_hashes: Count = 65_536
    store: str = "memory"
    threads: Count = min(8, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise UsageError(f"setting {field.name}: {error}", argument=field.name) from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read the settings from environment variables; `overrides` win.

        Raises:
            UsageError: a value cannot be read, or an override is no setting; the message names it.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            name = PREFIX + field.name.upper()
            text = environ.get(name, "").strip()
            if not text:
                continue
            value: Any = text
            if field.type == tuple[str, ...]:
                value = tuple(part.strip() for part in text.split(",") if part.strip())
            try:
                values[field.name] = msgspec.convert(value, field.type, strict=False)
            except msgspec.ValidationError as error:
                raise UsageError(f"environment variable {name}={text!r}: {error}", argument=name) from error
        try:
            return msgspec.convert(values | overrides, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"setting: {error}", argument="settings") from error


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none."""
    known = {PREFIX + field.name.upper() for field in msgspec.structs.fields(Settings)}
    sentences = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            sentences.append(f"environment variable {name} is no setting{hint}")
    return sentences
