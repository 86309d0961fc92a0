"""Discovery, failure and resolution, over distributions that are really installed."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mm_plugin
from mm_plugin import (
    Checkpoint,
    MMPluginError,
    ModelProcessor,
    ModelSpec,
    NoModelError,
    PluginLoadError,
    PluginRecord,
    Registry,
    Settings,
    UsageError,
)
from mm_plugin.cache import EmbeddingCache, MemoryStore
from mm_plugin.events import FallbackUsed

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}
EVENT = FallbackUsed(asked="a", plugin="b", why="c")


def record_of(registry: Registry, name: str) -> PluginRecord:
    (found,) = [record for record in registry.plugins if record.name == name]
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "mm_plugin")
    return caplog


def lines(log: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelname == level]


# ---------------------------------------------------------------- an audio input plugin


def test_a_plugin_is_known_before_it_is_imported_and_loaded_when_asked_for(site: Any, open_registry: Any) -> None:
    site.install(
        "good-dist",
        plugin="good",
        version="1.2.3",
        architectures=[GOOD],
        model_types=["good"],
        headers=["Project-URL: Homepage, https://example.org", "Project-URL: Issues, https://example.org/issues"],
    )
    registry = open_registry()
    known = record_of(registry, "good")
    assert (known.distribution, known.version, known.entry_point) == ("good-dist", "1.2.3", "good_dist.hooks")
    assert (known.state, known.stage, known.error, known.elapsed_ms) == ("available", None, None, None)
    assert known.claims == {"architectures": (GOOD,), "model_types": ("good",)}
    assert Path(known.location) == site.folder
    assert known.report_to == "https://example.org/issues"
    assert GOOD in registry.architectures
    assert "good" in registry.model_types
    assert site.imports("good_dist") == 0
    spec = registry.resolve(ASKED)
    assert (spec.name, spec.architectures) == ("good-dist", (GOOD,))
    assert record_of(registry, "good").state == "loaded"
    assert site.imports("good_dist") == 1
    assert GOOD in registry.architectures


def test_a_wheel_that_pip_installs_is_found(site: Any, fresh: Callable[..., Any], tmp_path: Path) -> None:
    wheel = site.wheel("good-dist", plugin="good", architectures=[GOOD])
    target = tmp_path / "pip"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-input", "--target"]
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": ""}
    subprocess.run([*command, str(target), str(wheel)], check=True, capture_output=True, env=environment, timeout=60)
    code = (
        "import json, mm_plugin\nregistry = mm_plugin.discover()\n"
        f"spec = registry.resolve({ASKED!r})\n"
        "record = next(r for r in registry.plugins if r.name == 'good')\n"
        "print(json.dumps([spec.name, record.distribution, record.state, record.location]))"
    )
    assert fresh(code, target) == ["good-dist", "good-dist", "loaded", str(target)]


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
HEADER = "from mm_plugin import Modality, ModelSpec, hookimpl\n"
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
    "services that are no mapping": (
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
    (warning,) = lines(log, "WARNING")
    assert "\n" not in warning
    for part in ("broken_one", "broken-one 0.9", found.stage, found.hint):
        assert part in warning
    (debug,) = lines(log, "DEBUG")
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
        ("mm-plugin ===== 3", "requirement_invalid", None, "cannot be read"),
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
    assert len(lines(log, "WARNING")) == 1


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
        f"a fallback declares exactly one ModelSpec, found {count}",
    )


@pytest.mark.case("6.3")
def test_the_error_of_the_model_that_was_asked_for_carries_the_traceback(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "import a_module_that_is_not_here\n", architectures=["BrokenModel"])
    with pytest.raises(NoModelError) as caught:
        open_registry().resolve({"architectures": ["BrokenModel"]})
    (found,) = [record for record in caught.value.records if record.name == "broken_one"]
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_here'" in found.traceback
    assert "hooks.py" in found.traceback
    cause = caught.value.__cause__
    assert isinstance(cause, PluginLoadError)
    assert (cause.plugin, cause.distribution, cause.version, cause.record) == ("broken_one", "broken-one", "1.0", found)


@pytest.mark.case("6.7")
def test_a_broken_plugin_that_nobody_asks_for_is_neither_imported_nor_logged(
    site: Any, open_registry: Any, log: Any
) -> None:
    site.install("broken-one", "raise ImportError\n", architectures=["BrokenModel"])
    site.install("good-dist", architectures=[GOOD])
    registry = open_registry()
    registry.resolve(ASKED)
    assert site.imports("broken_one") == 0
    assert not [line for line in lines(log, "WARNING") + lines(log, "DEBUG") if "broken" in line]


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
    """Installs a plugin whose hooks are audio and whose processor is what the test says."""

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
    found = registry.check_plugin("half", {"processor": ModelProcessor})
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


# ---------------------------------------------------------------- conflicts


def two_claimants(site: Any) -> None:
    site.install("first-dist", plugin="first", version="1.1", architectures=[GOOD, "OnlyFirst"])
    site.install("second-dist", plugin="second", version="2.2", architectures=[GOOD])


@pytest.mark.case("6.8")
def test_two_plugins_with_one_claim_are_both_named_and_neither_is_imported(
    site: Any, open_registry: Any, log: Any
) -> None:
    two_claimants(site)
    registry = open_registry()
    for name, other in (("first", "second (second-dist 2.2)"), ("second", "first (first-dist 1.1)")):
        found = record_of(registry, name)
        assert (found.state, found.stage, found.code) == ("conflict", "discover", "claim_conflict")
        assert f"architecture {GOOD!r}" in found.error
        assert other in found.error
        assert "MM_PLUGIN_DISABLED=second" in found.hint
    assert GOOD not in registry.architectures
    with pytest.raises(NoModelError) as caught:
        registry.resolve(ASKED)
    assert "first (first-dist 1.1)" in caught.value.message
    assert "second (second-dist 2.2)" in caught.value.message
    (warning,) = lines(log, "WARNING")
    assert "first (first-dist 1.1) and second (second-dist 2.2)" in warning
    assert site.imports("first_dist") == site.imports("second_dist") == 0


@pytest.mark.case("6.8")
@pytest.mark.parametrize(("chosen", "spec"), [("first", "first-dist"), ("second", "second-dist")])
def test_a_conflict_is_settled_by_naming_the_plugin(chosen: str, spec: str, site: Any, open_registry: Any) -> None:
    two_claimants(site)
    registry = open_registry()
    assert registry.resolve(ASKED, plugin=chosen).name == spec
    # It is settled for this call; the next one that names nobody is a conflict again.
    with pytest.raises(NoModelError, match="claimed by"):
        registry.resolve(ASKED)
    assert site.imports("first_dist") + site.imports("second_dist") == 1


@pytest.mark.parametrize(("disabled", "spec"), [("second", "first-dist"), ("first", "second-dist")])
def test_a_conflict_is_settled_by_disabling_one(disabled: str, spec: str, site: Any, open_registry: Any) -> None:
    two_claimants(site)
    registry = open_registry(disabled=[disabled])
    assert registry.resolve(ASKED).name == spec
    assert GOOD in registry.architectures
    assert record_of(registry, disabled).state == "disabled"


def test_a_conflict_leaves_other_claims_usable(site: Any, open_registry: Any) -> None:
    two_claimants(site)
    registry = open_registry()
    assert "OnlyFirst" in registry.architectures
    assert registry.resolve({"architectures": ["OnlyFirst"]}).name == "first-dist"
    assert GOOD not in registry.architectures


def test_a_plugin_that_does_not_claim_it_cannot_be_chosen(site: Any, open_registry: Any) -> None:
    two_claimants(site)
    site.install("third-dist", plugin="third", architectures=["Third"])
    with pytest.raises(NoModelError):
        open_registry().resolve(ASKED, plugin="third")
    with pytest.raises(NoModelError):
        open_registry().resolve(ASKED, plugin="nobody")


def test_two_plugins_of_one_name_are_a_conflict_that_names_both(site: Any, open_registry: Any) -> None:
    site.install("first-dist", plugin="same", architectures=["A"])
    site.install("second-dist", plugin="same", architectures=["B"])
    registry = open_registry()
    found = [record for record in registry.plugins if record.name == "same"]
    assert [record.code for record in found] == ["name_conflict"] * 2
    assert "same (second-dist 1.0)" in found[0].error
    assert "same (first-dist 1.0)" in found[1].error
    for name in ("A", "B"):
        assert name not in registry.architectures
        with pytest.raises(NoModelError, match=r"plugin name 'same'"):
            registry.resolve({"architectures": [name]})
    assert registry.load_plugin("same").state == "conflict"
    assert site.imports("first_dist") == site.imports("second_dist") == 0


def test_a_claim_of_one_kind_is_no_conflict_with_another_kind(site: Any, open_registry: Any) -> None:
    site.install("first-dist", architectures=["same"])
    site.install("second-dist", model_types=["same"])
    registry = open_registry()
    assert registry.resolve({"architectures": ["same"], "model_type": "same"}).name == "first-dist"
    assert registry.resolve({"model_type": "same"}).name == "second-dist"


# ---------------------------------------------------------------- disabled, allowed, orphaned, unreadable


def test_a_disabled_plugin_is_never_imported_and_says_how_to_enable_it(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    registry = open_registry(disabled=["good"])
    found = record_of(registry, "good")
    assert (found.state, found.code) == ("disabled", "disabled")
    assert found.hint == "remove 'good' from MM_PLUGIN_DISABLED"
    assert GOOD not in registry.architectures
    with pytest.raises(NoModelError, match=r"remove 'good' from MM_PLUGIN_DISABLED"):
        registry.resolve(ASKED)
    with pytest.raises(NoModelError):
        registry.resolve(ASKED, plugin="good")
    assert registry.load_plugin("good").state == "disabled"
    assert site.imports("good_dist") == 0


def test_an_allow_list_disables_all_others(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    site.install("other-dist", plugin="other", architectures=["Other"])
    registry = open_registry(only=("good",))
    assert registry.resolve(ASKED).name == "good-dist"
    assert record_of(registry, "other").hint == "add 'other' to MM_PLUGIN_ONLY"
    with pytest.raises(NoModelError, match="is not in MM_PLUGIN_ONLY"):
        registry.resolve({"architectures": ["Other"]})
    assert registry.notices == ()


def test_a_name_in_both_lists_is_disabled(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    assert record_of(open_registry(only=("good",), disabled=["good"]), "good").state == "disabled"


@pytest.mark.parametrize(
    ("variable", "settings"),
    [("MM_PLUGIN_ONLY", {"only": ("excellent_on",)}), ("MM_PLUGIN_DISABLED", {"disabled": ["excellent_on"]})],
)
def test_a_typo_in_a_list_is_a_notice_with_the_nearest_name(
    variable: str, settings: dict[str, Any], site: Any, open_registry: Any, log: Any
) -> None:
    site.install("excellent-one", architectures=[GOOD])
    registry = open_registry(**settings)
    (notice,) = registry.notices
    assert notice == f"{variable} names 'excellent_on', which no installed plugin has; did you mean 'excellent_one'?"
    assert [line for line in lines(log, "WARNING") if notice in line]
    with pytest.raises(NoModelError) as caught:
        registry.resolve({"architectures": ["Nobody"]})
    assert notice in caught.value.message


def test_a_name_like_no_other_lists_what_is_installed(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    (notice,) = open_registry(disabled=["zzzzzzzz"]).notices
    assert "did you mean" not in notice
    assert "good" in notice.partition("installed: ")[2]


def test_a_claim_without_a_plugin_is_a_record_of_its_own(site: Any, open_registry: Any) -> None:
    site.install("orphan-dist", plugin=None, architectures=["Orphan", "Orphan2"])
    registry = open_registry()
    found = record_of(registry, "Orphan")
    assert (found.state, found.stage, found.code) == ("failed", "discover", "orphan_claim")
    assert (found.distribution, found.entry_point) == ("orphan-dist", "orphan_dist.hooks")
    assert found.claims == {"architectures": ("Orphan", "Orphan2")}
    assert "[project.entry-points.mm_plugin]" in found.hint
    assert "Orphan" not in registry.architectures
    for name in ("Orphan", "Orphan2"):
        with pytest.raises(NoModelError, match=r"orphan-dist 1.0"):
            registry.resolve({"architectures": [name]})
    assert site.imports("orphan_dist") == 0


def test_a_claim_for_another_distribution_s_module_is_an_orphan(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    site.install("thief", plugin=None, entry_points="[mm_plugin.architectures]\nStolen = good_dist.hooks\n")
    registry = open_registry()
    assert record_of(registry, "Stolen").code == "orphan_claim"
    assert record_of(registry, "good").claims == {"architectures": (GOOD,)}
    assert registry.resolve(ASKED).name == "good-dist"


@pytest.mark.parametrize(
    "content", [b"[mm_plugin]\n\xff\xfe = x\n", b"[mm_plugin]\na line without an equals sign\n"], ids=["bytes", "line"]
)
@pytest.mark.case("6.1")
def test_an_unreadable_distribution_is_a_notice_and_hides_no_other(
    content: bytes, site: Any, open_registry: Any, log: Any
) -> None:
    site.install("aaa-torn", entry_points=content)
    site.install("good-dist", plugin="good", architectures=[GOOD])
    site.install("zzz-torn", entry_points=content)
    registry = open_registry()
    assert registry.resolve(ASKED).name == "good-dist"
    assert len(registry.notices) == 2
    for notice in registry.notices:
        assert str(site.folder) in notice
        assert "unreadable metadata" in notice
    assert len(lines(log, "WARNING")) == 2
    assert {"aaa_torn", "zzz_torn"} == {
        notice.partition("distribution ")[2].partition(" ")[0].replace("-", "_") for notice in registry.notices
    }


def test_an_entry_point_that_is_no_module_is_a_record(site: Any, open_registry: Any) -> None:
    site.install("odd-one", entry_points="[mm_plugin]\nodd = not a module!\n")
    site.install("good-dist", architectures=[GOOD])
    registry = open_registry()
    assert registry.load_plugin("odd").state == "failed"
    assert registry.resolve(ASKED).name == "good-dist"


def test_a_distribution_without_metadata_is_a_record(site: Any, open_registry: Any) -> None:
    site.install("bare-one", plugin="bare", architectures=["Bare"])
    (site.folder / "bare_one-1.0.dist-info" / "METADATA").unlink()
    site.install("good-dist", plugin="good", architectures=[GOOD])
    registry = open_registry()
    found = record_of(registry, "bare")
    assert found.version == "unknown"
    with pytest.raises(MMPluginError):
        registry.resolve({"architectures": ["Bare"]})
    assert registry.resolve(ASKED).name == "good-dist"


# ---------------------------------------------------------------- strict


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


def test_strict_refuses_a_conflict(site: Any, open_registry: Any) -> None:
    two_claimants(site)
    with pytest.raises(PluginLoadError, match=GOOD) as caught:
        open_registry(strict=True)
    assert caught.value.record.state == "conflict"
    assert open_registry(strict=True, disabled=["first"]).resolve(ASKED).name == "second-dist"


def test_strict_refuses_an_orphan(site: Any, open_registry: Any) -> None:
    site.install("orphan-dist", plugin=None, architectures=["Orphan"])
    with pytest.raises(PluginLoadError, match="orphan-dist"):
        open_registry(strict=True)


def test_strict_refuses_a_name_that_matches_nothing(site: Any, open_registry: Any) -> None:
    with pytest.raises(UsageError, match="nobody_has_this"):
        open_registry(strict=True, disabled=["nobody_has_this"])


def test_strict_raises_for_a_broken_observer_every_time(site: Any, open_registry: Any) -> None:
    site.install("watcher", "raise OSError\n", observers=["seen"])
    registry = open_registry(strict=True)
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="watcher"):
            registry.observers  # noqa: B018


# ---------------------------------------------------------------- resolving


@pytest.fixture
def three(site: Any, open_registry: Any) -> Registry:
    """A, B and C by architecture; a and b by model type."""
    site.install("dist-a", architectures=["A"], model_types=["a"])
    site.install("dist-b", architectures=["B"], model_types=["b"])
    site.install("dist-c", architectures=["C"])
    return open_registry()


class Config:
    """Looks like a PretrainedConfig."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


RESOLVED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["A"]}, "dist-a"),
    ({"architectures": ["B", "A"]}, "dist-b"),
    ({"architectures": ["A", "B"]}, "dist-a"),
    ({"architectures": ["Unknown", "C", "A"]}, "dist-c"),
    ({"architectures": ("C",)}, "dist-c"),
    ({"architectures": ["C"], "model_type": "a"}, "dist-c"),
    ({"model_type": "b"}, "dist-b"),
    ({"architectures": [], "model_type": "b"}, "dist-b"),
    ({"architectures": None, "model_type": "a"}, "dist-a"),
    ({"architectures": ["A"], "text_config": {"architectures": ["B"], "model_type": "b"}}, "dist-a"),
]
REFUSED: list[dict[str, Any]] = [
    {},
    {"architectures": ["Unknown"]},
    # Where there are architectures, the model type is not tried.
    {"architectures": ["Unknown"], "model_type": "a"},
    # Nested configs are never read.
    {"text_config": {"architectures": ["A"], "model_type": "a"}},
    {"language_config": {"model_type": "a"}, "model_type": "unknown"},
    {"architectures": [], "vision_config": {"model_type": "a"}},
    # An architecture is no model type, and the other way round.
    {"model_type": "A"},
    {"architectures": ["a"]},
    {"model_type": 3},
]


@pytest.mark.parametrize(("config", "expected"), RESOLVED, ids=str)
def test_architectures_are_tried_in_order_and_the_model_type_only_without_them(
    config: dict[str, Any], expected: str, three: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for source in (config, Config(**config), folder, str(folder)):
        assert three.resolve(source).name == expected


@pytest.mark.parametrize("config", REFUSED, ids=str)
def test_what_nobody_claims_is_refused(config: dict[str, Any], three: Registry) -> None:
    with pytest.raises(NoModelError):
        three.resolve(config)
    if config:
        with pytest.raises(NoModelError):
            three.resolve(Config(**{"architectures": None, **config}))


@pytest.mark.parametrize("asked", ["architectures", "model_type"])
def test_a_real_config_object_resolves(asked: str, site: Any, open_registry: Any) -> None:
    from transformers import PretrainedConfig

    site.install("dist-a", architectures=["A"], model_types=["a"])
    site.install("dist-b", architectures=["B"])
    config = PretrainedConfig(architectures=["A"]) if asked == "architectures" else PretrainedConfig()
    config.model_type = "a" if asked == "model_type" else "b"
    assert open_registry().resolve(config).name == "dist-a"


def test_a_named_architecture_stands_in_for_the_config_s_own(three: Registry) -> None:
    assert three.resolve({"architectures": ["A"]}, architecture="B").name == "dist-b"
    assert three.resolve({}, architecture="C").name == "dist-c"
    with pytest.raises(NoModelError) as caught:
        three.resolve({"architectures": ["A"], "model_type": "a"}, architecture="Unknown")
    assert caught.value.asked == ("Unknown",)


@pytest.mark.parametrize(
    "config",
    [
        3,
        None,
        [],
        b"folder",
        {"architectures": "A"},
        {"architectures": 5},
        {"architectures": [1]},
        {"architectures": {"A": 1}},
    ],
    ids=repr,
)
def test_what_is_no_config_is_the_caller_s_fault(config: Any, three: Registry) -> None:
    with pytest.raises(UsageError) as caught:
        three.resolve(config)
    assert caught.value.argument == "config"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_the_caller_s_fault(
    content: str | None, three: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        three.resolve(folder)


@pytest.mark.case("6.3")
def test_the_refusal_shows_every_record_and_what_is_served(site: Any, open_registry: Any) -> None:
    site.install("dist-a", architectures=["A"], model_types=["a"])
    site.install("broken-one", "import a_module_that_is_not_here\n", architectures=["Broken"])
    site.install("off-one", architectures=["Off"])
    registry = open_registry(disabled=["off_one"])
    registry.load_plugin("broken_one")
    with pytest.raises(NoModelError) as caught:
        registry.resolve({"architectures": ["Unknown", "Unknown2"]})
    error: Any = caught.value
    assert error.asked == ("Unknown", "Unknown2")
    assert error.served == ("A", "a")
    assert error.records == registry.plugins
    head, served, *rest = error.message.splitlines()
    assert "Unknown, Unknown2" in head
    assert served.strip() == "served: A, a"
    assert [line for line in rest if "dist_a (dist-a 1.0): available" in line]
    (broken,) = [line for line in rest if "broken_one (broken-one 1.0): failed at import" in line]
    assert broken.endswith("-> pip install a_module_that_is_not_here")
    (off,) = [line for line in rest if "off_one (off-one 1.0): disabled" in line]
    assert off.endswith("-> remove 'off_one' from MM_PLUGIN_DISABLED")


def test_an_architecture_whose_plugin_is_broken_is_not_skipped(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "raise OSError('why it broke')\n", architectures=["Broken"])
    site.install("dist-a", architectures=["A"])
    with pytest.raises(NoModelError, match="why it broke"):
        open_registry().resolve({"architectures": ["Broken", "A"]})
    assert site.imports("dist_a") == 0


def test_an_unknown_plugin_cannot_be_loaded(three: Registry) -> None:
    with pytest.raises(UsageError, match=r"no plugin 'dist_z'.*dist_a, dist_b, dist_c") as caught:
        three.load_plugin("dist_z")
    assert caught.value.argument == "name"


# ---------------------------------------------------------------- the fallback


def with_fallback(site: Any) -> None:
    site.install("catch-all", plugin="any", fallback=["any"])


def test_the_fallback_serves_what_nobody_claims_and_says_so(site: Any, open_registry: Any, log: Any) -> None:
    with_fallback(site)
    site.install("good-dist", architectures=[GOOD])
    heard: list[Any] = []
    registry = open_registry()
    registry.observers.add(heard.append)
    assert registry.resolve(ASKED).name == "good-dist"
    assert site.imports("catch_all") == 0
    assert heard == []
    assert registry.resolve({"architectures": ["Unknown"]}).name == "catch-all"
    assert registry.resolve({"model_type": "unknown"}).name == "catch-all"
    assert [(event.asked, event.plugin) for event in heard] == [("Unknown", "any"), ("unknown", "any")]
    warnings = lines(log, "WARNING")
    assert "Unknown" in warnings[0]
    assert "any (catch-all 1.0)" in warnings[0]


@pytest.mark.parametrize("how", ["broken", "disabled", "incompatible", "conflict", "orphan"])
def test_the_fallback_never_stands_in_for_a_plugin_that_is_installed(how: str, site: Any, open_registry: Any) -> None:
    with_fallback(site)
    source = "raise OSError\n" if how == "broken" else None
    requires = ["mm-plugin>=99"] if how == "incompatible" else []
    plugin = None if how == "orphan" else "claims_it"
    site.install("dist-a", source, plugin=plugin, requires=requires, architectures=["A"], model_types=["a"])
    if how == "conflict":
        site.install("dist-b", architectures=["A"], model_types=["a"])
    registry = open_registry(disabled=["claims_it"] if how == "disabled" else [])
    for config in ({"architectures": ["A"]}, {"architectures": ["Unknown", "A"]}, {"model_type": "a"}):
        with pytest.raises(NoModelError):
            registry.resolve(config)
    assert site.imports("catch_all") == 0


def test_a_disabled_fallback_serves_nothing(site: Any, open_registry: Any) -> None:
    with_fallback(site)
    with pytest.raises(NoModelError, match="Unknown"):
        open_registry(disabled=["any"]).resolve({"architectures": ["Unknown"]})


def test_a_broken_fallback_is_an_error_that_names_it(site: Any, open_registry: Any) -> None:
    site.install("catch-all", "raise OSError('lost')\n", plugin="any", fallback=["any"])
    with pytest.raises(NoModelError, match=r"any \(catch-all 1.0\).*lost"):
        open_registry().resolve({"architectures": ["Unknown"]})


def test_two_fallbacks_are_an_error_that_one_can_be_chosen_from(site: Any, open_registry: Any) -> None:
    with_fallback(site)
    site.install("catch-more", plugin="more", fallback=["any"])
    registry = open_registry()
    with pytest.raises(NoModelError, match=r"any \(catch-all 1.0\), more \(catch-more 1.0\)"):
        registry.resolve({"architectures": ["Unknown"]})
    assert registry.resolve({"architectures": ["Unknown"]}, plugin="more").name == "catch-more"


@pytest.mark.parametrize("how", ["broken", "disabled", "incompatible", "conflict", "orphan"])
def test_the_fallback_stands_in_where_the_caller_says_always(how: str, site: Any, open_registry: Any, log: Any) -> None:
    with_fallback(site)
    source = "raise OSError\n" if how == "broken" else None
    requires = ["mm-plugin>=99"] if how == "incompatible" else []
    plugin = None if how == "orphan" else "claims_it"
    site.install("dist-a", source, plugin=plugin, requires=requires, architectures=["A"], model_types=["a"])
    if how == "conflict":
        site.install("dist-b", architectures=["A"], model_types=["a"])
    registry = open_registry(disabled=["claims_it"] if how == "disabled" else [])
    heard: list[Any] = []
    registry.observers.add(heard.append)
    for config in ({"architectures": ["A"]}, {"architectures": ["Unknown", "A"]}, {"model_type": "a"}):
        assert registry.resolve(config, fallback="always").name == "catch-all"
        assert heard.pop().why.startswith("fallback='always', and what claims it cannot serve: no model for ")
    assert any("fallback='always'" in line for line in lines(log, "WARNING"))


def test_always_is_no_reason_to_pass_over_a_plugin_that_works(site: Any, open_registry: Any) -> None:
    with_fallback(site)
    site.install("bad-dist", "raise OSError\n", architectures=["Bad"])
    site.install("good-dist", architectures=[GOOD])
    registry = open_registry()
    assert registry.resolve(ASKED, fallback="always").name == "good-dist"
    assert registry.resolve({"architectures": ["Bad", GOOD]}, fallback="always").name == "good-dist"
    assert registry.resolve({"architectures": ["Unknown"]}, fallback="always").name == "catch-all"
    # Whoever wants the fallback in its place names it.
    assert registry.resolve(ASKED, plugin="any").name == "catch-all"


def test_without_a_fallback_always_gives_the_error_of_the_plugin(site: Any, open_registry: Any) -> None:
    site.install("bad-dist", "raise OSError('lost')\n", architectures=["Bad"])
    with pytest.raises(NoModelError, match=r"bad_dist .*lost"):
        open_registry().resolve({"architectures": ["Bad"]}, fallback="always")


def test_the_fallback_can_be_left_out(site: Any, open_registry: Any) -> None:
    with_fallback(site)
    registry = open_registry()
    for chosen in (None, "any"):
        with pytest.raises(NoModelError, match="no installed plugin claims it"):
            registry.resolve({"architectures": ["Unknown"]}, fallback="never", plugin=chosen)
    assert site.imports("catch_all") == 0
    for call in (registry.resolve, registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match="fallback='sometimes' is none of unclaimed, always, never"):
            call(checkpoint(site.folder / "any"), fallback="sometimes")


# ---------------------------------------------------------------- specs made for one checkpoint

SPECIALISE = """
import msgspec
from mm_plugin import UsageError

calls = []

def specialize(spec, checkpoint):
    taste = checkpoint.config.get("taste")
    calls.append(taste)
    if taste == "bitter":
        raise UsageError("not this one", argument="checkpoint")
    if taste == "broken":
        raise KeyError("oh")
    made = msgspec.structs.replace(spec, name="sweet", specialize=None, notes={"taste": str(taste)})
    odd = {"none": None, "spec": made, "pair": (made, checkpoint), "again": (spec, checkpoint, 1)}
    return odd.get(taste, (made, checkpoint, {"learned": taste}))
"""


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Unknown"], **config}))
    return folder


def with_specialist(site: Any) -> None:
    source = site.hooks({"name": "base", "specialize": "catch_all.learn:specialize"})
    site.install("catch-all", source, plugin="any", fallback=["any"], files={"catch_all/learn.py": SPECIALISE})


def test_a_plugin_makes_its_spec_for_a_checkpoint_and_its_record_says_so(
    site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    assert registry.resolve({"architectures": ["Unknown"]}).name == "base"
    assert record_of(registry, "any").opened == ()
    folder = checkpoint(tmp_path / "a", taste="mild")
    # It comes as far as the class that the spec made for it names.
    with pytest.raises(PluginLoadError, match="sweet names processor 'nowhere"):
        registry.load_processor(folder)
    with pytest.raises(PluginLoadError, match="sweet names encoder 'nowhere"):
        registry.load_encoder(folder)
    (opened,) = record_of(registry, "any").opened
    assert (opened.checkpoint, opened.model, opened.error) == (str(folder), "sweet", None)
    assert opened.notes == {"taste": "mild"}


def test_a_checkpoint_that_carries_a_specialization_is_not_specialized_again(
    site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    base = registry.resolve({"architectures": ["Unknown"]})
    made = msgspec.structs.replace(base, name="known", specialize=None, notes={"taste": "known"})
    plain = Checkpoint.open(checkpoint(tmp_path / "a", taste="mild"))
    with pytest.raises(PluginLoadError, match="known names processor 'nowhere"):
        registry.load_processor(plain.specialized(made, None, base=base))
    (opened,) = record_of(registry, "any").opened
    assert (opened.model, opened.notes) == ("known", {"taste": "known"})
    assert "catch_all.learn" not in sys.modules
    for other in (None, made):  # what was made from another declaration is not used
        with pytest.raises(PluginLoadError, match="sweet names processor 'nowhere"):
            registry.load_processor(plain.specialized(made, None, base=other))
    assert sys.modules["catch_all.learn"].calls == ["mild", "mild"]


@pytest.mark.parametrize(
    ("taste", "kind", "said"),
    [
        ("bitter", UsageError, "not this one"),
        ("broken", PluginLoadError, r"any \(catch-all 1.0\): catch_all.learn:specialize failed on .*KeyError: 'oh'"),
        ("none", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("spec", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("pair", PluginLoadError, r"must return \(ModelSpec, Checkpoint, state\)"),
        ("again", PluginLoadError, "the spec without specialize"),
    ],
)
def test_a_checkpoint_that_a_plugin_refuses_is_in_its_record(
    taste: str, kind: type[Exception], said: str, site: Any, open_registry: Any, tmp_path: Path
) -> None:
    with_specialist(site)
    registry = open_registry()
    with pytest.raises(kind, match=said) as caught:
        registry.load_processor(checkpoint(tmp_path / "a", taste=taste))
    (opened,) = record_of(registry, "any").opened
    assert opened.model is None
    assert opened.error == str(caught.value)
    assert record_of(registry, "any").state == "loaded"


# ---------------------------------------------------------------- services


def test_observers_of_plugins_hear_events_and_broken_ones_do_not_stop_them(
    site: Any, open_registry: Any, log: Any
) -> None:
    source = f"{HEADER}heard = []\n@hookimpl\ndef mm_register_observers():\n    return {{'seen': heard.append}}\n"
    site.install("watcher", source, observers=["seen"])
    site.install("blind", "raise OSError\n", observers=["unseen"])
    registry = open_registry()
    assert site.imports("watcher") == 0
    registry.observers.emit(EVENT)
    assert sys.modules["watcher.hooks"].heard == [EVENT]
    assert registry.observers is registry.observers
    assert record_of(registry, "blind").state == "failed"
    assert len([line for line in lines(log, "WARNING") if "blind" in line]) == 1


def test_a_disabled_observer_hears_nothing(site: Any, open_registry: Any) -> None:
    source = f"{HEADER}heard = []\n@hookimpl\ndef mm_register_observers():\n    return {{'seen': heard.append}}\n"
    site.install("watcher", source, observers=["seen"])
    open_registry(disabled=["watcher"]).observers.emit(EVENT)
    assert site.imports("watcher") == 0


def test_a_conflict_about_a_model_does_not_silence_the_plugin_s_observer(site: Any, open_registry: Any) -> None:
    services = "heard = []\n@hookimpl\ndef mm_register_observers():\n    return {'seen': heard.append}\n"
    site.install(
        "watcher", site.hooks({"architectures": ("A",)}, services=services), architectures=["A"], observers=["seen"]
    )
    site.install("dist-a", architectures=["A"])
    open_registry().observers.emit(EVENT)
    assert sys.modules["watcher.hooks"].heard == [EVENT]


STORE = """
from mm_plugin import hookimpl
from mm_plugin.cache import MemoryStore, Stats, Store

log = []


class Kept(Store):
    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes

    def get(self, key):
        return None

    def put(self, key, value, num_bytes):
        log.append(("put", key))
        return True

    def delete(self, key):
        pass

    def pin(self, key):
        return False

    def unpin(self, key):
        pass

    def clear(self):
        pass

    def stats(self):
        return Stats()

    def close(self):
        log.append(("close", self.capacity_bytes))
        if self.capacity_bytes == 13:
            raise OSError("cannot be closed")


@hookimpl
def mm_register_stores():
    return {"kept": Kept, "torn": lambda size: 1 / 0, "odd": lambda size: {}}
"""


@pytest.fixture
def store_log(site: Any) -> Callable[[], list[Any]]:
    site.install("keeper", STORE, stores=["kept", "torn", "odd"])
    return lambda: sys.modules["keeper.hooks"].log


def test_a_store_of_a_plugin_is_made_by_name_and_closed_with_the_registry(
    store_log: Any, site: Any, open_registry: Any
) -> None:
    registry = open_registry(
        preprocess_store="kept", embedding_store="kept", preprocess_cache_bytes=11, embedding_cache_bytes=12
    )
    assert site.imports("keeper") == 0
    assert registry.preprocess_store.capacity_bytes == 11
    assert registry.preprocess_store is registry.preprocess_store
    assert registry.embedding_cache is registry.embedding_cache
    registry.close()
    registry.close()
    assert sorted(store_log()) == [("close", 11), ("close", 12)]


@pytest.mark.parametrize("setting", ["preprocess_store", "embedding_store"])
def test_each_cache_has_a_store_of_its_own_kind(setting: str, store_log: Any, open_registry: Any) -> None:
    registry = open_registry(**{setting: "kept"})
    prepared, embeddings = registry.preprocess_store, registry.embedding_cache.store
    assert isinstance(prepared, MemoryStore) == (setting == "embedding_store")
    assert isinstance(embeddings, MemoryStore) == (setting == "preprocess_store")


def test_a_store_that_cannot_be_made_names_the_plugin(store_log: Any, open_registry: Any) -> None:
    registry = open_registry()
    with pytest.raises(PluginLoadError, match=r"keeper \(keeper 1.0\).*ZeroDivisionError") as caught:
        registry.make_store("torn", 1)
    assert caught.value.plugin == "keeper"
    with pytest.raises(PluginLoadError, match=r"keeper \(keeper 1.0\).*no mm_plugin.cache.store.Store"):
        registry.make_store("odd", 1)


def test_an_unknown_store_lists_those_there_are(store_log: Any, open_registry: Any) -> None:
    with pytest.raises(UsageError, match="there are: memory, kept, odd, torn"):
        open_registry().make_store("lost", 1)
    with pytest.raises(UsageError, match=r"no store 'kept'; there are: memory$"):
        open_registry(disabled=["keeper"]).make_store("kept", 1)


def test_a_store_of_a_broken_or_disputed_plugin_is_refused(site: Any, open_registry: Any) -> None:
    site.install("broken-one", "raise OSError('lost')\n", stores=["lost"])
    site.install("keeper-1", STORE, stores=["kept", "torn", "odd"])
    site.install("keeper-2", STORE, stores=["kept", "torn", "odd"])
    registry = open_registry()
    with pytest.raises(PluginLoadError, match="lost"):
        registry.make_store("lost", 1)
    with pytest.raises(PluginLoadError, match=r"keeper-2 1\.0"):
        registry.make_store("kept", 1)


# ---------------------------------------------------------------- what a registry owns


def test_close_stops_what_the_registry_made(open_registry: Any) -> None:
    with open_registry(threads=1) as registry:
        pool = registry.executor
        assert pool.submit(int, "3").result() == 3
        store, rows = registry.preprocess_store, registry.embedding_cache
        assert isinstance(store, MemoryStore)
        assert store is not rows.store
        for kept in (store, rows.store):
            kept.put("key", "value", 1)
        assert (pool, store, rows) == (registry.executor, registry.preprocess_store, registry.embedding_cache)
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(int, "3")
    assert (store.stats().entries, rows.store.stats().entries) == (0, 0)
    with pytest.raises(UsageError, match="closed"):
        registry.load_processor("anything")


def test_close_leaves_what_was_given(open_registry: Any) -> None:
    store, rows = MemoryStore(100), EmbeddingCache(100)
    with ThreadPoolExecutor(1) as pool:
        resources = {"executor": pool, "preprocess_store": store, "embedding_cache": rows}
        with open_registry(resources=resources) as registry:
            assert (registry.executor, registry.preprocess_store, registry.embedding_cache) == (pool, store, rows)
            store.put("key", "value", 1)
            rows.store.put("key", "value", 1)
        assert pool.submit(int, "3").result() == 3
        assert store.get("key") == "value"
        assert rows.store.get("key") == "value"


@pytest.mark.parametrize("first", ["executor", "preprocess_store"])
def test_the_executor_is_idle_before_a_store_is_closed(first: str, store_log: Any, open_registry: Any) -> None:
    registry = open_registry(preprocess_store="kept", preprocess_cache_bytes=11, threads=1)
    getattr(registry, first)
    store, started = registry.preprocess_store, threading.Event()

    def item() -> None:
        started.set()
        time.sleep(0.1)
        store.put("late", None, 1)

    registry.executor.submit(item)
    assert started.wait(10)
    registry.close()
    assert store_log() == [("put", "late"), ("close", 11)]


def test_a_store_that_cannot_be_closed_keeps_nothing_else_open(store_log: Any, open_registry: Any, log: Any) -> None:
    registry = open_registry(
        preprocess_store="kept", embedding_store="kept", preprocess_cache_bytes=13, embedding_cache_bytes=12
    )
    pool = registry.executor
    assert registry.embedding_cache is not registry.preprocess_store
    registry.close()
    assert sorted(store_log()) == [("close", 12), ("close", 13)]
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(int, "3")
    assert len(lines(log, "WARNING")) == 1


def test_a_registry_has_as_many_threads_as_the_settings_say(open_registry: Any) -> None:
    barrier = threading.Barrier(3, timeout=10)
    registry = open_registry(threads=3)
    waits = [registry.executor.submit(barrier.wait) for _ in range(3)]
    assert sorted(wait.result() for wait in waits) == [0, 1, 2]


# ---------------------------------------------------------------- threads and processes


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
    assert len(lines(log, "WARNING")) == 1


def test_two_registries_load_the_same_plugin_apart(site: Any, open_registry: Any) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    first, second = open_registry(), open_registry()
    assert first.resolve(ASKED) == second.resolve(ASKED)
    assert (record_of(first, "good").state, record_of(second, "good").state) == ("loaded", "loaded")
    assert site.imports("good_dist") == 1


FINGERPRINT = "import json, mm_plugin\nprint(json.dumps(mm_plugin.discover().fingerprint()))"


@pytest.mark.case("6.5")
def test_the_fingerprint_is_equal_in_every_process_and_tells_another_set(site: Any, fresh: Callable[..., Any]) -> None:
    site.install("dist-a", architectures=["A"], model_types=["a"])
    site.install("dist-b", architectures=["B"])
    whole = fresh(FINGERPRINT, site.folder, PYTHONHASHSEED="1")
    assert whole == fresh(FINGERPRINT, site.folder, PYTHONHASHSEED="2")
    assert len(whole) == 64
    seen = {whole, fresh(FINGERPRINT, site.folder, MM_PLUGIN_DISABLED="dist_b")}
    assert len(seen) == 2
    assert fresh(FINGERPRINT, site.folder, MM_PLUGIN_DISABLED="nobody") == whole


def test_the_fingerprint_depends_on_what_is_enabled_and_not_on_what_is_loaded(site: Any, open_registry: Any) -> None:
    site.install("dist-a", architectures=["A"])
    registry = open_registry()
    first = registry.fingerprint()
    registry.resolve({"architectures": ["A"]})
    assert registry.fingerprint() == first
    assert open_registry().fingerprint() == first
    site.install("dist-b", architectures=["B"])
    second = open_registry().fingerprint()
    assert second != first
    assert open_registry(disabled=["dist_b"]).fingerprint() == first
    assert open_registry(only=("dist_b",)).fingerprint() not in (first, second)


@pytest.mark.parametrize("change", [{"version": "1.1"}, {"architectures": ["A", "A2"]}, {"plugin": "renamed"}], ids=str)
def test_the_fingerprint_tells_another_version_claim_or_name(
    change: dict[str, Any], site: Any, open_registry: Any
) -> None:
    site.install("dist-a", architectures=["A"])
    before = open_registry().fingerprint()
    for left in site.folder.glob("*.dist-info/*"):
        left.unlink()
    for left in site.folder.glob("*.dist-info"):
        left.rmdir()
    site.install("dist-a", **({"architectures": ["A"]} | change))
    assert open_registry().fingerprint() != before


def report(settings: Settings, queue: Any) -> None:
    """What a spawned process finds by itself."""
    with Registry(settings) as registry:
        spec = registry.resolve(ASKED)
        found = {record.name: (record.distribution, record.state) for record in registry.plugins}
        queue.put((spec.name, registry.architectures, registry.fingerprint(), found))


@pytest.mark.case("6.5")
def test_a_spawned_process_sees_what_its_parent_sees(site: Any, open_registry: Any, fresh: Callable[..., Any]) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    site.install("off-one", plugin="off", architectures=["Off"])
    registry = open_registry(disabled=["off"])
    spec = registry.resolve(ASKED)
    expected = {record.name: (record.distribution, record.state) for record in registry.plugins}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=report, args=(registry.settings, queue))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert found == (spec.name, registry.architectures, registry.fingerprint(), expected)
    assert expected["off"] == ("off-one", "disabled")


def test_a_closed_registry_makes_nothing_new(open_registry: Callable[..., Any]) -> None:
    registry = open_registry()
    registry.close()
    for name in ("executor", "preprocess_store", "embedding_cache"):
        with pytest.raises(UsageError, match="closed"):
            getattr(registry, name)


def test_a_config_that_names_nothing_is_not_the_fallbacks(site: Any, open_registry: Callable[..., Any]) -> None:
    site.install("mm-any", site.hooks({"name": "any"}), fallback=["any"])
    registry = open_registry()
    assert registry.resolve({"model_type": "whatever"}).name == "any"
    with pytest.raises(NoModelError, match="without architectures"):
        registry.resolve({})


def test_discover_reports_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_PLUGIN_DISABELD", "x")
    with mm_plugin.discover() as registry:
        assert any("MM_PLUGIN_DISABELD" in notice for notice in registry.notices)
