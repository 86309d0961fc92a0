"""Client text that looks like special tokens must stay text, whole and in parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mm_plugin.errors import RequestError

if TYPE_CHECKING:
    from mm_plugin.processor.processor import Processor


def sweep_provenance(
    processor: Processor, *, media: Any = None, rounds: int = 100, seed: int = 0, may_refuse: bool = False
) -> int:
    """Process chat messages full of special and added tokens, whole and in parts; all of it must stay text.

    Args:
        processor: an open processor whose tokenizer has a chat template.
        media: an image that is sent with every other message; no message has one where None.
        rounds: random messages to try, in addition to one for each added token.
        seed: of the random messages.
        may_refuse: whether a message may be refused with a `RequestError`, for tokenizers that cannot encode a token as text.

    Returns:
        How many messages were refused.

    Raises:
        AssertionError: text became a special token, or ordinary text got other ids than the tokenizer's own.
    """
    tokenizer = processor.checkpoint.tokenizer
    # Added tokens of whitespace are how a tokenizer cuts ordinary text, and the unknown token is what it lacks.
    added = {
        token: index
        for token, index in tokenizer.get_added_vocab().items()
        if token.strip(" \t\r\n▁") and token != tokenizer.unk_token
    }
    protected = np.array(sorted(set(added.values()) | set(processor.special_tokens.placeholders.values())))
    chooser = random.Random(seed)  # noqa: S311 - random texts, not secrets
    halves = [part for token in added for part in (token[: len(token) // 2], token[len(token) // 2 :])]
    pieces = [*added, *halves, "\n", "\n\n", " ", "word", "  two", "é", "\u2028", "\uff11", "<", "|", ">"]
    texts = [[token] for token in added]
    texts += [chooser.choices(pieces, k=chooser.randint(1, 6)) for _ in range(rounds)]
    refused = 0
    for index, parts in enumerate(texts):
        images = [media] if media is not None and index % 2 else []
        messages, plain = _messages(parts, bool(images)), _messages(["x"] * len(parts), bool(images))
        own = processor.process(plain, images)
        try:
            found = processor.process(messages, images)
        except RequestError:
            assert may_refuse, f"message {index} was refused: {parts!r}"
            refused += 1
            continue
        tried = f"message {index}: {parts!r}"
        left, right = (ids[np.isin(ids, protected)] for ids in (found.input_ids, own.input_ids))
        assert np.array_equal(left, right), f"{tried} became a token of the model"
        assert len(found.mm_items) == len(images), f"{tried} became a placeholder of a media input"
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = np.asarray(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if not images and np.array_equal(ids[np.isin(ids, protected)], right):
            assert np.array_equal(found.input_ids, ids), f"{tried} got other ids than the tokenizer's own"
    return refused


def _messages(texts: Sequence[str], with_image: bool) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if with_image:
        content.insert(len(content) // 2, {"type": "image"})
    return [{"role": "user", "content": content}]
