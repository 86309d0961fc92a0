"""Calls of an encoder: all items of a modality together, split where needed; a fault stays with the item that causes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from mm_plugin.encoder.base import Agree, Encoder, EncoderLike
from mm_plugin.encoder.results import as_tensor, checked_embeddings
from mm_plugin.encoder.staging import StagingBuffer
from mm_plugin.errors import EncoderError, MMPluginError, UsageError, is_readable
from mm_plugin.events import BatchRefused, EncodeBatch, Observers
from mm_plugin.foreign import is_interruption, let_go, text_of, trace_of, words
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.items import Modality, MultimodalDataItem

logger = logging.getLogger("mm_plugin")

# Outcomes of a call, the worst last; ranks exchange them.
OK, OUT_OF_MEMORY, FAILED = 0, 1, 2


class EncoderCalls:
    """Encodes items for steps of one server. Final.

    Args:
        encoder: an `Encoder`, or a mapping from modality to a callable over items.
        hidden: width that embeddings must have; None for any.
        dtype: torch dtype to which they are converted.
        device: torch device to which they are moved.
        max_tokens: most embeddings of one call; None for no limit. An item that has more gets a call of its own.
        agree: for collective encoders, takes this rank's outcome (0 done, 1 out of memory, 2 failed) and returns the worst of
            all ranks.
        staging: brings host features to the encoder's device; the `Encoder`'s own where None, and without one, features are moved
            directly.
        observers: hear of every call; the `Encoder`'s own where None.
        strict: items that the encoder refuses together and encodes one by one have failed; as the `Encoder` says where None.

    Raises:
        UsageError: the encoder is collective, and `agree` is missing.

    Attributes:
        hidden: as given.
        dtype: as given.
        device: as given.
        observers: as given.
        owner: plugin, distribution and version of the encoder, for errors.
        agree: the worst outcome of all ranks, from that of this rank.
    """

    def __init__(
        self,
        encoder: EncoderLike,
        *,
        hidden: int | None,
        dtype: Any,
        device: Any,
        max_tokens: int | None = None,
        agree: Agree | None = None,
        staging: StagingBuffer | None = None,
        observers: Observers | None = None,
        strict: bool | None = None,
    ) -> None:
        bound = encoder if isinstance(encoder, Encoder) else None
        if bound is not None and bound.collective and agree is None:
            raise UsageError("agree: a collective encoder needs it, or its ranks would decide apart", argument="agree")
        self._encoder, self._max_tokens = encoder, max_tokens
        self._strict = strict if strict is not None else bound is not None and bound.is_strict
        self._staging = staging if staging is not None or bound is None else bound.staging
        self.observers = observers if observers is not None or bound is None else bound.observers
        self.hidden, self.dtype, self.device = hidden, dtype, device
        self.owner = {} if bound is None else dict(bound.owner)
        self._reads_on = torch.device(device if bound is None or bound.device is None else bound.device)
        collective = bound is not None and bound.collective
        self.agree: Agree = agree if agree is not None and collective else _alone

    def encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded | MMPluginError]:
        """The embeddings of each item, or what went wrong with it; no item's fault reaches another.

        Out of memory halves a call until one item remains; another failure is tried item by item, once. Where all items of a
        refused call are right by themselves, an event (`BatchRefused`) and a warning name the plugin.
        """
        gone = EncoderError("the item's feature was released before its embeddings were needed", **self.owner)
        # Read once: a request may be aborted, and its features released, while a call runs.
        there = [item.feature is not None for item in items]
        found: list[Encoded | MMPluginError] = []
        for group in self._groups([item for item, has in zip(items, there, strict=True) if has]):
            found += self._attempt(modality, group)
        rest = iter(found)
        return [next(rest) if has else gone for has in there]

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, moved as features are."""
        return tensor if self._staging is None else self._staging.send([tensor])[0]

    def _groups(self, items: Sequence[MultimodalDataItem]) -> list[list[MultimodalDataItem]]:
        """Items in order, as many together as `max_tokens` allows."""
        groups: list[list[MultimodalDataItem]] = []
        left = 0
        for item in items:
            if not groups or (self._max_tokens is not None and item.num_tokens > left):
                groups.append([])
                left = self._max_tokens or 0
            groups[-1].append(item)
            left -= item.num_tokens
        return groups

    def _attempt(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded | MMPluginError]:
        outcome = OK
        failure: MMPluginError | None = None
        encoded: list[Encoded] = []
        try:
            encoded = self._call(modality, items)
        except torch.OutOfMemoryError as error:
            outcome, failure = OUT_OF_MEMORY, self.failure("the encoder failed: out of device memory", error)
        except BaseException as error:
            if is_interruption(error):
                raise
            outcome, failure = FAILED, self.failure(f"the encoder failed: {words(error)}", error)
        worst = self.agreed(outcome, "the encoder failed")
        if isinstance(worst, MMPluginError):
            return [worst] * len(items)
        outcome = worst
        if outcome == OK:
            return list(encoded)
        if failure is None:
            failure = self.failure("the encoder failed: another rank could not encode the items", None)
        if len(items) == 1:
            return [failure]
        refused = text_of(failure)
        del failure, encoded  # what they keep alive may be the memory that was missing
        step = len(items) // 2 if outcome == OUT_OF_MEMORY else 1
        results: list[Encoded | MMPluginError] = []
        for start in range(0, len(items), step):
            results += self._attempt(modality, items[start : start + step])
        if outcome == FAILED and not any(isinstance(result, MMPluginError) for result in results):
            return self._disagreed(modality, results, refused)
        return results

    def _disagreed(
        self, modality: Modality, results: list[Encoded | MMPluginError], refused: str
    ) -> list[Encoded | MMPluginError]:
        """What becomes of items that the encoder refused together and encoded one by one: which is right, nobody knows."""
        what = (
            f"the encoder refused {len(results)} {modality.argument} together that it encoded one by one: {refused}; "
            "encode a batch as its items"
        )
        plugin = self.owner.get("plugin") or "the encoder"
        if self.observers is not None:
            self.observers.emit(
                BatchRefused(plugin=plugin, call=modality.name.lower(), num_items=len(results), error=refused)
            )
        logger.warning("mm-plugin: %s: %s", plugin, what)
        return [EncoderError(what, **self.owner)] * len(results) if self._strict else results

    def _call(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        began = time.perf_counter()
        given = list(self._on_device(items))  # a list of its own, which the encoder may change
        if isinstance(self._encoder, Encoder):
            result = self._encoder.encode(modality, given)
        elif modality in self._encoder:
            result = self._encoder[modality](given)
        else:
            raise EncoderError(f"encoder: expected one for {modality.argument}, got none", **self.owner)
        checked = checked_embeddings(
            result, items, hidden=self.hidden, dtype=self.dtype, device=self.device, owner=self.owner
        )
        if self.observers is not None:
            self.observers.emit(
                EncodeBatch(
                    modality=modality.name.lower(),
                    num_items=len(items),
                    num_tokens=sum(item.num_tokens for item in items),
                    elapsed_ms=round((time.perf_counter() - began) * 1e3, 3),
                )
            )
        return checked

    def _on_device(self, items: Sequence[MultimodalDataItem]) -> Sequence[MultimodalDataItem]:
        """Copies of the items with their features on the encoder's device; the items themselves keep their host copy."""
        if self._staging is None and self._reads_on.type == "cpu":
            return items
        features = [as_tensor(item.feature) for item in items]
        if self._staging is not None:
            sent = self._staging.send(features)
        else:
            sent = [feature.to(self._reads_on, non_blocking=True) for feature in features]
        return [msgspec.structs.replace(item, feature=feature) for item, feature in zip(items, sent, strict=True)]

    def agreed(self, outcome: int, what: str) -> int | MMPluginError:
        """The worst outcome of all ranks, from that of this rank; an error that begins with `what` where they cannot agree."""
        try:
            return self.agree(outcome)
        except BaseException as error:
            if is_interruption(error):
                raise
            return self.failure(f"{what}: the ranks could not agree: {words(error)}", error)

    def failure(self, what: str, error: BaseException | None) -> MMPluginError:
        """An error that says whose fault it was, without the frames, which would keep the encoder's tensors alive as long as it.

        Args:
            what: what happened, the message.
            error: what was raised; an error of ours says already whose fault it was, and is returned itself.
        """
        if error is not None:
            logger.debug("mm-plugin: encoder failed\n%s", trace_of(error))
            let_go(error)
        if isinstance(error, MMPluginError) and is_readable(error):
            return error
        failure = EncoderError(what, **self.owner)
        failure.__cause__ = error
        return failure


def _alone(outcome: int) -> int:
    return outcome
