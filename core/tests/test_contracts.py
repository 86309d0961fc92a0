"""What a spec names must be usable: the opening of a model and `mm-plugin doctor` refuse the same, with the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import PluginLoadError
from mm_plugin.registry import check_plugin

HEAD = """
from mm_plugin import (
    AcceptsAudio, AcceptsPrecomputed, AcceptsVideos, BaseOptions, Encoder, EncodesAudio, EncodesImages, EncodesVideos,
    ModelProcessor, OptionScope, PreparesBatches, ProcessesJointly,
)
from mm_plugin.demo import Demo
from typing import Annotated
import functools
"""
PROCESSOR = """
class Base(ModelProcessor):
    Options = BaseOptions
    def context(self, counts): ...
    def layout(self, modality, size, options, context): ...
    def prepare(self, decoded, layout, options): ...
    def replacement(self, layout): ...
"""
ENCODER = """
class EncoderBase(Encoder):
    @classmethod
    def load(cls, checkpoint, device, dtype): ...
"""
IMAGES = "    def get_image_feature(self, items): ...\n"

# (spec field, source of the class or function `It`, modalities of the spec, what is said of it; None where it is fine)
CASES: dict[str, tuple[str, str, str, str | None]] = {
    # Classes that are abstract.
    "no method": (
        "processor",
        "class It(ModelProcessor):\n    Options = BaseOptions\n",
        "IMAGE",
        "must define context, layout, prepare, replacement",
    ),
    "one method short": (
        "processor",
        (
            "class It(ModelProcessor):\n    Options = BaseOptions\n    def context(self, counts): ...\n"
            "    def layout(self, modality, size, options, context): ...\n    def replacement(self, layout): ...\n"
        ),
        "IMAGE",
        "must define prepare: ",
    ),
    "a mixin's method short": (
        "processor",
        "class It(Base, AcceptsVideos): ...\n",
        "IMAGE, VIDEO",
        "must define sample",
    ),
    "a mixin that the spec does not need": (
        "processor",
        "class It(Base, AcceptsPrecomputed): ...\n",
        "IMAGE",
        "must define check_feature, check_fields",
    ),
    "features by no name": (
        "processor",
        "class It(Base, AcceptsPrecomputed):\n    def check_fields(self, m, f): ...\n    def check_feature(self, m, x, f): ...\n",
        "IMAGE",
        "the spec must declare feature_names",
    ),
    "an encoder without load": (
        "encoder",
        f"class It(Encoder, EncodesImages):\n{IMAGES}",
        "IMAGE",
        "must define load: ",
    ),
    "an encoder without its method": (
        "encoder",
        "class It(EncoderBase, EncodesImages): ...\n",
        "IMAGE",
        "get_image_feature",
    ),
    "a demo": ("demo", "class It(Demo): ...\n", "IMAGE", "make_checkpoint"),
    # Options.
    "no options": (
        "processor",
        PROCESSOR.replace("Base(", "It(").replace("    Options = BaseOptions\n", ""),
        "IMAGE",
        "must have Options",
    ),
    "options of another kind": ("processor", "class It(Base):\n    Options = dict\n", "IMAGE", "must have Options"),
    "options that are an object": (
        "processor",
        "class It(Base):\n    Options = BaseOptions()\n",
        "IMAGE",
        "must have Options",
    ),
    "options about a modality with a typo": (
        "processor",
        (
            "class O(BaseOptions, frozen=True, kw_only=True):\n    n: Annotated[int, OptionScope.request('imgae')] = 1\n"
            "class It(Base):\n    Options = O\n"
        ),
        "IMAGE",
        "n is about 'imgae'",
    ),
    "options named like arguments": (
        "processor",
        (
            "class O(BaseOptions, frozen=True, kw_only=True):\n    prepare: Annotated[int, OptionScope.request('image')] = 1\n"
            "    plugin: Annotated[str, OptionScope.load('image')] = ''\n"
            "class It(Base):\n    Options = O\n"
        ),
        "IMAGE",
        "must have Options of other names than the arguments of the calls that take them, got plugin, prepare",
    ),
    "options whose annotations cannot be read": (
        "processor",
        "class O(BaseOptions, frozen=True, kw_only=True):\n    n: 'Nowhere' = 1\nclass It(Base):\n    Options = O\n",
        "IMAGE",
        "annotations can be read",
    ),
    "options that read settings otherwise": (
        "processor",
        (
            "class O(BaseOptions, frozen=True, kw_only=True):\n    @classmethod\n    def read_settings(cls, checkpoint): ...\n"
            "class It(Base):\n    Options = O\n"
        ),
        "IMAGE",
        "Options.read_settings(checkpoint)",
    ),
    # Mixins that the spec needs.
    "videos": ("processor", "class It(Base): ...\n", "IMAGE, VIDEO", "must subclass AcceptsVideos"),
    "audio": ("processor", "class It(Base): ...\n", "AUDIO", "must subclass AcceptsAudio"),
    "videos by a method alone": (
        "processor",
        "class It(Base):\n    def sample(self, size, options): ...\n",
        "VIDEO",
        "must subclass AcceptsVideos",
    ),
    "an encoder of images": ("encoder", "class It(EncoderBase): ...\n", "IMAGE", "must subclass EncodesImages"),
    "an encoder of videos": (
        "encoder",
        f"class It(EncoderBase, EncodesImages):\n{IMAGES}",
        "IMAGE, VIDEO",
        "must subclass EncodesVideos",
    ),
    "an encoder of audio": (
        "encoder",
        f"class It(EncoderBase, EncodesImages):\n{IMAGES}",
        "AUDIO",
        "must subclass EncodesAudio: the spec declares audios",
    ),
    # Methods that cannot be called as the core calls them.
    "an argument short": (
        "processor",
        "class It(Base):\n    def layout(self, modality, size, options): ...\n",
        "IMAGE",
        "must take 5 arguments by place, as layout(self, modality, size, options)",
    ),
    "an argument more": (
        "processor",
        "class It(Base):\n    def prepare(self, decoded, layout, options, extra): ...\n",
        "IMAGE",
        "prepare(self, decoded, layout, options, extra)",
    ),
    "no self": ("processor", "class It(Base):\n    def context(): ...\n", "IMAGE", "context()"),
    "by name alone": (
        "processor",
        "class It(Base):\n    def replacement(self, *, layout): ...\n",
        "IMAGE",
        "replacement(self, *, layout)",
    ),
    "a value": ("processor", "class It(Base):\n    layout = 3\n", "IMAGE", "must define layout as a method, got a int"),
    "a property": (
        "processor",
        "class It(Base):\n    @property\n    def context(self): ...\n",
        "IMAGE",
        "must define context as a method, got a property",
    ),
    "asynchronous": (
        "processor",
        "class It(Base):\n    async def prepare(self, decoded, layout, options): ...\n",
        "IMAGE",
        "must not be asynchronous: prepare",
    ),
    "a mixin's": (
        "processor",
        "class It(Base, AcceptsVideos):\n    def sample(self, size): ...\n",
        "VIDEO",
        "sample(self, size)",
    ),
    "without what is given by name": (
        "processor",
        (
            "class It(Base, ProcessesJointly):\n    def is_joint(self): ...\n"
            "    def prepare_jointly(self, text, media, options): ...\n"
        ),
        "IMAGE",
        "rendered=, as prepare_jointly(self, text, media, options)",
    ),
    "an encoder's load on an object": (
        "encoder",
        f"class It(Encoder, EncodesImages):\n    def load(self, checkpoint, device, dtype): ...\n{IMAGES}",
        "IMAGE",
        "load(self, checkpoint, device, dtype)",
    ),
    "an encoder's load without a dtype": (
        "encoder",
        f"class It(Encoder, EncodesImages):\n    @classmethod\n    def load(cls, checkpoint, device): ...\n{IMAGES}",
        "IMAGE",
        "load(checkpoint, device)",
    ),
    "an encoder of one item": (
        "encoder",
        "class It(EncoderBase, EncodesImages):\n    def get_image_feature(self, item, more): ...\n",
        "IMAGE",
        "get_image_feature(self, item, more)",
    ),
    "padding": ("padding", "def It(ids, items): ...\n", "IMAGE", "must take 3 arguments by place, as it(ids, items)"),
    "positions": ("positions", "def It(items, seq, config): ...\n", "IMAGE", "seq=, config=, options="),
    "a tokenizer": ("tokenizer", "def It(): ...\n", "IMAGE", "must take 1 argument by place"),
    "a routine": ("embed", "def It(embeds, plan): ...\n", "IMAGE", "must take 4 arguments by place"),
    "specialize": ("specialize", "async def It(spec, checkpoint): ...\n", "IMAGE", "must not be asynchronous"),
    "no function": ("positions", "It = 3\n", "IMAGE", "must be callable"),
    # What an author may do.
    "other names, defaults and more places": (
        "processor",
        (
            "class It(Base):\n    def layout(self, kind, measured, given, facts, extra=None): ...\n"
            "    def prepare(self, *everything): ...\n"
        ),
        "IMAGE",
        None,
    ),
    "a static method": (
        "processor",
        "class It(Base):\n    @staticmethod\n    def context(counts): ...\n",
        "IMAGE",
        None,
    ),
    "a wrapped method": (
        "processor",
        (
            "def wrap(function):\n    @functools.wraps(function)\n    def inner(*a, **k): ...\n    return inner\n"
            "class It(Base):\n    @wrap\n    def prepare(self, decoded, layout, options): ...\n"
        ),
        "IMAGE",
        None,
    ),
    "mixins beyond the spec": (
        "processor",
        (
            "class It(Base, AcceptsVideos, AcceptsAudio):\n    def sample(self, size, options): ...\n"
            "    def sampling_rate(self, options): ...\n"
        ),
        "IMAGE",
        None,
    ),
    "an encoder of all": (
        "encoder",
        (
            f"class It(EncoderBase, EncodesImages, EncodesVideos, EncodesAudio):\n{IMAGES}"
            "    def get_video_feature(self, items): ...\n    def get_audio_feature(self, items): ...\n"
        ),
        "IMAGE, VIDEO, AUDIO",
        None,
    ),
    "a callable object": (
        "positions",
        "class Rule:\n    def __call__(self, items, *, seq, config, options): ...\nIt = Rule()\n",
        "IMAGE",
        None,
    ),
    "a partial function": ("padding", "It = functools.partial(lambda a, b, c, d: a, 1)\n", "IMAGE", None),
    "a function of anything": ("tokenizer", "It = lambda *a, **k: None\n", "IMAGE", None),
    "a function in C": ("specialize", "It = dict.fromkeys\n", "IMAGE", None),
}


def source_of(field: str, source: str, modalities: str) -> tuple[str, dict[str, str]]:
    """Hooks of a plugin whose spec names `It` in a field and fine classes in the others, and its modules."""
    names = [name.strip() for name in modalities.split(",")]
    mixins = {"IMAGE": "EncodesImages", "VIDEO": "EncodesVideos", "AUDIO": "EncodesAudio"}
    methods = {"IMAGE": "get_image_feature", "VIDEO": "get_video_feature", "AUDIO": "get_audio_feature"}
    accepts = {
        "VIDEO": ("AcceptsVideos", "sample(self, size, options)"),
        "AUDIO": ("AcceptsAudio", "sampling_rate(self, options)"),
    }
    extra = [accepts[name] for name in names if name in accepts]
    fine = f"class FineProcessor({', '.join(['Base', *(mixin for mixin, _ in extra)])}):\n    pass\n"
    fine += "".join(f"    def {method}: ...\n" for _, method in extra)
    fine += f"class FineEncoder({', '.join(['EncoderBase', *(mixins[name] for name in names)])}):\n    pass\n"
    fine += "".join(f"    def {methods[name]}(self, items): ...\n" for name in names)
    places = {"processor": "FineProcessor", "encoder": "FineEncoder", field: "It"}
    given = "".join(f", {key}='held.parts:{value}'" for key, value in places.items())
    if field != "padding":
        given += ", padding='runs'"
    tokens = ", ".join(f"Modality.{name}: '<{name.lower()}>'" for name in names)
    served = "".join(f"Modality.{name}, " for name in names)
    hooks = (
        "from mm_plugin import Modality, ModelSpec, hookimpl\n@hookimpl\ndef mm_register_models():\n"
        f"    return ModelSpec(name='held', output_version=1, architectures=('Held',), modalities=({served}), "
        f"placeholders={{{tokens}}}, fields=dict.fromkeys([{served}], ()){given})\n"
    )
    return hooks, {"held/parts.py": HEAD + PROCESSOR + ENCODER + fine + source}


@pytest.mark.parametrize(("field", "source", "modalities", "words"), CASES.values(), ids=CASES)
def test_doctor_and_the_opening_of_a_model_refuse_the_same(
    field: str, source: str, modalities: str, words: str | None, site: Any, open_registry: Any, tmp_path: Path
) -> None:
    hooks, files = source_of(field, source, modalities)
    site.install("held", hooks, files=files, architectures=["Held"])
    examined = check_plugin(open_registry().catalog, "held")
    registry = open_registry()
    registry.load_plugin("held")
    (spec,) = registry.catalog.named("held")[0].specs
    if words is None:
        assert (examined.state, examined.error) == ("loaded", None)
        assert registry.load_declared("held", field) is not None
        return
    assert (examined.state, examined.stage, examined.code) == ("failed", "classes", "class_error")
    assert words in str(examined.error)
    with pytest.raises(PluginLoadError) as caught:
        registry.load_declared("held", field)
    assert caught.value.message == examined.error
    assert f"{field} 'held.parts:It'" in caught.value.message
    assert (caught.value.plugin, caught.value.distribution) == ("held", "held")
    assert getattr(spec, field) == "held.parts:It"


@pytest.mark.parametrize(
    ("field", "method"), [("processor", "load_processor"), ("encoder", "load_encoder"), ("specialize", "load_encoder")]
)
def test_the_same_words_come_of_opening_a_checkpoint(
    field: str, method: str, site: Any, open_registry: Any, tmp_path: Path
) -> None:
    source = "def It(): ...\n" if field == "specialize" else "class It(dict): ...\n"
    hooks, files = source_of(field, source, "IMAGE")
    site.install("held", hooks, files=files, architectures=["Held"])
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Held"]}))
    examined = check_plugin(open_registry().catalog, "held")
    with pytest.raises(PluginLoadError) as caught:
        getattr(open_registry(), method)(tmp_path)
    assert caught.value.message == examined.error


def test_several_faults_are_all_said(site: Any, open_registry: Any) -> None:
    hooks, files = source_of("processor", "class It(ModelProcessor):\n    layout = 3\n", "IMAGE, AUDIO")
    files["held/parts.py"] += "class FineEncoder(Encoder): ...\n"
    site.install("held", hooks, files=files, architectures=["Held"])
    error = str(check_plugin(open_registry().catalog, "held").error)
    for part in (
        "must define context, prepare, replacement",
        "AcceptsAudio",
        "must have Options",
        "layout as a method",
        "encoder 'held.parts:FineEncoder'",
        "must define load",
        "EncodesImages",
        "EncodesAudio",
    ):
        assert part in error


@pytest.mark.parametrize("count", [2, 3])
def test_specs_of_one_name_are_refused_whoever_asks(count: int, site: Any, open_registry: Any) -> None:
    claims = [f"A{index}" for index in range(count)]
    site.install(
        "twins", site.hooks(*({"name": "same", "architectures": (claim,)} for claim in claims)), architectures=claims
    )
    examined = check_plugin(open_registry().catalog, "twins")
    found = open_registry().load_plugin("twins")
    for record in (examined, found):
        assert (record.state, record.stage, record.code) == ("failed", "spec", "bad_spec")
        assert f"{count} ModelSpecs are named 'same'" in str(record.error)
    assert examined.error == found.error
