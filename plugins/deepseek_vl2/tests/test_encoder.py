"""Rows are those of the model's own code; every projector kind; checkpoints of the released sizes account for every tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mm_plugin import Encoder, Modality, ModelProcessor, MultimodalDataItem, MultimodalInputs, Registry, RequestMedia
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.inputs import ForwardBatch
from mm_plugin.placeholders import pad_by_offsets, token_modalities_of
from mm_plugin_deepseekvl2 import encoder as module
from mm_plugin_deepseekvl2.config import DeepseekVL2Config, ProjectorConfig
from mm_plugin_deepseekvl2.encoder import UNREAD, DeepseekVL2Tower, _Projector
from mm_plugin_deepseekvl2.testing import make_checkpoint, tiny_config, tiny_settings, whole_state

IMAGE_TOKEN = 299


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, golden: Callable[[str], Any]) -> Path:
    """A checkpoint of the recorded config and weights."""
    config = golden("embed.json")["config"] | {"model_type": "deepseek_vl_v2"}
    settings = tiny_settings(image_size=48) | {"candidate_resolutions": config["candidate_resolutions"]}
    state = golden("embed_weights.safetensors")
    return make_checkpoint(tmp_path_factory.mktemp("recorded"), config=config, settings=settings, state=state)


def items_of(images: torch.Tensor, crops: list[list[int]], ids: np.ndarray) -> list[MultimodalDataItem]:
    """Items of one recorded prompt: its image tokens in order, its tiles in order."""
    starts = np.flatnonzero(ids == IMAGE_TOKEN)
    items, tile, token = [], 0, 0
    for index, (columns, rows) in enumerate(crops):
        count = 2 * 3 + 1 + 2 * rows * (2 * columns + 1)
        span = (int(starts[token]), int(starts[token + count - 1]))
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=[span],
            feature=images[tile : tile + 1 + rows * columns],
            model_specific_data={"images_spatial_crop": np.array([[columns, rows]])},
        )
        item.set_hash(1000 * len(ids) + index)
        items.append(item)
        tile, token = tile + 1 + rows * columns, token + count
    assert token == len(starts)
    return items


def test_embeddings_equal_the_models_own(registry: Registry, recorded: Path, golden: Any) -> None:
    encoder: Any = registry.load_encoder(recorded)
    arrays = golden("embed.safetensors")
    embedding = nn.Embedding.from_pretrained(golden("embed_weights.safetensors")["language.model.embed_tokens.weight"])
    cases = golden("embed.json")["cases"]
    assert len(cases) == 6
    for case in cases:
        name = case["id"]
        part = {key: arrays[f"{name}.{key}"] for key in case["shapes"]}
        flat, requests = [], []
        for row, crops in enumerate(case["images_spatial_crop"]):
            ids = part["input_ids"][row].numpy()
            n_tiles = sum(1 + columns * rows for columns, rows in crops)
            flat.append(part["images"][row][:n_tiles])
            requests.append((ids, items_of(part["images"][row], crops, ids)))
        with torch.inference_mode():
            seen = encoder._tower.vision(torch.cat(flat))
            projected = encoder._tower.projector(seen)
        assert torch.allclose(seen, part["vision_features"], rtol=0, atol=1e-5), name
        assert torch.allclose(projected, part["projector_output"], rtol=0, atol=1e-5), name
        media = [
            RequestMedia(
                MultimodalInputs(
                    mm_items=items,
                    input_ids=ids,
                    padded_input_ids=pad_by_offsets(ids, items),
                    token_modalities=token_modalities_of(items, len(ids)),
                )
            )
            for ids, items in requests
        ]
        seq = part["input_ids"].shape[1]
        for size in (seq, 7):
            parts = []
            for start in range(0, seq, size):
                chunk = part["input_ids"][:, start : start + size]
                batch = ForwardBatch(media, [start] * len(media), [chunk.shape[1]] * len(media))
                step = embed_mm_inputs(chunk.flatten(), batch, embedding, encoder)
                assert step.failed == ()
                parts.append(step.input_embeds.unflatten(0, chunk.shape))
            apart = float((torch.cat(parts, dim=1) - part["inputs_embeds"]).abs().max())
            assert apart <= 1e-5, (name, apart)


def test_rows_of_the_tail_order_are_the_same_rows(
    registry: Registry, recorded: Path, golden: Any, tmp_path: Path
) -> None:
    config = golden("embed.json")["config"] | {"model_type": "deepseek_vl_v2", "global_view_pos": "tail"}
    settings = tiny_settings(image_size=48) | {"candidate_resolutions": config["candidate_resolutions"]}
    state = golden("embed_weights.safetensors")
    tail = registry.load_encoder(make_checkpoint(tmp_path, config=config, settings=settings, state=state))
    head = registry.load_encoder(recorded)
    images = golden("embed.safetensors")["crop_2x1.images"][0]
    item = items_of(images, [[2, 1]], np.full(17, IMAGE_TOKEN))[0]
    (first,), (last,) = (encoder.encode(Modality.IMAGE, [item]) for encoder in (head, tail))
    # 2 lines of 2 + 1, a separator, 2 lines of 4 + 1.
    assert torch.equal(torch.cat([first[7:], first[6:7], first[:6]]), last)


@pytest.mark.case("8.6")
def test_images_of_several_grids_are_each_their_own(
    encoder: Encoder, processor: ModelProcessor, exact: ModelProcessor, noisy: Any
) -> None:
    images = [noisy(384, 768), noisy(300, 300, 1)]
    small, large = (opened.process("<image><image>", images).mm_items for opened in (processor, exact))
    assert [item.images_spatial_crop.tolist() for item in small] == [[[2, 1]], [[1, 1]]]
    together = encoder.encode(Modality.IMAGE, small)
    assert [len(rows) for rows in together] == [item.num_tokens for item in small] == [617, 421]
    for form in (small[::-1], large):
        rows = encoder.encode(Modality.IMAGE, form)
        ordered = rows[::-1] if form is not large else rows
        for left, right in zip(together, ordered, strict=True):
            assert torch.allclose(left, right, rtol=0, atol=1e-5)
    for item, rows in zip(small, together, strict=True):
        (alone,) = encoder.encode(Modality.IMAGE, [item])
        assert torch.allclose(alone, rows, rtol=0, atol=1e-5)
    assert float(torch.cat(list(together)).std()) > 0.01


def test_newlines_and_separator_stand_where_the_layout_says(
    encoder: Any, processor: ModelProcessor, noisy: Any
) -> None:
    (item,) = processor.process("<image>", [noisy(768, 384)]).mm_items
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    newline, separator = encoder._tower.image_newline, encoder._tower.view_seperator
    is_newline, is_separator = (rows == newline).all(dim=1), (rows == separator).all(dim=1)
    assert is_separator.nonzero().flatten().tolist() == [210]
    assert is_newline.nonzero().flatten().tolist() == [
        *range(14, 210, 15),
        *range(211 + 14, 211 + 28 * 15, 15),
    ]


def test_an_image_of_one_tile_is_seen_once(
    encoder: Any, processor: ModelProcessor, noisy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = DeepseekVL2Tower.forward

    def count(tower: Any, tiles: torch.Tensor) -> torch.Tensor:
        seen.append(len(tiles))
        return forward(tower, tiles)

    monkeypatch.setattr(DeepseekVL2Tower, "forward", count)
    items = processor.process("<image>" * 3, [noisy(500, 700, seed) for seed in range(3)]).mm_items
    encoder.encode(Modality.IMAGE, items)
    assert seen == [3]  # no tiles beside three thumbnails
    rows = encoder.encode(Modality.IMAGE, items[:1])[0]
    assert torch.equal(rows[:210], rows[211:])


@pytest.mark.case("10.2")
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 64])
def test_passes_are_split_by_their_budget(
    encoder: Any, processor: ModelProcessor, noisy: Any, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    items = processor.process("<image><image>", [noisy(384, 768), noisy(700, 700, 1)]).mm_items
    whole = encoder.encode(Modality.IMAGE, items)
    seen: list[int] = []
    forward = DeepseekVL2Tower.forward
    monkeypatch.setattr(
        DeepseekVL2Tower, "forward", lambda tower, tiles: seen.append(len(tiles)) or forward(tower, tiles)
    )
    monkeypatch.setattr(module, "TILES_AT_ONCE", budget)
    rows = encoder.encode(Modality.IMAGE, items)
    assert seen == [budget] * (8 // budget) + ([8 % budget] if 8 % budget else [])
    for left, right in zip(whole, rows, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-5)


def test_bfloat16_is_no_farther_from_float32_than_rounding(
    registry: Registry, checkpoint: Path, encoder: Encoder, processor: ModelProcessor, exact: ModelProcessor, noisy: Any
) -> None:
    half = registry.load_encoder(checkpoint, dtype=torch.bfloat16)
    image = noisy(384, 768)
    (small,), (large,) = (opened.process("<image>", [image]).mm_items for opened in (processor, exact))
    (rows,) = half.encode(Modality.IMAGE, [small])
    assert rows.dtype == torch.bfloat16
    # The released pipeline hands its float images over in bfloat16: the same numbers here.
    large.feature = torch.from_numpy(large.feature).bfloat16()
    assert torch.equal(half.encode(Modality.IMAGE, [large])[0], rows)
    (exact,) = encoder.encode(Modality.IMAGE, [small])
    assert float((rows.float() - exact).abs().mean()) < 0.02 * float(exact.abs().mean() + exact.std())


# --- projectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"layers.0": (24, 128), "layers.2": (24, 24)}),
        ({"depth": 3, "mlp_ratio": 2}, {"layers.0": (48, 128), "layers.2": (48, 48), "layers.4": (24, 48)}),
        ({"downsample_ratio": 3}, {"layers.0": (24, 288), "layers.2": (24, 24)}),
        ({"projector_type": "mlp_gelu", "depth": 1}, {"layers.0": (24, 32)}),
        (
            {"projector_type": "mlp_gelu", "depth": 3},
            {"layers.0": (24, 32), "layers.2": (24, 24), "layers.4": (24, 24)},
        ),
        ({"projector_type": "linear"}, {"layers": (24, 32)}),
        ({"projector_type": "identity", "n_embed": 32}, {}),
    ],
)
def test_every_kind_of_projector_opens_and_gives_its_rows(
    registry: Registry, tmp_path: Path, settings: dict[str, Any], names: dict[str, tuple[int, int]]
) -> None:
    hidden = settings.get("n_embed", 24)
    config = tiny_config(image_size=56, hidden=hidden)
    config["projector_config"] |= settings
    downsampled = settings.get("projector_type", "downsample_mlp_gelu") == "downsample_mlp_gelu"
    ratio = settings.get("downsample_ratio", 2) if downsampled else 1
    folder = make_checkpoint(
        tmp_path, config=config, settings=tiny_settings(image_size=56) | {"downsample_ratio": ratio}
    )
    found = {
        name.removeprefix("projector."): tuple(t.shape)
        for name, t in whole_state(config).items()
        if "projector." in name
    }
    assert found == {f"{name}.weight": shape for name, shape in names.items()} | {
        f"{name}.bias": shape[:1] for name, shape in names.items()
    }
    processor, encoder = registry.load_processor(folder), registry.load_encoder(folder)
    (item,) = processor.process("<image>", [Image.new("RGB", (112, 56), (1, 2, 3))]).mm_items
    side = -(-4 // ratio)
    (rows,) = encoder.encode(Modality.IMAGE, [item])
    assert rows.shape == (side * (side + 1) + 1 + side * (2 * side + 1), hidden)


@pytest.mark.parametrize(("grid", "ratio"), [(27, 2), (3, 2), (4, 2), (5, 3), (7, 4)])
def test_patches_are_joined_as_unfold_does(grid: int, ratio: int) -> None:
    features = torch.randn(2, grid * grid, 6, generator=torch.Generator().manual_seed(0))
    more = -grid % ratio
    square = nn.functional.pad(features.transpose(1, 2).reshape(2, 6, grid, grid), (0, more, 0, more))
    expected = nn.functional.unfold(square, ratio, stride=ratio).transpose(1, 2)
    assert torch.equal(module._join(features, ratio), expected)


def test_gelu_of_the_projector_is_exact_and_between_layers_only() -> None:
    config = ProjectorConfig(projector_type="mlp_gelu", input_dim=3, n_embed=3, depth=2)
    projector = _Projector(config)
    for layer in (0, 2):
        nn.init.eye_(projector.layers[layer].weight)
        nn.init.zeros_(projector.layers[layer].bias)
    x = torch.tensor([[[-1.0, 0.5, 2.0]]])
    expected = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    assert torch.allclose(projector(x), expected, rtol=0, atol=1e-6)


# --- released sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["base", "small", "tiny"])
def test_every_tensor_of_a_released_checkpoint_is_accounted_for(golden: Any, size: str) -> None:
    vision = next(value for name, value in golden("tiling.json")["model_configs"].items() if name.startswith("vision"))
    sized = next(value for name, value in golden("tiling.json")["model_configs"].items() if name.startswith(size))
    # As the released files have it: numbers that are the model code's own defaults are left out.
    config = {
        "vision_config": {name: vision[name] for name in ("layers", "mlp_ratio", "patch_size", "width")},
        "projector_config": {"n_embed": sized["projector"]["n_embed"]},
    }
    with torch.device("meta"):
        tower = DeepseekVL2Tower(msgspec.convert(config, DeepseekVL2Config))
    found = {name: list(tensor.shape) for name, tensor in tower.state_dict().items()}
    layout: dict[str, list[int]] = {}
    total = 0
    for pattern, shape, count in golden("embed.json")["models"][size]["patterns"]:
        names = [pattern] if "{" not in pattern else [re.sub(r"\{b\}", str(index), pattern) for index in range(count)]
        total += count
        layout |= dict.fromkeys(names, shape) if not pattern.startswith("language.") else {}
    assert total == golden("embed.json")["models"][size]["tensors"]
    needed = {name: shape for name, shape in layout.items() if not name.startswith(UNREAD)}
    assert found == needed
    assert len(layout) - len(needed) == 13  # the pooling head
    assert len(needed) == 2 + 3 + 27 * 12 + 2 + 4
