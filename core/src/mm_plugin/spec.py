"""`ModelSpec`: what a plugin declares about one model. Names code only as `"module:Name"` strings; validates itself."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

import msgspec

from mm_plugin.errors import SpecError
from mm_plugin.items import Attention, Modality, MultimodalDataItem

PADDING_RULES = ("pairs", "runs", "offsets")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one model, returned from the hook `mm_register_models`.

    Attributes:
        name: short name of the model, such as `qwen2_vl`; part of every identity.
        output_version: a whole number that the author raises whenever equal input gives other features, embeddings or
            positions; part of every identity.
        architectures: entries of `config.architectures` that the plugin serves.
        model_types: values of `config.model_type` that it serves where a config has no architectures.
        modalities: modalities that the model accepts.
        placeholders: by modality, the token that stands for one media input in a prompt.
        token_pairs: (start, end) tokens around a media input in a prompt.
        padding: how a scheduler finds the spans of items in ids that come without offsets: between `"pairs"` of tokens, as
            `"runs"` of the placeholder, not at all (`"offsets"`), or by a `"module:function"`.
        fields: by modality, the names of an item's model fields. Any other field is an error that names it.
        feature_names: by modality, the name under which the reference's processor gives the feature, such as `pixel_values`; for
            media inputs that come prepared, and for engines that pass features on by name. All modalities, or none where the
            reference has no such names.
        processor: `"module:Class"` of the `ModelProcessor`.
        encoder: `"module:Class"` of the `Encoder`.
        positions: `"module:function"` that computes M-RoPE positions; None for ordinary positions.
        tokenizer: `"module:function"` that opens the tokenizer of a `Checkpoint`, for models whose tokenizer transformers'
            `AutoTokenizer` cannot open, or opens wrongly; None for `AutoTokenizer`.
        embed: `"module:function"` in place of the core's way to embed, for models that do more than replace the rows of
            placeholders: `(text_embeds, plan, embeddings, input_ids) -> (input_embeds, extra)`; None where they do not.
        attention: by modality, `"whole"` where the tokens of a span attend to all tokens of the span, so that no chunk may cut it;
            `"causal"` where a modality is not named.
        demo: `"module:Class"` that makes a tiny checkpoint for `mm-plugin demo`, or None.
        placeholder_affixes: by modality, the text that the model's own processor writes before and after a placeholder. It is
            added before the prompt is tokenized, because the tokenizer may join it with the text beside it.
        add_special_tokens: whether a prompt that is text gets the tokenizer's special tokens at its ends, where the model's own
            processor decides it; None for the tokenizer's own default. Nothing is added to what a chat template wrote.
        specialize: `"module:function"` for plugins that learn from a checkpoint what they can serve of it. It is called with
            this spec and an open `Checkpoint`, and returns the spec for that checkpoint, the `Checkpoint` to continue with, and
            the state that processor and encoder find in `Checkpoint.specialization`. `modalities`, `placeholders` and `fields`
            may then be empty here.
        notes: texts by name in which a plugin says how it specialized this spec; kept in the plugin's record.

    Raises:
        SpecError: a field is invalid, or two fields contradict each other.

    Example:
        >>> from mm_plugin import Modality, ModelSpec
        >>> spec = ModelSpec(
        ...     name="tiny_vl",
        ...     output_version=1,
        ...     architectures=("TinyVLForConditionalGeneration",),
        ...     modalities=(Modality.IMAGE,),
        ...     placeholders={Modality.IMAGE: "<image>"},
        ...     fields={Modality.IMAGE: ("image_grid_thw",)},
        ...     padding="runs",
        ...     processor="tiny_vl.processor:TinyProcessor",
        ...     encoder="tiny_vl.encoder:TinyEncoder",
        ... )
        >>> spec.positions is None
        True
    """

    name: str
    output_version: int
    modalities: tuple[Modality, ...]
    placeholders: Mapping[Modality, str]
    fields: Mapping[Modality, tuple[str, ...]]
    processor: str
    encoder: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    token_pairs: tuple[tuple[str, str], ...] = ()
    padding: str = "pairs"
    feature_names: Mapping[Modality, str] = {}
    positions: str | None = None
    tokenizer: str | None = None
    embed: str | None = None
    attention: Mapping[Modality, Attention] = {}
    demo: str | None = None
    placeholder_affixes: Mapping[Modality, tuple[str, str]] = {}
    add_special_tokens: bool | None = None
    specialize: str | None = None
    notes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        def refuse(what: str) -> NoReturn:
            raise SpecError(f"ModelSpec {self.name!r}: {what}")

        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            refuse("name must be letters, digits, '_', '.' or '-'")
        if type(self.output_version) is not int or self.output_version < 0:
            refuse(f"output_version must be a whole number of at least 0, got {self.output_version!r}")
        for name in ("architectures", "model_types", "modalities", "token_pairs"):
            if not isinstance(getattr(self, name), tuple):
                refuse(f"{name} must be a tuple, got {type(getattr(self, name)).__name__}")
        for name in ("architectures", "model_types"):
            if not all(isinstance(served, str) and served for served in getattr(self, name)):
                refuse(f"{name} must hold non-empty strings")
        if not self.modalities and self.specialize is None:
            refuse("modalities is empty; name at least one")
        for modality in self.modalities:
            if not isinstance(modality, Modality):
                refuse(f"modalities holds {modality!r}, which is not a Modality")
        if len(set(self.modalities)) < len(self.modalities):
            refuse("modalities names a modality twice")
        for name in ("placeholders", "fields"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or set(given) != set(self.modalities):
                refuse(f"{name} must have exactly the keys {[m.name for m in self.modalities]}")
        for modality, names in self.fields.items():
            if not isinstance(names, tuple) or not all(isinstance(n, str) and n.isidentifier() for n in names):
                refuse(f"fields[{modality.name}] must be a tuple of identifiers")
            taken = sorted(set(names) & set(MultimodalDataItem.__struct_fields__))
            if taken:
                refuse(
                    f"fields[{modality.name}] holds {', '.join(taken)}, the name of a field of every item; rename it"
                )
        named = self.feature_names
        if not isinstance(named, Mapping) or (named and set(named) != set(self.modalities)):
            refuse(f"feature_names must have exactly the keys {[m.name for m in self.modalities]}, or none")
        for modality, name in named.items():
            if not isinstance(name, str) or not name.isidentifier():
                refuse(f"feature_names[{modality.name}] must be an identifier, got {name!r}")
            if name in self.fields[modality]:
                refuse(f"feature_names[{modality.name}] is {name}, which is a field too; name one of the two otherwise")
        if any(not isinstance(token, str) or not token for token in self.placeholders.values()):
            refuse("placeholders must be non-empty token strings")
        if any(
            not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(t, str) and t for t in pair)
            for pair in self.token_pairs
        ):
            refuse("token_pairs must hold pairs of (start, end) token strings")
        if not isinstance(self.attention, Mapping) or not all(
            modality in self.modalities and kind in get_args(Attention) for modality, kind in self.attention.items()
        ):
            refuse(f"attention must name, by modality of the spec, one of {', '.join(get_args(Attention))}")
        if not isinstance(self.placeholder_affixes, Mapping) or not all(
            modality in self.modalities
            and isinstance(texts, tuple)
            and len(texts) == 2
            and all(isinstance(text, str) for text in texts)
            for modality, texts in self.placeholder_affixes.items()
        ):
            refuse("placeholder_affixes must hold (before, after) texts for modalities of the spec")
        if not isinstance(self.notes, Mapping) or not all(
            isinstance(text, str) for pair in self.notes.items() for text in pair
        ):
            refuse("notes must map names to texts")
        if self.padding not in PADDING_RULES and not _REFERENCE.fullmatch(str(self.padding)):
            refuse(f"padding {self.padding!r} must be one of {PADDING_RULES} or a 'module:function'")
        if self.padding == "pairs" and not self.token_pairs:
            refuse("padding='pairs' needs token_pairs")
        for name in ("processor", "encoder", "positions", "tokenizer", "embed", "demo", "specialize"):
            value = getattr(self, name)
            if value is None and name not in ("processor", "encoder"):
                continue
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                refuse(f"{name} must be 'module:Name', got {value!r}")

    def load(self, field: str) -> Any:
        """Import what a `"module:Name"` field names.

        Args:
            field: name of the field, such as `processor`.

        Returns:
            The class or function; None where the field is None. Whatever the import raises comes through.

        Example:
            >>> from mm_plugin import ModelSpec
            >>> spec = ModelSpec(
            ...     name="tiny_vl", output_version=1, modalities=(), placeholders={}, fields={}, padding="offsets",
            ...     processor="tiny_vl:Processor", encoder="tiny_vl:Encoder", specialize="operator:add",
            ... )
            >>> spec.load("specialize")
            <built-in function add>
        """
        reference = getattr(self, field)
        if reference is None:
            return None
        module, _, name = reference.partition(":")
        return getattr(importlib.import_module(module), name)
