"""Examples in docstrings: every one runs, and every class that authors or servers touch has one.

An example runs with the names of its module and `folder`, an empty temporary folder that is also the working directory. The
network is out of reach.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

import mm_plugin
from mm_plugin import MMPluginError

ROOT = Path(mm_plugin.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# These packages' faces are for authors and servers; those of the others are read by whoever works on the core.
FACES = ("mm_plugin", "mm_plugin.cache", "mm_plugin.encoder", "mm_plugin.scheduler", "mm_plugin.testing")
# The classes of these modules share an example, in the module's docstring or in a class's.
TOGETHER = ("mm_plugin.errors", "mm_plugin.events")
WITHOUT = {
    "EncodedStore": "shown in the example of ByteStore",
    "JointItem": "shown in the example of JointOutput",
    "Size": "shown wherever a layout is",
    "VideoSize": "shown in the example of Sampling",
    "Stats": "shown wherever a store is",
    "PatchGridCheckpoints": "needs transformers' classes of a model; its tests build whole checkpoints",
}


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(mm_plugin.__path__, "mm_plugin.")]
    if importlib.util.find_spec("triton") is None:
        found = [name for name in found if "triton" not in name]
    return ["mm_plugin", *sorted(name for name in found if not name.endswith("__main__"))]


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in modules() for test in finder.find(importlib.import_module(name), name)]
    return [test for test in found if test.examples]


def run(test: doctest.DocTest, folder: Path) -> str:
    """What a failing example printed; empty where all went well."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    test.globs["folder"] = folder
    runner.run(test, out=said.append)
    return "".join(said)


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise OSError("an example must not use the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name.removeprefix("mm_plugin."))
def test_an_example_runs(test: doctest.DocTest, tmp_path: Path) -> None:
    said = run(test, tmp_path)
    assert not said, said


def face(package: str) -> list[str]:
    """The names that a package's stub states."""
    stub = ROOT.joinpath(*package.split(".")[1:], "__init__.pyi").read_text(encoding="utf-8")
    (names,) = [ast.literal_eval(node.value) for node in ast.parse(stub).body if isinstance(node, ast.Assign)]
    return names


def classes() -> dict[str, type]:
    found = {name: getattr(importlib.import_module(package), name) for package in FACES for name in face(package)}
    return {name: value for name, value in found.items() if isinstance(value, type)}


def has_example(cls: type) -> bool:
    own = [
        cls,
        *(value for value in vars(cls).values() if callable(value) or isinstance(value, (classmethod, property))),
    ]
    return any(">>> " in (getattr(value, "__doc__", None) or "") for value in own)


@pytest.mark.parametrize("name", [name for name, cls in classes().items() if not issubclass(cls, MMPluginError)])
def test_a_class_of_the_face_has_an_example(name: str) -> None:
    cls = classes()[name]
    assert has_example(cls) is (name not in WITHOUT), f"{cls.__module__}.{name}"


@pytest.mark.parametrize("module", TOGETHER)
def test_errors_and_events_share_an_example(module: str) -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module)
    assert any(test.examples for test in found)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (">>> 1 + 1\n3\n", "Got:\n    2"),
        (">>> Settings()\n", "NameError"),
        (">>> import socket\n>>> socket.create_connection(('127.0.0.1', 9), 1)\n", "must not use the network"),
    ],
    ids=["a wrong value", "a name that is not imported", "the network"],
)
def test_a_wrong_example_is_caught(source: str, said: str, tmp_path: Path) -> None:
    test = doctest.DocTestParser().get_doctest(source, {}, "wrong", None, None)
    assert said in run(test, tmp_path)
