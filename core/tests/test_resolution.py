"""From a config to exactly one plugin, or an error that explains every candidate."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import (
    NoModelError,
    PluginLoadError,
    Registry,
    UsageError,
)

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}


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
    # A model type is not an architecture, and an architecture not a model type.
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


def with_a_claim_that_serves_nothing(how: str, site: Any, open_registry: Any) -> Registry:
    """A registry of the fallback, and of a plugin for the architecture A and the model type a that cannot serve them."""
    with_fallback(site)
    source = "raise OSError\n" if how == "broken" else None
    requires = ["mm-plugin>=99"] if how == "incompatible" else []
    plugin = None if how == "orphan" else "claims_it"
    site.install("dist-a", source, plugin=plugin, requires=requires, architectures=["A"], model_types=["a"])
    if how == "conflict":
        site.install("dist-b", architectures=["A"], model_types=["a"])
    return open_registry(disabled=["claims_it"] if how == "disabled" else [])


WAYS = ["broken", "disabled", "incompatible", "conflict", "orphan"]


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
    warnings = log("WARNING")
    assert "Unknown" in warnings[0]
    assert "any (catch-all 1.0)" in warnings[0]


@pytest.mark.parametrize("how", WAYS)
def test_the_fallback_never_stands_in_for_a_plugin_that_is_installed(how: str, site: Any, open_registry: Any) -> None:
    registry = with_a_claim_that_serves_nothing(how, site, open_registry)
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


@pytest.mark.parametrize("how", WAYS)
def test_the_fallback_stands_in_where_the_caller_says_always(how: str, site: Any, open_registry: Any, log: Any) -> None:
    registry = with_a_claim_that_serves_nothing(how, site, open_registry)
    heard: list[Any] = []
    registry.observers.add(heard.append)
    for config in ({"architectures": ["A"]}, {"architectures": ["Unknown", "A"]}, {"model_type": "a"}):
        assert registry.resolve(config, fallback="always").name == "catch-all"
        assert heard.pop().why.startswith(
            "fallback='always', and the plugin that claims it cannot serve: no model for "
        )
    assert any("fallback='always'" in line for line in log("WARNING"))


def test_always_is_no_reason_to_pass_over_a_plugin_that_works(site: Any, open_registry: Any) -> None:
    with_fallback(site)
    site.install("bad-dist", "raise OSError\n", architectures=["Bad"])
    site.install("good-dist", architectures=[GOOD])
    registry = open_registry()
    assert registry.resolve(ASKED, fallback="always").name == "good-dist"
    assert registry.resolve({"architectures": ["Bad", GOOD]}, fallback="always").name == "good-dist"
    assert registry.resolve({"architectures": ["Unknown"]}, fallback="always").name == "catch-all"
    # A caller that wants the fallback instead names it.
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
    folder = site.folder / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    for call in (registry.resolve, registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match="fallback: expected one of unclaimed, always, never, got 'sometimes'"):
            call(folder, fallback="sometimes")


def test_a_config_that_names_nothing_is_not_the_fallbacks(site: Any, open_registry: Callable[..., Any]) -> None:
    site.install("mm-any", site.hooks({"name": "any"}), fallback=["any"])
    registry = open_registry()
    assert registry.resolve({"model_type": "whatever"}).name == "any"
    with pytest.raises(NoModelError, match="without architectures"):
        registry.resolve({})


def test_the_event_of_a_fallback_and_the_import_of_an_observer_do_not_wait_for_each_other(
    site: Any, open_registry: Any
) -> None:
    slow = "import time\ntime.sleep(0.2)\n"
    site.install("catch-all", slow + site.hooks({"name": "any"}), plugin="any", fallback=["any"])
    services = "heard = []\n@hookimpl\ndef mm_register_observers():\n    return {'seen': heard.append}\n"
    site.install("watcher", site.hooks(services=services), observers=["seen"])
    registry = open_registry()
    resolving = threading.Thread(target=registry.resolve, args=({"architectures": ["Unknown"]},), daemon=True)
    observing = threading.Thread(target=lambda: registry.observers, daemon=True)
    resolving.start()
    while site.imports("catch_all") == 0:  # the catalog is locked from here on, and the event is still to come
        time.sleep(0.001)
    observing.start()
    for thread in (resolving, observing):
        thread.join(20)
        assert not thread.is_alive()
    assert [event.asked for event in sys.modules["watcher.hooks"].heard] == ["Unknown"]
