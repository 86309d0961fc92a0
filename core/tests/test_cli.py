"""The command: what it prints, what it returns, and that a broken plugin cannot break it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mm_plugin.cli.drawing import draw, row_view
from mm_plugin.cli.main import main
from mm_plugin.cli.tables import print_table
from mm_plugin.errors import MMPluginError
from mm_plugin.settings import Settings

HEAVY = ("torch", "transformers", "numpy", "PIL")


def command(site: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, in a process that sees the site folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MM_PLUGIN_")}
    kept |= {"PYTHONPATH": str(site.folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200", **environment}
    return subprocess.run(
        [sys.executable, "-m", "mm_plugin.cli", *arguments], env=kept, capture_output=True, text=True, timeout=120
    )


def record(done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    (found,) = [entry for entry in json.loads(done.stdout)["plugins"] if entry["name"] == name]
    return found


def test_list_shows_a_plugin_without_importing_it(site: Any) -> None:
    site.install("mm-plugin-good", architectures=["GoodForConditionalGeneration"])
    done = command(site, "list")
    assert done.returncode == 0, done.stderr
    assert "mm-plugin-good 1.0" in done.stdout
    assert "GoodForConditionalGeneration" in done.stdout
    assert site.imports("mm_plugin_good") == 0


def test_a_name_is_never_broken_in_two(site: Any) -> None:
    """A table of 80 columns folded long names, which then could not be searched for."""
    name = "A" + "VeryLong" * 20 + "ForConditionalGeneration"
    site.install("mm-plugin-good", architectures=[name])
    done = command(site, "list")
    (line,) = [line for line in done.stdout.splitlines() if "mm_plugin_good" in line]
    assert line.split("  ")[-1].strip() == name
    assert not set(done.stdout) & set("┃│━─┏┡")


def test_settings_says_what_is_in_force_and_why(site: Any) -> None:
    done = command(site, "settings", MM_PLUGIN_MAX_IMAGES="4", MM_PLUGIN_ALLOWED_HOSTS="a.example, *.b.example")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line.split(None, 3)[1:] for line in done.stdout.splitlines()}
    assert lines["max_images"] == ["environment", "MM_PLUGIN_MAX_IMAGES", "4"]
    assert lines["max_videos"] == ["default", "MM_PLUGIN_MAX_VIDEOS", "32"]
    assert lines["allowed_hosts"] == ["environment", "MM_PLUGIN_ALLOWED_HOSTS", "a.example, *.b.example"]
    assert lines.keys() == {"setting", *Settings.__struct_fields__}


def test_settings_as_json_and_names_that_are_none(site: Any) -> None:
    done = command(site, "settings", "--json", MM_PLUGIN_THREAD="2")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["settings"]["strict"] == {"value": False, "from": "default", "variable": "MM_PLUGIN_STRICT"}
    assert found["notices"] == [
        "environment variable MM_PLUGIN_THREAD is not a setting; did you mean MM_PLUGIN_THREADS?"
    ]
    assert "did you mean" in command(site, "settings", MM_PLUGIN_THREAD="2").stdout
    wrong = command(site, "settings", MM_PLUGIN_THREADS="many")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mm-plugin: environment variable MM_PLUGIN_THREADS")


def test_a_table_is_drawn_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60)
    print_table(console, "Things", ("name", "what"), [["[red]one[/]", "two " * 40]])
    assert "┃" in file.getvalue()
    assert "one" in file.getvalue()


def test_list_says_what_a_fallback_is_for(site: Any) -> None:
    site.install("mm-plugin-any", plugin="any", fallback=["any"])
    assert "(fallback)" in " ".join(command(site, "list").stdout.split())


def test_list_as_json_holds_every_record(site: Any) -> None:
    site.install("mm-plugin-good", architectures=["GoodForConditionalGeneration"])
    found = record(command(site, "list", "--json"), "mm_plugin_good")
    assert found["state"] == "available"
    assert found["claims"] == {"architectures": ["GoodForConditionalGeneration"]}
    assert site.imports("mm_plugin_good") == 0


def test_list_imports_nothing_heavy(site: Any, fresh: Any) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from mm_plugin.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['list'])\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    assert fresh(code, site.folder) == []


@pytest.mark.case("6.1")
def test_list_and_help_work_beside_a_plugin_that_raises(site: Any) -> None:
    site.install("mm-plugin-bad", "raise OSError('libnative.so: cannot open')", architectures=["Bad"])
    assert command(site, "list").returncode == 0
    assert command(site, "--help").returncode == 0
    assert site.imports("mm_plugin_bad") == 0


CLASSES = """
from mm_plugin import BaseOptions, Encoder, EncodesImages, ModelProcessor

class Processor(ModelProcessor):
    Options = BaseOptions

    def context(self, counts): ...
    def layout(self, modality, size, options, context): ...
    def prepare(self, decoded, layout, options): ...
    def replacement(self, layout): ...

class Model(Encoder, EncodesImages):
    @classmethod
    def load(cls, checkpoint, device, dtype): ...
    def get_image_feature(self, items): ...
"""


def test_doctor_is_content_with_a_good_plugin(site: Any) -> None:
    files = {"mm_plugin_good/classes.py": CLASSES}
    where = {"processor": "mm_plugin_good.classes:Processor", "encoder": "mm_plugin_good.classes:Model"}
    source = site.hooks({"name": "good", "architectures": ("Good",), **where})
    site.install("mm-plugin-good", source, files=files, architectures=["Good"])
    done = command(site, "doctor", "mm_plugin_good", "--json")
    found = record(done, "mm_plugin_good")
    assert (done.returncode, found["state"], found["error"]) == (0, "loaded", None)
    assert found["elapsed_ms"] > 0


@pytest.mark.case("6.3")
def test_doctor_says_what_why_where_and_how_to_mend_it(site: Any) -> None:
    site.install("mm-plugin-bad", "import wanted_but_missing", architectures=["Bad"])
    done = command(site, "doctor", "mm_plugin_bad")
    assert done.returncode == 1
    for part in ("failed", "missing_module", "wanted_but_missing", "hooks.py:", "pip install wanted_but_missing"):
        assert part in done.stdout, done.stdout


def test_doctor_names_a_class_that_a_spec_cannot_have(site: Any) -> None:
    site.install("mm-plugin-bad", architectures=["Bad"])  # its spec names nowhere.processor:Processor
    done = command(site, "doctor", "mm_plugin_bad", "--json")
    found = record(done, "mm_plugin_bad")
    assert done.returncode == 1
    assert (found["state"], found["stage"]) == ("failed", "classes")
    assert found["missing"] == "nowhere"


def test_doctor_names_a_tokenizer_that_a_spec_cannot_have(site: Any) -> None:
    files = {"mm_plugin_bad/classes.py": CLASSES}
    where = {"processor": "mm_plugin_bad.classes:Processor", "encoder": "mm_plugin_bad.classes:Model"}
    source = site.hooks({"name": "bad", "architectures": ("Bad",), "tokenizer": "mm_plugin_bad.classes:gone", **where})
    site.install("mm-plugin-bad", source, files=files, architectures=["Bad"])
    done = command(site, "doctor", "mm_plugin_bad", "--json")
    found = record(done, "mm_plugin_bad")
    assert done.returncode == 1
    assert found["stage"] == "classes"
    assert "gone" in found["error"]


@pytest.mark.parametrize(
    ("source", "code", "part"),
    [
        ("import os; os._exit(3)", "crashed", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("import time; time.sleep(60)", "timeout", "2 seconds"),
    ],
)
def test_doctor_survives_a_plugin_that_ends_or_stops_the_process(site: Any, source: str, code: str, part: str) -> None:
    site.install("mm-plugin-bad", source, architectures=["Bad"])
    done = command(site, "doctor", "mm_plugin_bad", "--json", "--timeout", "2")
    found = record(done, "mm_plugin_bad")
    assert (done.returncode, found["state"], found["code"]) == (1, "failed", code)
    assert part in found["error"]


def test_doctor_is_not_confused_by_what_a_plugin_prints(site: Any) -> None:
    site.install("mm-plugin-loud", "print('{\"plugins\": 1}')\nraise ImportError('no')", architectures=["Loud"])
    found = record(command(site, "doctor", "mm_plugin_loud", "--json"), "mm_plugin_loud")
    assert found["code"] == "import_error"


def test_doctor_does_not_import_a_disabled_plugin(site: Any) -> None:
    site.install("mm-plugin-off", "raise ImportError('no')", architectures=["Off"])
    done = command(site, "doctor", "mm_plugin_off", MM_PLUGIN_DISABLED="mm_plugin_off")
    assert done.returncode == 0
    assert "disabled" in done.stdout
    assert site.imports("mm_plugin_off") == 0


def test_doctor_reports_an_allow_list_with_a_typo(site: Any) -> None:
    site.install("mm-plugin-good", architectures=["Good"])
    done = command(site, "doctor", MM_PLUGIN_ONLY="mm_plugin_god")
    assert done.returncode == 1
    assert "did you mean 'mm_plugin_good'?" in done.stdout


@pytest.mark.parametrize("arguments", [("doctor", "nobody"), ("demo", "--model", "nobody")])
def test_an_unknown_plugin_is_one_line_and_exit_code_two(site: Any, arguments: tuple[str, ...]) -> None:
    done = command(site, *arguments)
    assert done.returncode == 2
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreadable_setting_is_one_line(site: Any) -> None:
    done = command(site, "list", MM_PLUGIN_THREADS="many")
    assert done.returncode == 2
    assert "MM_PLUGIN_THREADS" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [(), ("fly",), ("demo", "--chunk", "0"), ("doctor", "--timeout", "-1")])
def test_wrong_arguments_end_with_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_image_shows_text_and_items_in_prompt_order() -> None:
    import numpy as np

    from mm_plugin import Modality, MultimodalDataItem, MultimodalProcessorOutput
    from mm_plugin.demo import EmbeddingBoxes, sample_images

    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2, 5)])
    ids = np.arange(8)
    output = MultimodalProcessorOutput(input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0, mm_items=[item])
    boxes = EmbeddingBoxes(64, 64, tuple((x, y, x + 32, y + 32) for y in (0, 32) for x in (0, 32)))
    sheet = np.asarray(draw([[row_view("cat", sample_images()[1][1], boxes)]], output, chunk=4))
    # The strip is the last rows of cells: count the runs of the first item's color and of text in one line of pixels.
    line = next(row for row in sheet[::-1] if (row == (0, 114, 178)).all(axis=1).any())
    blue, gray = ((line == color).all(axis=1) for color in ((0, 114, 178), (176, 176, 182)))
    assert blue.sum() == 4 * 10
    assert gray.sum() == 4 * 10
    assert np.flatnonzero(gray)[0] < np.flatnonzero(blue)[0] < np.flatnonzero(gray)[-1]


def test_errors_of_ours_never_leave_as_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> int:
        raise MMPluginError("it went wrong")

    monkeypatch.setattr("mm_plugin.cli.list.list_plugins", fail)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "mm-plugin: it went wrong\n"


def test_the_demo_agrees_with_the_model_and_draws(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (Path(__file__).parent / "data" / "demo_plugin.py").read_text(encoding="utf-8")
    where = "mm_plugin_shown.model"
    spec = {"processor": f"{where}:Processor", "encoder": f"{where}:Model", "demo": f"{where}:Show"}
    hooks = site.hooks({"name": "shown", "architectures": ("Shown",), **spec})
    site.install("mm-plugin-shown", hooks, files={"mm_plugin_shown/model.py": source}, architectures=["Shown"])
    image = tmp_path / "deep" / "demo.png"
    arguments = ("demo", "--model", "mm_plugin_shown", "--out", str(image))
    done = command(site, *arguments, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything agrees" in done.stdout
    assert "0 decoded, 0 encoder calls" in done.stdout
    assert image.read_bytes().startswith(b"\x89PNG")
    # A model whose own forward returns something else must be seen to differ.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SHOWN_WRONG", "1")
    assert main(arguments) == 1
    assert "something differs" in capsys.readouterr().out
    # Built once: the second run found the checkpoint of the first.
    assert len(list((tmp_path / "mm-plugin" / "demo").iterdir())) == 1
