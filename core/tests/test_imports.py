"""What importing the package costs, and that its public names are what it says."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mm_plugin

HEAVY = ("torch", "transformers", "numpy", "PIL", "tokenizers", "safetensors", "huggingface_hub")
QUIET = {
    "import": "import mm_plugin",
    "discover": "import mm_plugin; mm_plugin.discover()",
    "records": "import mm_plugin; r = mm_plugin.discover(); r.plugins, r.architectures, r.model_types, r.fingerprint()",
    "resolve nothing": (
        "import mm_plugin\ntry:\n    mm_plugin.discover().resolve({})\n"
        "except mm_plugin.NoModelError:\n    pass\nelse:\n    raise AssertionError"
    ),
    "resolve what nobody claims": (
        "import mm_plugin\ntry:\n    mm_plugin.discover().resolve({'architectures': ['NobodyHasThis']}, fallback='never')\n"
        "except mm_plugin.NoModelError:\n    pass\nelse:\n    raise AssertionError"
    ),
}


def imported_by(code: str, suspects: tuple[str, ...]) -> str:
    """A program that runs `code` and prints which of the suspects it imported."""
    return f"{code}\nimport json, sys\nprint(json.dumps([name for name in {suspects!r} if name in sys.modules]))"


@pytest.mark.case("6.2")
@pytest.mark.parametrize("code", QUIET.values(), ids=QUIET)
def test_nothing_heavy_and_no_plugin_is_imported(code: str, site: Any, fresh: Callable[..., Any]) -> None:
    site.install("light-one", architectures=["LightOne"])
    assert fresh(imported_by(code, (*HEAVY, "light_one", "light_one.hooks")), site.folder) == []
    assert site.imports("light_one") == 0


@pytest.mark.parametrize("name", HEAVY)
def test_the_check_for_heavy_imports_can_fail(name: str, tmp_path: Path, fresh: Callable[..., Any]) -> None:
    (tmp_path / f"{name}.py").write_text("")
    code = imported_by(f"import mm_plugin; mm_plugin.discover(); import {name}", HEAVY)
    assert fresh(code, tmp_path) == [name]


def test_the_check_for_plugins_can_fail(site: Any, fresh: Callable[..., Any]) -> None:
    site.install("light-one", architectures=["LightOne"])
    code = imported_by("import mm_plugin; mm_plugin.discover().load_plugin('light_one')", ("light_one.hooks",))
    assert fresh(code, site.folder) == ["light_one.hooks"]
    assert site.imports("light_one") == 1


@pytest.mark.case("6.2")
def test_resolving_imports_the_chosen_plugin_only(site: Any, fresh: Callable[..., Any]) -> None:
    for name in ("one", "two", "three"):
        site.install(f"light-{name}", architectures=[f"Light{name.title()}"])
    code = "import mm_plugin; mm_plugin.discover().resolve({'architectures': ['LightTwo']})"
    suspects = ("torch", "transformers", "light_one", "light_two", "light_three")
    assert fresh(imported_by(code, suspects), site.folder) == ["light_two"]


def faces() -> list[Path]:
    """The stub of every package that has a public face."""
    return sorted(Path(mm_plugin.__file__).parent.rglob("__init__.pyi"))


def stated(stub: Path) -> tuple[dict[str, str], list[str]]:
    """The module of each name that a stub imports, and its `__all__`."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {name.name: str(node.module) for node in imports for name in node.names}
    (names,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    return homes, names


@pytest.mark.parametrize("stub", faces(), ids=lambda stub: stub.parent.name)
def test_a_face_is_stated_once_and_every_name_is_loaded_from_its_home(stub: Path) -> None:
    package = ".".join(("mm_plugin", *stub.parent.relative_to(Path(mm_plugin.__file__).parent).parts))
    face = importlib.import_module(package)
    homes, names = stated(stub)
    assert set(face.__all__) == set(names) == {*homes, *(["__version__"] if package == "mm_plugin" else [])}
    assert len(set(names)) == len(names)
    for name, home in homes.items():
        value = getattr(face, name)
        module = importlib.import_module(f"{package}.{home}")
        assert value is getattr(module, name)
        assert name in dir(face)
        # A name of the face must not be that of a module beside it, which would hide it once it is imported.
        assert not (stub.parent / f"{name}.py").exists()
        if isinstance(value, type):
            assert value.__module__ == module.__name__


def test_a_package_holds_no_code_beyond_its_face() -> None:
    for file in Path(mm_plugin.__file__).parent.rglob("__init__.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body[1:]
        kinds = {type(node) for node in body}
        assert kinds <= {ast.Import, ast.Assign, ast.AugAssign}, file


def test_every_public_name_resolves_in_a_fresh_interpreter(fresh: Callable[..., Any]) -> None:
    code = "import json\nfrom mm_plugin import *\nimport mm_plugin\n"
    code += "print(json.dumps([n for n in mm_plugin.__all__ if n not in globals()]))"
    assert fresh(code) == []


@pytest.mark.parametrize("name", ["Registrar", "registry_", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    assert not hasattr(mm_plugin, name)
    with pytest.raises(AttributeError, match=name):
        getattr(mm_plugin, name)


def test_the_version_is_the_distribution_s() -> None:
    from importlib.metadata import version

    assert mm_plugin.__version__ == version("mm-plugin")


def test_importing_a_name_twice_gives_one_object(fresh: Callable[..., Any]) -> None:
    code = "import mm_plugin\na = mm_plugin.Settings\nb = mm_plugin.Settings\nfrom mm_plugin.settings import Settings as c\n"
    assert fresh(code + "import json\nprint(json.dumps([a is b, a is c, 'Settings' in vars(mm_plugin)]))") == [True] * 3
