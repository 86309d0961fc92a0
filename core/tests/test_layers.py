"""What vision towers share: weights from a checkpoint, attention within sequences of any length, rotary angles."""

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
from mm_plugin.encoder import Rotary2D, VarlenAttention, layers, load_tower, self_attention
from mm_plugin.errors import UsageError


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
    return load_tower(
        Little,
        checkpoint,
        ("visual.", "model.visual."),
        device="cpu",
        dtype=dtype,
        computed=lambda _: {"angles": torch.arange(3.0)},
    )


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


# ------------------------------------------------------------------ attention


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax attention, a sequence and a head at a time, in float64."""
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
def test_attention_is_a_loop_over_sequences(lengths: list[int], heads: int) -> None:
    query, key, value = (normal(sum(lengths), heads, 8, seed=seed) for seed in range(3))
    found = VarlenAttention(lengths, device="cpu")(query, key, value)
    assert torch.allclose(found.double(), one_by_one(query, key, value, lengths), rtol=0, atol=1e-5)


def test_neighbors_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = functional.scaled_dot_product_attention

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(arguments[0].shape))
        return own(*arguments)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    query = normal(17, 2, 4)
    VarlenAttention([4, 4, 4, 2, 3], device="cpu")(query, query, query)
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
    attention = VarlenAttention(lengths, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_varlen_kernel", lambda _device: kernel)
        found = attention(*(tensor.as_subclass(OnDevice) for tensor in tensors))
    assert seen == [(torch.int32, max(lengths), max(lengths))]
    plain = attention(*tensors)
    assert len(seen) == 1  # on a CPU it is not called
    assert torch.allclose(found.float(), plain.float(), rtol=0, atol=0.03)


def test_without_such_a_kernel_a_device_has_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_varlen_kernel", lambda _device: None)
    query = normal(6, 2, 8, dtype=torch.bfloat16)
    attention = VarlenAttention([2, 4], device="cpu")
    device = query.as_subclass(OnDevice)
    assert torch.equal(attention(device, device, device).as_subclass(torch.Tensor), attention(query, query, query))


@pytest.mark.parametrize(("capability", "known"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_kernel_is_torchs_own_where_the_device_has_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: bool
) -> None:
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="this torch has no attention over sequences of any length"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert layers._varlen_kernel(torch.device("cuda")) is (varlen.varlen_attn if known else None)


def test_attention_of_a_layer_rotates_queries_and_keys_only() -> None:
    torch.manual_seed(0)
    qkv, proj = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    states, lengths = normal(10, 16), [4, 6]
    places = np.stack([np.arange(10) // 3, np.arange(10) % 3], axis=1)
    rotary, attention = Rotary2D(places, head_dim=8, device="cpu"), VarlenAttention(lengths, device="cpu")
    with torch.no_grad():
        found = self_attention(states, qkv, proj, n_heads=2, rotary=rotary, attention=attention)
        query, key, value = qkv(states).view(10, 3, 2, 8).unbind(1)
        expected = proj(one_by_one(rotary.apply(query), rotary.apply(key), value, lengths).float().flatten(1))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ rotary angles


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
    assert torch.allclose(
        Rotary2D(positions, head_dim=head_dim, device="cpu").apply(states), expected, rtol=0, atol=1e-6
    )
    small = Rotary2D(positions, head_dim=head_dim, device="cpu").apply(states.to(torch.bfloat16))
    assert small.dtype == torch.bfloat16
