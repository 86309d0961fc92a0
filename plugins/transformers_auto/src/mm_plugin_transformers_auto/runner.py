"""Runs a checkpoint's processor on a prompt, from several threads. Knows nothing of what its output means."""

from __future__ import annotations

import contextlib
import copy
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import transformers

from mm_plugin import Modality
from mm_plugin.forking import new_lock
from mm_plugin_transformers_auto.loading import Opened
from mm_plugin_transformers_auto.traits import Kwargs

# Names of the processor's parts, and of the arguments of a call, by modality.
PARTS = {Modality.IMAGE: ("image_processor",), Modality.AUDIO: ("audio_processor", "feature_extractor")}
_CALL = {Modality.IMAGE: ("images", "images_kwargs"), Modality.AUDIO: ("audio", "audio_kwargs")}
# Arguments of a processor's parts that say how it is called, not what it returns.
_RESERVED = frozenset(
    (
        *("return_tensors", "device", "data_format", "input_data_format", "disable_grouping", "do_convert_rgb"),
        *("return_row_col_info", "raw_speech", "sampling_rate", "return_attention_mask", "load_audio_backend"),
        *("image_seq_length", "return_metadata"),
    )
)


class ProcessorRaised(Exception):
    """The checkpoint's processor raised an error; the message names its class."""


class ProcessorRunner:
    """Runs a processor. Safe to use from several threads.

    Args:
        opened: the checkpoint as transformers opened it.
    """

    def __init__(self, opened: Opened) -> None:
        self._processor, self._label = opened.processor, opened.label
        self._pool = _ProcessorPool(opened.processor)

    def run(
        self,
        text: str,
        media: Mapping[Modality, Sequence[Any]],
        kwargs: Mapping[Modality, Kwargs],
        *,
        special: bool | None = True,
    ) -> dict[str, Any]:
        """Run the processor on one prompt.

        Args:
            text: the prompt.
            media: PIL images and float32 samples by modality, in prompt order.
            kwargs: arguments for the processor's parts, by modality.
            special: whether the tokenizer adds its special tokens; None for the processor's own default.

        Raises:
            ProcessorRaised: the processor raised an error.
        """
        arguments: dict[str, Any] = {} if special is None else {"text_kwargs": {"add_special_tokens": special}}
        for modality, given in media.items():
            if given:
                name, part = _CALL[modality]
                arguments[name] = list(given)
                arguments[part] = dict(kwargs.get(modality, {}))
                if modality is Modality.AUDIO:
                    arguments[part]["sampling_rate"] = self.sampling_rate
        try:
            with self._pool.take() as processor:
                return dict(processor(text=[text], return_tensors="pt", **arguments))
        except MemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:400]
            raise ProcessorRaised(f"{self._label} raised {type(error).__name__}: {said}") from error

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether the processor lets its tokenizer add special tokens to a prompt; None if it leaves that to the tokenizer."""
        processor = self._processor
        try:
            merged = processor._merge_kwargs(  # noqa: SLF001 - nothing public says what a processor passes on
                processor.valid_processor_kwargs, tokenizer_init_kwargs=processor.tokenizer.init_kwargs
            )
            found = merged["text_kwargs"].get("add_special_tokens")
        except Exception:  # processors override it as they like; then what their tokenizer does by itself holds
            return None
        return None if found is None else bool(found)

    @property
    def sampling_rate(self) -> int | None:
        """Samples per second that the processor's audio part expects; None if the processor has no such part."""
        part = self.part(Modality.AUDIO)
        return None if part is None else int(part.sampling_rate)

    def part(self, modality: Modality) -> Any:
        """The part of the processor that prepares a modality, or None."""
        parts = (getattr(self._processor, name, None) for name in PARTS[modality])
        return next((part for part in parts if part is not None), None)

    def known_kwargs(self, modality: Modality) -> list[str]:
        """Names of the part's arguments that change what it returns, sorted."""
        declared = getattr(self.part(modality), "valid_kwargs", None)
        if declared is None:
            declared = transformers.processing_utils.AudioKwargs
        return sorted(set(declared.__annotations__) - _RESERVED)


def ids_of(out: Mapping[str, Any]) -> np.ndarray:
    """The token ids [n] int64 of a processor's output."""
    ids: np.ndarray = np.asarray(out["input_ids"], dtype=np.int64).reshape(-1)
    return ids


class _ProcessorPool:
    """Copies of a processor, each used by one thread at a time, because its tokenizer cannot be shared. One per CPU, at most 8.

    Args:
        processor: the original; it is never run, so that no copy is made of a processor that is running.
    """

    def __init__(self, processor: Any) -> None:
        self._original, self._made, self._most = processor, 0, max(1, min(8, os.cpu_count() or 1))
        self._free: queue.LifoQueue[Any] = queue.LifoQueue()
        self._lock = new_lock()

    @contextlib.contextmanager
    def take(self) -> Iterator[Any]:
        processor = self._next()
        try:
            yield processor
        finally:
            self._free.put(processor)

    def _next(self) -> Any:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        with self._lock:
            if self._made < self._most:
                made = copy.deepcopy(self._original)
                self._made += 1
                return made
        return self._free.get()
