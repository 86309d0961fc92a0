"""The family of patch grids: patch embedding, orders of patches, one pass over all items; and a new model in a few lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional
from toy import word_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin.errors import RequestError, UsageError
from mm_plugin.families.patch_grid import PatchEmbedding, PatchGridEncoder, merge_order, window_order
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.transforms import patchify, patchify_frames

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------ patches


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_embedded_as_the_convolution_does_in_float64(frames: int, bias: bool) -> None:
    side, width = 4, 10
    weight = normal(width, 3, frames, side, side, seed=1) / 10
    offset = normal(width, seed=2) if bias else None
    embed = PatchEmbedding(weight, offset, mean=MEAN, std=STD, rescale=1 / 255, dtype=torch.float32)
    video_frames = np.random.default_rng(3).integers(0, 256, (frames, 8, 12, 3), dtype=np.uint8)
    mean, std = (torch.tensor(part, dtype=torch.float64)[:, None, None, None] for part in (MEAN, STD))

    def truth(images: np.ndarray) -> torch.Tensor:
        video = torch.from_numpy(images).permute(3, 0, 1, 2).double() / 255  # [3, frames, height, width]
        out = functional.conv3d(
            ((video - mean) / std)[None],
            weight.double(),
            None if offset is None else offset.double(),
            stride=(frames, side, side),
        )
        return out[0, :, 0].reshape(width, -1).T  # [n_patches, width], row after row

    sizes = {"patch_size": side, "merge_size": 1}
    compact = patchify_frames(video_frames, frames, 8, 12, temporal_patch_size=frames, **sizes)
    expected = truth(video_frames)
    floats = (torch.from_numpy(compact).reshape(-1, 3, frames * side**2).double() / 255 - mean[:, 0, 0]) / std[:, 0, 0]
    for feature in (torch.from_numpy(compact), floats.float().flatten(1), floats.flatten(1)):
        assert torch.allclose(embed(feature).double(), expected, rtol=0, atol=1e-5)
    image = torch.from_numpy(patchify(video_frames[0], **sizes))
    assert torch.allclose(embed(image).double(), truth(np.repeat(video_frames[:1], frames, axis=0)), rtol=0, atol=1e-5)


def test_products_are_rounded_once_in_a_small_dtype() -> None:
    weight = normal(32, 3, 2, 14, 14, seed=4, dtype=torch.bfloat16)
    embed = PatchEmbedding(weight, None, mean=MEAN, std=STD, rescale=1 / 255, dtype=torch.bfloat16)
    whole = PatchEmbedding(weight.float(), None, mean=MEAN, std=STD, rescale=1 / 255, dtype=torch.float32)
    patches = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (9, 3, 196), dtype=np.uint8))
    before = patches.clone()
    assert torch.equal(embed(patches), whole(patches).to(torch.bfloat16))
    floats = normal(9, 1176)
    kept = floats.clone()
    assert torch.equal(embed(floats), whole(floats).to(torch.bfloat16))
    assert torch.equal(patches, before)
    assert torch.equal(floats, kept)  # a feature is never written


# ------------------------------------------------------------------ orders of patches


GRIDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(GRIDS, st.sampled_from([1, 2, 3]))
def test_places_follow_the_patches(grids: list[tuple[int, int, int]], merge: int) -> None:
    grids = [(t, merge * h, merge * w) for t, h, w in grids]
    expected = []
    for t, rows, columns in grids:
        # Patches of an image whose levels tell their own place, a pixel a patch.
        image = np.zeros((rows, columns, 3), dtype=np.uint8)
        image[..., 0], image[..., 1] = np.arange(rows)[:, None], np.arange(columns)
        expected += [patchify(image, patch_size=1, merge_size=merge)[:, :2, 0]] * t
    assert np.array_equal(merge_order(grids, merge), np.concatenate(expected))


@settings(max_examples=100)
@given(GRIDS, st.integers(1, 4))
def test_windows_are_transformers_own(grids: list[tuple[int, int, int]], window: int) -> None:
    vision = pytest.importorskip("transformers.vision_utils", reason="an older transformers has it elsewhere")
    grids = [(t, 2 * h, 2 * w) for t, h, w in grids]
    order, lengths = window_order(grids, merge_size=2, window=window)
    index, bounds = vision.get_vision_window_index(
        torch.tensor(grids), spatial_merge_size=2, window_size=window * 28, patch_size=14, kwargs={}
    )
    edges = torch.unique_consecutive(bounds) // 4
    theirs = [tuple(index[a:b].tolist()) for a, b in itertools.pairwise(edges.tolist())]
    cut = np.cumsum([0, *(length // 4 for length in lengths)])
    ours = [tuple(order[a:b].tolist()) for a, b in itertools.pairwise(cut)]
    assert sorted(ours) == sorted(theirs)
    assert sorted(order.tolist()) == list(range(sum(t * h * w for t, h, w in grids) // 4))
    assert lengths == sorted(lengths, reverse=True)  # equal ones are neighbors, so that they are one call
    assert order.dtype == np.int64


# ------------------------------------------------------------------ an encoder over grids


class Summed(PatchGridEncoder):
    """An embedding is the sum of the embedded patches of its merged patch."""

    @classmethod
    def make_tower(cls, config: Any) -> Any:
        raise NotImplementedError

    def encode_patches(self, states: torch.Tensor, grids: Any) -> torch.Tensor:
        self.grids = list(grids)
        return states.view(-1, 4, states.shape[-1]).sum(dim=1)


def test_all_items_take_one_pass_and_embeddings_come_back_by_item() -> None:
    proj = torch.nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4), bias=False).requires_grad_(False)
    tower = SimpleNamespace(patch_embed=SimpleNamespace(proj=proj))
    options: Any = SimpleNamespace(merge_size=2, image_mean=MEAN, image_std=STD, rescale_factor=1 / 255)
    encoder = Summed(tower, options)
    embed = PatchEmbedding(proj.weight, None, mean=MEAN, std=STD, rescale=1 / 255, dtype=torch.float32)
    grids = {Modality.IMAGE: [(1, 2, 4), (1, 4, 2)], Modality.VIDEO: [(3, 2, 2), (1, 4, 4)]}
    random = np.random.default_rng(0)
    for modality, shapes in grids.items():
        name, area = f"{modality.name.lower()}_grid_thw", 16 if modality is Modality.IMAGE else 32
        items = []
        for shape in shapes:
            feature = random.integers(0, 256, (int(np.prod(shape)), 3, area), dtype=np.uint8)
            feature.flags.writeable = False  # torch would warn of it
            items.append(
                MultimodalDataItem(modality=modality, feature=feature, model_specific_data={name: np.array([shape])})
            )
        found = encoder.encode(modality, items)
        assert encoder.grids == shapes
        assert len(found) == len(items)
        for rows, item in zip(found, items, strict=True):
            expected = embed(torch.from_numpy(item.feature.copy())).view(-1, 4, 5).sum(dim=1)
            assert torch.allclose(rows, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ a model in a few lines

PLUGIN = Path(__file__).parent / "data" / "patch_grid_plugin.py"
EDGES = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
SETTINGS = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@pytest.fixture
def open_next(site: Any, open_registry: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the processor of an installed plugin, over a checkpoint with the settings of released Qwen3-VL."""
    hooks = site.hooks(
        {
            "name": "next_vl",
            "architectures": ("NextVL",),
            "placeholders": "{Modality.IMAGE: '<|image_pad|>'}",
            "fields": "FIELDS",
            "processor": "mm_plugin_next.model:Processor",
        }
    ).replace("'FIELDS'", "{Modality.IMAGE: ('image_grid_thw',)}, feature_names={Modality.IMAGE: 'pixel_values'}")
    files = {"mm_plugin_next/model.py": PLUGIN.read_text(encoding="utf-8")}
    site.install("mm-plugin-next", hooks, files=files, architectures=["NextVL"])
    folder = tmp_path / "checkpoint"
    word_tokenizer(["<|image_pad|>"]).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"architectures": ["NextVL"], "vocab_size": 8}))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"size": EDGES}))
    return lambda **options: open_registry().load_processor(folder, **options)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((224, 224), 64), ((480, 640), 300), ((1080, 1920), 2040), ((3000, 4000), 11_750), ((20, 1500), 70)],
    ids=str,
)
def test_a_model_of_other_numbers_has_qwen3_vls_token_counts(
    open_next: Callable[..., Any], size: tuple[int, int], tokens: int
) -> None:
    """As measured on Qwen3-VL in transformers 5.24."""
    assert open_next().count("image", size) == (tokens, tokens)


@pytest.mark.parametrize("size", [(1, 1), (61, 45), (100, 700), (300, 500), (512, 512), (20, 1500)], ids=str)
def test_a_model_of_other_numbers_has_the_patches_of_transformers(
    open_next: Callable[..., Any], size: tuple[int, int]
) -> None:
    image = np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)
    reference = Qwen2VLImageProcessorPil(**SETTINGS, size=EDGES)(images=Image.fromarray(image), return_tensors="np")
    output = open_next(resize="pillow", feature_format="float32").process("<|image_pad|>", [image])
    (item,) = output.mm_items
    assert item.image_grid_thw.tolist() == reference["image_grid_thw"].tolist()
    assert item.num_tokens == int(reference["image_grid_thw"].prod()) // 4
    assert item.feature.shape[1] == 3 * 2 * 16 * 16
    assert np.array_equal(item.feature, reference["pixel_values"])


def test_a_model_of_images_takes_no_videos_and_has_no_options_for_them(open_next: Callable[..., Any]) -> None:
    processor = open_next()
    with pytest.raises(RequestError, match="videos"):
        processor.process("word", videos=[np.zeros((2, 8, 8, 3), np.uint8)])
    with pytest.raises(UsageError, match="fps"):
        processor.process("<|image_pad|>", [np.zeros((8, 8, 3), np.uint8)], fps=1.0)


def test_a_plugins_processor_imports_neither_demo_nor_command_nor_kit(
    fresh: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "next_vl.py").write_text(PLUGIN.read_text(encoding="utf-8"))
    loaded = "json.dumps(sorted(name for name in sys.modules if name.startswith('mm_plugin.')))"
    modules = set(fresh(f"import json, sys, next_vl\nprint({loaded})", tmp_path))
    assert "mm_plugin.families.patch_grid.processor" in modules
    for name in ("cli", "demo", "testing", "registry", "families.patch_grid.demo", "families.patch_grid.encoder"):
        assert f"mm_plugin.{name}" not in modules, name
