"""The spec of one checkpoint, made of what was learned about it."""

from __future__ import annotations

from typing import Any

import msgspec
import transformers

from mm_plugin import Checkpoint, ModelSpec, UsageError
from mm_plugin_transformers_auto.attention import attends_forward
from mm_plugin_transformers_auto.chat_template import token_pairs
from mm_plugin_transformers_auto.loading import open_checkpoint
from mm_plugin_transformers_auto.positions import rope_owner
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.single_item import IDS


def specialize(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[ModelSpec, Checkpoint, ProbedModel]:
    """Open a checkpoint with transformers and learn what its processor does.

    Args:
        spec: the plugin's declaration.
        checkpoint: the checkpoint.

    Returns:
        The spec for this checkpoint, the checkpoint with the tokenizer of its processor, and what was learned.

    Raises:
        UsageError: transformers cannot open the checkpoint, or its media cannot be served.
    """
    model = ProbedModel(open_checkpoint(checkpoint), checkpoint)
    tokenizer = model.tokenizer
    opened = checkpoint.with_tokenizer(lambda _: tokenizer)
    return _spec_for(spec, model, opened), opened, model


def _spec_for(spec: ModelSpec, model: ProbedModel, checkpoint: Checkpoint) -> ModelSpec:
    is_joint, traits = model.joint_reason is not None, model.traits
    own_fields: tuple[str, ...] = () if is_joint else (IDS,)
    affixes = {modality: one.placeholder_affixes for modality, one in traits.items() if any(one.placeholder_affixes)}
    opened = model.opened
    whole = {modality: "whole" for modality in traits if attends_forward(opened.model_class, opened.config, modality)}
    has_axes = rope_owner(opened.model_class, opened.config) is not None
    changes: dict[str, Any] = {
        "name": f"{spec.name}.{model.opened.model_class.__name__}",
        "modalities": tuple(traits),
        "placeholders": {modality: one.placeholder for modality, one in traits.items()},
        "fields": {modality: (*own_fields, *one.field_names) for modality, one in traits.items()},
        "feature_names": {modality: one.feature_name for modality, one in traits.items()},
        "token_pairs": token_pairs(model.tokenizer, _default_template(checkpoint), traits.values()),
        "add_special_tokens": model.runner.add_special_tokens,
        "placeholder_affixes": affixes,
        "positions": "mm_plugin_transformers_auto.positions:positions" if has_axes else None,
        "attention": whole,
        "specialize": None,
        "notes": {
            "processor": type(model.opened.processor).__name__,
            "transformers": transformers.__version__,
            "trust_remote_code": "off",
            "media": f"jointly: {model.joint_reason}" if is_joint else "one by one",
        },
    }
    return msgspec.structs.replace(spec, **changes)


def _default_template(checkpoint: Checkpoint) -> str | None:
    try:
        return checkpoint.chat_templates().get("default")
    except UsageError:  # chat requests will say so; prompts of text need none
        return None
