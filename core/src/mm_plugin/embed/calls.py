"""Calls of an encoder: all items of a modality together, split where they must be, and a fault kept to the item that has it."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from mm_plugin.embed.staging import StagingBuffer
from mm_plugin.encoder.base import Agree, Encoder, EncoderLike
from mm_plugin.encoder.results import as_tensor, checked_rows
from mm_plugin.errors import EncoderError, MMPluginError
from mm_plugin.events import EncodeBatch, Observers
from mm_plugin.inputs import Encoded
from mm_plugin.items import Modality, MultimodalDataItem

logger = logging.getLogger("mm_plugin")

# Outcomes of a call, the worst last: what ranks tell one another.
OK, OUT_OF_MEMORY, FAILED = 0, 1, 2


class EncoderCalls:
    """Encodes items for steps of one server. Final.

    Args:
        encoder: an `Encoder`, or a mapping from modality to a callable over items.
        hidden: width that rows must have.
        dtype: torch dtype to which rows are brought.
        device: torch device to which rows are brought.
        max_tokens: most rows of one call; None for no limit. An item that has more is a call of its own.
        agree: for collective encoders, takes this rank's outcome (0 done, 1 out of memory, 2 failed) and returns the worst of
            all ranks.
        staging: takes host features to the encoder's device; features go as they are where None.
        observers: hear of every call.
    """

    def __init__(
        self,
        encoder: EncoderLike,
        *,
        hidden: int,
        dtype: Any,
        device: Any,
        max_tokens: int | None = None,
        agree: Agree | None = None,
        staging: StagingBuffer | None = None,
        observers: Observers | None = None,
    ) -> None:
        self._encoder = encoder
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._max_tokens, self._staging, self._observers = max_tokens, staging, observers
        self.owner = dict(encoder.owner) if isinstance(encoder, Encoder) else {}
        collective = isinstance(encoder, Encoder) and encoder.collective
        self._agree: Agree = agree if agree is not None and collective else _alone

    def encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded | MMPluginError]:
        """Rows for each item, or what went wrong with it; no item's fault reaches another.

        Out of memory halves a call until one item remains; another failure is tried item by item, once.
        """
        gone = EncoderError("the item's feature was released before its rows were needed", **self.owner)
        # Looked at once: a request may be aborted, and its features go, while a call runs.
        there = [item.feature is not None for item in items]
        found: list[Encoded | MMPluginError] = []
        for group in self._groups([item for item, has in zip(items, there, strict=True) if has]):
            found += self._attempt(modality, group)
        rest = iter(found)
        return [next(rest) if has else gone for has in there]

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, by the same way as features."""
        return tensor if self._staging is None else self._staging.send([tensor])[0]

    def _groups(self, items: Sequence[MultimodalDataItem]) -> list[list[MultimodalDataItem]]:
        """Items in order, as many together as `max_tokens` allows."""
        groups: list[list[MultimodalDataItem]] = []
        package = 0
        for item in items:
            if not groups or (self._max_tokens is not None and item.num_tokens > package):
                groups.append([])
                package = self._max_tokens or 0
            groups[-1].append(item)
            package -= item.num_tokens
        return groups

    def _attempt(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded | MMPluginError]:
        outcome = OK
        failure: MMPluginError | None = None
        rows: list[Encoded] = []
        try:
            rows = self._call(modality, items)
        except torch.OutOfMemoryError as error:
            outcome, failure = OUT_OF_MEMORY, self._failure("out of device memory", error)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            outcome, failure = FAILED, self._failure(f"{type(error).__name__}: {error}", error)
        try:
            outcome = self._agree(outcome)
        except Exception as error:
            return [self._failure(f"the ranks could not agree: {type(error).__name__}", error)] * len(items)
        if outcome == OK:
            return list(rows)
        if len(items) == 1:
            return [failure if failure is not None else self._failure("another rank could not encode the item", None)]
        del failure, rows  # what they keep alive may be the memory that was missing
        step = len(items) // 2 if outcome == OUT_OF_MEMORY else 1
        results: list[Encoded | MMPluginError] = []
        for start in range(0, len(items), step):
            results += self._attempt(modality, items[start : start + step])
        return results

    def _call(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        began = time.perf_counter()
        given = list(self._on_device(items))  # the encoder's own list, with which it may do what it likes
        if isinstance(self._encoder, Encoder):
            result = self._encoder.encode(modality, given)
        elif modality in self._encoder:
            result = self._encoder[modality](given)
        else:
            raise EncoderError(f"no encoder for {modality.argument} was given", **self.owner)
        checked = checked_rows(
            result, items, hidden=self._hidden, dtype=self._dtype, device=self._device, owner=self.owner
        )
        if self._observers is not None:
            self._observers.emit(
                EncodeBatch(
                    modality=modality.name.lower(),
                    num_items=len(items),
                    num_tokens=sum(item.num_tokens for item in items),
                    elapsed_ms=round((time.perf_counter() - began) * 1e3, 3),
                )
            )
        return checked

    def _on_device(self, items: Sequence[MultimodalDataItem]) -> Sequence[MultimodalDataItem]:
        """The items with their features on the encoder's device; the given ones keep their host copy."""
        if self._staging is None:
            return items
        sent = self._staging.send([as_tensor(item.feature) for item in items])
        return [msgspec.structs.replace(item, feature=feature) for item, feature in zip(items, sent, strict=True)]

    def _failure(self, what: str, error: BaseException | None) -> MMPluginError:
        """The fault without its frames, which would keep the encoder's tensors alive for as long as it is known."""
        if error is not None:
            logger.debug("mm-plugin: encoder failed", exc_info=error)
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        if isinstance(error, MMPluginError) and isinstance(getattr(error, "message", None), str):
            return error  # it says already whose fault it was
        failure = EncoderError(f"the encoder failed: {what}", **self.owner)
        failure.__cause__ = error
        return failure


def _alone(outcome: int) -> int:
    return outcome
