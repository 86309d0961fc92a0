"""`ModelSpec`: which declarations are accepted, and which are refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest

from mm_plugin import Modality, ModelSpec
from mm_plugin.errors import SpecError

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
GOOD: dict[str, Any] = {
    "name": "tiny",
    "output_version": 1,
    "architectures": ("TinyForConditionalGeneration",),
    "modalities": (IMAGE,),
    "placeholders": {IMAGE: "<image>"},
    "token_pairs": (("<start>", "<end>"),),
    "fields": {IMAGE: ("image_grid_thw",)},
    "processor": "tiny.processor:Processor",
    "encoder": "tiny.encoder:Encoder",
}
ALLOWED: list[dict[str, Any]] = [
    {},
    {"name": "Qwen2.5-VL_x"},
    {"output_version": 0},
    {"architectures": (), "model_types": ("tiny", "tiny2")},
    {"architectures": (), "model_types": ()},
    {"padding": "runs", "token_pairs": ()},
    {"padding": "offsets", "token_pairs": ()},
    {"padding": "tiny.padding:pad", "token_pairs": ()},
    {"positions": "tiny:positions", "tokenizer": "tiny:open", "embed": "a.b.c:embed", "demo": "tiny.demo:Demo"},
    {"fields": {IMAGE: ()}},
    {"feature_names": {IMAGE: "pixel_values"}},
    {"feature_names": {}},
    {"placeholder_affixes": {IMAGE: ("\n", "")}, "notes": {"processor": "TinyProcessor"}},
    {"specialize": "tiny:specialize", "modalities": (), "placeholders": {}, "fields": {}},
    {"fields": OrderedDict({IMAGE: ("a", "b")})},
    {
        "modalities": (VIDEO, IMAGE),
        "placeholders": {IMAGE: "<i>", VIDEO: "<v>"},
        "fields": {VIDEO: (), IMAGE: ()},
    },
]
# change -> words that the message must hold
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"placeholder_affixes": {VIDEO: ("", "")}}, "placeholder_affixes"),
    ({"placeholder_affixes": {IMAGE: "\n"}}, "placeholder_affixes"),
    ({"placeholder_affixes": {IMAGE: ("\n",)}}, "placeholder_affixes"),
    ({"placeholder_affixes": {IMAGE: ("\n", None)}}, "placeholder_affixes"),
    ({"feature_names": {VIDEO: "pixel_values"}}, "feature_names"),
    ({"feature_names": "pixel_values"}, "feature_names"),
    ({"feature_names": {IMAGE: "pixel values"}}, "feature_names[IMAGE]"),
    ({"feature_names": {IMAGE: None}}, "feature_names[IMAGE]"),
    ({"feature_names": {IMAGE: "image_grid_thw"}}, "feature_names[IMAGE]"),
    ({"notes": {"processor": 1}}, "notes"),
    ({"notes": ("processor",)}, "notes"),
    ({"specialize": "tiny.specialize"}, "specialize"),
    ({"specialize": "tiny:specialize", "modalities": ()}, "placeholders"),
    ({"name": "tiny vl"}, "name"),
    ({"name": "tiny/vl"}, "name"),
    ({"name": "tiny\n"}, "name"),
    ({"name": None}, "name"),
    ({"output_version": -1}, "output_version"),
    ({"output_version": 1.0}, "output_version"),
    ({"output_version": True}, "output_version"),
    ({"output_version": "1"}, "output_version"),
    ({"architectures": "TinyForConditionalGeneration"}, "architectures must be a tuple, got str"),
    ({"architectures": ["A"]}, "architectures must be a tuple, got list"),
    ({"architectures": ("A", 3)}, "architectures"),
    ({"architectures": ("",)}, "architectures"),
    ({"model_types": "tiny"}, "model_types must be a tuple, got str"),
    ({"model_types": (None,)}, "model_types"),
    ({"modalities": IMAGE}, "modalities must be a tuple"),
    ({"modalities": (), "placeholders": {}, "fields": {}}, "modalities is empty"),
    (
        {"modalities": ("image",), "placeholders": {"image": "x"}, "fields": {"image": ()}},
        "'image', which is not a Modality",
    ),
    ({"modalities": (1,)}, "not a Modality"),
    ({"modalities": (IMAGE, IMAGE)}, "twice"),
    ({"placeholders": {}}, "placeholders must have exactly the keys ['IMAGE']"),
    ({"placeholders": {IMAGE: "x", VIDEO: "y"}}, "placeholders must have exactly the keys ['IMAGE']"),
    ({"placeholders": {IMAGE: ""}}, "placeholders"),
    ({"placeholders": {IMAGE: 7}}, "placeholders"),
    ({"placeholders": [(IMAGE, "x")]}, "placeholders"),
    ({"fields": {}}, "fields must have exactly the keys ['IMAGE']"),
    ({"fields": {IMAGE: ["grid"]}}, "fields[IMAGE]"),
    ({"fields": {IMAGE: "grid"}}, "fields[IMAGE]"),
    ({"fields": {IMAGE: ("two words",)}}, "fields[IMAGE]"),
    ({"fields": {IMAGE: (3,)}}, "fields[IMAGE]"),
    ({"token_pairs": [("<start>", "<end>")]}, "token_pairs must be a tuple"),
    ({"token_pairs": (("<start>",),)}, "token_pairs"),
    ({"token_pairs": ("<>",)}, "token_pairs"),
    ({"token_pairs": (7,)}, "token_pairs"),
    ({"token_pairs": (("<start>", 7),)}, "token_pairs"),
    ({"token_pairs": (("<start>", ""),)}, "token_pairs"),
    ({"token_pairs": ()}, "padding='pairs' needs token_pairs"),
    ({"padding": "sometimes"}, "padding 'sometimes'"),
    ({"padding": "tiny:pad:more"}, "padding 'tiny:pad:more'"),
    ({"padding": None}, "padding None"),
    ({"processor": None}, "processor must be 'module:Name'"),
    ({"processor": "tiny.processor.Processor"}, "processor must be 'module:Name'"),
    ({"processor": "tiny.processor:"}, "processor must be 'module:Name'"),
    ({"processor": ":Processor"}, "processor must be 'module:Name'"),
    ({"processor": "tiny..processor:Processor"}, "processor must be 'module:Name'"),
    ({"processor": ModelSpec}, "processor must be 'module:Name'"),
    ({"encoder": "9tiny:Encoder"}, "encoder must be 'module:Name'"),
    ({"positions": "positions"}, "positions must be 'module:Name'"),
    ({"tokenizer": "open"}, "tokenizer must be 'module:Name'"),
    ({"embed": "tiny:"}, "embed must be 'module:Name'"),
    ({"demo": 3}, "demo must be 'module:Name'"),
]


def label(value: Any) -> str:
    return str(value) if isinstance(value, str) else " ".join(f"{key}={entry!r}" for key, entry in value.items())


@pytest.mark.parametrize("change", ALLOWED, ids=label)
def test_a_valid_declaration_is_accepted_as_it_is(change: dict[str, Any]) -> None:
    given = GOOD | change
    spec = ModelSpec(**given)
    assert {name: getattr(spec, name) for name in given} == given


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=label)
def test_a_contradiction_is_refused_with_the_field_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        ModelSpec(**(GOOD | change))
    assert words in caught.value.message
    assert caught.value.message.startswith(f"ModelSpec {(GOOD | change)['name']!r}: ")


@pytest.mark.parametrize(
    "name", ["name", "output_version", "modalities", "placeholders", "fields", "processor", "encoder"]
)
def test_what_has_no_default_must_be_given(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        ModelSpec(**{key: value for key, value in GOOD.items() if key != name})


def test_a_misspelt_field_is_refused() -> None:
    with pytest.raises(TypeError, match="architecture"):
        ModelSpec(**GOOD, architecture=("A",))


def test_a_declaration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ModelSpec(**GOOD).output_version = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("reference", "value"), [("json:loads", json.loads), ("json.decoder:JSONDecoder", json.decoder.JSONDecoder)]
)
@pytest.mark.parametrize("field", ["processor", "encoder", "positions", "tokenizer", "embed", "demo"])
def test_a_reference_is_loaded(field: str, reference: str, value: Any) -> None:
    assert ModelSpec(**(GOOD | {field: reference})).load(field) is value


@pytest.mark.parametrize("field", ["positions", "tokenizer", "embed", "demo"])
def test_a_missing_reference_loads_nothing(field: str) -> None:
    assert ModelSpec(**GOOD).load(field) is None


def test_what_the_import_of_a_reference_raises_comes_through() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        ModelSpec(**(GOOD | {"encoder": "no_such_module_here:Encoder"})).load("encoder")
    with pytest.raises(AttributeError, match="NoSuchClass"):
        ModelSpec(**(GOOD | {"encoder": "json:NoSuchClass"})).load("encoder")


def test_a_declaration_imports_none_of_its_code() -> None:
    # Nothing named `tiny` is installed, and GOOD names it.
    assert ModelSpec(**GOOD).processor == "tiny.processor:Processor"


@pytest.mark.parametrize("name", ModelSpec.__struct_fields__)
def test_every_field_is_documented(name: str) -> None:
    assert f"        {name}: " in (ModelSpec.__doc__ or "")
