"""No tensor of a tower is without a value: what no file holds is named at loading, and can be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mm_plugin import Checkpoint, EncoderError
from mm_plugin.encoder import fill_tower, load_tower
from mm_plugin.encoder.loading import without_memory
from mm_plugin.errors import UnattributedError


class Positions(torch.nn.Module):
    """As towers of CLIP's kind: a table of embeddings, and the ids under which they are looked up, which no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 2)
        self.register_buffer("ids", torch.arange(4).expand(1, -1), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.table(self.ids)  # type: ignore[no-any-return]


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.proj = torch.nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("nothing", None)
        self.plain = torch.arange(3.0)  # neither parameter nor buffer
        self.several = [torch.arange(2), {"angles": torch.arange(2)}]


WEIGHTS = {name: torch.full(part.shape, 2.0) for name, part in Tower().state_dict().items()}
LEFT = ["plain", "several[0]", "several[1]['angles']", "positions.ids"]


def values(tower: Any) -> dict[str, torch.Tensor]:
    tower.several = [torch.arange(2), {"angles": torch.arange(2)}]
    return {"plain": torch.arange(3.0), "positions.ids": torch.arange(4).expand(1, -1)}


def fill(**named: Any) -> Any:
    return fill_tower(Tower, lambda: dict(WEIGHTS), what="not a tower", **named)


def load(folder: Path, **named: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": "little"}))
    save_file({f"visual.{name}": tensor for name, tensor in WEIGHTS.items()}, folder / "model.safetensors")
    return load_tower(Tower, Checkpoint.open(folder), ("visual.",), device="cpu", dtype=None, **named)


def test_every_tensor_without_a_value_is_named(tmp_path: Path) -> None:
    for call in (fill, lambda: load(tmp_path)):
        with pytest.raises(UnattributedError) as caught:
            call()
        assert ", ".join(LEFT) in caught.value.message
        assert "computed=" in caught.value.message


def test_what_is_given_is_the_towers(tmp_path: Path) -> None:
    for tower in (fill(computed=values), load(tmp_path, computed=values)):
        assert without_memory(tower) == []
        assert tower.positions.ids.tolist() == [[0, 1, 2, 3]]
        assert tower.positions().tolist() == [[[2.0, 2.0]] * 4]
        assert tower.plain.tolist() == [0, 1, 2]
        assert "positions.ids" not in tower.state_dict()
        assert not any(part.requires_grad for part in tower.parameters())


GIVEN: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "not all": ({"plain": torch.arange(3.0)}, "none for several.*positions.ids"),
    "a name that is not there": (
        {"positions.id": torch.arange(4)},
        "'positions.id'; expected one of those without a value",
    ),
    "one that a file holds": ({"proj.weight": torch.ones(2, 2)}, "'proj.weight'; expected one of those"),
    "another shape": ({"positions.ids": torch.arange(4)}, r"'positions.ids' \[4\], expected \[1, 4\]"),
    "another one without a value": ({"plain": torch.empty(3, device="meta")}, "none for plain"),
    "none": ({}, "none for plain"),
}


@pytest.mark.parametrize(("given", "said"), GIVEN.values(), ids=GIVEN)
def test_what_is_given_wrongly_is_named(given: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(UnattributedError, match=said):
        fill(computed=lambda tower: given)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Cyclic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = [self]


HOLDERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "nothing": (Holder, []),
    "a tensor": (lambda: Holder(table=meta(2)), ["table"]),
    "a module": (lambda: Holder(tower=torch.nn.Linear(1, 1, device="meta")), ["tower.weight", "tower.bias"]),
    "a list of modules": (
        lambda: Holder(parts=[torch.nn.Linear(1, 1, bias=False, device="meta")]),
        ["parts[0].weight"],
    ),
    "a mapping": (lambda: Holder(tables={"a": torch.ones(1), "b": meta(1)}), ["tables['b']"]),
    "tensors with values": (lambda: Holder(table=torch.ones(2), tower=torch.nn.Linear(1, 1)), []),
    "a circle": (lambda: Holder(tower=Cyclic()), []),
    "what is not a tensor": (lambda: Holder(name="x", count=5, own=object()), []),
}


@pytest.mark.parametrize(("make", "names"), HOLDERS.values(), ids=HOLDERS)
def test_what_an_object_holds_without_values_is_found(make: Callable[[], Any], names: list[str]) -> None:
    assert without_memory(make()) == names


ENCODER = """
import torch
from mm_plugin import Encoder, EncodesImages

class Towers(Encoder, EncodesImages):
    @classmethod
    def load(cls, checkpoint, device, dtype):
        encoder = cls()
        with torch.device("meta"):
            tower = torch.nn.Module()
            tower.register_buffer("position_ids", torch.arange(4), persistent=False)
        if checkpoint.config["broken"]:
            encoder.tower = tower
        return encoder

    def get_image_feature(self, items):
        return []
"""


@pytest.mark.parametrize("broken", [True, False])
def test_an_encoder_that_a_plugin_loaded_by_itself_is_examined_too(
    broken: bool, site: Any, open_registry: Any, tmp_path: Path
) -> None:
    spec = {"name": "towers", "architectures": ("Odd",), "encoder": "towers.encoder:Towers"}
    site.install("towers", site.hooks(spec), architectures=["Odd"], files={"towers/encoder.py": ENCODER})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Odd"], "broken": broken}))
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    if not broken:
        assert open_registry().load_encoder(tmp_path) is not None
        return
    with pytest.raises(
        EncoderError, match=r"without values, on the meta device: tower\.position_ids; give them"
    ) as caught:
        open_registry().load_encoder(tmp_path)
    assert caught.value.plugin == "towers"
