"""Importing a plugin, and the record of one that cannot be imported."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from records import record_of

from mm_plugin import (
    ModelSpec,
    NoModelError,
    PluginLoadError,
)
from mm_plugin.registry import check_plugin

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}


HEADER = "from mm_plugin import Modality, ModelSpec, hookimpl\n"


def test_elapsed_ms_holds_the_time_of_the_import(site: Any, open_registry: Any) -> None:
    site.install(
        "slow-one", "import time\ntime.sleep(0.15)\n" + site.hooks({"architectures": (GOOD,)}), architectures=[GOOD]
    )
    site.install("slow-bad", "import time\ntime.sleep(0.15)\nraise ValueError\n", architectures=["Other"])
    registry = open_registry()
    began = time.perf_counter()
    taken = [registry.load_plugin(name).elapsed_ms for name in ("slow_one", "slow_bad")]
    total = (time.perf_counter() - began) * 1e3
    assert min(taken) >= 150
    assert sum(taken) <= total


def test_one_plugin_may_declare_several_models(site: Any, open_registry: Any) -> None:
    source = site.hooks(
        {"name": "a", "architectures": ("A", "A2")}, {"name": "b", "architectures": ("B",), "model_types": ("b",)}
    )
    site.install("good-dist", source, architectures=["A", "A2", "B"], model_types=["b"])
    registry = open_registry()
    assert [registry.resolve({"architectures": [name]}).name for name in ("A", "A2", "B")] == ["a", "a", "b"]
    assert registry.resolve({"model_type": "b"}).name == "b"
    assert site.imports("good_dist") == 1


def test_a_hook_may_return_one_spec_or_yield_them(site: Any, open_registry: Any) -> None:
    header = "from mm_plugin import Modality, ModelSpec, hookimpl\n@hookimpl\ndef mm_register_models():\n"
    site.install("one-spec", header + f"    return {site.spec('x', architectures=('X',))}\n", architectures=["X"])
    site.install("yields-spec", header + f"    yield {site.spec('y', architectures=('Y',))}\n", architectures=["Y"])
    registry = open_registry()
    assert [registry.resolve({"architectures": [name]}).name for name in ("X", "Y")] == ["x", "y"]


@pytest.mark.case("6.6")
def test_what_a_plugin_takes_is_its_own_declaration(site: Any, open_registry: Any) -> None:
    from mm_plugin import Modality

    site.install("good-dist", architectures=[GOOD])
    assert open_registry().resolve(ASKED).modalities == (Modality.IMAGE,)


def test_the_installed_core_meets_a_plugin_s_requirement_on_it(site: Any, open_registry: Any) -> None:
    site.install(
        "good-dist",
        requires=["mm-plugin>=0.1,<0.2", "nowhere; extra == 'gpu'", "nowhere; python_version < '3'"],
        architectures=[GOOD],
    )
    assert open_registry().load_plugin("good_dist").state == "loaded"


# ---------------------------------------------------------------- broken plugins


OSERROR = "import ctypes\nctypes.CDLL('libmm_plugin_is_not_here.so.9')\n"


# name -> source, claims, and what the record must say
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "import error": (
        "raise ImportError('cannot import name get_key from app.cli')\n",
        {"stage": "import", "code": "import_error", "error_type": "ImportError"},
    ),
    "moved private symbol": (
        "from mm_plugin.registry import _moved_away\n",
        {"stage": "import", "code": "import_error", "error_type": "ImportError"},
    ),
    "missing module": (
        "import a_module_that_is_not_here.part\n",
        {
            "stage": "import",
            "code": "missing_module",
            "error_type": "ModuleNotFoundError",
            "missing": "a_module_that_is_not_here",
            "hint": "pip install a_module_that_is_not_here",
        },
    ),
    "missing module of its own": (
        "import broken_one.lost\n",
        {
            "stage": "import",
            "code": "missing_module",
            "missing": "broken_one.lost",
            "hint": "pip install --force-reinstall broken-one",
        },
    ),
    "native library": (OSERROR, {"stage": "import", "code": "import_error", "error_type": "OSError"}),
    "syntax error": ("def broken(:\n", {"stage": "import", "code": "import_error", "error_type": "SyntaxError"}),
    "exit": (
        "import sys\nsys.exit(3)\n",
        {"stage": "import", "code": "exit_at_import", "error_type": "SystemExit", "error": "3"},
    ),
    "exit in a hook": (
        HEADER + "@hookimpl\ndef mm_register_models():\n    raise SystemExit\n",
        {"stage": "register", "code": "exit_at_import", "error_type": "SystemExit", "error": "SystemExit"},
    ),
    "generator exit": ("raise GeneratorExit\n", {"stage": "import", "error_type": "GeneratorExit"}),
    "an error that cannot be printed": (
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute\n",
        {"stage": "import", "code": "import_error", "error_type": "Mute", "error": "Mute"},
    ),
    "misspelt hook": (
        HEADER + "@hookimpl\ndef mm_register_model():\n    return []\n",
        {"stage": "hooks", "code": "unknown_hook", "hint": "rename mm_register_model to mm_register_models"},
    ),
    "hook without its prefix": (
        HEADER + "@hookimpl\ndef register_models():\n    return []\n",
        {"stage": "hooks", "code": "unknown_hook", "hint": "rename register_models to mm_register_models"},
    ),
    "hook unlike any": (
        HEADER + "@hookimpl\ndef zzz():\n    return []\n",
        {
            "stage": "hooks",
            "code": "unknown_hook",
            "hint": "use one of: mm_register_digests, mm_register_models, mm_register_observers, mm_register_stores",
        },
    ),
    "hook with an argument": (
        HEADER + "@hookimpl\ndef mm_register_models(config):\n    return []\n",
        {"stage": "hooks", "code": "hook_signature"},
    ),
    "unmarked function": (
        HEADER + "def mm_register_models():\n    return []\n",
        {
            "stage": "hooks",
            "code": "unmarked_hook",
            "error": "mm_register_models is not marked with @mm_plugin.hookimpl",
        },
    ),
    "no hook": ("", {"stage": "hooks", "code": "no_hook"}),
    "hook that raises": (
        HEADER + "@hookimpl\ndef mm_register_models():\n    raise ValueError('so it goes')\n",
        {"stage": "register", "code": "hook_error", "error_type": "ValueError", "error": "so it goes"},
    ),
    "hook that returns something else": (
        HEADER + "@hookimpl\ndef mm_register_models():\n    return ['tiny']\n",
        {
            "stage": "register",
            "code": "bad_spec",
            "error": "mm_register_models returned a str; it must return ModelSpec",
        },
    ),
    "hook that returns nothing": (
        HEADER + "@hookimpl\ndef mm_register_models():\n    return None\n",
        {"stage": "spec", "code": "claim_mismatch"},
    ),
    "bad spec": (
        HEADER
        + "@hookimpl\ndef mm_register_models():\n    return ModelSpec(name='x', output_version=1, modalities=(), "
        "placeholders={}, fields={}, processor='a:B', encoder='a:B', padding='runs')\n",
        {"stage": "register", "code": "bad_spec", "error_type": "SpecError"},
    ),
    "spec without a needed field": (
        HEADER + "@hookimpl\ndef mm_register_models():\n    return ModelSpec(name='x')\n",
        {"stage": "register", "code": "hook_error", "error_type": "TypeError"},
    ),
    "services that are not a mapping": (
        HEADER + "@hookimpl\ndef mm_register_stores():\n    return [1]\n",
        {"stage": "register", "code": "bad_service"},
    ),
    "service that cannot be called": (
        HEADER + "@hookimpl\ndef mm_register_observers():\n    return {'seen': 3}\n",
        {"stage": "register", "code": "bad_service"},
    ),
}


@pytest.mark.case("6.1")
@pytest.mark.case("6.10")
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_a_record_and_hides_no_other(fault: str, site: Any, open_registry: Any, log: Any) -> None:
    source, expected = BROKEN[fault]
    site.install("broken-one", source, architectures=["BrokenModel"], version="0.9")
    site.install("good-dist", plugin="good", architectures=[GOOD])
    registry = open_registry()
    found = registry.load_plugin("broken_one")
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.state == "failed"
    assert (found.distribution, found.version) == ("broken-one", "0.9")
    assert found.error
    assert found.hint
    assert found.elapsed_ms > 0
    if found.error_type is not None:
        assert found.error_type in found.traceback
    assert registry.resolve(ASKED).name == "good-dist"
    assert "BrokenModel" not in registry.architectures
    with pytest.raises(NoModelError) as caught:
        registry.resolve({"architectures": ["BrokenModel"]})
    for part in ("BrokenModel", "broken_one", "broken-one 0.9", found.stage, found.hint, found.error.splitlines()[0]):
        assert part in caught.value.message
    # Nothing of it is left, and nothing is said a second time.
    assert not [name for name in sys.modules if name.partition(".")[0] == "broken_one"]
    assert registry.load_plugin("broken_one") == found
    assert site.imports("broken_one") <= 1
    (warning,) = log("WARNING")
    assert "\n" not in warning
    for part in ("broken_one", "broken-one 0.9", found.stage, found.hint):
        assert part in warning
    (debug,) = log("DEBUG")
    assert str(found.traceback) in debug
    assert "Traceback" not in warning


def test_where_is_the_last_line_inside_the_plugin(site: Any, open_registry: Any) -> None:
    helper = "import json\n\n\ndef read():\n    return json.loads('{')\n"
    source = "from broken_one.helper import read\nread()\n"
    site.install("broken-one", source, files={"broken_one/helper.py": helper})
    found = open_registry().load_plugin("broken_one")
    assert found.error_type == "JSONDecodeError"
    assert found.where == f"{site.folder / 'broken_one' / 'helper.py'}:5"
    assert found.where in found.summary()


def test_where_of_a_syntax_error_is_the_line_that_cannot_be_read(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "import broken_one.torn\n", files={"broken_one/torn.py": "x = 1\ny = = 2\n"})
    assert open_registry().load_plugin("broken_one").where == f"{site.folder / 'broken_one' / 'torn.py'}:2"


def test_a_keyboard_interrupt_passes_through_and_leaves_nothing(site: Any, open_registry: Any) -> None:
    site.install(
        "stopped", "import stopped.part\nraise KeyboardInterrupt\n", files={"stopped/part.py": ""}, architectures=["S"]
    )
    registry = open_registry()
    with pytest.raises(KeyboardInterrupt):
        registry.resolve({"architectures": ["S"]})
    assert record_of(registry, "stopped").state == "available"
    assert not [name for name in sys.modules if name.startswith("stopped")]
    with pytest.raises(KeyboardInterrupt):
        registry.load_plugin("stopped")
    assert site.imports("stopped") == 2


@pytest.mark.case("6.10")
@pytest.mark.parametrize(
    ("requirement", "code", "missing", "words"),
    [
        ("mm-plugin>=7.5", "requirement_unmet", "mm-plugin", "needs mm-plugin>=7.5, found 0.1.0"),
        ("msgspec<0.1", "requirement_unmet", "msgspec", "needs msgspec<0.1, found "),
        ("no-such-distribution>=2", "requirement_missing", "no-such-distribution", "which is not installed"),
        ("mm-plugin ===== 3", "requirement_invalid", None, "is invalid"),
    ],
)
def test_a_plugin_whose_requirement_is_not_met_is_never_imported(
    requirement: str, code: str, missing: str, words: str, site: Any, open_registry: Any, log: Any
) -> None:
    site.install("picky", requires=["numpy", requirement], architectures=["Picky"])
    registry = open_registry()
    with pytest.raises(NoModelError, match="picky"):
        registry.resolve({"architectures": ["Picky"]})
    found = record_of(registry, "picky")
    assert (found.state, found.stage, found.code, found.missing) == ("incompatible", "requirements", code, missing)
    assert words in found.error
    if missing:
        assert found.hint == f"pip install '{requirement}'"
    assert site.imports("picky") == 0
    assert not [name for name in sys.modules if name.startswith("picky")]
    assert len(log("WARNING")) == 1


@pytest.mark.parametrize(
    ("claims", "declared", "words"),
    [
        ({"architectures": ["A", "B"]}, {"architectures": ("A",)}, "claims architecture 'B', the code declares ['A']"),
        (
            {"architectures": ["A"]},
            {"architectures": ("A", "B")},
            "declares architecture 'B', which the metadata does not",
        ),
        ({"architectures": ["A"], "model_types": ["m"]}, {"architectures": ("A",)}, "claims model type 'm'"),
        ({"architectures": ["A"]}, {"architectures": ("A",), "model_types": ("m",)}, "declares model type 'm'"),
        ({"architectures": ["A"]}, {"architectures": ("A", "A")}, "'A' is in more than one"),
        ({"architectures": ["A"], "stores": ["s"]}, {"architectures": ("A",)}, "claims store 's'"),
        ({"architectures": ["A"], "observers": ["o"]}, {"architectures": ("A",)}, "claims observer 'o'"),
    ],
)
def test_code_and_claims_must_agree_both_ways(
    claims: dict[str, list[str]], declared: dict[str, tuple[str, ...]], words: str, site: Any, open_registry: Any
) -> None:
    site.install("split", site.hooks(declared), **claims)
    found = open_registry().load_plugin("split")
    assert (found.state, found.stage, found.code) == ("failed", "spec", "claim_mismatch")
    assert words in found.error


@pytest.mark.parametrize(("kind", "hook"), [("store", "mm_register_stores"), ("observer", "mm_register_observers")])
def test_a_service_that_is_not_claimed_is_refused(kind: str, hook: str, site: Any, open_registry: Any) -> None:
    site.install("split", f"{HEADER}@hookimpl\ndef {hook}():\n    return {{'mine': print}}\n")
    found = open_registry().load_plugin("split")
    assert (found.state, found.code) == ("failed", "claim_mismatch")
    assert f"declares {kind} 'mine', which the metadata does not claim" in found.error
    assert f"mm_plugin.{kind}s" in found.hint


@pytest.mark.parametrize("count", [0, 2])
def test_a_fallback_declares_one_spec(count: int, site: Any, open_registry: Any) -> None:
    source = f"{HEADER}@hookimpl\ndef mm_register_models():\n    return [{site.spec()}] * {count}\n"
    site.install("catch-all", source, fallback=["any"])
    found = open_registry().load_plugin("catch_all")
    assert (found.state, found.code, found.error) == (
        "failed",
        "claim_mismatch",
        f"a fallback must declare exactly one ModelSpec, found {count}",
    )


@pytest.mark.case("6.7")
def test_a_broken_plugin_that_nobody_asks_for_is_neither_imported_nor_logged(
    site: Any, open_registry: Any, log: Any
) -> None:
    site.install("broken-one", "raise ImportError\n", architectures=["BrokenModel"])
    site.install("good-dist", architectures=[GOOD])
    registry = open_registry()
    registry.resolve(ASKED)
    assert site.imports("broken_one") == 0
    assert not [line for line in log("WARNING") + log("DEBUG") if "broken" in line]


@pytest.mark.case("6.1")
def test_strict_raises_where_a_broken_plugin_is_used_every_time(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "raise OSError('libcuda')\n", architectures=["BrokenModel"])
    registry = open_registry(strict=True)
    for use in (
        lambda: registry.resolve({"architectures": ["BrokenModel"]}),
        lambda: registry.resolve({"architectures": ["BrokenModel"]}),
        lambda: registry.load_plugin("broken_one"),
    ):
        with pytest.raises(PluginLoadError, match="libcuda") as caught:
            use()
        assert (caught.value.plugin, caught.value.distribution, caught.value.version) == (
            "broken_one",
            "broken-one",
            "1.0",
        )
        assert caught.value.record.stage == "import"
    assert site.imports("broken_one") == 1


# ---------------------------------------------------------------- what a spec names


# field -> source of the module that it names, and what is said of it
CLASSES = {
    "missing module": (None, "missing_module", "No module named 'half.parts'"),
    "missing class": ("", "class_error", "has no attribute 'Processor'"),
    "other base": ("class Processor:\n    pass\n", "class_error", "must be a subclass of mm_plugin's ModelProcessor"),
    "exit": ("raise SystemExit(4)\n", "exit_at_import", "4"),
}


@pytest.fixture
def half(site: Any) -> Callable[[str | None], None]:
    """Installs a plugin whose hooks work and whose processor is what the test says."""

    def install(source: str | None) -> None:
        hooks = site.hooks({"architectures": ("Half",), "processor": "half.parts:Processor"})
        files = {} if source is None else {"half/parts.py": source}
        site.install("half", hooks, files=files, architectures=["Half"])

    return install


@pytest.mark.parametrize(("source", "code", "words"), CLASSES.values(), ids=CLASSES)
def test_a_class_that_cannot_be_had_is_found_by_a_check_and_not_by_discovery(
    source: str | None, code: str, words: str, half: Any, open_registry: Any
) -> None:
    half(source)
    registry = open_registry()
    assert registry.load_plugin("half").state == "loaded"
    found = check_plugin(registry.catalog, "half")
    assert (found.state, found.stage, found.code) == ("failed", "classes", code)
    assert words in found.error


@pytest.mark.parametrize(("source", "code", "words"), CLASSES.values(), ids=CLASSES)
def test_opening_a_processor_that_cannot_be_had_names_the_plugin(
    source: str | None, code: str, words: str, half: Any, open_registry: Any, tmp_path: Path
) -> None:
    half(source)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Half"]}')
    with pytest.raises(PluginLoadError) as caught:
        open_registry().load_processor(folder)
    error: Any = caught.value
    assert (error.plugin, error.distribution, error.version) == ("half", "half", "1.0")
    assert words in error.message
    assert "half (half 1.0)" in error.message


# ---------------------------------------------------------------- roll-back


def test_a_half_import_is_rolled_back_and_works_after_the_repair(site: Any, open_registry: Any) -> None:
    source = "import broken_one.part\nimport broken_one.deep.leaf\n" + site.hooks({"architectures": (GOOD,)})
    files = {"broken_one/part.py": "", "broken_one/deep/__init__.py": "", "broken_one/deep/leaf.py": "raise OSError\n"}
    site.install("broken-one", source, files=files, architectures=[GOOD])
    before = set(sys.modules)
    registry = open_registry()
    assert registry.load_plugin("broken_one").state == "failed"
    assert not [name for name in set(sys.modules) - before if name.startswith("broken_one")]
    (site.folder / "broken_one" / "deep" / "leaf.py").write_text("repaired = True  # longer than it was\n")
    importlib.invalidate_caches()
    assert registry.load_plugin("broken_one").state == "failed"
    again = open_registry()
    assert again.resolve(ASKED).name == "tiny"
    assert record_of(again, "broken_one").state == "loaded"
    assert site.imports("broken_one") == 2


def test_roll_back_leaves_what_was_imported_before_and_what_is_not_the_plugin_s(site: Any, open_registry: Any) -> None:
    site.install(
        "broken-one",
        "import beside_it\nraise ValueError\n",
        files={"beside_it.py": "", "broken_one_too/__init__.py": ""},
    )
    site.packages += ["beside_it", "broken_one_too"]
    package = importlib.import_module("broken_one")
    other = importlib.import_module("broken_one_too")
    assert open_registry().load_plugin("broken_one").state == "failed"
    assert sys.modules["broken_one"] is package
    assert sys.modules["broken_one_too"] is other
    assert "beside_it" in sys.modules
    assert "broken_one.hooks" not in sys.modules


def test_a_plugin_refused_after_its_import_is_rolled_back_too(site: Any, open_registry: Any) -> None:
    site.install("split", architectures=["A"], entry_points="[mm_plugin]\nsplit = split.hooks\n")
    assert open_registry().load_plugin("split").code == "claim_mismatch"
    assert not [name for name in sys.modules if name.startswith("split")]


# ---------------------------------------------------------------- threads


@pytest.mark.case("6.5")
def test_several_threads_import_a_plugin_once(site: Any, open_registry: Any, log: Any) -> None:
    slow = "import time\ntime.sleep(0.1)\n"
    site.install("good-dist", slow + site.hooks({"architectures": (GOOD,)}), architectures=[GOOD])
    site.install("broken-one", slow + "raise OSError\n", architectures=["Broken"])
    registry = open_registry()
    barrier = threading.Barrier(6, timeout=10)

    def use(name: str) -> ModelSpec | None:
        barrier.wait()
        try:
            return registry.resolve({"architectures": [name]})
        except NoModelError:
            return None

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(use, [GOOD, "Broken"] * 3))
    assert found[1::2] == [None] * 3
    assert found[0] is not None
    assert all(spec is found[0] for spec in found[::2])
    assert (site.imports("good_dist"), site.imports("broken_one")) == (1, 1)
    assert len(log("WARNING")) == 1


def test_two_registries_load_the_same_plugin_apart(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    first, second = open_registry(), open_registry()
    assert first.resolve(ASKED) == second.resolve(ASKED)
    assert (record_of(first, "good").state, record_of(second, "good").state) == ("loaded", "loaded")
    assert site.imports("good_dist") == 1
