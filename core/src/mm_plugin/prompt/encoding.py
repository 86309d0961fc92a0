"""Token ids of rendered text, whole or between protected tokens. Knows a tokenizer, and no template."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mm_plugin.forking import new_lock
from mm_plugin.prompt.masking import SEGMENT_BREAK
from mm_plugin.prompt.protected import ProtectedTokens


def encode_rendered(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids of text that a chat template rendered. Parts between `SEGMENT_BREAK`s are encoded separately.

    Args:
        tokenizer: as transformers opens it.
        text: holds its special tokens already, so the tokenizer adds none.

    Shape:
        returns [n] int64 on the CPU.

    Example:
        >>> from mm_plugin.prompt import SEGMENT_BREAK, encode_rendered
        >>> def letters(text, add_special_tokens):
        ...     return {"input_ids": [ord(letter) for letter in text]}
        >>> encode_rendered(letters, f"a{SEGMENT_BREAK}b").tolist()
        [97, 98]
    """
    parts = text.split(SEGMENT_BREAK)
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts if part or len(parts) == 1]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in ids or [[]]])


class RunEncoder:
    """Encodes text around protected tokens: each run between two of them separately, and as text only. Final; thread-safe.

    Args:
        tokenizer: as transformers opens it.
        protected: its protected tokens.
    """

    def __init__(self, tokenizer: Any, protected: ProtectedTokens) -> None:
        self._tokenizer, self._protected = tokenizer, protected
        self._text_tokenizer: Any = None
        self._lock = new_lock()

    def encode(self, text: str, *, reveal: Callable[[str], str] = str) -> np.ndarray:
        """Token ids of the text; empty where the tokenizer has no fast backend.

        Args:
            text: with stand-ins for whatever a client wrote that could read as a protected token.
            reveal: puts the client's characters back into a run.

        Shape:
            returns [n] int64 on the CPU.
        """
        tokenizer = self._for_text()
        if tokenizer is None:
            return np.zeros(0, dtype=np.int64)
        ids: list[int] = []
        for index, run in enumerate(self._protected.split(text)):
            if index % 2:
                ids.append(self._protected.id_of(run))
                continue
            for segment in filter(None, run.split(SEGMENT_BREAK)):
                ids.extend(tokenizer.encode(reveal(segment), add_special_tokens=False).ids)
        return np.array(ids, dtype=np.int64)

    def _for_text(self) -> Any:
        """A copy that reads every protected token as text. A flag on the shared tokenizer would reach other threads."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        with self._lock:
            if self._text_tokenizer is None:
                from tokenizers import Tokenizer

                description = json.loads(backend.to_str())
                for token in description.get("added_tokens") or ():
                    token["special"] = True
                copy = Tokenizer.from_str(json.dumps(description))
                copy.no_padding()
                copy.no_truncation()
                copy.encode_special_tokens = True
                self._text_tokenizer = copy
            return self._text_tokenizer
