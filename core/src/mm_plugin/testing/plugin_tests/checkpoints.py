"""Checkpoints of every layout open alike; broken ones are refused with the name of the file or tensor that is at fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_plugin.errors import UsageError
from mm_plugin.registry import Registry
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.media import image_of

Tensors = dict[str, torch.Tensor]
# What is done to the tensors of a checkpoint, and a pattern of what must be said of it.
TensorFault = tuple[Callable[[Tensors], None], str]


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of a checkpoint in place."""
    described = json.loads(file.read_text(encoding="utf-8"))
    change(described)
    file.write_text(json.dumps(described), encoding="utf-8")


def tensor_faults(name: str, *, beyond: str, block: str, block_size: int, prefix: str = "") -> dict[str, TensorFault]:
    """The faults of a tower's tensors that every plugin must refuse.

    Args:
        name: of a vector of the tower, in the checkpoint's file.
        beyond: a name that the tower would have if it had a block more.
        block: beginning of the names of a whole block.
        block_size: tensors in it.
        prefix: of the tower in the file, which messages leave out.
    """

    def said(text: str, named: str) -> str:
        return rf"{text} \({re.escape(named.removeprefix(prefix))}"

    def add(tensors: Tensors) -> None:
        tensors[beyond] = tensors[name].clone()

    def shorten(tensors: Tensors) -> None:
        tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()

    def remove_block(tensors: Tensors) -> None:
        for found in [found for found in tensors if found.startswith(block)]:
            del tensors[found]

    return {
        "missing": (lambda tensors: tensors.__delitem__(name), said("1 missing", name) + r"\)"),
        "unexpected": (add, said("1 unexpected", beyond) + r"\)"),
        "shape": (shorten, said("1 of another shape", name) + r" \[16\] .* \[32\]\)"),
        "no block": (remove_block, said(f"{block_size} missing", f"{block}norm1.weight") + r", .*\)"),
    }


class CheckpointTests(PluginTests):
    """How a plugin opens checkpoints. Needs `registry`, `processor` and `encoder`, of an ordinary `make_checkpoint(folder)`.

    Attributes:
        MODEL: the model's short name.
        PROMPT: with one image.
        SIZE: (height, width) of the image, pixels.
        TOKENS: it takes so many.
        LAYOUTS: arguments of `make_checkpoint` that must make no difference.
        FILES: by name of a file that a processor cannot do without, a pattern of what must be said where it is missing.
        VISION: beginnings of the names of all tensors that the encoder reads.
        FAULTS: see `tensor_faults`.
        VOCABULARY: keys in config.json that lead to the size of the vocabulary.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"layout": "LAYOUTS", "missing": "missing_files", "fault": "FAULTS"}
    MODEL: ClassVar[str]
    PROMPT: ClassVar[str]
    SIZE: ClassVar[tuple[int, int]] = (90, 130)
    TOKENS: ClassVar[int]
    LAYOUTS: ClassVar[Mapping[str, Mapping[str, Any]]]
    FILES: ClassVar[Mapping[str, str]]
    VISION: ClassVar[tuple[str, ...]]
    FAULTS: ClassVar[Mapping[str, TensorFault]]
    VOCABULARY: ClassVar[Sequence[str]]

    @property
    def missing_files(self) -> list[str]:
        """Names of the files that are taken away, one at a time."""
        return list(self.FILES)

    def make_checkpoint(self, folder: Path, **changed: Any) -> Path:
        """Write the ordinary tiny checkpoint, or one that differs by these arguments."""
        raise NotImplementedError

    def item(self, processor: Any) -> Any:
        """The processed image."""
        (item,) = processor.process(self.PROMPT, [image_of(0, *self.SIZE)]).mm_items
        return item

    def embeddings(self, encoder: Any, processor: Any) -> torch.Tensor:
        """Of that image."""
        item = self.item(processor)
        (result,) = encoder.encode(item.modality, [item])
        assert isinstance(result, torch.Tensor)
        return result

    def check_layout(self, folder: Path, layout: Mapping[str, Any]) -> None:
        """See that the checkpoint really has the layout."""
        if "shards" in layout:
            assert len(list(folder.glob("*.safetensors"))) == layout["shards"]

    def test_every_layout_gives_the_same_item_and_embeddings(
        self,
        registry: Registry,
        tmp_path: Path,
        layout: Mapping[str, Any],
        processor: Any,
        encoder: Any,
    ) -> None:
        folder = self.make_checkpoint(tmp_path, **layout)
        self.check_layout(folder, layout)
        opened, tower = registry.load_processor(folder), registry.load_encoder(folder)
        assert opened.options == processor.options
        left, right = (found.process(self.PROMPT, [image_of(0, *self.SIZE)]) for found in (opened, processor))
        assert left.mm_items[0].identity == right.mm_items[0].identity
        assert np.array_equal(left.input_ids, right.input_ids)
        assert torch.equal(self.embeddings(tower, opened), self.embeddings(encoder, processor))

    def test_a_config_without_architectures_is_known_by_its_model_type(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        folder = self.make_checkpoint(tmp_path)
        edit_json(folder / "config.json", lambda config: config.pop("architectures", None))
        assert registry.load_processor(folder).spec.name == self.MODEL
        assert registry.load_encoder(folder).version.startswith(f"{self.MODEL}:1:")

    def test_a_missing_file_is_named(self, registry: Registry, tmp_path: Path, missing: str) -> None:
        folder = self.make_checkpoint(tmp_path)
        (folder / missing).unlink()
        with pytest.raises(UsageError, match=self.FILES[missing]) as caught:
            registry.load_processor(folder)
        assert caught.value.argument in ("checkpoint", "config")
        assert str(folder) in caught.value.message

    def test_a_processor_needs_no_weights(self, registry: Registry, tmp_path: Path) -> None:
        folder = self.make_checkpoint(tmp_path, shards=1)
        (folder / "model.safetensors").unlink()
        assert registry.load_processor(folder).count("image", self.SIZE) == (self.TOKENS, self.TOKENS)
        with pytest.raises(UsageError, match=r"expected \.safetensors"):
            registry.load_encoder(folder)

    def test_an_encoder_needs_neither_the_language_model_nor_a_tokenizer(
        self, registry: Registry, tmp_path: Path, processor: Any, encoder: Any
    ) -> None:
        folder = self.make_checkpoint(tmp_path, shards=1)
        (folder / "tokenizer.json").unlink()
        file = folder / "model.safetensors"
        tensors = load_file(file)
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith(self.VISION)}
        assert len(kept) < len(tensors)
        save_file(kept, file)
        tower = registry.load_encoder(folder)
        assert torch.equal(self.embeddings(tower, processor), self.embeddings(encoder, processor))

    def test_tensors_that_do_not_fit_the_config_are_named(
        self, registry: Registry, tmp_path: Path, fault: TensorFault
    ) -> None:
        change, said = fault
        folder = self.make_checkpoint(tmp_path, shards=1)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        with pytest.raises(UsageError, match=said) as caught:
            registry.load_encoder(folder)
        assert caught.value.argument == "checkpoint"
        assert str(folder) in caught.value.message

    def test_a_broken_or_missing_weights_file_is_named(self, registry: Registry, tmp_path: Path) -> None:
        folder = self.make_checkpoint(tmp_path, shards=2)
        shard = sorted(folder.glob("*.safetensors"))[-1]
        shard.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
        with pytest.raises(UsageError, match=rf"{re.escape(shard.name)} cannot be read"):
            registry.load_encoder(folder)
        shard.unlink()
        with pytest.raises(UsageError, match=re.escape(shard.name)):
            registry.load_encoder(folder)

    def test_a_vocabulary_that_reaches_the_sentinels_is_refused(self, registry: Registry, tmp_path: Path) -> None:
        folder = self.make_checkpoint(tmp_path)
        *path, last = self.VOCABULARY

        def enlarge(config: dict[str, Any]) -> None:
            for key in path:
                config = config[key]
            config[last] = 1_000_001

        edit_json(folder / "config.json", enlarge)
        with pytest.raises(UsageError, match="1000001"):
            registry.load_processor(folder)
