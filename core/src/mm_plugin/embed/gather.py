"""The embeddings of one step's items, those that its requests hold among them; and held on where a chunk cuts a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mm_plugin.embed.encode import ItemEmbeddings
from mm_plugin.errors import MMPluginError
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.items import MultimodalDataItem

if TYPE_CHECKING:
    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.embed.calls import EncoderCalls
    from mm_plugin.embed.plan import Place, StepPlan
    from mm_plugin.embed.preparing import Prepare
    from mm_plugin.inputs.batch import ForwardBatch


class StepEmbeddings:
    """One step's embeddings, by item. Final; serves one step.

    Args:
        plan: what the step writes.
        batch: what is extended.
        calls: encodes what is found nowhere.
        version: of the encoder, part of every key.
        cache: keeps embeddings across requests; None for none.
        prepare: makes the features of items that came with a task; None where there are no such items.

    Attributes:
        plan: as given.
        calls: as given.
        requests: indices of the requests that have tokens in the step.
        found: embeddings by item.
        failed: what went wrong, by item; an item is in one of the two.
    """

    def __init__(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        calls: EncoderCalls,
        version: str,
        cache: EmbeddingCache | None,
        prepare: Prepare | None = None,
    ) -> None:
        self.plan, self.calls = plan, calls
        self.requests = [request for request, extend in enumerate(batch.extend_seq_lens) if extend]
        self._media = batch.mm_inputs
        self._items = [
            () if inputs is None or request in plan.faults else tuple(inputs.mm_items)
            for request, inputs in enumerate(batch.inputs())
        ]
        self._held: dict[int, Mapping[bytes, object]] = {}
        self._embeddings: ItemEmbeddings[Place] = ItemEmbeddings(calls, version, cache, prepare)
        self.found: dict[Place, Encoded] = self._embeddings.found
        self.failed: dict[Place, MMPluginError] = self._embeddings.failed

    def gather(self) -> None:
        """Embeddings for every item that meets the step; for those that are found nowhere, one encoder call per modality."""
        items = {piece.place: self._item(piece.place) for piece in self.plan.pieces}
        self._embeddings.gather(items, lambda place: f"mm_items[{place[1]}]", self._at_hand)

    def release(self) -> None:
        """Take the step's pins back."""
        self._embeddings.release()

    def _item(self, place: Place) -> MultimodalDataItem:
        return self._items[place[0]][place[1]]

    def _at_hand(self, key: bytes, places: Sequence[Place]) -> tuple[Mapping[Place, Encoded], Encoded | None]:
        """What each place's own request holds; and, for those that hold nothing, what another request of the step does."""
        count = self._item(places[0]).num_tokens
        own = {place: held for place in places if (held := self._holding(place[0], key, count)) is not None}
        if len(own) == len(places):
            return own, None
        every = (self._holding(request, key, count) for request in range(len(self._media)))
        return own, next(filter(None, every), None)

    def _holding(self, request: int, key: bytes, num_tokens: int) -> Encoded | None:
        """What a request holds, if it fits: a step of another model may have left it, or a server anything else."""
        media, calls = self._media[request], self.calls
        if not isinstance(media, RequestMedia):
            return None
        if request not in self._held:
            self._held[request] = media.held_embeddings
        known = self._held[request].get(key)
        if not isinstance(known, Encoded) or not known.fits(num_tokens, calls.hidden, calls.dtype, calls.device):
            return None
        return known if self._embeddings.has_same_layers(known) else None

    def fail(self, request: int, error: MMPluginError) -> None:
        """Count the items of a request as failed."""
        for place in [place for place in self.found if place[0] == request]:
            del self.found[place]
            self.failed[place] = error

    def hold(self) -> None:
        """Leave with each request the embeddings of items that this step cut, and take back those of items that it finished."""
        unfinished: dict[int, dict[bytes, Encoded]] = {}
        embedded: dict[int, dict[bytes, Encoded]] = {}
        for place in {*self.plan.unfinished, *self.found}:
            item, media = self._item(place), self._media[place[0]]
            if item.precomputed_embeddings is not None or not isinstance(media, RequestMedia):
                continue
            key = self._embeddings.key(item)
            # An item with rows before and after this step, and none in it, stays held.
            encoded = self.found.get(place) or media.held_embeddings.get(key)
            if encoded is not None and place in self.plan.unfinished:
                unfinished.setdefault(id(media), {})[key] = encoded
            if place in self.found:
                embedded.setdefault(id(media), {})[key] = self.found[place]
        # Two entries of the batch may be one request's.
        for media in {id(media): media for media in self._media if isinstance(media, RequestMedia)}.values():
            media.hold(unfinished.get(id(media), {}), embedded.get(id(media), {}))
