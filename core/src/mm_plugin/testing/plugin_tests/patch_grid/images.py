"""Images: pixels, grids and counts are those of transformers, bit for bit; options are refused where they may not be given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin.errors import MediaError, MMPluginError, RequestError, UsageError
from mm_plugin.items import Modality
from mm_plugin.registry import Registry
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.media import image_of, png_of
from mm_plugin.testing.plugin_tests.patch_grid.requests import IMAGE

MODES = ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "HSV")
# (height, width): small, thin, on and off multiples of 28, at the ties of rounding, 200 to 1.
SIZES = [
    (1, 1), (1, 200), (200, 1), (13, 13), (14, 14), (15, 300), (26, 28), (27, 29), (28, 28), (41, 43), (42, 42), (42, 70),
    (56, 84), (69, 71), (97, 211), (110, 57), (140, 140), (161, 184), (224, 300), (333, 332), (337, 400), (30, 900), (500, 700),
]  # fmt: skip
SIDES = [1, 5, 13, 28, 57, 161, 333, 640, 999, 1414, 2000]
_RATIO = 200
_PROMPT = f"a{IMAGE}b"


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image of which no two parts are alike."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def process_one(processor: Any, image: Any, **options: Any) -> Any:
    """The item of one image."""
    (item,) = processor.process(_PROMPT, [image], **options).mm_items
    return item


@functools.cache
def _edges(least: int, most: int) -> dict[str, int]:
    return {"shortest_edge": least, "longest_edge": most}


class ImageTests(PluginTests):
    """What the tests of images share. They need `registry`, `checkpoint`, `tiny`, `processor`, `exact` and `pillow`."""

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny: PatchGridCheckpoints) -> Any:
        """Transformers' Pillow backend with the settings of the checkpoint."""
        return Qwen2VLImageProcessorPil(size=_edges(tiny.preprocessor["min_pixels"], tiny.preprocessor["max_pixels"]))


class PatchGridImageTests(ImageTests):
    """Pixels of images, against transformers and plain torch."""

    def equals(self, reference: Any, processor: Any, image: Image.Image, **options: int) -> None:
        """Assert that grid, pixels and number of tokens are the reference's."""
        own = {"size": _edges(options["min_pixels"], options["max_pixels"])} if options else {}
        expected = reference(images=image.copy(), return_tensors="np", **own)
        item = process_one(processor, image, **options)
        assert item.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
        assert item.feature.dtype == np.float32
        assert np.array_equal(item.feature, expected["pixel_values"])
        assert item.num_tokens == int(expected["image_grid_thw"].prod()) // 4

    @pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
    def test_pixel_values_equal_transformers_pillow_backend(
        self, reference: Any, pillow: Any, size: tuple[int, int]
    ) -> None:
        self.equals(reference, pillow, noise(*size))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        height=st.integers(1, 260),
        width=st.integers(1, 260),
        seed=st.integers(0, 1000),
        budget=st.sampled_from([None, (3136, 12845056), (784, 50176)]),
    )
    def test_pixel_values_equal_transformers_at_any_size(
        self,
        reference: Any,
        pillow: Any,
        height: int,
        width: int,
        seed: int,
        budget: tuple[int, int] | None,
    ) -> None:
        image = noise(height, width, seed)
        options = {} if budget is None else {"min_pixels": budget[0], "max_pixels": budget[1]}
        if max(height, width) / min(height, width) > _RATIO:
            with pytest.raises(ValueError, match="ratio"):
                reference(images=image)
            with pytest.raises(MediaError, match="ratio"):
                process_one(pillow, image, **options)
        else:
            self.equals(reference, pillow, image, **options)

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_equals_transformers(self, reference: Any, pillow: Any, mode: str) -> None:
        image = image_of(1, 61, 85)
        if mode in ("RGBA", "LA"):
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        self.equals(reference, pillow, image.convert(mode))

    def test_an_image_equals_transformers_through_its_file(self, reference: Any, pillow: Any) -> None:
        import io

        file = io.BytesIO()
        image_of(0, 211, 170).save(file, "JPEG")
        expected = reference(images=Image.open(io.BytesIO(file.getvalue())), return_tensors="np")["pixel_values"]
        assert np.array_equal(process_one(pillow, file.getvalue()).feature, expected)

    @pytest.mark.parametrize(
        ("least", "most"), [(3136, 12845056), (784, 784), (3136, 50176), (200704, 1003520), (1, 1 << 27), (5000, 5001)]
    )
    @pytest.mark.parametrize("size", [(61, 45), (300, 500), (28, 3000), (3, 500)], ids=str)
    def test_pixel_budgets_of_a_request_are_transformers_own(
        self, reference: Any, pillow: Any, least: int, most: int, size: tuple[int, int]
    ) -> None:
        self.equals(reference, pillow, noise(*size), min_pixels=least, max_pixels=most)

    def test_a_budget_of_one_request_does_not_reach_the_next(self, pillow: Any) -> None:
        image = noise(300, 300)
        small = process_one(pillow, image, max_pixels=28 * 28 * 9)
        assert small.image_grid_thw.tolist() == [[1, 6, 6]]
        assert process_one(pillow, image).image_grid_thw.tolist() == [[1, 22, 22]]

    def test_a_budget_of_loading_wins_over_the_checkpoint_and_loses_to_the_request(
        self, registry: Registry, checkpoint: Path
    ) -> None:
        processor = registry.load_processor(checkpoint, max_pixels=28 * 28 * 9)
        image = noise(300, 300)
        assert process_one(processor, image).num_tokens == 9
        assert process_one(processor, image, max_pixels=28 * 28 * 5).num_tokens == 4

    @pytest.mark.parametrize("size", [(61, 45), (42, 200), (300, 213), (28, 28), (56, 84), (29, 900)], ids=str)
    def test_the_torch_rule_is_plain_torch_arithmetic(
        self, tiny: PatchGridCheckpoints, exact: Any, processor: Any, size: tuple[int, int]
    ) -> None:
        image = image_of(0, *size)
        item, small = process_one(exact, image), process_one(processor, image)
        _, rows, columns = item.image_grid_thw[0].tolist()
        planar = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
        if planar.shape[2:] != (rows * 14, columns * 14):
            planar = torch.nn.functional.interpolate(planar, (rows * 14, columns * 14), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(tiny.preprocessor[f"image_{name}"])[:, None, None] * 255 for name in ("mean", "std"))
        normal = (planar[0].float() - mean) / std
        expected, levels = [], []
        for block_row in range(0, rows, 2):  # patch by patch, the four of a merged patch together
            for block_column in range(0, columns, 2):
                for row in (block_row, block_row + 1):
                    for column in (block_column, block_column + 1):
                        place = (slice(None), slice(row * 14, row * 14 + 14), slice(column * 14, column * 14 + 14))
                        patch = normal[place].reshape(3, 196)
                        expected.append(torch.stack([patch, patch], dim=1).reshape(-1))
                        levels.append(planar[0][place].reshape(3, 196))
        assert torch.equal(torch.from_numpy(item.feature), torch.stack(expected))
        assert torch.equal(torch.from_numpy(small.feature), torch.stack(levels))

    def test_a_compact_feature_is_an_eighth_of_the_float_one(self, processor: Any, pillow: Any) -> None:
        small, large = (process_one(opened, noise(56, 56)).feature for opened in (processor, pillow))
        assert (small.shape, small.dtype) == ((16, 3, 196), np.uint8)
        assert (large.shape, large.dtype) == ((16, 1176), np.float32)
        assert large.nbytes == 8 * small.nbytes

    def test_the_background_is_the_callers(self, processor: Any) -> None:
        clear = Image.new("RGBA", (56, 56), (9, 9, 9, 0))
        levels = {
            tuple(np.unique(process_one(processor, clear, **options).feature).tolist())
            for options in ({}, {"background": (0, 0, 0)}, {"background": (7, 7, 7)})
        }
        assert levels == {(255,), (0,), (7,)}


class PatchGridImageCountTests(ImageTests):
    """What an image takes, before it is decoded and after."""

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        height=st.integers(1, 2000),
        width=st.integers(1, 2000),
        budget=st.sampled_from([(3136, 12845056), (3136, 1003520), (200704, 1003520), (3136, 50176)]),
    )
    def test_counts_are_transformers_own_at_every_size(
        self, reference: Any, processor: Any, height: int, width: int, budget: tuple[int, int]
    ) -> None:
        limits = {"min_pixels": budget[0], "max_pixels": budget[1]}
        if max(height, width) / min(height, width) > _RATIO:
            with pytest.raises(MediaError):
                processor.count("image", (height, width), **limits)
            return
        tokens = reference.get_number_of_image_patches(height, width, limits) // 4
        assert processor.count("image", (height, width), **limits) == (tokens, tokens)

    @pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
    def test_a_count_is_what_processing_yields(self, processor: Any, size: tuple[int, int]) -> None:
        output = processor.process(_PROMPT, [noise(*size)])
        (item,) = output.mm_items
        rows, tokens = processor.count(Modality.IMAGE, size)
        pad = processor.special_tokens.im_token_id
        assert rows == item.num_tokens == int(np.count_nonzero(output.input_ids == pad)) == len(item.feature) // 4
        assert len(output.input_ids) == 4 + tokens

    @pytest.mark.parametrize("height", SIDES)
    def test_a_count_is_what_processing_yields_up_to_two_thousand_pixels(
        self, reference: Any, processor: Any, height: int
    ) -> None:
        small = {"max_pixels": 28 * 28 * 30}
        for width in SIDES:
            image = np.zeros((height, width, 3), dtype=np.uint8)
            if max(height, width) / min(height, width) > _RATIO:
                with pytest.raises(MediaError, match="ratio"):
                    processor.count("image", (height, width))
                with pytest.raises(MediaError, match="ratio"):
                    process_one(processor, image)
                continue
            limits = {"min_pixels": 3136, "max_pixels": 12845056}
            tokens = reference.get_number_of_image_patches(height, width, limits) // 4
            assert processor.count("image", (height, width)) == (tokens, tokens)
            item = process_one(processor, image, **small)
            assert processor.count("image", (height, width), **small) == (item.num_tokens, item.num_tokens)
            assert len(item.feature) == 4 * item.num_tokens == int(item.image_grid_thw.prod())

    @pytest.mark.parametrize(
        ("size", "options"),
        [
            ((15420, 690), {}),
            ((31, 639), {"max_pixels": 20 * 28 * 28}),
            ((26, 28), {}),
            ((332, 27), {}),
            ((1000, 5), {}),
        ],
        ids=str,
    )
    def test_thin_and_small_images_get_at_least_one_token_a_side(
        self, processor: Any, size: tuple[int, int], options: Mapping[str, int]
    ) -> None:
        assert processor.count("image", size, **options)[0] >= 1

    def test_a_ratio_over_200_is_the_clients_error(self, processor: Any) -> None:
        assert processor.count("image", (1000, 5))[0] > 0
        with pytest.raises(MediaError, match=r"images\[1\].*218\.6") as caught:
            processor.process(_PROMPT * 2, [noise(30, 30), noise(1093, 5)])
        assert (caught.value.path, caught.value.reason) == ("images[1]", "size")

    def test_ids_offsets_and_modalities_agree(self, processor: Any) -> None:
        output = processor.process(_PROMPT * 3, [noise(56, 56), noise(84, 56), noise(56, 140)])
        pad, tokens = processor.special_tokens.im_token_id, [4, 6, 10]
        assert [item.num_tokens for item in output.mm_items] == tokens
        # Each part is a, start token, placeholders, end token, b.
        starts = [2, 2 + 4 + 4, 2 + 4 + 4 + 6 + 4]
        assert [item.offsets for item in output.mm_items] == [
            [(start, start + count - 1)] for start, count in zip(starts, tokens, strict=True)
        ]
        assert output.token_modalities.tolist() == (output.input_ids == pad).astype(int).tolist()
        inside = output.token_modalities == 1
        assert (output.padded_input_ids[inside] >= 1_000_000).all()
        assert output.padded_input_ids[~inside].tolist() == output.input_ids[~inside].tolist()
        assert set(output.mm_items[0].model_specific_data) == {"image_grid_thw"}

    def test_identity_follows_what_the_model_sees(self, processor: Any, pillow: Any) -> None:
        image = noise(56, 56)
        same = process_one(processor, image).identity
        assert process_one(processor, png_of(image)).identity == same
        assert process_one(processor, np.array(image)).identity == same
        assert process_one(processor, image, max_pixels=56 * 56).identity == same  # the same grid and pixels
        others = {
            process_one(processor, noise(56, 56, 1)).identity,
            process_one(processor, image, max_pixels=3135, min_pixels=1).identity,
            process_one(processor, image, salt="tenant").identity,
            process_one(pillow, image).identity,
        }
        assert len(others) == 4
        assert same not in others

    def test_audio_is_refused_by_name(self, processor: Any) -> None:
        with pytest.raises(RequestError, match="takes images, videos, not audios"):
            processor.process("x", audios=[b"x"])


class PatchGridOptionTests(PluginTests):
    """Which options of images may be given when. Needs `registry`, `checkpoint` and `processor`."""

    PARAMETERS: ClassVar[Mapping[str, str]] = {"refused": "REFUSED"}
    REFUSED: ClassVar[tuple[tuple[Mapping[str, Any], type[MMPluginError]], ...]] = (
        ({"max_pixel": 5}, UsageError),
        ({"resize": "pillow"}, UsageError),
        ({"feature_format": "float32"}, UsageError),
        ({"patch_size": 16}, UsageError),
        ({"image_mean": (0.0, 0.0, 0.0)}, UsageError),
        ({"do_resize": False}, UsageError),
        ({"min_pixels": 5000, "max_pixels": 4000}, RequestError),
        ({"min_pixels": 1 << 26, "max_pixels": 1 << 40}, RequestError),
        ({"max_pixels": 100}, RequestError),
        ({"max_pixels": 0}, RequestError),
        ({"max_pixels": -1}, RequestError),
        ({"max_pixels": "1000"}, RequestError),
        ({"max_pixels": 1e9}, RequestError),
        ({"max_pixels": True}, RequestError),
        ({"max_pixels": None}, RequestError),
        ({"background": (0, 0)}, RequestError),
    )

    def test_options_that_a_request_may_not_give(
        self, processor: Any, refused: tuple[Mapping[str, Any], type[MMPluginError]]
    ) -> None:
        options, error = refused
        calls: tuple[Callable[[], Any], ...] = (
            lambda: processor.process(_PROMPT, [noise(56, 56)], **options),
            lambda: processor.count("image", (56, 56), **options),
        )
        for call in calls:
            with pytest.raises(error) as caught:
                call()
            assert type(caught.value) is error
            assert any(name in caught.value.message for name in options)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_pixel": 5},
            {"patch_size": 16},
            {"merge_size": 2},
            {"rescale_factor": 1 / 255},
            {"do_normalize": True},
            {"resize": "bilinear"},
            {"resize": None},
            {"feature_format": "float16"},
            {"min_pixels": 5000, "max_pixels": 4000},
            {"max_pixels": 1 << 40},
            {"max_pixels": "1000"},
        ],
        ids=str,
    )
    def test_options_that_loading_may_not_give(
        self, registry: Registry, checkpoint: Path, options: dict[str, Any]
    ) -> None:
        with pytest.raises(UsageError) as caught:
            registry.load_processor(checkpoint, **options)
        assert any(name in caught.value.message for name in options)

    def test_an_option_of_another_moment_is_distinguished_from_an_unknown_one(
        self, registry: Registry, checkpoint: Path, processor: Any
    ) -> None:
        messages = []
        calls: tuple[Callable[[], Any], ...] = (
            lambda: processor.process(_PROMPT, [noise(56, 56)], resize="pillow"),
            lambda: registry.load_processor(checkpoint, patch_size=14),
            lambda: processor.process(_PROMPT, [noise(56, 56)], max_pixel=5),
        )
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            messages.append(caught.value.message)
        fixed, own, unknown = messages
        assert "'resize'" in fixed
        assert "opened" in fixed
        assert "'patch_size'" in own
        assert "checkpoint" in own
        assert "'max_pixel'" in unknown
        assert "max_pixels" in unknown.replace("'max_pixel'", "")
