"""Text that a model's own processor writes before and after each placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mm_plugin.items import Modality
from mm_plugin.prompt.encoding import encode_rendered
from mm_plugin.prompt.protected import ProtectedTokens
from mm_plugin.prompt.traced import OWN, TracedText, join_traced


class PlaceholderAffixes:
    """Writes the text before and after placeholders into prompts. Final.

    Args:
        tokenizer: as transformers opens it.
        placeholders: by modality, the id of the token that stands for one media input.
        affixes: by modality, (text before, text after); see `ModelSpec.placeholder_affixes`.
    """

    def __init__(
        self, tokenizer: Any, placeholders: Mapping[Modality, int], affixes: Mapping[Modality, tuple[str, str]]
    ) -> None:
        self._tokenizer, self._placeholders = tokenizer, dict(placeholders)
        self._affixes = {placeholders[modality]: texts for modality, texts in affixes.items() if any(texts)}

    def add_to_text(self, text: str) -> str:
        """The text with the affixes of every placeholder in it, so that the tokenizer may join them with what is beside."""
        for index, (before, after) in self._affixes.items():
            token = str(self._tokenizer.convert_ids_to_tokens(index))
            text = text.replace(token, before + token + after)
        return text

    def add_to_traced(self, text: TracedText, protected: ProtectedTokens) -> TracedText:
        """The same for rendered messages, where a placeholder that a client typed stays text."""
        if not self._affixes:
            return text
        pieces, at = [], 0
        for start, end in protected.own_of(text):
            before, after = self._affixes.get(protected.ids_of.get(text.plain[start:end], -1), ("", ""))
            pieces += [text[at:start], TracedText.of(before, OWN), text[start:end], TracedText.of(after, OWN)]
            at = end
        return join_traced((*pieces, text[at:]))

    def add_to_ids(self, ids: np.ndarray) -> np.ndarray:
        """The same for ids: the affixes are encoded separately, since there is no text beside them to join.

        Shape:
            ids [n] int64, returns [m] int64.
        """
        for index in self._affixes:
            before, after = self._encoded(index)
            for place in np.flatnonzero(ids == index)[::-1]:
                ids = np.concatenate([ids[:place], before, ids[place : place + 1], after, ids[place + 1 :]])
        return ids

    def num_tokens(self, modality: Modality) -> int:
        """Tokens of both affixes of a placeholder, where they join nothing."""
        return sum(map(len, self._encoded(self._placeholders[modality])))

    def _encoded(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(encode_rendered(self._tokenizer, text) for text in self._affixes.get(index, ()))
