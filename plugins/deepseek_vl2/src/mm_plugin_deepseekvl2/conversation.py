"""DeepSeek-VL2's tokenizer and conversation format. Released folders lack its special tokens and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from mm_plugin import Checkpoint, RequestError, UsageError
from mm_plugin.prompt import SEGMENT_BREAK, encode_rendered

IMAGE = "<image>"
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
# Their order gives them their ids: the model's own processor adds those that a vocabulary lacks one after another.
ADDED_TOKENS = (IMAGE, "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", USER, ASSISTANT)
PAD = "<｜▁pad▁｜>"
# In chat messages a role is a client's word; in a conversation that the caller trusts it may be the model's token.
_ROLES = {USER: "user", ASSISTANT: "assistant"}

# A question and the start of its answer are tokenized together, an answer separately and followed by eos. An image part is the
# placeholder and a newline, as in the model's training data, unless the text that follows begins with a newline.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set ns = namespace(text='') %}"
    "{% if message['content'] is string %}{% set ns.text = message['content'] %}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{% set ns.text = ns.text + part['text'] %}"
    "{% elif part['type'] == 'image' and message['role'] == 'user' %}"
    "{% set ns.text = ns.text + '" + IMAGE + "' %}"
    "{% if loop.nextitem is not defined or not loop.nextitem.get('text', '').startswith('\n') %}"
    "{% set ns.text = ns.text + '\n' %}{% endif %}"
    "{% else %}{{ raise_exception('only a user sends images, and nothing but images and text') }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ '" + USER + ": ' + ns.text.strip() + '\n\n' }}"
    "{% if add_generation_prompt or not loop.last %}{{ '" + ASSISTANT + ":' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '" + SEGMENT_BREAK + "' + ns.text.strip() }}"
    "{% if not (add_generation_prompt and loop.last) %}{{ eos_token }}{% endif %}"
    "{% elif message['role'] == 'system' and loop.first %}{{ ns.text.strip() }}"
    "{% else %}{{ raise_exception('a role is user, assistant, or system in the first message') }}{% endif %}"
    "{% endfor %}"
)


def open_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """The tokenizer of tokenizer.json, with the tokens that the model's own processor adds.

    `AutoTokenizer`, and the classes that tokenizer_config.json names, construct different tokenizers from the same vocabulary.
    Plain text gets a bos token; a rendered chat template has it already.

    Args:
        checkpoint: the opened checkpoint.

    Raises:
        UsageError: tokenizer.json is missing, or tokenizer_config.json lacks a bos or an eos token.
    """
    if not (checkpoint.folder / "tokenizer.json").is_file():
        raise UsageError(f"{checkpoint.folder}/tokenizer.json is missing", argument="checkpoint")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(checkpoint.folder))
    for name in ("bos_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise UsageError(f"{checkpoint.folder}/tokenizer_config.json has no {name}", argument="checkpoint")
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": checkpoint.read_json("processor_config.json").get("pad_token", PAD)})
    tokenizer.add_tokens(list(ADDED_TOKENS), special_tokens=True)
    bos = (str(tokenizer.bos_token), int(tokenizer.bos_token_id))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos[0], "$A"], pair=[bos[0], "$A", "$B"], special_tokens=[bos]
    )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def conversation_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, inference_mode: bool = True
) -> np.ndarray:
    """Ids of a conversation whose special tokens the caller trusts, for `process(ids, images)`.

    In chat messages passed to `process`, whatever a user typed stays text. Here, `<image>`, `<|ref|>`, `<|grounding|>` and the
    like in contents are the model's tokens, as in the conversations that its own processor takes.

    Args:
        tokenizer: of a `DeepseekVL2Processor`'s checkpoint.
        messages: objects with a role (`<|User|>`, `<|Assistant|>`, `user`, `assistant`, first also `system`) and a content.
        inference_mode: whether an answer is to be generated; if not, the last answer ends with eos, as for training.

    Shape:
        returns [n] int64, unexpanded.

    Raises:
        RequestError: a message has no text, or text that cannot be encoded; a role is unknown; an answer contains an image.
    """
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise RequestError(
                f"messages[{index}]: expected an object with a role and text as its content",
                path=f"messages[{index}]",
            )
        if message.get("role") in ("assistant", ASSISTANT) and IMAGE in content:
            raise RequestError(f"messages[{index}]: an answer must not contain {IMAGE}", path=f"messages[{index}]")
    try:
        text = tokenizer.apply_chat_template(
            [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages],
            chat_template=CHAT_TEMPLATE,
            tokenize=False,
            add_generation_prompt=inference_mode,
        )
        return encode_rendered(tokenizer, text)
    except Exception as error:
        raise RequestError(
            f"messages: refused by the conversation format ({type(error).__name__}: {error})", path="messages"
        ) from error
