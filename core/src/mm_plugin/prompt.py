"""Tokenizer, chat template and provenance: text and messages -> ids with slots. Knows no model; placeholders are arguments.

In plain text and in ids the caller vouches for the placeholders. In chat messages only the template may write one: text that a
client typed never becomes a special or added token, and the ids of ordinary text are exactly the tokenizer's own.
"""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from mm_plugin.errors import PlaceholderError, RequestError, UsageError
from mm_plugin.media import VideoFrames
from mm_plugin.placeholders import Slot, find_slots
from mm_plugin.structs import Modality, as_ids

_PART_TYPES = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
    "audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
# Supplementary private-use characters: no tokenizer has them in its vocabulary, and no template looks for them.
_FIRST_STAND_IN = 0xF0000
# A chat template writes it where the model's own code tokenizes what comes before and after separately. It never reaches the ids,
# and no client can send it: text with a character of its plane is refused.
SEGMENT_BREAK = "\U000ffffd"
_DEEPEST = 64  # levels of nesting in a message
# Composed or not, with or without accents: what a tokenizer's normaliser may make of a character.
_FORMS: tuple[Literal["NFKC", "NFKD"], ...] = ("NFKC", "NFKD")


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
        placeholders: by modality, the id of the token that stands for one medium.
        vocabulary: ids from 0 to this, exclusive, may stand in a prompt; those of the tokenizer where None.
        surround: by modality, text that is written before and behind each placeholder; see `ModelSpec.surround`.
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholders: Mapping[Modality, int],
        *,
        vocabulary: int | None = None,
        surround: Mapping[Modality, tuple[str, str]] | None = None,
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
            for modality, texts in (surround or {}).items()
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
        elif _is_messages(prompt):
            messages = [_plain_message(message, index, media) for index, message in enumerate(prompt)]
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
        if not _is_messages(prompt):
            raise UsageError("this model takes text or messages, not token ids", argument="prompt")
        messages = [_plain_message(message, index, media) for index, message in enumerate(prompt)]
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
            masked = _Mask(choose, self._whole_tokens)
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
        """Indices of characters that could begin a protected token, also after compatibility normalisation."""
        firsts = self._first_characters
        return [
            index
            for index, character in enumerate(text)
            if character in firsts
            or (character > "\x7f" and any(unicodedata.normalize(form, character)[:1] in firsts for form in _FORMS))
        ]

    def _whole_tokens(self, text: str) -> list[int]:
        """Indices where a whole protected token begins: for templates that look into the text they are given."""
        assert self._split is not None
        return [match.start() for match in self._split.finditer(text)]


class _Mask:
    """Puts stand-ins for chosen characters in every string of a message, and takes them out again."""

    def __init__(self, choose: Callable[[str], list[int]], whole: Callable[[str], list[int]]) -> None:
        self._choose, self._whole = choose, whole
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    @property
    def used(self) -> bool:
        return bool(self._stand_ins)

    def hide(self, value: Any, key: str | None = None) -> Any:
        if isinstance(value, Mapping):
            # A template looks names up, so those that can be looked up stay, unless they are a token themselves.
            return {self._hide_text(name, named=True): self.hide(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [self.hide(part) for part in value]
        if not isinstance(value, str):
            return value
        return self._hide_text(value, named=key == "type")

    def _hide_text(self, value: str, *, named: bool) -> str:
        if named and value.isidentifier() and not self._whole(value):
            return value
        characters = list(value)
        for index in self._choose(value):
            characters[index] = self._stand_in(characters[index])
        return "".join(characters)

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            code = _FIRST_STAND_IN + len(self._stand_ins)
            self._stand_ins[character] = chr(code)
            self._originals[code] = character
        return self._stand_ins[character]

    def reveal(self, text: str) -> str:
        return text.translate(self._originals)


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def _plain_message(message: Any, index: int, media: dict[Modality, list[Any]]) -> dict[str, Any]:
    """A message as the template takes it, its media moved into `media`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PlaceholderError(f"messages[{index}]: a message is an object with a role", path=f"messages[{index}]")
    content = message.get("content")
    plain = {_clean(str(name), index): _copied(part, index) for name, part in message.items() if name != "content"}
    if content is None or isinstance(content, str):
        return plain | {"content": _clean(content or "", index)}
    if not isinstance(content, Sequence):
        raise PlaceholderError(
            f"messages[{index}].content: expected text or a list of parts", path=f"messages[{index}]"
        )
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        path = f"messages[{index}].content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": _clean(part["text"], index)})
        elif isinstance(kind, str) and kind in _PART_TYPES:
            modality = _PART_TYPES[kind]
            value = part.get(kind, part.get(modality.name.lower()))
            if isinstance(value, Mapping):
                # `input_audio` has its base64 under `data`.
                value = value.get("url", value.get("data"))
                if value is None:
                    raise PlaceholderError(f"{path}.{kind}: an object there has a url, or data", path=path)
            if modality is Modality.VIDEO and isinstance(value, list | tuple):
                value = VideoFrames(value, fps=part.get("fps"), timestamps=part.get("timestamps"))
            media[modality].append(value)
            parts.append({"type": modality.name.lower()})
        else:
            known = ", ".join(("text", *_PART_TYPES))
            raise PlaceholderError(f"{path}: a part has one of the types {known}, with its content", path=path)
    return plain | {"content": parts}


def _copied(value: Any, index: int, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise RequestError(f"messages[{index}]: nested more than {_DEEPEST} deep", path=f"messages[{index}]")
    if isinstance(value, str):
        return _clean(value, index)
    if isinstance(value, Mapping):
        return {_clean(str(name), index): _copied(part, index, depth + 1) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_copied(part, index, depth + 1) for part in value]
    return value


def _clean(text: str, index: int) -> str:
    """Text that can be encoded, and holds none of our stand-ins."""
    if any(
        _FIRST_STAND_IN <= ord(c) < _FIRST_STAND_IN + 0xFFFE or "\ud800" <= c <= "\udfff" for c in text if c > "\ud7ff"
    ):
        raise RequestError(
            f"messages[{index}]: a lone surrogate or a character of private-use plane 15 is not accepted",
            path=f"messages[{index}]",
        )
    return text
