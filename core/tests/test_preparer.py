"""Whoever prepares tasks in place of the core's threads: its faults are the server's, those of a task stay with the task."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from toy import word_tokenizer

from mm_plugin import (
    BaseOptions,
    DecodedImage,
    MediaError,
    Modality,
    ModelProcessor,
    ModelSpec,
    PreparesBatches,
    Processor,
    ProcessorError,
    Replacement,
    Settings,
    UsageError,
)
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


class Batches(Rows, PreparesBatches):
    calls: ClassVar[list[int]] = []

    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Mapping[str, Any]], options: Any) -> list[Any]:
        self.calls.append(len(decoded))
        return [self.prepare(one, layout, options) for one, layout in zip(decoded, layouts, strict=True)]


class Folder:
    folder = "nowhere"
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


def test_a_batch_that_fails_is_the_plugin_s_fault_and_nothing_is_kept(open_rows: Open) -> None:
    processor = open_rows(cls=Batches)
    with pytest.raises(ProcessorError, match=r"Batches\.prepare_batch failed: ValueError: thirteen") as caught:
        processor.process("<image> <image>", images(13, 2))
    assert caught.value.plugin == "rows"
    assert (processor.cache_stats.pinned, processor.cache_stats.entries) == (0, 0)


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
