"""A copy of a tokenizer that reads the text of protected tokens as text, except where the template wrote it."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from mm_plugin.errors import RequestError
from mm_plugin.prompt.protected import ProtectedTokens
from mm_plugin.prompt.traced import TracedText

# A protected token that the template wrote is given to the copy as two characters of a private-use plane, a name of its own.
_LEAD, _FIRST = "\U0010fffd", 0x100000
_PROBE = "a <b>\n\n  c1\u00e9"


def plain_copy(tokenizer: Any) -> Any:
    """The fast backend of a tokenizer, copied; None where it has none, or encodes otherwise than the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    probe = _PROBE + "".join(list(tokenizer.get_added_vocab())[:64])
    same = copy.encode(probe, add_special_tokens=False).ids == tokenizer(probe, add_special_tokens=False)["input_ids"]
    return copy if same else None


def not_text() -> RequestError:
    """The error for text that becomes a token, and cannot be kept from it."""
    return RequestError(
        "messages: text in them reads as a special token of the model, and this tokenizer cannot encode it as text; remove it",
        path="messages",
    )


class TextTokenizer:
    """Reads every protected token as text, but for those that the template wrote. Final; thread-safe.

    Args:
        backend: the tokenizer, as the package `tokenizers` has it.
        protected: its protected tokens.
    """

    def __init__(self, backend: Any, protected: ProtectedTokens) -> None:
        self._protected = protected
        self._tokenizer, self._aliases = _without(backend, protected)
        last = chr(_FIRST + max(0, len(self._aliases) - 1))
        self._taken = re.compile(f"{_LEAD}[{chr(_FIRST)}-{last}]")
        model_size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self._ids = np.arange(max([model_size, *(index + 1 for index in added)]), dtype=np.int64)
        real = {alias: _id_of(protected, token) for token, alias in self._aliases.items()}
        for index, token in added.items():
            self._ids[index] = real[token.content] if token.content in real else backend.token_to_id(token.content)
        self._alias_ids = np.array(sorted(index for index, token in added.items() if token.content in real), np.int64)

    def encode(self, text: TracedText) -> np.ndarray:
        """Token ids in which the protected tokens are exactly those that the template wrote.

        Shape:
            returns [n] int64 on the CPU.

        Raises:
            RequestError: the tokenizer cannot encode as text what a client wrote.
        """
        content = text.plain
        pieces: list[str] = []
        own: list[int] = []
        at = 0
        for start, end in self._protected.own_of(text):
            pieces += [content[at:start], self._aliases[content[start:end]]]
            own.append(_id_of(self._protected, content[start:end]))
            at = end
        pieces.append(content[at:])
        if self._taken.search(content):
            raise not_text()
        aliased = "".join(pieces)
        encoding = self._tokenizer.encode(aliased, add_special_tokens=False)
        found = np.array(encoding.ids, dtype=np.int64)
        ids: np.ndarray = self._ids[found]
        from_aliases = np.isin(found, self._alias_ids)
        if ids[from_aliases].tolist() != own or self._protected.mask(ids[~from_aliases]).any():
            raise not_text()
        self._check_known(aliased, encoding, np.flatnonzero((ids == self._protected.unknown[1]) & ~from_aliases))
        return ids

    def _check_known(self, text: str, encoding: Any, unknown: np.ndarray) -> None:
        """Refuse the text of a protected token of which the vocabulary knows nothing, so that it would be lost."""
        if not len(unknown):
            return
        lost = np.zeros(len(text), dtype=np.bool_)
        for index in unknown.tolist():
            start, end = encoding.token_to_chars(index)
            lost[start:end] = True
        if any(lost[start:end].all() for start, end in self._protected.written_in(text)):
            raise not_text()


def _without(backend: Any, protected: ProtectedTokens) -> tuple[Any, dict[str, str]]:
    """The copy, in which no text becomes a protected token, and the alias of each of them."""
    from tokenizers import AddedToken, Tokenizer

    tokens = [*protected.ids_of, *filter(None, protected.unknown[:1])]
    known = set(tokens)
    described = json.loads(backend.to_str())
    flags = {token["content"]: token for token in described.get("added_tokens") or ()}
    described["added_tokens"] = [token for name, token in flags.items() if name and name not in known]
    described["post_processor"] = None
    _forget(described["model"], known)
    copy = Tokenizer.from_str(json.dumps(described))
    aliases = {token: _LEAD + chr(_FIRST + number) for number, token in enumerate(tokens)}
    added = []
    normalizer = backend.normalizer
    for token, alias in aliases.items():
        kept = {
            name: flags.get(token, {}).get(name, False) for name in ("lstrip", "rstrip", "normalized", "single_word")
        }
        if normalizer is not None and normalizer.normalize_str(alias) != alias:
            kept["normalized"] = False  # a normalizer that removes the alias would match it everywhere
        added.append(AddedToken(alias, special=False, **kept))
    copy.add_tokens(added)
    return copy, aliases


def _forget(model: dict[str, Any], tokens: set[str]) -> None:
    """Rename tokens in a model's vocabulary, so that it makes none of them from text; ids and scores stay."""
    known = {token: f"{_LEAD}{_LEAD}{token}" for token in tokens}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # Unigram, which knows its unknown token by its place
        model["vocab"] = [[known.get(token, token), score] for token, score in vocabulary]
        return
    known.pop(model.get("unk_token") or "", None)
    named = {known.get(token, token): index for token, index in (vocabulary or {}).items()}
    gaps = set(range(max(named.values(), default=-1) + 1)) - set(
        named.values()
    )  # the aliases must get none of these ids
    model["vocab"] = named | {f"{_LEAD}{_LEAD}{index}": index for index in gaps}
    if "merges" in model:
        pairs = (pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & known.keys()]


def _id_of(protected: ProtectedTokens, token: str) -> int:
    return protected.unknown[1] if token == protected.unknown[0] else protected.ids_of[token]
