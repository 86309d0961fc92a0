"""What vision towers share: weights from a checkpoint, patch embedding, attention in segments, rotary angles, orders of patches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from mm_plugin.checkpoint import Checkpoint
from mm_plugin.encoder import (
    PatchEmbedding,
    PatchGridEncoder,
    Rotary,
    Segments,
    layers,
    load_tower,
    merge_order,
    self_attention,
    window_order,
)
from mm_plugin.errors import UsageError
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.transforms import patchify, patchify_frames

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------ weights


class Little(torch.nn.Module):
    """Draws random weights, computes a buffer that is not saved, and keeps one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def open_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"model_type": "little"}))
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {
        name: normal(*tensor.shape, seed=index) if tensor.ndim else tensor
        for index, (name, tensor) in enumerate(Little().state_dict().items())
    }


def load(checkpoint: Checkpoint, dtype: Any = None) -> Any:
    return load_tower(Little, checkpoint, ("visual.", "model.visual."), device="cpu", dtype=dtype)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tower_has_the_checkpoints_weights_and_draws_none(
    tmp_path: Path, state: dict[str, torch.Tensor], prefix: str, dtype: Any
) -> None:
    other = {"language.weight": torch.zeros(2), "revisual.weight": torch.zeros(2)}
    checkpoint = open_checkpoint(tmp_path, {prefix + name: tensor for name, tensor in state.items()} | other)
    before = torch.random.get_rng_state()
    tower = load(checkpoint, dtype)
    assert torch.equal(torch.random.get_rng_state(), before)
    found = tower.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], expected), name
    assert not tower.training
    assert not any(parameter.requires_grad for parameter in tower.parameters())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", r"1 missing \(first\.weight\)"),
        ("surplus", r"1 unexpected \(second\.weight\)"),
        ("shape", r"1 of another shape \(first\.weight \[6, 5\] where its config\.json says \[6, 4\]\)"),
        ("all", r"holds no tensors under visual\. or model\.visual\."),
        ("two", r"1 missing \(first\.bias\); 1 unexpected \(second\.weight\)"),
    ],
)
def test_weights_that_are_not_the_towers_are_named(
    tmp_path: Path, state: dict[str, torch.Tensor], fault: str, said: str
) -> None:
    if fault == "missing":
        del state["first.weight"]
    elif fault == "surplus":
        state["second.weight"] = torch.zeros(1)
    elif fault == "shape":
        state["first.weight"] = torch.zeros(6, 5)
    elif fault == "all":
        state = {}
    else:
        state["second.weight"] = state.pop("first.bias")
    kept = {f"visual.{name}": tensor for name, tensor in state.items()} | {"lm.weight": torch.zeros(1)}
    with pytest.raises(UsageError, match=said) as caught:
        load(open_checkpoint(tmp_path, kept))
    assert caught.value.argument == "checkpoint"
    assert str(tmp_path) in caught.value.message


# ------------------------------------------------------------------ patches


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_embedded_as_the_convolution_does_in_float64(frames: int, bias: bool) -> None:
    side, width = 4, 10
    weight = normal(width, 3, frames, side, side, seed=1) / 10
    offset = normal(width, seed=2) if bias else None
    embed = PatchEmbedding(weight, offset, mean=MEAN, std=STD, rescale=1 / 255, dtype=torch.float32)
    footage = np.random.default_rng(3).integers(0, 256, (frames, 8, 12, 3), dtype=np.uint8)
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
    compact = patchify_frames(footage, frames, 8, 12, temporal_patch_size=frames, **sizes)
    expected = truth(footage)
    floats = (torch.from_numpy(compact).reshape(-1, 3, frames * side**2).double() / 255 - mean[:, 0, 0]) / std[:, 0, 0]
    for feature in (torch.from_numpy(compact), floats.float().flatten(1), floats.flatten(1)):
        assert torch.allclose(embed(feature).double(), expected, rtol=0, atol=1e-5)
    image = torch.from_numpy(patchify(footage[0], **sizes))
    assert torch.allclose(embed(image).double(), truth(np.repeat(footage[:1], frames, axis=0)), rtol=0, atol=1e-5)


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


# ------------------------------------------------------------------ attention


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax attention, a stretch and a head at a time, in float64."""
    out, start = torch.empty_like(query, dtype=torch.float64), 0
    for length in lengths:
        part = slice(start, start + length)
        for head in range(query.shape[1]):
            q, k, v = (tensor[part, head].double() for tensor in (query, key, value))
            out[part, head] = torch.softmax(q @ k.T / query.shape[2] ** 0.5, dim=-1) @ v
        start += length
    return out


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 3))
def test_segments_are_a_loop_over_stretches(lengths: list[int], heads: int) -> None:
    query, key, value = (normal(sum(lengths), heads, 8, seed=seed) for seed in range(3))
    found = Segments(lengths, device="cpu").attend(query, key, value)
    assert torch.allclose(found.double(), one_by_one(query, key, value, lengths), rtol=0, atol=1e-5)


def test_neighbours_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = functional.scaled_dot_product_attention

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(arguments[0].shape))
        return own(*arguments)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    query = normal(17, 2, 4)
    Segments([4, 4, 4, 2, 3], device="cpu").attend(query, query, query)
    assert calls == [(3, 2, 4, 4), (1, 2, 2, 4), (1, 2, 3, 4)]


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU; what is computed with it is on the CPU."""

    is_cuda = True  # type: ignore[assignment]


@settings(max_examples=25)
@given(LENGTHS)
def test_a_kernel_for_any_lengths_is_called_once_with_the_bounds(lengths: list[int]) -> None:
    seen: list[Any] = []

    def kernel(q: Any, k: Any, v: Any, starts: Any, ends: Any, longest: int, longest_key: int) -> torch.Tensor:
        seen.append((starts.dtype, longest, longest_key))
        assert torch.equal(starts, ends)
        bounds = starts.tolist()
        assert (bounds[0], bounds[-1]) == (0, len(q))
        widths = [after - before for before, after in itertools.pairwise(bounds)]
        return one_by_one(*(tensor.as_subclass(torch.Tensor) for tensor in (q, k, v)), widths).to(q.dtype)

    tensors = [normal(sum(lengths), 2, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    segments = Segments(lengths, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_packed_attention", lambda _device: kernel)
        found = segments.attend(*(tensor.as_subclass(OnDevice) for tensor in tensors))
    assert seen == [(torch.int32, max(lengths), max(lengths))]
    plain = segments.attend(*tensors)
    assert len(seen) == 1  # on a CPU it is not asked for
    assert torch.allclose(found.float(), plain.float(), rtol=0, atol=0.03)


def test_without_such_a_kernel_a_device_has_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_packed_attention", lambda _device: None)
    query = normal(6, 2, 8, dtype=torch.bfloat16)
    segments = Segments([2, 4], device="cpu")
    device = query.as_subclass(OnDevice)
    assert torch.equal(
        segments.attend(device, device, device).as_subclass(torch.Tensor), segments.attend(query, query, query)
    )


@pytest.mark.parametrize(("capability", "known"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_kernel_is_torchs_own_where_the_device_has_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: bool
) -> None:
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="this torch has no attention over stretches of any length"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert layers._packed_attention(torch.device("cuda")) is (varlen.varlen_attn if known else None)


def test_attention_of_a_layer_turns_queries_and_keys_alone() -> None:
    torch.manual_seed(0)
    qkv, proj = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    states, lengths = normal(10, 16), [4, 6]
    places = np.stack([np.arange(10) // 3, np.arange(10) % 3], axis=1)
    rotary, segments = Rotary(places, head_dim=8, device="cpu"), Segments(lengths, device="cpu")
    with torch.no_grad():
        found = self_attention(states, qkv, proj, n_heads=2, rotary=rotary, segments=segments)
        query, key, value = qkv(states).view(10, 3, 2, 8).unbind(1)
        expected = proj(one_by_one(rotary.turn(query), rotary.turn(key), value, lengths).float().flatten(1))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ rotary angles, orders


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=12), st.sampled_from([8, 40, 80])
)
def test_angles_are_transformers_own(places: list[tuple[int, int]], head_dim: int) -> None:
    positions = np.array(places)
    states = normal(len(places), 2, head_dim)
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float) / (head_dim // 2))
    angles = (torch.from_numpy(positions)[:, :, None].float() * frequencies).flatten(1)
    twice = torch.cat((angles, angles), dim=-1)
    expected, _ = apply_rotary_pos_emb_vision(states, states, twice.cos(), twice.sin())
    assert torch.allclose(Rotary(positions, head_dim=head_dim, device="cpu").turn(states), expected, rtol=0, atol=1e-6)
    small = Rotary(positions, head_dim=head_dim, device="cpu").turn(states.to(torch.bfloat16))
    assert small.dtype == torch.bfloat16


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
    """A row is the sum of the embedded patches of its merged token."""

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Any:
        raise NotImplementedError

    def encode_patches(self, states: torch.Tensor, grids: Any) -> torch.Tensor:
        self.grids = list(grids)
        return states.view(-1, 4, states.shape[-1]).sum(dim=1)


def test_patches_of_all_items_go_through_in_one_pass_and_rows_come_back_by_item() -> None:
    proj = torch.nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4), bias=False).requires_grad_(False)
    encoder = Summed(proj, merge_size=2, mean=MEAN, std=STD, rescale=1 / 255)
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
