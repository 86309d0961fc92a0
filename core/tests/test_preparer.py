"""Whoever prepares tasks in place of the core's threads: its faults are the server's, those of a task stay with the task."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from toy import word_tokenizer

from mm_plugin import (
    BaseOptions,
    DecodedImage,
    LimitError,
    MediaError,
    Modality,
    ModelProcessor,
    ModelSpec,
    PlaceholderError,
    PreparesBatches,
    Processor,
    ProcessorError,
    Replacement,
    RequestError,
    Settings,
    UsageError,
)
from mm_plugin.media import MEDIA_KINDS
from mm_plugin.runtime import Runtime
from mm_plugin.tasks import Prepared, PrepareTask

SPEC = ModelSpec(
    name="rows",
    output_version=1,
    modalities=(Modality.IMAGE,),
    placeholders={Modality.IMAGE: "<image>"},
    fields={Modality.IMAGE: ("rows",)},
    padding="runs",
    processor="rows:Rows",
    encoder="rows:Encoder",
)
OWNER = {"plugin": "rows", "distribution": "mm-plugin-rows", "version": "1"}


class Rows(ModelProcessor):
    """A row for each row of pixels; an image whose first level is 13 cannot be prepared."""

    Options = BaseOptions

    def context(self, counts: Mapping[Modality, int]) -> None:
        return None

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> dict[str, Any]:
        return {"rows": size.height}

    def prepare(self, decoded: DecodedImage, layout: Mapping[str, Any], options: Any) -> Any:
        if decoded.pixels[0, 0, 0] == 13:
            raise ValueError("thirteen")
        return decoded.pixels.mean(axis=1)

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], layout["rows"])


class Scale(BaseOptions, frozen=True, kw_only=True):
    scale: int = 1


class Batches(Rows, PreparesBatches):
    calls: ClassVar[list[int]] = []

    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Mapping[str, Any]], options: Any) -> list[Any]:
        self.calls.append(len(decoded))
        return [self.prepare(one, layout, options) for one, layout in zip(decoded, layouts, strict=True)]


class Folder:
    folder = Path("nowhere")
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer(["<image>"])

    def preprocessor(self, modality: Modality) -> dict[str, Any]:
        return {}


Open = Callable[..., Processor]


@pytest.fixture
def open_rows() -> Any:
    opened: list[Runtime] = []

    def make(preparer: Any = None, cls: type[ModelProcessor] = Rows) -> Processor:
        opened.append(Runtime(Settings(threads=2), preparer=preparer))
        return Processor(cls, SPEC, Folder(), opened[-1], {}, owner=OWNER)  # type: ignore[arg-type]

    yield make
    for runtime in opened:
        runtime.close()


def digest_of(image: Any) -> bytes:
    return MEDIA_KINDS[Modality.IMAGE].open(image, path="images[0]", settings=Settings()).digest()


def images(*levels: int) -> list[np.ndarray]:
    return [np.full((2, 3, 3), level, np.uint8) for level in levels]


class Asked:
    """Prepares by another processor of the same model, and remembers what it was asked."""

    def __init__(self, other: Processor) -> None:
        self.other, self.tasks = other, list[PrepareTask]()

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        self.tasks += tasks
        return [pickle.loads(pickle.dumps(one)) for one in self.other.prepare_tasks(pickle.loads(pickle.dumps(tasks)))]


def test_tasks_go_to_the_preparer_and_its_results_are_cached(open_rows: Open) -> None:
    asked = Asked(open_rows())
    processor = open_rows(asked)
    output = processor.process("<image> <image>", images(1, 2))
    assert [task.path for task in asked.tasks] == ["images[0]", "images[1]"]
    own = open_rows().process("<image> <image>", images(1, 2))
    assert [item.identity for item in output.mm_items] == [item.identity for item in own.mm_items]
    assert np.array_equal(output.padded_input_ids, own.padded_input_ids)
    processor.process("<image> <image>", images(2, 2))
    assert len(asked.tasks) == 2
    assert isinstance(processor.prepare_item("image", images(3)[0]).feature, np.ndarray)
    assert len(asked.tasks) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        lambda tasks: [],
        lambda tasks: None,
        lambda tasks: [None] * len(tasks),
        lambda tasks: [b"prepared"] * len(tasks),
        lambda tasks: [*[None] * len(tasks), None],
        lambda tasks: 1 / 0,
        lambda tasks: exec("raise SystemExit(3)"),
    ],
    ids=["too few", "nothing", "none", "bytes", "too many", "raises", "exits"],
)
def test_a_preparer_that_breaks_its_contract_is_the_server_s_fault(
    open_rows: Open, answer: Callable[[Any], Any], asynchronous: bool
) -> None:
    class Broken:
        def prepare(self, tasks: Sequence[Any]) -> Any:
            return answer(tasks)

    processor = open_rows(Broken())
    ask = (
        (lambda: asyncio.run(processor.process_async("<image> <image>", images(1, 2))))
        if asynchronous
        else (lambda: processor.process("<image> <image>", images(1, 2)))
    )
    with pytest.raises(UsageError, match="preparer") as caught:
        ask()
    assert caught.value.argument == "preparer"
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 0)


def test_the_error_of_a_task_is_raised_as_it_is_and_the_others_are_kept(open_rows: Open) -> None:
    processor = open_rows(Asked(open_rows()))
    with pytest.raises(ProcessorError, match=r"Rows\.prepare failed on images\[1\]: ValueError: thirteen"):
        processor.process("<image> <image> <image>", images(1, 13, 2))
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 2)


def test_an_error_that_two_requests_share_has_the_path_of_each(open_rows: Open) -> None:
    class Refuses:
        def prepare(self, tasks: Sequence[PrepareTask]) -> list[Any]:
            return [MediaError(f"{task.path}: no", path=task.path, reason="broken") for task in tasks]

    processor = open_rows(Refuses())
    with pytest.raises(MediaError) as caught:
        processor.process("<image> <image>", images(1, 1))
    assert caught.value.path == "images[0]"


def test_many_images_are_prepared_in_one_call(open_rows: Open) -> None:
    Batches.calls.clear()
    processor = open_rows(cls=Batches)
    output = processor.process("<image> <image> <image>", images(1, 2, 1))
    assert Batches.calls == [2]
    own = open_rows().process("<image> <image> <image>", images(1, 2, 1))
    assert [item.identity for item in output.mm_items] == [item.identity for item in own.mm_items]
    processor.process("<image>", images(5))  # one alone goes to `prepare`
    assert Batches.calls == [2]


def test_an_image_that_spoils_its_batch_fails_alone(open_rows: Open) -> None:
    processor = open_rows(cls=Batches)
    with pytest.raises(ProcessorError, match=r"Batches\.prepare failed on images\[0\]: ValueError: thirteen") as caught:
        processor.process("<image> <image>", images(13, 2))
    assert caught.value.plugin == "rows"
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 1)


def test_a_batch_that_fails_though_each_alone_would_not_is_the_plugin_s_fault(open_rows: Open) -> None:
    class Wrong(Batches):
        def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> Any:
            raise ValueError("fourteen")

    processor = open_rows(cls=Wrong)
    with pytest.raises(ProcessorError, match=r"Wrong\.prepare_batch failed: ValueError: fourteen"):
        processor.process("<image> <image>", images(1, 2))
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 0)


def test_tasks_of_several_options_are_batched_by_their_options(open_rows: Open) -> None:
    class Scaled(Batches):
        Options = Scale  # type: ignore[assignment]

        def prepare(self, decoded: DecodedImage, layout: Mapping[str, Any], options: Scale) -> Any:
            return decoded.pixels.mean(axis=1) * options.scale

    Scaled.calls.clear()
    asked = Asked(open_rows(cls=Scaled))
    processor = open_rows(asked, cls=Scaled)
    for scale, levels in ((2, (1, 2)), (3, (1, 2))):
        processor.process("<image> <image>", images(*levels), scale=scale)
    assert Scaled.calls == [2, 2]
    # The same tasks in one call, as a worker gets them that serves several requests.
    worker = open_rows(cls=Scaled)
    mixed = [asked.tasks[index] for index in (0, 2, 1, 3)]
    assert [one.feature[0, 0] for one in worker.prepare_tasks(mixed)] == [2, 3, 4, 6]
    assert Scaled.calls == [2, 2, 2, 2]


def test_views_of_one_array_are_kept_as_arrays_of_their_own(open_rows: Open) -> None:
    class Views(Batches):
        def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> Any:
            rows = np.stack([one.pixels.mean(axis=1) for one in decoded] + [np.zeros((2, 3))] * 1000)
            return list(rows[: len(decoded)])

    processor = open_rows(cls=Views)
    output = processor.process("<image> <image>", images(1, 2))
    assert all(item.feature.base is None for item in output.mm_items)
    assert processor.cache_stats.bytes < 1000


def test_fields_and_replacement_are_those_of_the_task_whoever_prepared_it(open_rows: Open) -> None:
    class Renames(Asked):
        def prepare(self, tasks: Sequence[Any]) -> list[Any]:
            other = Replacement.repeat(7, 5)
            return [
                msgspec.structs.replace(one, fields={"rows": 99}, replacement=other) for one in super().prepare(tasks)
            ]

    output = open_rows(Renames(open_rows())).process("<image>", images(1))
    assert (output.mm_items[0].rows, output.mm_items[0].num_tokens) == (2, 2)


@pytest.mark.parametrize("wrong", ["text", None, 5, "another model's"])
def test_a_worker_refuses_what_is_not_a_task_of_its_model(open_rows: Open, wrong: Any) -> None:
    asked = Asked(open_rows())
    open_rows(asked).process("<image>", images(1))
    (task,) = asked.tasks
    if wrong == "another model's":
        wrong = msgspec.structs.replace(task, model=msgspec.structs.replace(task.model, plugin="columns"))
    with pytest.raises(UsageError, match="tasks: expected tasks of ModelRef") as caught:
        open_rows().prepare_tasks([task, wrong])
    assert caught.value.argument == "tasks"
    assert len({task.model: 1, pickle.loads(pickle.dumps(task.model)): 2}) == 1  # a worker's table of open models


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: MediaError(f"{path}: broken", path=path, reason="broken"),
        lambda path: LimitError(f"{path}: too large", path=path, setting="max_pixels"),
        lambda path: RequestError(f"{path}: no", path=path),
        lambda path: PlaceholderError(f"{path}: none", path=path),
        lambda path: ProcessorError(f"Rows.prepare failed on {path}: KeyError", plugin="rows"),
    ],
    ids=["media", "limit", "request", "placeholder", "processor"],
)
def test_an_error_that_several_requests_wait_for_has_the_place_of_each(
    open_rows: Open, make: Callable[[str], Exception], asynchronous: bool
) -> None:
    """Two requests bring one image at different places while it is prepared; each learns where it stands in its own."""
    ready, both = threading.Event(), threading.Event()

    class Fails(Asked):
        def prepare(self, tasks: Sequence[Any]) -> list[Any]:
            ready.set()
            assert both.wait(10)
            return [
                make(task.path) if task.source.digest() == bad else one
                for task, one in zip(tasks, super().prepare(tasks), strict=True)
            ]

    bad = digest_of(images(1)[0])
    processor = open_rows(Fails(open_rows()))
    found: dict[str, Exception] = {}

    def ask(prompt: str, media: list[Any], name: str) -> None:
        try:
            if asynchronous:
                asyncio.run(processor.process_async(prompt, media))
            else:
                processor.process(prompt, media)
        except Exception as error:
            found[name] = error

    first = threading.Thread(target=ask, args=("<image> <image>", images(2, 1), "images[1]"))
    first.start()
    assert ready.wait(10)
    second = threading.Thread(target=ask, args=("<image>", images(1), "images[0]"))
    second.start()
    deadline = time.monotonic() + 10
    while processor.cache_stats.joins < 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    both.set()
    first.join(10)
    second.join(10)
    assert set(found) == {"images[0]", "images[1]"}
    for place, error in found.items():
        assert type(error) is type(make("x"))
        assert place in str(error)
        assert getattr(error, "path", None) in (place, None)
    assert found["images[0]"] is not found["images[1]"]


def test_a_broken_file_fails_alone_and_the_batch_goes_on(open_rows: Open) -> None:
    Batches.calls.clear()
    processor = open_rows(cls=Batches)
    broken = b"\x89PNG\r\n\x1a\n" + bytes(60)
    with pytest.raises(MediaError) as caught:
        processor.process("<image> <image> <image>", [*images(1), broken, *images(2)])
    assert caught.value.path == "images[1]"


@pytest.mark.parametrize("answer", [None, [], "ab", [np.zeros(1)]], ids=["none", "too few", "text", "one"])
def test_a_batch_of_another_length_is_the_plugin_s_fault(open_rows: Open, answer: Any) -> None:
    class Wrong(Batches):
        def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> Any:
            return answer

    with pytest.raises(ProcessorError, match="prepare_batch must return a feature for each of 2"):
        open_rows(cls=Wrong).process("<image> <image>", images(1, 2))


def test_prepared_items_say_how_many_bytes_they_keep() -> None:
    feature = np.zeros((4, 2), np.float32)
    prepared = Prepared({"rows": 4}, Replacement.repeat(9, 4), feature, b"i" * 32)
    assert prepared.num_bytes >= feature.nbytes
