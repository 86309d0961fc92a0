"""A media input that a processor or an encoder prepared already. Everything about it is checked, nothing is decoded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from mm_plugin.arrays import frozen, is_dense, is_floating, is_masked, owned
from mm_plugin.errors import MediaError, RequestError, UsageError
from mm_plugin.foreign import class_name, is_interruption
from mm_plugin.identity.framing import feature_digest
from mm_plugin.identity.keys import item_identity
from mm_plugin.inputs.precomputed import PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.items import MultimodalInputFormat
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.request import Claim, Facts, MeasuredItem, ReadItem
from mm_plugin.tasks import Prepared

# A field says how an item is laid out; more numbers than this say something else.
_MOST_FIELD_VALUES = 65_536


def is_given(value: Any) -> bool:
    """Whether a media input came prepared."""
    return isinstance(value, ProcessorOutput | PrecomputedEmbeddings)


def accept(model: OpenModel, facts: Facts, item: ReadItem) -> MeasuredItem:
    """Check a media input that came prepared against its own fields and the author's arithmetic.

    Raises:
        RequestError: the model takes none, or fields, feature and embeddings do not fit.
    """
    began = time.perf_counter()
    value: ProcessorOutput | PrecomputedEmbeddings = item.value
    author, modality, path = model.author, item.modality, item.path
    if item.form is not None and item.form.options:
        where = item.form.path or path
        raise RequestError(f"{where}: a media input that came prepared takes no options; leave them out", path=where)
    accepts = author.accepts_precomputed(modality, path)
    given = dict(value.fields) if isinstance(value.fields, Mapping) else {}
    feature = embeddings = None
    if isinstance(value, ProcessorOutput):
        name = model.spec.feature_names.get(modality)
        if name is None:
            raise author.fault(f"{author.name} takes features by name: the spec must declare feature_names")
        feature = given.pop(name, None)
        if not is_dense(feature):
            raise MediaError(
                f"{path}: {name} must be a dense numpy array or torch tensor without a mask, got {type(feature).__name__}",
                path=path,
                reason="fields",
            )
    expected = set(model.spec.fields[modality])
    if set(given) != expected:
        raise MediaError(
            f"{path}: {model.spec.name} expects the fields {sorted(expected)}, got {sorted(map(str, given))}",
            path=path,
            reason="fields",
        )
    fields = {name: frozen(_as_field(part, f"{path}.{name}", path)) for name, part in given.items()}
    count = author.call("check_fields", lambda: accepts.check_fields(modality, fields), path)
    model.budget.check_item_tokens(count, path)
    if isinstance(value, PrecomputedEmbeddings):
        embeddings = _checked_embeddings(value.embeddings, count, path)
    else:
        author.call("check_feature", lambda: accepts.check_feature(modality, feature, fields), path)
    replacement = model.replacement(fields, path)
    if replacement.num_embeddings != count:
        raise author.fault(
            f"{author.name}.check_fields gives {count} embeddings, its replacement takes {replacement.num_embeddings}"
        )
    feature, embeddings = _copied(feature, path), _copied(embeddings, path)
    kind = MultimodalInputFormat.PROCESSOR_OUTPUT if embeddings is None else MultimodalInputFormat.PRECOMPUTED_EMBEDDING
    content, claim = _content(model, facts, item, feature if embeddings is None else embeddings)
    identity = item_identity(
        model.spec.name, model.spec.output_version, modality, kind.value, content, fields, salt=facts.arguments.salt
    )
    prepared = Prepared(fields, replacement, feature, identity, kind, embeddings)
    return MeasuredItem(
        modality,
        path,
        item.settings,
        item.caller_hash,
        replacement,
        prepared=prepared,
        claim=claim,
        seconds=time.perf_counter() - began,
    )


def _copied(value: Any, path: str) -> Any:
    """A copy: the caller may write into its own memory while this request, or another that repeats it, is under way."""
    try:
        return owned(value)
    except MemoryError:
        raise
    except BaseException as error:  # a class of tensors of the caller's own, or a device that is gone
        if is_interruption(error):
            raise
        raise MediaError(
            f"{path}: expected an array or tensor that can be copied, got a {type(value).__name__} ({class_name(error)})",
            path=path,
            reason="fields",
        ) from error


def _checked_embeddings(embeddings: Any, count: int, path: str) -> Any:
    dense = is_dense(embeddings)
    if not dense or embeddings.ndim != 2 or not is_floating(embeddings) or len(embeddings) != count:
        found = f"{list(embeddings.shape)} {embeddings.dtype}" if dense else type(embeddings).__name__
        raise MediaError(
            f"{path}: the fields stand for embeddings [{count}, hidden] of a floating-point dtype, got {found}",
            path=path,
            reason="rows",
        )
    return embeddings


def _content(model: OpenModel, facts: Facts, item: ReadItem, ready: Any) -> tuple[bytes, Claim | None]:
    """What identifies it: the digest of its feature or embeddings, or the caller's own identity of embeddings."""
    own = item.value.identity if isinstance(item.value, PrecomputedEmbeddings) else None
    if own is not None and (not isinstance(own, bytes) or len(own) != 32):
        raise UsageError(f"{item.path}: an identity of embeddings must be 32 bytes", argument="identity")
    try:
        content = feature_digest(ready, model.runtime.digests)
    except UsageError as error:
        raise MediaError(f"{item.path}: {error.message}", path=item.path, reason="fields") from error
    if own is None:
        return content, None
    return model.hashes.name_embeddings(own, content, item.path, facts.arguments.salt)


def _as_field(value: Any, name: str, path: str) -> Any:
    """A client's field as the plugin's own `layout` would give it: small, plain, whole numbers as int64."""
    if isinstance(value, str | bool | int | float | None):
        return value
    if is_masked(value):
        raise MediaError(
            f"{name}: expected an array without a mask, got a masked one; pass its .filled(number)",
            path=path,
            reason="fields",
        )
    try:
        if is_dense(value) and not isinstance(value, np.ndarray):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except BaseException as error:
        if is_interruption(error):
            raise
        raise MediaError(
            f"{name} cannot be read as an array ({class_name(error)})", path=path, reason="fields"
        ) from error
    if array.dtype.kind not in "biuf" or array.size > _MOST_FIELD_VALUES:
        raise MediaError(
            f"{name} must be at most {_MOST_FIELD_VALUES} numbers, got {array.dtype} {list(array.shape)}",
            path=path,
            reason="fields",
        )
    return array.astype(np.int64) if array.dtype.kind in "iu" else array
