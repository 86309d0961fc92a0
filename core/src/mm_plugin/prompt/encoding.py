"""Token ids of rendered text, in which only a template writes protected tokens. Knows a tokenizer, and no template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from mm_plugin.errors import RequestError
from mm_plugin.foreign import BareExceptionError, contain, words
from mm_plugin.forking import new_lock
from mm_plugin.prompt.protected import ProtectedTokens
from mm_plugin.prompt.text_tokenizer import TextTokenizer, not_text, plain_copy
from mm_plugin.prompt.traced import CLIENT, LOST, OWN, TracedText

# A chat template writes it where the model's own code encodes the text before and after it separately. It never reaches the
# ids; in a client's text it is an ordinary character.
SEGMENT_BREAK = "\U000ffffd"


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


def called(tokenizer: Any, text: str, **named: Any) -> Any:
    """What the tokenizer makes of a text. A cancellation that it raises is not a cancellation of the request.

    Raises:
        Exception: what the tokenizer raises; a `BareExceptionError` in place of what is not an `Exception`,
            and of a cancelled future.
    """
    try:
        return contain(tokenizer, text, **named)
    except CancelledError as error:
        raise BareExceptionError(words(error)) from error


class TracedEncoder:
    """Encodes rendered text so that its protected tokens are exactly those that the template wrote. Final; thread-safe.

    Args:
        tokenizer: as transformers opens it.
        protected: its protected tokens.
    """

    def __init__(self, tokenizer: Any, protected: ProtectedTokens) -> None:
        self._tokenizer, self._protected = tokenizer, protected
        self._lock = new_lock()
        self._plain: Any = None
        self._text: TextTokenizer | None = None

    def encode(self, text: TracedText) -> np.ndarray:
        """Token ids: the tokenizer's own for this text, with whatever a client wrote encoded as text.

        Args:
            text: holds its special tokens already, so the tokenizer adds none.

        Shape:
            returns [n] int64 on the CPU.

        Raises:
            RequestError: what a client wrote becomes a protected token, and the tokenizer cannot encode it as text.
        """
        parts = [self._encode_segment(segment) for segment in _segments(text)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def as_tokenizer(self, text: TracedText) -> bool:
        """Whether the tokenizer by itself gives the ids that `encode` gives, so that the text alone says everything."""
        try:
            return np.array_equal(self.encode(text), encode_rendered(self._tokenizer, text.plain))
        except RequestError:
            return False

    def _encode_segment(self, text: TracedText) -> np.ndarray:
        plain = self._plain_tokenizer()
        if plain is None:
            return self._without_offsets(text)
        places = self._protected.written_in(text.plain)
        _check_known(text.origins, places)
        if all(_is_own(text.origins, *place) for place in places):
            ids, is_own = self._encode_plainly(text, plain)
            return ids if is_own else self._text_tokenizer().encode(text)
        try:
            return self._text_tokenizer().encode(text)
        except RequestError:
            # Not every text of a protected token becomes one, such as those of tokens that only match whole words.
            ids, is_own = self._encode_plainly(text, plain)
            if not is_own:
                raise
            return ids

    def _encode_plainly(self, text: TracedText, plain: Any) -> tuple[np.ndarray, bool]:
        """The tokenizer's own ids, and whether every protected token among them is the template's."""
        encoding = plain.encode(text.plain, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        return ids, self._all_own(text, encoding, ids)

    def _all_own(self, text: TracedText, encoding: Any, ids: np.ndarray) -> bool:
        """The last check: whether each protected token stands where the template wrote it."""
        content, unknown = text.plain, self._protected.unknown
        for index in np.flatnonzero(self._protected.mask(ids) | (ids == unknown[1])).tolist():
            start, end = encoding.token_to_chars(index)
            if ids[index] == unknown[1] and content[start:end].strip() != unknown[0]:
                continue  # ordinary text that the vocabulary lacks
            token = str(self._tokenizer.convert_ids_to_tokens(int(ids[index])))
            # A token may take the whitespace beside it along.
            within = content.find(token, start, end)
            if within >= 0:
                start, end = within, within + len(token)
            if not _is_own(text.origins, start, end):
                return False
        return True

    def _without_offsets(self, text: TracedText) -> np.ndarray:
        """For tokenizers in Python, which do not say where a token comes from."""
        found = called(self._tokenizer, text.plain, add_special_tokens=False)
        ids = np.asarray(found["input_ids"], dtype=np.int64)
        own = [self._protected.ids_of.get(text.plain[start:end]) for start, end in self._protected.own_of(text)]
        if self._protected.select(ids).tolist() != [index for index in own if index is not None]:
            raise not_text()
        return ids

    def _plain_tokenizer(self) -> Any:
        """A copy of the tokenizer that nobody else changes; None where it has no fast backend."""
        with self._lock:
            if self._plain is None:
                self._plain = plain_copy(self._tokenizer) or False
            return self._plain or None

    def _text_tokenizer(self) -> TextTokenizer:
        with self._lock:
            if self._text is None:
                self._text = TextTokenizer(self._plain, self._protected)
            return self._text


def _segments(text: TracedText) -> Iterator[TracedText]:
    """The parts between the breaks that the template wrote."""
    start = 0
    place = text.plain.find(SEGMENT_BREAK)
    while place >= 0:
        if text.origins[place : place + 1] == OWN:
            yield text[start:place]
            start = place + 1
        place = text.plain.find(SEGMENT_BREAK, place + 1)
    yield text[start:]


def _check_known(origins: bytes, places: Sequence[tuple[int, int]]) -> None:
    """Refuse protected tokens of which nothing says who wrote them."""
    for start, end in places:
        if origins.count(LOST, start, end) and not origins.count(CLIENT, start, end):
            raise RequestError(
                "messages: the chat template changes text by an operation after which nothing says whether it or a client wrote "
                "a special token; use another template, or send the prompt as ids",
                path="messages",
            )


def _is_own(origins: bytes, start: int, end: int) -> bool:
    return origins.count(OWN, start, end) == end - start
