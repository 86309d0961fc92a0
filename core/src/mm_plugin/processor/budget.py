"""Limits on a whole request: how many media inputs, tokens and pixels. The only place that raises for totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from mm_plugin.arrays import is_dense, num_bytes
from mm_plugin.errors import LimitError, MediaError, RequestError
from mm_plugin.forking import new_lock
from mm_plugin.inputs.precomputed import PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media.audio import AudioSource
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.limits import check_limit, check_request_audio_seconds, check_request_bytes
from mm_plugin.media.types import AudioSamples, AudioSize
from mm_plugin.settings import Settings
from mm_plugin.spec import ModelSpec


class Total(msgspec.Struct, frozen=True):
    """A limit on a sum over the media inputs of a request.

    Attributes:
        setting: name of the limit in `Settings`.
        unit: what is counted, for the message.
        amount: how much one media input adds, from its modality and size.
    """

    setting: str
    unit: str
    amount: Callable[[Modality, Any], int]


TOTALS = (
    Total(
        "max_request_pixels", "pixels of images and sampled frames", lambda kind, size: MEDIA_KINDS[kind].pixels(size)
    ),
)


class Budget:
    """What a request may take together. Final.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check_served(self, spec: ModelSpec, modality: Modality) -> None:
        """Refuse a modality that the model does not take.

        Raises:
            RequestError: it does not.
        """
        if modality not in spec.modalities:
            served = ", ".join(m.argument for m in spec.modalities)
            raise RequestError(
                f"{modality.argument}: {spec.name} takes {served}, not {modality.argument}", path=modality.argument
            )

    def check_counts(self, counts: Mapping[Modality, int]) -> None:
        """Hold the numbers of media inputs to `max_items` and to the limit of each modality.

        Raises:
            LimitError: there are more.
        """
        check_limit("max_items", self._settings, None, sum(counts.values()), "media inputs")
        for modality, count in counts.items():
            check_limit(f"max_{modality.argument}", self._settings, modality.argument, count, modality.argument)

    def check_item_tokens(self, count: int, path: str) -> None:
        """Hold the tokens of one item to `max_item_tokens`.

        Raises:
            LimitError: there are more.
        """
        check_limit("max_item_tokens", self._settings, path, count, "tokens")

    def check_prompt(self, length: int, limit: int | None) -> None:
        """Hold an expanded prompt to the limit that came with the request.

        Raises:
            LimitError: it is longer.
        """
        if limit is not None and length > limit:
            raise LimitError.exceeded(
                "tokens in the expanded prompt", path="prompt", setting="max_prompt_tokens", limit=limit, value=length
            )

    def check_totals(self, sizes: Sequence[tuple[Modality, Any]]) -> None:
        """Hold every sum of `TOTALS` over the media inputs that are decoded to its limit.

        Args:
            sizes: modality and size of each media input that is not in the cache.

        Raises:
            LimitError: a sum is larger.
        """
        for total in TOTALS:
            amount = sum(total.amount(modality, size) for modality, size in sizes)
            check_limit(total.setting, self._settings, None, amount, total.unit)


def array_bytes(value: Any) -> int:
    """Bytes that samples, features or embeddings take once they are copied, counted without reading any; 0 for other values.

    A broadcast view takes as much as if each of its elements were its own.
    """
    arrays: Iterable[Any] = ()
    if isinstance(value, AudioSamples):
        arrays = [value.samples]
    elif isinstance(value, PrecomputedEmbeddings):
        arrays = [value.embeddings]
    elif isinstance(value, ProcessorOutput) and isinstance(value.fields, Mapping):
        arrays = value.fields.values()
    return sum(num_bytes(array) for array in arrays if is_dense(array))  # any other is refused before it is copied


class Intake:
    """What the media inputs of one request take together, counted as they come. Final; thread-safe.

    Args:
        settings: the limits.
        audios: how many audio inputs the request has.
    """

    def __init__(self, settings: Settings, audios: int = 0) -> None:
        self._settings = settings
        self._is_long = audios * settings.max_audio_seconds > settings.max_request_audio_seconds
        self._lock = new_lock()
        self._bytes, self._seconds = 0, 0.0

    def add_bytes(self, path: str, count: int) -> None:
        """Count bytes of a media input against `max_request_bytes`.

        Raises:
            LimitError: together with all before they are more.
        """
        with self._lock:
            self._bytes += count
            total = self._bytes
        check_request_bytes(path, total, self._settings)

    def claim_audio(self, path: str, source: AudioSource) -> float:
        """Count audio by what its header says, before it is decoded; seconds.

        Headers are asked only where audio inputs could pass `max_request_audio_seconds` together. One that says nothing, or more
        than one audio may have, as streams do whose writer did not know, is counted once it is decoded.

        Raises:
            LimitError: together with all before it is too long.
        """
        if not self._is_long:
            return 0.0
        try:
            seconds = source.probe().duration
        except MediaError:
            return 0.0
        if seconds > self._settings.max_audio_seconds:
            return 0.0
        self._add_seconds(path, seconds)
        return seconds

    def settle_audio(self, path: str, size: AudioSize, claimed: float) -> None:
        """Count audio by its samples, in place of what was claimed.

        Raises:
            LimitError: together with all before it is too long.
        """
        self._add_seconds(path, size.duration - claimed)

    def _add_seconds(self, path: str, seconds: float) -> None:
        with self._lock:
            total = self._seconds + seconds
            check_request_audio_seconds(path, total, self._settings)  # what is refused here does not count for others
            self._seconds = total
