"""Whose fault it is: media that no processor takes, processors that break, arguments that do not exist, checkpoints with code."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_plugin import (
    LimitError,
    MediaError,
    NoModelError,
    PlaceholderError,
    ProcessorError,
    Registry,
    RequestError,
    Settings,
    UsageError,
    discover,
)
from mm_plugin.demo import sample_images
from mm_plugin_transformers_auto.learning import Model, Unlike
from mm_plugin_transformers_auto.testing import FAMILIES, make_checkpoint

Get = Callable[[str], Any]
HERE = [name for name, family in FAMILIES.items() if not family.needs and family.image and not family.refused]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.fixture
def fresh(registry: Registry, checkpoint: Get) -> Callable[[str], Any]:
    """A processor of its own, which a test may break."""
    return lambda family: registry.load_processor(checkpoint(family))


# ---------------------------------------------------------------- hostile media


@pytest.mark.parametrize("family", HERE)
def test_small_thin_and_odd_images_end_in_a_result_or_a_media_error(family: str, opened: Get, encoder: Get) -> None:
    processor = opened(family)
    palette = (
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8), "P") if False else Image.new("P", (30, 20), 3)
    )
    odd = [Image.new("RGB", size, (9, 99, 199)) for size in ((1, 1), (1, 3), (3, 1), (3, 3), (2, 90), (90, 2), (1, 64))]
    odd += [
        palette,
        Image.new("L", (40, 30), 7),
        Image.new("RGBA", (33, 31), (1, 2, 3, 0)),
        Image.new("CMYK", (20, 30)),
    ]
    served, refused = 0, []
    for image in odd:
        data = encoded(image, "TIFF" if image.mode == "CMYK" else "PNG")
        try:
            output = processor.process(FAMILIES[family].prompt(1), [data])
        except MediaError as error:
            refused.append(error.path)
            continue
        served += 1
        (item,) = output.mm_items
        rows = encoder(family).encode(item.modality, [item])[0].rows
        assert len(rows) == item.num_tokens
    assert served >= 8
    assert set(refused) <= {"images[0]"}


@pytest.mark.case("1.9")
@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("size", [(1, 2000), (2000, 1), (3, 400)])
def test_an_image_of_one_row_is_refused_before_it_becomes_gigabytes(
    family: str, size: tuple[int, int], opened: Get, decodes: list[str]
) -> None:
    with pytest.raises(MediaError, match=r"images\[0\]: .* more than 100 times the other") as caught:
        opened(family).process(FAMILIES[family].prompt(1), [encoded(Image.new("RGB", size))])
    assert caught.value.reason == "size"
    if family not in ("paligemma", "idefics2"):
        assert decodes == []


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from mm_plugin.media import ImageSource

    seen: list[str] = []
    original = ImageSource.decode
    monkeypatch.setattr(ImageSource, "decode", lambda self, **a: seen.append(self.path) or original(self, **a))
    return seen


def test_the_aspect_ratio_is_set_when_the_model_is_opened(registry: Registry, checkpoint: Get) -> None:
    wide = encoded(Image.new("RGB", (900, 3)))
    processor = registry.load_processor(checkpoint("llava"), max_aspect_ratio=300)
    assert len(processor.process("<image>", [wide]).mm_items) == 1
    with pytest.raises(UsageError, match="max_aspect_ratio"):
        processor.process("<image>", [wide], max_aspect_ratio=1000)


@pytest.mark.case("2.5")
@pytest.mark.parametrize("family", HERE)
def test_prompts_and_media_that_do_not_fit_are_refused(family: str, opened: Get, make_image: Any) -> None:
    for places, given in ((2, 1), (1, 2), (1, 0)):
        with pytest.raises(PlaceholderError):
            opened(family).process(FAMILIES[family].prompt(places), [make_image()] * given)
    if family != "paligemma":
        with pytest.raises(PlaceholderError):
            opened(family).process("no place", [make_image()])


def test_a_model_that_finds_the_places_itself_needs_none_in_the_prompt(
    opened: Get, make_image: Any, reference: Get
) -> None:
    found = opened("paligemma").process("what is this?", [make_image()])
    whole = reference("paligemma")(text=["what is this?"], images=[make_image()], return_tensors="pt")
    assert found.input_ids.tolist() == whole["input_ids"][0].tolist()


@pytest.mark.case("2.1")
def test_a_placeholder_that_a_client_types_stays_text(opened: Get, make_image: Any) -> None:
    for family in ("llava", "gemma3", "idefics3"):
        token = FAMILIES[family].image
        content = [{"type": "text", "text": f"a {token} b"}, {"type": "image"}]
        output = opened(family).process([{"role": "user", "content": content}], [make_image()])
        assert len(output.mm_items) == 1
        text = opened(family).checkpoint.tokenizer.decode(output.input_ids)
        assert f"a {token} b" in text
    content = [{"type": "text", "text": "a <image> b"}, {"type": "image"}]
    with pytest.raises(RequestError, match="takes its prompt as text"):
        opened("paligemma").process([{"role": "user", "content": content}], [make_image()])


# ---------------------------------------------------------------- processors that break


class Breaks:
    """Makes a checkpoint's image processor raise where a test says so."""

    def __init__(self, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.when: Callable[[Any, dict[str, Any]], bool] = lambda image, kwargs: True
        cls = type(processor.model._learnt.opened.processor.image_processor)
        original = cls.__call__

        def call(own: Any, images: Any, *arguments: Any, **kwargs: Any) -> Any:
            flat = [image for part in images for image in (part if isinstance(part, list) else [part])]
            if any(self.when(image, kwargs) for image in flat):
                raise IndexError("tuple index out of range")
            return original(own, images, *arguments, **kwargs)

        monkeypatch.setattr(cls, "__call__", call)


@pytest.fixture
def breaks(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Breaks]]:
    def make(family: str) -> tuple[Any, Breaks]:
        processor = fresh(family)
        return processor, Breaks(processor, monkeypatch)

    return make


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_processor_that_always_raises_is_the_plugins_fault_and_named(
    family: str, breaks: Any, make_image: Any
) -> None:
    processor, _ = breaks(family)
    cls = FAMILIES[family].processor["processor_class"]
    with pytest.raises(ProcessorError, match=rf"{cls} \(transformers [\d.]+\) raised IndexError") as caught:
        processor.process(FAMILIES[family].prompt(1), [make_image()], salt="broken")
    assert caught.value.plugin == "transformers_auto"
    assert caught.value.distribution == "mm-plugin-transformers-auto"


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_processor_that_raises_on_one_size_makes_it_the_mediums_fault(
    family: str, breaks: Any, make_image: Any
) -> None:
    processor, broken = breaks(family)
    broken.when = lambda image, kwargs: image.size == (77, 66)
    with pytest.raises(RequestError, match=rf"{FAMILIES[family].processor['processor_class']} .*IndexError"):
        processor.process(FAMILIES[family].prompt(2), [make_image(), make_image(0, 66, 77)])
    processor.process(FAMILIES[family].prompt(1), [make_image()])


def test_a_processor_that_raises_on_what_is_seen_makes_it_the_mediums_fault(breaks: Any, make_image: Any) -> None:
    processor, broken = breaks("llava")
    broken.when = lambda image, kwargs: image.getpixel((0, 0)) == (1, 2, 3)
    image = make_image()
    image.putpixel((0, 0), (1, 2, 3))
    with pytest.raises(MediaError, match=r"images\[1\]: LlavaProcessor"):
        processor.process("<image> <image>", [make_image(), image])


def test_tokens_that_depend_on_what_is_seen_are_found_out(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, make_image: Any
) -> None:
    processor = fresh("llava")
    alone = Model.alone

    def other(self: Model, kind: Any, media_input: Any, kwargs: Any) -> Any:
        found = alone(self, kind, media_input, kwargs)
        if media_input.getpixel((0, 0)) != (127, 127, 127):
            found = type(found)(np.append(found.ids, found.ids[-1:]), found.tensors, found.placeholder_affixes)
        return found

    monkeypatch.setattr(Model, "alone", other)
    with pytest.raises(ProcessorError, match="gives another prompt_ids than for a blank media input of this size"):
        processor.process("<image>", [make_image()], salt="other")


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


# ---------------------------------------------------------------- arguments


@pytest.mark.case("9.5")
def test_an_unknown_option_or_argument_is_refused_with_the_list_of_known_ones(opened: Get, make_image: Any) -> None:
    processor = opened("llava")
    with pytest.raises(UsageError, match=r"option 'do_resize' .* is unknown; options here: background, images_kwargs"):
        processor.process("<image>", [make_image()], do_resize=False)
    with pytest.raises(RequestError, match=r"no argument 'do_reisze' .*; there are: crop_size, .*do_resize"):
        processor.process("<image>", [make_image()], images_kwargs={"do_reisze": False})
    with pytest.raises(RequestError, match="no argument 'return_tensors'"):
        processor.process("<image>", [make_image()], images_kwargs={"return_tensors": "np"})
    with pytest.raises(RequestError, match="plain values"):
        processor.process("<image>", [make_image()], images_kwargs={"size": object()})
    with pytest.raises(RequestError, match="no argument 'do_reisze'"):
        opened("paligemma").process("<image>", [make_image()], images_kwargs={"do_reisze": False})


def test_an_argument_reaches_the_processor(opened: Get, reference: Get, make_image: Any) -> None:
    output = opened("llava").process("<image>", [make_image()], images_kwargs={"do_normalize": False})
    whole = reference("llava")(text=["<image>"], images=[make_image()], return_tensors="pt", do_normalize=False)
    assert np.array_equal(output.mm_items[0].feature, whole["pixel_values"])
    output = opened("paligemma").process("<image>", [make_image()], images_kwargs={"do_normalize": False})
    whole = reference("paligemma")(text=["<image>"], images=[make_image()], return_tensors="pt", do_normalize=False)
    assert np.array_equal(output.mm_items[0].feature, whole["pixel_values"])


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_an_argument_of_a_wrong_kind_is_the_requests_fault(family: str, opened: Get, make_image: Any) -> None:
    with pytest.raises(RequestError, match=r"options: .* raised") as caught:
        opened(family).process(FAMILIES[family].prompt(1), [make_image()], images_kwargs={"size": {"height": "tall"}})
    assert caught.value.path == "options"


def test_arguments_under_which_media_are_not_independent_are_refused(opened: Get, make_image: Any) -> None:
    """Pan and scan writes a sentence around an image that is wide enough, so the text around images depends on them."""
    with pytest.raises(RequestError, match="cannot be prepared one by one: the text around images depends on"):
        opened("gemma3").process("<start_of_image>", [make_image()], images_kwargs={"do_pan_and_scan": True})


def test_a_size_that_only_one_image_makes_depend_on_others_is_the_requests_fault(opened: Get) -> None:
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_ratio_to_activate": 5.0,
        "pan_and_scan_min_crop_size": 16,
    }
    with pytest.raises(RequestError, match="options: "):
        opened("gemma3").process("<start_of_image>", [Image.new("RGB", (600, 100))], images_kwargs=options)


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_request_has_no_image_made_larger_than_it_may_send(
    family: str, registry: Registry, checkpoint: Get, opened: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = opened(family)
    prompt = "<image>"
    monkeypatch.setattr(type(processor.model._learnt), "run", lambda *a, **k: pytest.fail("the processor ran"))
    monkeypatch.setattr(type(processor.model._learnt), "layout", lambda *a, **k: pytest.fail("the processor ran"))
    with pytest.raises(LimitError, match="more than 89478485 pixels") as caught:
        processor.process(prompt, [Image.new("RGB", (40, 30))], images_kwargs={"size": {"height": 60000, "width": 8}})
    assert caught.value.setting == "max_image_pixels"


def test_two_checkpoints_that_differ_only_in_their_processor_share_no_prepared_image(
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


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def folder(checkpoint: Get, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))


def change(folder: Path, name: str, **values: Any) -> None:
    described = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(described | values))


@pytest.fixture
def mark(folder: Path) -> Iterator[Path]:
    """Code in the checkpoint that leaves a mark when it is run."""
    mark = folder / "ran"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Strange: pass\n"
    (folder / "strange.py").write_text(code)
    yield mark
    assert not mark.exists()


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
def test_code_of_a_checkpoint_is_never_run(file: str, registry: Registry, folder: Path, mark: Path) -> None:
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


def test_code_that_transformers_does_not_need_does_no_harm(registry: Registry, folder: Path, mark: Path) -> None:
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
            "its processor cannot be opened|prepares no prompt",
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
    with pytest.raises(UsageError, match="prepares no prompt with media"):
        registry.load_processor(folder)


def test_a_processor_that_raises_from_the_start_is_refused_by_its_name(
    registry: Registry, checkpoint: Get, opened: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(opened("llava")._learnt.opened.processor)

    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(cls, "__call__", fail)
    with pytest.raises(UsageError, match=r"LlavaProcessor \(transformers .*IndexError"):
        registry.load_processor(checkpoint("llava"))


# ---------------------------------------------------------------- whether it is asked at all

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
def test_a_plugin_that_claims_the_model_is_not_passed_over_silently(
    claimed: None, checkpoint: Get, settings: Settings, make_image: Any
) -> None:
    with discover(settings) as registry:
        for load in (registry.load_processor, registry.load_encoder):
            with pytest.raises(NoModelError, match="broken_llava"):
                load(checkpoint("llava"))
        processor = registry.load_processor(checkpoint("llava"), fallback="always")
        encoder = registry.load_encoder(checkpoint("llava"), fallback="always")
        item = processor.process("<image>", [make_image()]).mm_items[0]
        assert encoder.encode(item.modality, [item])[0].rows.shape == (16, 32)
        assert registry.load_processor(checkpoint("llava_next")).spec.name.endswith("LlavaNextForConditionalGeneration")


def test_a_disabled_fallback_serves_nothing(checkpoint: Get) -> None:
    with discover(Settings(disabled=("transformers_auto",))) as registry, pytest.raises(NoModelError, match="Llava"):
        registry.load_processor(checkpoint("llava"))


def test_images_are_served(opened: Get) -> None:
    output = opened("idefics3").process(FAMILIES["idefics3"].prompt(2), [data for _, data in sample_images()])
    assert [item.num_tokens for item in output.mm_items] == [68, 52]


def test_unlike_is_no_error_of_the_package() -> None:
    assert not issubclass(Unlike, RequestError | UsageError)


def test_a_checkpoint_is_made_alike_every_time(tmp_path: Path) -> None:
    files = [make_checkpoint(tmp_path / str(index), "llava") / "model.safetensors" for index in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
