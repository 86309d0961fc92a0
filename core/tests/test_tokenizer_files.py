"""Which chat template of a checkpoint counts, and which file a tokenizer that cannot be opened fails at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mm_plugin import Checkpoint, UsageError
from mm_plugin.testing import byte_level_tokenizer
from mm_plugin.tokenizer_files import find_chat_templates

OWN = "tokenizer {{ messages }}"


def folder_with(folder: Path, files: dict[str, Any], template: Any = OWN) -> Path:
    byte_level_tokenizer(["<|end|>"], chat_template=template).save_pretrained(folder, save_jinja_files=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
FOUND: list[tuple[str, dict[str, Any], Any, dict[str, str]]] = [
    ("the tokenizer's", {}, OWN, {"default": OWN}),
    ("none", {}, None, {}),
    ("several of the tokenizer", {}, {"default": "a", "rag": "b"}, {"default": "a", "rag": "b"}),
    ("chat_template.json", {"chat_template.json": {"chat_template": "j"}}, OWN, {"default": "j"}),
    ("chat_template.jinja", {"chat_template.jinja": "{{ 'é' }}"}, OWN, {"default": "{{ 'é' }}"}),
    (
        "json before jinja",
        {"chat_template.json": {"chat_template": "j"}, "chat_template.jinja": "k"},
        OWN,
        {"default": "j"},
    ),
    (
        "additional ones",
        {"chat_template.jinja": "k", "additional_chat_templates/tool_use.jinja": "t"},
        OWN,
        {"default": "k", "tool_use": "t"},
    ),
    ("additional ones alone", {"additional_chat_templates/rag.jinja": "r"}, OWN, {"rag": "r"}),
    (
        "processor_config.json",
        {"processor_config.json": {"chat_template": "p"}, "chat_template.jinja": "k"},
        OWN,
        {"default": "p"},
    ),
    (
        "null is absent",
        {"processor_config.json": {"chat_template": None}, "chat_template.jinja": "k"},
        OWN,
        {"default": "k"},
    ),
    ("a list", {"chat_template.json": {"chat_template": NAMED}}, OWN, {"default": "a", "tool_use": "b"}),
]


@pytest.mark.parametrize(("case", "files", "template", "wanted"), FOUND, ids=[case[0] for case in FOUND])
def test_files_of_their_own_come_before_the_tokenizer(
    case: str, files: dict[str, Any], template: Any, wanted: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(folder_with(tmp_path, files, template))
    assert checkpoint.chat_templates() == wanted


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"chat_template.json": "{"}, "chat_template.json"),
        ({"chat_template.json": "[1]"}, "chat_template.json"),
        ({"chat_template.json": {"chat_template": 5}}, "chat_template.json"),
        ({"chat_template.json": {"other": "x"}}, "chat_template.json"),
        ({"chat_template.json": {"chat_template": "j"}, "additional_chat_templates/a.jinja": "t"}, "found both"),
    ],
    ids=str,
)
def test_a_template_file_that_cannot_be_read_is_named(files: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, files)
    with pytest.raises(UsageError, match=named) as caught:
        find_chat_templates(folder, None)
    assert str(folder) in caught.value.message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "Nothing"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"[1]"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_opened_names_its_file(name: str, content: bytes, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / name).write_bytes(content)
    with pytest.raises(Exception):  # noqa: B017 - transformers raises what it likes
        AutoTokenizer.from_pretrained(folder)
    with pytest.raises(UsageError) as caught:
        Checkpoint.open(folder).tokenizer  # noqa: B018 - opening it is what fails
    assert caught.value.message.startswith(f"{folder / name}: ")
    assert caught.value.argument == "checkpoint"


def test_a_folder_without_a_tokenizer_says_which_file_it_expects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(
        UsageError, match=r"expected a tokenizer in tokenizer.json or tokenizer.model, found none of them"
    ):
        Checkpoint.open(tmp_path).tokenizer  # noqa: B018 - opening it is what fails
