"""From a checkpoint to an open processor or encoder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from records import record_of
from safetensors.torch import save_file

from mm_plugin import (
    Checkpoint,
    PluginLoadError,
    UsageError,
)

SPECIALIZE = """
import msgspec
from mm_plugin import UsageError

calls = []

def specialize(spec, checkpoint):
    taste = checkpoint.config.get("taste")
    calls.append(taste)
    if taste == "bitter":
        raise UsageError("not this one", argument="checkpoint")
    if taste == "broken":
        raise KeyError("oh")
    made = msgspec.structs.replace(spec, name="sweet", specialize=None, notes={"taste": str(taste)})
    odd = {"none": None, "spec": made, "pair": (made, checkpoint), "again": (spec, checkpoint, 1)}
    return odd.get(taste, (made, checkpoint, {"learned": taste}))
"""


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Unknown"], **config}))
    return folder


def with_specialist(site: Any) -> None:
    source = site.hooks({"name": "base", "specialize": "catch_all.learn:specialize"})
    site.install("catch-all", source, plugin="any", fallback=["any"], files={"catch_all/learn.py": SPECIALIZE})


def test_a_plugin_makes_its_spec_for_a_checkpoint_and_its_record_says_so(
    site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    assert registry.resolve({"architectures": ["Unknown"]}).name == "base"
    assert record_of(registry, "any").opened == ()
    folder = checkpoint(tmp_path / "a", taste="mild")
    # It comes as far as the class that the spec made for it names.
    with pytest.raises(PluginLoadError, match="sweet names processor 'nowhere"):
        registry.load_processor(folder)
    with pytest.raises(PluginLoadError, match="sweet names encoder 'nowhere"):
        registry.load_encoder(folder)
    (opened,) = record_of(registry, "any").opened
    assert (opened.checkpoint, opened.model, opened.error) == (str(folder), "sweet", None)
    assert opened.notes == {"taste": "mild"}


def test_a_checkpoint_that_carries_a_specialization_is_not_specialized_again(
    site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    base = registry.resolve({"architectures": ["Unknown"]})
    made = msgspec.structs.replace(base, name="known", specialize=None, notes={"taste": "known"})
    plain = Checkpoint.open(checkpoint(tmp_path / "a", taste="mild"))
    with pytest.raises(PluginLoadError, match="known names processor 'nowhere"):
        registry.load_processor(plain.specialized(made, None, base=base))
    (opened,) = record_of(registry, "any").opened
    assert (opened.model, opened.notes) == ("known", {"taste": "known"})
    assert "catch_all.learn" not in sys.modules
    for other in (None, made):  # what was made from another declaration is not used
        with pytest.raises(PluginLoadError, match="sweet names processor 'nowhere"):
            registry.load_processor(plain.specialized(made, None, base=other))
    assert sys.modules["catch_all.learn"].calls == ["mild", "mild"]


@pytest.mark.parametrize(
    ("taste", "kind", "said"),
    [
        ("bitter", UsageError, "not this one"),
        ("broken", PluginLoadError, r"any \(catch-all 1.0\): catch_all.learn:specialize failed on .*KeyError: 'oh'"),
        ("none", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("spec", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("pair", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("again", PluginLoadError, "the spec without specialize"),
    ],
)
def test_a_checkpoint_that_a_plugin_refuses_is_in_its_record(
    taste: str, kind: type[Exception], said: str, site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    with pytest.raises(kind, match=said) as caught:
        registry.load_processor(checkpoint(tmp_path / "a", taste=taste))
    (opened,) = record_of(registry, "any").opened
    assert opened.model is None
    assert opened.error == str(caught.value)
    assert record_of(registry, "any").state == "loaded"


# ---------------------------------------------------------------- encoders

ENCODER = """
from mm_plugin import Encoder, EncodesImages

class Sees(Encoder, EncodesImages):
    def get_image_feature(self, items):
        return []

    @classmethod
    def load(cls, checkpoint, device, dtype):
        assert not checkpoint.tensors_read
        made = cls()
        made.weight = checkpoint.tensors(("vision.",), device=device, dtype=dtype)["weight"]
        return made
"""


def test_only_what_an_encoder_reads_itself_is_in_its_version(site: Any, open_registry: Any, tmp_path: Path) -> None:
    source = site.hooks({"name": "seer", "architectures": ("Seer",), "encoder": "seer.encoder:Sees"})
    site.install("seer", source, files={"seer/encoder.py": ENCODER}, architectures=["Seer"])
    registry = open_registry()

    def written(name: str, **tensors: float) -> Path:
        folder = checkpoint(tmp_path / name, architectures=["Seer"])
        filled = {f"{part}.weight": torch.full((2,), value) for part, value in tensors.items()}
        save_file(filled, folder / "model.safetensors")
        return folder

    folder = written("a", vision=1.0, text=1.0)
    version = registry.load_encoder(folder).version
    opened = Checkpoint.open(folder)
    opened.tensors(("text.",))
    assert registry.load_encoder(opened).version == registry.load_encoder(opened).version == version
    assert opened.tensors_read == {"text.weight"}
    assert registry.load_encoder(written("b", vision=1.0, text=2.0)).version == version
    assert registry.load_encoder(written("c", vision=2.0, text=1.0)).version != version
