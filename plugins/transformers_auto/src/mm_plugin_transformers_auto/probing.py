"""Learns how a checkpoint's processor takes each modality, by running it on one media input. Compares nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from mm_plugin import Modality, UsageError
from mm_plugin.errors import SizeError
from mm_plugin_transformers_auto.loading import Opened
from mm_plugin_transformers_auto.runner import PARTS, ProcessorRaised, ProcessorRunner, ids_of
from mm_plugin_transformers_auto.samples import make_sample
from mm_plugin_transformers_auto.single_item import NotComposable, SingleItemOutput, SingleItemRunner
from mm_plugin_transformers_auto.traits import ModalityTraits


class Probed(msgspec.Struct, frozen=True, eq=False):
    """What was learned about the modalities of a checkpoint.

    Attributes:
        traits: by modality, without axes.
        joint_reason: why media cannot be prepared one by one, as far as one media input shows; None if nothing speaks against it.
    """

    traits: dict[Modality, ModalityTraits]
    joint_reason: str | None


class Prober:
    """Runs a processor on one media input of each modality.

    Args:
        opened: the checkpoint as transformers opened it.
        runner: runs the processor.
        single: runs it on one media input.
        tokenizer: the processor's tokenizer, or a copy.
    """

    def __init__(self, opened: Opened, runner: ProcessorRunner, single: SingleItemRunner, tokenizer: Any) -> None:
        self._opened, self._runner, self._single, self._tokenizer = opened, runner, single, tokenizer

    def probe(self) -> Probed:
        """Learn the traits of every modality that processor and model have in common.

        Raises:
            UsageError: the processor cannot prepare a modality that the model takes, or the model reads it by cross-attention.
        """
        traits, reasons = {}, []
        for modality in PARTS:
            if self._runner.part(modality) is None:
                continue
            self._refuse_cross_attention(modality)
            embed_token_id = self._embed_token_id(modality)
            if embed_token_id is not None:
                traits[modality], reason = self._probe_modality(modality, embed_token_id)
                reasons += [reason] if reason is not None else []
        return Probed(traits, reasons[0] if reasons else None)

    def _refuse_cross_attention(self, modality: Modality) -> None:
        """Refuse models without tokens whose embeddings could be replaced."""
        config = self._opened.config
        configs = [config, getattr(config, "text_config", None)]
        crossing = any(getattr(part, "cross_attention_layers", None) for part in configs)
        if crossing or "cross_attention_mask" in self._opened.processor.model_input_names:
            raise UsageError(
                f"{self._opened.model_class.__name__} reads its {modality.argument} by cross-attention: no token of a prompt "
                "takes one of their embeddings, so there is nothing to write into its text embeddings; it needs a plugin of its "
                "own",
                argument="checkpoint",
            )

    def _embed_token_id(self, modality: Modality) -> int | None:
        """The id at whose positions the model itself writes embeddings."""
        name = modality.name.lower()
        for owner in (self._opened.config, self._opened.processor):
            for attribute in (f"{name}_token_id", f"{name}_token_index"):
                found = getattr(owner, attribute, None)
                if isinstance(found, int):
                    return found
        return None

    def _placeholders(self, modality: Modality) -> list[str]:
        """Tokens that may stand for a media input in a prompt, the most likely first."""
        name, vocabulary = modality.name.lower(), self._tokenizer.get_vocab()
        owners = (self._opened.processor, self._tokenizer)
        named = [getattr(owner, attribute, None) for owner in owners for attribute in (f"{name}_token", "boi_token")]
        return list(dict.fromkeys(str(token) for token in named if token is not None and str(token) in vocabulary))

    def _probe_modality(self, modality: Modality, embed_token_id: int) -> tuple[ModalityTraits, str | None]:
        """Traits from the first placeholder that works, and why media cannot be prepared one by one."""
        sample = make_sample(modality, 0, self._runner.sampling_rate)
        faults: list[Exception] = []
        for placeholder in self._placeholders(modality):
            traits = ModalityTraits(
                modality=modality,
                placeholder=placeholder,
                embed_token_id=embed_token_id,
                tensor_names=(),
                example=placeholder,
            )
            try:
                return self._with_output(traits, self._single.run(traits, sample, {})), None
            except (ProcessorRaised, SizeError) as error:
                faults.append(error)
            except NotComposable as error:
                faults.append(error)
                # The processor puts the media input somewhere else, with or without a placeholder in the prompt.
                for text in ("a", placeholder):
                    found = self._in_prompt(traits, text, sample)
                    if found is not None:
                        return found, str(error)
        token = str(self._tokenizer.convert_ids_to_tokens(embed_token_id))
        bare = ModalityTraits(modality=modality, placeholder=token, embed_token_id=embed_token_id, tensor_names=())
        found = self._in_prompt(bare, "a", sample)
        if found is not None:
            return found, f"it decides itself where {modality.argument} stand in a prompt"
        why = str(faults[0]) if faults else "its tokenizer has no token that stands for one"
        raise UsageError(
            f"{self._opened.label} cannot prepare {modality.argument}: {why} (according to the model's config, their embeddings "
            f"replace those of {token!r})",
            argument="checkpoint",
        )

    def _with_output(self, traits: ModalityTraits, output: SingleItemOutput) -> ModalityTraits:
        return msgspec.structs.replace(
            traits,
            tensor_names=self._tensor_names(traits.modality, output.tensors),
            placeholder_affixes=output.placeholder_affixes,
        )

    def _in_prompt(self, traits: ModalityTraits, text: str, sample: Any) -> ModalityTraits | None:
        """Traits from a prompt with one media input; None if the processor raises or no token takes an embedding."""
        try:
            out = self._runner.run(text, {traits.modality: [sample]}, {})
        except ProcessorRaised:
            return None
        if not np.any(ids_of(out) == traits.embed_token_id):
            return None
        return msgspec.structs.replace(traits, tensor_names=self._tensor_names(traits.modality, out), example=text)

    def _tensor_names(self, modality: Modality, out: Mapping[str, Any]) -> tuple[str, ...]:
        """The tensors that the processor declares for a modality and returns, the first one of its part in front."""
        text = {*self._tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids", "labels", "attention_mask"}
        own = list(self._runner.part(modality).model_input_names)
        declared = dict.fromkeys([*own, *self._opened.processor.model_input_names])
        found = [name for name in declared if name not in text and isinstance(out.get(name), torch.Tensor)]
        if not found:
            raise UsageError(
                f"{self._opened.label} returns none of the tensors that it declares for {modality.argument}: {own}",
                argument="checkpoint",
            )
        return tuple(found)
