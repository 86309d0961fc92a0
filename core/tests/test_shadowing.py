"""All of the path is looked at: what hides a plugin is a record, the fallback does not step in, and broken metadata has a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
from records import record_of

from mm_plugin import NoModelError, PluginLoadError, UsageError
from mm_plugin.metadata import broken_metadata, in_words

GOOD = "GoodForConditionalGeneration"
ASKED = {"architectures": [GOOD]}
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture
def earlier(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is on the path before that of the installed plugins."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def stale(folder: Path, stem: str, *, name: str = "good-dist", version: str = "0.9", entry_points: Any = None) -> Path:
    """Metadata of a distribution without its code; without METADATA where the name is empty."""
    place = folder / stem
    place.mkdir(parents=True)
    if name:
        file = "METADATA" if stem.endswith(".dist-info") else "PKG-INFO"
        (place / file).write_text(METADATA.format(name=name, version=version))
    if entry_points is not None:
        data = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
        (place / "entry_points.txt").write_bytes(data)
    return place


def install(site: Any) -> None:
    """A plugin, and a fallback that would serve anything."""
    site.install("good-dist", plugin="good", version="1.2", architectures=[GOOD], model_types=["good"])
    site.install("any-dist", plugin="anything", fallback=["anything"])


HIDING: dict[str, Callable[[Path], Path]] = {
    "egg-info without entry points": lambda folder: stale(folder, "good_dist.egg-info"),
    "egg-info with a version": lambda folder: stale(folder, "good_dist-0.9-py3.11.egg-info"),
    "egg-info with another spelling": lambda folder: stale(folder, "Good.Dist.egg-info", name="Good.Dist"),
    "dist-info without entry points": lambda folder: stale(folder, "good_dist-0.9.dist-info"),
    "no entry points in the file": lambda folder: stale(folder, "good_dist-0.9.dist-info", entry_points=""),
    "commands alone": lambda folder: stale(
        folder, "good_dist.egg-info", entry_points="[console_scripts]\ngood = good:main\n"
    ),
    "an older version that claims less": lambda folder: stale(
        folder, "good_dist-0.1.dist-info", version="0.1", entry_points="[mm_plugin]\ngood = good_dist.hooks\n"
    ),
    "a file that cannot be read": lambda folder: stale(
        folder, "good_dist-0.9.dist-info", entry_points=b"[mm_plugin]\n\xff\xfe\n"
    ),
}


@pytest.mark.parametrize("how", HIDING)
def test_what_hides_a_plugin_is_a_record_and_the_fallback_stays_out(
    how: str, site: Any, earlier: Path, open_registry: Any, log: Any
) -> None:
    install(site)
    place = HIDING[how](earlier)
    registry = open_registry()
    (hidden,) = [record for record in registry.plugins if record.state == "shadowed"]
    assert (hidden.name, hidden.distribution, hidden.version) == ("good", "good-dist", "1.2") or how.startswith(
        "an older"
    )
    assert (hidden.stage, hidden.code) == ("discover", "shadowed")
    assert Path(hidden.location) == site.folder
    assert str(place) in hidden.error
    assert str(site.folder) in hidden.error
    assert str(place) in hidden.hint
    assert GOOD not in registry.architectures
    assert any(str(place) in line for line in log("WARNING"))
    for config in (ASKED, {"model_type": "good"}):
        with pytest.raises(NoModelError) as caught:
            registry.resolve(config)
        first = caught.value.message.splitlines()[0]
        assert "shadowed" in first
        assert str(place) in first
    with pytest.raises(PluginLoadError, match=r"shadowed|unreadable"):
        open_registry(strict=True)
    # The caller may say that the fallback serves whatever no plugin that works claims.
    assert registry.resolve(ASKED, fallback="always").name == "any-dist"
    assert site.imports("good_dist") == 0
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    importlib_metadata.MetadataPathFinder.invalidate_caches()
    assert open_registry().resolve(ASKED).name == "good-dist"


NOT_HIDING: dict[str, Callable[[Path], Any]] = {
    "the same entry points": lambda folder: stale(
        folder,
        "good_dist-0.9.dist-info",
        entry_points=f"[mm_plugin]\ngood = good_dist.hooks\n[mm_plugin.architectures]\n{GOOD} = good_dist.hooks\n"
        "[mm_plugin.model_types]\ngood = good_dist.hooks\n",
    ),
    "nothing but a folder": lambda folder: stale(folder, "good_dist-0.9.dist-info", name=""),
    "nothing but a folder with claims": lambda folder: stale(
        folder, "good_dist-0.9.dist-info", name="", entry_points="[mm_plugin]\nold = old.hooks\n"
    ),
    "what pip did not remove": lambda folder: stale(
        folder,
        "~ood_dist-0.9.dist-info",
        entry_points=f"[mm_plugin]\ngood = good_dist.hooks\n[mm_plugin.architectures]\n{GOOD} = good_dist.hooks\n",
    ),
    "another distribution": lambda folder: stale(folder, "good_dist_extra.egg-info", name="good-dist-extra"),
    "an empty folder of the path": lambda folder: None,
}


@pytest.mark.parametrize("how", NOT_HIDING)
def test_what_hides_nothing_is_no_record(how: str, site: Any, earlier: Path, open_registry: Any, log: Any) -> None:
    install(site)
    NOT_HIDING[how](earlier)
    registry = open_registry()
    assert [record.name for record in registry.plugins if record.state == "shadowed"] == []
    assert registry.resolve(ASKED).name == "good-dist"
    assert [line for line in log("WARNING") if "hidden" in line or "claimed by" in line] == []


def test_stale_metadata_later_on_the_path_hides_nothing(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_registry: Any
) -> None:
    install(site)
    stale(tmp_path / "later", "good_dist.egg-info")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "later")])
    registry = open_registry()
    assert record_of(registry, "good").state == "available"
    assert registry.resolve(ASKED).name == "good-dist"


@pytest.mark.parametrize("how", ["twice", "through a link"])
def test_a_folder_that_is_on_the_path_twice_is_one(
    how: str, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_registry: Any
) -> None:
    install(site)
    again = site.folder
    if how == "through a link":
        again = tmp_path / "link"
        again.symlink_to(site.folder, target_is_directory=True)
    monkeypatch.setattr(sys, "path", [str(again), *sys.path])
    registry = open_registry()
    assert record_of(registry, "good").state == "available"
    assert registry.resolve(ASKED).name == "good-dist"


def test_an_older_version_serves_what_it_claims_and_hides_the_rest(
    site: Any, earlier: Path, open_registry: Any
) -> None:
    site.install("good-dist", plugin="good", architectures=["Old"])
    old = [*site.folder.glob("good_dist-1.0.dist-info/*")]
    place = earlier / "good_dist-1.0.dist-info"
    place.mkdir()
    for file in old:
        file.rename(place / file.name)
    (site.folder / "good_dist-1.0.dist-info").rmdir()
    (site.folder / "good_dist").rename(earlier / "good_dist")
    site.install("good-dist", plugin="good", version="2.0", architectures=["Old", "New"])
    site.install("any-dist", plugin="anything", fallback=["anything"])
    registry = open_registry()
    assert [(record.version, record.state) for record in registry.plugins if record.distribution == "good-dist"] == [
        ("1.0", "available"),
        ("2.0", "shadowed"),
    ]
    assert registry.resolve({"architectures": ["Old"]}).name == "good-dist"
    assert registry.load_plugin("good").state == "loaded"
    with pytest.raises(NoModelError, match=r"good-dist 2\.0 in .* is hidden by good-dist 1\.0"):
        registry.resolve({"architectures": ["New"]})


def test_a_hidden_service_is_named_where_it_is_asked_for(site: Any, earlier: Path, open_registry: Any) -> None:
    services = "@hookimpl\ndef mm_register_stores():\n    return {'disk': print}\n"
    site.install("disk-dist", site.hooks(services=services), plugin="disk", stores=["disk"])
    stale(earlier, "disk_dist.egg-info", name="disk-dist")
    with pytest.raises(PluginLoadError, match=r"shadowed.*disk_dist\.egg-info"):
        open_registry().make_store("disk", 1)


def test_a_disabled_plugin_that_is_hidden_is_disabled(site: Any, earlier: Path, open_registry: Any) -> None:
    install(site)
    stale(earlier, "good_dist.egg-info")
    assert record_of(open_registry(disabled=["good"]), "good").state == "disabled"


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["doctor", "good"], ["doctor", "good", "--json"]])
def test_the_command_shows_it(command: list[str], site: Any, earlier: Path) -> None:
    install(site)
    place = stale(earlier, "good_dist.egg-info")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MM_PLUGIN_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from mm_plugin.cli.main import main; sys.exit(main())", *command],
        env={**kept, "PYTHONPATH": os.pathsep.join(map(str, (earlier, site.folder))), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "shadowed" in done.stdout, done.stderr
    assert done.returncode == int(command[0] == "doctor")
    assert str(place) in done.stdout


@pytest.mark.parametrize("on_path", [False, True], ids=["beside the path", "on the path"])
def test_doctor_sees_what_the_command_itself_sees(on_path: bool, site: Any, tmp_path: Path) -> None:
    """A folder in which somebody stands, such as that of the sources, does not belong to the path of an installed command."""
    install(site)
    folder = tmp_path / "sources"
    stale(folder, "good_dist.egg-info")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MM_PLUGIN_", "PYTHON"))}
    start = ["-m", "mm_plugin.cli"] if on_path else ["-P", "-m", "mm_plugin.cli"]
    for command in (["list", "--json"], ["doctor", "good", "--json"]):
        done = subprocess.run(
            [sys.executable, *start, *command],
            env={**kept, "PYTHONPATH": str(site.folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        (found,) = [record for record in json.loads(done.stdout)["plugins"] if record["name"] == "good"]
        assert (found["code"] == "shadowed") is on_path


# ---------------------------------------------------------------- metadata that cannot be read

TORN: dict[str, bytes] = {
    "bytes": b"[console_scripts]\n\xff\xfe = x\n",
    "line": b"[console_scripts]\na line without an equals sign\n",
    "utf-16": "[console_scripts]\na = b\n".encode("utf-16"),
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_code_that_fails_on_the_metadata_of_another_distribution_names_it(
    content: bytes, site: Any, open_registry: Any
) -> None:
    """As torch does, which reads the entry points of every distribution when it is imported."""
    asks = "import importlib.metadata\nimportlib.metadata.entry_points(group='torch.backends')\n"
    site.install("good-dist", asks + site.hooks({"architectures": (GOOD,)}), plugin="good", architectures=[GOOD])
    place = stale(site.folder, "torn_one-3.1.dist-info", name="torn-one", version="3.1", entry_points=content)
    registry = open_registry()
    (notice,) = registry.notices
    assert "torn-one 3.1" in notice
    with pytest.raises(NoModelError) as caught:
        registry.resolve(ASKED)
    first = caught.value.message.splitlines()[0]
    assert "torn-one" in first
    assert str(place) in first
    found = record_of(registry, "good")
    assert (found.code, found.hint) == ("unreadable_metadata", "pip install --force-reinstall torn-one")


def test_a_plugin_whose_own_entry_points_are_broken_keeps_the_fallback_out(site: Any, open_registry: Any) -> None:
    install(site)
    file = site.folder / "good_dist-1.2.dist-info" / "entry_points.txt"
    file.write_text(file.read_text() + "[other]\na line without an equals sign\n")
    registry = open_registry()
    found = record_of(registry, "good")
    assert (found.state, found.code) == ("failed", "unreadable_metadata")
    assert found.claims == {"architectures": (GOOD,), "model_types": ("good",)}
    with pytest.raises(NoModelError, match=r"good-dist.*cannot be read"):
        registry.resolve(ASKED)
    assert len(registry.notices) == 1


def test_an_error_of_another_kind_names_no_distribution() -> None:
    with pytest.raises(importlib_metadata.PackageNotFoundError) as caught:
        importlib_metadata.version("no-such-distribution")
    assert in_words(caught.value) == ""
    assert broken_metadata(caught.value) is None


@pytest.mark.parametrize("method", ["load_processor", "load_encoder"])
def test_the_core_s_own_import_of_torch_names_it_too(method: str, site: Any, fresh: Any, tmp_path: Path) -> None:
    site.install("good-dist", plugin="good", architectures=[GOOD])
    stale(site.folder, "torn_one-3.1.dist-info", name="torn-one", entry_points=TORN["line"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ASKED))
    code = (
        "import json, mm_plugin\n"
        "try:\n"
        f"    mm_plugin.discover().{method}({str(tmp_path / 'model')!r})\n"
        "except mm_plugin.MMPluginError as error:\n"
        "    print(json.dumps([type(error).__name__, error.message]))\n"
    )
    kind, message = fresh(code, site.folder)
    assert kind in ("UsageError", "PluginLoadError")
    assert "torn-one" in message or method == "load_processor"


# ---------------------------------------------------------------- hundreds of entry points

MANY: dict[str, Callable[[int], str]] = {
    "one name": lambda count: "[mm_plugin]\n" + "".join(f"same = many.hooks{i}\n" for i in range(count)),
    "one claim": lambda count: (
        "[mm_plugin]\n"
        + "".join(f"p{i} = many.hooks{i}\n" for i in range(count))
        + "[mm_plugin.architectures]\n"
        + "".join(f"Same = many.hooks{i}\n" for i in range(count))
    ),
    "one line": lambda count: "[mm_plugin]\n" + "same = many.hooks\n" * count,
    "orphans": lambda count: "[mm_plugin.architectures]\n" + "".join(f"A{i} = many.hooks{i}\n" for i in range(count)),
    "claims": lambda count: (
        "[mm_plugin]\nmany = many.hooks\n[mm_plugin.architectures]\n"
        + "".join(f"A{i} = many.hooks\n" for i in range(count))
    ),
    "unknown groups": lambda count: "".join(f"[mm_plugin.kind{i}]\na = many.hooks\n" for i in range(count)),
}


def work(site: Any, open_registry: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[int, int]:
    """Files read, and characters of all records, of a registry with these entry points."""
    reads: list[str] = []
    original = importlib_metadata.PathDistribution.read_text

    def read_text(self: Any, name: Any) -> Any:
        if "many" in str(self._path):
            reads.append(name)
        return original(self, name)

    site.install("many-dist", plugin=None, entry_points=text)
    importlib_metadata.MetadataPathFinder.invalidate_caches()
    with monkeypatch.context() as patched:
        patched.setattr(importlib_metadata.PathDistribution, "read_text", read_text)
        registry = open_registry()
        size = sum(len(record.summary()) for record in registry.plugins if record.distribution == "many-dist")
        with pytest.raises((NoModelError, UsageError)) as caught:
            registry.resolve({"architectures": ["Nobody"]})
    return len(reads), size + len(str(caught.value))


@pytest.mark.parametrize("how", MANY)
def test_the_work_of_discovery_grows_with_the_entry_points_and_not_with_their_square(
    how: str, site: Any, open_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.perf_counter()
    few = work(site, open_registry, monkeypatch, MANY[how](50))
    many = work(site, open_registry, monkeypatch, MANY[how](400))
    assert many[0] == few[0] <= 12
    assert many[1] <= few[1] * 8 * 1.2
    assert time.perf_counter() - began < 10


def test_a_line_that_is_there_twice_is_one_entry_point(site: Any, open_registry: Any) -> None:
    text = f"[mm_plugin]\ngood = good_dist.hooks\ngood = good_dist.hooks\n[mm_plugin.architectures]\n{GOOD} = good_dist.hooks\n"
    text += f"{GOOD} = good_dist.hooks\n"
    site.install("good-dist", site.hooks({"name": "good-dist", "architectures": (GOOD,)}), entry_points=text)
    registry = open_registry()
    assert record_of(registry, "good").claims == {"architectures": (GOOD,)}
    assert registry.resolve(ASKED).name == "good-dist"
