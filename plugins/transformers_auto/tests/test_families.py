"""Model by model: ids, tensors, embeddings and logits are those of transformers' own processor and forward on the same request."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_plugin import ForwardBatch, Modality, MultimodalInputs, RequestMedia, UsageError, embed_mm_inputs
from mm_plugin.cache import EmbeddingCache
from mm_plugin.encoder import as_tensor
from mm_plugin.testing import CallCounter, embed_in_chunks
from mm_plugin_transformers_auto.tensors import join
from mm_plugin_transformers_auto.testing import FAMILIES, Family, missing_packages

# (height, width): sizes at which token counts of processor and model are known to differ elsewhere, small and thin ones.
SIZES = [(161, 184), (337, 90), (20, 1500), (56, 56), (1, 1)]
IMAGES = [name for name, family in FAMILIES.items() if family.image and not family.refused]
HERE = [name for name in IMAGES if not FAMILIES[name].needs]
JOINT = {
    "paligemma": "it rewrites the prompt around its images",
    "idefics2": "the tokens of 2 images differ from those of each of them alone",
}
Get = Callable[[str], Any]


def some_images(make_image: Callable[..., Image.Image], count: int, sizes: Any = SIZES) -> list[Image.Image]:
    return [make_image(index, *sizes[index % len(sizes)]) for index in range(count)]


def whole_request(processor: Any, family: Family, prompt: str, images: list[Image.Image]) -> dict[str, Any]:
    """What transformers makes of the request."""
    if not images:
        return dict(processor.tokenizer(prompt, return_tensors="pt"))
    return {
        name: value
        for name, value in processor(text=[prompt], images=images, return_tensors="pt").items()
        if name != "labels"
    }


def logits_of(model: Any, whole: dict[str, Any], output: Any, step: Any) -> torch.Tensor:
    """The language model's logits on embeddings that were computed elsewhere."""
    extra = {name: whole[name] for name in ("token_type_ids", "mm_token_type_ids") if name in whole}
    if output.mrope_positions is not None:
        extra = {"position_ids": torch.from_numpy(output.mrope_positions)[:, None]}
    with torch.no_grad():
        if step.deepstack is None:
            found: torch.Tensor = model(inputs_embeds=step.input_embeds[None], **extra).logits[0]
            return found
        rows, index = step.deepstack
        mask = torch.zeros(1, len(output.input_ids), dtype=torch.bool)
        mask[0, index] = True
        inside = model.model.language_model(
            inputs_embeds=step.input_embeds[None], visual_pos_masks=mask, deepstack_visual_embeds=list(rows), **extra
        )
        return model.lm_head(inside.last_hidden_state)[0]  # type: ignore[no-any-return]


def embed(output: Any, table: Any, encoder: Any) -> Any:
    batch = ForwardBatch([RequestMedia(MultimodalInputs.from_processor_output(output))], [0], [len(output.input_ids)])
    step = embed_mm_inputs(torch.from_numpy(output.input_ids), batch, table, encoder)
    assert step.failed == ()
    return step


def test_at_least_seven_families_run_without_torchvision() -> None:
    assert len(HERE) >= 7


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("family", IMAGES)
def test_logits_equal_the_models_own_forward(
    family: str, count: int, opened: Get, encoder: Get, model: Get, reference: Get, make_image: Any
) -> None:
    processor, whole_model = opened(family), model(family)
    prompt, images = FAMILIES[family].prompt(count), some_images(make_image, count)
    output = processor.process(prompt, images)
    whole = whole_request(reference(family), FAMILIES[family], prompt, images)
    assert output.input_ids.tolist() == whole["input_ids"][0].tolist()
    step = embed(output, whole_model.get_input_embeddings(), encoder(family))
    with torch.no_grad():
        expected = whole_model(**whole).logits[0]
    assert torch.allclose(logits_of(whole_model, whole, output, step), expected, rtol=0, atol=1e-4)
    # The comparison can fail: without the embeddings the logits differ.
    assert float(expected.std()) > 0.05
    if count:
        step.input_embeds[torch.from_numpy(output.token_modalities == 1)] = 0
        assert not torch.allclose(logits_of(whole_model, whole, output, step), expected, rtol=0, atol=1e-2)


@pytest.mark.case("2.8")
@pytest.mark.parametrize("family", [name for name in IMAGES if name not in JOINT])
def test_composed_tensors_equal_those_of_the_whole_request(
    family: str, opened: Get, probed: Get, reference: Get, make_image: Any
) -> None:
    processor = opened(family)
    traits = probed(processor).traits[Modality.IMAGE]
    sizes = [(337, 161), (184, 337), (700, 30), (33, 33), (161, 184)]
    for count in (1, 2, 3, 5):
        prompt, images = FAMILIES[family].prompt(count), some_images(make_image, count, sizes)
        output = processor.process(prompt, images)
        whole = whole_request(reference(family), FAMILIES[family], prompt, images)
        assert output.input_ids.tolist() == whole["input_ids"][0].tolist()
        first, *others = traits.tensor_names
        items = output.mm_items
        assert torch.equal(join([item.feature for item in items], traits.axes[first]), whole[first])
        for name in others:
            joined = join([as_tensor(item.get(name)) for item in items], traits.axes[name])
            assert torch.equal(joined, whole[name]), name
        is_embed = whole["input_ids"][0].numpy() == traits.embed_token_id
        assert np.array_equal(output.token_modalities == 1, is_embed)
        for image, item in zip(images, items, strict=True):
            rows, tokens = processor.count("image", (image.height, image.width))
            assert rows == item.num_tokens
            assert tokens >= len(item.get("prompt_ids"))


@pytest.mark.parametrize("family", HERE)
def test_records_say_how_media_are_prepared(family: str, opened: Get, registry: Any, checkpoint: Get) -> None:
    notes = opened(family).spec.notes
    assert notes["media"] == (f"jointly: {JOINT[family]}" if family in JOINT else "one by one")
    assert notes["processor"] == FAMILIES[family].processor["processor_class"]
    assert notes["trust_remote_code"] == "off"
    (record,) = [plugin for plugin in registry.plugins if plugin.name == "transformers_auto"]
    known = {model.checkpoint: model for model in record.opened}[str(checkpoint(family))]
    assert known.model == f"transformers_auto.{FAMILIES[family].architecture}"
    assert known.notes == dict(notes)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if missing_packages(family)])
def test_a_missing_package_is_named_in_error_and_record(family: str, registry: Any, checkpoint: Get) -> None:
    folder = checkpoint(family)
    with pytest.raises(
        UsageError, match="needs torchvision, which is not installed; pip install torchvision"
    ) as caught:
        registry.load_processor(folder)
    (record,) = [plugin for plugin in registry.plugins if plugin.name == "transformers_auto"]
    assert {model.checkpoint: model.error for model in record.opened}[str(folder)] == caught.value.message
    assert record.state == "loaded"


def test_cross_attention_is_refused_with_the_reason(registry: Any, checkpoint: Get) -> None:
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(
            UsageError, match=r"Mllama.* by cross-attention: no token of a prompt takes one of their embeddings"
        ):
            load(checkpoint("mllama"))


def test_a_model_that_writes_elsewhere_too_is_refused_when_its_weights_are_there(
    registry: Any, checkpoint: Get
) -> None:
    """Ids and embeddings would be right, but the language model would get others elsewhere in the prompt."""
    with pytest.raises(
        UsageError, match=r"Ovis2.* also writes at the positions of '<IMG_START>', '<IMG_GRID>', '<IMG_END>'"
    ):
        registry.load_encoder(checkpoint("ovis2"))


@pytest.mark.parametrize("family", ["llava_next", "gemma3", "idefics3", "paligemma"])
def test_every_form_of_prompt_gives_the_same_request(family: str, opened: Get, reference: Get, make_image: Any) -> None:
    processor, images = opened(family), some_images(make_image, 2)
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "and\n\n"}, {"type": "image"}]
    plain = [{"role": "user", "content": [{"type": "image"}, content[1], {"type": "image"}]}]
    template = processor.checkpoint.tokenizer.apply_chat_template
    text = template(plain, tokenize=False, add_generation_prompt=True)
    found = processor.process([{"role": "user", "content": content}], images[1:])
    whole = reference(family)(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    assert found.input_ids.tolist() == whole["input_ids"][0].tolist()
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    again = processor.process([{"role": "user", "content": [{"type": "image"}, content[1], {"type": "image"}]}], files)
    assert np.array_equal(again.padded_input_ids, found.padded_input_ids)


@pytest.mark.parametrize("family", ["llava_next", "idefics3", "aya_vision", "gemma3"])
def test_every_chunk_size_gives_the_same_bits_from_one_call(
    family: str, opened: Get, encoder: Get, model: Get, make_image: Any
) -> None:
    output = opened(family).process(FAMILIES[family].prompt(3), some_images(make_image, 3))
    table, cache = model(family).get_input_embeddings(), EmbeddingCache(1 << 24)
    counter = CallCounter(encoder(family))
    whole = embed_in_chunks(output, table, counter.as_mapping(), size=100_000, cache=cache)
    assert counter.calls == [3]
    for size in (1, 2, 3, 7, 16, 50, len(output.input_ids)):
        chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size, cache=cache)
        assert torch.equal(chunked, whole), size
    assert counter.calls == [3]
    alone = [encoder(family).encode(Modality.IMAGE, [item])[0].embeddings for item in output.mm_items]
    together = [found.embeddings for found in encoder(family).encode(Modality.IMAGE, output.mm_items)]
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", HERE)
def test_two_requests_in_one_batch_get_their_own_embeddings(
    family: str, opened: Get, encoder: Get, model: Get, make_image: Any
) -> None:
    processor, table = opened(family), model(family).get_input_embeddings()
    outputs = [processor.process(FAMILIES[family].prompt(count), some_images(make_image, count)) for count in (2, 1)]
    alone = [embed(output, table, encoder(family)).input_embeds for output in outputs]
    ids = torch.from_numpy(np.concatenate([output.padded_input_ids for output in outputs]))
    lengths = [len(output.input_ids) for output in outputs]
    batch = ForwardBatch(
        [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in outputs], [0, 0], lengths
    )
    step = embed_mm_inputs(ids, batch, table, encoder(family))
    assert step.failed == ()
    assert torch.allclose(step.input_embeds, torch.cat(alone), rtol=0, atol=1e-5)


def test_a_repeated_image_is_decoded_once(
    registry: Any, checkpoint: Get, probed: Get, monkeypatch: pytest.MonkeyPatch, make_image: Any
) -> None:
    processor = registry.load_processor(checkpoint("llava"))
    calls: list[int] = []
    runner = type(probed(processor).runner)
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    file = io.BytesIO()
    make_image(0, 77, 91).save(file, "PNG")
    first = processor.process("<image>", [file.getvalue()])
    assert len(calls) == 2  # its layout, and itself
    again = processor.process("a <image> and <image>", [file.getvalue()] * 2)
    assert len(calls) == 2
    assert {item.identity for item in again.mm_items} == {first.mm_items[0].identity}
