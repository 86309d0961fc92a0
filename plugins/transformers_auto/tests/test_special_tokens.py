"""Special tokens at the ends of a prompt, as the checkpoint's own processor has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from mm_plugin import Registry, Settings, discover

Get = Callable[[str], Any]


@pytest.fixture
def fresh_registry() -> Any:
    with discover(Settings(threads=2)) as found:
        yield found


@pytest.mark.parametrize("prompt", ["<image> a", "a<image>", "<bos>a<image>", "a"])
@pytest.mark.parametrize("decides", [None, False, True])
def test_a_text_gets_those_that_the_class_of_the_processor_lets_the_tokenizer_add(
    decides: bool | None,
    prompt: str,
    checkpoint: Get,
    fresh_registry: Registry,
    make_image: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if decides is not None:
        monkeypatch.setattr(transformers.LlavaProcessor, "text_kwargs", {"add_special_tokens": decides}, raising=False)
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))
    images = [make_image()] if "<image>" in prompt else []
    whole = transformers.AutoProcessor.from_pretrained(folder)(text=[prompt], images=images or None)
    processor = fresh_registry.load_processor(folder, plugin="transformers_auto")
    assert processor.spec.add_special_tokens is decides
    assert processor.process(prompt, images).input_ids.tolist() == list(whole["input_ids"][0])


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_the_template_of_the_processor_comes_before_that_of_the_tokenizer(
    file: str, checkpoint: Get, fresh_registry: Registry, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = "<bos>mine {{ messages[0].content }}"
    (folder / file).write_text(template if file.endswith("jinja") else '{"chat_template": "' + template + '"}')
    messages = [{"role": "user", "content": "a"}]
    reference = transformers.AutoProcessor.from_pretrained(folder)
    processor = fresh_registry.load_processor(folder, plugin="transformers_auto")
    wanted = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert processor.process(messages).input_ids.tolist() == list(wanted["input_ids"][0])
