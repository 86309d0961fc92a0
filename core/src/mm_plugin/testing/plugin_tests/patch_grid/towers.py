"""The vision tower alone gives the embeddings of transformers' whole model, from images and videos, in both forms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.media.types import VideoFrames
from mm_plugin.registry import Registry
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.encoders import EncoderTests
from mm_plugin.testing.plugin_tests.media import image_of, moving_frames
from mm_plugin.testing.plugin_tests.patch_grid.requests import GRIDS, IMAGE, SMALL_FRAMES, VIDEO, tower_embeddings

# With windows of 2 x 2 merged patches: sizes that fill them, that leave edges on one side or both, and that are smaller.
_SIZES = [(56, 56), (112, 168), (84, 140), (61, 45), (28, 28), (200, 300)]
_SHAPES = [(1, 84, 112), (3, 56, 56), (4, 84, 140), (6, 28, 196)]


def images_of(processor: Any, images: list[Image.Image]) -> Any:
    """Processed images."""
    return processor.process(IMAGE * len(images), images).mm_items


def videos_of(processor: Any, videos: list[np.ndarray]) -> Any:
    """Processed frames, two a second."""
    frames = [VideoFrames(each, fps=2) for each in videos]
    return processor.process(VIDEO * len(videos), videos=frames, **SMALL_FRAMES).mm_items


class PatchGridEncoderTests(EncoderTests):
    """See `EncoderTests`; also needs `model` and `pillow`.

    Attributes:
        TINY: makes the checkpoints.
    """

    MODALITIES: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)
    HIDDEN: ClassVar[int] = 64
    TINY: ClassVar[PatchGridCheckpoints]

    def items(self, processor: Any, modality: Modality) -> Any:
        """See `EncoderTests`."""
        if modality is Modality.IMAGE:
            return images_of(processor, [image_of(index, *size) for index, size in enumerate(_SIZES)])
        return videos_of(processor, [moving_frames(*shape) for shape in _SHAPES])

    def make_checkpoint(self, folder: Path, *, seed: int | None = None) -> Path:
        """See `EncoderTests`."""
        return self.TINY.write(folder) if seed is None else self.TINY.write(folder, seed=seed)

    def expected_parameters(self, request: pytest.FixtureRequest) -> Mapping[str, torch.Tensor]:
        """See `EncoderTests`."""
        return dict(request.getfixturevalue("model").model.visual.named_parameters())

    def test_embeddings_of_both_forms_equal_the_whole_models(
        self, modality: Modality, processor: Any, exact: Any, encoder: Any, model: Any
    ) -> None:
        compact, floats = self.items(processor, modality), self.items(exact, modality)
        together = encoder.encode(modality, compact)
        for item, small, found in zip(floats, compact, together, strict=True):
            expected = tower_embeddings(model.model.visual, item)
            assert found.shape == expected.shape == (item.num_tokens, self.HIDDEN)
            assert float(expected.std()) > 0.01  # embeddings that are all alike would prove nothing
            (alone,), (large,) = encoder.encode(modality, [small]), encoder.encode(modality, [item])
            for each in (found, alone, large):
                assert self.near(each, expected)

    def test_compact_features_of_the_pillow_rule_are_within_rounding_of_its_float_ones(
        self, registry: Registry, checkpoint: Path, pillow: Any, encoder: Any
    ) -> None:
        compact = registry.load_processor(checkpoint, resize="pillow")
        both = (images_of(opened, [image_of(0, 100, 70)]) for opened in (compact, pillow))
        (left,), (right,) = (encoder.encode(Modality.IMAGE, items) for items in both)
        assert self.near(left, right)

    def test_frames_of_a_patch_are_not_taken_for_one_image(self, processor: Any, encoder: Any) -> None:
        frames = moving_frames(2, 56, 56)
        videos = [frames, frames[::-1].copy(), frames[:1]]
        ahead, back, still = (encoder.encode(Modality.VIDEO, videos_of(processor, [video]))[0] for video in videos)
        assert not torch.allclose(ahead, back, rtol=0, atol=1e-3)
        assert not torch.allclose(ahead, still, rtol=0, atol=1e-3)
        (image,) = encoder.encode(Modality.IMAGE, images_of(processor, [Image.fromarray(frames[0])]))
        assert self.near(still, image)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        grids=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
        video=st.booleans(),
    )
    def test_any_grids_together_equal_transformers(
        self, model: Any, encoder: Any, grids: list[Any], video: bool
    ) -> None:
        random = np.random.default_rng(len(grids))
        modality = Modality.VIDEO if video else Modality.IMAGE
        items = []
        for steps, rows, columns in grids:
            grid = np.array([[steps if video else 1, 2 * rows, 2 * columns]])
            pixels = random.standard_normal((int(grid.prod()), 1176)).astype(np.float32)
            items.append(
                MultimodalDataItem(modality=modality, feature=pixels, model_specific_data={GRIDS[modality]: grid})
            )
        for item, found in zip(items, encoder.encode(modality, items), strict=True):
            assert torch.allclose(found, tower_embeddings(model.model.visual, item), rtol=0, atol=1e-4)

    def test_bfloat16_is_as_near_the_truth_as_transformers_own(
        self, registry: Registry, checkpoint: Path, modality: Modality, tiny: PatchGridCheckpoints, model: Any
    ) -> None:
        half: Any = registry.load_encoder(checkpoint, dtype=torch.bfloat16)
        double, own = (copy.deepcopy(model.model.visual).to(dtype) for dtype in (torch.float64, torch.bfloat16))
        random, still = np.random.default_rng(5), modality is Modality.IMAGE
        frames, ours, theirs = 1 if still else 2, 0.0, 0.0
        mean, std = (
            np.array(tiny.preprocessor[name], np.float32)[:, None, None] * np.float32(255)
            for name in ("image_mean", "image_std")
        )
        for _ in range(24):  # one item alone may be nearer or farther by a tenth
            grid = np.array([[frames, *(2 * random.integers(2, 6, 2))]])
            levels = random.integers(0, 256, (int(grid.prod()), 3, frames, 196), dtype=np.uint8)
            fields = {GRIDS[modality]: grid}
            small = MultimodalDataItem(
                modality=modality, feature=levels.reshape(len(levels), 3, -1), model_specific_data=fields
            )
            floats = np.repeat((levels - mean) / std, 2 // frames, axis=2).reshape(len(levels), -1)
            large = MultimodalDataItem(modality=modality, feature=floats.astype(np.float32), model_specific_data=fields)
            truth = tower_embeddings(double, large).double()
            (found,) = half.encode(modality, [small])
            assert found.dtype == torch.bfloat16
            ours += float((found.double() - truth).abs().sum())
            theirs += float((tower_embeddings(own, large).double() - truth).abs().sum())
        assert 0 < ours <= 1.01 * theirs
