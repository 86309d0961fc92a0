"""Who owns features and embeddings, and when they may go: finish, abort, retract. Knows no encoder and no scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from mm_plugin.cache.keys import ITEM_KEY_BYTES, item_key
from mm_plugin.errors import UsageError
from mm_plugin.inputs import MultimodalInputs
from mm_plugin.items import MultimodalDataItem
from mm_plugin.scheduler.sessions import merge

Retain = Literal["feature", "recipe", "rows"]


Recipe = Callable[[int], Any]


class LiveMedia(msgspec.Struct, frozen=True):
    """What the requests of a lifecycle keep alive now.

    Attributes:
        requests: requests that have neither finished nor been aborted.
        features: items whose feature, or whose given rows, are held.
        feature_bytes: bytes of those.
        held: entries of encoder rows held by requests.
        held_bytes: bytes of those.
    """

    requests: int
    features: int
    feature_bytes: int
    held: int
    held_bytes: int


class Lifecycle:
    """The media of all requests of one worker, from admission to their end. Final; safe to use from several threads.

    Args:
        retain: from what a retracted request is encoded again. `feature` keeps features on the host until the end; `recipe` lets
            a feature go when its rows are consumed, and asks for it again after a retract; `rows` lets it go too, and keeps the
            encoder's rows in its place.
    """

    def __init__(self, retain: Retain = "feature") -> None:
        if retain not in ("feature", "recipe", "rows"):
            raise UsageError(f"retain={retain!r} is none of feature, recipe, rows", argument="retain")
        self.retain: Retain = retain
        self._live: set[RequestMedia] = set()
        self._lock = threading.Lock()

    def admit(self, inputs: MultimodalInputs, *, recipe: Recipe | None = None) -> RequestMedia:
        """Take the media of a request.

        Args:
            inputs: its media; changed as features go and come.
            recipe: makes the feature of an item again, by the item's index; needed with `retain="recipe"`.

        Raises:
            UsageError: no recipe where one is needed.
        """
        if self.retain == "recipe" and recipe is None:
            raise UsageError('retain="recipe" needs a recipe for each request', argument="recipe")
        media = RequestMedia(inputs, self.retain, recipe, self._forget)
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
        features = [part for media in requests for item in media.inputs.mm_items for part in _content(item)]
        held = [rows for media in requests for rows in list(media.inputs.held_rows.values())]
        return LiveMedia(
            requests=len(requests),
            features=len(features),
            feature_bytes=sum(_num_bytes(part) for part in features),
            held=len(held),
            held_bytes=sum(_num_bytes(part) for rows in held for part in (rows.rows, rows.deepstack, rows.kept)),
        )


class RequestMedia:
    """One request's media; made by `Lifecycle.admit`. Final.

    Attributes:
        inputs: the media.
    """

    def __init__(
        self, inputs: MultimodalInputs, retain: Retain, recipe: Recipe | None, forget: Callable[[RequestMedia], None]
    ) -> None:
        self.inputs = inputs
        self._retain, self._forget = retain, forget
        self._recipes = [(recipe, index) for index in range(len(inputs.mm_items))]
        self._recipe = recipe
        self._given = [item.precomputed_embeddings is not None for item in inputs.mm_items]
        self._ended = False
        self._lock = threading.RLock()  # an abort may come from another thread, at any stage
        self._before: list[MultimodalInputs] = []
        inputs.retain_rows = retain == "rows"

    def advance(self, computed: int) -> None:
        """Say that the first `computed` tokens are computed and kept by the KV cache; features that nobody needs go.

        An item's feature may go when its last row lies before that, and there is another way to its rows. Rows that came with
        the request have no other way, and stay.
        """
        with self._lock:
            self._check_open()
            if self._retain == "feature":
                return
            held = {key[:ITEM_KEY_BYTES] for key in list(self.inputs.held_rows)}
            for item, given in zip(self.inputs.mm_items, self._given, strict=True):
                # Where the prefix came from another request's KV cache, no step had rows to keep.
                way_back = self._retain == "recipe" or item_key(item) in held
                if not given and way_back and item.offsets and item.offsets[-1][1] < computed:
                    item.feature = None

    def retract(self, computed: int = 0) -> None:
        """Say that the KV cache keeps only the first `computed` tokens; features that are needed again come back.

        Positions go on as before: `positions.extend_positions` gives those of the prompt and of what was generated.

        Raises:
            UsageError: a recipe gave nothing.
        """
        with self._lock:
            self._check_open()
            for index, (item, given) in enumerate(zip(self.inputs.mm_items, self._given, strict=True)):
                if given or item.feature is not None or item.offsets[-1][1] < computed:
                    continue
                recipe, place = self._recipes[index]
                if self._retain == "recipe" and recipe is not None:
                    item.feature = recipe(place)
                    if item.feature is None:
                        raise UsageError(f"the recipe gave nothing for mm_items[{index}]", argument="recipe")

    def next_turn(self, inputs: MultimodalInputs, *, generated: Any = (), recipe: Recipe | None = None) -> None:
        """Go on with a session's next turn: its media follow those of the turns before.

        Args:
            inputs: the media and ids of the new turn alone.
            generated: ids that were generated since the last turn.
            recipe: makes the feature of one of its items again, by the item's index in the turn; where None, the session's
                recipe is asked, by the index in the session.
        """
        with self._lock:
            self._check_open()
            merged = merge(self.inputs, inputs, generated=generated)
            merged.retain_rows = self._retain == "rows"
            first = len(self._recipes)
            self._recipes += [
                (self._recipe, first + index) if recipe is None else (recipe, index)
                for index in range(len(inputs.mm_items))
            ]
            self._given += [item.precomputed_embeddings is not None for item in inputs.mm_items]
            self._before += [self.inputs, inputs]
            self.inputs = merged

    def finish(self) -> None:
        """The request is done: features, rows and held rows go. Calling it twice is harmless."""
        with self._lock:
            if not self._ended:
                self._ended = True
                for inputs in (*self._before, self.inputs):  # a step of an earlier turn may still be under way
                    inputs.ended = True
                    inputs.release_features()
                self._forget(self)

    def abort(self) -> None:
        """The request is given up, at any stage; all that it kept goes."""
        self.finish()

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("the request has ended", argument="request")


def _content(item: MultimodalDataItem) -> list[Any]:
    return [part for part in (item.feature, item.precomputed_embeddings) if part is not None]


def _num_bytes(value: Any) -> int:
    return int(getattr(value, "nbytes", 0))
