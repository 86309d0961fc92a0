"""A model's own towers and projector, loaded alone, and its own way from a processor's tensors to rows."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mm_plugin import (
    Checkpoint,
    Encoded,
    Encoder,
    EncoderError,
    EncodesAudio,
    EncodesImages,
    Modality,
    MultimodalDataItem,
    UsageError,
)
from mm_plugin.encoder import as_tensor
from mm_plugin_transformers_auto.learning import Kind, Model, join, model_of

logger = logging.getLogger("mm_plugin")
_LARGE = 1 << 20  # elements
_METHODS = {Modality.IMAGE: "get_image_features", Modality.AUDIO: "get_audio_features"}


class TransformersEncoder(Encoder, EncodesImages, EncodesAudio):
    """The processor's tensors in, the rows that the model itself would write into its text embeddings out.

    Args:
        model: transformers' model, its language model taken out.
        learned: what was learned about the checkpoint's processor.
        device: where the weights are.
        dtype: of the weights.
        hidden: width of a text embedding.
    """

    def __init__(self, model: Any, learnt: Model, device: torch.device, dtype: torch.dtype, hidden: int) -> None:
        self._model, self._learnt = model, learnt
        self._place, self._dtype, self._hidden = device, dtype, hidden

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> TransformersEncoder:
        """Build the model around an absent language model and read the other tensors.

        Raises:
            UsageError: the checkpoint's tensors do not fit the model, or its language model cannot be told from the rest.
        """
        learnt = model_of(checkpoint)
        device = torch.device(device)
        dtype = _checkpoint_dtype(learnt.config) if dtype is None else dtype
        config = type(learnt.config).from_dict(learnt.config.to_dict())
        # What is made besides weights draws random numbers too; the server's own are none of its business.
        with torch.random.fork_rng(devices=[]), torch.device(device), _EmptyOnMeta():
            model = learnt.model_class._from_config(config, dtype=dtype)  # noqa: SLF001 - no public name takes a dtype
        wanted = _without_language_model(model, checkpoint)
        _load(model, wanted, checkpoint, device)
        hidden = int(config.get_text_config().hidden_size)
        _take_out(model, hidden, dtype, device)
        left = [name for name, part in (*model.named_parameters(), *model.named_buffers()) if part.is_meta]
        if left:
            raise UsageError(
                f"{checkpoint.folder}: {type(model).__name__} has {left[0]!r} beside its language model, which is neither in "
                "the checkpoint nor made by its constructor",
                argument="checkpoint",
            )
        loaded = cls(model.eval().requires_grad_(False), learnt, device, dtype, hidden)
        loaded._verify(checkpoint)
        return loaded

    def _verify(self, checkpoint: Checkpoint) -> None:
        """Compare rows with what the model itself writes into the embeddings of one prompt: at these places, and at no others.

        Raises:
            UsageError: it writes elsewhere too, or something else.
        """
        for kind in self._learnt.kinds.values():
            ids, tensors = self._learnt.probe(kind)
            given = torch.from_numpy(ids)[None].to(self._place)
            on_device = {name: self._cast(value, index == 0) for index, (name, value) in enumerate(tensors.items())}
            try:
                written = self._written(kind, given, on_device)[0]
                rows, _ = self._rows(kind, on_device, int((ids == kind.row_token).sum()))
            except Exception as error:
                logger.warning(
                    "mm-plugin: rows of %s for %s could not be compared with what it writes itself: %s: %s",
                    type(self._model).__name__, kind.modality.argument, type(error).__name__, error,
                )  # fmt: skip
                continue
            there = ~torch.isnan(written).any(dim=-1).cpu()  # [n]
            expected = torch.from_numpy(ids == kind.row_token)
            other = sorted(set(ids[(there & ~expected).numpy()].tolist()))
            if other:
                tokens = ", ".join(
                    repr(str(self._learnt.tokenizer.convert_ids_to_tokens(index))) for index in other[:3]
                )
                raise UsageError(
                    f"{checkpoint.folder}: {type(self._model).__name__} also writes at the places of {tokens}, which are no rows "
                    f"of its {kind.modality.argument}: it needs a plugin of its own",
                    argument="checkpoint",
                )
            own = written[there.to(written.device)]
            close = own.shape == rows.shape and torch.allclose(
                own, rows, rtol=1e-2, atol=1e-2 * float(rows.abs().max())
            )
            if not close:
                raise UsageError(
                    f"{checkpoint.folder}: {type(self._model).__name__} writes other rows of its {kind.modality.argument} into "
                    f"its text embeddings than {_METHODS[kind.modality]} gives: it needs a plugin of its own",
                    argument="checkpoint",
                )

    def _cast(self, value: torch.Tensor, is_feature: bool) -> torch.Tensor:
        moved = value.to(self._place)
        return moved.to(self._dtype) if is_feature and moved.is_floating_point() else moved

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        """Rows [num_tokens, hidden] of each image, from one call of the model's `get_image_features` where they lie together."""
        return self._features(Modality.IMAGE, items)

    def get_audio_feature(self, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        """Rows [num_tokens, hidden] of each audio, as for images."""
        return self._features(Modality.AUDIO, items)

    def _features(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        kind = self._learnt.kinds[modality]
        if self._learnt.unlike is not None:
            # Each holds all media of its request, laid out as only their processor knows.
            return [encoded for item in items for encoded in self._together(kind, [item])]
        return self._together(kind, items)

    def _together(self, kind: Kind, items: Sequence[MultimodalDataItem]) -> list[Encoded]:
        tensors = {}
        for index, name in enumerate(kind.features):
            parts = [as_tensor(item.feature if index == 0 else item.get(name)) for item in items]
            tensors[name] = self._cast(
                join([part.to(self._place) for part in parts], kind.axes.get(name, 0)), index == 0
            )
        counts = [item.num_tokens for item in items]
        with torch.inference_mode():
            rows, deepstack = self._rows(kind, tensors, sum(counts))
        if len(rows) != sum(counts):
            raise EncoderError(
                f"{type(self._model).__name__} gives {len(rows)} rows, the {kind.modality.argument} stand for {sum(counts)} "
                "tokens",
                **self.owner,
            )
        layers = [None] * len(items) if deepstack is None else torch.split(deepstack, counts, dim=1)
        return [Encoded(part, layer) for part, layer in zip(torch.split(rows, counts), layers, strict=True)]

    def _rows(
        self, kind: Kind, tensors: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [count, hidden], and deepstack rows [n_layers, count, hidden] where the model has them."""
        method = next(
            (
                found
                for owner in (self._model, self._model.base_model)
                if (found := getattr(owner, _METHODS[kind.modality], None)) is not None
            ),
            None,
        )
        if method is None:
            return self._written_rows(kind, tensors, count), None
        taken = inspect.signature(method).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        output = method(**{name: value for name, value in tensors.items() if open_ended or name in taken})
        rows = getattr(output, "pooler_output", output)
        deepstack = getattr(output, "deepstack_features", None)
        return self._flat(rows), None if deepstack is None else torch.stack([self._flat(layer) for layer in deepstack])

    def _flat(self, rows: Any) -> torch.Tensor:
        """Rows of a tensor, or of a list with a tensor for each media input, in order."""
        parts = list(rows) if isinstance(rows, list | tuple) else [rows]
        if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
            raise EncoderError(f"{type(self._model).__name__} gives no rows but {type(rows).__name__}", **self.owner)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def _written_rows(self, kind: Kind, tensors: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """What a model without a method for it writes into its text embeddings, seen where it would enter its language model."""
        if count == 1:
            # Some models take a lone token for one that has yet to be expanded, and do that by themselves.
            twice = {name: join([value, value], kind.axes.get(name, 0)) for name, value in tensors.items()}
            return self._written_rows(kind, twice, 2)[:1]
        rows = self._written(kind, torch.full((1, count), kind.row_token, device=self._place), tensors)[0]
        if torch.isnan(rows).any():
            raise EncoderError(
                f"{type(self._model).__name__} writes no rows of its {kind.modality.argument} into its text embeddings",
                **self.owner,
            )
        return rows

    def _written(self, kind: Kind, ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The embeddings [1, n, hidden] with which the model would enter its language model; NaN where it writes nothing."""
        model, marks = self._model.base_model, (ids == kind.row_token).int()
        known = {"mm_token_type_ids": marks * int(kind.modality), "token_type_ids": marks}
        taken = inspect.signature(model.forward).parameters
        extra = {name: value for name, value in known.items() if name in taken}
        try:
            with torch.inference_mode():
                model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra, **tensors)
        except _Entered as entered:
            return entered.embeds
        raise EncoderError(f"{type(self._model).__name__} does not reach its language model", **self.owner)


class _Entered(Exception):
    """The language model was about to be called, with these embeddings."""

    def __init__(self, embeds: torch.Tensor) -> None:
        super().__init__("the language model")
        self.embeds = embeds


class _NoTable(nn.Module):
    """In the place of a text embedding: not a number where the model writes nothing."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._hidden, self._dtype, self._device = hidden, dtype, device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.full((*ids.shape, self._hidden), torch.nan, dtype=self._dtype, device=self._device)


class _NoLanguageModel(nn.Module):
    """In the place of a language model."""

    def __init__(self, table: _NoTable, config: Any) -> None:
        super().__init__()
        self.embed_tokens, self.config = table, config

    def get_input_embeddings(self) -> _NoTable:
        return self.embed_tokens

    def forward(self, *arguments: Any, inputs_embeds: torch.Tensor, **keywords: Any) -> Any:
        raise _Entered(inputs_embeds)


class _EmptyOnMeta(TorchFunctionMode):
    """Inside it, what is allocated to be filled later takes no memory; what is computed is computed.

    Weights come from the checkpoint. Rotary frequencies and position ids are stored nowhere and made in constructors. Some
    language models allocate their experts as zeros: what is that large is a weight, and one that is not would be found missing.
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


def _checkpoint_dtype(config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None)
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else torch.float32


def _language_parts(model: Any, checkpoint: Checkpoint) -> list[str]:
    """Names of the modules that are not loaded: the language model, its head, and its table where that lies outside."""
    decoder = model.get_decoder()
    absent = [decoder, model.get_output_embeddings(), model.get_input_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is part for part in absent)]
    if "" in names or not any(module is decoder for _, module in model.named_modules()):
        raise UsageError(
            f"{checkpoint.folder}: the language model of {type(model).__name__} cannot be told from the rest of it",
            argument="checkpoint",
        )
    return names


def _without_language_model(model: Any, checkpoint: Checkpoint) -> set[str]:
    """Names of the tensors that have to be loaded."""
    absent = tuple(name + "." for name in _language_parts(model, checkpoint))
    return {name for name in model.state_dict() if not name.startswith(absent)}


def _load(model: Any, wanted: set[str], checkpoint: Checkpoint, device: torch.device) -> None:
    """Read the wanted tensors by transformers' own rules of renaming, and no others.

    Raises:
        UsageError: some are missing or of another shape.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, str] = {}
    converted = False
    for name in checkpoint.tensor_names():
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in wanted:
            sources[name] = target
            converted = converted or pattern is not None
    tensors = checkpoint.read_tensors(sources, device=device)
    if converted:
        _convert(model, tensors, mapping, device)
        missing = [name for name, value in model.state_dict().items() if name in wanted and value.is_meta]
    else:
        found = {sources[name]: _as(tensor, state[sources[name]]) for name, tensor in tensors.items()}
        shapes = [name for name, tensor in found.items() if tensor.shape != state[name].shape]
        if shapes:
            raise UsageError(
                f"{checkpoint.folder}: tensor {shapes[0]} is {list(found[shapes[0]].shape)}, where its config.json says "
                f"{list(state[shapes[0]].shape)}",
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


def _as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor


def _convert(model: Any, tensors: Mapping[str, torch.Tensor], mapping: Sequence[Any], device: torch.device) -> None:
    """Where tensors are split or merged on the way, transformers' own loader does it."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    settings = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=list(mapping))
    convert_and_load_state_dict_in_model(model, dict(tensors), settings)


def _take_out(model: Any, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Put something in the place of the language model that holds nothing and cannot be called unnoticed."""
    table = _NoTable(hidden, dtype, device)
    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    stand_ins = ((decoder, _NoLanguageModel(table, decoder.config)), (embedding, table), (head, nn.Identity()))
    for absent, stand_in in stand_ins:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is absent:
                    setattr(parent, name, stand_in)
