"""One step's rows: found or encoded, written by intervals, and held where a chunk cuts a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.cache.keys import embedding_key, encoder_key, item_key
from mm_plugin.embed.plan import Piece, StepPlan
from mm_plugin.encoder.results import given_rows
from mm_plugin.errors import EncoderError, MMPluginError, UsageError
from mm_plugin.events import ItemFailed, Observers
from mm_plugin.inputs import HELD_LOCK, Encoded, ForwardBatch, MultimodalInputs
from mm_plugin.items import Modality, MultimodalDataItem

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.embed.calls import EncoderCalls

# Up to this many runs of text, one lookup a run; more are looked up together. Measured on two cores: they cross near here.
_FEW_RUNS = 64


class FailedItem(msgspec.Struct, frozen=True, eq=False):
    """An item whose rows could not be had; zeros stand in their place, and its request should be aborted.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request.
        error: what went wrong.
    """

    request: int
    item: int
    error: MMPluginError


class EmbedOutput(msgspec.Struct, frozen=True, eq=False):
    """What a step's language model reads.

    Attributes:
        input_embeds: [total, hidden], on the device of the text embeddings.
        deepstack: None, or (rows [n_layers, n_rows, hidden], int64 indices [n_rows] in the flat output).
        failed: items that failed; empty in a good step.
        finite: with `check_finite`, a bool tensor without dimensions on the device, false where an embedding row is not finite;
            read it after the step. None without.
        kept: for pruned media, the int64 indices of the rows that were kept, on the device, by (request, item).
    """

    input_embeds: Any
    deepstack: tuple[Any, Any] | None
    failed: tuple[FailedItem, ...]
    finite: Any = None
    kept: Mapping[tuple[int, int], Any] = msgspec.field(default_factory=dict)


def embed_text(input_ids: torch.Tensor, plan: StepPlan, embedding: Any) -> torch.Tensor:
    """A fresh [total, hidden] with every text run filled; rows of media are left unset."""
    import torch

    runs = plan.text_runs
    if type(embedding) is torch.nn.Embedding and embedding.max_norm is None and not _is_altered(embedding):
        weight = embedding.weight
        out = weight.new_empty((plan.total, weight.shape[1]))
        if not runs:
            return out
        # Cache ids hold sentinels, and a bad id must not take the batch down: look up through a clamped copy.
        ids = input_ids.to(weight.device).clamp(0, weight.shape[0] - 1)
        if len(runs) <= _FEW_RUNS:
            for start, end in runs:
                torch.index_select(weight, 0, ids[start:end], out=out[start:end])
            return out
        where = _indices(runs).to(weight.device, non_blocking=True)
        return out.index_copy_(0, where, weight.index_select(0, ids.index_select(0, where)))
    # Any other table (scaled, sharded, hooked) is called once, on the text alone.
    text = torch.cat([input_ids[start:end] for start, end in runs]) if runs else input_ids[:0]
    limit = getattr(embedding, "num_embeddings", None)
    rows: torch.Tensor = embedding(text.clamp(0, limit - 1) if isinstance(limit, int) else text)
    if rows.ndim != 2 or rows.shape[0] != text.numel():
        raise UsageError(
            f"the text embedding gave {list(rows.shape)} for {text.numel()} ids", argument="input_embedding"
        )
    out = rows.new_empty((plan.total, rows.shape[-1]))
    cursor = 0
    for start, end in runs:
        out[start:end] = rows[cursor : cursor + end - start]
        cursor += end - start
    return out


def _is_altered(module: torch.nn.Module) -> bool:
    """Whether calling a module does more than its class says: hooks, or a `forward` put over it as offloading does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - torch has no public way to ask
    return any(hooks) or "forward" in vars(module)


def _indices(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in runs]))


class Step:
    """One step's rows on their way from items to the output."""

    def __init__(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        calls: EncoderCalls,
        version: str,
        cache: EmbeddingCache | None,
        out: torch.Tensor,
        observers: Observers | None,
    ) -> None:
        self._plan, self._batch, self._calls, self._cache, self._out = plan, batch, calls, cache, out
        self._hidden, self._observers = out.shape[1], observers
        self._encoder_key = encoder_key(version, str(out.dtype))
        self._layers: int | None = None
        self._pinned: list[bytes] = []
        self._rows: dict[tuple[int, int], Encoded] = {}
        self._failed: dict[tuple[int, int], MMPluginError] = {}

    def _inputs(self, request: int) -> MultimodalInputs:
        inputs = self._batch.mm_inputs[request]
        assert inputs is not None  # the plan names only requests that have items
        return inputs

    def _item(self, place: tuple[int, int]) -> MultimodalDataItem:
        return self._inputs(place[0]).mm_items[place[1]]

    def gather(self) -> None:
        """Rows for every item that meets the step: given, held, cached, or from one encoder call per modality."""
        wanted: dict[bytes, list[tuple[int, int]]] = {}
        for place in dict.fromkeys((piece.request, piece.item) for piece in self._plan.pieces):
            item = self._item(place)
            if item.precomputed_embeddings is not None:
                self._take_given(place, item)
            elif item.pad_values is None:
                self._failed[place] = UsageError("the item has no identity", argument="identity")
            else:
                wanted.setdefault(self._key(item), []).append(place)
        with HELD_LOCK:
            held = {
                key: rows
                for inputs in self._batch.mm_inputs
                if inputs is not None
                for key, rows in inputs.held_rows.items()
            }
        misses: dict[Modality, list[bytes]] = {}
        for key, places in wanted.items():
            if self._cache is not None and len(places) > 1:
                self._cache.joined(len(places) - 1)
            rows = held.get(key)
            if rows is None or not self._fits(rows):
                rows = self._cached(key, self._item(places[0]).num_tokens)
            if rows is not None and self._same_layers(rows):
                self._rows.update(dict.fromkeys(places, rows))
            else:
                misses.setdefault(self._item(places[0]).modality, []).append(key)
        for modality, keys in misses.items():
            items = [self._snapshot(wanted[key]) for key in keys]
            for key, result in zip(keys, self._calls.encode(modality, items), strict=True):
                if isinstance(result, Encoded) and not self._same_layers(result):
                    told = f"deepstack rows of {len(result.deepstack)} layers, others of this step have {self._layers}"
                    self._failed.update(dict.fromkeys(wanted[key], EncoderError(told, **self._calls.owner)))
                elif isinstance(result, Encoded):
                    self._rows.update(dict.fromkeys(wanted[key], result))
                    if self._cache is not None and self._cache.put(key, result):
                        self._pin(key)
                else:
                    self._failed.update(dict.fromkeys(wanted[key], result))

    def _snapshot(self, places: Sequence[tuple[int, int]]) -> MultimodalDataItem:
        """A copy of an item for the encoder, from a request that still has its feature; an abort cannot take it away."""
        copies = [msgspec.structs.replace(self._inputs(request).mm_items[index]) for request, index in places]
        return next((item for item in copies if item.feature is not None), copies[0])

    def _same_layers(self, encoded: Encoded) -> bool:
        """Whether deepstack rows have as many layers as the first of the step."""
        if encoded.deepstack is not None and self._layers is None:
            self._layers = len(encoded.deepstack)
        return encoded.deepstack is None or len(encoded.deepstack) == self._layers

    def _take_given(self, place: tuple[int, int], item: MultimodalDataItem) -> None:
        try:
            self._rows[place] = given_rows(
                item, hidden=self._hidden, dtype=self._out.dtype, device=self._out.device, send=self._calls.send
            )
        except MMPluginError as error:
            self._failed[place] = error
        except Exception as error:
            failure = UsageError(
                f"precomputed embeddings cannot be read as rows: {type(error).__name__}",
                argument="precomputed_embeddings",
            )
            failure.__cause__ = error
            self._failed[place] = failure

    def _fits(self, held: Encoded) -> bool:
        """Whether held rows are as wide as, and lie where, this step's embeddings do: another model may have held them."""
        return bool(held.rows.shape[1] == self._hidden and held.rows.device == self._out.device)

    def _key(self, item: MultimodalDataItem) -> bytes:
        """What an item's rows are known by, held or cached: other weights or another dtype give other rows."""
        return embedding_key(item_key(item), self._encoder_key)

    def _cached(self, key: bytes, num_tokens: int) -> Encoded | None:
        if self._cache is None:
            return None
        found = self._cache.get(
            key,
            num_tokens=num_tokens,
            hidden=self._hidden,
            dtype=self._out.dtype,
            device=self._out.device,
        )
        if found is not None:
            self._pin(key)
        return found

    def _pin(self, key: bytes) -> None:
        """What a step uses is not evicted before it ends."""
        if self._cache is not None and self._cache.store.pin(key):
            self._pinned.append(key)

    def release(self) -> None:
        """Take the step's pins back."""
        for key in self._pinned:
            if self._cache is not None:
                self._cache.store.unpin(key)
        self._pinned.clear()

    def write(self, *, check_finite: bool) -> EmbedOutput:
        """Copy rows into the output, and decide what each request still holds."""
        stacked: list[tuple[Any, Piece]] = []
        for piece in self._plan.pieces:
            end = piece.out_start + piece.rows_end - piece.rows_start
            encoded = self._rows.get((piece.request, piece.item))
            if encoded is None:
                self._out[piece.out_start : end].zero_()
                continue
            self._out[piece.out_start : end].copy_(encoded.rows[piece.rows_start : piece.rows_end])
            if encoded.deepstack is not None:
                stacked.append((encoded.deepstack[:, piece.rows_start : piece.rows_end], piece))
        self._hold()
        failed = tuple(FailedItem(*place, error) for place, error in sorted(self._failed.items()))
        if self._observers is not None:
            for entry in failed:
                self._observers.emit(
                    ItemFailed(request=entry.request, item=entry.item, code=entry.error.code, error=entry.error.message)
                )
        kept = {place: rows.kept for place, rows in self._rows.items() if rows.kept is not None}
        return EmbedOutput(self._out, self._deepstack(stacked), failed, self._finite() if check_finite else None, kept)

    def _finite(self) -> torch.Tensor:
        """Whether every row of every media input is finite: a flag on the device, which nobody waits for here."""
        import torch

        parts = [part for rows in self._rows.values() for part in (rows.rows, rows.deepstack) if part is not None]
        flags = [torch.isfinite(part).all() for part in {id(part): part for part in parts}.values()]
        return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=self._out.device)

    def _hold(self) -> None:
        """A request keeps the rows of spans that this step cut, and lets go of those it finished."""
        keep: dict[int, dict[bytes, Encoded]] = {}
        for place in self._plan.unfinished:
            inputs = self._inputs(place[0])
            item = inputs.mm_items[place[1]]
            # An item with rows before and after this step, and none in it, stays held.
            key = self._key(item)
            encoded = self._rows.get(place) or inputs.held_rows.get(key)
            if encoded is not None and item.precomputed_embeddings is None:
                keep.setdefault(place[0], {})[key] = encoded
        with HELD_LOCK:
            self._exchange(keep)

    def _exchange(self, keep: Mapping[int, dict[bytes, Encoded]]) -> None:
        met = {piece.request for piece in self._plan.pieces}
        # A request that ended while its step ran keeps nothing.
        requests = [
            request
            for request, inputs in enumerate(self._batch.mm_inputs)
            if inputs is not None and not inputs.ended and (inputs.held_rows or request in met)
        ]
        for request in requests:
            if not self._inputs(request).retain_rows:
                self._inputs(request).held_rows.clear()
        for request in requests:  # apart from the loop above, since requests may share their inputs
            inputs = self._inputs(request)
            if inputs.retain_rows:
                self._retain(request, inputs)
            else:
                inputs.held_rows.update(keep.get(request, {}))

    def _retain(self, request: int, inputs: MultimodalInputs) -> None:
        """Keep the rows of every item of a request until it ends."""
        for (owner, index), encoded in self._rows.items():
            item = inputs.mm_items[index] if owner == request else None
            if item is not None and item.precomputed_embeddings is None:
                inputs.held_rows[self._key(item)] = encoded

    def _deepstack(self, stacked: Sequence[tuple[Any, Piece]]) -> tuple[Any, Any] | None:
        import torch

        if not stacked:
            return None
        runs = [(piece.out_start, piece.out_start + rows.shape[1]) for rows, piece in stacked]
        return torch.cat([rows for rows, _ in stacked], dim=1), _indices(runs).to(self._out.device, non_blocking=True)
