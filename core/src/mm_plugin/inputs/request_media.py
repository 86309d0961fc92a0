"""`RequestMedia`: what a GPU worker keeps of one request's media, and when it may go. Knows no encoder and no scheduler."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from mm_plugin.errors import UsageError
from mm_plugin.forking import new_lock, new_rlock
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.inputs.processed import MultimodalInputs, cut_span
from mm_plugin.items import ITEM_KEY_BYTES, item_key

# From what a retracted request is embedded again.
Retain = Literal["feature", "recipe", "embeddings"]

# Makes the feature of an item again, by the item's index.
Recipe = Callable[[int], Any]


class RequestMedia:
    """The media of one request in a GPU worker: features, and embeddings of items that a chunk cut. Final; thread-safe.

    One object serves a request from its first step to its end: pass it in `ForwardBatch.mm_inputs` of every step. What
    `embed_mm_inputs` encoded of an item whose span a chunk cuts stays here until the item's last embedding is written, so an item
    is encoded once whatever the cache does. A lock of its own guards it: a request may be aborted while a step of it runs.

    `mm_plugin.scheduler.Lifecycle` makes such objects for a whole worker and counts what they keep.

    Args:
        inputs: what the scheduler keeps of the request; the features of its items are released and made again here.
        retain: from what a retracted request is embedded again. `feature` keeps features on the host until the end; `recipe`
            releases a feature when its item is computed, and asks for it again after a retract; `embeddings` releases it too, and
            keeps the item's embeddings in its place.
        recipe: makes the feature of an item again, by the item's index; required with `retain="recipe"`.
        on_end: called once with this object when the request ends.

    Attributes:
        inputs: the request's `MultimodalInputs`; those of the whole session after `next_turn`.
        retain: as given.

    Raises:
        UsageError: an argument is of another kind, or the recipe is missing.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import MultimodalInputs, RequestMedia
        >>> ids = np.arange(4)
        >>> inputs = MultimodalInputs(mm_items=[], input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0)
        >>> media = RequestMedia(inputs)  # then, in each step: ForwardBatch([media], [prefix], [extend])
        >>> media.advance(4)
        >>> media.finish()
        >>> media.ended
        True
    """

    def __init__(
        self,
        inputs: MultimodalInputs,
        *,
        retain: Retain = "feature",
        recipe: Recipe | None = None,
        on_end: Callable[[RequestMedia], None] | None = None,
    ) -> None:
        if not isinstance(inputs, MultimodalInputs):
            raise UsageError(f"inputs: expected MultimodalInputs, got {type(inputs).__name__}", argument="inputs")
        check_retain(retain)
        if retain == "recipe" and recipe is None:
            raise UsageError('recipe: retain="recipe" needs a recipe for each request, got None', argument="recipe")
        self.inputs = inputs
        self.retain: Retain = retain
        self._recipe, self._on_end = recipe, on_end
        self._remake: list[Callable[[], Any] | None] = []
        self._precomputed: list[bool] = []
        self._add_items(0, recipe, 0)
        self._ended = False
        self._held: dict[bytes, Encoded] = {}
        self._order = new_rlock()  # of the calls below; a recipe may run, or abort the request, under it
        self._lock = new_lock()  # of the held embeddings, which steps read and write; never held for long

    # ---------------------------------------------------------------- what `embed` calls

    @property
    def ended(self) -> bool:
        """Whether the request has finished or was aborted."""
        return self._ended

    @property
    def held_embeddings(self) -> dict[bytes, Encoded]:
        """A copy of what is held now: embeddings of items that the last step cut, or of all with `retain="embeddings"`.

        Keys are those of `mm_plugin.cache.embedding_key`: the item's key, then that of the encoder.
        """
        with self._lock:
            return dict(self._held)

    def hold(self, unfinished: Mapping[bytes, Encoded], embedded: Mapping[bytes, Encoded]) -> None:
        """Hold what later steps need, and drop what they do not. A request that has ended holds nothing.

        Args:
            unfinished: embeddings of the items that the step cut, and of those it has yet to go on with.
            embedded: embeddings of all items that the step met; held until the end with `retain="embeddings"`.
        """
        with self._lock:
            if self._ended:
                return
            if self.retain == "embeddings":
                self._held.update(embedded)
            else:
                self._held = dict(unfinished)

    # ---------------------------------------------------------------- what a server calls

    def advance(self, computed: int) -> None:
        """Report that the first `computed` tokens are computed and kept by the KV cache; features no longer needed are released.

        A feature is released when its item lies before that as a whole and there is another way to its embeddings. Precomputed
        embeddings stay: there is no other way to them.

        Raises:
            UsageError: the request has ended, or `computed` is not a whole number.
        """
        with self._order:
            self._check_open()
            _check_computed(computed)
            self._release(computed)

    def _release(self, computed: int) -> None:
        if self.retain != "feature":
            held = {key[:ITEM_KEY_BYTES] for key in self.held_embeddings}
            for item, precomputed in zip(self.inputs.mm_items, self._precomputed, strict=True):
                # Where the prefix came from another request's KV cache, no step had embeddings to hold.
                recoverable = self.retain == "recipe" or item_key(item) in held
                if not precomputed and recoverable and item.offsets and item.offsets[-1][1] < computed:
                    item.release()

    def retract(self, computed: int = 0) -> None:
        """Report that the KV cache keeps only the first `computed` tokens; features that are needed again are made again.

        A server that looks into its prefix cache before it computes the request again calls `resume` then, and not this before it.
        Positions stay as they were: `mm_plugin.positions.extend_positions` gives those of the prompt and of what was generated.

        Raises:
            UsageError: a recipe returned None, or the request has ended.
        """
        with self._order:
            self._check_open()
            _check_computed(computed)
            self._restore(computed)

    def _restore(self, computed: int) -> None:
        for index, (item, remake) in enumerate(zip(self.inputs.mm_items, self._remake, strict=True)):
            if remake is None or item.num_contents or not item.offsets or item.offsets[-1][1] < computed:
                continue
            feature = remake()
            if self._ended:  # by the recipe
                return
            item.feature = feature
            if feature is None:
                raise UsageError(f"mm_items[{index}]: expected a feature from the recipe, got None", argument="recipe")

    def resume(self, hit: int) -> None:
        """Report that the next step goes on after the first `hit` tokens, whose KV cache a prefix cache has.

        It is for a request that was just admitted, and for one whose KV cache was taken away, in place of `retract`. Items that lie
        within these tokens as a whole are consumed: their embeddings are held no longer, their features go as with `advance`, and
        no recipe is asked for them. Features of the other items are made again where they are gone.

        Args:
            hit: tokens; 0 where the prefix cache has none.

        Raises:
            UsageError: the request has ended, `hit` is not a number of tokens from 0, it cuts a span that must stay whole, or a
                recipe returned None.
        """
        with self._order:
            self._check_open()
            _check_computed(hit)
            cut = cut_span(self.inputs, hit)
            if hit < 0 or cut is not None:
                expected = "from 0" if cut is None else f"that do not cut the span ({cut[0]}, {cut[1]})"
                raise UsageError(f"hit: expected tokens {expected}, got {hit}", argument="hit")
            if self.retain != "embeddings":
                needed = {
                    item_key(item) for item in self.inputs.mm_items if item.offsets and item.offsets[-1][1] >= hit
                }
                with self._lock:
                    self._held = {key: each for key, each in self._held.items() if key[:ITEM_KEY_BYTES] in needed}
            self._release(hit)
            self._restore(hit)

    def next_turn(self, inputs: MultimodalInputs, *, recipe: Recipe | None = None) -> None:
        """Go on with a session's next turn.

        Args:
            inputs: those of the session so far and of the turn: `mm_plugin.scheduler.merge(media.inputs, turn)`.
            recipe: makes the feature of one of the turn's items again, by the item's index in the turn; where None, the recipe of
                the session is asked, by the index in the session.

        Raises:
            UsageError: `inputs` do not go on from those of the request, or the request has ended.
        """
        with self._order:
            self._check_open()
            known = len(self.inputs.mm_items)
            if not _goes_on(self.inputs, inputs):
                raise UsageError(
                    f"inputs: expected the request's {len(self.inputs.input_ids)} tokens and {known} items first, got others; "
                    "join the turns with merge(media.inputs, turn)",
                    argument="inputs",
                )
            self.inputs = inputs
            self._add_items(known, *((self._recipe, 0) if recipe is None else (recipe, known)))

    def finish(self) -> None:
        """Report that the request is done: features and embeddings are released. Calling it twice is harmless."""
        with self._order:
            if self._ended:
                return
            with self._lock:
                self._ended = True
                self._held.clear()
            self.inputs.release_features()
            if self._on_end is not None:
                self._on_end(self)

    def abort(self) -> None:
        """Report that the request is given up, at any stage; releases the same as `finish`."""
        self.finish()

    def _add_items(self, first: int, recipe: Recipe | None, counted_from: int) -> None:
        """Take on the items from `first` on; their recipe counts them from `counted_from`."""
        for index, item in enumerate(self.inputs.mm_items[first:], first):
            precomputed = item.precomputed_embeddings is not None
            self._precomputed.append(precomputed)
            if recipe is None or precomputed or self.retain != "recipe":
                self._remake.append(None)
            else:
                self._remake.append(partial(recipe, index - counted_from))

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("request: it has ended", argument="request")


def _check_computed(computed: Any) -> None:
    if isinstance(computed, bool) or not isinstance(computed, numbers.Integral):
        raise UsageError(f"computed: expected a number of tokens, got {type(computed).__name__}", argument="computed")


def check_retain(retain: Any) -> None:
    """Refuse what is not a `Retain`.

    Raises:
        UsageError: it is not.
    """
    if retain not in get_args(Retain):
        raise UsageError(f"retain: expected one of {', '.join(get_args(Retain))}, got {retain!r}", argument="retain")


def _goes_on(before: MultimodalInputs, after: MultimodalInputs) -> bool:
    """Whether `after` begins with the tokens and the items of `before`."""
    items = after.mm_items[: len(before.mm_items)]
    return np.array_equal(after.padded_input_ids[: len(before.padded_input_ids)], before.padded_input_ids) and [
        (item_key(item), item.offsets) for item in items
    ] == [(item_key(item), item.offsets) for item in before.mm_items]
