"""Which checkpoints are opened: code in them, parts that transformers does not know, and models that other plugins claim."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_plugin import NoModelError, Registry, Settings, UsageError, discover
from mm_plugin_transformers_auto.testing import make_checkpoint

Get = Callable[[str], Any]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.fixture
def folder(checkpoint: Get, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))


def change(folder: Path, name: str, **values: Any) -> None:
    described = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(described | values))


@pytest.fixture
def trace(folder: Path) -> Iterator[Path]:
    """Code in the checkpoint that creates a file when it is run."""
    trace = folder / "ran"
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass Strange: pass\n"
    (folder / "strange.py").write_text(code)
    yield trace
    assert not trace.exists()


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
def test_code_of_a_checkpoint_is_never_run(file: str, registry: Registry, folder: Path, trace: Path) -> None:
    if file == "config.json":
        named = {"AutoConfig": "strange.Strange", "AutoModel": "strange.Strange"}
        change(folder, file, model_type="strange", architectures=["StrangeForConditionalGeneration"], auto_map=named)
    else:
        change(folder, file, processor_class="StrangeProcessor", auto_map={"AutoProcessor": "strange.Strange"})
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match=r"needs trust_remote_code; this plugin never runs such code") as caught:
            load(folder)
        assert f"{file}: strange.Strange" in caught.value.message
    record = next(plugin for plugin in registry.plugins if plugin.name == "transformers_auto")
    assert "trust_remote_code" in str({model.checkpoint: model.error for model in record.opened}[str(folder)])


def test_code_that_transformers_does_not_need_is_ignored(registry: Registry, folder: Path, trace: Path) -> None:
    change(folder, "config.json", auto_map={"AutoConfig": "strange.Strange", "AutoModel": "strange.Strange"})
    assert registry.load_processor(folder).spec.notes["trust_remote_code"] == "off"


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("config.json", {"model_type": "unheard_of"}, "its config cannot be opened"),
        ("config.json", {"architectures": ["NoSuchModel"]}, None),
        (
            "processor_config.json",
            {"processor_class": "NoSuchProcessor"},
            "its processor cannot be opened|expected a processor of prompts with media",
        ),
        (
            "processor_config.json",
            {"image_processor": {"image_processor_type": "NoSuch"}},
            "its processor cannot be opened",
        ),
    ],
)
def test_a_checkpoint_that_transformers_cannot_open_is_refused(
    file: str, values: dict[str, Any], said: str | None, registry: Registry, folder: Path
) -> None:
    change(folder, file, **values)
    if said is None:  # the type of the config decides
        assert registry.load_processor(folder).spec.name == "transformers_auto.LlavaForConditionalGeneration"
        return
    with pytest.raises(UsageError, match=said) as caught:
        registry.load_processor(folder)
    assert str(folder) in caught.value.message


def test_a_text_model_is_refused(registry: Registry, folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    text = described["text_config"] | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(text))
    (folder / "processor_config.json").unlink()
    with pytest.raises(UsageError, match="expected a processor of prompts with media"):
        registry.load_processor(folder)


def test_a_processor_that_raises_from_the_start_is_refused_by_its_name(
    registry: Registry, checkpoint: Get, opened: Get, probed: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(probed(opened("llava")).opened.processor)

    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(cls, "__call__", fail)
    with pytest.raises(UsageError, match=r"LlavaProcessor \(transformers .*IndexError"):
        registry.load_processor(checkpoint("llava"))


def test_a_checkpoint_is_made_alike_every_time(tmp_path: Path) -> None:
    files = [make_checkpoint(tmp_path / str(index), "llava") / "model.safetensors" for index in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_checkpoints_that_differ_only_in_their_processor_do_not_share_prepared_images(
    registry: Registry, checkpoint: Get, tmp_path: Path, make_image: Any
) -> None:
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "other"))
    described = json.loads((folder / "processor_config.json").read_text())
    described["image_processor"]["do_normalize"] = False
    (folder / "processor_config.json").write_text(json.dumps(described))
    data = encoded(make_image())
    one, other = registry.load_processor(checkpoint("llava")), registry.load_processor(folder)
    left, right = (processor.process("<image>", [data]).mm_items[0] for processor in (one, other))
    assert left.identity != right.identity
    assert one.prepare_item("image", data).source_key != other.prepare_item("image", data).source_key


def test_many_threads_share_one_processor(opened: Get, make_image: Any) -> None:
    processor = opened("llava_next")
    sizes = [(20 + 7 * index, 90 - 3 * index) for index in range(12)]
    expected = [processor.process("a <image>", [make_image(0, *size)]).mm_items[0].identity for size in sizes]
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        found[index] = processor.process("a <image>", [make_image(0, *sizes[index])], salt=None).mm_items[0].identity

    with discover(Settings(threads=4)) as own:
        other = own.load_processor(processor.checkpoint.folder)
        results: dict[int, Any] = {}

        def fresh_work(index: int) -> None:
            results[index] = other.process("a <image>", [make_image(0, *sizes[index])]).mm_items[0].identity

        threads = [threading.Thread(target=step, args=(n,)) for n in range(12) for step in (work, fresh_work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[index] for index in range(12)] == expected
    assert [results[index] for index in range(12)] == expected


# ---------------------------------------------------------------- whether the fallback serves at all

HOOKS = """
from mm_plugin import Modality, ModelSpec, hookimpl
raise RuntimeError("lost")
"""


@pytest.fixture
def claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin that claims LLaVA, really installed."""
    site = tmp_path / "site"
    (site / "broken_llava").mkdir(parents=True)
    (site / "broken_llava" / "__init__.py").touch()
    (site / "broken_llava" / "hooks.py").write_text(HOOKS)
    info = site / "broken_llava-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-llava\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mm_plugin]\nbroken_llava = broken_llava.hooks\n"
        "[mm_plugin.architectures]\nLlavaForConditionalGeneration = broken_llava.hooks\n"
    )
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("settings", [Settings(), Settings(disabled=("broken_llava",))])
def test_a_plugin_that_claims_the_model_is_not_replaced_silently(
    claimed: None, checkpoint: Get, settings: Settings, make_image: Any
) -> None:
    with discover(settings) as registry:
        for load in (registry.load_processor, registry.load_encoder):
            with pytest.raises(NoModelError, match="broken_llava"):
                load(checkpoint("llava"))
        processor = registry.load_processor(checkpoint("llava"), fallback="always")
        encoder = registry.load_encoder(checkpoint("llava"), fallback="always")
        item = processor.process("<image>", [make_image()]).mm_items[0]
        assert encoder.encode(item.modality, [item])[0].embeddings.shape == (16, 32)
        assert registry.load_processor(checkpoint("llava_next")).spec.name.endswith("LlavaNextForConditionalGeneration")


def test_a_disabled_fallback_serves_nothing(checkpoint: Get) -> None:
    with discover(Settings(disabled=("transformers_auto",))) as registry, pytest.raises(NoModelError, match="Llava"):
        registry.load_processor(checkpoint("llava"))
