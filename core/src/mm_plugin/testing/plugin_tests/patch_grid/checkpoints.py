"""Checkpoints of models over patch grids: both kinds of settings files, their pixel budgets, settings that are not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin.errors import UsageError
from mm_plugin.items import Modality
from mm_plugin.media.types import VideoFrames
from mm_plugin.registry import Registry
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.checkpoints import CheckpointTests, TensorFault, edit_json, tensor_faults
from mm_plugin.testing.plugin_tests.media import image_of, moving_frames
from mm_plugin.testing.plugin_tests.patch_grid.requests import IMAGE, VIDEO


def patch_grid_faults(depth: int) -> Mapping[str, TensorFault]:
    """The faults that a plugin must refuse, for its `FAULTS`.

    Args:
        depth: blocks of the tiny tower, each of 12 tensors.
    """
    name, beyond = (f"visual.blocks.{block}.attn.proj.bias" for block in (1, depth))
    return tensor_faults(name, beyond=beyond, block="visual.blocks.1.", block_size=12, prefix="visual.")


class PatchGridCheckpointTests(CheckpointTests):
    """See `CheckpointTests`; a plugin states `MODEL`, `FAULTS` (from `patch_grid_faults`) and what follows.

    Attributes:
        TINY: makes the checkpoints.
        DEFAULTS: options that settings files may leave out, with the values that are then in force.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {**CheckpointTests.PARAMETERS, "unsupported": "UNSUPPORTED"}
    TINY: ClassVar[PatchGridCheckpoints]
    PROMPT: ClassVar[str] = IMAGE
    TOKENS: ClassVar[int] = 15
    LAYOUTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        f"{layout}-{'combined' if combined else 'separate'}-{shards}": {
            "layout": layout, "combined": combined, "shards": shards
        }
        for layout in ("visual", "model.visual")
        for combined in (False, True)
        for shards in (1, 3)
    }  # fmt: skip
    FILES: ClassVar[Mapping[str, str]] = {
        "config.json": "config", "preprocessor_config.json": "preprocessor", "tokenizer.json": "tokenizer"
    }  # fmt: skip
    VISION: ClassVar[tuple[str, ...]] = ("visual.",)
    VOCABULARY: ClassVar[tuple[str, ...]] = ("text_config", "vocab_size")
    DEFAULTS: ClassVar[Mapping[str, Any]]
    UNSUPPORTED: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"do_resize": False},
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_convert_rgb": False},
        {"resample": 2},
        {"patch_size": 0},
        {"temporal_patch_size": 0},
        {"image_mean": [0.5, 0.5]},
        {"image_std": "0.5"},
        {"min_pixels": 4000, "max_pixels": 3000},
        {"rescale_factor": 0},
    )

    def make_checkpoint(self, folder: Path, **changed: Any) -> Path:
        """See `CheckpointTests`."""
        return self.TINY.write(folder, **changed)

    def embeddings(self, encoder: Any, processor: Any) -> torch.Tensor:
        """Of the image, and of a video."""
        items = processor.process(VIDEO, videos=[VideoFrames(moving_frames(3), fps=2)]).mm_items
        (found,) = encoder.encode(Modality.VIDEO, items)
        assert isinstance(found, torch.Tensor)
        return torch.cat([super().embeddings(encoder, processor), found])

    def check_layout(self, folder: Path, layout: Mapping[str, Any]) -> None:
        """See `CheckpointTests`."""
        super().check_layout(folder, layout)
        assert (folder / "processor_config.json").is_file() == layout["combined"]
        assert (folder / "preprocessor_config.json").is_file() == (not layout["combined"])

    @pytest.mark.parametrize("combined", [False, True])
    def test_both_settings_files_give_their_pixel_budget(
        self, registry: Registry, tmp_path: Path, combined: bool
    ) -> None:
        limits = {"min_pixels": 28 * 28 * 5, "max_pixels": 28 * 28 * 11}
        options = registry.load_processor(self.TINY.write(tmp_path, combined=combined, preprocessor=limits)).options
        assert (options.min_pixels, options.max_pixels) == (28 * 28 * 5, 28 * 28 * 11)

    def test_edges_of_a_size_are_the_pixel_budget(self, registry: Registry, tmp_path: Path) -> None:
        folder = self.TINY.write(tmp_path)
        file = folder / "preprocessor_config.json"
        described = json.loads(file.read_text())
        del described["min_pixels"], described["max_pixels"]
        described["size"] = {"shortest_edge": 4000, "longest_edge": 50000}
        file.write_text(json.dumps(described))
        options = registry.load_processor(folder).options
        assert (options.min_pixels, options.max_pixels) == (4000, 50000)

    def test_settings_that_are_left_out_get_the_defaults(self, registry: Registry, tmp_path: Path) -> None:
        folder = self.TINY.write(tmp_path)
        (folder / "preprocessor_config.json").write_text("{}")
        options = registry.load_processor(folder).options
        assert {name: getattr(options, name) for name in self.DEFAULTS} == self.DEFAULTS

    def test_a_checkpoint_whose_settings_are_not_supported_is_refused(
        self, registry: Registry, tmp_path: Path, unsupported: Mapping[str, Any]
    ) -> None:
        folder = self.TINY.write(tmp_path, preprocessor=unsupported)
        with pytest.raises(UsageError) as caught:
            registry.load_processor(folder)
        assert next(iter(unsupported)) in caught.value.message

    def test_numbers_of_the_checkpoint_are_used(self, registry: Registry, tmp_path: Path) -> None:
        mean, std, rescale = [0.5, 0.25, 0.125], [0.5, 1.0, 2.0], 1 / 127.5
        settings = {"image_mean": mean, "image_std": std, "rescale_factor": rescale, "max_pixels": 50176}
        folder = self.TINY.write(tmp_path, preprocessor=settings)
        processor = registry.load_processor(folder, resize="pillow", feature_format="float32")
        expected = Qwen2VLImageProcessorPil(
            image_mean=mean, image_std=std, rescale_factor=rescale, size={"shortest_edge": 3136, "longest_edge": 50176}
        )(images=image_of(0, 300, 400), return_tensors="np")
        (item,) = processor.process(IMAGE, [image_of(0, 300, 400)]).mm_items
        assert item.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
        assert np.array_equal(item.feature, expected["pixel_values"])

    def test_settings_of_videos_are_not_taken_for_those_of_images(self, registry: Registry, tmp_path: Path) -> None:
        """Newer checkpoints describe videos in a file of their own, with bounds of the whole video under an image's names."""
        folder = self.TINY.write(tmp_path)
        size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
        described = {"size": size, "fps": 1.0, "max_frames": 99}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(described))
        options = registry.load_processor(folder).options
        assert (options.min_pixels, options.max_pixels) == (3136, 12845056)

        def silence(settings: dict[str, Any]) -> None:
            del settings["min_pixels"], settings["max_pixels"]

        edit_json(folder / "preprocessor_config.json", silence)
        options = registry.load_processor(folder).options
        assert options.min_pixels == self.DEFAULTS["min_pixels"]  # not those of a video
        assert options.max_pixels == self.DEFAULTS["max_pixels"]
        assert (options.fps, options.max_frames) == (1.0, 99)  # what is about videos is taken from their own file

    def test_a_tokenizer_without_the_placeholder_is_refused_by_its_name(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        config = self.TINY.config(self.TINY.tokenizer())
        words = {"a": 0, "<|vision_start|>": 1, "<|vision_end|>": 2, "?": 3}
        plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="?")))
        folder = self.TINY.write(tmp_path, config=config, tokenizer=plain)
        with pytest.raises(UsageError, match=r"no token '<\|image_pad\|>'"):
            registry.load_processor(folder)
