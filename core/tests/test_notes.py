"""Notes: what was served otherwise than asked, from whoever knows it to the item and to the observers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from toy import PlainToy, audio, img, toy_spec

from mm_plugin import (
    BaseOptions,
    JointItem,
    JointOutput,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    NotedFields,
    PreparesBatches,
    ProcessesJointly,
    ProcessorError,
    Replacement,
    Sampling,
    UsageError,
    VideoFrames,
    VideoSize,
)
from mm_plugin.events import MediaNote
from mm_plugin.media import ImageSource, SampledVideo
from mm_plugin.tasks import Prepared

Open = Callable[..., Any]
IMAGE, VIDEO, AUDIO = Modality
SPEC = toy_spec(*Modality)
PROMPT = "<image> <video> <audio>"
FROM_LAYOUT, FROM_SAMPLE, FROM_MEDIA = "the layout's note", "the sampling's note", "the media input's note"
ORDER = ["images[0]", "videos[0]", "audios[0]"]


class Noting(PlainToy):
    """Has something to say about every media input, in `layout` and of a video in `sample`."""

    def sample(self, size: VideoSize, options: Any) -> Sampling:
        return Sampling.of(size, np.arange(size.frames), [FROM_SAMPLE])

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> Any:
        return NotedFields(super().layout(modality, size, options, context), [f"{FROM_LAYOUT} on {modality.argument}"])


class BatchNoting(Noting, PreparesBatches):
    """The same, prepared in one call."""

    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> list[Any]:
        return [self.prepare(one, layout, options) for one, layout in zip(decoded, layouts, strict=True)]


EXPECTED = [
    (f"{FROM_LAYOUT} on images",),
    (FROM_SAMPLE, f"{FROM_LAYOUT} on videos"),
    (f"{FROM_LAYOUT} on audios",),
]


def media(seed: int = 0) -> dict[str, list[Any]]:
    frames = np.stack([img(seed + 10), img(seed + 11)])
    return {
        "images": [img(seed)],
        "videos": [VideoFrames(frames, fps=2.0, sampled=False)],
        "audios": [audio(seed)],
    }


def noted(events: list[Any]) -> list[tuple[str, str, str]]:
    return [(event.path, event.modality, event.note) for event in events if isinstance(event, MediaNote)]


@pytest.mark.parametrize("author", [Noting, BatchNoting])
def test_what_sample_and_layout_say_reaches_the_item_and_the_observers_found_or_prepared(
    open_words: Open, events: list[Any], author: Any
) -> None:
    processor = open_words(author, SPEC)
    expected = [
        (path, Modality.parse(path[:-4]).name.lower(), note)
        for path, notes in zip(ORDER, EXPECTED, strict=True)
        for note in notes
    ]
    identities = []
    for _ in ("prepared", "found in the cache"):
        events.clear()
        output = processor.process(PROMPT, **media())
        assert [item.notes for item in output.mm_items] == EXPECTED
        assert noted(events) == expected
        identities.append([item.identity for item in output.mm_items])
    assert processor.cache_stats.hits == 3
    assert identities[0] == identities[1]
    # Notes are neither a part of the identity nor a model field.
    plain = open_words(PlainToy, SPEC).process(PROMPT, **media())
    assert [item.identity for item in plain.mm_items] == identities[0]
    assert [item.model_specific_data for item in plain.mm_items] == [i.model_specific_data for i in output.mm_items]
    assert [item.notes for item in plain.mm_items] == [()] * 3


@pytest.mark.parametrize("times", [1, 3])
def test_one_event_for_each_item_of_a_repeated_media_input(open_words: Open, events: list[Any], times: int) -> None:
    open_words(Noting, SPEC).process(" ".join(["<image>"] * times), [img()] * times)
    assert [path for path, *_ in noted(events)] == [f"images[{index}]" for index in range(times)]


class Growing(Sequence[Any]):
    """Frames that say only at their end what was wrong with them."""

    def __init__(self, frames: Sequence[Any], notes: list[str]) -> None:
        self.frames, self.notes = frames, notes

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: Any) -> Any:
        return self.frames[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self.frames
        self.notes.append(FROM_MEDIA)


@pytest.fixture
def media_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source of an image or a video has a note, a video's only once its frames are read."""
    from mm_plugin.media.video import GivenFrames

    image, video = ImageSource.decode, GivenFrames.decode

    def decode_image(self: Any, *size: Any, **arguments: Any) -> Any:
        return msgspec.structs.replace(image(self, *size, **arguments), notes=(FROM_MEDIA,))

    def decode_video(self: Any, *size: Any, **arguments: Any) -> Any:
        decoded, notes = video(self, *size, **arguments), list[str]()
        return msgspec.structs.replace(decoded, frames=Growing(list(decoded.frames), notes), notes=notes)

    monkeypatch.setattr(ImageSource, "decode", decode_image)
    monkeypatch.setattr(GivenFrames, "decode", decode_video)


@pytest.mark.usefixtures("media_notes")
@pytest.mark.parametrize("author", [Noting, BatchNoting])
def test_what_decoding_says_is_kept_too(open_words: Open, events: list[Any], author: Any) -> None:
    processor = open_words(author, SPEC)
    expected = [(*EXPECTED[0], FROM_MEDIA), (*EXPECTED[1], FROM_MEDIA), EXPECTED[2]]
    for _ in ("prepared", "found in the cache"):
        output = processor.process(PROMPT, **media())
        assert [item.notes for item in output.mm_items] == expected
    one = processor.prepare_item("video", media()["videos"][0])
    assert (one.notes, one.cached) == (expected[1], True)
    assert sum(note == FROM_MEDIA for *_, note in noted(events)) == 4


class Elsewhere:
    """Prepares in another processor; everything goes there and back pickled."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def prepare(self, tasks: Sequence[Any]) -> list[Any]:
        return [
            pickle.loads(pickle.dumps(one)) for one in self.processor.prepare_tasks(pickle.loads(pickle.dumps(tasks)))
        ]


def elsewhere(open_words: Open, make_runtime: Open, author: Any, spec: Any, **arguments: Any) -> Any:
    """A processor that has its tasks prepared in another one."""
    runtime = make_runtime()
    runtime.preparer = Elsewhere(open_words(author, spec, **arguments))
    return open_words(author, spec, runtime=runtime, **arguments)


@pytest.mark.usefixtures("media_notes")
def test_notes_come_back_from_a_worker(open_words: Open, make_runtime: Open, events: list[Any]) -> None:
    output = elsewhere(open_words, make_runtime, Noting, SPEC).process(PROMPT, **media())
    assert [item.notes for item in output.mm_items] == [
        (*EXPECTED[0], FROM_MEDIA),
        (*EXPECTED[1], FROM_MEDIA),
        EXPECTED[2],
    ]
    assert len(noted(events)) == 6


def test_items_keep_their_notes_in_every_form_in_which_they_travel(open_words: Open) -> None:
    output = open_words(Noting, SPEC).process(PROMPT, **media())
    assert [item.notes for item in MultimodalInputs.from_processor_output(output).mm_items] == EXPECTED
    assert [item.notes for item in pickle.loads(pickle.dumps(output)).mm_items] == EXPECTED
    for item, expected in zip(output.mm_items, EXPECTED, strict=True):
        bare = msgspec.structs.replace(item, feature=None, model_specific_data={})
        for codec in (msgspec.msgpack, msgspec.json):
            read = codec.decode(codec.encode(bare), type=MultimodalDataItem)
            assert (read.notes, read.identity) == (expected, item.identity)
    # One written before there were notes.
    sent = msgspec.msgpack.encode({"modality": 1, "offsets": [[0, 1]]})
    assert msgspec.msgpack.decode(sent, type=MultimodalDataItem).notes == ()


def test_what_the_cache_keeps_is_counted_with_its_notes() -> None:
    plain = Prepared({}, Replacement.repeat(1, 1), np.zeros(3), bytes(32))
    assert msgspec.structs.replace(plain, notes=("x" * 5000,)).num_bytes >= plain.num_bytes + 5000


# ---------------------------------------------------------------- what an author may give


@pytest.mark.parametrize("notes", ["a text", [1], [None], [""], ["  "], None, {"a": 1}, [["a"]], b"a", 3])
@pytest.mark.parametrize("where", ["sample", "layout"])
def test_anything_but_texts_is_the_plugins_fault(open_words: Open, where: str, notes: Any) -> None:
    class Wrong(PlainToy):
        def sample(self, size: VideoSize, options: Any) -> Sampling:
            return Sampling.of(size, np.arange(size.frames), notes if where == "sample" else ())

        def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> Any:
            fields = super().layout(modality, size, options, context)
            return NotedFields(fields, notes) if where == "layout" else fields

    with pytest.raises(ProcessorError, match=f"Wrong.{where}.*notes"):
        open_words(Wrong, SPEC).process("<video>", videos=media()["videos"])


def test_noted_fields_are_a_mapping_of_the_fields_alone() -> None:
    once = NotedFields({"rows": 4}, ["first", "second", "first"])
    assert (dict(once), len(once), once["rows"], list(once), once.notes) == (
        {"rows": 4},
        1,
        4,
        ["rows"],
        ("first", "second"),
    )
    # A subclass of an author's class adds to what it inherits.
    assert NotedFields(once, ["third"]).notes == ("first", "second", "third")
    assert NotedFields(once, ()).notes == ("first", "second")
    with pytest.raises(KeyError):
        once["notes"]


@pytest.mark.parametrize("name", ["notes", "feature", "identity", "offsets"])
def test_a_model_field_named_as_a_field_of_the_item_is_refused_where_it_is_declared(name: str) -> None:
    from mm_plugin.errors import SpecError

    with pytest.raises(SpecError, match=name):
        toy_spec(fields={IMAGE: ("rows", name)})
    with pytest.raises(UsageError, match=name):
        MultimodalDataItem(modality=IMAGE, model_specific_data={name: 1})


def test_a_size_that_the_caller_gives_needs_no_notes(open_words: Open) -> None:
    processor = open_words(Noting, SPEC)
    size = VideoSize(3, 4, 2, 2.0)
    sampled = SampledVideo.of(size, Sampling.of(size, np.arange(2)))
    assert processor.count("video", sampled) == processor.count("video", size) == (2, 2)


# ---------------------------------------------------------------- requests that are prepared together


class Together(ProcessesJointly, Noting):
    """All images and all videos of a request, a token for each modality."""

    Options = BaseOptions

    def is_joint(self) -> bool:
        return True

    def prepare_jointly(self, text: str, media: Mapping[Modality, Any], options: Any, *, rendered: bool) -> JointOutput:
        ids = np.array([int(modality) for modality in media])
        items = []
        for index, (modality, decoded) in enumerate(media.items()):
            for one in decoded:
                list(getattr(one, "frames", ()))
            notes = ["all of them"] if modality is IMAGE else []
            feature = np.zeros((1, 2), np.float32)
            items.append(JointItem(modality, np.arange(len(ids)) == index, feature, {"rows": 1, "kind": 1}, notes))
        return JointOutput(ids, items)


@pytest.mark.usefixtures("media_notes")
@pytest.mark.parametrize("worker", [False, True])
def test_media_that_are_prepared_together(
    open_words: Open, make_runtime: Open, events: list[Any], worker: bool
) -> None:
    spec = toy_spec(*Modality, padding="offsets")
    processor = elsewhere(open_words, make_runtime, Together, spec) if worker else open_words(Together, spec)
    output = processor.process("word", images=[img(), img(1)], videos=media()["videos"])
    assert {item.modality: item.notes for item in output.mm_items} == {
        IMAGE: ("all of them", FROM_MEDIA),
        VIDEO: (FROM_SAMPLE, FROM_MEDIA),
    }
    assert sorted(noted(events)) == sorted(
        [
            ("images", "image", "all of them"),
            ("images[0]", "image", FROM_MEDIA),
            ("images[1]", "image", FROM_MEDIA),
            ("videos[0]", "video", FROM_SAMPLE),
            ("videos[0]", "video", FROM_MEDIA),
        ]
    )


@pytest.mark.parametrize("notes", ["a text", [1], [""], None])
def test_notes_of_a_joint_item_are_texts(open_words: Open, notes: Any) -> None:
    class Wrong(Together):
        def prepare_jointly(self, *arguments: Any, **named: Any) -> JointOutput:
            found = super().prepare_jointly(*arguments, **named)
            return JointOutput(found.ids, [msgspec.structs.replace(item, notes=notes) for item in found.items])

    with pytest.raises(ProcessorError, match="notes"):
        open_words(Wrong, toy_spec(padding="offsets")).process("word", images=[img()])
