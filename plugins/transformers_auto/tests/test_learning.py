"""What a processor does is believed only where it is seen: each way in which media can depend on one another is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import Checkpoint, Modality, UsageError
from mm_plugin_transformers_auto.learning import Model, Unlike, join, specialize
from mm_plugin_transformers_auto.loading import open_checkpoint

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


def a_word_in_front(out: dict[str, Any], images: list[Any]) -> None:
    out["input_ids"] = torch.cat([out["input_ids"][:, :1], torch.tensor([[7]]), out["input_ids"][:, 1:]], dim=1)


@pytest.fixture
def changed(checkpoint: Get, opened: Get, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Change], Model]:
    def make(family: str, change: Change) -> Model:
        cls = type(opened(family)._learnt.opened.processor)
        original = cls.__call__

        def call(self: Any, **kwargs: Any) -> Any:
            images = list(kwargs.get("images") or ())
            out = original(self, **kwargs)
            if images:
                change(out, images)
            return out

        monkeypatch.setattr(cls, "__call__", call)
        folder = Checkpoint.open(checkpoint(family))
        return Model(open_checkpoint(folder), folder)

    return make


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_tokens_in_company, "the tokens of 3 images are not what each of them gives alone"),
        (fewer_pixels_in_company, "pixel_values of several images is not what each of them gives alone"),
        (one_image_too_many, "pixel_values of several images is not what each of them gives alone"),
        (last_image_first, "pixel_values of several images is not what each of them gives alone"),
        (another_kind_of_number, "pixel_values of several images is not what each of them gives alone"),
        (no_pixels_in_company, "pixel_values of several images is not what each of them gives alone"),
        (a_token_for_every_bright_image, "tokens or fields of images depend on more than their size"),
        (a_word_in_front, "it writes the prompt again around its images"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_processor_whose_media_are_not_independent_prepares_requests_as_a_whole(
    change: Change, said: str, changed: Any
) -> None:
    assert changed("llava", change).unlike == said


def test_fields_that_depend_on_what_is_seen_are_found_out(changed: Any) -> None:
    def change(out: dict[str, Any], images: list[Any]) -> None:
        # As a processor would that trims dark borders: the blank image has another size than the real one.
        sizes = [[image.height - (float(np.asarray(image).std()) > 1), image.width] for image in images]
        out["image_sizes"] = torch.tensor(sizes)

    assert changed("llava_next", change).unlike == "tokens or fields of images depend on more than their size"


def test_nothing_is_wrong_where_nothing_is_changed(changed: Any) -> None:
    model = changed("llava", lambda out, images: None)
    assert model.unlike is None
    assert model.kinds[Modality.IMAGE].axes == {"pixel_values": 0}


def test_tensors_that_nobody_declares_are_left_alone(changed: Any) -> None:
    kind = changed("llava", lambda out, images: out.update(secret=torch.ones(1))).kinds[Modality.IMAGE]
    assert kind.features == ("pixel_values",)


def test_a_processor_that_gives_no_declared_tensor_is_refused(changed: Any) -> None:
    with pytest.raises(UsageError, match="gives none of the tensors that it declares"):
        changed("llava", lambda out, images: out.pop("pixel_values"))


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llava_next", {"pixel_values": 0, "image_sizes": 0}),
        ("idefics3", {"pixel_values": 1, "pixel_attention_mask": 1}),
        ("aya_vision", {"pixel_values": 0}),
    ],
)
def test_axes_are_learnt(family: str, axes: dict[str, int], opened: Get) -> None:
    assert opened(family)._learnt.kinds[Modality.IMAGE].axes == axes


def test_spaces_that_a_placeholder_takes_up_must_be_taken_up_by_what_replaces_it(
    checkpoint: Get, opened: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder that swallows the space behind it, in front of a first token that does not: ids would shift."""
    from tokenizers import AddedToken

    model = opened("gemma3")._learnt
    core = np.array([model.tokenizer.convert_tokens_to_ids(token) for token in ("<start_of_image>", "<end_of_image>")])
    model._check_edges("<start_of_image>", core)
    known = dict(model.tokenizer.added_tokens_decoder)
    for attributes in ({"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}):
        odd = {**known, int(core[1]): AddedToken("<end_of_image>", special=True, normalized=False)}
        odd[int(core[0])] = AddedToken("<start_of_image>", special=True, **({"normalized": False} | attributes))
        monkeypatch.setitem(model.__dict__, "_added", odd)
        if "lstrip" in attributes:  # it begins the replacement itself, so what it takes up it takes up still
            model._check_edges("<start_of_image>", core)
        else:
            with pytest.raises(Unlike, match="takes up other spaces"):
                model._check_edges("<start_of_image>", core)
    monkeypatch.setitem(model.__dict__, "_added", {})
    with pytest.raises(Unlike, match="is no added token"):
        model._check_edges("<start_of_image>", core)


def test_layouts_are_remembered(opened: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("llava_next")._learnt
    kind, calls = model.kinds[Modality.IMAGE], []
    run = Model.run
    monkeypatch.setattr(Model, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    first = [model.layout(kind, (61, 62), {}) for _ in range(3)]
    assert len(calls) == 1
    assert first[0]["image_sizes"].tolist() == [[61, 62]]
    model.layout(kind, (62, 61), {})
    assert len(calls) == 2


def test_a_checkpoint_that_was_opened_before_is_not_learnt_again(
    opened: Get, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = opened("llava")
    monkeypatch.setattr(Model, "__init__", None)
    assert registry.load_encoder(processor.checkpoint).version.startswith("transformers_auto.Llava")
    assert registry.load_processor(processor.checkpoint)._learnt is processor.model._learnt


def test_a_spec_is_made_of_what_was_learnt(checkpoint: Get, registry: Any) -> None:
    base = registry.resolve({"architectures": ["Unknown"]})
    spec, known, model = specialize(base, Checkpoint.open(checkpoint("gemma3")))
    assert spec.placeholder_affixes == {Modality.IMAGE: ("\n\n", "\n\n")}
    assert spec.placeholders == {Modality.IMAGE: "<start_of_image>"}
    assert spec.fields == {Modality.IMAGE: ("prompt_ids",)}
    assert known.tokenizer.chat_template
    assert spec.output_version == base.output_version
    assert model.kinds[Modality.IMAGE].placeholder == "<start_of_image>"
    assert known.specialization is None


@pytest.mark.parametrize(
    ("shapes", "axis", "expected"),
    [
        ([(2, 3)], 0, (2, 3)),
        ([(2, 3), (1, 3)], 0, (3, 3)),
        ([(1, 3, 2), (1, 2, 5)], 0, (2, 3, 5)),
        ([(1, 3, 2), (1, 2, 5)], 1, (1, 5, 5)),
    ],
)
def test_join_pads_with_zeros_behind(shapes: list[tuple[int, ...]], axis: int, expected: tuple[int, ...]) -> None:
    parts = [torch.full(shape, index + 1.0) for index, shape in enumerate(shapes)]
    found = join(parts, axis)
    assert tuple(found.shape) == expected
    start = 0
    for part in parts:
        place = tuple(slice(start, start + size) if n == axis else slice(0, size) for n, size in enumerate(part.shape))
        assert torch.equal(found[place], part)
        start += part.shape[axis]
    assert float(found.sum()) == sum(float(part.sum()) for part in parts)


@pytest.mark.parametrize(
    ("family", "pairs"),
    [("llava", ()), ("gemma3", ()), ("qwen2_audio", (("<|audio_bos|>", "<|audio_eos|>"),))],
)
def test_wrappers_are_those_that_the_template_writes_around_media_alone(family: str, pairs: Any, opened: Get) -> None:
    assert opened(family).spec.token_pairs == pairs


def test_a_dropped_audio_takes_its_wrappers_along(opened: Get) -> None:
    from mm_plugin import AudioSamples

    processor = opened("qwen2_audio")
    audio = AudioSamples(np.ones(16_000, dtype=np.float32), 16_000)
    part = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    found = processor.process(
        f"a {part}b {part}c", audios=[audio, audio], max_prompt_tokens=40, on_overflow="drop_oldest"
    )
    assert found.dropped == ("audios[0]",)
    assert found.input_ids.tolist() == processor.process(f"a b {part}c", audios=[audio]).input_ids.tolist()


def test_the_digest_is_the_same_in_every_process_and_another_for_other_words(checkpoint: Get, opened: Get) -> None:
    model = opened("llava")._learnt
    folder = Checkpoint.open(checkpoint("llava"))
    again = Model(open_checkpoint(folder), folder)
    assert again.digest == model.digest
    again.tokenizer.add_tokens(["another"])
    del again.__dict__["digest"]
    assert again.digest != model.digest
