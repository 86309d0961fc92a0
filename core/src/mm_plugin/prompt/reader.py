"""Text, ids and messages -> token ids with slots. Knows tokenizer and chat template, no model."""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import as_ids
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.placeholders import Slot, find_slots
from mm_plugin.prompt.masking import NORMAL_FORMS, SEGMENT_BREAK, Mask
from mm_plugin.prompt.messages import is_messages, plain_message


class TokenizedPrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt before expansion.

    Attributes:
        ids: [n] int64.
        slots: where the media go, in prompt order, with each slot's modality.
        media: media found inside chat messages, by modality; None for a part that only marks a place.
    """

    ids: np.ndarray
    slots: list[tuple[Slot, Modality]]
    media: dict[Modality, list[Any]]


def encode_rendered(tokenizer: Any, text: str) -> np.ndarray:
    """Ids of what a chat template rendered, each part between two `SEGMENT_BREAK`s for itself.

    Args:
        tokenizer: as transformers opens it.
        text: has its special tokens already; a tokenizer that adds one of its own would repeat it.

    Shape:
        returns [n] int64.
    """
    parts = text.split(SEGMENT_BREAK)
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts if part or len(parts) == 1]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in ids or [[]]])


class PromptReader:
    """Reads prompts for one tokenizer. Final; safe to use from several threads.

    Args:
        tokenizer: as transformers opens it.
        placeholders: by modality, the id of the token that stands for one media input.
        vocabulary: ids from 0 to this, exclusive, may stand in a prompt; those of the tokenizer where None.
        placeholder_affixes: by modality, text that is written before and after each placeholder; see `ModelSpec`.
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholders: Mapping[Modality, int],
        *,
        vocabulary: int | None = None,
        placeholder_affixes: Mapping[Modality, tuple[str, str]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer) if vocabulary is None else vocabulary
        self._placeholders = dict(placeholders)
        protected = {str(token): int(index) for token, index in tokenizer.get_added_vocab().items()}
        # A placeholder of the plain vocabulary, known to no list of added tokens, is what a client would forge first.
        protected |= {str(tokenizer.convert_ids_to_tokens(index)): index for index in self._placeholders.values()}
        # An unknown token is what ordinary text becomes in some vocabularies: no sign of a forgery.
        unknown = getattr(tokenizer, "unk_token", None)
        self._protected = {token: index for token, index in protected.items() if token and token != unknown}
        self._protected_ids = np.array(sorted(self._protected.values()), dtype=np.int64)
        self._first_characters = {token[0] for token in self._protected}
        longest_first = sorted(self._protected, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._surround = {
            str(tokenizer.convert_ids_to_tokens(self._placeholders[modality])): texts
            for modality, texts in (placeholder_affixes or {}).items()
            if any(texts)
        }
        self._run_tokenizer: Any = None
        self._lock = threading.Lock()

    def read(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | np.ndarray | Any, *, expanded: bool = False
    ) -> TokenizedPrompt:
        """Ids and slots of a prompt.

        Args:
            prompt: text, token ids, or chat messages in the OpenAI content-part shape.
            expanded: the ids hold replacements already, so no slots are looked for.

        Raises:
            RequestError: messages that the template refuses, or text that cannot be kept from becoming a special token.
            UsageError: it is none of the three.
        """
        media: dict[Modality, list[Any]] = {modality: [] for modality in Modality}
        if isinstance(prompt, str):
            self._check_text(prompt)
            ids = self._encode(self._surrounded(prompt))
        elif is_messages(prompt):
            messages = [plain_message(message, index, media) for index, message in enumerate(prompt)]
            ids = self._encode_messages(messages)
        else:
            ids = as_ids(prompt, what="prompt")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
                # A sentinel among them would be taken for another request's image by the prefix cache.
                raise RequestError(f"prompt: token ids must be from 0 to {self._vocabulary - 1}", path="prompt")
            if not expanded:
                ids = self._surrounded_ids(ids)
        slots: list[tuple[Slot, Modality]] = []
        if not expanded:
            for modality, token in self._placeholders.items():
                slots += [(slot, modality) for slot in find_slots(ids, token)]
            slots.sort(key=lambda pair: pair[0].start)
        return TokenizedPrompt(ids, slots, media)

    def read_text(self, prompt: Any) -> tuple[str, bool, dict[Modality, list[Any]]]:
        """A prompt as text, for models that find the places of media by themselves.

        Args:
            prompt: text, or chat messages in the OpenAI content-part shape.

        Returns:
            The text, whether a chat template rendered it, and the media inside the messages.

        Raises:
            RequestError: as for `read`, and messages in which a client's text reads as a token of the model.
            UsageError: it is neither.
        """
        media: dict[Modality, list[Any]] = {modality: [] for modality in Modality}
        if isinstance(prompt, str):
            self._check_text(prompt)
            return prompt, False, media
        if not is_messages(prompt):
            raise UsageError("this model takes text or messages, not token ids", argument="prompt")
        messages = [plain_message(message, index, media) for index, message in enumerate(prompt)]
        ids, text = self._encode_messages(messages), self._render(messages)
        if not np.array_equal(ids, self._encode(self._surrounded(text), rendered=True)):
            raise RequestError(
                "messages: text in them reads as a special token of the model, which takes its prompt as text",
                path="messages",
            )
        return text, True, media

    def _check_text(self, prompt: str) -> None:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestError("prompt: a lone surrogate is not accepted", path="prompt")

    def _surrounded(self, text: str) -> str:
        """The text with what the model writes around each placeholder."""
        for token, (before, behind) in self._surround.items():
            text = text.replace(token, before + token + behind)
        return text

    def _surrounded_ids(self, ids: np.ndarray) -> np.ndarray:
        """As `_surrounded`, for ids: there is no text with which a tokenizer could join it."""
        for token, texts in self._surround.items():
            before, behind = (self._encode(text, rendered=True) for text in texts)
            places = np.flatnonzero(ids == self._tokenizer.convert_tokens_to_ids(token))
            for place in places[::-1]:
                ids = np.concatenate([ids[:place], before, ids[place : place + 1], behind, ids[place + 1 :]])
        return ids

    def surrounding(self, modality: Modality) -> int:
        """Tokens of the text around one placeholder, where it stands alone."""
        token = str(self._tokenizer.convert_ids_to_tokens(self._placeholders[modality]))
        return sum(len(self._encode(text, rendered=True)) for text in self._surround.get(token, ()))

    def _encode(self, text: str, *, rendered: bool = False) -> np.ndarray:
        if not rendered:
            return np.asarray(self._tokenizer(text)["input_ids"], dtype=np.int64)
        return encode_rendered(self._tokenizer, text)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            # The template is the checkpoint's, the messages are the client's; a template refuses by raising.
            raise RequestError(
                f"messages: the chat template refuses them ({type(error).__name__}: {error})", path="messages"
            ) from error

    def _encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Ids of rendered messages in which every special or added token is the template's own.

        The messages are rendered twice, the second time with stand-ins for every character that could begin a protected
        token in a client's text. What is protected in the second rendering is the template's. Where the first has the same,
        its ids are the answer, the tokenizer's own by construction. Otherwise the text between the template's tokens is
        encoded run by run, without any protected token, if that is seen to give the tokenizer's ids for the second rendering.
        """
        text = self._render(messages)
        if self._split is None:
            return self._encode(self._surrounded(text), rendered=True)
        for choose in (self._any_first_character, self._whole_tokens):
            masked = Mask(choose, self._whole_tokens)
            try:
                veiled = self._render([masked.hide(message) for message in messages])
            except RequestError:  # it takes the messages as they came, so it looks into the text
                continue
            if masked.reveal(veiled) == text:
                break
        else:
            raise RequestError("messages: the chat template changes with the special tokens in them", path="messages")
        # A stand-in hides a client's placeholder, so that nothing is written around what is only text.
        text, veiled = self._surrounded(text), self._surrounded(veiled)
        ids = self._encode(text, rendered=True)
        if not masked.used:
            return ids
        veiled_ids = self._encode(veiled, rendered=True)
        if np.array_equal(self._only_protected(ids), self._only_protected(veiled_ids)):
            return ids
        if np.array_equal(self._encode_runs(veiled), veiled_ids):
            ids = self._encode_runs(veiled, reveal=masked.reveal)
            if np.array_equal(self._only_protected(ids), self._only_protected(veiled_ids)):
                return ids
        raise RequestError(
            "messages: text in them reads as a special token of the model, and this tokenizer cannot encode it as text",
            path="messages",
        )

    def is_protected(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are special or added tokens.

        Shape:
            returns [n] bool.
        """
        return np.isin(ids, self._protected_ids)

    def _only_protected(self, ids: np.ndarray) -> np.ndarray:
        kept: np.ndarray = ids[self.is_protected(ids)]
        return kept

    def _encode_runs(self, text: str, *, reveal: Callable[[str], str] = str) -> np.ndarray:
        """Ids of text between protected tokens, each run encoded on its own as text and nothing else."""
        assert self._split is not None
        tokenizer = self._text_tokenizer()
        if tokenizer is None:
            return np.zeros(0, dtype=np.int64)
        ids: list[int] = []
        for index, run in enumerate(self._split.split(text)):
            if index % 2:
                ids.append(self._protected[run])
                continue
            for segment in filter(None, run.split(SEGMENT_BREAK)):
                ids.extend(tokenizer.encode(reveal(segment), add_special_tokens=False).ids)
        return np.array(ids, dtype=np.int64)

    def _text_tokenizer(self) -> Any:
        """A copy that reads every protected token as text. A flag on the shared one would leak into other threads."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        with self._lock:
            if self._run_tokenizer is None:
                from tokenizers import Tokenizer

                described = json.loads(backend.to_str())
                for token in described.get("added_tokens") or ():
                    token["special"] = True
                copy = Tokenizer.from_str(json.dumps(described))
                copy.no_padding()
                copy.no_truncation()
                copy.encode_special_tokens = True
                self._run_tokenizer = copy
            return self._run_tokenizer

    def _any_first_character(self, text: str) -> list[int]:
        """Indices of characters that could begin a protected token, also after compatibility normalization."""
        firsts = self._first_characters
        return [
            index
            for index, character in enumerate(text)
            if character in firsts
            or (
                character > "\x7f"
                and any(unicodedata.normalize(form, character)[:1] in firsts for form in NORMAL_FORMS)
            )
        ]

    def _whole_tokens(self, text: str) -> list[int]:
        """Indices where a whole protected token begins: for templates that look into the text they are given."""
        assert self._split is not None
        return [match.start() for match in self._split.finditer(text)]
