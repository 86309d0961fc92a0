"""How a checkpoint's processor takes media of one modality, as plain values. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mm_plugin import Modality

# Arguments for one part of a processor, by transformers' own names.
Kwargs = Mapping[str, Any]


class ModalityTraits(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """How a processor takes media of one modality.

    Attributes:
        modality: the modality.
        placeholder: the token that stands for one media input in a prompt.
        embed_token_id: id of the tokens at whose positions the model writes embeddings.
        tensor_names: names of the tensors that the processor returns; the first is the feature, the others are fields.
        placeholder_affixes: text that the processor writes before and after the tokens of a media input.
        axes: by tensor name, the axis along which the tensors of several media inputs are concatenated.
        example: a prompt for one media input.
    """

    modality: Modality
    placeholder: str
    embed_token_id: int
    tensor_names: tuple[str, ...]
    placeholder_affixes: tuple[str, str] = ("", "")
    axes: Mapping[str, int] = {}
    example: str = ""

    @property
    def feature_name(self) -> str:
        """Name of the tensor that the encoder reads first."""
        return self.tensor_names[0]

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the tensors beside the feature."""
        return self.tensor_names[1:]
