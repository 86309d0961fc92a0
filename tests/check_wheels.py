"""Every distribution builds a wheel, and a plugin's wheel passes the plugin's own tests with the core's wheel alone beside it.

Run as `make wheels`. Wheels and environments are temporary.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for kind in ("plugins", "integrations") for path in ROOT.glob(f"{kind}/*/pyproject.toml"))
# What a plugin's own tests need beside the two wheels; `av` is the core's extra for videos.
TEST_TOOLS = ("pytest", "hypothesis", "av")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def build(folder: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder)
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    (wheel,) = out.glob(f"{name}-[0-9]*.whl")
    check_contents(wheel)
    return wheel


def check_contents(wheel: Path) -> None:
    """A wheel holds its package, `py.typed` and its license, and nothing that belongs to the workspace."""
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert len(packages) == 1, f"{wheel.name} holds {sorted(packages)}"
    (package,) = packages
    assert f"{package}/py.typed" in names, f"{wheel.name} has no py.typed"
    assert any(name.endswith("licenses/LICENSE") for name in names), f"{wheel.name} has no LICENSE"
    stray = [name for name in names if "/tests/" in name or name.endswith((".pyc", ".safetensors"))]
    assert not stray, f"{wheel.name} holds {stray}"


def check_alone(core_wheel: Path, plugin: Path, wheel: Path, folder: Path) -> None:
    """The plugin's own tests, against the two wheels and what they require, away from the source tree."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pins = (
        ROOT / "requirements-dev.txt"
    )  # an environment of its own, of the versions that the tests are known to pass with
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins)
    torch = next(
        line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line.startswith("torch==")
    )
    run(*pip, torch)
    run(*pip, core_wheel, wheel, *TEST_TOOLS)
    run(folder / "venv" / "bin" / "mm-plugin", "doctor", cwd=folder)
    # The tests run from a copy, so that nothing of the workspace can be imported by accident.
    tests = folder / "tests"
    run("cp", "-r", plugin / "tests", tests)
    run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "tests" / "wheel-pytest.ini",
        "--rootdir", folder, tests, cwd=folder,
    )  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mm-plugin-wheels-") as name:
        folder = Path(name)
        core_wheel = build(CORE, folder / "dist")
        for plugin in PLUGINS:
            wheel = build(plugin, folder / "dist")
            place = folder / plugin.name  # of its own: neither another plugin nor its tests lie beside it
            place.mkdir()
            check_alone(core_wheel, plugin, wheel, place)
    print("all wheels are good")


if __name__ == "__main__":
    main()
