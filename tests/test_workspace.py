"""Distributions are found by their place; the one list that names them, import-linter's, holds each."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import check_wheels
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(
    path.parent
    for path in ROOT.glob("*/**/pyproject.toml")
    if path.parent.parent.name in ("plugins", "integrations") or path.parent == ROOT / "core"
)


def packages(folder: Path) -> list[str]:
    return [path.parent.name for path in sorted(folder.glob("src/*/__init__.py"))]


@pytest.fixture(scope="module")
def tools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_distribution_has_one_package_tests_a_changelog_and_a_license(folder: Path) -> None:
    (package,) = packages(folder)
    assert (folder / "src" / package / "py.typed").exists()
    for name in ("tests", "README.md", "CHANGELOG.md", "LICENSE"):
        assert (folder / name).exists(), name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_import_contracts_name_every_package(folder: Path, tools: dict[str, Any]) -> None:
    (package,) = packages(folder)
    lint = tools["importlinter"]
    assert package in lint["root_packages"]
    if folder.name != "core":
        contracts = {contract["name"]: contract for contract in lint["contracts"]}
        assert package in contracts["The core knows no plugin"]["forbidden_modules"]
        assert package in contracts["Plugins do not import one another"]["modules"]


def test_every_tool_finds_distributions_by_their_place(tools: dict[str, Any]) -> None:
    expected = {folder.relative_to(ROOT).as_posix() for folder in FOLDERS}
    assert len(expected) >= 5
    for patterns, below in ((tools["mypy"]["files"], "/src"), (tools["pytest"]["ini_options"]["testpaths"], "/tests")):
        found = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
        assert {folder + below for folder in expected} <= found
    printed = subprocess.run(
        ["make", "--no-print-directory", "-s", "--eval=show:;@echo $(DISTRIBUTIONS)", "show"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert set(printed.split()) == expected
    assert {path.relative_to(ROOT).as_posix() for path in (check_wheels.CORE, *check_wheels.PLUGINS)} == expected


def test_every_distribution_is_installed() -> None:
    for folder in FOLDERS:
        name = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        assert importlib.metadata.version(name)
