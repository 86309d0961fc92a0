"""The shared tests of plugins can fail: each is broken by an encoder, a schedule or a package that it alone catches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mm_plugin import Encoder, EncoderError, EncodesImages, Modality, MultimodalDataItem
from mm_plugin.inputs import MultimodalProcessorOutput
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of
from mm_plugin.testing.plugin_tests import EncoderTests, ImportTests, PluginTests, ScheduleTests, World, tensor_faults

IMAGE = Modality.IMAGE


class Sum(Encoder, EncodesImages):
    """An embedding is a patch, as it is."""

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Sum:
        raise NotImplementedError

    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [torch.as_tensor(item.feature).clone() for item in items]


class MixesItems(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [found + 0.01 * len(items) for found in super().get_image_feature(items)]


class DrawsNumbers(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [found + 1e-7 * torch.rand(1) for found in super().get_image_feature(items)]


class WritesFeatures(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [torch.as_tensor(item.feature).mul_(2) for item in items]


class SortsItems(Sum):
    """By size, and forgets their order: wrong for items of one size too, where it sorts by content."""

    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return super().get_image_feature(sorted(items, key=lambda item: (item.num_tokens, float(item.feature.sum()))))


class SortsEqualSizes(Sum):
    """Puts sizes back in order, but not items of one size."""

    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        found = super().get_image_feature(sorted(items, key=lambda item: float(item.feature.sum())))
        return [found.pop(next(i for i, one in enumerate(found) if len(one) == item.num_tokens)) for item in items]


class WritesInBatches(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        found = super().get_image_feature(items)
        for item in items[1:]:
            item.feature *= 2
        return found


class GivesNaN(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [
            found.masked_fill(torch.arange(len(found))[:, None] == 3, float("nan"))
            for found in super().get_image_feature(items)
        ]


class IgnoresContent(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return [found.abs() for found in super().get_image_feature(items)]


class EncodesAnything(Sum):
    def get_image_feature(self, items: Any) -> list[torch.Tensor]:
        return []


def item_of(seed: int, tokens: int = 4) -> MultimodalDataItem:
    feature = np.random.default_rng(seed).standard_normal((tokens, 3)).astype(np.float32)
    item = MultimodalDataItem(modality=IMAGE, feature=feature, offsets=[(1, tokens)])
    item.set_identity(bytes([seed]) * 32)
    return item


class OfSum(EncoderTests):
    HIDDEN, DISTRIBUTION = 3, "kit"

    def items(self, processor: Any, modality: Modality) -> list[MultimodalDataItem]:
        return [item_of(seed, tokens) for seed, tokens in ((1, 4), (2, 6))]


def test_an_encoder_whose_items_change_one_another_is_caught() -> None:
    OfSum().test_company_changes_embeddings_by_rounding_only(IMAGE, None, Sum())
    with pytest.raises(AssertionError):
        OfSum().test_company_changes_embeddings_by_rounding_only(IMAGE, None, MixesItems())


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (SortsItems, "in the order of the items"),
        (SortsEqualSizes, "in the order of the items"),
        (IgnoresContent, "other content to give other embeddings"),
    ],
)
def test_an_encoder_that_exchanges_items_is_caught(mutant: type[Sum], words: str) -> None:
    OfSum().test_embeddings_of_equally_large_items_are_not_exchanged(IMAGE, None, Sum())
    with pytest.raises(AssertionError, match=words):
        OfSum().test_embeddings_of_equally_large_items_are_not_exchanged(IMAGE, None, mutant())


def test_items_of_unequal_sizes_alone_would_not_catch_it() -> None:
    OfSum().test_company_changes_embeddings_by_rounding_only(IMAGE, None, SortsEqualSizes())


def test_an_encoder_that_writes_into_a_batch_is_caught() -> None:
    OfSum().test_a_batch_leaves_its_items_as_they_were(IMAGE, None, Sum())
    with pytest.raises(AssertionError, match="wrote into the feature of item 1"):
        OfSum().test_a_batch_leaves_its_items_as_they_were(IMAGE, None, WritesInBatches())


def test_an_encoder_that_gives_nan_is_caught() -> None:
    with pytest.raises(AssertionError, match="expected finite embeddings"):
        OfSum().test_company_changes_embeddings_by_rounding_only(IMAGE, None, GivesNaN())


def test_an_encoder_that_draws_random_numbers_is_caught() -> None:
    OfSum().test_the_same_call_gives_the_same_bits(IMAGE, None, Sum())
    with pytest.raises(AssertionError):
        OfSum().test_the_same_call_gives_the_same_bits(IMAGE, None, DrawsNumbers())


def test_an_encoder_that_writes_its_features_is_caught() -> None:
    class Fixtures:
        def getfixturevalue(self, name: str) -> None:
            return None

    fixtures: Any = Fixtures()
    OfSum().test_a_feature_is_read_and_not_written_and_may_be_a_tensor("exact", IMAGE, Sum(), fixtures)
    with pytest.raises(AssertionError):
        OfSum().test_a_feature_is_read_and_not_written_and_may_be_a_tensor("exact", IMAGE, WritesFeatures(), fixtures)


def test_an_encoder_that_encodes_anything_is_caught() -> None:
    named = Sum()
    named.bind(version="1", owner={"plugin": "kit", "distribution": "kit", "version": "1"})
    OfSum().test_a_modality_that_it_does_not_encode_is_refused_by_name(named)

    class OfImages(OfSum):
        REFUSED = IMAGE

    with pytest.raises(pytest.fail.Exception):
        OfImages().test_a_modality_that_it_does_not_encode_is_refused_by_name(EncodesAnything())
    with pytest.raises(EncoderError):
        EncodesAnything().encode(Modality.VIDEO, [])


def world() -> World:
    table, outputs, references = torch.nn.Embedding(8, 3).requires_grad_(False), [], []
    for seeds in ((), (1,), (2,), (1,), (2,)):
        items = [item_of(seed) for seed in seeds]
        ids = np.array([1, *[7] * 4, 2] if items else [1, 2, 3])
        output = MultimodalProcessorOutput(
            input_ids=ids,
            padded_input_ids=pad_by_offsets(ids, items),
            token_modalities=token_modalities_of(items, len(ids)),
            mm_items=items,
        )
        embeds = table(torch.from_numpy(ids)).clone()
        for item in items:
            embeds[1:5] = torch.from_numpy(item.feature)
        outputs.append(output)
        references.append(embeds)
    return World(outputs, references, table, n_items=2)


MOVES = [[("extend", 3, 0)] * 5, [("retract", 2, 1), ("absent", 0, 0), *[("extend", 1, 0)] * 3]]


class Scheduled(ScheduleTests):
    """Not collected, since its name does not begin with Test."""


def test_a_schedule_of_wrong_embeddings_is_caught() -> None:
    for capacity in (None, 1 << 24):
        Scheduled().run(world(), Sum(), MOVES, capacity, None)
        with pytest.raises(AssertionError):
            Scheduled().run(world(), MixesItems(), MOVES, capacity, None)


def test_items_that_are_encoded_twice_are_caught() -> None:
    made = world()
    fewer = World(made.outputs, made.references, made.table, n_items=1)
    with pytest.raises(AssertionError):
        Scheduled().run(fewer, Sum(), MOVES, 1 << 24, None)


@pytest.mark.parametrize("module", ["hooks", "processor"])
def test_a_package_that_imports_too_much_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    package = tmp_path / "heavy_vl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text("def mm_register_models(): pass\n" + "import torch\n" * (module == "hooks"))
    (package / "processor.py").write_text("import mm_plugin.demo\n" * (module == "processor"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Imports(ImportTests):
        PACKAGE, RUNTIME = "heavy_vl", ("processor",)

    tests = {
        "hooks": Imports().test_light_modules_import_neither_torch_nor_transformers,
        "processor": Imports().test_what_serves_imports_no_demo_no_command_and_no_kit,
    }
    for name, test in tests.items():
        if name == module:
            with pytest.raises(AssertionError):
                test()
        else:
            test()


def test_faults_of_tensors_are_what_their_patterns_say() -> None:
    faults = tensor_faults("v.blocks.0.bias", beyond="v.blocks.1.bias", block="v.blocks.0.", block_size=2, prefix="v.")
    assert set(faults) == {"missing", "unexpected", "shape", "no block"}
    for fault, kept in (("missing", {"other"}), ("no block", {"other"})):
        tensors = {"v.blocks.0.bias": torch.zeros(4), "other": torch.zeros(1)}
        faults[fault][0](tensors)
        assert set(tensors) == kept
    assert faults["missing"][1] == r"1 missing \(blocks\.0\.bias\)"


class OfMapping(PluginTests):
    PARAMETERS: ClassVar[dict[str, str]] = {"case": "CASES", "kind": "KINDS"}
    CASES: ClassVar[dict[str, int]] = {"one": 1, "two": 2}
    KINDS: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)


class TestOfMapping(OfMapping):
    KINDS: ClassVar[tuple[Modality, ...]] = (Modality.AUDIO,)

    def test_a_parameter_has_the_values_of_the_subclass(
        self, case: int, kind: Modality, request: pytest.FixtureRequest
    ) -> None:
        assert kind is Modality.AUDIO
        name = {1: "one", 2: "two"}[case]
        assert request.node.name.endswith(f"[{name}-AUDIO]") or request.node.name.endswith(f"[AUDIO-{name}]")


def test_the_kit_imports_pytest_only_for_the_shared_tests(fresh: Callable[..., Any]) -> None:
    code = "import json, sys, mm_plugin.testing as t\nfor name in t.__all__: getattr(t, name)\n"
    assert fresh(code + "print(json.dumps([n for n in ('pytest', 'hypothesis', 'av') if n in sys.modules]))") == []
    assert "pytest" in sys.modules  # the check can fail
