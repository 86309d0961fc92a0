"""Whole requests of chat messages: what a caller says beside them, and how many tokens of the prompt are what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import toy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mm_plugin import AudioSamples, LimitError, Modality, MultimodalProcessorOutput, Processor, RequestError, UsageError
from mm_plugin.inputs import PromptUsage
from mm_plugin.wire import decode, encode

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% for message in messages %}[start]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}"
    "{% endfor %}{% endif %}[end]{% endfor %}{% if add_generation_prompt %}[start]{% endif %}"
)
SPEC = toy.toy_spec(*Modality, name="chatty")


def byte_tokenizer(template: Any) -> PreTrainedTokenizerFast:
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("[start]", "[end]", *toy.TOKENS.values())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


Open = Callable[..., Processor]


@pytest.fixture
def open_chatty(make_runtime: Callable[..., Any]) -> Open:
    def make(template: Any = TEMPLATE, **limits: Any) -> Processor:
        checkpoint: Any = toy.ToyCheckpoint(byte_tokenizer(template), config={"vocab_size": 300})
        return Processor(toy.PlainToy, SPEC, checkpoint, make_runtime(**limits), {}, owner=toy.owner_of(SPEC))

    return make


def text_of(processor: Processor, output: MultimodalProcessorOutput) -> str:
    return str(processor.checkpoint.tokenizer.decode(output.input_ids))


ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("run_async", [False, True])
def test_tools_and_documents_reach_the_template(open_chatty: Open, run_async: bool) -> None:
    processor = open_chatty()
    arguments: dict[str, Any] = {
        "tools": [{"name": "f", "x": [1, None]}],
        "documents": [{"title": "t", "text": "[end]"}],
    }
    asked = processor.process_async(ASK, **arguments) if run_async else None
    found = processor.process(ASK, **arguments) if asked is None else asyncio.run(asked)
    assert text_of(processor, found) == (
        json.dumps(arguments["tools"]) + json.dumps(arguments["documents"]) + "[start]hi[end][start]"
    )
    assert found.input_ids.tolist().count(processor.checkpoint.tokenizer.convert_tokens_to_ids("[end]")) == 1


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": {"name": "f"}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"documents": [{}, "x"]}, "documents[1]"),
        ({"documents": [{"text": "\ud800"}]}, "documents[0]"),
        ({"tools": [{"x": json.loads("[" * 100 + "]" * 100)}]}, "tools[0]"),
    ],
    ids=repr,
)
def test_malformed_tools_and_documents_are_refused_by_their_path(
    open_chatty: Open, arguments: dict[str, Any], path: str
) -> None:
    with pytest.raises(RequestError) as caught:
        open_chatty().process(ASK, **arguments)
    assert caught.value.path == path


@pytest.mark.parametrize("name", ["tools", "documents", "chat_template", "continue_final_message"])
@pytest.mark.parametrize("prompt", ["text", [1, 2]], ids=["text", "ids"])
def test_only_messages_can_have_them(open_chatty: Open, prompt: Any, name: str) -> None:
    value: Any = {"tools": [], "documents": [], "chat_template": "default", "continue_final_message": False}[name]
    with pytest.raises(UsageError, match="only a prompt of chat messages") as caught:
        open_chatty().process(prompt, **{name: value})
    assert caught.value.argument == name


@pytest.mark.parametrize("arguments", [{"chat_template": 5}, {"continue_final_message": "yes"}], ids=str)
def test_arguments_of_another_type_are_the_servers_fault(open_chatty: Open, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        open_chatty().process(ASK, **arguments)
    assert caught.value.argument in arguments


def test_a_named_template_is_chosen_by_the_caller(open_chatty: Open) -> None:
    processor = open_chatty({"default": TEMPLATE, "rag": "[start]rag {{ messages[0].content }}"})
    assert text_of(processor, processor.process(ASK, chat_template="rag")) == "[start]rag hi"
    assert text_of(processor, processor.process(ASK)) == "[start]hi[end][start]"


@pytest.mark.parametrize("given", [None, True, False])
def test_an_answer_at_the_end_is_continued_unless_the_caller_says_otherwise(
    open_chatty: Open, given: bool | None
) -> None:
    processor = open_chatty()
    messages = [*ASK, {"role": "assistant", "content": "well "}]
    wanted = "[start]hi[end][start]well [end][start]" if given is False else "[start]hi[end][start]well "
    assert text_of(processor, processor.process(messages, continue_final_message=given)) == wanted


@pytest.mark.parametrize("template", [None, "{% if %}", {"a": "x"}], ids=["none", "broken", "no default"])
def test_a_checkpoint_without_a_usable_template_serves_text_and_ids(open_chatty: Open, template: Any) -> None:
    processor = open_chatty(template)
    image = toy.img(height=2)
    assert len(processor.process("a<image>", [image]).input_ids) == 3
    ids = processor.process("a<image>", [image]).input_ids
    assert np.array_equal(processor.process(ids, [image], expanded=True).input_ids, ids)
    with pytest.raises(UsageError, match=r"^checkpoint: "):
        processor.process(ASK)


def test_a_rendering_within_bounds_names_the_setting(open_chatty: Open) -> None:
    processor = open_chatty(max_rendered_chars=40)
    processor.process(ASK)
    with pytest.raises(LimitError, match="characters of rendered messages") as caught:
        processor.process([{"role": "user", "content": "a" * 41}])
    assert (caught.value.setting, caught.value.limit) == ("max_rendered_chars", 40)


def test_the_output_says_how_many_tokens_are_what(open_chatty: Open) -> None:
    processor = open_chatty()
    content = [
        {"type": "image"},
        {"type": "text", "text": "ab"},
        {"type": "audio"},
        {"type": "image"},
        {"type": "video"},
    ]
    video = np.stack([toy.img(seed) for seed in range(5)])
    audio = AudioSamples(np.zeros(7, np.float32), toy.RATE)
    found = processor.process(
        [{"role": "user", "content": content}],
        [toy.img(height=2), toy.img(height=4)],
        [toy_video(video)],
        [audio],
    )
    # [start] a b [end] [start]; rows of both images; frames; samples.
    assert found.usage == PromptUsage(text=5, image=6, video=5, audio=7)
    assert found.usage.total == len(found.input_ids) == 23
    again = decode(encode(found))
    assert again.usage == found.usage
    text = processor.process("abc")
    assert text.usage == PromptUsage(text=3)


def toy_video(frames: np.ndarray) -> Any:
    from mm_plugin import VideoFrames

    return VideoFrames(list(frames), fps=1.0)


def test_usage_counts_what_stays_of_a_shortened_prompt(open_chatty: Open) -> None:
    processor = open_chatty()
    found = processor.process(
        "<image>abc<image>", [toy.img(height=9), toy.img(height=4)], max_prompt_tokens=8, on_overflow="drop_oldest"
    )
    assert found.dropped == ("images[0]",)
    assert found.usage == PromptUsage(text=3, image=4)
