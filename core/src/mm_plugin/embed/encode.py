"""Embeddings of items: precomputed, held, cached, or from one encoder call per modality; those of equal items found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from mm_plugin.cache.keys import embedding_key, encoder_key
from mm_plugin.embed.admission import form_fault, item_fault
from mm_plugin.embed.calls import EncoderCalls
from mm_plugin.embed.preparing import Prepare, prepared_items
from mm_plugin.encoder.base import Encoder
from mm_plugin.encoder.results import given_embeddings
from mm_plugin.errors import EncoderError, MMPluginError, UsageError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.items import Modality, MultimodalDataItem, item_key

if TYPE_CHECKING:
    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.encoder.base import Agree, EncoderLike
    from mm_plugin.encoder.staging import StagingBuffer
    from mm_plugin.events import Observers

# What tells the items of one search apart.
Place = TypeVar("Place", bound=Hashable)

# Embeddings that are at hand for some of the places that want one key, and those for all that are left; see `ItemEmbeddings`.
AtHand = Callable[[bytes, Sequence[Any]], tuple[Mapping[Any, Encoded], Encoded | None]]


class ItemEmbeddings(Generic[Place]):
    """Embeddings of the items of one step or one call, by their places. Final; serves one of them.

    Args:
        calls: encodes what is found nowhere.
        version: of the encoder, part of every key.
        cache: keeps embeddings across requests; None for none.
        prepare: makes the features of items that came with a task; None where there are no such items.

    Attributes:
        calls: as given.
        found: embeddings by place.
        failed: what went wrong, by place; a place is in one of the two.
    """

    def __init__(
        self, calls: EncoderCalls, version: str, cache: EmbeddingCache | None, prepare: Prepare | None = None
    ) -> None:
        self.calls, self._cache, self._prepare = calls, cache, prepare
        self._encoder_key = encoder_key(version, str(calls.dtype))
        self._layers: int | None = None
        self._pinned: list[bytes] = []
        self.found: dict[Place, Encoded] = {}
        self.failed: dict[Place, MMPluginError] = {}

    def key(self, item: MultimodalDataItem) -> bytes:
        """Under which an item's embeddings are cached and held."""
        return embedding_key(item_key(item), self._encoder_key)

    def gather(self, items: Mapping[Place, MultimodalDataItem], name: Callable[[Place], str], at_hand: AtHand) -> None:
        """Find embeddings for every item; for those that are found nowhere, make one encoder call per modality.

        Args:
            items: by place.
            name: of a place, for messages.
            at_hand: embeddings that a caller has at hand, by the key and the places that want it: those of some places, and one
                for all others, or None. They fit.
        """
        misses: dict[Modality, dict[bytes, list[Place]]] = {}
        for key, wanting in self._wanted(items, name).items():
            own, lent = at_hand(key, wanting)
            self.found.update(own)
            places = [place for place in wanting if place not in own]
            if not places:
                continue
            if self._cache is not None and len(places) > 1:
                self._cache.joined(len(places) - 1)
            first = items[places[0]]
            known = lent or self._cached(key, first.num_tokens)
            if known is not None and self.has_same_layers(known):
                self.found.update(dict.fromkeys(places, known))
            else:
                misses.setdefault(first.modality, {})[key] = places
        for modality, wanted in misses.items():
            self._encode(modality, {key: [(place, items[place]) for place in places] for key, places in wanted.items()})

    def _wanted(
        self, items: Mapping[Place, MultimodalDataItem], name: Callable[[Place], str]
    ) -> dict[bytes, list[Place]]:
        """Places of items to find or encode, those of one key together; precomputed embeddings are taken here."""
        wanted: dict[bytes, list[Place]] = {}
        for place, item in items.items():
            if item.precomputed_embeddings is not None:
                self._take_given(place, item)
            elif (fault := item_fault(item)) is not None:
                self.failed[place] = UsageError(f"{name(place)}: {fault.message}", argument=fault.argument)
            else:
                wanted.setdefault(self.key(item), []).append(place)
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

    def _cached(self, key: bytes, num_tokens: int) -> Encoded | None:
        if self._cache is None:
            return None
        calls = self.calls
        found = self._cache.get(key, num_tokens=num_tokens, hidden=calls.hidden, dtype=calls.dtype, device=calls.device)
        if found is not None:
            self._pin(key)
        return found

    def _pin(self, key: bytes) -> None:
        """Keep what is used from being evicted before the step or call ends."""
        if self._cache is not None and self._cache.store.pin(key):
            self._pinned.append(key)

    def release(self) -> None:
        """Take the pins back."""
        for key in self._pinned:
            if self._cache is not None:
                self._cache.store.unpin(key)
        self._pinned.clear()

    def _encode(self, modality: Modality, wanted: Mapping[bytes, Sequence[tuple[Place, MultimodalDataItem]]]) -> None:
        keys, items = [], []
        for key, those in wanted.items():
            try:
                items.append(_snapshot([item for _, item in those]))
                keys.append(key)
            except UsageError as error:
                self.failed.update({place: error for place, _ in those})
        ready = prepared_items(items, self._prepare, self.calls)
        good = [item for item in ready if isinstance(item, MultimodalDataItem)]
        encoded = iter(self.calls.encode(modality, good))
        results = [next(encoded) if isinstance(item, MultimodalDataItem) else item for item in ready]
        for key, result in zip(keys, results, strict=True):
            places = [place for place, _ in wanted[key]]
            if not isinstance(result, Encoded):
                self.failed.update(dict.fromkeys(places, result))
            elif not self.has_same_layers(result):
                what = (
                    f"deepstack: expected {self._layers} layers as in others of this step, got {len(result.deepstack)}"
                )
                self.failed.update(dict.fromkeys(places, EncoderError(what, **self.calls.owner)))
            else:
                self.found.update(dict.fromkeys(places, result))
                if self._cache is not None and self._cache.put(key, result):
                    self._pin(key)

    def has_same_layers(self, encoded: Encoded) -> bool:
        """Whether deepstack embeddings have as many layers as the first that were asked about."""
        if encoded.deepstack is not None and self._layers is None:
            self._layers = len(encoded.deepstack)
        return encoded.deepstack is None or len(encoded.deepstack) == self._layers


def _snapshot(items: Sequence[MultimodalDataItem]) -> MultimodalDataItem:
    """A copy of one of several equal items for the encoder, from a request that still has its feature; no abort can take it away.

    Raises:
        UsageError: there can be no copy.
    """
    copies = [msgspec.structs.replace(item) for item in items]
    with_feature = (item for item in copies if item.feature is not None)
    return next(with_feature, next((item for item in copies if item.task is not None), copies[0]))


def encode_items(
    items: Sequence[MultimodalDataItem],
    encoder: EncoderLike,
    cache: EmbeddingCache | None = None,
    *,
    hidden: int | None = None,
    dtype: Any = None,
    device: Any = None,
    max_encode_tokens: int | None = None,
    agree: Agree | None = None,
    staging: StagingBuffer | None = None,
    observers: Observers | None = None,
    strict: bool | None = None,
    prepare: Prepare | None = None,
) -> list[Encoded | MMPluginError]:
    """The embeddings of items, apart from any step: to encode ahead of one, in another process, or without a prompt.

    It does what `embed_mm_inputs` does for the items of a step: equal items are encoded once, precomputed embeddings are taken,
    the cache is asked first and filled, out of memory halves a call, and an item that fails leaves the others alone. A step that
    finds an item in the same cache makes no encoder call for it.

    Args:
        items: with identities and spans; those of `PreparedItem.item` too.
        encoder: as for `embed_mm_inputs`.
        cache: as for `embed_mm_inputs`.
        hidden: width that embeddings must have; None for any.
        dtype: torch dtype of the embeddings, that of the language model's; the dtype with which the encoder was loaded where None.
        device: torch device of the embeddings; the encoder's own where None.
        max_encode_tokens: as for `embed_mm_inputs`.
        agree: as for `embed_mm_inputs`.
        staging: as for `embed_mm_inputs`.
        observers: as for `embed_mm_inputs`.
        strict: as for `embed_mm_inputs`.
        prepare: as for `embed_mm_inputs`.

    Returns:
        For each item, in order, what the encoder returned, or the error that says why there is none. Entries of equal items share
        their tensors, and those from the cache are the cache's own: write to copies.

    Raises:
        UsageError: an entry is not an item, or dtype, device or `agree` are not known.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from mm_plugin import Modality, MultimodalDataItem, encode_items
        >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(0, 1)], feature=np.ones((2, 4)))
        >>> image.set_identity(bytes(32))
        >>> encoder = {Modality.IMAGE: lambda items: [torch.as_tensor(item.feature) for item in items]}
        >>> one, other = encode_items([image, image], encoder, dtype=torch.float32, device="cpu")
        >>> one is other, one.embeddings.tolist()
        (True, [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    """
    import torch

    bound = encoder if isinstance(encoder, Encoder) else None
    if not isinstance(items, Sequence):
        raise UsageError(f"items: expected a list of items, got {type(items).__name__}", argument="items")
    for index, item in enumerate(items):
        if not isinstance(item, MultimodalDataItem):
            raise UsageError(
                f"items[{index}]: expected a MultimodalDataItem, got {type(item).__name__}", argument="items"
            )
    calls = EncoderCalls(
        encoder,
        hidden=hidden,
        dtype=_known("dtype", dtype, None if bound is None else bound.loaded_dtype),
        device=torch.device(_known("device", device, None if bound is None else bound.device)),
        max_tokens=max_encode_tokens,
        agree=agree,
        staging=staging,
        observers=observers,
        strict=strict,
    )
    embeddings: ItemEmbeddings[int] = ItemEmbeddings(calls, "" if bound is None else bound.version, cache, prepare)
    faults = {index: form_fault(item, f"items[{index}]") for index, item in enumerate(items)}
    good = {index: item for index, item in enumerate(items) if faults[index] is None}
    try:
        with torch.no_grad():
            embeddings.gather(good, "items[{}]".format, _nothing_at_hand)
    finally:
        embeddings.release()
    answers: dict[int, Any] = {**faults, **embeddings.failed, **embeddings.found}
    return [answers[index] for index in range(len(items))]


def _nothing_at_hand(_: bytes, __: Sequence[Any]) -> tuple[Mapping[Any, Encoded], None]:
    return {}, None


def _known(name: str, given: Any, of_encoder: Any) -> Any:
    """A value that was given, or else the encoder's.

    Raises:
        UsageError: there is neither.
    """
    if given is None and of_encoder is None:
        raise UsageError(
            f"{name}: expected that of the language model's embeddings, got None; pass {name}=", argument=name
        )
    return of_encoder if given is None else given
