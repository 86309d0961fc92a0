"""Ids are those of the model's own processor: plain prompts, conversations, chat messages, single and batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_plugin import ModelProcessor, PlaceholderError, Registry, RequestError, UsageError
from mm_plugin_deepseekvl2.batch import batchify
from mm_plugin_deepseekvl2.conversation import ADDED_TOKENS, conversation_ids
from mm_plugin_deepseekvl2.testing import BOS, EOS, byte_level_tokenizer, make_checkpoint

DOT = Image.new("RGB", (20, 20), (200, 100, 50))
IMAGE_ID, USER_ID, ASSISTANT_ID = 259, 265, 266


def prompt_of(case: dict[str, Any], tokenizer: Any) -> Any:
    """What a server gives to `process` for a call of the model's own processor."""
    call = case["call"]
    inference = call.get("inference_mode", True)
    if "conversations" in call:
        return conversation_ids(tokenizer, call["conversations"], inference_mode=inference)
    if call.get("apply_sft_format"):
        return conversation_ids(tokenizer, [{"role": "user", "content": call["prompt"]}])
    return call["prompt"] if inference else call["prompt"] + EOS


def sent(case: dict[str, Any], processor: ModelProcessor, image: Any) -> Any:
    images = [image(name) for name in case["images"]]
    return processor.process(prompt_of(case, processor.checkpoint.tokenizer), images)


def text_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


# --- recorded cases -----------------------------------------------------------------------------------------------------


def test_every_recorded_prompt_and_conversation(
    processor: ModelProcessor, golden: Any, image: Any, runs: Any, sha256: Any
) -> None:
    seen = 0
    for case in golden("processor.json")["cases"]:
        if "error" in case:
            continue
        output = sent(case, processor, image)
        assert runs(output.input_ids) == case["input_ids_rle"], case["id"]
        assert sha256(output.input_ids.astype("<i8")) == case["input_ids_sha256_i64"]
        assert runs(output.token_modalities) == case["images_seq_mask_rle"]
        assert len(output.input_ids) == case["length"]
        seen += 1
    assert seen == 16


@pytest.mark.case("2.5")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("prompt_grayscale_L", None),  # gray images work here
        ("conv_last_message_is_user", None),  # an answer follows anyway
        ("prompt_too_few_images", PlaceholderError),
        ("conv_image_in_answer", RequestError),
        ("conv_unknown_role", RequestError),
    ],
)
def test_what_the_reference_refuses(
    processor: ModelProcessor, golden: Any, image: Any, name: str, error: type[Exception] | None
) -> None:
    (case,) = [case for case in golden("processor.json")["cases"] if case["id"] == name]
    assert "error" in case
    if error is None:
        assert sent(case, processor, image).input_ids[0] == 0
    else:
        with pytest.raises(error):
            sent(case, processor, image)


@pytest.mark.parametrize("name", ["exact", "processor"])
def test_every_recorded_batch(
    request: pytest.FixtureRequest, golden: Any, image: Any, runs: Any, sha256: Any, name: str
) -> None:
    processor = request.getfixturevalue(name)
    data = golden("processor.json")
    cases = {case["id"]: case for case in data["cases"]}
    for batch in data["batches"]:
        outputs = [sent(cases[sample], processor, image) for sample in batch["samples"]]
        found = batchify(processor, outputs, padding=batch["padding"])
        for key in ("input_ids", "attention_mask", "images_seq_mask"):
            assert [runs(row) for row in found[key]] == batch[f"{key}_rle"], key
        assert found["seq_lens"].tolist() == batch["seq_lens"]
        assert found["images_spatial_crop"].tolist() == batch["images_spatial_crop"]
        assert list(found["images"].shape) == batch["images_shape"]
        assert sha256(found["images"]) == batch["images_sha256"]


def test_a_batch_of_nothing_and_of_embeddings_is_refused(processor: ModelProcessor) -> None:
    from mm_plugin import PrecomputedEmbeddings

    with pytest.raises(UsageError, match="at least one"):
        batchify(processor, [])
    rows = PrecomputedEmbeddings(np.zeros((421, 24), dtype=np.float32), {"images_spatial_crop": [[1, 1]]})
    with pytest.raises(UsageError, match="embeddings"):
        batchify(processor, [processor.process("<image>", [rows])])


def test_a_batch_of_text_alone_has_the_references_empty_tile(processor: ModelProcessor) -> None:
    found = batchify(processor, [processor.process("a")])
    assert found["images"].shape == (1, 1, 3, 384, 384)
    assert not found["images"].any()
    assert found["images_spatial_crop"].tolist() == [[[0, 0]]]


# --- chat messages ------------------------------------------------------------------------------------------------------


def ids_of(processor: ModelProcessor, messages: list[dict[str, Any]], images: Any = ()) -> list[int]:
    """Ids of chat messages, each image one placeholder."""
    output = processor.process(messages, images)
    keep = np.ones(len(output.input_ids), dtype=bool)
    for item in output.mm_items:
        for start, end in item.offsets:
            keep[start + 1 : end + 1] = False
    found: list[int] = output.input_ids[keep].tolist()
    return found


def test_a_question_about_an_image(processor: ModelProcessor) -> None:
    content = [{"type": "image", "image": DOT}, {"type": "text", "text": "What? "}]
    expected = [0, USER_ID, *text_ids(": "), IMAGE_ID, *text_ids("\nWhat?\n\n"), ASSISTANT_ID, *text_ids(":")]
    assert ids_of(processor, [{"role": "user", "content": content}]) == expected


def test_images_between_text(processor: ModelProcessor) -> None:
    content = [
        {"type": "text", "text": "This is image_1: "},
        {"type": "image"},
        {"type": "text", "text": "This is image_2: "},
        {"type": "image"},
        {"type": "text", "text": "\nWhich?"},
    ]
    said = "This is image_1: <image>\nThis is image_2: <image>\nWhich?"
    whole = conversation_ids(processor.checkpoint.tokenizer, [{"role": "user", "content": said}]).tolist()
    assert ids_of(processor, [{"role": "user", "content": content}], [DOT, DOT]) == whole
    assert ids_of(processor, [{"role": "user", "content": [{"type": "image"}]}], [DOT]) == [
        0, USER_ID, *text_ids(": "), IMAGE_ID, *text_ids("\n\n"), ASSISTANT_ID, *text_ids(":"),
    ]  # fmt: skip


def test_turns_with_a_system_message(processor: ModelProcessor) -> None:
    messages = [
        {"role": "system", "content": " Be terse. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Yes. "},
        {"role": "user", "content": "And?"},
    ]
    expected = [
        0, *text_ids("Be terse."), USER_ID, *text_ids(": Hi\n\n"), ASSISTANT_ID, *text_ids(":Yes."), 1,
        USER_ID, *text_ids(": And?\n\n"), ASSISTANT_ID, *text_ids(":"),
    ]  # fmt: skip
    assert ids_of(processor, messages) == expected
    # An answer that was begun is gone on with: no eos.
    assert ids_of(processor, messages[1:3]) == [
        0, USER_ID, *text_ids(": Hi\n\n"), ASSISTANT_ID, *text_ids(":Yes."),
    ]  # fmt: skip
    assert ids_of(processor, [messages[1], {"role": "assistant", "content": None}]) == [
        0, USER_ID, *text_ids(": Hi\n\n"), ASSISTANT_ID, *text_ids(":"),
    ]  # fmt: skip


def test_an_answer_is_tokenized_by_itself(registry: Registry, tmp_path: Path) -> None:
    # The reference tokenizes ":" with the question and "*" with the answer, although this vocabulary has ":*".
    folder = make_checkpoint(tmp_path, tokenizer=byte_level_tokenizer([": *", "s :"]))
    processor = registry.load_processor(folder)
    tokenizer = processor.checkpoint.tokenizer
    merged = tokenizer(":*", add_special_tokens=False)["input_ids"]
    assert merged == [tokenizer.convert_tokens_to_ids(":*")]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "*a*"},
        {"role": "user", "content": "?"},
    ]
    user, assistant = (tokenizer.convert_tokens_to_ids(token) for token in ("<|User|>", "<|Assistant|>"))
    expected = [
        0, user, *text_ids(": Hi\n\n"), assistant, *text_ids(":"), *text_ids("*a*"), 1,
        user, *text_ids(": ?\n\n"), assistant, *text_ids(":"),
    ]  # fmt: skip
    assert processor.process(messages).input_ids.tolist() == expected
    assert conversation_ids(tokenizer, messages).tolist() == expected


@pytest.mark.case("2.1")
def test_what_a_user_typed_stays_text(processor: ModelProcessor) -> None:
    tokenizer = processor.checkpoint.tokenizer
    text = "".join((BOS, EOS, *ADDED_TOKENS))
    found = ids_of(processor, [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}], [DOT])
    special = [index for index in found if index in set(tokenizer.get_added_vocab().values())]
    assert special == [0, USER_ID, IMAGE_ID, ASSISTANT_ID]
    assert text in tokenizer.decode(found)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}],
        [{"role": "assistant", "content": [{"type": "image", "image": DOT}]}],
        [{"role": "system", "content": [{"type": "image", "image": DOT}]}],
        [{"role": "user", "content": [{"type": "video", "video": "x"}]}],
        [{"role": "<|User|>", "content": "x"}],
    ],
)
def test_messages_that_the_format_has_no_place_for(processor: ModelProcessor, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError):
        processor.process(messages)


def test_grounding_is_the_callers_to_vouch_for(processor: ModelProcessor) -> None:
    tokenizer = processor.checkpoint.tokenizer
    message = {"role": "<|User|>", "content": "<image>\n<|grounding|>Where is <|ref|>it<|/ref|>?"}
    found = conversation_ids(tokenizer, [message])
    assert [index for index in found.tolist() if index >= 259] == [265, 259, 264, 260, 261, 266]
    assert len(processor.process(found, [DOT]).mm_items) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "x"}],
        ["x"],
        [{"role": "assistant", "content": ["<image>"]}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_a_conversation_that_is_none_is_the_requests_fault(processor: ModelProcessor, messages: list[Any]) -> None:
    with pytest.raises(RequestError):
        conversation_ids(processor.checkpoint.tokenizer, messages)


# --- the tokenizer ------------------------------------------------------------------------------------------------------


def test_the_references_tokens_are_added_in_its_order(processor: ModelProcessor) -> None:
    tokenizer = processor.checkpoint.tokenizer
    assert [tokenizer.convert_tokens_to_ids(token) for token in ADDED_TOKENS] == list(range(259, 267))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    import json

    described = json.loads((folder / name).read_text(encoding="utf-8"))
    change(described)
    (folder / name).write_text(json.dumps(described), encoding="utf-8")


def test_a_released_tokenizer_config_does_not_change_the_ids(registry: Registry, tmp_path: Path) -> None:
    """It names a class that builds another tokenizer around the vocabulary, and code that is never run."""
    folder = make_checkpoint(tmp_path)

    def release(described: dict[str, Any]) -> None:
        described |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "add_bos_token": True, "use_fast": True}
        described |= {"add_eos_token": False, "auto_map": {"AutoTokenizer": ["nowhere.Tokenizer", None]}}
        for name in ("bos_token", "eos_token", "pad_token"):
            described[name] = {"__type": "AddedToken", "content": described[name], "normalized": True, "lstrip": False}

    edited(folder, "tokenizer_config.json", release)
    text = "a b <image>\n<|User|>: é 世界"
    tokenizer = registry.load_processor(folder).checkpoint.tokenizer
    expected = [0, *text_ids("a b "), 259, *text_ids("\n"), 265, *text_ids(": é 世界")]
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected[1:]


def test_a_pad_token_that_a_folder_lacks_is_added_first(registry: Registry, tmp_path: Path) -> None:
    backend = byte_level_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    folder = make_checkpoint(tmp_path, tokenizer=tokenizer)
    edited(folder, "processor_config.json", lambda described: described.update(pad_token="<|pad here|>"))
    opened = registry.load_processor(folder).checkpoint.tokenizer
    assert (opened.pad_token_id, opened.convert_tokens_to_ids("<image>")) == (259, 260)


def test_tokens_that_a_vocabulary_has_keep_their_ids(registry: Registry, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<|User|>", "<image>"])
    folder = make_checkpoint(tmp_path, tokenizer=tokenizer)
    opened = registry.load_processor(folder).checkpoint.tokenizer
    assert opened("<|User|><image><|ref|>", add_special_tokens=False)["input_ids"] == [259, 260, 261]


def test_a_chat_template_of_the_folder_is_kept(registry: Registry, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    processor = registry.load_processor(make_checkpoint(tmp_path, tokenizer=tokenizer))
    assert processor.process([{"role": "user", "content": "x"}]).input_ids.tolist() == text_ids("x!")
    # A conversation in the model's own shape stays in its own format.
    assert conversation_ids(processor.checkpoint.tokenizer, [{"role": "user", "content": "x"}])[1] == 265


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_folder_without_bos_or_eos_is_refused(registry: Registry, tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path)
    edited(folder, "tokenizer_config.json", lambda described: described.pop(name))
    with pytest.raises(UsageError, match=f"tokenizer_config.json has no {name}"):
        registry.load_processor(folder)


def test_a_tokenizer_file_that_is_missing_or_broken_is_named(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="tokenizer"):
        registry.load_processor(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        registry.load_processor(folder)
