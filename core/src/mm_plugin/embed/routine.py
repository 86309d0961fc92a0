"""`embed_mm_inputs` and `general_mm_embed_routine`: one step in the GPU worker. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.embed.admission import is_ids
from mm_plugin.embed.gather import StepEmbeddings
from mm_plugin.embed.plan import StepPlan, plan_step
from mm_plugin.embed.rows import (
    EmbedOutput,
    FailedItem,
    RoutineOutput,
    all_finite,
    deepstack_rows,
    replace_rows,
    zero_requests,
    zero_rows,
)
from mm_plugin.embed.text import embed_text, model_ids
from mm_plugin.encoder.base import Agree, EmbedRoutine, Encoder, EncoderLike
from mm_plugin.errors import UsageError
from mm_plugin.events import ItemFailed
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.embed.preparing import Prepare
    from mm_plugin.encoder.staging import StagingBuffer
    from mm_plugin.events import Observers


def embed_mm_inputs(
    input_ids: torch.Tensor,
    batch: ForwardBatch,
    input_embedding: Any,
    encoder: EncoderLike,
    cache: EmbeddingCache | None = None,
    *,
    max_encode_tokens: int | None = None,
    agree: Agree | None = None,
    check_finite: bool = False,
    staging: StagingBuffer | None = None,
    observers: Observers | None = None,
    strict: bool | None = None,
    out: torch.Tensor | None = None,
    prepare: Prepare | None = None,
) -> EmbedOutput:
    """The embeddings of one step: text looked up, media encoded once and written by intervals.

    Embeddings of one encoder call, or of the cache, are bit-identical for every way to cut a prompt into chunks. Those of an item
    that a chunk cuts are held by its `RequestMedia` until the last of them is written, whatever the cache does.

    Where the spec of a bound `Encoder` names a routine in `ModelSpec.embed`, that routine makes `input_embeds` from the text
    embeddings of all ids and the embeddings of the items, in place of the core, which replaces rows.

    Args:
        input_ids: [total] int32 or int64, the flat extends of all requests; cache ids or model ids. Not changed.
        batch: what is extended, with each request's `RequestMedia`.
        input_embedding: the text embedding, an `nn.Embedding` or any callable from ids [n] to [n, hidden].
        encoder: an `Encoder`, or a mapping from modality to a callable over items.
        cache: keeps embeddings across requests.
        max_encode_tokens: most embeddings of one encoder call; a step that needs more makes several calls.
        agree: for collective encoders, takes this rank's outcome of a call (0 done, 1 out of memory, 2 failed) and returns the
            worst of all ranks, so that all decide alike. Ranks run the same steps over equal requests and equal caches.
        check_finite: add a flag to the output that says, on the device, whether all embeddings of items are finite.
        staging: brings features to the encoder's device; the bound encoder's own where None.
        observers: hear of every encoder call; the bound encoder's own where None.
        strict: items that the encoder refuses together and encodes one by one have failed; as the bound encoder's registry
            says (`Settings.strict`) where None.
        out: [at least total, hidden], of the text embeddings' dtype and device: a buffer whose first rows are written, and are
            `EmbedOutput.input_embeds`; other rows are left alone. A new tensor where None.
        prepare: `Processor.prepare_tasks`, or what does the same elsewhere, for items of `process(..., prepare="worker")`: called
            with the tasks of those that are found nowhere. What it cannot prepare has failed, like an item that is not encoded.

    Raises:
        UsageError: ids, batch, embedding and `out` do not fit together. No fault of an item, an encoder or a routine raises here;
            it is in `EmbedOutput.failed`.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from mm_plugin import ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs, RequestMedia, embed_mm_inputs
        >>> image = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 2)], feature=np.ones((2, 4)))
        >>> image.set_identity(bytes(32))
        >>> ids = np.array([5, 7, 7])
        >>> inputs = MultimodalInputs(mm_items=[image], input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0)
        >>> media = RequestMedia(inputs)  # one object, in every step of the request
        >>> encoder = {Modality.IMAGE: lambda items: [torch.as_tensor(item.feature) for item in items]}
        >>> for start in range(3):  # chunks of one token; the image is encoded once
        ...     batch = ForwardBatch([media], [start], [1])
        ...     step = embed_mm_inputs(torch.from_numpy(ids[start : start + 1]), batch, torch.nn.Embedding(8, 4), encoder)
        >>> step.input_embeds
        tensor([[1., 1., 1., 1.]])
    """
    import torch

    from mm_plugin.embed.calls import EncoderCalls

    plan = plan_step(batch)
    _check_media(batch)
    _check_ids(input_ids, plan)
    bound = encoder if isinstance(encoder, Encoder) else None
    own = None if bound is None else bound.embed_routine
    with torch.no_grad():
        # A model's own routine may use the embedding of a placeholder; without one, those are not looked up.
        text = input_ids if own is None else model_ids(input_ids, plan, batch)
        embeds = embed_text(text, plan if own is None else plan.only(()), input_embedding, out)
        calls = EncoderCalls(
            encoder,
            hidden=embeds.shape[1],
            dtype=embeds.dtype,
            device=embeds.device,
            max_tokens=max_encode_tokens,
            agree=agree,
            staging=staging,
            observers=observers,
            strict=strict,
        )
        step = StepEmbeddings(plan, batch, calls, "" if bound is None else bound.version, cache, prepare)
        try:
            step.gather()
            step.hold()
            if own is None:
                replace_rows(embeds, plan, step.found)
                made = RoutineOutput(embeds)
            else:
                made = _run_routine(own, step, text, embeds if out is None else embeds.clone(), input_embedding)
                if out is not None:
                    made = msgspec.structs.replace(made, input_embeds=embeds.copy_(made.input_embeds))
            zero_requests(made.input_embeds, plan, batch)
            return _output(step, made, check_finite=check_finite)
        finally:
            step.release()


def _check_media(batch: ForwardBatch) -> None:
    for request, media in enumerate(batch.mm_inputs):
        if isinstance(media, MultimodalInputs):
            raise UsageError(
                f"batch.mm_inputs[{request}]: expected a RequestMedia, which holds an item's embeddings from chunk to chunk, got "
                "MultimodalInputs; make RequestMedia(inputs) once per request and pass it in every step",
                argument="batch",
            )


def _check_ids(input_ids: Any, plan: StepPlan) -> None:
    import torch

    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        found = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise UsageError(f"input_ids: expected a torch tensor of int32 or int64, got {found}", argument="input_ids")
    if input_ids.ndim != 1 or input_ids.numel() != plan.total:
        raise UsageError(
            f"input_ids: expected the {plan.total} ids that the batch extends, got {list(input_ids.shape)}",
            argument="input_ids",
        )


def _run_routine(
    routine: EmbedRoutine, step: StepEmbeddings, input_ids: torch.Tensor, embeds: torch.Tensor, input_embedding: Any
) -> RoutineOutput:
    """The step as a model's own routine embeds it, with zeros over the rows of what failed."""
    from mm_plugin.embed.model_routine import ModelRoutine

    plan = step.plan

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return embed_text(ids, plan.only(()), input_embedding)

    made = ModelRoutine(routine, step.calls, plan, step.requests, step.found, input_ids, embed).run(embeds)
    for request, error in made.failed.items():
        step.fail(request, error)
    zero_rows(made.input_embeds, [piece for piece in plan.pieces if piece.place not in step.found])
    return made


def _output(step: StepEmbeddings, made: RoutineOutput, *, check_finite: bool) -> EmbedOutput:
    plan, observers, device = step.plan, step.calls.observers, made.input_embeds.device
    failed = [FailedItem(*place, error) for place, error in sorted(step.failed.items())]
    failed += [FailedItem(request, None, error) for request, error in plan.faults.items()]
    without = sorted(made.failed.keys() - {entry.request for entry in failed})
    failed += [FailedItem(request, None, made.failed[request]) for request in without]
    if observers is not None:
        for entry in failed:
            observers.emit(
                ItemFailed(request=entry.request, item=entry.item, code=entry.error.code, error=entry.error.message)
            )
    finite = None
    if check_finite:
        parts = [part for each in step.found.values() for part in (each.embeddings, each.deepstack) if part is not None]
        if made.is_own:
            parts += [made.input_embeds[piece.out_start : piece.out_end] for piece in plan.pieces]
        finite = all_finite(parts, device)
    return EmbedOutput(
        made.input_embeds,
        deepstack_rows(plan, step.found, device),
        tuple(failed),
        finite,
        {place: each.kept for place, each in step.found.items() if each.kept is not None},
        made.extra,
    )


def general_mm_embed_routine(
    input_ids: torch.Tensor,
    batch: ForwardBatch,
    language_model: Any,
    encoder: EncoderLike,
    cache: EmbeddingCache | None = None,
    *,
    embeds_argument: str = "input_embeds",
    deepstack_argument: str | None = None,
    token_modalities_argument: str | None = None,
    extra_argument: str | None = None,
    embed_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, EmbedOutput]:
    """Embed a step and run the language model on it.

    Args:
        input_ids: as for `embed_mm_inputs`.
        batch: as for `embed_mm_inputs`.
        language_model: has `get_input_embeddings()`, and is called with the embeddings.
        encoder: as for `embed_mm_inputs`.
        cache: as for `embed_mm_inputs`.
        embeds_argument: name of the argument that takes [total, hidden].
        deepstack_argument: name of the argument that takes `EmbedOutput.deepstack`, for models that have such embeddings.
        token_modalities_argument: name of the argument that takes [total] int64, 0 for text, for models that dispatch on it.
        extra_argument: name of the argument that takes `EmbedOutput.extra`, for models with an embed routine of their own.
        embed_options: options of `embed_mm_inputs`.
        **kwargs: passed to the language model.

    Returns:
        What the language model returned; and what was embedded, with the items that failed.

    Raises:
        UsageError: as for `embed_mm_inputs`; or there are deepstack embeddings, or extra ones, and no argument takes them.
    """
    table = language_model.get_input_embeddings()
    embedded = embed_mm_inputs(input_ids, batch, table, encoder, cache, **(embed_options or {}))
    given = {embeds_argument: embedded.input_embeds}
    parts = (
        ("deepstack_argument", deepstack_argument, "deepstack embeddings", embedded.deepstack),
        ("extra_argument", extra_argument, "more than embeddings", embedded.extra),
    )
    for argument, name, what, value in parts:
        if name is not None:
            given[name] = value
        elif value is not None:
            raise UsageError(
                f"{argument}: the model's encoder or routine gives {what}; name the argument that takes them",
                argument=argument,
            )
    if token_modalities_argument is not None:
        given[token_modalities_argument] = _token_modalities(batch).to(embedded.input_embeds.device)
    return language_model(**given, **kwargs), embedded


def _token_modalities(batch: ForwardBatch) -> torch.Tensor:
    """The token modalities of a step; generated tokens are text."""
    import numpy as np
    import torch

    parts = [np.zeros(0, dtype=np.int64)]
    for inputs, prefix, extend in zip(batch.inputs(), batch.extend_prefix_lens, batch.extend_seq_lens, strict=True):
        part = np.zeros(extend, dtype=np.int64)
        if inputs is not None:
            known = inputs.token_modalities[prefix : prefix + extend] if is_ids(inputs.token_modalities) else part
            part[: len(known)] = known
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts))
