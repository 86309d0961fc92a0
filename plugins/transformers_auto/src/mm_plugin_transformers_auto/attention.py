"""Whether tokens of one media input attend to later ones, by the mask that the model's own class makes. Needs no weights."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch

from mm_plugin import Modality

logger = logging.getLogger("mm_plugin")

_MAKE = "create_masks_for_generate"
_TOKENS = 4  # of the media input, between two of text


def attends_forward(model_class: Any, config: Any, modality: Modality) -> bool:
    """Whether a token of a media input attends to a later one of it, so that no chunk may cut the media input.

    Args:
        model_class: transformers' model class; one without masks of its own is causal.
        config: transformers' config for it.
        modality: of the media input.
    """
    make = getattr(model_class, _MAKE, None)
    if make is None:
        return False
    settings = copy.deepcopy(config)
    for part in (settings, settings.get_text_config()):
        part._attn_implementation = "eager"  # noqa: SLF001 - the only one whose masks are always tensors
    inside = torch.tensor([[0, *[1] * _TOKENS, 0]])
    # Of a prompt, models with a prefix have token types of 0 alone.
    return any(
        _sees_ahead(make, settings, token_types, int(modality)) for token_types in (inside, torch.zeros_like(inside))
    )


def _sees_ahead(make: Any, config: Any, token_types: torch.Tensor, modality: int) -> bool:
    n_tokens = token_types.shape[1]
    known = {
        "config": config,
        "inputs_embeds": torch.zeros(1, n_tokens, 1),
        "attention_mask": torch.ones_like(token_types),
        "past_key_values": None,
        "cache": None,
        "position_ids": torch.arange(n_tokens)[None],
        "token_type_ids": token_types,
        "mm_token_type_ids": token_types * modality,
        "is_first_iteration": True,
    }
    taken = inspect.signature(make).parameters
    try:
        made = make(**{name: value for name, value in known.items() if name in taken})
    except Exception as error:
        logger.warning(
            "mm-plugin: %s.%s failed, so its prompts count as causal: %s: %s", make.__module__, make.__qualname__,
            type(error).__name__, error,
        )  # fmt: skip
        return False
    masks = made.values() if isinstance(made, dict) else [made]
    # Floating-point masks are 0 where a token is seen, and far below it elsewhere.
    seen = [mask if mask.dtype == torch.bool else mask >= 0 for mask in masks if isinstance(mask, torch.Tensor)]
    return any(bool(mask[0, 0, 1, _TOKENS]) for mask in seen if mask.ndim == 4)
