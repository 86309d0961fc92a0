"""What every encoder must hold to: company does not matter beyond rounding, features are only read, weights have a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_plugin.errors import EncoderError
from mm_plugin.items import Modality
from mm_plugin.registry import Registry
from mm_plugin.testing.plugin_tests.base import PluginTests


class EncoderTests(PluginTests):
    """An encoder over items of several sizes. Needs `registry`, `checkpoint`, `processor`, `exact` and `encoder`.

    `exact` is the processor whose features are those of the model's own library, in floating point.

    Attributes:
        MODEL: the model's short name.
        DISTRIBUTION: of the plugin.
        MODALITIES: that it encodes.
        HIDDEN: channels of an embedding.
        REFUSED: a modality that it does not encode.
        TOLERANCE: between embeddings of one item in different calls and forms.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"modality": "MODALITIES"}
    MODEL: ClassVar[str]
    DISTRIBUTION: ClassVar[str]
    MODALITIES: ClassVar[Sequence[Modality]] = (Modality.IMAGE,)
    HIDDEN: ClassVar[int]
    REFUSED: ClassVar[Modality] = Modality.AUDIO
    TOLERANCE: ClassVar[float] = 1e-5

    def items(self, processor: Any, modality: Modality) -> Any:
        """Processed media of one modality and several sizes, processed again on each call."""
        raise NotImplementedError

    def make_checkpoint(self, folder: Path, *, seed: int | None = None) -> Path:
        """Write the checkpoint of the fixture once more, with weights of another seed where one is given."""
        raise NotImplementedError

    def own_parameters(self, encoder: Any) -> Mapping[str, torch.Tensor]:
        """The encoder's weights by name."""
        return dict(encoder.tower.named_parameters())

    def expected_parameters(self, request: pytest.FixtureRequest) -> Mapping[str, torch.Tensor]:
        """The same weights as the model's own library, or the checkpoint's file, has them."""
        raise NotImplementedError

    def near(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether they differ by no more than rounding."""
        return torch.allclose(left, right, rtol=0, atol=self.TOLERANCE)

    def test_company_changes_embeddings_by_rounding_only(
        self, modality: Modality, processor: Any, encoder: Any
    ) -> None:
        items = self.items(processor, modality)
        together = encoder.encode(modality, items)
        reverse = encoder.encode(modality, items[::-1])[::-1]
        for item, found, other in zip(items, together, reverse, strict=True):
            (alone,) = encoder.encode(modality, [item])
            assert found.shape == (item.num_tokens, self.HIDDEN)
            assert torch.isfinite(found).all(), "expected finite embeddings, got NaN or infinity"
            assert self.near(alone, found), "expected an item alone to get what it gets in a batch"
            assert self.near(other, found), "expected a reversed batch to give the same embeddings, reversed"
        assert float(torch.cat(list(together)).std()) > 0.01  # embeddings that are all alike would prove nothing

    def test_embeddings_of_equally_large_items_are_not_exchanged(
        self, modality: Modality, processor: Any, encoder: Any
    ) -> None:
        """An encoder that sorts its items puts them back; only items of one size tell whether it does."""
        for item in self.items(processor, modality):
            twin = msgspec.structs.replace(item, feature=_other_content(item.feature))
            (mine,), (other,) = encoder.encode(modality, [item]), encoder.encode(modality, [twin])
            assert not self.near(mine, other), "expected other content to give other embeddings"
            for batch, expected in (([item, twin], [mine, other]), ([twin, item], [other, mine])):
                for found, right in zip(encoder.encode(modality, batch), expected, strict=True):
                    assert self.near(found, right), "expected embeddings in the order of the items"

    def test_a_batch_leaves_its_items_as_they_were(self, modality: Modality, processor: Any, encoder: Any) -> None:
        items = self.items(processor, modality)
        before = [msgspec.structs.replace(item, feature=item.feature.copy()) for item in items]
        encoder.encode(modality, items)
        for index, (item, kept) in enumerate(zip(items, before, strict=True)):
            assert np.array_equal(item.feature, kept.feature), f"the encoder wrote into the feature of item {index}"
            assert item.offsets == kept.offsets, f"the encoder changed the spans of item {index}"
            assert item.model_specific_data.keys() == kept.model_specific_data.keys()

    def test_the_same_call_gives_the_same_bits(self, modality: Modality, processor: Any, encoder: Any) -> None:
        items = self.items(processor, modality)
        for left, right in zip(encoder.encode(modality, items), encoder.encode(modality, items), strict=True):
            assert torch.equal(left, right)

    def test_both_forms_of_a_feature_give_the_same_embeddings(
        self, modality: Modality, processor: Any, exact: Any, encoder: Any
    ) -> None:
        both = (encoder.encode(modality, self.items(opened, modality)) for opened in (processor, exact))
        for left, right in zip(*both, strict=True):
            assert self.near(left, right)

    @pytest.mark.parametrize("form", ["processor", "exact"])
    def test_a_feature_is_read_and_not_written_and_may_be_a_tensor(
        self, form: str, modality: Modality, encoder: Any, request: pytest.FixtureRequest
    ) -> None:
        item = self.items(request.getfixturevalue(form), modality)[0]
        feature, before = item.feature, item.feature.copy()
        (expected,) = encoder.encode(modality, [item])
        assert np.array_equal(feature, before)
        assert not expected.requires_grad
        item.feature = torch.from_numpy(feature)
        (found,) = encoder.encode(modality, [item])
        assert torch.equal(found, expected)

    def test_a_checkpoint_in_bfloat16_is_opened_as_it_is_or_as_asked(
        self, registry: Registry, processor: Any, tmp_path: Path
    ) -> None:
        folder = self.make_checkpoint(tmp_path)
        for file in folder.glob("*.safetensors"):
            save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
        modality = self.MODALITIES[-1]
        item = self.items(processor, modality)[0]
        stored: Any = registry.load_encoder(folder)
        converted: Any = registry.load_encoder(folder, dtype=torch.float32)
        (own,), (asked,) = (opened.encode(modality, [item]) for opened in (stored, converted))
        assert (own.dtype, asked.dtype) == (torch.bfloat16, torch.float32)
        assert torch.allclose(own.float(), asked, atol=0.05)

    def test_opening_draws_no_random_numbers_and_leaves_nothing_unfilled(
        self, registry: Registry, checkpoint: Path, request: pytest.FixtureRequest
    ) -> None:
        before = torch.random.get_rng_state()
        encoder = registry.load_encoder(checkpoint)
        assert torch.equal(torch.random.get_rng_state(), before)
        found, expected = self.own_parameters(encoder), self.expected_parameters(request)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name

    def test_other_weights_have_another_version(
        self, registry: Registry, checkpoint: Path, encoder: Any, tmp_path: Path
    ) -> None:
        other = registry.load_encoder(self.make_checkpoint(tmp_path, seed=7))
        assert encoder.version.startswith(f"{self.MODEL}:1:")
        assert other.version != encoder.version
        assert registry.load_encoder(checkpoint).version == encoder.version

    def test_a_modality_that_it_does_not_encode_is_refused_by_name(self, encoder: Any) -> None:
        with pytest.raises(EncoderError, match=f"does not encode {self.REFUSED.argument}") as caught:
            encoder.encode(self.REFUSED, [])
        assert caught.value.distribution == self.DISTRIBUTION


def _other_content(feature: np.ndarray) -> np.ndarray:
    """Another feature of the same form."""
    return 255 - feature if feature.dtype == np.uint8 else -feature
