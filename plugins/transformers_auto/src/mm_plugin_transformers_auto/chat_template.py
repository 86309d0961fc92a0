"""Start and end tokens of media inputs, found by rendering a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mm_plugin_transformers_auto.traits import ModalityTraits


def token_pairs(tokenizer: Any, template: str | None, traits: Iterable[ModalityTraits]) -> tuple[tuple[str, str], ...]:
    """The (start, end) tokens that the template writes around media inputs but not around text in their place."""
    found = []
    for one in traits if template is not None else ():
        start, end = _around(tokenizer, template, {"type": one.modality.name.lower()}, one.placeholder)
        text_start, text_end = _around(tokenizer, template, {"type": "text", "text": "x"}, "x")
        if start and end and start != text_start and end != text_end:
            found.append((start, end))
    return tuple(found)


def _around(tokenizer: Any, template: str | None, part: Mapping[str, str], word: str) -> tuple[str, str]:
    """The added tokens directly before and after the word that a template writes for a content part; empty if there are none."""
    try:
        messages = [{"role": "user", "content": [part]}]
        text = str(
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        )
    except Exception:  # a template may refuse such a message with any error; then it shows no pairs
        return "", ""
    before, found, after = text.partition(word)
    added = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True) if found else []
    start = next((token for token in added if before.endswith(token)), "")
    return start, next((token for token in added if after.startswith(token)), "")
