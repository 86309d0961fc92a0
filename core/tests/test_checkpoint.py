"""A checkpoint's config, preprocessor settings, tokenizer and specialization; an error names the file that cannot be read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import refused, write
from safetensors.torch import save_file

from mm_plugin.checkpoint import Checkpoint
from mm_plugin.errors import UsageError
from mm_plugin.items import Modality
from mm_plugin.spec import ModelSpec

TENSORS = {"visual.a": torch.ones(2), "visual.deep.b": torch.ones(1, 1), "lm_head": torch.ones(1)}


# --- config ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_opened_by_path_and_by_name(folder: Path) -> None:
    for source in (folder, str(folder)):
        opened = Checkpoint.open(source)
        assert opened.config == {"architectures": ["A"], "model_type": "a"}
        assert opened.folder == folder


BROKEN = ["", "{", "[1]", "null", '"x"', "\ufffe{}", "[" * 100_000, '{"a": 1} x']


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:10]))
def test_a_config_that_is_not_an_object_is_refused_by_its_file(folder: Path, text: str) -> None:
    write(folder, "config.json", text)
    error = refused(lambda: Checkpoint.open(folder), "config.json")
    assert error.argument == "checkpoint"


def test_bytes_that_are_not_text_are_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    refused(lambda: Checkpoint.open(folder), "config.json")


def test_a_folder_in_place_of_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused(lambda: Checkpoint.open(tmp_path), "config.json")


def test_a_missing_config_is_refused_by_its_file(tmp_path: Path) -> None:
    refused(lambda: Checkpoint.open(tmp_path), "config.json", "missing")


# --- preprocessor settings ---------------------------------------------------------------------------------------------

FLAT = {"preprocessor_config.json": {"patch_size": 14, "min_pixels": 1, "max_pixels": 2}}
NESTED = {
    "processor_config.json": {
        "image_processor": {"patch_size": 14, "size": {"shortest_edge": 1, "longest_edge": 2}},
        "video_processor": {"patch_size": 15, "size": {"shortest_edge": 3, "longest_edge": 4}},
        "feature_extractor": {"sampling_rate": 16000},
    }
}


def limits(folder: Path, modality: Modality = Modality.IMAGE) -> tuple[Any, Any, Any]:
    found = Checkpoint.open(folder).preprocessor(modality)
    return found.get("patch_size"), found.get("min_pixels"), found.get("max_pixels")


def test_both_layouts_say_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, "config.json", {})
    write(folder, "preprocessor_config.json", FLAT["preprocessor_config.json"])
    write(other, "processor_config.json", NESTED["processor_config.json"])
    assert limits(folder) == limits(other) == (14, 1, 2)


def test_every_modality_has_its_own_part(folder: Path) -> None:
    write(folder, "processor_config.json", NESTED["processor_config.json"])
    assert limits(folder, Modality.VIDEO) == (15, 3, 4)
    assert Checkpoint.open(folder).preprocessor(Modality.AUDIO) == {"sampling_rate": 16000}


def test_the_nested_part_goes_before_the_flat_file(folder: Path) -> None:
    write(folder, "preprocessor_config.json", {"patch_size": 9})
    write(folder, "processor_config.json", NESTED["processor_config.json"])
    assert limits(folder) == (14, 1, 2)


def test_video_has_a_file_of_its_own_and_else_the_images_settings(folder: Path) -> None:
    write(folder, "preprocessor_config.json", {"patch_size": 9})
    assert limits(folder, Modality.VIDEO) == (9, None, None)
    write(folder, "video_preprocessor_config.json", {"patch_size": 7})
    assert limits(folder, Modality.VIDEO) == (7, None, None)
    assert limits(folder) == (9, None, None)


def test_video_takes_the_images_part_where_it_has_none(folder: Path) -> None:
    write(folder, "processor_config.json", {"image_processor": {"patch_size": 9}})
    assert limits(folder, Modality.VIDEO) == (9, None, None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, (1, 2)),
        ({"min_pixels": 1, "max_pixels": 2}, (1, 2)),
        ({"min_pixels": 1, "size": {"shortest_edge": 9, "longest_edge": 2}}, (1, 2)),
        ({"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 1, "longest_edge": 2}}, (1, 2)),
        ({"size": {"shortest_edge": None, "longest_edge": 2}}, (None, 2)),
        ({"size": {"height": 5, "width": 6}}, (None, None)),
        ({"size": 224}, (None, None)),
        ({"size": None}, (None, None)),
        ({}, (None, None)),
    ],
    ids=str,
)
def test_edges_and_pixels_are_two_names_for_the_same_limits(
    folder: Path, settings: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    write(folder, "preprocessor_config.json", settings)
    assert limits(folder)[1:] == expected
    kept = Checkpoint.open(folder).preprocessor()
    assert {name: kept[name] for name in settings if settings[name] is not None} == {
        name: value for name, value in settings.items() if value is not None
    }


@pytest.mark.case("8.5")
@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize("combined", [None, {}, {"image_processor": 5, "video_processor": [], "feature_extractor": 1}])
def test_missing_settings_are_refused_with_the_names_of_both_files(
    folder: Path, modality: Modality, combined: Any
) -> None:
    if combined is not None:
        write(folder, "processor_config.json", combined)
    opened = Checkpoint.open(folder)
    refused(lambda: opened.preprocessor(modality), "preprocessor_config.json", "processor_config.json", str(folder))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:10]))
def test_broken_settings_are_refused_by_their_file(folder: Path, name: str, text: str) -> None:
    write(folder, name, text)
    opened = Checkpoint.open(folder)
    refused(opened.preprocessor, name)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    refused(lambda: Checkpoint.open(folder).tokenizer, "tokenizer", str(folder))


# --- hub ids -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from mm_plugin.checkpoint import Checkpoint
from mm_plugin.errors import UsageError
opened = Checkpoint.open("someone/model")
print(opened.config["model_type"], opened.preprocessor()["patch_size"], sorted(opened.tensors(["visual."])))
try:
    Checkpoint.open("someone/absent")
except UsageError as error:
    print("refused", "someone/absent" in str(error), error.argument)
"""


def test_a_hub_id_is_read_from_the_local_cache_when_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    model = tmp_path / "hub" / "models--someone--model"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    write(snapshot, "config.json", {"model_type": "a"})
    write(snapshot, "preprocessor_config.json", {"patch_size": 14})
    save_file(TENSORS, snapshot / "model.safetensors")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines() == ["a 14 ['a', 'deep.b']", "refused True checkpoint"], done.stderr


@pytest.mark.parametrize("name", ["no/such/folder/here", "../nowhere", "a b c", "x\0y"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    error = refused(lambda: Checkpoint.open(name), "expected a folder or a hub id")
    assert error.argument == "checkpoint"


# --- what a plugin may say of a checkpoint ----------------------------------------------------------------------------------


def test_a_tokenizer_is_opened_once_by_the_function_that_is_given(folder: Path) -> None:
    seen: list[Checkpoint] = []

    def open_tokenizer(checkpoint: Checkpoint) -> object:
        seen.append(checkpoint)
        return object()

    plain = Checkpoint.open(folder)
    opened = plain.with_tokenizer(open_tokenizer)
    assert seen == []
    assert opened.tokenizer is opened.tokenizer
    assert seen == [opened]
    assert (opened.folder, opened.config) == (plain.folder, plain.config)
    refused(lambda: plain.tokenizer, str(folder))  # it is not changed by that, and this folder has no tokenizer


def test_a_tokenizer_that_cannot_be_opened_is_a_usage_error(folder: Path) -> None:
    def fail(_: Checkpoint) -> None:
        raise OSError("no vocabulary")

    def say(_: Checkpoint) -> None:
        raise UsageError("it names no bos", argument="checkpoint")

    refused(lambda: Checkpoint.open(folder).with_tokenizer(fail).tokenizer, str(folder), "OSError", "no vocabulary")
    assert str(refused(lambda: Checkpoint.open(folder).with_tokenizer(say).tokenizer)) == "it names no bos"


def spec_named(name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        output_version=1,
        modalities=(),
        placeholders={},
        fields={},
        padding="offsets",
        processor="tiny:Processor",
        encoder="tiny:Encoder",
        specialize="tiny:specialize",
    )


def test_a_specialized_checkpoint_carries_spec_and_state(folder: Path) -> None:
    plain, made, state = Checkpoint.open(folder), spec_named("made"), object()
    assert plain.specialization is None
    found = plain.specialized(made, state)
    assert found.specialization is not None
    assert found.specialization[0] is made
    assert found.specialization[1] is state
    assert plain.specialization is None
    assert (found.folder, found.config) == (plain.folder, plain.config)


def test_views_and_other_tokenizers_keep_the_specialization(folder: Path) -> None:
    made, state = spec_named("made"), object()
    found = Checkpoint.open(folder).specialized(made, state, base=spec_named("base"))
    for kept in (found.view(), found.with_tokenizer(lambda _: "tokenizer"), found.with_tokenizer(str).view()):
        assert kept.specialization == (made, state)
        assert kept.specialization_of(spec_named("base")) == (made, state)
    again = found.specialized(spec_named("other"), None)
    assert again.specialization == (spec_named("other"), None)
    assert found.specialization == (made, state)


def test_a_specialized_checkpoint_keeps_the_tokenizer_but_not_what_was_read(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    opened = Checkpoint.open(folder).with_tokenizer(lambda _: object())
    tokenizer = opened.tokenizer
    opened.tensors(["visual."])
    found = opened.specialized(spec_named("made"), None)
    assert found.tokenizer is tokenizer
    assert found.tensors_read == frozenset()


def test_a_specialization_is_found_by_the_declaration_that_it_was_made_from(folder: Path) -> None:
    plain, made = Checkpoint.open(folder), spec_named("made")
    assert plain.specialization_of(spec_named("base")) is None
    found = plain.specialized(made, 1, base=spec_named("base"))
    assert found.specialization_of(spec_named("base")) == (made, 1)  # an equal declaration, such as another registry's
    assert found.specialization_of(spec_named("other")) is None
    assert found.specialization_of(made) is None
    assert plain.specialized(made, 1).specialization_of(spec_named("base")) is None


def test_any_json_file_is_read_or_refused_by_its_name(folder: Path) -> None:
    write(folder, "extra.json", {"a": [1]})
    assert Checkpoint.open(folder).read_json("extra.json") == {"a": [1]}
    refused(lambda: Checkpoint.open(folder).read_json("other.json"), "other.json is missing")
    write(folder, "extra.json", "[")
    refused(lambda: Checkpoint.open(folder).read_json("extra.json"), "extra.json")
