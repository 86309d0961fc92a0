"""A model's own way to embed (`ModelSpec.embed`), called for a step; a fault of it stays with the request that causes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mm_plugin.embed.calls import FAILED, OK, EncoderCalls
from mm_plugin.embed.rows import RoutineOutput
from mm_plugin.errors import EncoderError, MMPluginError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.inputs.encoded import Encoded

if TYPE_CHECKING:
    from mm_plugin.embed.plan import Place, StepPlan
    from mm_plugin.encoder.base import EmbedRoutine


class ModelRoutine:
    """Calls a model's embed routine for one step. Final.

    It is called once. Where that fails, it is called on the text alone, and then with the items of one request after another:
    requests whose items it fails on are found and left out, and the others go on. Where it fails on the text alone, every request
    of the step fails.

    Args:
        routine: `(text_embeds, plan, embeddings, input_ids) -> (input_embeds, extra)`.
        calls: the step's encoder calls: whose the routine is, and how ranks agree on what failed.
        plan: what the step writes.
        requests: indices of the requests that have tokens in the step.
        found: embeddings by item; an item without any is text to the routine.
        input_ids: [total] int32 or int64, model ids.
        embed: a new [total, hidden] with the text embeddings of all ids, those of items included.
    """

    def __init__(
        self,
        routine: EmbedRoutine,
        calls: EncoderCalls,
        plan: StepPlan,
        requests: Sequence[int],
        found: Mapping[Place, Encoded],
        input_ids: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._routine, self._calls = routine, calls
        self._plan, self._requests, self._found = plan, requests, found
        self._input_ids, self._embed = input_ids, embed

    def run(self, text_embeds: torch.Tensor) -> RoutineOutput:
        """Embed the step.

        Args:
            text_embeds: what `embed` gives for `input_ids`; the routine may write to it.
        """
        whole = self._attempt(self._found, text_embeds)
        if not isinstance(whole, MMPluginError):
            return RoutineOutput(*whole, is_own=True)
        best = self._attempt(())
        if isinstance(best, MMPluginError):
            failed = dict.fromkeys(self._requests, best)
            return RoutineOutput(self._embed(self._input_ids), failed=failed)
        requests = sorted({piece.request for piece in self._plan.pieces if piece.place in self._found})
        if len(requests) == 1:
            return RoutineOutput(*best, is_own=True, failed={requests[0]: whole})
        failed = {}
        for request in requests:
            good = [place for place in self._found if place[0] <= request and place[0] not in failed]
            result = self._attempt(good)
            if isinstance(result, MMPluginError):
                failed[request] = result
            else:
                best = result
        return RoutineOutput(*best, is_own=True, failed=failed)

    def _attempt(
        self, places: Collection[Place], text_embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any] | MMPluginError:
        """The routine's result with the items at these places, or its fault."""
        outcome, failure, result = OK, None, None
        try:
            result = self._call(places, self._embed(self._input_ids) if text_embeds is None else text_embeds)
        except BaseException as error:
            if is_interruption(error):
                raise
            outcome, failure = (
                FAILED,
                self._calls.failure(f"the embed routine failed: {words(error)}", error),
            )
        worst = self._calls.agreed(outcome, "the embed routine failed")
        if isinstance(worst, MMPluginError):
            return worst
        if worst != OK or result is None:
            return failure or self._calls.failure(
                "the embed routine failed: another rank could not embed the step", None
            )
        return result

    def _call(self, places: Collection[Place], text_embeds: torch.Tensor) -> tuple[torch.Tensor, Any]:
        plan = self._plan.only(places)
        shape, dtype, device = text_embeds.shape, text_embeds.dtype, text_embeds.device
        # Copies, since the routine may write to what it gets, and these are in caches.
        embeddings = [_copied(self._found[piece.place].rows(piece.rows_start, piece.rows_end)) for piece in plan.pieces]
        result = self._routine(text_embeds, plan, embeddings, self._input_ids.clone())
        if not isinstance(result, tuple):
            raise self._refused("(input_embeds, extra)", type(result).__name__)
        if len(result) != 2:
            raise self._refused("(input_embeds, extra)", f"a tuple of {len(result)}")
        embeds, extra = result
        wanted = f"input_embeds {list(shape)} {dtype} on {device}"
        if not isinstance(embeds, torch.Tensor):
            raise self._refused(wanted, type(embeds).__name__)
        if (embeds.shape, embeds.dtype, embeds.device) != (shape, dtype, device):
            raise self._refused(wanted, f"{list(embeds.shape)} {embeds.dtype} on {embeds.device}")
        return embeds.detach(), extra

    def _refused(self, expected: str, found: str) -> EncoderError:
        return EncoderError(f"the embed routine: expected {expected}, got {found}", **self._calls.owner)


def _copied(encoded: Encoded) -> Encoded:
    parts = (encoded.embeddings, encoded.deepstack, encoded.kept)
    return Encoded(*(None if part is None else part.clone() for part in parts))
