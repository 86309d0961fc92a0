"""Options of one media input: they are that item's alone, a server's and a client's faults differ, and nothing is dropped."""

from __future__ import annotations

import asyncio
import base64
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from toy import Toy, ToyCheckpoint, owner_of, toy_spec, word_tokenizer

from mm_plugin import (
    BaseOptions,
    MediaError,
    Modality,
    OptionScope,
    PlaceholderError,
    PreparesBatches,
    ProcessorError,
    ProcessorOutput,
    RequestError,
    Sampling,
    UsageError,
    VideoFrames,
    VideoSize,
    WithOptions,
)
from mm_plugin.processor import Processor
from mm_plugin.processor.preparer import ThreadPreparer
from mm_plugin.prompt.media_parts import MEDIA_PARTS, REFUSED_PARTS
from mm_plugin.tasks import PrepareTask

TEMPLATE = "{% for m in messages %}{% for p in m['content'] %} <{{ p['type'] }}> {% endfor %}{% endfor %}"
KEYS = st.sampled_from(
    [
        "image", "image_url", "video", "audio", "input_audio", "url", "path", "base64", "data", "detail", "format",
        "fps", "rows", "tone", "max_pixels", "min_pixels", "stride", "every", "sample_fps", "timestamps", "text", "file_id", "foo",
        "type ", "", "\ud800",
    ]
)  # fmt: skip
ALL = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)


class Options(BaseOptions, frozen=True, kw_only=True):
    """`rows` changes the layout of images, `tone` their feature; `every` chooses frames; `gain` is of audio."""

    ITEM_NAMES: ClassVar[Mapping[str, Mapping[str, str]]] = {"video": {"stride": "every", "rows": "height"}}

    rows: Annotated[int, msgspec.Meta(ge=1, le=9), OptionScope.request("image")] = 3
    tone: Annotated[int, OptionScope.request("image", "video")] = 0
    min_pixels: Annotated[int, OptionScope.request("image")] = 4
    max_pixels: Annotated[int, OptionScope.request("image")] = 64
    every: Annotated[int, msgspec.Meta(ge=1), OptionScope.request("video", sampling=True)] = 1
    height: Annotated[int | None, OptionScope.request("video")] = None
    gain: Annotated[int, OptionScope.request("audio")] = 0
    servers: Annotated[int, OptionScope.request("image", per_item=False)] = 0
    loaded: Annotated[int, OptionScope.load("image")] = 0
    weights: Annotated[int, OptionScope.checkpoint("image")] = 0

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError("min_pixels must be at most max_pixels")


class Model(Toy):
    """What an item becomes shows every option that it was made with."""

    Options = Options

    def context(self, counts: Mapping[Modality, int]) -> Any:
        return None

    def sample(self, size: VideoSize, options: Any) -> Sampling:
        return Sampling.of(size, np.arange(0, size.frames, options.every))

    def rows(self, modality: Modality, size: Any, options: Any, context: Any) -> int:
        return options.rows if modality is Modality.IMAGE else super().rows(modality, size, options, context)

    def prepare(self, decoded: Any, layout: Mapping[str, Any], options: Any) -> Any:
        names = ("rows", "min_pixels", "tone", "max_pixels", "every", "gain")
        return np.array([*(getattr(options, name) for name in names), *options.background])


class Batches(PreparesBatches, Model):
    def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> list[Any]:
        return [self.prepare(one, layout, options) for one, layout in zip(decoded, layouts, strict=True)]


Open = Callable[..., Processor]


@pytest.fixture
def open_model(make_runtime: Callable[..., Any]) -> Open:
    def make(cls: type[Toy] = Model, *, media_root: str = "", **options: Any) -> Processor:
        tokenizer = word_tokenizer(toy.TOKENS.values(), chat_template=TEMPLATE)
        spec = toy_spec(*ALL)
        runtime = make_runtime(preprocess_cache_bytes=1 << 20, media_root=media_root)
        return Processor(cls, spec, ToyCheckpoint(tokenizer), runtime, options, owner=owner_of(spec))

    return make


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def url(seed: int = 0) -> str:
    return "data:image/png;base64," + base64.b64encode(toy.png(seed)).decode()


def image(**keys: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url()}, **keys}


VALUES = {"rows": 5, "tone": 7, "min_pixels": 9, "max_pixels": 30, "background": [1, 2, 3]}


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_an_option_of_an_item_does_what_it_does_for_a_request(open_model: Open, name: str, value: Any) -> None:
    model = open_model()
    usual, asked = model.prepare_item("image", toy.png()), model.prepare_item("image", toy.png(), **{name: value})
    assert usual.source_key != asked.source_key
    messages = said(image(), image(**{name: value}), image(**{name: None}))
    for output in (
        model.process(messages),
        model.process("<image> <image> <image>", [toy.png(), WithOptions(toy.png(), **{name: value}), toy.png()]),
        asyncio.run(model.process_async(messages)),
        open_model(Batches).process(messages),
    ):
        features = [item.feature.tolist() for item in output.mm_items]
        assert features == [usual.feature.tolist(), asked.feature.tolist(), usual.feature.tolist()]
        tokens = [item.num_tokens for item in output.mm_items]
        assert tokens == [len(one.replacement.ids) for one in (usual, asked, usual)]
    # The cache has what either way prepared.
    alone = model.prepare_item("image", WithOptions(toy.png(), **{name: value}))
    assert (alone.source_key, alone.cached, alone.identity) == (asked.source_key, True, asked.identity)


def test_an_items_options_come_before_the_requests(open_model: Open) -> None:
    model = open_model(rows=2)
    output = model.process(said(image(rows=5), image()), rows=4, tone=6)
    assert [item.num_tokens for item in output.mm_items] == [5, 4]
    assert [item.feature[2] for item in output.mm_items] == [6, 6]  # the request's other options hold for both


def test_null_is_absent(open_model: Open) -> None:
    output = open_model().process(said(image(rows=None, foo=None, detail=None)))
    assert output.mm_items[0].num_tokens == 3


def test_names_of_utilities_stand_for_options(open_model: Open) -> None:
    frames = {"fps": 2.0, "sampled": False}
    video = VideoFrames(np.zeros((6, 2, 2, 3), np.uint8), **frames)
    model = open_model()
    for name in ("every", "stride"):
        output = model.process(said({"type": "video", "video": video, name: 2}))
        assert (output.mm_items[0].num_tokens, output.mm_items[0].feature[4]) == (3, 2)
    # A name of videos is not one of images, and means another option there.
    assert model.process(said({"type": "video", "video": video, "rows": 2})).mm_items[0].num_tokens == 6
    with pytest.raises(RequestError, match=r"every and stride are the same option"):
        model.process(said({"type": "video", "video": video, "every": 2, "stride": 2}))
    with pytest.raises(RequestError, match=r"\.stride: unknown option of one image"):
        model.process(said(image(stride=2)))


@pytest.mark.parametrize(
    "name", ["foo", "every", "gain", "servers", "loaded", "weights", "modalities", "uuid", "self", "ids"]
)
def test_other_keys_are_the_clients_fault_in_a_part_and_the_servers_beside_one(open_model: Open, name: str) -> None:
    model = open_model()
    with pytest.raises(
        RequestError, match=rf"^messages\[0\]\.content\[1\]\.{name}: unknown option of one image; toy"
    ) as got:
        model.process(said(image(), image(**{name: 1})))
    assert got.value.path == f"messages[0].content[1].{name}"
    assert "background, detail, max_pixels, min_pixels, rows, tone" in got.value.message
    with pytest.raises(UsageError, match=rf"^images\[1\]\.{name}: unknown option of one image") as caught:
        model.process("<image> <image>", [toy.png(), WithOptions(toy.png(), **{name: 1})])
    assert caught.value.argument == name
    with pytest.raises(UsageError, match=rf"^images\[0\]\.{name}"):
        model.prepare_item("image", WithOptions(toy.png(), **{name: 1}))


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


ODD = ["\ud800", ["\ud800"], {"\ud800": 1}, pytest.param(nested(100_000), id="deep")]


@pytest.mark.parametrize("value", ["5", 0, 10, 2.5, [1], {}, True, float("nan"), 1 << 80, *ODD], ids=ascii)
def test_a_value_that_does_not_fit_is_refused_by_its_own_name(open_model: Open, value: Any) -> None:
    model = open_model()
    with pytest.raises(RequestError) as got:
        model.process(said(image(rows=value)))
    assert got.value.path == "messages[0].content[0].rows"
    with pytest.raises(RequestError) as got:
        model.process("<image>", [WithOptions(toy.png(), rows=value)])
    assert got.value.path == "images[0].rows"


def test_numbers_of_numpy_are_taken_from_a_server(open_model: Open) -> None:
    output = open_model().process("<image>", [WithOptions(toy.png(), rows=np.int64(5))])
    assert output.mm_items[0].num_tokens == 5


def test_options_that_exclude_each_other_are_refused_at_the_part(open_model: Open) -> None:
    with pytest.raises(RequestError, match="min_pixels must be at most max_pixels") as got:
        open_model().process(said(image(), image(min_pixels=9, max_pixels=8)))
    assert got.value.path == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({}, 64),
        ({"detail": "auto"}, 64),
        ({"detail": "low"}, 4),
        ({"detail": "high"}, 64),
        ({"detail": "low", "min_pixels": 6}, 6),
        ({"detail": "low", "max_pixels": 20}, 20),
        ({"detail": "high", "max_pixels": 20}, 20),
    ],
)
def test_detail_is_the_least_or_the_most_pixels(open_model: Open, keys: dict[str, Any], most: int) -> None:
    model = open_model()
    inside = {"type": "image_url", "image_url": {"url": url(), "detail": keys.get("detail")}}
    rest = {name: value for name, value in keys.items() if name != "detail"}
    for part in (image(**keys), inside | rest):
        assert model.process(said(part)).mm_items[0].feature[3] == most
    assert model.process("<image>", [WithOptions(toy.png(), **keys)]).mm_items[0].feature[3] == most


@pytest.mark.parametrize("detail", ["", "ultra", "LOW", 1, True, ["low"], {"low": 1}, *ODD], ids=ascii)
def test_another_detail_is_refused(open_model: Open, detail: Any) -> None:
    with pytest.raises(RequestError, match="expected auto, low, high, got") as got:
        open_model().process(said(image(detail=detail)))
    assert got.value.path == "messages[0].content[0].detail"


@pytest.mark.parametrize("value", ODD, ids=ascii)
@pytest.mark.parametrize("kind", sorted({*MEDIA_PARTS, "text", *REFUSED_PARTS}))
def test_a_content_that_cannot_be_read_is_the_clients_fault(open_model: Open, kind: str, value: Any) -> None:
    model = open_model()
    keys = ("type", kind, "url", "path", "base64", "text", "image_url", "video_url")
    for part in ({"type": kind, key: value} for key in keys):
        with pytest.raises(RequestError):
            model.process(said(part))
    with pytest.raises(RequestError):
        model.process(said({"type": kind, kind: {"url": value}}))


@pytest.mark.parametrize("value", ODD, ids=ascii)
def test_an_option_of_a_request_that_cannot_be_read_is_not_the_plugins_fault(open_model: Open, value: Any) -> None:
    with pytest.raises(RequestError, match=r"^options: ") as got:
        open_model().process("<image>", [toy.png()], tone=value)
    assert got.value.path == "options"


@pytest.mark.parametrize(
    "value", [nested(100_000), np.zeros(2), 10**400, "\ud800", {1: 2}], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize(
    "name",
    ["max_prompt_tokens", "on_overflow", "mm_hash_scope", "expanded", "deadline", "continue_final_message", "salt"],
)
def test_an_argument_that_cannot_be_shown_is_refused_by_its_name(open_model: Open, name: str, value: Any) -> None:
    if name == "salt" and isinstance(value, str):
        pytest.skip("text")
    if name == "max_prompt_tokens" and isinstance(value, int):
        pytest.skip("a whole number")
    with pytest.raises(UsageError) as got:
        open_model().process("<image>", [toy.png()], **{name: value})
    assert got.value.argument == name


def test_detail_changes_nothing_in_a_model_without_limits_of_pixels(open_model: Open) -> None:
    class Plain(Toy):
        pass

    for detail in ("auto", "low", "high"):
        assert open_model(Plain).process(said(image(detail=detail))).mm_items[0].num_tokens == 3


def test_detail_is_of_images_alone(open_model: Open) -> None:
    part = {"type": "audio", "audio": toy.audio(), "detail": "low"}
    with pytest.raises(RequestError, match=r"detail: unknown option of one audio"):
        open_model().process(said(part))


def test_an_open_place_keeps_its_options(open_model: Open) -> None:
    model = open_model()
    parts = said({"type": "image", "rows": 5}, {"type": "image"})
    output = model.process(parts, [toy.png(), toy.png(1)])
    assert [item.num_tokens for item in output.mm_items] == [5, 3]
    output = model.process(parts, [WithOptions(toy.png(), tone=8), WithOptions(toy.png(), rows=7)])
    assert [item.num_tokens for item in output.mm_items] == [5, 7]
    assert [item.feature[2] for item in output.mm_items] == [8, 0]
    with pytest.raises(PlaceholderError, match="under image, url, path or base64"):
        model.process(parts)


def test_frames_that_were_chosen_take_no_option_that_chooses_them(open_model: Open) -> None:
    frames = [toy.png(seed) for seed in range(4)]
    model = open_model()
    with pytest.raises(RequestError, match="frames of this video were chosen before it came; leave every out") as got:
        model.process(said({"type": "video", "video": frames, "fps": 2, "every": 2}))
    assert got.value.path == "messages[0].content[0].every"
    assert model.process(said({"type": "video", "video": frames, "fps": 2, "tone": 3})).mm_items[0].feature[2] == 3
    whole = VideoFrames([toy.png(seed) for seed in range(4)], fps=2.0)
    with pytest.raises(RequestError, match=r"^videos\[0\]\.every"):
        model.process("<video>", videos=[WithOptions(whole, every=2)])
    # Those of the request are for its other videos.
    assert model.process("<video>", videos=[whole], every=2).mm_items[0].num_tokens == 4


def test_a_media_input_that_came_prepared_takes_none(open_model: Open) -> None:
    prepared = ProcessorOutput({"x": np.zeros(3)})
    with pytest.raises(RequestError, match=r"^images\[0\]: a media input that came prepared takes no options"):
        open_model().process("<image>", [WithOptions(prepared, rows=5)])


def test_the_unit_of_work_carries_the_items_options(open_model: Open) -> None:
    seen: list[PrepareTask] = []
    model = open_model()

    class Elsewhere:
        def prepare(self, tasks: Sequence[Any]) -> list[Any]:
            seen.extend(tasks)
            return [model.prepare_tasks([pickle.loads(pickle.dumps(task))])[0] for task in tasks]

    model._preparer = Elsewhere()
    output = model.process(said(image(rows=5), image()))
    assert [task.options.rows for task in seen] == [5, 3]
    assert [item.num_tokens for item in output.mm_items] == [5, 3]


def test_a_callers_hash_of_one_media_input_with_other_options_is_another_identity(open_model: Open) -> None:
    model = open_model()
    hashes = {"images": ["a1"]}
    first = model.process(said(image()), mm_hashes=hashes).mm_items[0]
    second = model.process(said(image(tone=5)), mm_hashes=hashes).mm_items[0]
    again = model.process(said(image()), mm_hashes=hashes, tone=5).mm_items[0]
    assert first.identity != second.identity == again.identity


def test_dropping_an_item_keeps_the_options_of_the_others(open_model: Open) -> None:
    messages = said(image(rows=9), image(rows=2))
    output = open_model().process(messages, max_prompt_tokens=5, on_overflow="drop_oldest")
    assert output.dropped == ("images[0]",)
    assert [item.num_tokens for item in output.mm_items] == [2]


def test_an_authors_broken_rule_is_the_plugins_fault(open_model: Open) -> None:
    class Broken(Options, frozen=True, kw_only=True):
        @classmethod
        def for_item(cls, given: Any, modality: Any, usual: Any) -> Any:
            raise KeyError("x")

    class Author(Model):
        Options = Broken

    with pytest.raises(ProcessorError, match=r"Author\.Options\.for_item failed: KeyError"):
        open_model(Author).process(said(image(rows=2)))


# ---------------------------------------------------------------- where content comes from


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.png").write_bytes(toy.png())
    (tmp_path / "secret.png").write_bytes(toy.png(1))
    return folder


FORMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "path": lambda root: {"type": "image", "path": "a.png"},
    "absolute path": lambda root: {"type": "image", "path": str(root / "a.png")},
    "file URL": lambda root: {"type": "image", "url": (root / "a.png").as_uri()},
    "input_image": lambda root: {"type": "input_image", "image_url": (root / "a.png").as_uri()},
    "path as image_url": lambda root: {"type": "image_url", "image_url": {"url": "a.png"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_paths_in_messages_obey_the_rules_of_file_urls(open_model: Open, root: Path, form: str) -> None:
    part = FORMS[form](root)
    expected = open_model().prepare_item("image", toy.png()).identity
    assert open_model(media_root=str(root)).process(said(part)).mm_items[0].identity == expected
    with pytest.raises(MediaError) as got:
        open_model().process(said(part))
    assert got.value.reason == "path"


@pytest.mark.parametrize("name", ["../secret.png", "b.png", "", ".", "\0", "a" * 5000])
def test_what_is_not_below_the_root_is_not_read(open_model: Open, root: Path, name: str) -> None:
    with pytest.raises(MediaError) as got:
        open_model(media_root=str(root)).process(said({"type": "image", "path": name}))
    assert got.value.reason == "path"


def test_base64_is_never_a_path_and_a_path_is_never_base64(open_model: Open, root: Path) -> None:
    model, text = open_model(media_root=str(root)), base64.b64encode(toy.png()).decode()
    (root / ("A" * 40)).write_bytes(toy.png())
    assert model.process(said({"type": "image", "base64": text})).mm_items[0].num_tokens == 3
    assert model.process(said({"type": "image", "path": "A" * 40})).mm_items[0].num_tokens == 3
    with pytest.raises(MediaError) as got:
        model.process(said({"type": "image", "base64": "A" * 40}))
    assert got.value.reason == "format"
    with pytest.raises(MediaError) as got:
        model.process(said({"type": "image", "path": text}))
    assert got.value.reason == "path"


def test_a_url_with_options_is_fetched(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch_async(*_: Any) -> bytes:
        return toy.png()

    monkeypatch.setattr("mm_plugin.media.http.fetch_async", fetch_async)
    monkeypatch.setattr("mm_plugin.media.http.fetch", lambda *_: toy.png())
    part = {"type": "image_url", "image_url": {"url": "https://a.example/a.png"}, "rows": 5}
    model = open_model()
    assert model.process(said(part)).mm_items[0].num_tokens == 5
    assert asyncio.run(model.process_async(said(part))).mm_items[0].num_tokens == 5


# ---------------------------------------------------------------- whatever a client sends

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["a.png", "low", "wav"]),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS, part, max_size=3),
    max_leaves=4,
)


@hypothesis_settings(
    deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_any_part_becomes_an_item_or_the_clients_fault(open_model: Open, data: st.DataObject) -> None:
    kinds = st.sampled_from([*MEDIA_PARTS, *REFUSED_PARTS, "text", "input_text"])
    part = data.draw(st.dictionaries(KEYS, PLAIN, max_size=4)) | {"type": data.draw(kinds)}
    if data.draw(st.booleans()):
        part |= {"url": url()}
    model = open_model()
    try:
        output = model.process(said(part))
    except RequestError as error:
        str(error).encode()  # valid Unicode
        return
    assert len(output.mm_items) == (part["type"] not in ("text", "input_text"))


# ---------------------------------------------------------------- declared formats of audio


def wav() -> bytes:
    """Four samples of 16 bits at 16 Hz."""
    data = struct.pack("<4h", 0, 1, 2, 3)
    head = struct.pack("<HHIIHH", 1, 1, 16, 32, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def spoken(data: bytes, format: Any) -> list[dict[str, Any]]:
    return said({"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}})


@pytest.mark.parametrize("format", ["wav", "WAV", "audio/wav", "wave", None])
def test_a_right_format_is_taken(open_model: Open, format: Any) -> None:
    pytest.importorskip("av")
    assert open_model().process(spoken(wav(), format)).mm_items[0].num_tokens == 4


@pytest.mark.parametrize("format", ["mp3", "flac", "opus", "m4a", "webm", "aac", "aiff"])
def test_bytes_of_another_format_are_refused(open_model: Open, format: str) -> None:
    with pytest.raises(MediaError, match=f"expected {format}, as declared, got bytes of wav") as got:
        open_model().process(spoken(wav(), format))
    assert got.value.path == "messages[0].content[0].format"


@pytest.mark.parametrize("format", ["pcm16", "", "text", 3, ["wav"], "g711_ulaw"])
def test_an_unknown_format_is_refused(open_model: Open, format: Any) -> None:
    with pytest.raises(MediaError, match="expected a format such as wav or mp3") as got:
        open_model().process(spoken(wav(), format))
    assert got.value.path == "messages[0].content[0].format"


def test_threads_prepare_items_of_several_options_in_batches_of_equal_ones(open_model: Open) -> None:
    made: list[int] = []

    class Counted(Batches):
        def prepare_batch(self, decoded: Sequence[Any], layouts: Sequence[Any], options: Any) -> list[Any]:
            made.append(len(decoded))
            return super().prepare_batch(decoded, layouts, options)

    model = open_model(Counted)
    assert isinstance(model._threads, ThreadPreparer)
    images = [WithOptions(toy.png(seed), rows=5 if seed % 2 else 3) for seed in range(5)]
    output = model.process(" ".join(["<image>"] * 5), images)
    assert sorted(made) == [2, 3]
    assert [item.num_tokens for item in output.mm_items] == [3, 5, 3, 5, 3]
