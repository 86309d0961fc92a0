"""The media of all requests of one worker: admitted, counted, released. Knows no encoder and no queue."""

from __future__ import annotations

import msgspec

from mm_plugin.arrays import num_bytes
from mm_plugin.forking import new_lock
from mm_plugin.inputs.processed import MultimodalInputs
from mm_plugin.inputs.request_media import Recipe, RequestMedia, Retain, check_retain


class LiveMedia(msgspec.Struct, frozen=True):
    """What the requests of a lifecycle keep alive now.

    Attributes:
        requests: requests that have neither finished nor been aborted.
        features: items that keep a feature or precomputed embeddings.
        feature_bytes: bytes of those.
        held: items whose embeddings are held, counted once per request.
        held_bytes: bytes of those.

    Example:
        >>> from mm_plugin.scheduler import Lifecycle
        >>> Lifecycle().live()
        LiveMedia(requests=0, features=0, feature_bytes=0, held=0, held_bytes=0)
    """

    requests: int
    features: int
    feature_bytes: int
    held: int
    held_bytes: int


class Lifecycle:
    """The media of all requests of one worker, from admission to their end. Final; thread-safe.

    Args:
        retain: from what a retracted request is embedded again, for all requests; see `RequestMedia`.

    Raises:
        UsageError: `retain` is unknown.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import MultimodalInputs
        >>> from mm_plugin.scheduler import Lifecycle
        >>> ids = np.arange(4)
        >>> inputs = MultimodalInputs(mm_items=[], input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0)
        >>> lifecycle = Lifecycle()
        >>> media = lifecycle.admit(inputs)
        >>> lifecycle.live().requests
        1
        >>> media.finish()
        >>> lifecycle.live().requests
        0
    """

    def __init__(self, retain: Retain = "feature") -> None:
        check_retain(retain)
        self.retain: Retain = retain
        self._live: set[RequestMedia] = set()
        self._lock = new_lock()

    def admit(self, inputs: MultimodalInputs, *, recipe: Recipe | None = None) -> RequestMedia:
        """Take on the media of a request until its end; pass the result in `ForwardBatch.mm_inputs`.

        Args:
            inputs: what the scheduler keeps of the request; features of its items are released and made again.
            recipe: makes the feature of an item again, by the item's index; required with `retain="recipe"`.

        Raises:
            UsageError: an argument is of another kind, or the recipe is missing.
        """
        media = RequestMedia(inputs, retain=self.retain, recipe=recipe, on_end=self._forget)
        with self._lock:
            self._live.add(media)
        return media

    def _forget(self, media: RequestMedia) -> None:
        with self._lock:
            self._live.discard(media)

    def live(self) -> LiveMedia:
        """What is kept alive now; all zero when every request has ended."""
        with self._lock:
            requests = list(self._live)
        items = [item for media in requests for item in media.inputs.mm_items]
        features = [part for item in items for part in (item.feature, item.precomputed_embeddings) if part is not None]
        held = [encoded for media in requests for encoded in media.held_embeddings.values()]
        return LiveMedia(
            requests=len(requests),
            features=len(features),
            feature_bytes=sum(map(num_bytes, features)),
            held=len(held),
            held_bytes=sum(num_bytes(part) for each in held for part in (each.embeddings, each.deepstack, each.kept)),
        )
