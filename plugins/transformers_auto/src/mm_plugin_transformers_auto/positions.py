"""M-RoPE positions by the model's own rule, which is in transformers: unlike those of other plugins, this module needs torch."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_plugin import Modality, RequestError, UsageError
from mm_plugin.items import MultimodalDataItem

_TOKENS = {Modality.IMAGE: "image_token_id", Modality.VIDEO: "video_token_id", Modality.AUDIO: "audio_token_id"}


def has_mrope(config: Any) -> bool:
    """Whether positions have three axes, according to any part of a config.

    Args:
        config: a transformers config, or JSON.
    """
    if isinstance(config, Mapping):
        return "mrope_section" in config or any(map(has_mrope, config.values()))
    if isinstance(config, list | tuple):
        return any(map(has_mrope, config))
    return hasattr(config, "to_dict") and has_mrope(config.to_dict())


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

    owner, settings = _rule(json.dumps(dict(config), sort_keys=True))
    ids, token_types = _rule_inputs(items, seq, settings)
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
def _rule(config: str) -> tuple[Any, Any]:
    """The model that has the rule, without weights, and its config."""
    import torch
    import transformers
    from transformers import AutoConfig

    described = json.loads(config)
    try:
        settings = AutoConfig.for_model(**described)
        name = next(name for name in described.get("architectures") or () if hasattr(transformers, name))
        with torch.device("meta"):
            model = getattr(transformers, name)(settings)
    except (StopIteration, ValueError) as error:
        raise UsageError(f"config: transformers has no model for it: {error}", argument="config") from error
    for owner in (model, model.base_model):
        if hasattr(owner, "get_rope_index"):
            return owner, settings
    raise UsageError(f"config: {name} has no get_rope_index", argument="config")
