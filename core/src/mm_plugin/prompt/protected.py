"""The tokens of a tokenizer that a client must not be able to write: special tokens, added tokens, placeholders."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

# With composed and decomposed characters: what the normalizer of a tokenizer may turn a character into.
_NORMAL_FORMS: tuple[Literal["NFKC", "NFKD"], ...] = ("NFKC", "NFKD")


class ProtectedTokens:
    """Special and added tokens of a tokenizer, and placeholders. Final.

    Args:
        tokenizer: as transformers opens it.
        placeholders: ids of tokens that stand for media inputs. A placeholder of the plain vocabulary, which is in no list of
            added tokens, is the first that a client would forge.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[int]) -> None:
        tokens = {str(token): int(index) for token, index in tokenizer.get_added_vocab().items()}
        tokens |= {str(tokenizer.convert_ids_to_tokens(index)): index for index in placeholders}
        # Some vocabularies turn ordinary text into the unknown token: it is not a sign of forgery.
        unknown = getattr(tokenizer, "unk_token", None)
        self._tokens = {token: index for token, index in tokens.items() if token and token != unknown}
        self._ids = np.array(sorted(self._tokens.values()), dtype=np.int64)
        self._first_characters = {token[0] for token in self._tokens}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)()")

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._tokens)

    def mask(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are protected tokens.

        Shape:
            ids [n] int64, returns [n] bool.
        """
        return np.isin(ids, self._ids)

    def select(self, ids: np.ndarray) -> np.ndarray:
        """The protected tokens among ids, in order."""
        found: np.ndarray = ids[self.mask(ids)]
        return found

    def id_of(self, token: str) -> int:
        """The id of a protected token."""
        return self._tokens[token]

    def split(self, text: str) -> list[str]:
        """Text and protected tokens in turns; text first and last, and empty where there is none."""
        return self._pattern.split(text)

    def starts(self, text: str) -> list[int]:
        """Indices of characters at which a whole protected token begins."""
        return [match.start() for match in self._pattern.finditer(text)]

    def possible_starts(self, text: str) -> list[int]:
        """Indices of characters that could begin a protected token, also after compatibility normalization."""
        firsts = self._first_characters
        return [
            index
            for index, character in enumerate(text)
            if character in firsts
            or (
                character > "\x7f"
                and any(unicodedata.normalize(form, character)[:1] in firsts for form in _NORMAL_FORMS)
            )
        ]
