"""`embed_mm_inputs` and `general_mm_embed_routine`: one step in the GPU worker. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mm_plugin.embed.plan import plan_step
from mm_plugin.embed.rows import EmbedOutput, Step, embed_text
from mm_plugin.encoder.base import Agree, Encoder, EncoderLike
from mm_plugin.errors import UsageError
from mm_plugin.inputs import ForwardBatch

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.embed.staging import StagingBuffer
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
        max_encode_tokens: most rows of one encoder call; a step that needs more makes several calls.
        agree: for collective encoders, takes this rank's outcome of a call (0 done, 1 out of memory, 2 failed) and returns the
            worst of all ranks, so that all decide alike. Ranks run the same steps over equal requests and equal caches.
        check_finite: put a flag into the output that says, on the device, whether all rows of media are finite.
        observers: hear of every encoder call; the encoder's own where None.

    Raises:
        UsageError: ids, batch and embedding do not fit together. Nothing that an item or an encoder does raises here.
    """
    import torch

    from mm_plugin.embed.calls import EncoderCalls

    plan = plan_step(batch)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        found = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise UsageError(f"input_ids must be a torch tensor of int32 or int64, not {found}", argument="input_ids")
    if input_ids.ndim != 1 or input_ids.numel() != plan.total:
        raise UsageError(
            f"input_ids has {list(input_ids.shape)} ids, the batch extends {plan.total}", argument="input_ids"
        )
    with torch.no_grad():
        out = embed_text(input_ids, plan, input_embedding)
        owned = encoder if isinstance(encoder, Encoder) else None
        if owned is not None and owned.collective and agree is None:
            raise UsageError("a collective encoder needs agree, or its ranks would decide apart", argument="agree")
        heard = observers if observers is not None or owned is None else owned.observers
        calls = EncoderCalls(
            encoder,
            hidden=out.shape[1],
            dtype=out.dtype,
            device=out.device,
            max_tokens=max_encode_tokens,
            agree=agree,
            staging=_staging_for(owned.device if owned is not None and owned.device is not None else out.device),
            observers=heard,
        )
        step = Step(plan, batch, calls, owned.version if owned is not None else "", cache, out, heard)
        try:
            step.gather()
            return step.write(check_finite=check_finite)
        finally:
            step.release()


# One buffer for each GPU, as long as the process lives: memory is pinned once.
_STAGING: dict[str, StagingBuffer] = {}


def _staging_for(device: Any) -> StagingBuffer | None:
    import torch

    place = torch.device(device)
    if place.type != "cuda":
        return None
    known = _STAGING.get(str(place))
    if known is None:
        from mm_plugin.embed.staging import StagingBuffer

        known = _STAGING.setdefault(str(place), StagingBuffer(place))
    return known


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
    embed_options: Mapping[str, Any] | None = None,
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
        deepstack_argument: name of the argument that takes `EmbedOutput.deepstack`, for models that have such rows.
        token_modalities_argument: name of the argument that takes [total] int64, 0 for text, for models that dispatch on it.
        embed_options: options of `embed_mm_inputs`.
        **kwargs: given to the language model as they are.

    Returns:
        What the language model returned, and what was embedded, with the items that failed.

    Raises:
        UsageError: as for `embed_mm_inputs`; or there are deepstack rows and no argument takes them.
    """
    table = language_model.get_input_embeddings()
    embedded = embed_mm_inputs(input_ids, batch, table, encoder, cache, **(embed_options or {}))
    given = {embeds_argument: embedded.input_embeds}
    if deepstack_argument is not None:
        given[deepstack_argument] = embedded.deepstack
    elif embedded.deepstack is not None:
        raise UsageError(
            "the encoder gives deepstack rows: name the argument that takes them", argument="deepstack_argument"
        )
    if token_modalities_argument is not None:
        given[token_modalities_argument] = _token_modalities(batch).to(embedded.input_embeds.device)
    return language_model(**given, **kwargs), embedded


def _token_modalities(batch: ForwardBatch) -> torch.Tensor:
    """The marks of a step; what was generated is text."""
    import numpy as np
    import torch

    marks = []
    for inputs, prefix, extend in zip(batch.mm_inputs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True):
        own = np.zeros(extend, dtype=np.int64)
        if inputs is not None:
            known = inputs.token_modalities[prefix : prefix + extend]
            own[: len(known)] = known
        marks.append(own)
    return torch.from_numpy(np.concatenate(marks) if marks else np.zeros(0, dtype=np.int64))
