"""Distributions that are really installed, in a folder of their own, and fresh interpreters that see them."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from PIL import Image, ImageFile, PngImagePlugin
from toy import ToyCheckpoint, owner_of, word_tokenizer

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# Plugins of the environment, which tests must neither need nor see.
OUTSIDE = tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group="mm_plugin")}))

# Each import of a hooks module leaves a mark, so that "never imported" can be proved.
MARK = "import pathlib\nwith (pathlib.Path(__file__).parent / 'imports.txt').open('a') as mark:\n    mark.write('x')\n"


@pytest.fixture(autouse=True)
def _globals_stay() -> Iterator[None]:
    """Nothing that any test runs changes Pillow's or torch's settings."""

    def state() -> list[Any]:
        return [
            Image.MAX_IMAGE_PIXELS,
            ImageFile.LOAD_TRUNCATED_IMAGES,
            ImageFile.MAXBLOCK,
            ImageFile.SAFEBLOCK,
            PngImagePlugin.MAX_TEXT_CHUNK,
            PngImagePlugin.MAX_TEXT_MEMORY,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        ]

    before = state()
    yield
    assert state() == before


class Site:
    """A site folder and the wheels that go into it."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        self.packages: list[str] = []

    def hooks(self, *specs: Mapping[str, Any], services: str = "") -> str:
        """Source of a hooks module that declares these models."""
        lines = ["from mm_plugin import Modality, ModelSpec, hookimpl"]
        if specs:
            lines += ["@hookimpl", "def mm_register_models():", "    return ["]
            lines += [f"        {self.spec(**spec)}," for spec in specs]
            lines += ["    ]"]
        return "\n".join([*lines, services, ""])

    def spec(self, name: str = "tiny", **arguments: Any) -> str:
        """Source of a ModelSpec for one modality; every argument can be overridden."""
        given = {
            "name": repr(name),
            "output_version": "1",
            "modalities": "(Modality.IMAGE,)",
            "placeholders": "{Modality.IMAGE: '<image>'}",
            "fields": "{Modality.IMAGE: ()}",
            "padding": "'runs'",
            "processor": "'nowhere.processor:Processor'",
            "encoder": "'nowhere.encoder:Encoder'",
        } | {key: value if key in ("modalities", "placeholders") else repr(value) for key, value in arguments.items()}
        return f"ModelSpec({', '.join(f'{key}={value}' for key, value in given.items())})"

    def wheel(
        self,
        distribution: str,
        source: str | None = None,
        *,
        plugin: str | None = "",
        package: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
        headers: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        entry_points: str | bytes | None = None,
        **claims: Sequence[str],
    ) -> Path:
        """Build a wheel as a packaging tool does: the package, and METADATA, WHEEL, entry_points.txt and RECORD.

        Args:
            distribution: its name.
            source: of the hooks module; one that declares exactly the claims where None.
            plugin: entry-point name in the group `mm_plugin`; the package's where empty, no such entry where None.
            package: import name; made from the distribution's where None.
            version: of the distribution.
            requires: Requires-Dist.
            headers: further lines of METADATA.
            files: further files, by path in the wheel.
            entry_points: the whole file, in place of the one that is written from plugin and claims.
            **claims: names by kind of claim.
        """
        package = package or distribution.replace("-", "_")
        module = f"{package}.hooks"
        if source is None:
            models = {kind: tuple(claims[kind]) for kind in ("architectures", "model_types") if kind in claims}
            source = self.hooks({"name": distribution, **models})
        if entry_points is None:
            sections = {"mm_plugin": [] if plugin is None else [plugin or package]}
            sections |= {f"mm_plugin.{kind}": list(names) for kind, names in claims.items()}
            entry_points = "".join(
                f"[{group}]\n" + "".join(f"{name} = {module}\n" for name in names) for group, names in sections.items()
            )
        folder = f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        metadata += [*(f"Requires-Dist: {requirement}" for requirement in requires), *headers]
        tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        contents: dict[str, str | bytes] = {
            f"{package}/__init__.py": "",
            f"{package}/hooks.py": MARK + source,
            **(files or {}),
            f"{folder}/METADATA": "\n".join(metadata) + "\n",
            f"{folder}/WHEEL": tag,
            f"{folder}/entry_points.txt": entry_points,
        }
        path = self.wheels / f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl"
        record = []
        with zipfile.ZipFile(path, "w") as archive:
            for name, value in contents.items():
                data = value if isinstance(value, bytes) else value.encode()
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append(f"{name},sha256={digest},{len(data)}\n")
                archive.writestr(name, data)
            archive.writestr(f"{folder}/RECORD", "".join([*record, f"{folder}/RECORD,,\n"]))
        self.packages.append(package)
        return path

    def install(self, distribution: str, source: str | None = None, **arguments: Any) -> None:
        """Build a wheel and unpack it into the folder, which is what installing a pure wheel comes to."""
        with zipfile.ZipFile(self.wheel(distribution, source, **arguments)) as archive:
            archive.extractall(self.folder)
        importlib.invalidate_caches()

    def imports(self, package: str) -> int:
        """How often the package's hooks module was executed."""
        mark = self.folder / package / "imports.txt"
        return len(mark.read_text()) if mark.exists() else 0

    def forget(self) -> None:
        """Drop the installed packages from this interpreter."""
        for name in list(sys.modules):
            if name.partition(".")[0] in self.packages:
                del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site folder that is on the path of this interpreter while the test runs."""
    folders = tmp_path / "site", tmp_path / "wheels"
    for folder in folders:
        folder.mkdir()
    made = Site(*folders)
    monkeypatch.syspath_prepend(str(made.folder))
    yield made
    made.forget()


@pytest.fixture
def open_registry() -> Iterator[Callable[..., Any]]:
    """Opens registries in which only the plugins that a test installed are enabled, whatever else is in the environment."""
    from mm_plugin import Registry, Settings

    opened: list[Any] = []

    def open_one(*, disabled: Sequence[str] = (), resources: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        registry = Registry(Settings(disabled=(*OUTSIDE, *disabled), **settings), **(resources or {}))
        opened.append(registry)
        return registry

    yield open_one
    for registry in opened:
        registry.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """What the package logged so far at a level."""
    caplog.set_level(logging.DEBUG, "mm_plugin")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelname == level]


@pytest.fixture
def fresh() -> Callable[..., Any]:
    """Runs code in a fresh interpreter and returns what it printed, read as JSON."""

    def run(code: str, *path: Path, **environment: str) -> Any:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MM_PLUGIN_", "PYTHON"))}
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of nothing but a config."""
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "model_type": "a"}')
    return tmp_path


@pytest.fixture
def events() -> list[Any]:
    """Where a test's observer puts the events that it receives."""
    return []


@pytest.fixture
def executor() -> Iterator[Executor]:
    """The threads that a test's processors share."""
    with ThreadPoolExecutor(4) as found:
        yield found


@pytest.fixture
def make_runtime(executor: Executor, events: list[Any]) -> Callable[..., Any]:
    """Makes a runtime over the test's threads, whose events go to `events`; the settings are its arguments."""
    from mm_plugin.runtime import Runtime
    from mm_plugin.settings import Settings

    def make(preprocess_store: Any = None, **settings: Any) -> Any:
        return Runtime(
            Settings(**settings),
            executor=executor,
            preprocess_store=preprocess_store,
            services=lambda kind: {"test": events.append} if kind == "observers" else {},
        )

    return make


@pytest.fixture
def open_words(make_runtime: Callable[..., Any]) -> Callable[..., Any]:
    """Opens an author's class over a checkpoint that has a `word_tokenizer`, nine ids and no settings."""
    from mm_plugin.processor import Processor

    def make(
        cls: Any,
        spec: Any,
        special: Iterable[str] | None = None,
        words: Sequence[str] = ("word",),
        *,
        runtime: Any = None,
        **settings: Any,
    ) -> Any:
        checkpoint: Any = ToyCheckpoint(
            word_tokenizer(spec.placeholders.values() if special is None else special, words)
        )
        return Processor(cls, spec, checkpoint, runtime or make_runtime(**settings), {}, owner=owner_of(spec))

    return make


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of every media input that is decoded while the test runs."""
    from mm_plugin.media import DecodedMedia, ImageSource

    seen: list[str] = []
    original = ImageSource.decode

    def decode(self: ImageSource, *size: Any, **arguments: Any) -> DecodedMedia:
        seen.append(self.path)
        return original(self, *size, **arguments)

    monkeypatch.setattr(ImageSource, "decode", decode)
    return seen
