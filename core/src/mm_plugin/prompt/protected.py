"""The tokens of a tokenizer that a client must not be able to write: special tokens, added tokens, placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mm_plugin.prompt.traced import TracedText, own_spans

# Added tokens of whitespace alone, as it stands in a text or in a vocabulary, are how a tokenizer cuts ordinary text.
_WHITESPACE = re.compile(r"[\s▁]*")


class ProtectedTokens:
    """Special and added tokens of a tokenizer, and placeholders. Final.

    Args:
        tokenizer: as transformers opens it.
        placeholders: ids of tokens that stand for media inputs. A placeholder of the plain vocabulary, which is in no list of
            added tokens, is the first that a client would forge.

    Attributes:
        ids_of: the ids by text, without the unknown token, which ordinary text may become as well.
        unknown: text and id of the unknown token; empty text where there is none.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[int]) -> None:
        tokens = {str(token): int(index) for token, index in tokenizer.get_added_vocab().items()}
        tokens |= {str(tokenizer.convert_ids_to_tokens(index)): index for index in placeholders}
        unknown = getattr(tokenizer, "unk_token", None)
        self.unknown = ("", -1) if not unknown else (str(unknown), int(tokenizer.convert_tokens_to_ids(str(unknown))))
        self.ids_of = {
            token: index
            for token, index in tokens.items()
            if not _WHITESPACE.fullmatch(token) and token != self.unknown[0]
        }
        self._ids = np.array(sorted(self.ids_of.values()), dtype=np.int64)
        written = [*self.ids_of, *filter(None, self.unknown[:1])]
        self._pattern = re.compile(_longest_of(written) if written else r"(?!)")

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.ids_of)

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

    def written_in(self, text: str) -> list[tuple[int, int]]:
        """Where the texts of protected tokens and of the unknown token stand in a text, as half-open intervals."""
        return [match.span() for match in self._pattern.finditer(text)]

    def own_of(self, text: TracedText) -> Iterator[tuple[int, int]]:
        """Where the template itself wrote the text of one of them, the unknown token included; in order."""
        plain = text.plain
        for start, end in own_spans(text.origins):
            for match in self._pattern.finditer(plain, start, end):
                yield match.span()


def _longest_of(words: Iterable[str]) -> str:
    """A pattern of the longest of some words; as a tree of their characters, because there can be thousands of them."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(tree)


def _pattern_of(node: dict[str, Any]) -> str:
    options = []
    for first, after in node.items():
        if not first:
            continue
        chain, rest = re.escape(first), after
        while len(rest) == 1 and "" not in rest:
            ((character, rest),) = rest.items()
            chain += re.escape(character)
        options.append(chain + _pattern_of(rest))
    if not options:
        return ""
    return f"(?:{'|'.join(options)})" + ("?" if "" in node else "")
