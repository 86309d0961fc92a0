"""From prompt and images to logits: what comes out is what transformers' whole model makes of the same files."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin import ModelProcessor, MultimodalInputs, MultimodalProcessorOutput, Registry, RequestMedia
from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import Encoder
from mm_plugin.inputs import ForwardBatch
from mm_plugin.testing import CallCounter, embed_in_chunks
from mm_plugin_qwen2vl.testing import PREPROCESSOR, make_checkpoint

PART = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = [(56, 56), (70, 100), (29, 120), (61, 45)]
PROMPTS = {
    0: "the thing is in the other one",
    1: f"{PART}what is this?",
    2: f"see {PART}{PART}",
    3: f"a {PART} then {PART}\n\n{PART}.",
    4: f"{PART}{PART} and {PART} in {PART} the end",
}
SIZE = {"shortest_edge": PREPROCESSOR["min_pixels"], "longest_edge": PREPROCESSOR["max_pixels"]}


def imgs(make_image: Callable[..., Image.Image], count: int) -> list[Image.Image]:
    return [make_image(index, *SIZES[index]) for index in range(count)]


def reference(model: Any, tokenizer: Any, prompt: str, images: Sequence[Image.Image]) -> tuple[torch.Tensor, list[int]]:
    """Logits of transformers' model on a prompt that is expanded by text, with its own pixels and positions."""
    vision: dict[str, Any] = {}
    if images:
        prepared = Qwen2VLImageProcessorPil(size=SIZE)(images=list(images), return_tensors="pt")
        grids = prepared["image_grid_thw"]
        vision = {"pixel_values": prepared["pixel_values"], "image_grid_thw": grids}
        first, *rest = prompt.split("<|image_pad|>")
        parts = ["<|image_pad|>" * (int(grid.prod()) // 4) + text for grid, text in zip(grids, rest, strict=True)]
        prompt = first + "".join(parts)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    token_types = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, mm_token_type_ids=token_types, **vision).logits[0]
    return logits, ids[0].tolist()


def logits_of(model: Any, output: MultimodalProcessorOutput, embeds: torch.Tensor) -> torch.Tensor:
    assert output.mrope_positions is not None
    with torch.no_grad():
        logits: torch.Tensor = model(
            inputs_embeds=embeds[None], position_ids=torch.from_numpy(output.mrope_positions)[:, None]
        ).logits[0]
    return logits


@pytest.mark.parametrize("count", range(5))
def test_logits_equal_transformers(
    count: int,
    pillow: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
) -> None:
    images = imgs(make_image, count)
    output = pillow.process(PROMPTS[count], images)
    expected, ids = reference(model, pillow.checkpoint.tokenizer, PROMPTS[count], images)
    assert output.input_ids.tolist() == ids
    counter = CallCounter(encoder)
    embeds = embed_in_chunks(output, model.get_input_embeddings(), counter.as_mapping(), size=10_000)
    assert counter.calls == ([count] if count else [])
    found = logits_of(model, output, embeds)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    # The comparison can fail: other rows or other positions are far away.
    assert float(expected.std()) > 0.05
    if count:
        without = embeds.clone()
        without[torch.from_numpy(output.token_modalities == 1)] = 0
        assert not torch.allclose(logits_of(model, output, without), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", ["messages", "ids", "files"])
def test_every_way_in_gives_the_same_request(
    kind: str, compact: ModelProcessor, make_image: Callable[..., Image.Image]
) -> None:
    images = imgs(make_image, 2)
    tokenizer = compact.checkpoint.tokenizer
    parts = [{"type": "image", "image": images[0]}, {"type": "text", "text": "and\n\n"}, {"type": "image"}]
    messages: Any = [{"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, parts[1], {"type": "image"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = compact.process(text, images)
    if kind == "messages":
        found = compact.process(messages, images[1:])
    elif kind == "ids":
        found = compact.process(tokenizer(text)["input_ids"], images)
    else:
        files = []
        for image in images:
            file = io.BytesIO()
            image.save(file, "PNG")
            files.append(file.getvalue())
        url = "data:image/png;base64," + base64.b64encode(files[0]).decode()
        found = compact.process(text, [url, files[1]])
    assert np.array_equal(found.input_ids, expected.input_ids)
    assert np.array_equal(found.padded_input_ids, expected.padded_input_ids)
    assert np.array_equal(found.mrope_positions, expected.mrope_positions)
    assert [item.identity for item in found.mm_items] == [item.identity for item in expected.mm_items]
    again = compact.process(expected.input_ids, images, expanded=True)
    assert [item.offsets for item in again.mm_items] == [item.offsets for item in expected.mm_items]
    assert np.array_equal(again.mrope_positions, expected.mrope_positions)


# ------------------------------------------------------------------ chunks


@pytest.fixture(scope="module")
def request_of_three(compact: ModelProcessor, make_image: Callable[..., Image.Image]) -> MultimodalProcessorOutput:
    return compact.process(
        f"{PART}{PART} in the {PART}", [make_image(0, 56, 56), make_image(1, 56, 84), make_image(0, 28, 140)]
    )


def test_every_chunk_size_gives_the_same_bits_from_one_call_held_by_the_cache(
    request_of_three: MultimodalProcessorOutput, encoder: Encoder, model: Any
) -> None:
    table, cache = model.get_input_embeddings(), EmbeddingCache(1 << 24)
    counter = CallCounter(encoder)
    whole = embed_in_chunks(request_of_three, table, counter.as_mapping(), size=10_000, cache=cache)
    assert counter.calls == [3]
    for size in range(1, len(request_of_three.input_ids) + 1):
        chunked = embed_in_chunks(request_of_three, table, counter.as_mapping(), size=size, cache=cache)
        assert torch.equal(chunked, whole), size
    assert counter.calls == [3]


def test_every_chunk_size_of_one_image_gives_the_same_bits_without_a_cache(
    compact: ModelProcessor, encoder: Encoder, model: Any, make_image: Callable[..., Image.Image]
) -> None:
    output = compact.process(f"in {PART} the", [make_image(0, 84, 140)])
    table = model.get_input_embeddings()
    whole = embed_in_chunks(output, table, encoder, size=10_000)
    for size in range(1, len(output.input_ids) + 1):
        counter = CallCounter(encoder)
        chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size)
        assert counter.calls == [1], size
        assert torch.equal(chunked, whole), size


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_an_item_larger_than_the_cache_is_encoded_once(
    size: int, request_of_three: MultimodalProcessorOutput, encoder: Encoder, model: Any
) -> None:
    counter = CallCounter(encoder)
    cache = EmbeddingCache(100)
    embed_in_chunks(request_of_three, model.get_input_embeddings(), counter.as_mapping(), size=size, cache=cache)
    assert sorted(counter.seen) == sorted((item.identity, item.num_tokens) for item in request_of_three.mm_items)
    assert cache.stats().entries == 0


def test_model_ids_and_cache_ids_embed_alike(
    request_of_three: MultimodalProcessorOutput, encoder: Encoder, model: Any
) -> None:
    table, cache = model.get_input_embeddings(), EmbeddingCache(1 << 24)
    results = []
    for ids in (
        request_of_three.padded_input_ids,
        request_of_three.input_ids,
        request_of_three.input_ids.astype(np.int32),
    ):
        media = RequestMedia(MultimodalInputs.from_processor_output(request_of_three))
        batch = ForwardBatch([media], [0], [len(ids)])
        results.append(embed_mm_inputs(torch.from_numpy(ids.copy()), batch, table, encoder, cache).input_embeds)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_two_requests_share_one_call_and_one_image(
    compact: ModelProcessor, encoder: Encoder, model: Any, make_image: Callable[..., Image.Image]
) -> None:
    shared = make_image(0, 56, 84)
    outputs = [
        compact.process(f"a{PART}", [shared]),
        compact.process(f"b{PART}c{PART}", [make_image(1, 56, 56), shared]),
    ]
    media = [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in outputs]
    ids = torch.from_numpy(np.concatenate([output.padded_input_ids for output in outputs]))
    counter = CallCounter(encoder)
    batch = ForwardBatch(media, [0, 0], [len(output.padded_input_ids) for output in outputs])
    result = embed_mm_inputs(ids, batch, model.get_input_embeddings(), counter.as_mapping())
    assert counter.calls == [2]
    rows = result.input_embeds.split(batch.extend_seq_lens)
    (first,) = outputs[0].mm_items[0].offsets
    (second,) = outputs[1].mm_items[1].offsets
    assert torch.equal(rows[0][first[0] : first[1] + 1], rows[1][second[0] : second[1] + 1])


# ------------------------------------------------------------------ a model that was run elsewhere


def word_tokenizer(special: dict[str, int]) -> PreTrainedTokenizerFast:
    """256 words, word n has id n; the special tokens have the ids that the model was run with."""
    names = {
        special["vision_start"]: "<|vision_start|>",
        special["vision_end"]: "<|vision_end|>",
        special["image"]: "<|image_pad|>",
        special["video"]: "<|video_pad|>",
        special["eos"]: "<|im_end|>",
        special["pad"]: "<|endoftext|>",
    }
    vocabulary = {names.get(index, f"w{index}"): index for index in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


@pytest.fixture(scope="module")
def golden_folder(golden: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    described = golden("models.json")["tiny"]
    special = described["special_ids"]
    config = Qwen2VLConfig(
        text_config=described["text_config"],
        vision_config=described["vision_config"],
        image_token_id=special["image"],
        video_token_id=special["video"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
        tie_word_embeddings=described["tie_word_embeddings"],
    )
    folder = tmp_path_factory.mktemp("golden")
    return make_checkpoint(folder, config=config, tokenizer=word_tokenizer(special), seed=20260101)


@pytest.fixture(scope="module")
def golden_model(golden_folder: Path) -> Any:
    return Qwen2VLForConditionalGeneration.from_pretrained(golden_folder, dtype=torch.float32).eval()


def test_the_weights_are_those_of_the_written_rule(golden: Callable[[str], Any], golden_model: Any) -> None:
    described = golden("models.json")["tiny"]
    digest = hashlib.sha256()
    state = golden_model.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + b"\0" + state[name].contiguous().numpy().tobytes())
    assert digest.hexdigest() == described["state_dict_sha256"]
    assert sum(parameter.numel() for parameter in golden_model.parameters()) == described["parameters"]


@pytest.mark.parametrize("name", ["two_images", "image_first_last"])
@pytest.mark.parametrize("rule", ["pillow", "torch"])
def test_rows_positions_and_logits_are_those_that_were_written_down(
    golden: Callable[[str], Any], name: str, rule: str, registry: Registry, golden_folder: Path, golden_model: Any
) -> None:
    (case,) = [case for case in golden("models.json")["tiny"]["cases"] if case["id"] == name]
    arrays = {key.partition(".")[2]: value for key, value in golden("tiny.npz").items() if key.startswith(f"{name}.")}
    processor = registry.load_processor(golden_folder, resize=rule, feature_format="float32")
    encoder = registry.load_encoder(golden_folder)
    files = [base64.b64decode(image) for image in case["images"]]
    pad, ids = processor.special_tokens.im_token_id, arrays["input_ids"].tolist()
    short = [token for index, token in enumerate(ids) if token != pad or ids[index - 1] != pad]
    output = processor.process(short, files)
    assert output.input_ids.tolist() == ids
    assert [item.image_grid_thw.tolist()[0] for item in output.mm_items] == case["image_grid_thw"]
    if rule == "pillow":
        digests = [hashlib.sha256(item.feature.tobytes()).hexdigest() for item in output.mm_items]
        assert digests == case["pixel_values_sha256"]
    assert output.mrope_positions is not None
    assert output.mrope_positions.tolist() == arrays["position_ids"].tolist()
    assert output.mrope_position_delta == case["rope_delta"]
    embeds = embed_in_chunks(output, golden_model.get_input_embeddings(), encoder, size=33)
    for index, item in enumerate(output.mm_items):
        ((start, end),) = item.offsets
        expected = torch.from_numpy(arrays[f"vision_embeds.image{index}"])
        assert torch.allclose(embeds[start : end + 1], expected, rtol=0, atol=1e-4)
    logits = logits_of(golden_model, output, embeds)
    assert torch.allclose(logits, torch.from_numpy(arrays["logits"]), rtol=0, atol=1e-4)
    assert int(logits[-1].argmax()) == case["greedy_next_8_tokens"][0]
