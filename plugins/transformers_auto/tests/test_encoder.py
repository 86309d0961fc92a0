"""The encoder alone: which weights are loaded and which never are, and the errors for a checkpoint that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_plugin import Checkpoint, EncoderError, Modality, NoModelError, UsageError
from mm_plugin_transformers_auto import partial_model
from mm_plugin_transformers_auto.testing import FAMILIES

Get = Callable[[str], Any]
HERE = [name for name, family in FAMILIES.items() if not family.needs and not family.refused]


def is_language(name: str) -> bool:
    return "language_model" in name or "text_model." in name.replace("vision_model", "") or name.startswith("lm_head")


@pytest.fixture
def copy(tmp_path: Path, checkpoint: Get) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / family))

    return make


@pytest.mark.parametrize("family", HERE)
def test_only_encoder_and_projector_are_read_and_kept(
    family: str, registry: Any, checkpoint: Get, monkeypatch: pytest.MonkeyPatch, model: Get
) -> None:
    read: list[str] = []
    original = Checkpoint.read_tensors

    def note(self: Checkpoint, names: Any, **arguments: Any) -> Any:
        read.extend(names)
        return original(self, names, **arguments)

    monkeypatch.setattr(Checkpoint, "read_tensors", note)
    loaded = registry.load_encoder(checkpoint(family))
    whole = set(Checkpoint.open(checkpoint(family)).tensor_names())
    assert read
    assert not [name for name in read if is_language(name)]
    assert {name for name in whole if not is_language(name)} == set(read)
    kept = sum(part.numel() for part in loaded._model.parameters())
    reference = model(family)
    absent = {id(part) for part in reference.get_decoder().parameters()}
    absent |= {id(part) for part in reference.get_output_embeddings().parameters()}
    assert kept == sum(part.numel() for part in reference.parameters() if id(part) not in absent)


@pytest.mark.parametrize("family", HERE)
def test_what_is_stored_nowhere_is_what_the_whole_model_has(family: str, encoder: Get, model: Get) -> None:
    whole, own = model(family), dict(encoder(family)._model.named_buffers())
    assert not any(part.is_meta for part in (*own.values(), *encoder(family)._model.parameters()))
    others = {name: value for name, value in whole.named_buffers() if not is_language(name)}
    assert set(own) == set(others)
    for name, value in others.items():
        assert torch.equal(own[name], value), name


def test_a_language_model_of_many_gigabytes_costs_nothing(
    registry: Any, copy: Any, opened: Get, encoder: Get, make_image: Any
) -> None:
    folder = copy("llava")
    described = json.loads((folder / "config.json").read_text())
    # 64 layers: more than 60 GB of weights, none of which is in the file.
    described["text_config"] |= {
        "hidden_size": 32,
        "num_hidden_layers": 64,
        "intermediate_size": 4_000_000,
        "vocab_size": 900_000,
    }
    (folder / "config.json").write_text(json.dumps(described))
    file = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if not is_language(name)}, file, {"format": "pt"})
    output = opened("llava").process("<image>", [make_image()])
    expected = encoder("llava").get_image_feature(output.mm_items)[0].embeddings
    found = registry.load_encoder(folder).get_image_feature(output.mm_items)[0].embeddings
    assert torch.equal(found, expected)


def test_dtype_is_as_asked_or_the_checkpoints_own(
    registry: Any, copy: Any, opened: Get, encoder: Get, make_image: Any
) -> None:
    folder = copy("llava_next")
    output = opened("llava_next").process("<image>", [make_image()])
    usual = encoder("llava_next").get_image_feature(output.mm_items)[0].embeddings
    assert usual.dtype == torch.float32
    narrow = registry.load_encoder(folder, dtype=torch.bfloat16)
    assert {part.dtype for part in narrow._model.parameters()} == {torch.bfloat16}
    rows = narrow.get_image_feature(output.mm_items)[0].embeddings
    assert rows.dtype == torch.bfloat16
    assert float((rows.float() - usual).abs().mean()) < 0.05 * float(usual.abs().mean())
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"dtype": "bfloat16"}))
    assert registry.load_encoder(folder)._dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "missing",
            r"1 tensors of the encoder of LlavaForConditionalGeneration are missing \(model\.multi_modal_projector",
        ),
        (
            "shape",
            r"model\.multi_modal_projector\.linear_1\.bias of shape \[32\] as its config\.json says, found \[8\]",
        ),
        ("none", r"expected \.safetensors files, found none"),
        ("no encoder", r"missing \(model\.multi_modal_projector\.linear_1\.bias, .*\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(registry: Any, copy: Any, fault: str, said: str) -> None:
    folder = copy("llava")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("multi_modal_projector.linear_1.bias"))
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:8].clone()
    elif fault == "no encoder":
        tensors = {name: value for name, value in tensors.items() if is_language(name)}
    save_file(tensors, file, {"format": "pt"})
    if fault == "none":
        file.unlink()
    with pytest.raises(UsageError, match=said) as caught:
        registry.load_encoder(folder)
    assert str(folder) in caught.value.message


def test_old_names_of_tensors_are_known(registry: Any, copy: Any, opened: Get, encoder: Get, make_image: Any) -> None:
    """Checkpoints of LLaVA that were released before transformers 5 name their tensors in another order."""
    folder = copy("llava")
    file = folder / "model.safetensors"
    saved = load_file(file)

    def old(name: str) -> str:
        name = name.removeprefix("model.")
        if name.startswith("language_model."):
            return name.replace("language_model.", "language_model.model.", 1)
        return "language_model." + name if name.startswith("lm_head") else name

    save_file({old(name): value for name, value in saved.items()}, file, {"format": "pt"})
    output = opened("llava").process("<image>", [make_image()])
    found = registry.load_encoder(folder).get_image_feature(output.mm_items)[0].embeddings
    assert torch.equal(found, encoder("llava").get_image_feature(output.mm_items)[0].embeddings)


def test_a_model_that_writes_no_embeddings_is_found_out(
    encoder: Get, opened: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a method for its embeddings they are what the model writes; one that writes nothing must not pass."""
    import numpy as np

    from mm_plugin import AudioSamples

    loaded = encoder("qwen2_audio")
    output = opened("qwen2_audio").process("<|AUDIO|>", audios=[AudioSamples(np.ones(16000, dtype=np.float32), 16000)])
    assert loaded.get_audio_feature(output.mm_items)[0].embeddings.shape == (25, 32)
    forward = type(loaded._model.base_model).forward

    def ignore(self: Any, input_ids: Any, attention_mask: Any, **tensors: Any) -> Any:
        return forward(self, input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(type(loaded._model.base_model), "forward", ignore)
    with pytest.raises(EncoderError, match="does not write embeddings of its audios"):
        loaded.get_audio_feature(output.mm_items)
    monkeypatch.setattr(type(loaded._model.base_model), "forward", lambda self, **_: None)
    with pytest.raises(EncoderError, match="does not call its language model"):
        loaded.get_audio_feature(output.mm_items)


def test_rows_are_compared_with_what_the_model_writes_when_it_is_loaded(
    registry: Any,
    checkpoint: Get,
    monkeypatch: pytest.MonkeyPatch,
    opened: Get,
    probed: Get,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_class = probed(opened("llava")).opened.model_class
    forward = model_class.get_image_features
    registry.load_encoder(checkpoint("llava"))
    assert "could not be compared" not in caplog.text

    def turned(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return forward(self, *arguments, **keywords).pooler_output[0].flip(0)[None]

    monkeypatch.setattr(model_class, "get_image_features", turned)
    with pytest.raises(
        UsageError, match="writes other embeddings of its images into its text embeddings than get_image_features"
    ):
        registry.load_encoder(checkpoint("llava"))

    def fail(self: Any, *_: Any, **__: Any) -> Any:
        raise IndexError("lost")

    with monkeypatch.context() as changed:
        changed.setattr(model_class, "get_image_features", forward)
        changed.setattr(type(registry.load_encoder(checkpoint("llava"))._model.base_model), "forward", fail)
        registry.load_encoder(checkpoint("llava"))
    assert "could not be compared with those that it writes itself: IndexError: lost" in caplog.text


@pytest.mark.parametrize("fault", [IndexError("lost"), TypeError("missing input_ids"), torch.OutOfMemoryError("full")])
def test_a_model_that_cannot_encode_a_sample_does_not_open(
    registry: Any, checkpoint: Get, monkeypatch: pytest.MonkeyPatch, opened: Get, probed: Get, fault: Exception
) -> None:
    """It opened with a warning, and every request failed."""

    def fail(self: Any, *_: Any, **__: Any) -> Any:
        raise fault

    monkeypatch.setattr(probed(opened("llava")).opened.model_class, "get_image_features", fail)
    if isinstance(fault, torch.OutOfMemoryError):
        with pytest.raises(EncoderError, match="full"):
            registry.load_encoder(checkpoint("llava"))
        return
    with pytest.raises(UsageError) as caught:
        registry.load_encoder(checkpoint("llava"))
    assert f"gives no embeddings of its images apart from its language model ({type(fault).__name__}: " in str(
        caught.value
    )
    assert caught.value.argument == "checkpoint"


def test_embeddings_that_the_method_leaves_to_the_forward_are_those_that_it_writes(
    registry: Any, checkpoint: Get, monkeypatch: pytest.MonkeyPatch, opened: Get, encoder: Get, make_image: Any
) -> None:
    """As Llama 4: `get_image_features` returns hidden states, and the model's forward projects them."""
    items = opened("llava").process("<image>", [make_image()]).mm_items
    expected = encoder("llava").encode(Modality.IMAGE, items)[0].embeddings
    loaded = registry.load_encoder(checkpoint("llava"))
    forward = type(loaded._model).get_image_features

    class Unprojected:
        pooler_output = None

    monkeypatch.setattr(type(loaded._model), "get_image_features", lambda self, **_: Unprojected())
    assert forward is not type(loaded._model).get_image_features
    (found,) = loaded.encode(Modality.IMAGE, items)
    assert torch.allclose(found.embeddings, expected, atol=1e-6)


def test_rows_that_are_too_few_are_refused(
    encoder: Get, opened: Get, monkeypatch: pytest.MonkeyPatch, make_image: Any
) -> None:
    loaded, item = encoder("llava"), opened("llava").process("<image>", [make_image()]).mm_items[0]
    monkeypatch.setattr(type(loaded._model), "get_image_features", lambda self, **_: torch.zeros(1, 15, 32))
    with pytest.raises(EncoderError, match="one embedding for each of 16 tokens of its images, returned 15"):
        loaded.encode(Modality.IMAGE, [item])
    monkeypatch.setattr(type(loaded._model), "get_image_features", lambda self, **_: None)
    with pytest.raises(EncoderError, match="must return tensors of embeddings, returned NoneType"):
        loaded.encode(Modality.IMAGE, [item])


def test_tensors_that_are_split_on_loading_go_through_transformers_own_loader(
    registry: Any, checkpoint: Get, monkeypatch: pytest.MonkeyPatch, opened: Get, encoder: Get, make_image: Any
) -> None:
    """No family here needs it, so the test forces it: the result must be the same."""
    rename = partial_model.rename_source_key
    monkeypatch.setattr(partial_model, "rename_source_key", lambda *a, **k: (rename(*a, **k)[0], "a pattern"))
    output = opened("idefics3").process("<image>", [make_image()])
    found = registry.load_encoder(checkpoint("idefics3")).get_image_feature(output.mm_items)[0].embeddings
    assert torch.equal(found, encoder("idefics3").get_image_feature(output.mm_items)[0].embeddings)


def test_an_encoder_cannot_be_loaded_where_the_fallback_is_not_allowed(registry: Any, checkpoint: Get) -> None:
    with pytest.raises(NoModelError, match="Llava"):
        registry.load_encoder(checkpoint("llava"), fallback="never")


def test_only_what_is_to_be_filled_takes_no_memory() -> None:
    with torch.device("cpu"), partial_model._EmptyOnMeta():
        absent = [torch.empty(2, 3), torch.zeros(1025, 1024), torch.ones((1 << 11, 1 << 10)), torch.randn([1 << 21])]
        there = [torch.zeros(1024, 1024), torch.ones(3), torch.arange(1 << 21), torch.empty(2, device="cpu")]
    assert [part.is_meta for part in absent] == [True] * 4
    assert [part.is_meta for part in there] == [False] * 4


def test_a_large_table_that_no_checkpoint_has_is_found_missing(
    registry: Any, checkpoint: Get, opened: Get, probed: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class = probed(opened("llava")).opened.model_class
    init = model_class.__init__

    def with_table(self: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.register_buffer("table", torch.zeros(1 << 21), persistent=False)

    monkeypatch.setattr(model_class, "__init__", with_table)
    with pytest.raises(
        UsageError, match="has 'table' outside its language model, which is neither in the checkpoint nor created"
    ):
        registry.load_encoder(checkpoint("llava"))
