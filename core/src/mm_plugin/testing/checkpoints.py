"""Tiny checkpoints with seeded weights, laid out as the released ones are, for a plugin's tests and demo. Knows no model."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# A few byte pairs that merge across the boundaries of text and chat template.
_MERGES = ("Ċ Ċ", "Ġ t", "h e", "Ġt he", "i n", "a n", "Ġ a", "o n", "Ġ Ġ", "Ċ Ġ", "e r", "i s")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_tokenizer(special_tokens: Sequence[str], **settings: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text as recent models do, with a few merges and a model's special tokens.

    Args:
        special_tokens: they get the ids that follow those of the 256 bytes and the merges, in this order.
        **settings: of `PreTrainedTokenizerFast`, such as `eos_token`, `pad_token` and `chat_template`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (pair.split() for pair in _MERGES)]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def fill_weights(
    state: Mapping[str, torch.Tensor], *, seed: int, spreads: Mapping[str, float] | None = None
) -> dict[str, torch.Tensor]:
    """Weights that depend on name and seed only, and are equal on every machine.

    Each tensor is uniform in b - a .. b + a, where (a, b) is (0.1, 0) for biases, (0.1, 1) for norms, (1, 0) for embeddings, and
    (sqrt(3 / fan_in), 0) for all others; fan_in is the product of all dimensions but the first.

    Args:
        state: names and shapes; the values are ignored.
        seed: combined with the CRC-32 of each name by exclusive or.
        spreads: by part of a name, another a, with b = 0; the first part that occurs in the name counts.

    Shape:
        returns float32 tensors on the CPU, in the shapes of `state`.
    """
    filled = {}
    for name, tensor in state.items():
        own = next((spread for part, spread in (spreads or {}).items() if part in name), None)
        if own is not None:
            spread, center = own, 0.0
        elif name.endswith(".bias"):
            spread, center = 0.1, 0.0
        elif "norm" in name or "ln_q" in name:
            spread, center = 0.1, 1.0
        elif "embed_tokens" in name:
            spread, center = 1.0, 0.0
        else:
            spread, center = math.sqrt(3 / math.prod(tensor.shape[1:])), 0.0
        random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()) ^ seed)).random(tensor.numel())
        values = ((random * 2 - 1) * spread + center).astype(np.float32)
        filled[name] = torch.from_numpy(values.reshape(tuple(tensor.shape)))
    return filled


def write_transformers_checkpoint(
    folder: str | Path,
    model_class: Any,
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    preprocessor: Mapping[str, Any],
    *,
    seed: int,
    renamed: Mapping[str, str] | None = None,
    combined: bool = False,
    shards: int = 1,
) -> Path:
    """Write a whole checkpoint of a model that transformers has, with seeded weights, and return its folder.

    Args:
        folder: created where it does not exist.
        model_class: the model with its language head; its name becomes the config's architecture.
        config: of the model.
        tokenizer: saved with it.
        preprocessor: settings of images, among them `min_pixels` and `max_pixels`.
        seed: of the weights.
        renamed: by prefix of a tensor's name in memory, the prefix under which it is stored.
        combined: write processor_config.json, as newer transformers does, instead of preprocessor_config.json.
        shards: safetensors files; two or more come with an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    write_json(folder / "config.json", config.to_dict() | {"architectures": [model_class.__name__]})
    settings = dict(preprocessor)
    if combined:
        size = {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}
        write_json(folder / "processor_config.json", {"image_processor": settings | {"size": size}})
    else:
        write_json(folder / "preprocessor_config.json", settings)
    with torch.device("meta"):
        names = model_class(config).state_dict()
    state = {}
    for name, tensor in fill_weights(names, seed=seed).items():
        known = next((start for start in renamed or {} if name.startswith(start)), None)
        state[name if renamed is None or known is None else renamed[known] + name.removeprefix(known)] = tensor
    write_tensors(folder, state, shards=shards)
    return folder


def write_tensors(folder: Path, state: Mapping[str, torch.Tensor], *, shards: int = 1, digits: int = 5) -> None:
    """Write tensors to one safetensors file, or to several with an index.

    Args:
        folder: of the checkpoint.
        state: tensors by the names under which they are stored.
        shards: number of files.
        digits: of the number of files in their names.
    """
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    names = sorted(state)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:0{digits}d}.safetensors"
        part = {name: state[name] for name in names[index::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in state.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file of a checkpoint."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
