"""What is learned from a processor: traits, axes, and each way in which media inputs can depend on one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import Checkpoint, Modality, UsageError
from mm_plugin_transformers_auto.encoder import TransformersEncoder
from mm_plugin_transformers_auto.loading import open_checkpoint
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.runner import ProcessorRunner
from mm_plugin_transformers_auto.single_item import NotComposable
from mm_plugin_transformers_auto.specialize import specialize

Get = Callable[[str], Any]
# Change the ids or tensors that a processor gives for a prompt with so many images.
Change = Callable[[dict[str, Any], list[Any]], None]


def more_tokens_in_company(out: dict[str, Any], images: list[Any]) -> None:
    if len(images) > 2:
        out["input_ids"] = torch.cat([out["input_ids"], out["input_ids"][:, -1:]], dim=1)


def fewer_pixels_in_company(out: dict[str, Any], images: list[Any]) -> None:
    if len(images) > 1:
        out["pixel_values"] = out["pixel_values"] * 0.5


def one_image_too_many(out: dict[str, Any], images: list[Any]) -> None:
    out["pixel_values"] = torch.cat([out["pixel_values"], out["pixel_values"][:1]])


def last_image_first(out: dict[str, Any], images: list[Any]) -> None:
    out["pixel_values"] = out["pixel_values"].flip(0)


def another_kind_of_number(out: dict[str, Any], images: list[Any]) -> None:
    if len(images) > 1:
        out["pixel_values"] = out["pixel_values"].double()


def no_pixels_in_company(out: dict[str, Any], images: list[Any]) -> None:
    if len(images) > 1:
        del out["pixel_values"]


def a_token_for_every_bright_image(out: dict[str, Any], images: list[Any]) -> None:
    bright = sum(float(np.asarray(image).std()) > 1 for image in images)
    if bright == len(images):
        out["input_ids"] = torch.cat(
            [out["input_ids"][:, :2], out["input_ids"][:, 1:2], out["input_ids"][:, 2:]], dim=1
        )


def other_last_bits_in_company(out: dict[str, Any], images: list[Any]) -> None:
    if len(images) > 1:
        out["pixel_values"] = out["pixel_values"] * (1 + 2**-22)


def a_word_in_front(out: dict[str, Any], images: list[Any]) -> None:
    out["input_ids"] = torch.cat([out["input_ids"][:, :1], torch.tensor([[7]]), out["input_ids"][:, 1:]], dim=1)


@pytest.fixture
def changed(
    checkpoint: Get, opened: Get, probed: Get, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Change], ProbedModel]:
    """Learns from a family's processor whose output is changed."""

    def make(family: str, change: Change) -> ProbedModel:
        cls = type(probed(opened(family)).opened.processor)
        original = cls.__call__

        def call(self: Any, **kwargs: Any) -> Any:
            images = list(kwargs.get("images") or ())
            out = original(self, **kwargs)
            if images:
                change(out, images)
            return out

        monkeypatch.setattr(cls, "__call__", call)
        folder = Checkpoint.open(checkpoint(family))
        return ProbedModel(open_checkpoint(folder), folder)

    return make


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_tokens_in_company, "the tokens of 3 images differ from those of each of them alone"),
        (fewer_pixels_in_company, "pixel_values of several images differ from those of each of them alone"),
        (one_image_too_many, "pixel_values of several images differ from those of each of them alone"),
        (last_image_first, "pixel_values of several images differ from those of each of them alone"),
        (another_kind_of_number, "pixel_values of several images differ from those of each of them alone"),
        (no_pixels_in_company, "pixel_values of several images differ from those of each of them alone"),
        (a_token_for_every_bright_image, "tokens or fields of images depend on more than their size"),
        (a_word_in_front, "it rewrites the prompt around its images"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_processor_whose_media_are_not_independent_prepares_requests_jointly(
    change: Change, said: str, changed: Any
) -> None:
    assert changed("llava", change).joint_reason == said


def test_a_difference_by_rounding_alone_is_named(changed: Any) -> None:
    """It depends on the machine, not on the model, and an operator may be able to prevent it."""
    said = changed("llava", other_last_bits_in_company).joint_reason
    assert said.startswith(
        "pixel_values of several images differ from those of each of them alone by rounding (at most "
    )
    assert "MKL_CBWR=COMPATIBLE" in said


def test_fields_that_depend_on_the_content_are_noticed(changed: Any) -> None:
    def change(out: dict[str, Any], images: list[Any]) -> None:
        # As a processor would that trims dark borders: the blank image has another size than the real one.
        sizes = [[image.height - (float(np.asarray(image).std()) > 1), image.width] for image in images]
        out["image_sizes"] = torch.tensor(sizes)

    assert changed("llava_next", change).joint_reason == "tokens or fields of images depend on more than their size"


def test_nothing_is_wrong_where_nothing_is_changed(changed: Any) -> None:
    model = changed("llava", lambda out, images: None)
    assert model.joint_reason is None
    assert model.traits[Modality.IMAGE].axes == {"pixel_values": 0}


def test_tensors_that_nobody_declares_are_left_alone(changed: Any) -> None:
    traits = changed("llava", lambda out, images: out.update(secret=torch.ones(1))).traits[Modality.IMAGE]
    assert traits.tensor_names == ("pixel_values",)


def test_a_processor_that_returns_no_declared_tensor_is_refused(changed: Any) -> None:
    with pytest.raises(UsageError, match="returns none of the tensors that it declares"):
        changed("llava", lambda out, images: out.pop("pixel_values"))


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llava_next", {"pixel_values": 0, "image_sizes": 0}),
        ("idefics3", {"pixel_values": 1, "pixel_attention_mask": 1}),
        ("aya_vision", {"pixel_values": 0}),
    ],
)
def test_axes_are_learned(family: str, axes: dict[str, int], opened: Get, probed: Get) -> None:
    assert probed(opened(family)).traits[Modality.IMAGE].axes == axes


def test_spaces_that_a_placeholder_strips_must_be_stripped_by_what_replaces_it(
    checkpoint: Get, opened: Get, probed: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder that strips the space after it, replaced by tokens that do not: ids would shift."""
    from tokenizers import AddedToken

    model = probed(opened("gemma3"))
    single = model.single
    core = np.array([model.tokenizer.convert_tokens_to_ids(token) for token in ("<start_of_image>", "<end_of_image>")])
    single._check_delimiters("<start_of_image>", core)
    known = dict(model.tokenizer.added_tokens_decoder)
    for attributes in ({"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}):
        odd = {**known, int(core[1]): AddedToken("<end_of_image>", special=True, normalized=False)}
        odd[int(core[0])] = AddedToken("<start_of_image>", special=True, **({"normalized": False} | attributes))
        monkeypatch.setitem(single.__dict__, "_added", odd)
        if (
            "lstrip" in attributes
        ):  # it is itself the first token of the replacement, so the spaces before it do not change
            single._check_delimiters("<start_of_image>", core)
        else:
            with pytest.raises(NotComposable, match="strips other spaces"):
                single._check_delimiters("<start_of_image>", core)
    monkeypatch.setitem(single.__dict__, "_added", {})
    with pytest.raises(NotComposable, match="is not an added token"):
        single._check_delimiters("<start_of_image>", core)


def test_layouts_are_remembered(opened: Get, probed: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    model = probed(opened("llava_next"))
    traits, calls = model.traits[Modality.IMAGE], []
    run = ProcessorRunner.run
    monkeypatch.setattr(ProcessorRunner, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    first = [model.layout(traits, (61, 62), {}) for _ in range(3)]
    assert len(calls) == 1
    assert first[0]["image_sizes"].tolist() == [[61, 62]]
    model.layout(traits, (62, 61), {})
    assert len(calls) == 2


def test_a_checkpoint_that_was_opened_before_is_not_learned_again(
    opened: Get, probed: Get, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = opened("llava")
    monkeypatch.setattr(ProbedModel, "__init__", None)
    assert registry.load_encoder(processor.checkpoint).version.startswith("transformers_auto.Llava")
    assert probed(registry.load_processor(processor.checkpoint)) is probed(processor)
    assert probed(registry.load_processor(processor.checkpoint.view())) is probed(processor)


def test_a_checkpoint_that_no_registry_opened_is_refused(checkpoint: Get, opened: Get) -> None:
    plain = Checkpoint.open(checkpoint("llava"))
    foreign = plain.specialized(opened("llava").spec, "another plugin's state")
    for given in (plain, foreign):
        with pytest.raises(UsageError, match="expected a checkpoint opened by the plugin transformers_auto") as caught:
            TransformersEncoder.load(given, "cpu", None)
        assert str(given.folder) in caught.value.message


def test_a_spec_is_made_of_what_was_learned(checkpoint: Get, registry: Any) -> None:
    base = registry.resolve({"architectures": ["Unknown"]})
    spec, known, model = specialize(base, Checkpoint.open(checkpoint("gemma3")))
    assert spec.placeholder_affixes == {Modality.IMAGE: ("\n\n", "\n\n")}
    assert spec.placeholders == {Modality.IMAGE: "<start_of_image>"}
    assert spec.fields == {Modality.IMAGE: ("prompt_ids",)}
    assert known.tokenizer.chat_template
    assert spec.output_version == base.output_version
    assert model.traits[Modality.IMAGE].placeholder == "<start_of_image>"
    assert known.specialization is None


def test_the_digest_is_the_same_in_every_process_and_another_for_other_words(
    checkpoint: Get, opened: Get, probed: Get
) -> None:
    model = probed(opened("llava"))
    folder = Checkpoint.open(checkpoint("llava"))
    again = ProbedModel(open_checkpoint(folder), folder)
    assert again.digest == model.digest
    again.tokenizer.add_tokens(["another"])
    del again.__dict__["digest"]
    assert again.digest != model.digest


def test_another_class_for_the_same_settings_is_another_model(checkpoint: Get, opened: Get, probed: Get) -> None:
    """What transformers chooses where torchvision is installed: the settings are equal, the pixels are not."""
    model = probed(opened("llava"))
    folder = Checkpoint.open(checkpoint("llava"))
    again = ProbedModel(open_checkpoint(folder), folder)
    images = again.opened.processor.image_processor
    usual = type(images)
    images.__class__ = type(usual.__name__.removesuffix("Pil"), (usual,), {"__module__": usual.__module__})
    found = {model.digest, again.digest}
    images.__class__ = type(usual.__name__, (usual,), {"__module__": usual.__module__, "backend": "torchvision"})
    del again.__dict__["digest"]
    found.add(again.digest)
    assert len(found) == 3
    images.__class__ = usual
    del again.__dict__["digest"]
    assert again.digest == model.digest
