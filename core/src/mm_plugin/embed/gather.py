"""The embeddings of one step's items: precomputed, held, cached, or from the encoder; and held on where a chunk cuts a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from mm_plugin.cache.keys import embedding_key, encoder_key
from mm_plugin.embed.admission import item_fault
from mm_plugin.encoder.results import given_embeddings
from mm_plugin.errors import EncoderError, MMPluginError, UsageError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem, item_key

if TYPE_CHECKING:
    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.embed.calls import EncoderCalls
    from mm_plugin.embed.plan import Place, StepPlan
    from mm_plugin.inputs.batch import ForwardBatch


class StepEmbeddings:
    """One step's embeddings, by item. Final; serves one step.

    Args:
        plan: what the step writes.
        batch: what is extended.
        calls: encodes what is found nowhere.
        version: of the encoder, part of every key.
        cache: keeps embeddings across requests; None for none.

    Attributes:
        plan: as given.
        calls: as given.
        requests: indices of the requests that have tokens in the step.
        found: embeddings by item.
        failed: what went wrong, by item; an item is in one of the two.
    """

    def __init__(
        self, plan: StepPlan, batch: ForwardBatch, calls: EncoderCalls, version: str, cache: EmbeddingCache | None
    ) -> None:
        self.plan, self.calls, self._cache = plan, calls, cache
        self.requests = [request for request, extend in enumerate(batch.extend_seq_lens) if extend]
        self._media = batch.mm_inputs
        self._items = [
            () if inputs is None or request in plan.faults else tuple(inputs.mm_items)
            for request, inputs in enumerate(batch.inputs())
        ]
        self._held: dict[int, Mapping[bytes, object]] = {}
        self._encoder_key = encoder_key(version, str(calls.dtype))
        self._layers: int | None = None
        self._pinned: list[bytes] = []
        self.found: dict[Place, Encoded] = {}
        self.failed: dict[Place, MMPluginError] = {}

    def gather(self) -> None:
        """Embeddings for every item that meets the step; for those that are found nowhere, one encoder call per modality."""
        misses: dict[Modality, dict[bytes, list[Place]]] = {}
        for key, wanting in self._wanted().items():
            places = [place for place in wanting if not self._take_held(place, key)]
            if not places:
                continue
            if self._cache is not None and len(places) > 1:
                self._cache.joined(len(places) - 1)
            known = self._lent(key, places[0]) or self._cached(key, self._item(places[0]).num_tokens)
            if known is not None and self._same_layers(known):
                self.found.update(dict.fromkeys(places, known))
            else:
                misses.setdefault(self._item(places[0]).modality, {})[key] = places
        for modality, wanted in misses.items():
            self._encode(modality, wanted)

    def _request_media(self) -> list[RequestMedia]:
        return [media for media in self._media if isinstance(media, RequestMedia)]

    def _item(self, place: Place) -> MultimodalDataItem:
        return self._items[place[0]][place[1]]

    def _key(self, item: MultimodalDataItem) -> bytes:
        return embedding_key(item_key(item), self._encoder_key)

    def _wanted(self) -> dict[bytes, list[Place]]:
        """Items to find or encode, those of one key together; precomputed embeddings are taken here."""
        wanted: dict[bytes, list[Place]] = {}
        for place in dict.fromkeys(piece.place for piece in self.plan.pieces):
            item = self._item(place)
            if item.precomputed_embeddings is not None:
                self._take_given(place, item)
            elif (fault := item_fault(item)) is not None:
                self.failed[place] = UsageError(f"mm_items[{place[1]}]: {fault.message}", argument=fault.argument)
            else:
                wanted.setdefault(self._key(item), []).append(place)
        return wanted

    def _take_given(self, place: Place, item: MultimodalDataItem) -> None:
        calls = self.calls
        try:
            self.found[place] = given_embeddings(
                item, hidden=calls.hidden, dtype=calls.dtype, device=calls.device, send=calls.send
            )
        except MMPluginError as error:
            self.failed[place] = error
        except BaseException as error:
            if is_interruption(error):
                raise
            what = f"precomputed_embeddings: expected an array or tensor, got what raises {words(error)}"
            self.failed[place] = UsageError(what, argument="precomputed_embeddings")

    def _take_held(self, place: Place, key: bytes) -> bool:
        """Use what the item's own request holds, whatever others hold."""
        known = self._holding(place[0], key, self._item(place).num_tokens)
        if known is not None:
            self.found[place] = known
        return known is not None

    def _lent(self, key: bytes, place: Place) -> Encoded | None:
        """What another request of the step holds of the same item."""
        count = self._item(place).num_tokens
        return next(filter(None, (self._holding(request, key, count) for request in range(len(self._media)))), None)

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
        return known if self._same_layers(known) else None

    def _cached(self, key: bytes, num_tokens: int) -> Encoded | None:
        if self._cache is None:
            return None
        calls = self.calls
        found = self._cache.get(key, num_tokens=num_tokens, hidden=calls.hidden, dtype=calls.dtype, device=calls.device)
        if found is not None:
            self._pin(key)
        return found

    def _pin(self, key: bytes) -> None:
        """Keep what the step uses from being evicted before it ends."""
        if self._cache is not None and self._cache.store.pin(key):
            self._pinned.append(key)

    def release(self) -> None:
        """Take the step's pins back."""
        for key in self._pinned:
            if self._cache is not None:
                self._cache.store.unpin(key)
        self._pinned.clear()

    def _encode(self, modality: Modality, wanted: Mapping[bytes, Sequence[Place]]) -> None:
        wanted, items = self._snapshots(wanted)
        for (key, places), result in zip(wanted.items(), self.calls.encode(modality, items), strict=True):
            if not isinstance(result, Encoded):
                self.failed.update(dict.fromkeys(places, result))
            elif not self._same_layers(result):
                what = (
                    f"deepstack: expected {self._layers} layers as in others of this step, got {len(result.deepstack)}"
                )
                self.failed.update(dict.fromkeys(places, EncoderError(what, **self.calls.owner)))
            else:
                self.found.update(dict.fromkeys(places, result))
                if self._cache is not None and self._cache.put(key, result):
                    self._pin(key)

    def _snapshots(
        self, wanted: Mapping[bytes, Sequence[Place]]
    ) -> tuple[Mapping[bytes, Sequence[Place]], list[MultimodalDataItem]]:
        """Copies of the items, and what is wanted without those of which there can be no copy."""
        good: dict[bytes, Sequence[Place]] = {}
        items: list[MultimodalDataItem] = []
        for key, places in wanted.items():
            try:
                items.append(self._snapshot(places))
                good[key] = places
            except UsageError as error:
                self.failed.update(dict.fromkeys(places, error))
        return good, items

    def _snapshot(self, places: Sequence[Place]) -> MultimodalDataItem:
        """A copy of an item for the encoder, from a request that still has its feature; an abort cannot take it away."""
        copies = [msgspec.structs.replace(self._item(place)) for place in places]
        return next((item for item in copies if item.feature is not None), copies[0])

    def _same_layers(self, encoded: Encoded) -> bool:
        """Whether deepstack embeddings have as many layers as the first of the step."""
        if encoded.deepstack is not None and self._layers is None:
            self._layers = len(encoded.deepstack)
        return encoded.deepstack is None or len(encoded.deepstack) == self._layers

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
            key = self._key(item)
            # An item with rows before and after this step, and none in it, stays held.
            encoded = self.found.get(place) or media.held_embeddings.get(key)
            if encoded is not None and place in self.plan.unfinished:
                unfinished.setdefault(id(media), {})[key] = encoded
            if place in self.found:
                embedded.setdefault(id(media), {})[key] = self.found[place]
        # Two entries of the batch may be one request's.
        for media in {id(media): media for media in self._request_media()}.values():
            media.hold(unfinished.get(id(media), {}), embedded.get(id(media), {}))
