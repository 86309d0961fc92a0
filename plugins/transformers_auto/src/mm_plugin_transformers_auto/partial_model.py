"""A transformers model without its language model: built, and given its weights, without allocating or reading the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mm_plugin import Checkpoint, UsageError

# Elements of the smallest tensor that counts as a weight if a constructor fills it with a constant or random numbers.
_LARGE = 1 << 20


class LanguageModelReached(Exception):
    """The absent language model was called.

    Attributes:
        embeds: [1, n, hidden], the embeddings with which it was called; NaN where the model has written nothing.
    """

    def __init__(self, embeds: torch.Tensor) -> None:
        super().__init__("the language model was called")
        self.embeds = embeds


def load_partial_model(
    model_class: Any, config: Any, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Any:
    """Build a model whose language model is replaced by a stand-in that raises `LanguageModelReached`.

    Args:
        model_class: transformers' model class.
        config: its config.
        checkpoint: where the weights are read from.
        device: of the weights.
        dtype: of the weights.

    Raises:
        UsageError: the checkpoint's tensors do not fit the model, or its language model cannot be separated from the rest.
    """
    # Constructors draw random numbers; the server's generator must not notice.
    with torch.random.fork_rng(devices=[]), torch.device(device), _EmptyOnMeta():
        model = model_class._from_config(config, dtype=dtype)  # noqa: SLF001 - no public name takes a dtype
    wanted = _names_without_language_model(model, checkpoint)
    _load(model, wanted, checkpoint, device)
    _replace_language_model(model, int(config.get_text_config().hidden_size), dtype, device)
    left = [name for name, part in (*model.named_parameters(), *model.named_buffers()) if part.is_meta]
    if left:
        raise UsageError(
            f"{checkpoint.folder}: {type(model).__name__} has {left[0]!r} outside its language model, which is neither in the "
            "checkpoint nor created by its constructor",
            argument="checkpoint",
        )
    return model.eval().requires_grad_(False)


class _NoEmbedding(nn.Module):
    """Replaces the text embedding: returns NaN, which remains where the model writes nothing."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._hidden, self._dtype, self._device = hidden, dtype, device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.full((*ids.shape, self._hidden), torch.nan, dtype=self._dtype, device=self._device)


class _NoLanguageModel(nn.Module):
    """Replaces the language model: raises when it is called."""

    def __init__(self, table: _NoEmbedding, config: Any) -> None:
        super().__init__()
        self.embed_tokens, self.config = table, config

    def get_input_embeddings(self) -> _NoEmbedding:
        return self.embed_tokens

    def forward(self, *arguments: Any, inputs_embeds: torch.Tensor, **keywords: Any) -> Any:
        raise LanguageModelReached(inputs_embeds)


class _EmptyOnMeta(TorchFunctionMode):
    """Allocates tensors that are filled later without memory; tensors that are computed are computed.

    Weights come from the checkpoint. Position frequencies and position ids are not stored in any checkpoint; constructors compute
    them. Some language models allocate their experts as zeros: a tensor that large is a weight, and one that is not would be
    reported as missing.
    """

    _FILLED = (torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if keywords.get("device") is None and (func is torch.empty or (func in self._FILLED and _numel(args) > _LARGE)):
            keywords["device"] = "meta"
        return func(*args, **keywords)


def _numel(shape: Sequence[Any]) -> int:
    sizes = shape[0] if shape and isinstance(shape[0], list | tuple) else shape
    return math.prod(size for size in sizes if isinstance(size, int))


def _names_without_language_model(model: Any, checkpoint: Checkpoint) -> set[str]:
    """Names of the tensors to load: all but those of the language model, its head, and its embedding where that is separate."""
    decoder = model.get_decoder()
    absent = [decoder, model.get_output_embeddings(), model.get_input_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is part for part in absent)]
    if "" in names or not any(module is decoder for _, module in model.named_modules()):
        raise UsageError(
            f"{checkpoint.folder}: the language model of {type(model).__name__} cannot be separated from the rest of it",
            argument="checkpoint",
        )
    prefixes = tuple(name + "." for name in names)
    return {name for name in model.state_dict() if not name.startswith(prefixes)}


def _load(model: Any, wanted: set[str], checkpoint: Checkpoint, device: torch.device) -> None:
    """Read the wanted tensors, and no others, under the names to which transformers maps those of the checkpoint.

    Raises:
        UsageError: some are missing or of another shape.
    """
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    sources, converted = _find_sources(model, mapping, state, wanted, checkpoint)
    tensors = checkpoint.read_tensors(sources, device=device)
    if converted:
        _convert(model, tensors, mapping, device)
        missing = [name for name, value in model.state_dict().items() if name in wanted and value.is_meta]
    else:
        found = {sources[name]: _cast(tensor, state[sources[name]]) for name, tensor in tensors.items()}
        shapes = [name for name, tensor in found.items() if tensor.shape != state[name].shape]
        if shapes:
            raise UsageError(
                f"{checkpoint.folder}: expected tensor {shapes[0]} of shape {list(state[shapes[0]].shape)} as its config.json "
                f"says, found {list(found[shapes[0]].shape)}",
                argument="checkpoint",
            )
        model.load_state_dict(found, strict=False, assign=True)
        missing = sorted(wanted - set(found))
    if missing:
        raise UsageError(
            f"{checkpoint.folder}: {len(missing)} tensors of the encoder of {type(model).__name__} are missing "
            f"({', '.join(sorted(missing)[:3])})",
            argument="checkpoint",
        )


def _find_sources(
    model: Any, mapping: Sequence[Any], state: Mapping[str, Any], wanted: set[str], checkpoint: Checkpoint
) -> tuple[dict[str, str], bool]:
    """The model's name of each tensor to read, by its name in the checkpoint, and whether any is split or merged on loading."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    sources: dict[str, str] = {}
    converted = False
    for name in checkpoint.tensor_names():
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in wanted:
            sources[name] = target
            converted = converted or pattern is not None
    return sources, converted


def _cast(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor


def _convert(model: Any, tensors: Mapping[str, torch.Tensor], mapping: Sequence[Any], device: torch.device) -> None:
    """Load tensors that must be split or merged with transformers' own loader."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    settings = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=list(mapping))
    convert_and_load_state_dict_in_model(model, dict(tensors), settings)


def _replace_language_model(model: Any, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Put stand-ins in the place of the language model, its embedding and its head."""
    table = _NoEmbedding(hidden, dtype, device)
    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    stand_ins = ((decoder, _NoLanguageModel(table, decoder.config)), (embedding, table), (head, nn.Identity()))
    for absent, stand_in in stand_ins:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is absent:
                    setattr(parent, name, stand_in)
