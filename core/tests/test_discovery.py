"""What the installed distributions claim, read without importing any plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import record_of

import mm_plugin
from mm_plugin import (
    MMPluginError,
    NoModelError,
    PluginLoadError,
    UsageError,
)

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}


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
    (warning,) = log("WARNING")
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
    assert (
        notice
        == f"{variable} names 'excellent_on', but no plugin of this name is installed; did you mean 'excellent_one'?"
    )
    assert [line for line in log("WARNING") if notice in line]
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
    assert len(log("WARNING")) == 2
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


def test_discover_reports_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_PLUGIN_DISABELD", "x")
    with mm_plugin.discover() as registry:
        assert any("MM_PLUGIN_DISABELD" in notice for notice in registry.notices)


# ---------------------------------------------------------------- strict


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


# ---------------------------------------------------------------- the fingerprint


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
