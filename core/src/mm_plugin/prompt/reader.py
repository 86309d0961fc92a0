"""Text, ids and chat messages -> token ids with slots for media. Knows a tokenizer and its chat template, and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import as_ids
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.placeholders import Slot, find_slots
from mm_plugin.prompt.affixes import PlaceholderAffixes
from mm_plugin.prompt.chat import ChatArguments, ChatRenderer
from mm_plugin.prompt.encoding import TracedEncoder, called
from mm_plugin.prompt.messages import is_messages, plain_message
from mm_plugin.prompt.protected import ProtectedTokens
from mm_plugin.prompt.traced import TracedText
from mm_plugin.settings import Settings
from mm_plugin.tokenizer_files import named_templates


class TokenizedPrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt before its placeholders are expanded.

    Attributes:
        ids: [n] int64.
        slots: the places of media inputs in prompt order, each with its modality; half-open intervals of `ids`.
        media: media inputs found inside chat messages, by modality; None for a part that only holds a place, a `WithOptions` for
            one with options of its own.
    """

    ids: np.ndarray
    slots: list[tuple[Slot, Modality]]
    media: dict[Modality, list[Any]]


class PromptReader:
    """Turns prompts into token ids with one tokenizer. Final; safe to use from several threads.

    Special tokens come from the chat template alone: whatever a client typed is encoded as text.

    Args:
        tokenizer: as transformers opens it.
        placeholders: by modality, the id of the token that stands for one media input.
        vocabulary: number of ids that may occur in a prompt, counted from 0; the tokenizer's where None.
        placeholder_affixes: by modality, text that is written before and after each placeholder; see `ModelSpec`.
        templates: the checkpoint's chat templates by name, or why they cannot be read; the tokenizer's where None.
        add_special_tokens: whether a prompt that is text gets the tokenizer's special tokens at its ends; the tokenizer's own
            default where None.
        settings: limits of what a chat template may write.

    Example:
        >>> from mm_plugin import Modality
        >>> from mm_plugin.prompt import PromptReader
        >>> class Words:
        ...     tokens = ["<image>", "what", "is", "this"]
        ...     def __len__(self):
        ...         return len(self.tokens)
        ...     def __call__(self, text):
        ...         return {"input_ids": [self.tokens.index(word) for word in text.split()]}
        ...     def get_added_vocab(self):
        ...         return {"<image>": 0}
        ...     def convert_ids_to_tokens(self, index):
        ...         return self.tokens[index]
        >>> reader = PromptReader(Words(), {Modality.IMAGE: 0})
        >>> prompt = reader.read("what is <image>")
        >>> prompt.ids.tolist(), [(slot.start, slot.end) for slot, _ in prompt.slots]
        ([1, 2, 0], [(2, 3)])
        >>> reader.read([0, 3]).slots[0][1]
        <Modality.IMAGE: 1>
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholders: Mapping[Modality, int],
        *,
        vocabulary: int | None = None,
        placeholder_affixes: Mapping[Modality, tuple[str, str]] | None = None,
        templates: Mapping[str, str] | UsageError | None = None,
        add_special_tokens: bool | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer) if vocabulary is None else vocabulary
        self._placeholders = dict(placeholders)
        self._protected = ProtectedTokens(tokenizer, self._placeholders.values())
        self._affixes = PlaceholderAffixes(tokenizer, self._placeholders, placeholder_affixes or {})
        self._encoder = TracedEncoder(tokenizer, self._protected)
        if templates is None:
            templates = named_templates(tokenizer.chat_template, "tokenizer") if _has_template(tokenizer) else {}
        self._chat = ChatRenderer(tokenizer, templates, settings or Settings())
        self._special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}

    def read(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | np.ndarray | Any,
        *,
        expanded: bool = False,
        chat: ChatArguments | None = None,
    ) -> TokenizedPrompt:
        """Token ids and slots of a prompt.

        Args:
            prompt: text, token ids, or chat messages with content parts as in the OpenAI API.
            expanded: the ids hold the tokens of media inputs already, so no slots are searched.
            chat: what the chat template reads beside messages.

        Raises:
            RequestError: the chat template rejects the messages, or text cannot be kept from becoming a special token, or an
                id is outside the vocabulary.
            UsageError: the prompt is neither text, nor ids, nor messages, or the checkpoint has no chat template for messages.
        """
        media: dict[Modality, list[Any]] = {modality: [] for modality in Modality}
        if isinstance(prompt, str):
            _check_text(prompt)
            found = called(self._tokenizer, self._affixes.add_to_text(prompt), **self._special)
            ids = np.asarray(found["input_ids"], dtype=np.int64)
        elif is_messages(prompt):
            ids = self._encode(self._traced(prompt, media, chat or ChatArguments()))
        else:
            ids = self._checked_ids(prompt)
            if not expanded:
                ids = self._affixes.add_to_ids(ids)
        return TokenizedPrompt(ids, [] if expanded else self._slots(ids), media)

    def read_text(self, prompt: Any, chat: ChatArguments | None = None) -> tuple[str, bool, dict[Modality, list[Any]]]:
        """A prompt as text, for models that place media inputs themselves.

        Args:
            prompt: text, or chat messages with content parts as in the OpenAI API.
            chat: what the chat template reads beside messages.

        Returns:
            The text, whether a chat template rendered it, and the media inputs inside the messages.

        Raises:
            RequestError: as for `read`, and messages in which a client's text reads as a special token of the model.
            UsageError: the prompt is neither text nor messages.
        """
        media: dict[Modality, list[Any]] = {modality: [] for modality in Modality}
        if isinstance(prompt, str):
            _check_text(prompt)
            return prompt, False, media
        if not is_messages(prompt):
            raise UsageError("prompt: this model takes text or messages, not token ids", argument="prompt")
        text = self._traced(prompt, media, chat or ChatArguments())
        if not self._encoder.as_tokenizer(self._affixes.add_to_traced(text, self._protected)):
            raise RequestError(
                "messages: text in them reads as a special token of the model, which takes its prompt as text; remove it",
                path="messages",
            )
        return text.plain, True, media

    def is_protected(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are special tokens, added tokens or placeholders.

        Shape:
            ids [n] int64, returns [n] bool.
        """
        return self._protected.mask(ids)

    def affix_tokens(self, modality: Modality) -> int:
        """Tokens of the text around one placeholder, where the tokenizer does not join it with other text."""
        return self._affixes.num_tokens(modality)

    def _checked_ids(self, prompt: Any) -> np.ndarray:
        ids = as_ids(prompt, what="prompt")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            # A prefix cache would take a sentinel among them for another request's image.
            raise RequestError(
                f"prompt: token ids must be from 0 to {self._vocabulary - 1}, got {int(ids.min())} to {int(ids.max())}",
                path="prompt",
            )
        return ids

    def _slots(self, ids: np.ndarray) -> list[tuple[Slot, Modality]]:
        slots = [(slot, modality) for modality, token in self._placeholders.items() for slot in find_slots(ids, token)]
        return sorted(slots, key=lambda pair: pair[0].start)

    def _traced(self, prompt: Any, media: dict[Modality, list[Any]], chat: ChatArguments) -> TracedText:
        """Rendered messages; their media inputs are appended to `media`."""
        messages = [plain_message(message, index, media) for index, message in enumerate(prompt)]
        return self._chat.render(messages, chat)

    def _encode(self, text: TracedText) -> np.ndarray:
        """Ids of rendered messages in which every protected token is the template's own."""
        return self._encoder.encode(self._affixes.add_to_traced(text, self._protected))


def _has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def _check_text(prompt: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise RequestError("prompt: text must not contain lone surrogates; decode it as UTF-8", path="prompt")
