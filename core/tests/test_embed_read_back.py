"""No step reads a value back from the device, which a busy GPU would make it wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from embed_media import media_of
from torch.utils._python_dispatch import TorchDispatchMode

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.encoder import Encoder, EncodesImages
from mm_plugin.inputs import Encoded, ForwardBatch, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem

HIDDEN = 4
VOCABULARY = 50


def make_item(seed: int, offsets: list[tuple[int, int]]) -> MultimodalDataItem:
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=offsets, feature=np.array([seed]))
    item.set_identity(seed.to_bytes(32, "big"))
    return item


def make_media(seq: int, items: Sequence[MultimodalDataItem]) -> RequestMedia:
    ids = (np.arange(seq, dtype=np.int64) * 7 + 3) % VOCABULARY
    return media_of(items, ids)


class ByItem(Encoder, EncodesImages):
    """Encodes each item by itself."""

    def __init__(self, encode: Callable[[MultimodalDataItem], Any]) -> None:
        self.one = encode

    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> ByItem:
        raise NotImplementedError

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Any]:
        return [self.one(item) for item in items]


class Scaled(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


READ_BACKS = (
    "item", "tolist", "nonzero", "numpy", "cpu", "masked_select",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
)  # fmt: skip
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "repeat_interleave")


class Guard(TorchDispatchMode):
    """Notes whatever would wait for a GPU: reads of values, and shapes that depend on values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name in READ_BACKS:
            patch.setattr(torch.Tensor, name, self.noting(name, getattr(torch.Tensor, name)))
        for name in ("nonzero", "masked_select", "argwhere", "unique"):
            patch.setattr(torch, name, self.noting(name, getattr(torch, name)))

    def noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.seen.append(name)
            return original(*arguments, **named)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or name.startswith("unique"):
            self.seen.append(name)
        if name in ("index", "index_put", "index_put_"):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            self.seen += ["mask"] * len(masks)
        return func(*args, **(kwargs or {}))


def guarded_steps(
    guard: Guard, encode: Callable[[MultimodalDataItem], Any], *, runs: int = 3, module: Any = None, routine: Any = None
) -> None:
    """Steps that go through every part of the path: all kinds of rows, cached, held, failed; few and many runs of text."""
    given = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 4)], precomputed_embeddings=torch.ones(2, HIDDEN))
    given.set_identity(b"g" * 32)
    wrong = make_item(99, [(0, 0)])
    wrong.feature = None
    many = make_media(2 * runs + 8, [make_item(seed, [(2 * seed + 1, 2 * seed + 1)]) for seed in range(3, runs + 3)])
    requests = [make_media(9, [make_item(1, [(0, 2), (5, 6)]), given]), None, make_media(4, [wrong]), many]
    lengths = [9, 3, 4, 2 * runs + 8]
    ids = [torch.arange(3) if each is None else torch.from_numpy(each.inputs.padded_input_ids) for each in requests]
    encoder, cache = ByItem(encode), EmbeddingCache(1 << 20)
    if routine is not None:
        encoder.bind(version="1", owner={}, embed=routine)
    table = module or torch.nn.Embedding(VOCABULARY, HIDDEN)
    for cut in (2, 4):
        for start, end in ((0, cut), (cut, None)):
            parts = [each[start:end] for each in ids]
            extends = [len(part) for part in parts]
            prefixes = [length - extend if start else 0 for length, extend in zip(lengths, extends, strict=True)]
            flat, batch = torch.cat(parts), ForwardBatch(requests, prefixes, extends)
            with guard:
                embed_mm_inputs(flat, batch, table, encoder, cache, check_finite=True)


def quiet_rows(item: MultimodalDataItem) -> Encoded:
    """Rows with all extras, made without a look at any value."""
    seed = torch.from_numpy(item.feature)
    rows = seed[:, None] * 1000.0 + torch.arange(item.num_tokens)[:, None] + torch.arange(HIDDEN)[None]
    return Encoded(rows, deepstack=torch.stack([rows, rows]), kept=torch.arange(item.num_tokens))


@pytest.mark.parametrize("runs", [3, 100])
@pytest.mark.parametrize("module", [None, Scaled], ids=["plain", "called"])
def test_no_value_is_read_back_from_the_device(runs: int, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(monkeypatch)
    guarded_steps(guard, quiet_rows, runs=runs, module=module(VOCABULARY, HIDDEN) if module else None)
    assert guard.seen == []


def adding(
    text: torch.Tensor, plan: Any, embeddings: Sequence[Encoded], ids: torch.Tensor
) -> tuple[torch.Tensor, None]:
    for piece, encoded in zip(plan.pieces, embeddings, strict=True):
        text[piece.out_start : piece.out_end] += encoded.embeddings
    return text, None


def test_a_model_s_own_routine_costs_no_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(monkeypatch)
    guarded_steps(guard, quiet_rows, routine=adding)
    assert guard.seen == []


@pytest.mark.parametrize(
    "planted",
    [
        lambda rows: rows[0, 0].item(),
        lambda rows: rows.tolist(),
        lambda rows: bool(rows.any()),
        lambda rows: int(rows.sum()),
        lambda rows: float(rows.sum()),
        lambda rows: range(rows.long().abs().amax()),
        lambda rows: rows.cpu(),
        lambda rows: rows.numpy(),
        lambda rows: rows[rows[:, 0] > 0],
        lambda rows: torch.nonzero(rows),
        lambda rows: torch.masked_select(rows, rows > 0),
        lambda rows: torch.equal(rows, rows),
        lambda rows: torch.where(rows > 0),
        lambda rows: rows.unique(),
    ],
    ids=[
        "item", "tolist", "bool", "int", "float", "index", "cpu", "numpy", "mask", "nonzero", "masked_select", "equal",
        "where", "unique",
    ],
)  # fmt: skip
def test_the_guard_notes_a_planted_read_back(
    planted: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(item: MultimodalDataItem) -> Encoded:
        encoded = quiet_rows(item)
        planted(encoded.embeddings)
        return encoded

    guard = Guard(monkeypatch)
    guarded_steps(guard, encode)
    assert guard.seen != []
