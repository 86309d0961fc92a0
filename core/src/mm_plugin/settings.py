"""Limits and switches: one frozen struct, whose fields are also environment variables. Knows nothing of who reads them."""

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
    """Limits and switches of one registry.

    Each field is also an environment variable: `max_image_pixels` is `MM_PLUGIN_MAX_IMAGE_PIXELS`.

    Attributes:
        only: names of the plugins to enable; empty enables all. In the environment, separated by commas.
        disabled: names of plugins to disable. In the environment, separated by commas.
        strict: raise at the first broken plugin or wrong setting instead of recording it. For developers.
        media_root: folder below which media may be read by path; empty refuses every path.
        allowed_hosts: hosts from which http(s) URLs may be fetched, such as `images.example.org`, or `*.example.org` for every
            host below a domain; empty fetches nothing. In the environment, separated by commas.
        private_hosts: those of the allowed hosts that may resolve to a private address; any other that does is refused. In the
            environment, separated by commas.
        fetch_seconds: time limit for fetching one URL, redirects included, seconds.
        max_redirects: most redirects to follow for one URL.
        max_media_bytes: largest encoded file of one media input, bytes.
        max_image_pixels: largest decoded image or video frame, height x width. The default is the size above which Pillow warns.
        max_decode_bytes: memory that decoding one image may take, as the table in `docs/media.md` counts it, bytes.
        max_video_frames: most frames of one video, before sampling.
        max_video_seconds: longest video, seconds.
        max_audio_seconds: longest audio, seconds.
        max_request_pixels: most pixels of all images, frames and videos of one request together, height x width each. Frames that
            are given count each; of an encoded video, whose frames are decoded one by one, one frame counts.
        max_request_bytes: most bytes of all media inputs of one request together: encoded files as they arrive, and samples,
            features and embeddings that came as arrays. Arrays of pixels count to `max_request_pixels`.
        max_request_audio_seconds: longest audio of one request, all of it together that must be decoded, seconds.
        max_items: most media inputs in one request.
        max_images: most images in one request.
        max_videos: most videos in one request.
        max_audios: most audio inputs in one request.
        max_media_packets: most packets of one video or audio file, all of its streams together; FFmpeg holds up to 100 bytes for
            each that a header lists. An hour at 60 frames per second with six audio tracks has 1.2 million.
        max_decoded_pixels: most pixels that are decoded for one video, height x width of each frame. Frames between the sampled
            ones count where they must be decoded too. The default is 75 minutes of 1920 x 1080 at 30 per second.
        max_item_tokens: most prompt tokens for one media input. The default holds the longest video of Qwen's own defaults.
        max_rendered_chars: longest text that a chat template may write or build, characters.
        render_seconds: time limit for a chat template to render one request, seconds.
        preprocess_cache_bytes: capacity of the cache of prepared items, bytes.
        embedding_cache_bytes: capacity of the cache of embeddings, bytes.
        max_caller_hashes: most caller hashes that are remembered with their content, to refuse one that is reused for other
            content.
        preprocess_store: where prepared items are kept: `memory`, or the name of a plugin's store.
        embedding_store: where embeddings are kept: `memory`, or the name of a plugin's store.
        threads: worker threads that prepare media inputs.

    Raises:
        UsageError: a value is invalid; the message names the setting.

    Example:
        >>> from mm_plugin import Settings
        >>> Settings(max_images=4).max_images
        4
        >>> Settings.from_env({"MM_PLUGIN_MAX_IMAGES": "4"}, max_videos=1).max_images
        4
        >>> Settings(max_images=0)
        Traceback (most recent call last):
        mm_plugin.errors.UsageError: setting max_images=0: Expected `int` >= 1
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
    max_decode_bytes: Count = 1536 << 20
    max_video_frames: Count = 262_144
    max_video_seconds: Seconds = 7200.0
    max_audio_seconds: Seconds = 1800.0
    max_request_pixels: Count = 1 << 32
    max_request_bytes: Count = 1 << 30
    max_request_audio_seconds: Seconds = 7200.0
    max_items: Count = 256
    max_images: Count = 256
    max_videos: Count = 32
    max_audios: Count = 32
    max_media_packets: Count = 1_500_000
    max_decoded_pixels: Count = 1 << 38
    max_item_tokens: Count = 131_072
    max_rendered_chars: Count = 16 * 1024 * 1024
    render_seconds: Seconds = 10.0
    preprocess_cache_bytes: Bytes = 1024 * 1024 * 1024
    embedding_cache_bytes: Bytes = 1024 * 1024 * 1024
    max_caller_hashes: Count = 65_536
    preprocess_store: str = "memory"
    embedding_store: str = "memory"
    threads: Count = min(8, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise UsageError(f"setting {field.name}={value!r}: {error}", argument=field.name) from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read the settings from environment variables.

        Args:
            environ: the variables; those of the process where None. Empty ones are ignored.
            overrides: fields that take precedence over the environment.

        Raises:
            UsageError: a value is invalid, or an override is not a setting; the message names it.
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
    """A message for each variable that has the prefix of the settings and is not one of them.

    Example:
        >>> from mm_plugin.settings import unknown_variables
        >>> unknown_variables({"MM_PLUGIN_THREAD": "2", "PATH": "/bin"})
        ['environment variable MM_PLUGIN_THREAD is not a setting; did you mean MM_PLUGIN_THREADS?']
    """
    known = {PREFIX + field.name.upper() for field in msgspec.structs.fields(Settings)}
    messages = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            messages.append(f"environment variable {name} is not a setting{hint}")
    return messages
