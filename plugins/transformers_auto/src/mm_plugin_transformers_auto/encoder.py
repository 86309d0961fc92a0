"""From a processor's tensors to embeddings, through the model's own encoder and projector."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mm_plugin import (
    Checkpoint,
    Encoded,
    Encoder,
    EncoderError,
    EncodesAudio,
    EncodesImages,
    Modality,
    MultimodalDataItem,
    UsageError,
)
from mm_plugin.encoder import as_tensor
from mm_plugin_transformers_auto.partial_model import LanguageModelReached, load_partial_model
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.tensors import join
from mm_plugin_transformers_auto.traits import ModalityTraits

logger = logging.getLogger("mm_plugin")
_METHODS = {Modality.IMAGE: "get_image_features", Modality.AUDIO: "get_audio_features"}


class TransformersEncoder(Encoder, EncodesImages, EncodesAudio):
    """Computes the embeddings that the model itself would write into its text embeddings.

    Args:
        model: transformers' model without its language model.
        probed: what was learned about the checkpoint.
        device: of the weights.
        dtype: of the weights.
    """

    def __init__(self, model: Any, probed: ProbedModel, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._probed, self._device, self._dtype = model, probed, device, dtype

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> TransformersEncoder:
        """Build the model without its language model and read the other tensors.

        Args:
            checkpoint: a checkpoint that a registry opened with this plugin.
            device: torch device for the weights.
            dtype: torch dtype, or None for the checkpoint's own.

        Raises:
            UsageError: the checkpoint's tensors do not fit the model, its language model cannot be separated from the rest, or the
                model writes other embeddings than it computes.
        """
        probed = ProbedModel.of(checkpoint)
        opened, device = probed.opened, torch.device(device)
        dtype = _checkpoint_dtype(opened.config) if dtype is None else dtype
        config = type(opened.config).from_dict(opened.config.to_dict())
        model = load_partial_model(opened.model_class, config, checkpoint, device, dtype)
        loaded = cls(model, probed, device, dtype)
        for traits in probed.traits.values():
            loaded._verify(traits, checkpoint)
        return loaded

    # ---------------------------------------------------------------- what is checked when it is loaded

    def _verify(self, traits: ModalityTraits, checkpoint: Checkpoint) -> None:
        """Encode one sample, and compare its embeddings with those that the model itself writes into a prompt's text embeddings.

        Raises:
            UsageError: it cannot be encoded, so that no request could be; or the model writes others, or elsewhere too.
        """
        ids, tensors = self._probed.sample_output(traits)
        given = torch.from_numpy(ids)[None].to(self._device)
        on_device = {name: self._cast(value, name == traits.feature_name) for name, value in tensors.items()}
        model = type(self._model).__name__
        try:
            with torch.inference_mode():
                embeddings, _ = self._embeddings(traits, on_device, int((ids == traits.embed_token_id).sum()))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(
                f"{checkpoint.folder}: {model} gives no embeddings of its {traits.modality.argument} apart from its language model "
                f"({type(error).__name__}: {error}); it needs a plugin of its own",
                argument="checkpoint",
            ) from error
        try:
            written = self._written(traits, given, on_device)[0]
        except Exception as error:
            logger.warning(
                "mm-plugin: embeddings of %s for %s could not be compared with those that it writes itself: %s: %s",
                model, traits.modality.argument, type(error).__name__, error,
            )  # fmt: skip
            return
        there = ~torch.isnan(written).any(dim=-1)  # [n]
        self._check_positions(traits, ids, there.cpu().numpy(), checkpoint)
        own = written[there]
        if own.shape != embeddings.shape or not torch.allclose(
            own, embeddings, rtol=1e-2, atol=1e-2 * float(embeddings.abs().max())
        ):
            raise UsageError(
                f"{checkpoint.folder}: {type(self._model).__name__} writes other embeddings of its {traits.modality.argument} "
                f"into its text embeddings than {_METHODS[traits.modality]} returns; it needs a plugin of its own",
                argument="checkpoint",
            )

    def _check_positions(
        self, traits: ModalityTraits, ids: np.ndarray, there: np.ndarray, checkpoint: Checkpoint
    ) -> None:
        """Check that the model writes at no other tokens than those of its media inputs."""
        other = sorted(set(ids[there & (ids != traits.embed_token_id)].tolist()))
        if other:
            names = [str(self._probed.tokenizer.convert_ids_to_tokens(index)) for index in other[:3]]
            raise UsageError(
                f"{checkpoint.folder}: {type(self._model).__name__} also writes at the positions of "
                f"{', '.join(map(repr, names))}, which do not stand for its {traits.modality.argument}; it needs a plugin of its "
                "own",
                argument="checkpoint",
            )

    # ---------------------------------------------------------------- what a server calls

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        """Embeddings [num_tokens, hidden] of each image, from one call of the model where images are prepared one by one."""
        return self._encode_all(Modality.IMAGE, items)

    def get_audio_feature(self, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        """Embeddings [num_tokens, hidden] of each audio input, as for images."""
        return self._encode_all(Modality.AUDIO, items)

    def _encode_all(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        traits = self._probed.traits[modality]
        if self._probed.joint_reason is not None:
            # Each item holds all media inputs of its request, in a layout that only the processor knows.
            return [encoded for item in items for encoded in self._encode_together(traits, [item])]
        return self._encode_together(traits, items)

    def _encode_together(self, traits: ModalityTraits, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        tensors = {}
        for name in traits.tensor_names:
            is_feature = name == traits.feature_name
            parts = [as_tensor(item.feature if is_feature else item.get(name)) for item in items]
            joined = join([part.to(self._device) for part in parts], traits.axes.get(name, 0))
            tensors[name] = self._cast(joined, is_feature)
        counts = [item.num_tokens for item in items]
        with torch.inference_mode():
            embeddings, deepstack = self._embeddings(traits, tensors, sum(counts))
        if len(embeddings) != sum(counts):
            raise EncoderError(
                f"{type(self._model).__name__} must return one embedding for each of {sum(counts)} tokens of its "
                f"{traits.modality.argument}, returned {len(embeddings)}",
                **self.owner,
            )
        layers = [None] * len(items) if deepstack is None else torch.split(deepstack, counts, dim=1)
        return [Encoded(part, layer) for part, layer in zip(torch.split(embeddings, counts), layers, strict=True)]

    def _cast(self, value: torch.Tensor, is_feature: bool) -> torch.Tensor:
        moved = value.to(self._device)
        return moved.to(self._dtype) if is_feature and moved.is_floating_point() else moved

    # ---------------------------------------------------------------- what the model returns, and what it writes

    def _embeddings(
        self, traits: ModalityTraits, tensors: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [count, hidden], and those of deepstack [n_layers, count, hidden] where the model has them."""
        owners = (self._model, self._model.base_model)
        methods = (getattr(owner, _METHODS[traits.modality], None) for owner in owners)
        method = next((found for found in methods if found is not None), None)
        if method is None:
            return self._written_embeddings(traits, tensors, count), None
        taken = inspect.signature(method).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        output = method(**{name: value for name, value in tensors.items() if open_ended or name in taken})
        embeddings = getattr(output, "pooler_output", output)
        if output is not None and embeddings is None:  # projected by the model's own forward
            return self._written_embeddings(traits, tensors, count), None
        deepstack = getattr(output, "deepstack_features", None)
        return self._flat(embeddings), None if deepstack is None else torch.stack(
            [self._flat(layer) for layer in deepstack]
        )

    def _flat(self, embeddings: Any) -> torch.Tensor:
        """Embeddings [n, hidden] of a tensor, or of a list with a tensor for each media input, in order."""
        parts = list(embeddings) if isinstance(embeddings, list | tuple) else [embeddings]
        if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
            raise EncoderError(
                f"{type(self._model).__name__} must return tensors of embeddings, returned {type(embeddings).__name__}",
                **self.owner,
            )
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def _written_embeddings(
        self, traits: ModalityTraits, tensors: Mapping[str, torch.Tensor], count: int
    ) -> torch.Tensor:
        """What a model without a method for it writes into its text embeddings, taken where it calls its language model."""
        if count == 1:
            # Some models take a single token for one that has not been expanded yet, and expand it themselves.
            twice = {name: join([value, value], traits.axes.get(name, 0)) for name, value in tensors.items()}
            return self._written_embeddings(traits, twice, 2)[:1]
        ids = torch.full((1, count), traits.embed_token_id, device=self._device)
        embeddings = self._written(traits, ids, tensors)[0]
        if torch.isnan(embeddings).any():
            raise EncoderError(
                f"{type(self._model).__name__} does not write embeddings of its {traits.modality.argument} into its text "
                "embeddings",
                **self.owner,
            )
        return embeddings

    def _written(self, traits: ModalityTraits, ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The embeddings [1, n, hidden] with which the model calls its language model; NaN where it writes nothing."""
        model, is_embed = self._model.base_model, (ids == traits.embed_token_id).int()
        known = {"mm_token_type_ids": is_embed * int(traits.modality), "token_type_ids": is_embed}
        taken = inspect.signature(model.forward).parameters
        extra = {name: value for name, value in known.items() if name in taken}
        try:
            with torch.inference_mode():
                model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra, **tensors)
        except LanguageModelReached as reached:
            return reached.embeds
        raise EncoderError(f"{type(self._model).__name__} does not call its language model", **self.owner)


def _checkpoint_dtype(config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None)
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else torch.float32
