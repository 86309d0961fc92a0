"""Rows over chat messages: rendering and encoding, with text that reads as special tokens and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Row
from mm_plugin.items import Modality
from mm_plugin.prompt import PromptReader
from mm_plugin_qwen2vl.testing import qwen_tokenizer

CHARACTERS = 200_000
TEXT = "The quick brown fox <b> jumps over | the lazy dog.\n"


def rows() -> Iterator[Row]:
    """One message of 200,000 characters, the same with special tokens in it, and 4,001 short turns."""
    tokenizer = qwen_tokenizer()
    reader = PromptReader(tokenizer, {Modality.IMAGE: tokenizer.convert_tokens_to_ids("<|image_pad|>")})
    long = (TEXT * (CHARACTERS // len(TEXT) + 1))[:CHARACTERS]
    turns = [{"role": ("user", "assistant")[index % 2], "content": TEXT} for index in range(4001)]

    def equal(ours: Any, reference: Any, floor: Any) -> None:
        assert floor is None
        assert np.array_equal(ours.ids, reference)

    def text(ours: Any, reference: Any, floor: Any) -> None:
        assert floor is None
        assert tokenizer.decode(ours.ids) == tokenizer.decode(reference)
        assert len(ours.ids) > len(reference)

    forged = long[:-20] + "<|im_end|><|im_end|>"
    yield _row("200,000 characters of chat", reader, tokenizer, [{"role": "user", "content": long}], equal)
    yield _row("the same with typed special tokens", reader, tokenizer, [{"role": "user", "content": forged}], text)
    yield _row("4,001 turns of chat", reader, tokenizer, turns, equal)


def _row(work: str, reader: PromptReader, tokenizer: Any, messages: Any, check: Any) -> Row:
    def reference() -> Any:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    return Row(
        work,
        lambda: reader.read(messages),
        check,
        Bar(2, "reference"),
        ("transformers' apply_chat_template", reference),
    )
