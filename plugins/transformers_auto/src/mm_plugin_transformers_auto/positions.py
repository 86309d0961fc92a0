"""M-RoPE positions by the model's own rule, which is in transformers: unlike those of other plugins, this module needs torch."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin import Modality, RequestError, UsageError
from mm_plugin.items import MultimodalDataItem
from mm_plugin_transformers_auto.loading import model_class_of

_RULE = "get_rope_index"
_TOKENS = {Modality.IMAGE: "image_token_id", Modality.VIDEO: "video_token_id", Modality.AUDIO: "audio_token_id"}


def rope_owner(model_class: Any, config: Any) -> Any | None:
    """The model, without weights, that computes positions on several axes (`get_rope_index`); None for ordinary positions.

    The class decides, as in transformers, not a key of the config that only some checkpoints have.

    Args:
        model_class: transformers' model class.
        config: transformers' config for it.

    Raises:
        UsageError: the class cannot be constructed from the config.
    """
    import torch

    # A model is constructed only where the rule can be: a large one takes seconds, without weights too.
    home = vars(sys.modules[model_class.__module__]).values()
    if not any(isinstance(found, type) and hasattr(found, _RULE) for found in home):
        return None
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:
        raise UsageError(
            f"config: {model_class.__name__} cannot be constructed from it: {type(error).__name__}: {error}",
            argument="config",
        ) from error
    for part in (model, getattr(model, "thinker", None)):
        for owner in (part, getattr(part, "base_model", None)):
            if hasattr(owner, _RULE):
                return owner
    return None


def positions(
    items: Sequence[MultimodalDataItem],
    *,
    seq: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],  # noqa: ARG001 - none of this model's options chooses a rule
) -> tuple[np.ndarray, int]:
    """Three position ids per token of an expanded prompt, from the model class's `get_rope_index`.

    Args:
        items: with offsets and the fields that the rule reads, such as `image_grid_thw`.
        seq: length of the expanded prompt, tokens.
        config: the checkpoint's config.json.
        options: the options given at load, by name; not used here.

    Shape:
        returns ids [3, seq] int64, and delta, a Python int in positions.

    Raises:
        UsageError: transformers has no such rule for the config.
        RequestError: the rule raises on such a prompt.
    """
    import torch

    owner = _owner(json.dumps(dict(config), sort_keys=True))
    ids, token_types = _rule_inputs(items, seq, owner.config)
    known = {"input_ids": ids, "mm_token_type_ids": token_types, "attention_mask": torch.ones_like(ids)}
    arguments: dict[str, Any] = {}
    for name in inspect.signature(owner.get_rope_index).parameters:
        given = [np.asarray(item.get(name)) for item in items if item.get(name) is not None]
        if given:
            arguments[name] = torch.from_numpy(np.concatenate(given))
        elif name in known:
            arguments[name] = known[name]
    try:
        found, delta = owner.get_rope_index(**arguments)
    except Exception as error:
        # The model itself would raise on this prompt too: the rule cannot separate touching media, for example.
        raise RequestError(
            f"prompt: {type(owner).__name__} cannot compute positions for it ({type(error).__name__}); put text, or start and "
            "end tokens, between its media inputs",
            path="prompt",
        ) from error
    result: np.ndarray = found[:, 0].numpy().astype(np.int64)
    return result, int(delta.reshape(-1)[0])


def _rule_inputs(items: Sequence[MultimodalDataItem], seq: int, settings: Any) -> tuple[Any, Any]:
    """Ids of a prompt as far as the rule reads them, and the modality of each token, both [1, seq]."""
    import torch

    ids = torch.zeros(1, seq, dtype=torch.long)
    token_types = torch.zeros(1, seq, dtype=torch.int)
    start = getattr(settings, "vision_start_token_id", None)
    for item in items:
        for first, last in item.offsets:
            ids[0, first : last + 1] = int(getattr(settings, _TOKENS[item.modality]))
            token_types[0, first : last + 1] = int(item.modality)
            if first and start is not None and not token_types[0, first - 1]:
                ids[0, first - 1] = start
    return ids, token_types


@functools.lru_cache(maxsize=16)
def _owner(config: str) -> Any:
    """The model that has the rule, without weights."""
    from transformers import AutoConfig

    described = json.loads(config)
    try:
        settings = AutoConfig.for_model(**described)
    except (TypeError, ValueError) as error:
        raise UsageError(f"config: transformers has no model for it: {error}", argument="config") from error
    model_class = model_class_of(described, settings)
    if model_class is None:
        raise UsageError(f"config: transformers has no model for {settings.model_type}", argument="config")
    owner = rope_owner(model_class, settings)
    if owner is None:
        raise UsageError(f"config: {model_class.__name__} has no {_RULE}", argument="config")
    return owner
