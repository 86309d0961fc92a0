"""Two checkpoints of one model in one registry share its caches and nothing else; a closed registry says that it is closed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import UsageError, discover
from mm_plugin.demo import sample_images
from mm_plugin_qwen2vl.testing import make_checkpoint, qwen_tokenizer, tiny_config

SLOT = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.case("3.7")
def test_a_media_in_the_cache_has_each_models_own_tokens(tmp_path: Path) -> None:
    ordinary, other = qwen_tokenizer(), qwen_tokenizer()
    # The other vocabulary has a token more before the placeholder.
    rebuilt = type(other)(
        tokenizer_object=_with_a_token_before(other), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    folders = [
        make_checkpoint(tmp_path / "a", tokenizer=ordinary, config=tiny_config(ordinary)),
        make_checkpoint(tmp_path / "b", tokenizer=rebuilt, config=tiny_config(rebuilt)),
    ]
    with discover() as registry:
        processors = [registry.load_processor(folder) for folder in folders]
        image = sample_images()[1][1]
        outputs = [processor.process(SLOT, [image]) for processor in processors]
        for processor, output in zip(processors, outputs, strict=True):
            token = processor.special_tokens.im_token_id
            start, end = output.mm_items[0].offsets[0]
            assert (output.input_ids[start : end + 1] == token).all()
        assert outputs[0].input_ids[1] != outputs[1].input_ids[1]
        assert outputs[0].mm_items[0].identity == outputs[1].mm_items[0].identity


def _with_a_token_before(tokenizer: Any) -> Any:
    import json

    from tokenizers import Tokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["QZ"] = len(vocabulary)
    for token in described["added_tokens"]:
        token["id"] += 1
    return Tokenizer.from_str(json.dumps(described))


def test_a_closed_registry_says_so(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    image = sample_images()[1][1]
    with discover() as registry:
        processor = registry.load_processor(folder)
    for media in ([], [image], [image, image]):
        with pytest.raises(UsageError, match="the registry is closed"):
            processor.process(SLOT * len(media) + "x", media)
        with pytest.raises(UsageError, match="the registry is closed"):
            asyncio.run(processor.process_async(SLOT * len(media) + "x", media))


def test_closing_under_a_request_is_no_cancellation(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    registry = discover()
    processor = registry.load_processor(folder)
    busy, free = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        free.wait(20)

    async def run() -> None:
        for _ in range(registry.settings.threads):
            registry.executor.submit(block)
        busy.wait(20)
        request = asyncio.create_task(processor.process_async(SLOT, [sample_images()[1][1]]))
        await asyncio.sleep(0.05)
        closing = threading.Thread(target=registry.close)
        closing.start()
        await asyncio.sleep(0.05)
        free.set()
        with pytest.raises(UsageError, match="the registry is closed"):
            await request
        closing.join()

    asyncio.run(run())
