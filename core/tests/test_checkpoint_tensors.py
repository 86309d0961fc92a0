"""Tensors of a checkpoint: which are read, what is refused, and the fingerprint of their content."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import refused, write
from safetensors.torch import save_file

from mm_plugin.checkpoint import Checkpoint, check_tensors

TENSORS = {
    "visual.a": torch.tensor([1.0, 2.0]),
    "visual.deep.b": torch.tensor([[3]]),
    "model.visual.c": torch.tensor(4.0, dtype=torch.float16),
    "visual_other": torch.tensor([9.0]),
    "lm_head": torch.tensor([5.0]),
}


@pytest.fixture(params=["one file", "shards", "shards without index"])
def weights(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A folder with `TENSORS` in one of three layouts."""
    if request.param == "one file":
        save_file(TENSORS, folder / "model.safetensors")
        return folder
    names = list(TENSORS)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: TENSORS[name] for name in part}, folder / file)
    if request.param == "shards":
        table = {name: file for file, part in parts.items() for name in part}
        write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": table})
    return folder


def test_every_tensor_is_named_with_the_file_that_holds_it(weights: Path) -> None:
    names = Checkpoint.open(weights).tensor_names()
    assert set(names) == set(TENSORS)
    assert all(file.is_file() and file.parent == weights for file in names.values())


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        (("visual.",), {"a": "visual.a", "deep.b": "visual.deep.b"}),
        (("visual.", "model.visual."), {"a": "visual.a", "deep.b": "visual.deep.b", "c": "model.visual.c"}),
        (("visual.deep.", "visual."), {"b": "visual.deep.b", "a": "visual.a"}),
        (("visual.", "visual.deep."), {"deep.b": "visual.deep.b", "a": "visual.a"}),
        (("lm_head",), {"": "lm_head"}),
        (("",), {name: name for name in TENSORS}),
    ],
    ids=str,
)
def test_chosen_tensors_lose_the_first_prefix_that_fits(
    weights: Path, prefixes: tuple[str, ...], expected: dict[str, str]
) -> None:
    found = Checkpoint.open(weights).tensors(iter(prefixes))
    assert set(found) == set(expected)
    for short, name in expected.items():
        assert torch.equal(found[short], TENSORS[name])
        assert found[short].dtype == TENSORS[name].dtype


def test_only_floating_point_tensors_take_the_dtype(weights: Path) -> None:
    found = Checkpoint.open(weights).tensors([""], dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: torch.bfloat16 if tensor.is_floating_point() else tensor.dtype for name, tensor in TENSORS.items()
    }


def test_prefixes_that_nothing_has_are_refused_by_name(weights: Path) -> None:
    refused(lambda: Checkpoint.open(weights).tensors(["vision.", "tower."]), "vision.", "tower.", str(weights))


def test_two_tensors_of_one_short_name_are_refused(folder: Path) -> None:
    save_file({"a.x": torch.zeros(1), "b.x": torch.ones(1)}, folder / "model.safetensors")
    refused(lambda: Checkpoint.open(folder).tensors(["a.", "b."]), "one tensor 'x'", "found two")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_formats_that_run_code_are_not_opened(folder: Path, name: str) -> None:
    torch.save({"visual.a": torch.zeros(1)}, folder / name)
    opened = Checkpoint.open(folder)
    refused(opened.tensor_names, "safetensors", "run code")
    refused(lambda: opened.tensors(["visual."]), "safetensors")


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 100, b"PK\x03\x04", b"\x02\0\0\0\0\0\0\0{}"[:-1]])
def test_a_broken_file_of_tensors_is_refused_by_its_name(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    refused(lambda: Checkpoint.open(folder).tensors([""]), "model.safetensors")


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": []}, {"weight_map": {"visual.a": 1}}, {"weight_map": {"visual.a": None}}, "{", "[]"],
    ids=str,
)
def test_a_broken_index_is_refused_by_its_name(folder: Path, index: Any) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    write(folder, "model.safetensors.index.json", index)
    refused(lambda: Checkpoint.open(folder).tensors(["visual."]), "model.safetensors.index.json")


def test_an_index_that_names_a_missing_file_or_tensor_is_refused(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    for table in ({"visual.a": "gone.safetensors"}, {"visual.z": "model.safetensors"}):
        write(folder, "model.safetensors.index.json", {"weight_map": table})
        refused(lambda: Checkpoint.open(folder).tensors(["visual."]), next(iter(table.values())))


def test_only_the_chosen_shards_are_opened(folder: Path) -> None:
    save_file({"visual.a": TENSORS["visual.a"]}, folder / "one.safetensors")
    (folder / "two.safetensors").write_bytes(b"broken")
    table = {"visual.a": "one.safetensors", "lm_head": "two.safetensors"}
    write(folder, "model.safetensors.index.json", {"weight_map": table})
    assert torch.equal(Checkpoint.open(folder).tensors(["visual."])["a"], TENSORS["visual.a"])


def test_tensors_are_read_by_their_full_names(folder: Path) -> None:
    save_file({"a.x": torch.ones(2), "a.y": torch.ones(3, dtype=torch.int64)}, folder / "model.safetensors")
    opened = Checkpoint.open(folder)
    found = opened.read_tensors(["a.x"], dtype=torch.bfloat16)
    assert list(found) == ["a.x"]
    assert found["a.x"].dtype == torch.bfloat16
    assert opened.read_tensors(["a.y"], dtype=torch.bfloat16)["a.y"].dtype == torch.int64
    refused(lambda: opened.read_tensors(["a.x", "a.z"]), "no tensor 'a.z'", str(folder))


def test_tensors_that_are_not_the_modules_are_named() -> None:
    module = torch.nn.Linear(2, 3, device="meta").state_dict()
    check_tensors({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, module, what="x")
    error = refused(
        lambda: check_tensors({"weight": torch.ones(2, 3), "scale": torch.ones(3)}, module, what="x"),
        "x: 1 missing (bias)",
        "1 unexpected (scale)",
        "1 of another shape (weight [2, 3] where its config.json says [3, 2])",
    )
    assert error.argument == "checkpoint"


# --- fingerprint -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
)
def test_the_fingerprint_changes_with_the_settings_by_which_an_encoder_may_normalize(folder: Path, name: str) -> None:
    first = Checkpoint.open(folder).fingerprint()
    write(folder, name, {"image_std": [0.25] * 3})
    second = Checkpoint.open(folder).fingerprint()
    write(folder, name, {"image_std": [0.5] * 3})
    assert len({first, second, Checkpoint.open(folder).fingerprint()}) == 3


def test_the_fingerprint_changes_with_config_and_weights(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    first = Checkpoint.open(folder).fingerprint()
    assert Checkpoint.open(folder).fingerprint() == first
    write(folder, "config.json", {"architectures": ["B"]})
    second = Checkpoint.open(folder).fingerprint()
    save_file({"lm_head_2": torch.zeros(7)}, folder / "more.safetensors")
    assert len({first, second, Checkpoint.open(folder).fingerprint()}) == 3


def test_copies_in_other_folders_with_other_times_and_shards_have_one_fingerprint(folder: Path, tmp_path: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    first = Checkpoint.open(folder).fingerprint()
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert Checkpoint.open(copy).fingerprint() == first
    (copy / "model.safetensors").unlink()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, copy / f"{name}.safetensors", metadata={"written": "by a test"})
    assert Checkpoint.open(copy).fingerprint() == first


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_one_changed_tensor_changes_the_fingerprint_at_equal_size_and_time(folder: Path, name: str) -> None:
    found = set()
    for change in (0, 1):
        save_file({**TENSORS, name: TENSORS[name] + change}, folder / "new.safetensors")
        (folder / "new.safetensors").replace(folder / "model.safetensors")
        os.utime(folder / "model.safetensors", ns=(1, 1))
        found.add(Checkpoint.open(folder).fingerprint())
        found.add(Checkpoint.open(folder).fingerprint([other for other in TENSORS if other != name]))
    assert len(found) == 3  # what is left out does not count


def test_a_checkpoint_knows_which_tensors_were_read_through_it(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors_read == frozenset()
    checkpoint.tensors(["visual."])
    assert checkpoint.tensors_read == {name for name in TENSORS if name.startswith("visual.")}
    assert checkpoint.view().tensors_read == frozenset()
