"""Interval arithmetic, batch encoding, and rows written into text embeddings. Knows no model; runs in the GPU worker.

A step is planned on the host from offsets alone (`plan_step`): which tokens are text, and which rows of which item go where. No
token is scanned, no mask is built, and nothing is read back from the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.encoder import Encoder, checked_rows, given_rows
from mm_plugin.errors import EncoderError, MMPluginError, UsageError
from mm_plugin.events import EncodeBatch, ItemFailed, Observers
from mm_plugin.structs import Encoded, ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache import EmbeddingCache

__all__ = [
    "EmbedOutput",
    "Encoded",
    "FailedItem",
    "ForwardBatch",
    "Piece",
    "StepPlan",
    "embed_mm_inputs",
    "general_mm_embed_routine",
    "plan_step",
]

EncoderLike = Encoder | Mapping[Modality, Callable[[Sequence[MultimodalDataItem]], Sequence[Any]]]

# Up to this many runs of text, one lookup a run; more are looked up together. Measured on two cores: they cross near here.
_FEW_RUNS = 64


class Piece(msgspec.Struct, frozen=True):
    """Rows `rows_start:rows_end` of an item go to `out_start` and after in the flat output of the step.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request.
        rows_start: first row of the item, inclusive.
        rows_end: last row, exclusive.
        out_start: first index in the flat output.
    """

    request: int
    item: int
    rows_start: int
    rows_end: int
    out_start: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step reads and writes; plain data.

    Attributes:
        total: tokens in the step.
        text_runs: half-open intervals of the flat output that are text.
        pieces: rows of items, in output order.
        unfinished: (request, item) of those that began before the end of this step and whose last row lies after it.
    """

    total: int
    text_runs: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    unfinished: frozenset[tuple[int, int]]


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
    """

    input_embeds: Any
    deepstack: tuple[Any, Any] | None
    failed: tuple[FailedItem, ...]


def plan_step(batch: ForwardBatch) -> StepPlan:
    """Intersect every span of every item with its request's chunk.

    Raises:
        UsageError: the batch's lists differ in length, or a length is negative.
    """
    lengths = {len(batch.mm_inputs), len(batch.extend_prefix_lens), len(batch.extend_seq_lens)}
    if len(lengths) != 1:
        raise UsageError(
            f"the batch's lists have {sorted(lengths)} entries; there must be one per request", argument="batch"
        )
    pieces: list[Piece] = []
    unfinished: set[tuple[int, int]] = set()
    text: list[tuple[int, int]] = []
    flat = 0
    for request, (inputs, prefix, extend) in enumerate(
        zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    ):
        if prefix < 0 or extend < 0:
            raise UsageError(
                f"request {request}: prefix {prefix} and extend {extend} must not be negative", argument="batch"
            )
        end = prefix + extend
        spans: list[tuple[int, int, int, int]] = []
        for index, item in enumerate(inputs.mm_items if inputs is not None else ()):
            row = 0
            for start, last in item.offsets:
                first, stop = max(start, prefix), min(last + 1, end)
                if first < stop:
                    spans.append((first, stop, index, row + first - start))
                row += last + 1 - start
            if item.offsets and item.offsets[0][0] < end <= item.offsets[-1][1]:
                unfinished.add((request, index))
        spans.sort()
        cursor = prefix
        for first, stop, index, row in spans:
            if first < cursor:
                raise UsageError(
                    f"request {request}: item {index}'s span at {first} overlaps another", argument="batch"
                )
            if first > cursor:
                text.append((flat + cursor - prefix, flat + first - prefix))
            pieces.append(Piece(request, index, row, row + stop - first, flat + first - prefix))
            cursor = stop
        if end > cursor:
            text.append((flat + cursor - prefix, flat + end - prefix))
        flat += extend
    return StepPlan(flat, tuple(_merged(text)), tuple(pieces), frozenset(unfinished))


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of neighbouring requests that touch, as one."""
    out: list[tuple[int, int]] = []
    for start, end in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def embed_mm_inputs(
    input_ids: torch.Tensor,
    batch: ForwardBatch,
    input_embedding: Any,
    encoder: EncoderLike,
    cache: EmbeddingCache | None = None,
    *,
    observers: Observers | None = None,
) -> EmbedOutput:
    """The embeddings of one step: text looked up, media encoded once and written by intervals.

    Rows of one encoder call, or of the cache, are bit-identical for every way to cut a prompt into chunks. Rows of a span
    that a chunk cuts are held by the request until its last row is written, whatever the cache does.

    Args:
        input_ids: [total] int32 or int64, the flat extends of all requests; cache ids or model ids. Never changed.
        batch: what is extended.
        input_embedding: the text embedding, an `nn.Embedding` or any callable from ids to rows.
        encoder: an `Encoder`, or a mapping from modality to a callable over items.
        cache: keeps rows across requests.
        observers: hear of every encoder call; the encoder's own where None.

    Raises:
        UsageError: ids, batch and embedding do not fit together. Nothing that an item or an encoder does raises here.
    """
    import torch

    plan = plan_step(batch)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        found = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise UsageError(f"input_ids must be a torch tensor of int32 or int64, not {found}", argument="input_ids")
    if input_ids.ndim != 1 or input_ids.numel() != plan.total:
        raise UsageError(
            f"input_ids has {list(input_ids.shape)} ids, the batch extends {plan.total}", argument="input_ids"
        )
    with torch.no_grad():
        out = _embed_text(input_ids, plan, input_embedding)
        step = _Step(plan, batch, encoder, cache, out, observers)
        step.gather()
        return step.write()


def general_mm_embed_routine(
    input_ids: torch.Tensor,
    batch: ForwardBatch,
    language_model: Any,
    encoder: EncoderLike,
    cache: EmbeddingCache | None = None,
    *,
    embeds_argument: str = "input_embeds",
    **kwargs: Any,
) -> tuple[Any, EmbedOutput]:
    """Embed a step and run the language model on it.

    Args:
        input_ids: as for `embed_mm_inputs`.
        batch: what is extended.
        language_model: has `get_input_embeddings()`, and is called with the embeddings.
        encoder: as for `embed_mm_inputs`.
        cache: as for `embed_mm_inputs`.
        embeds_argument: name of the argument that takes [total, hidden].
        **kwargs: given to the language model as they are.

    Returns:
        What the language model returned, and what was embedded, with the items that failed.
    """
    embedded = embed_mm_inputs(input_ids, batch, language_model.get_input_embeddings(), encoder, cache)
    return language_model(**{embeds_argument: embedded.input_embeds}, **kwargs), embedded


def _embed_text(input_ids: torch.Tensor, plan: StepPlan, embedding: Any) -> torch.Tensor:
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


ItemKey = tuple[Any, ...]


class _Step:
    """One step's rows on their way from items to the output."""

    def __init__(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        encoder: EncoderLike,
        cache: EmbeddingCache | None,
        out: torch.Tensor,
        observers: Observers | None,
    ) -> None:
        self._plan, self._batch, self._encoder, self._cache, self._out = plan, batch, encoder, cache, out
        self._hidden = out.shape[1]
        self._blame = dict(encoder.blame) if isinstance(encoder, Encoder) else {}
        self._version = encoder.version if isinstance(encoder, Encoder) else ""
        self._observers = observers or (encoder.observers if isinstance(encoder, Encoder) else None)
        self._rows: dict[tuple[int, int], Encoded] = {}
        self._failed: dict[tuple[int, int], MMPluginError] = {}

    def _inputs(self, request: int) -> MultimodalInputs:
        inputs = self._batch.mm_inputs[request]
        assert inputs is not None  # the plan names only requests that have items
        return inputs

    def gather(self) -> None:
        """Rows for every item that meets the step: given, held, cached, or from one encoder call per modality."""
        wanted: dict[ItemKey, list[tuple[int, int]]] = {}
        for place in dict.fromkeys((piece.request, piece.item) for piece in self._plan.pieces):
            inputs = self._inputs(place[0])
            item = inputs.mm_items[place[1]]
            if item.precomputed_embeddings is not None:
                self._take_given(place, item)
            elif item.pad_values is None:
                self._failed[place] = UsageError("the item has no identity", argument="identity")
            else:
                wanted.setdefault(_key(item), []).append(place)
        held = {
            key: rows
            for inputs in self._batch.mm_inputs
            if inputs is not None
            for key, rows in inputs.held_rows.items()
            if key in wanted
        }
        misses: dict[Modality, list[ItemKey]] = {}
        for key, places in wanted.items():
            rows = held.get(key) or self._cached(key)
            if rows is not None:
                self._rows.update(dict.fromkeys(places, rows))
            else:
                misses.setdefault(key[0], []).append(key)
        for modality, keys in misses.items():
            items = [self._inputs(wanted[key][0][0]).mm_items[wanted[key][0][1]] for key in keys]
            for key, result in zip(keys, self._encode(modality, items), strict=True):
                if isinstance(result, Encoded):
                    self._rows.update(dict.fromkeys(wanted[key], result))
                    if self._cache is not None:
                        self._cache.put(self._cache_key(key), result)
                else:
                    self._failed.update(dict.fromkeys(wanted[key], result))

    def _take_given(self, place: tuple[int, int], item: MultimodalDataItem) -> None:
        try:
            self._rows[place] = given_rows(item, hidden=self._hidden, dtype=self._out.dtype, device=self._out.device)
        except MMPluginError as error:
            self._failed[place] = error
        except Exception as error:
            failure = UsageError(
                f"precomputed embeddings cannot be read as rows: {type(error).__name__}",
                argument="precomputed_embeddings",
            )
            failure.__cause__ = error
            self._failed[place] = failure

    def _cache_key(self, key: ItemKey) -> ItemKey:
        return (*key, self._version, str(self._out.dtype))

    def _cached(self, key: ItemKey) -> Encoded | None:
        if self._cache is None:
            return None
        return self._cache.get(
            self._cache_key(key),
            num_tokens=key[2],
            hidden=self._hidden,
            dtype=self._out.dtype,
            device=self._out.device,
        )

    def _encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded | MMPluginError]:
        """One call for all items. Out of memory halves it; another failure is tried item by item, once."""
        import torch

        without = [item.feature is None for item in items]
        if any(without):
            gone = EncoderError("the item's feature was released before its rows were needed", **self._blame)
            rest = iter(
                self._encode(modality, [item for item in items if item.feature is not None]) if not all(without) else ()
            )
            return [gone if missing else next(rest) for missing in without]
        try:
            return list(self._call(modality, items))
        except torch.OutOfMemoryError as error:
            if len(items) == 1:
                return [self._encoder_error("out of device memory on one item", error)]
            step = len(items) // 2
        except MMPluginError as error:
            if len(items) == 1:
                return [error]
            step = 1
        except Exception as error:
            if len(items) == 1:
                return [self._encoder_error(f"{type(error).__name__}: {error}", error)]
            step = 1
        results: list[Encoded | MMPluginError] = []
        for start in range(0, len(items), step):
            results += self._encode(modality, items[start : start + step])
        return results

    def _call(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        began = time.perf_counter()
        if isinstance(self._encoder, Encoder):
            result = self._encoder.encode(modality, items)
        elif modality in self._encoder:
            result = self._encoder[modality](items)
        else:
            raise EncoderError(f"no encoder for {modality.argument} was given", **self._blame)
        checked = checked_rows(
            result, items, hidden=self._hidden, dtype=self._out.dtype, device=self._out.device, blame=self._blame
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

    def _encoder_error(self, what: str, error: Exception) -> EncoderError:
        failure = EncoderError(f"the encoder failed: {what}", **self._blame)
        failure.__cause__ = error
        return failure

    def write(self) -> EmbedOutput:
        """Copy rows into the output, and decide what each request still holds."""
        stacked: list[tuple[Any, Piece]] = []
        layers = 0
        for piece in self._plan.pieces:
            end = piece.out_start + piece.rows_end - piece.rows_start
            encoded = self._rows.get((piece.request, piece.item))
            if encoded is not None and encoded.deepstack is not None:
                layers = layers or encoded.deepstack.shape[0]
                if encoded.deepstack.shape[0] != layers:
                    self._failed[piece.request, piece.item] = EncoderError(
                        f"deepstack rows of {encoded.deepstack.shape[0]} layers, others of this step have {layers}",
                        **self._blame,
                    )
                    encoded = None
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
        return EmbedOutput(self._out, self._deepstack(stacked), failed)

    def _hold(self) -> None:
        """A request keeps the rows of spans that this step cut, and lets go of those it finished."""
        keep: dict[int, dict[ItemKey, Encoded]] = {}
        for place in self._plan.unfinished:
            inputs = self._inputs(place[0])
            item = inputs.mm_items[place[1]]
            # An item with rows before and after this step, and none in it, stays held.
            encoded = self._rows.get(place) or inputs.held_rows.get(_key(item))
            if encoded is not None and item.precomputed_embeddings is None:
                keep.setdefault(place[0], {})[_key(item)] = encoded
        for request in {piece.request for piece in self._plan.pieces}:
            held = self._inputs(request).held_rows
            held.clear()
            held.update(keep.get(request, {}))

    def _deepstack(self, stacked: Sequence[tuple[Any, Piece]]) -> tuple[Any, Any] | None:
        import torch

        if not stacked:
            return None
        runs = [(piece.out_start, piece.out_start + rows.shape[1]) for rows, piece in stacked]
        return torch.cat([rows for rows, _ in stacked], dim=1), _indices(runs).to(self._out.device, non_blocking=True)


def _key(item: MultimodalDataItem) -> ItemKey:
    """What rows are known by: equal keys mean equal rows."""
    return (item.modality, item.identity if item.identity is not None else item.hash, item.num_tokens)
