"""Documentation is tested: what it lists is all there is, and its examples run."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLModel

import mm_plugin
from mm_plugin import SampledVideo, Settings, VideoFrames, discover, errors, hookspecs
from mm_plugin.cli.main import build_parser
from mm_plugin.demo import sample_images
from mm_plugin.media import open_video
from mm_plugin.settings import PREFIX
from mm_plugin_qwen2vl.testing import make_checkpoint, qwen_tokenizer, tiny_config

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def documented(page: str) -> set[str]:
    """Every word that stands in backticks on a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[\w.-]+", code)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples take as given: a checkpoint, an image, the model's text embedding."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return {
        "checkpoint": folder,
        "image": sample_images()[0][1],
        "embedding": torch.nn.Embedding(320, 64),
    }


def test_readme_example_embeds_a_prompt(world: dict[str, Any]) -> None:
    (source,) = [block for block in blocks(ROOT / "README.md", "python") if "embed_mm_inputs(" in block]
    names = dict(world)
    exec(compile(source, "README.md", "exec"), names)
    assert names["step"].failed == ()
    names["registry"].close()


def test_readme_example_declares_a_model() -> None:
    (source,) = [block for block in blocks(ROOT / "README.md", "python") if "mm_register_models" in block]
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert names["mm_register_models"]().architectures == ("MyVLForConditionalGeneration",)


def test_the_page_on_embedding_runs_from_top_to_bottom(
    world: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names = dict(world)
    for source in blocks(ROOT / "docs" / "embedding.md", "python"):
        exec(compile(source, "docs/embedding.md", "exec"), names)
    said = capsys.readouterr().out
    assert "rows in the first chunk" in said
    assert "HTTP 400" not in said
    assert names["step"].failed == ()


def test_the_page_on_media_runs_from_top_to_bottom(world: dict[str, Any]) -> None:
    names = dict(world)
    sources = blocks(ROOT / "docs" / "media.md", "python")
    assert len(sources) >= 5
    for source in sources:
        exec(compile(source, "docs/media.md", "exec"), names)


def test_every_reason_of_a_media_error_is_documented() -> None:
    media = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "core/src/mm_plugin/media").glob("*.py"))
    reasons = set(re.findall(r'reason="(\w+)"', media))
    assert {"type", "url", "broken", "mode", "metadata"} <= reasons
    page = (ROOT / "docs" / "media.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert reasons - set(re.findall(r"\w+", " ".join(listed))) == set()


def test_the_plugin_of_the_page_on_plugins_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "writing-a-plugin.md"
    site = tmp_path / "site"
    sources = blocks(page, "python")
    (trial,) = [source for source in sources if source.startswith("# try it")]
    for source in sources:
        if source is trial:
            continue
        name = re.match(r"# (\S+)\n", source)
        assert name is not None
        (site / name[1]).parent.mkdir(parents=True, exist_ok=True)
        (site / name[1]).write_text(source)
    (site / "tiny_vl" / "__init__.py").touch()
    install(site, tomllib.loads(blocks(page, "toml")[0]))
    monkeypatch.syspath_prepend(site)
    try:
        exec(compile(trial, str(page), "exec"), {"checkpoint": tiny_vl_checkpoint(tmp_path / "checkpoint")})
        with discover() as registry:
            states = {record.name: record.state for record in registry.plugins}
            assert registry.resolve({"architectures": ["TinyVLForConditionalGeneration"]}).name == "tiny_vl"
        assert states["tiny_vl"] == "available"
        try_videos(importlib.import_module("tiny_vl.videos").Videos())
        assert importlib.import_module("tiny_vl.grids").GridOptions().factor == 32
        monkeypatch.setenv("PYTHONPATH", str(site))
        try_shared_tests(importlib.import_module("tiny_vl.test_tiny_vl"), tmp_path / "checkpoint")
    finally:
        for module in [name for name in sys.modules if name.partition(".")[0] == "tiny_vl"]:
            del sys.modules[module]


def try_shared_tests(module: Any, checkpoint: Path) -> None:
    """The page's own test classes, with what pytest would pass to them."""
    with discover() as registry:
        module.TestOptions().test_every_option_that_changes_an_item_changes_its_source_key(registry, checkpoint)
        corpus = module.TestCorpus()
        for modality in corpus.modalities:
            corpus.test_every_odd_media_input_is_taken_or_refused_as_it_must(
                registry.load_processor(checkpoint), modality
            )
    module.TestImports().test_light_modules_import_neither_torch_nor_transformers()
    module.TestImports().test_what_serves_imports_no_demo_no_command_and_no_kit()


def try_videos(videos: Any) -> None:
    """What the page says of videos, on one of nine frames at three a second."""
    source = open_video(VideoFrames(np.zeros((9, 30, 40, 3), np.uint8), fps=3), path="videos[0]", settings=Settings())
    chosen = videos.sample(source.probe(), None)
    assert chosen.indices.tolist() == [0, 2, 3, 5, 6, 8]
    assert chosen.fps == 2
    size = SampledVideo(30, 40, chosen.indices, chosen.timestamps, chosen.fps)
    patches = videos.prepare(source.decode(size), {"height": 28, "width": 56}, None)
    assert patches.shape == (3 * 2 * 4, 3, 2 * 14 * 14)


def test_the_page_on_positions_behind_a_video_tells_what_both_rules_give(tmp_path: Path) -> None:
    page = ROOT / "docs" / "video-positions.md"
    names: dict[str, Any] = {}
    for source in blocks(page, "python"):
        exec(compile(source, str(page), "exec"), names)
    config = tiny_config(qwen_tokenizer())
    ids = torch.tensor(
        [[0, 0, config.vision_start_token_id, *[config.video_token_id] * 16, config.vision_end_token_id, 0, 0]]
    )
    theirs, _ = Qwen2VLModel(config).get_rope_index(
        ids, (ids == config.video_token_id).int() * 2, video_grid_thw=torch.tensor([[4, 4, 4]])
    )
    ours = names["ids"]
    assert np.array_equal(ours[:, :19], theirs[:, 0, :19].numpy())
    rows = [
        re.findall(r"\d+", line)
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| time, ")
    ]
    steps = [0, 1, 2, 3, 7, 11, 15, 19, 20, 21]
    assert [int(cell) for cell in rows[0]] == ours[0, steps].tolist()
    assert [int(cell) for cell in rows[1][2:]] == theirs[0, 0, steps].tolist()  # 5.24 stands in the row's name


def install(site: Path, described: dict[str, Any]) -> None:
    """Write the metadata that a packaging tool writes from a pyproject.toml."""
    project = described["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    head = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    folder.joinpath("METADATA").write_text(
        "\n".join([*head, *(f"Requires-Dist: {r}" for r in project["dependencies"])]) + "\n"
    )
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    folder.joinpath("entry_points.txt").write_text("\n".join(sections))
    importlib.invalidate_caches()


def tiny_vl_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["TinyVLForConditionalGeneration"], "vocab_size": 8})
    )
    (folder / "preprocessor_config.json").write_text("{}")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "here": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(str(folder))
    save_file({"vision.weight": torch.ones(8, 3)}, folder / "model.safetensors")
    return folder


def test_every_public_name_is_documented() -> None:
    assert set(mm_plugin.__all__) - {"__version__"} - documented("reference.md") == set()


def test_every_error_and_code_is_documented() -> None:
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.MMPluginError)
    ]
    names = {cls.__name__ for cls in classes} | {cls.code for cls in classes}
    assert len(classes) >= 15
    assert names - documented("reference.md") == set()


def test_every_hook_is_documented() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("mm_register_")}
    assert hooks
    assert hooks - documented("reference.md") == set()


def test_every_record_code_is_documented() -> None:
    source = "".join(
        (ROOT / "core/src/mm_plugin" / name).read_text(encoding="utf-8") for name in ("registry.py", "cli/plugins.py")
    )
    codes = set(
        re.findall(
            r'\bcode[\w, ]* = "(\w+)"|code="(\w+)"|_lost\(record, "(\w+)"|_mark_conflict\(\w+, .*?, "(\w+)"',
            source,
        )
    )
    found = {code for group in codes for code in group if code}
    assert {"missing_module", "claim_mismatch", "crashed", "name_conflict"} <= found
    assert found - documented("reference.md") == set()


def test_every_option_of_the_command_is_documented() -> None:
    known = documented("reference.md")
    options = set(walk_options(build_parser()))
    assert {"--json", "--chunk", "doctor"} <= options
    assert {option.lstrip("-") for option in options} - {word.lstrip("-") for word in known} == set()


def walk_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield name
                yield from walk_options(sub)
        elif "--help" not in action.option_strings:
            yield from action.option_strings


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs/settings.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for field in msgspec.structs.fields(Settings):
        shown = rows.pop(PREFIX + field.name.upper())
        if field.name != "threads":
            assert shown == ("empty" if field.default in ((), "") else str(field.default)), field.name
    assert rows == {}


def test_commands_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for target in re.findall(
            r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`{1,3}[^`]+`{1,3}", page.read_text(encoding="utf-8")))
        ):
            assert target in targets, f"{page.name}: make {target}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_room_is_in_the_table_of_the_architecture() -> None:
    rooms = {
        path.stem
        for path in (ROOT / "core/src/mm_plugin").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert rooms - {"__init__"} <= listed


def test_bundled_images_are_small_and_say_whose_they_are() -> None:
    folder = ROOT / "core/src/mm_plugin/data"
    told = (folder / "README.md").read_text(encoding="utf-8")
    for name, data in sample_images():
        assert name in told
        assert len(data) < 1_000_000
