"""M-RoPE positions by the model's own rule. Unlike a plugin's, this needs torch and transformers: the rule is the model class's."""

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
    ids = torch.zeros(1, seq, dtype=torch.long)
    marks = torch.zeros(1, seq, dtype=torch.int)
    start = getattr(settings, "vision_start_token_id", None)
    for item in items:
        for first, last in item.offsets:
            ids[0, first : last + 1] = int(getattr(settings, _TOKENS[item.modality]))
            marks[0, first : last + 1] = int(item.modality)
            if first and start is not None and not marks[0, first - 1]:
                ids[0, first - 1] = start
    known = {"input_ids": ids, "mm_token_type_ids": marks, "attention_mask": torch.ones_like(ids)}
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
        # The whole model would raise it on this prompt too: the rule cannot tell media apart that touch, for one.
        raise RequestError(
            f"prompt: the positions of {type(owner).__name__} cannot be told for it ({type(error).__name__}); put text or start "
            "and end tokens between its media",
            path="prompt",
        ) from error
    result: np.ndarray = found[:, 0].numpy().astype(np.int64)
    return result, int(delta.reshape(-1)[0])


@functools.lru_cache(maxsize=16)
def _rule(config: str) -> tuple[Any, Any]:
    """The model, without any weights, that has the rule, and its config."""
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
        raise UsageError(f"transformers has no model for this config: {error}", argument="config") from error
    for owner in (model, model.base_model):
        if hasattr(owner, "get_rope_index"):
            return owner, settings
    raise UsageError(f"{name} has no get_rope_index", argument="config")
