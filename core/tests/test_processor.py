"""The pipeline around an author's four methods: who is attributed, what is checked before decoding, what is keyed and cached."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch
import toy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from toy import Toy, ToyCheckpoint, ToyOptions, owner_of, toy_spec, word_tokenizer

from mm_plugin.errors import (
    LimitError,
    MediaError,
    MMPluginError,
    PlaceholderError,
    ProcessorError,
    RequestError,
    SizeError,
    UsageError,
)
from mm_plugin.events import Event, ItemKeyed
from mm_plugin.inputs import MultimodalInputs, MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media import DecodedMedia, Size
from mm_plugin.placeholders import Replacement, pad_by_offsets, token_modalities_of
from mm_plugin.processor import ModelProcessor, OptionScope, Processor
from mm_plugin.runtime import Runtime
from mm_plugin.settings import Settings
from mm_plugin.spec import ModelSpec

IMAGE, AUDIO, WORD, NEWLINE = 10, 11, 1, 2
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ p['text'] if p['type'] == 'text' else ' <image> ' }}{% endfor %}{% endfor %}"
)


class Options(ToyOptions, frozen=True, kw_only=True):
    """`edge` is fixed at load, `depth` is the checkpoint's."""

    edge: Annotated[int, OptionScope.load("image")] = 4
    depth: Annotated[int, OptionScope.checkpoint("image")] = 1


class Tiny(Toy):
    """A row per `edge` x `edge` block, row by row with a line token between; more than two images get one row each."""

    Options = Options

    def layout(self, modality: Modality, size: Size, options: Options, context: bool) -> dict[str, Any]:
        if size.height * 50 < size.width:
            raise SizeError(f"{size.height} x {size.width} is too thin")
        grid = [1, 1] if context else [-(-size.height // options.edge), -(-size.width // options.edge)]
        return {"grid": np.array(grid)}

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        height, width = layout["grid"].tolist()
        ids = np.array(([IMAGE] * width + [NEWLINE]) * height)
        return Replacement(ids, ids == IMAGE)


WORDS = ("word", "line", "other", *(f"filler{index}" for index in range(IMAGE - 4)))
SPEC = toy_spec(name="tiny", fields={Modality.IMAGE: ("grid",)})
OWNER = owner_of(SPEC)


def tiny_checkpoint(settings: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> Any:
    tokenizer = word_tokenizer(("<image>", "<audio>"), WORDS, chat_template=TEMPLATE)
    return ToyCheckpoint(tokenizer, settings, config or {"vocab_size": 12})


Open = Callable[..., ModelProcessor]


class Threads(ThreadPoolExecutor):
    """An executor that counts what it is given."""

    submitted = 0

    def submit(self, *arguments: Any, **named: Any) -> Any:
        self.submitted += 1
        return super().submit(*arguments, **named)


@pytest.fixture
def executor() -> Iterator[Threads]:
    with Threads(4, thread_name_prefix="item-stage") as found:
        yield found


@pytest.fixture
def open_tiny(make_runtime: Callable[..., Any]) -> Open:
    """Opens `Tiny` or what is derived from it; a cache of `cache_bytes`."""

    def make(
        cls: type[ModelProcessor] = Tiny,
        *,
        cache_bytes: int = 1 << 24,
        spec: ModelSpec = SPEC,
        checkpoint: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ModelProcessor:
        runtime = make_runtime(preprocess_cache_bytes=cache_bytes, **dict(limits or {}))
        opened = tiny_checkpoint(checkpoint, config)
        return Processor(cls, spec, opened, runtime, options, owner=OWNER)

    return make


def img(seed: int = 0, height: int = 6, width: int = 9) -> np.ndarray:
    return toy.img(seed, height, width)


def png(seed: int = 0, height: int = 6, width: int = 9) -> bytes:
    return toy.png(seed, height, width)


def same(left: MultimodalProcessorOutput, right: MultimodalProcessorOutput) -> bool:
    return (
        np.array_equal(left.input_ids, right.input_ids)
        and np.array_equal(left.padded_input_ids, right.padded_input_ids)
        and np.array_equal(left.token_modalities, right.token_modalities)
        and [item.identity for item in left.mm_items] == [item.identity for item in right.mm_items]
        and [item.offsets for item in left.mm_items] == [item.offsets for item in right.mm_items]
        and all(
            np.array_equal(one.feature, other.feature) for one, other in zip(left.mm_items, right.mm_items, strict=True)
        )
    )


# ------------------------------------------------------------------ what comes out


def test_a_request_by_hand(open_tiny: Open) -> None:
    output = open_tiny().process("word <image> word <image>", [img(0, 6, 9), img(1, 4, 4)], tone=5)
    # 6 x 9 at 4 pixels is 2 x 3 blocks: rows at 1..3 and 5..7, line tokens at 4 and 8; then a word; then one block.
    assert output.input_ids.tolist() == [1, 10, 10, 10, 2, 10, 10, 10, 2, 1, 10, 2]
    assert [item.offsets for item in output.mm_items] == [[(1, 3), (5, 7)], [(10, 10)]]
    assert output.token_modalities.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0]
    first, second = output.mm_items
    assert (first.num_tokens, second.num_tokens) == (6, 1)
    assert np.array_equal(first.feature, img(0, 6, 9).astype(np.int16) + 5)
    assert first.grid.tolist() == [2, 3]
    sentinels = list(first.pad_values or ())
    assert output.padded_input_ids.tolist() == [
        1, *sentinels[:3], 2, *sentinels[:3], 2, 1, (second.pad_values or ())[0], 2,
    ]  # fmt: skip
    assert output.mrope_positions is None
    inputs = MultimodalInputs.from_processor_output(output)
    assert (inputs.num_image_tokens, inputs.num_mm_tokens, inputs.num_dropped) == (7, 7, 0)


def test_text_alone_needs_no_media(open_tiny: Open) -> None:
    output = open_tiny().process("word other")
    assert output.input_ids.tolist() == output.padded_input_ids.tolist() == [1, 3]
    assert output.mm_items == []


@pytest.mark.parametrize(
    "ids",
    [[1, 10, 3], (1, 10, 3), np.array([1, 10, 3], dtype=np.uint16), torch.tensor([1, 10, 3]), range(1, 2)],
    ids=["list", "tuple", "numpy", "torch", "range"],
)
def test_ids_of_any_kind_are_taken_and_left_alone(open_tiny: Open, ids: Any) -> None:
    before = list(ids)
    images = [img(0, 4, 4)] if 10 in before else []
    output = open_tiny().process(ids, images)
    assert output.input_ids.tolist() == ([1, 10, 2, 3] if images else [1])
    assert list(ids) == before


def test_messages_bring_their_own_media(open_tiny: Open) -> None:
    processor = open_tiny()
    parts = [{"type": "text", "text": "word"}, {"type": "image", "image": img(0)}, {"type": "image"}]
    found = processor.process([{"role": "user", "content": parts}], [img(1)])
    assert same(found, processor.process("word <image> <image>", [img(0), img(1)]))


@hypothesis_settings(max_examples=100, deadline=None)
@given(height=st.integers(2, 60), width=st.integers(1, 60), others=st.integers(0, 3))
def test_a_count_is_what_processing_yields(height: int, width: int, others: int) -> None:
    with ThreadPoolExecutor(1) as executor:
        runtime = Runtime(Settings(preprocess_cache_bytes=0), executor=executor)
        processor = Processor(Tiny, SPEC, tiny_checkpoint(), runtime, {}, owner=OWNER)
        rows, tokens = processor.count("image", (height, width), counts={Modality.IMAGE: 1 + others})
        images = [np.zeros((height, width, 3), dtype=np.uint8)] * (1 + others)
        output = processor.process([IMAGE] * (1 + others), images)
        assert [item.num_tokens for item in output.mm_items] == [rows] * (1 + others)
        assert len(output.input_ids) == tokens * (1 + others)


@pytest.mark.parametrize(
    "counts", [5, {Modality.IMAGE: 0}, {Modality.IMAGE: "x"}, {Modality.IMAGE: True}, {Modality.VIDEO: 1}, {"z": 1}]
)
def test_counts_of_media_are_checked(open_tiny: Open, counts: Any) -> None:
    processor = open_tiny()
    for ask in (processor.count, processor.prepare_item):
        value = (3, 4) if ask == processor.count else img(0)
        with pytest.raises(UsageError) as caught:
            ask("image", value, counts=counts)
        assert caught.value.argument in ("counts", "modality")


# ------------------------------------------------------------------ owner


METHODS = ["context", "layout", "prepare", "replacement"]


def broken(method: str, act: Callable[[], Any]) -> type[ModelProcessor]:
    return type("Broken", (Tiny,), {method: lambda self, *arguments: act()})


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "error",
    [ValueError("odd"), KeyError("x"), SystemExit(3), AssertionError(), UsageError("mine"), ArithmeticError("odd")],
    ids=lambda error: type(error).__name__,
)
def test_what_an_author_raises_is_the_plugins_fault(open_tiny: Open, method: str, error: BaseException) -> None:
    processor = open_tiny(broken(method, raising(error)))
    with pytest.raises(ProcessorError, match=rf"Broken\.{method} failed") as caught:
        processor.process("<image>", [img()])
    assert (caught.value.plugin, caught.value.distribution, caught.value.version) == ("tiny", "mm-plugin-tiny", "9.9")
    assert type(error).__name__ in caught.value.message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("method", METHODS)
def test_what_needs_more_memory_than_there_is_is_over_a_limit(open_tiny: Open, method: str) -> None:
    with pytest.raises(LimitError) as caught:
        open_tiny(broken(method, raising(MemoryError()))).process("<image>", [img()])
    assert caught.value.setting == "memory"


@pytest.mark.parametrize("method", ["layout", "prepare", "replacement"])
def test_a_size_that_no_rule_can_use_is_the_clients_fault(open_tiny: Open, method: str) -> None:
    class Second(Tiny):
        """Fails on the second image."""

    original = getattr(Tiny, method)

    def act(self: Any, *arguments: Any) -> Any:
        layout = next((value for value in arguments if isinstance(value, Mapping)), {})
        size = next((value for value in arguments if isinstance(value, Size)), None)
        if (size is not None and size.height == 7) or (layout and layout["grid"][0] == 7):
            raise SizeError("seven is too many")
        return original(self, *arguments)

    setattr(Second, method, act)
    processor = open_tiny(Second, edge=1)
    with pytest.raises(MediaError, match=r"images\[1\]: seven is too many") as caught:
        processor.process("<image> <image>", [img(0), img(0, 7, 7)])
    assert (caught.value.path, caught.value.reason) == ("images[1]", "size")


@pytest.mark.parametrize("method", METHODS)
def test_a_request_error_of_an_author_comes_through(open_tiny: Open, method: str) -> None:
    error = MediaError("images[0]: no", path="images[0]", reason="mine")
    with pytest.raises(MediaError) as caught:
        open_tiny(broken(method, raising(error))).process("<image>", [img()])
    assert (caught.value.path, caught.value.reason) == ("images[0]", "mine")


@pytest.mark.parametrize("method", METHODS)
def test_a_keyboard_interrupt_comes_through(open_tiny: Open, method: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_tiny(broken(method, raising(KeyboardInterrupt()))).process("<image>", [img()])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, r"\[\].*\['grid'\]"),
        ({"grid": np.ones(2, int), "gird": 1}, r"\['gird', 'grid'\].*\['grid'\]"),
        ({"gird": 1}, r"\['gird'\].*\['grid'\]"),
        (None, "NoneType"),
        ([("grid", 1)], "list"),
    ],
    ids=["missing", "undeclared", "misspelt", "none", "list"],
)
def test_fields_that_the_spec_does_not_declare_are_named(open_tiny: Open, fields: Any, named: str) -> None:
    with pytest.raises(ProcessorError, match=f"layout returned {named}"):
        open_tiny(broken("layout", lambda: fields)).process("<image>", [img()])


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2],
        Replacement(np.array([10, 10]), np.array([True])),
        Replacement(np.array([10]), np.array([True, True, True])),
        Replacement(np.array([10]), np.array([1])),
        Replacement(np.array([[10]])),
        Replacement(np.array([1.5])),
        Replacement(np.array([], dtype=np.int64)),
        Replacement(np.array([10, 10]), np.array([False, False])),
        Replacement([10, 10]),  # type: ignore[arg-type]
    ],
    ids=[
        "none",
        "list",
        "short mask",
        "long mask",
        "integer mask",
        "2-d",
        "floats",
        "empty",
        "no row",
        "a list of ids",
    ],
)
def test_a_replacement_that_a_scheduler_cannot_use_is_the_plugins_fault(open_tiny: Open, value: Any) -> None:
    processor = open_tiny(broken("replacement", lambda: value))
    with pytest.raises(ProcessorError, match=r"Broken\.replacement"):
        processor.process("<image>", [img()])
    with pytest.raises(ProcessorError, match=r"Broken\.replacement"):
        processor.count("image", (4, 4))


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("prepare", None),
        ("prepare", [1, 2]),
        ("prepare", np.array([object()])),
        ("layout", {"grid": object()}),
        ("context", object()),
    ],
    ids=["none", "list", "objects", "a field", "a context"],
)
def test_what_has_no_identity_is_the_plugins_fault(open_tiny: Open, method: str, value: Any) -> None:
    cls = broken(method, lambda: value)
    if method == "layout":
        cls.replacement = lambda self, layout: Replacement.repeat(IMAGE, 1)  # type: ignore[method-assign]
    with pytest.raises(ProcessorError, match=f"{method}.*no identity"):
        open_tiny(cls).process("<image>", [img()])


def test_options_that_are_no_struct_are_the_plugins_fault(open_tiny: Open) -> None:
    with pytest.raises(ProcessorError, match=r"Broken\.Options"):
        open_tiny(type("Broken", (Tiny,), {"Options": dict}))


def test_a_class_that_lacks_a_method_cannot_be_opened(open_tiny: Open) -> None:
    class Half(ModelProcessor):
        Options = Options

    with pytest.raises(TypeError, match="abstract"):
        open_tiny(Half)


# ------------------------------------------------------------------ the request's own faults


@pytest.mark.case("2.5")
@pytest.mark.parametrize(("slots", "given"), [(3, 1), (0, 1), (1, 0), (1, 3)])
def test_slots_and_media_that_differ_are_named_with_both_counts(
    open_tiny: Open, decodes: list[str], slots: int, given: int
) -> None:
    processor = open_tiny()
    for prompt in ("word " + "<image> " * slots, [WORD] + [IMAGE] * slots):
        with pytest.raises(PlaceholderError) as caught:
            processor.process(prompt, [img()] * given)
        error = caught.value
        assert (error.expected, error.found, error.path) == (slots, given, "images")
        assert f"{slots} image placeholders <image>" in error.message
        assert f"{given} images" in error.message
    assert decodes == []


@pytest.mark.case("2.5")
def test_places_that_messages_leave_open_are_counted(open_tiny: Open) -> None:
    parts = [{"type": "image"}, {"type": "image", "image": img()}, {"type": "image"}]
    with pytest.raises(PlaceholderError, match="2 image places open, 1 images") as caught:
        open_tiny().process([{"role": "user", "content": parts}], [img()])
    assert (caught.value.expected, caught.value.found) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"images": None}, UsageError, "images"),
        ({"images": "abc"}, UsageError, "images"),
        ({"images": np.zeros((4, 4, 3), dtype=np.uint8)}, UsageError, "images"),
        ({"salt": 5}, UsageError, "salt"),
        ({"max_prompt_tokens": "9"}, UsageError, "max_prompt_tokens"),
        ({"max_prompt_tokens": 9.5}, UsageError, "max_prompt_tokens"),
        ({"tune": 5}, UsageError, "tune"),
        ({"edge": 5}, UsageError, "edge"),
        ({"depth": 5}, UsageError, "depth"),
        ({"tone": 256}, RequestError, "tone"),
        ({"tone": "5"}, RequestError, "tone"),
        ({"videos": [b"x"]}, RequestError, "videos"),
        ({"images": [5]}, MediaError, r"images\[0\]"),
        ({"images": [b"no image"]}, MediaError, r"images\[0\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(
    open_tiny: Open, arguments: dict[str, Any], error: type[MMPluginError], named: str
) -> None:
    processor = open_tiny()
    with pytest.raises(error, match=named) as caught:
        processor.process("<image>", **({"images": [img()]} | arguments))
    assert type(caught.value) is error
    with pytest.raises(error, match=named) as again:
        asyncio.run(processor.process_async("<image>", **({"images": [img()]} | arguments)))
    assert again.value.message == caught.value.message


@pytest.mark.parametrize("prompt", [None, 5, b"word", {"role": "user"}, [1.5], ["word"], [[1]], [2**70]], ids=str)
def test_a_prompt_of_no_known_kind_is_a_usage_error(open_tiny: Open, prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        open_tiny().process(prompt)


def test_text_that_is_no_text_is_the_clients_fault(open_tiny: Open) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        open_tiny().process("word \ud800")


@pytest.mark.parametrize(
    "size",
    [(1, 2, 3), 5, "ab", (4.0, 4), (None, 4), ("4", 4), Size("4", 4)],
    ids=str,  # type: ignore[arg-type]
)
def test_a_size_that_is_no_size_is_a_usage_error(open_tiny: Open, size: Any) -> None:
    with pytest.raises(UsageError, match="size"):
        open_tiny().count("image", size)


def test_a_count_of_what_is_not_served_is_refused(open_tiny: Open) -> None:
    with pytest.raises(RequestError, match="takes images, not audios"):
        open_tiny().count("audio", (4, 4))
    with pytest.raises(UsageError, match="modality: expected one of"):
        open_tiny().count("smell", (4, 4))
    with pytest.raises(MediaError, match="too thin"):
        open_tiny().count("image", (1, 51))


def test_the_first_broken_media_in_order_is_named(open_tiny: Open) -> None:
    good, bad = png(), png()[:-30]
    processor = open_tiny(cache_bytes=0)
    media = [good, good, bad + b"1", good, bad + b"2"]
    for _ in range(10):
        with pytest.raises(MediaError) as caught:
            processor.process("<image> " * 5, media)
        assert caught.value.path == "images[2]"
        with pytest.raises(MediaError) as caught:
            asyncio.run(processor.process_async("<image> " * 5, media))
        assert caught.value.path == "images[2]"


def test_a_broken_media_that_two_requests_bring_at_once_is_named_by_each_ones_own_place(open_tiny: Open) -> None:
    started, release = threading.Event(), threading.Event()

    class Slow(Tiny):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            if decoded.pixels.shape[0] == 8:
                started.set()
                release.wait(10)
                raise SizeError("no use")
            return super().prepare(decoded, layout, options)

    processor, bad = open_tiny(Slow), img(3, 8, 8)
    caught: dict[str, MediaError] = {}

    def run(name: str, media: list[np.ndarray]) -> None:
        try:
            processor.process([IMAGE] * len(media), media)
        except MediaError as error:
            caught[name] = error

    first = threading.Thread(target=run, args=("first", [bad]))
    second = threading.Thread(target=run, args=("second", [img(0), bad]))
    first.start()
    assert started.wait(10)
    second.start()
    while processor.cache_stats.joins == 0 and second.is_alive():
        time.sleep(0.001)
    assert processor.cache_stats.joins == 1
    release.set()
    first.join(10)
    second.join(10)
    assert (caught["first"].path, caught["second"].path) == ("images[0]", "images[1]")
    assert caught["second"].message == "images[1]: no use"
    assert caught["second"].reason == "size"


# ------------------------------------------------------------------ limits


@pytest.mark.case("2.4")
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_limit_is_on_the_expanded_prompt_and_comes_before_decoding(
    open_tiny: Open, decodes: list[str], fits: bool, asynchronous: bool
) -> None:
    processor = open_tiny()
    # word, 2 x (3 rows + line), word, 2 x (3 rows + line): 18 tokens.
    media, limit = [png(0), png(1)], 18 if fits else 17

    def process() -> MultimodalProcessorOutput:
        if asynchronous:
            return asyncio.run(processor.process_async("word <image> word <image>", media, max_prompt_tokens=limit))
        return processor.process("word <image> word <image>", media, max_prompt_tokens=limit)

    if fits:
        assert len(process().input_ids) == 18
        assert sorted(decodes) == ["images[0]", "images[1]"]
        return
    with pytest.raises(LimitError, match="at most 17 tokens in the expanded prompt, got 18") as caught:
        process()
    error = caught.value
    assert (error.setting, error.limit, error.value, error.path) == ("max_prompt_tokens", 17, 18, "prompt")
    assert decodes == []


@pytest.mark.case("2.4")
def test_the_limit_counts_cached_media_and_expanded_ids_alike(open_tiny: Open) -> None:
    processor = open_tiny()
    output = processor.process("word <image>", [png()])
    assert len(output.input_ids) == 9
    for prompt, expanded in (("word <image>", False), (output.input_ids, True)):
        with pytest.raises(LimitError):
            processor.process(prompt, [png()], max_prompt_tokens=8, expanded=expanded)
        assert len(processor.process(prompt, [png()], max_prompt_tokens=9, expanded=expanded).input_ids) == 9


def test_too_many_media_are_refused_before_any_is_opened(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny(limits={"max_items": 3})
    assert len(processor.process([IMAGE] * 3, [img()] * 3).mm_items) == 3
    decodes.clear()
    with pytest.raises(LimitError, match="at most 3 media inputs, got 4") as caught:
        processor.process([IMAGE] * 4, [b"garbage"] * 4)
    assert (caught.value.setting, caught.value.limit, caught.value.value) == ("max_items", 3, 4)
    assert decodes == []


def test_a_media_of_too_many_tokens_is_refused_before_decoding(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny(limits={"max_item_tokens": 8})
    assert len(processor.process("<image>", [png(0, 6, 9)]).input_ids) == 8
    decodes.clear()
    with pytest.raises(LimitError, match=r"images\[1\]: expected at most 8 tokens, got 10") as caught:
        processor.process("<image> <image>", [png(0, 6, 9), png(0, 6, 13)])
    assert (caught.value.setting, caught.value.path) == ("max_item_tokens", "images[1]")
    assert decodes == []


def test_bytes_and_pixels_beyond_a_limit_are_refused(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny(limits={"max_image_pixels": 54, "max_media_bytes": 1000})
    assert processor.process("<image>", [png(0, 6, 9)]).mm_items
    decodes.clear()
    for media, setting in ((png(0, 6, 10), "max_image_pixels"), (b"x" * 1001, "max_media_bytes")):
        with pytest.raises(LimitError) as caught:
            processor.process("<image>", [media])
        assert (caught.value.setting, caught.value.path) == (setting, "images[0]")
    assert decodes == []


@pytest.mark.case("3.1")
@pytest.mark.parametrize("config", [{"vocab_size": 1_000_001}, {"text_config": {"vocab_size": 2_000_000}}], ids=str)
def test_a_vocabulary_that_reaches_the_sentinels_is_refused(open_tiny: Open, config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        open_tiny(config=config)
    assert open_tiny(config={"vocab_size": 1_000_000}).spec is SPEC


# ------------------------------------------------------------------ keys and the cache


def identity(processor: ModelProcessor, image: Any, **arguments: Any) -> bytes | None:
    (item,) = processor.process("<image>", [image], **arguments).mm_items
    return item.identity


def test_a_repeated_media_is_not_decoded(open_tiny: Open, decodes: list[str], events: list[Event]) -> None:
    processor = open_tiny()
    first = processor.process("word <image>", [png()])
    second = processor.process("word <image>", [png()])
    assert decodes == ["images[0]"]
    assert same(first, second)
    keyed = [event for event in events if isinstance(event, ItemKeyed)]
    assert [event.cached for event in keyed] == [False, True]
    assert {event.identity for event in keyed} == {(first.mm_items[0].identity or b"").hex()}
    assert [(event.plugin, event.path, event.modality, event.num_tokens) for event in keyed] == [
        ("tiny", "images[0]", "image", 6)
    ] * 2
    assert processor.cache_stats.hits == 1


def test_one_media_many_times_in_one_request_is_decoded_once(open_tiny: Open, decodes: list[str]) -> None:
    output = open_tiny().process([IMAGE] * 12, [png()] * 12)
    assert len(decodes) == 1
    assert len({item.identity for item in output.mm_items}) == 1
    assert [item.offsets for item in output.mm_items] == [[(2 * index, 2 * index)] for index in range(12)]


@pytest.mark.case("3.7")
def test_every_option_that_changes_the_output_is_in_the_key(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny()
    clear = Image.new("RGBA", (4, 4), (9, 9, 9, 0))
    seen = {
        identity(processor, clear),
        identity(processor, clear, background=(0, 0, 0)),
        identity(processor, clear, tone=1),
        identity(open_tiny(edge=2), clear),
    }
    assert len(seen) == 4
    assert len(decodes) == 4


def test_an_option_of_another_modality_is_not_in_the_key(open_tiny: Open, decodes: list[str]) -> None:
    fields = {Modality.IMAGE: ("grid",), Modality.AUDIO: ()}
    processor = open_tiny(spec=toy_spec(Modality.IMAGE, Modality.AUDIO, name="tiny", fields=fields))
    assert identity(processor, png(), pitch=1) == identity(processor, png(), pitch=2) == identity(processor, png())
    assert len(decodes) == 1


def test_an_option_given_with_its_own_value_is_no_other_key(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny(tone=7)
    assert identity(processor, png()) == identity(processor, png(), tone=7)
    assert len(decodes) == 1


@pytest.mark.case("3.9")
@pytest.mark.case("8.1")
def test_what_an_item_depends_on_in_its_request_is_in_the_key(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny()
    (alone,) = processor.process("<image>", [png()]).mm_items
    three = processor.process([IMAGE] * 3, [png(), png(1), png(2)]).mm_items
    (again,) = processor.process("<image>", [png()]).mm_items
    assert (alone.num_tokens, again.num_tokens) == (6, 6)
    assert [item.num_tokens for item in three] == [1, 1, 1]
    assert alone.identity == again.identity != three[0].identity
    assert len(decodes) == 4


@pytest.mark.case("3.3")
@pytest.mark.case("3.10")
def test_a_salt_separates_tenants(open_tiny: Open, decodes: list[str]) -> None:
    processor = open_tiny()
    salts: list[Any] = [None, "a", "b", b"a", ""]
    seen = [identity(processor, png(), salt=salt) for salt in salts]
    assert len(set(seen)) == len(decodes) == 5
    assert [identity(processor, png(), salt=salt) for salt in salts] == seen
    assert len(decodes) == 5


def test_spec_and_version_are_in_the_identity(open_tiny: Open) -> None:
    specs = [SPEC, msgspec.structs.replace(SPEC, output_version=2), msgspec.structs.replace(SPEC, name="other")]
    assert len({identity(open_tiny(spec=spec), img()) for spec in specs}) == 3


@pytest.mark.case("1.2")
def test_entry_paths_of_the_same_pixels_have_one_identity(open_tiny: Open) -> None:
    processor = open_tiny(cache_bytes=0)
    array = img()
    ways = [array, Image.fromarray(array), png(), np.asfortranarray(array), bytearray(png())]
    assert len({identity(processor, way) for way in ways}) == 1


@pytest.mark.case("3.6")
def test_equal_bytes_of_another_shape_have_another_identity(open_tiny: Open) -> None:
    processor = open_tiny()
    data = img(0, 12, 4)
    assert identity(processor, data) != identity(processor, data.reshape(4, 12, 3))


def test_a_failure_is_not_kept(open_tiny: Open) -> None:
    class Once(Tiny):
        failures = 1

        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            if type(self).failures:
                type(self).failures -= 1
                raise RuntimeError
            return super().prepare(decoded, layout, options)

    processor = open_tiny(Once)
    with pytest.raises(ProcessorError):
        processor.process("<image>", [img()])
    assert processor.process("<image>", [img()]).mm_items


def test_fields_are_the_items_own_and_cannot_be_written(open_tiny: Open) -> None:
    processor = open_tiny()
    (first,) = processor.process("<image>", [img()]).mm_items
    with pytest.raises(ValueError, match="read-only"):
        first.grid[0] = 9
    first.set("grid", np.array([9, 9]))
    (second,) = processor.process("<image>", [img()]).mm_items
    assert second.grid.tolist() == [2, 3]


@pytest.mark.parametrize(
    "view",
    [
        lambda pixels: pixels,
        lambda pixels: pixels[::2],
        lambda pixels: pixels.reshape(-1),
        torch.from_numpy,
        lambda pixels: torch.from_numpy(pixels)[1:],
    ],
    ids=["itself", "strided", "flat", "tensor", "part of a tensor"],
)
def test_a_feature_is_no_view_of_the_callers_pixels(open_tiny: Open, view: Callable[[np.ndarray], Any]) -> None:
    class View(Tiny):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
            return view(decoded.pixels)

    mine = img()
    expected = np.asarray(view(mine.copy())).copy()
    (item,) = open_tiny(View).process("<image>", [mine]).mm_items
    mine.fill(255)
    assert np.array_equal(np.asarray(item.feature), expected)


# ------------------------------------------------------------------ ids that are expanded already


def test_expanded_ids_give_the_same_request(open_tiny: Open) -> None:
    processor = open_tiny()
    media = [png(0), png(1, 4, 4)]
    output = processor.process("word <image> other <image>", media)
    assert same(processor.process(output.input_ids, media, expanded=True), output)
    assert same(processor.process(output.input_ids.tolist(), media, expanded=True), output)


@pytest.mark.case("7.6")
@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids[:-1],
        lambda ids: ids[1:][:3],
        lambda ids: [WORD],
        lambda ids: [3 if index == 2 else token for index, token in enumerate(ids)],
    ],
    ids=["cut", "short", "absent", "another token"],
)
def test_expanded_ids_that_do_not_match_are_refused(open_tiny: Open, change: Callable[[list[int]], list[int]]) -> None:
    processor = open_tiny()
    ids = processor.process("word <image>", [png()]).input_ids.tolist()
    with pytest.raises(PlaceholderError, match="item 0: expected its 8 tokens"):
        processor.process(change(ids), [png()], expanded=True)


@pytest.mark.case("2.9")
def test_a_placeholder_that_a_model_wrote_is_no_slot(open_tiny: Open) -> None:
    processor = open_tiny()
    output = processor.process("word <image>", [png()])
    ids = np.array([*output.input_ids, IMAGE])
    # The scheduler goes by the recorded offsets, whatever was generated since.
    assert pad_by_offsets(ids, output.mm_items)[-1] == IMAGE
    assert token_modalities_of(output.mm_items, len(ids))[-1] == 0


@pytest.mark.case("2.1")
@pytest.mark.parametrize("place", [0, 1, -1])
def test_expanded_ids_hold_no_placeholder_but_those_of_the_media(open_tiny: Open, place: int) -> None:
    processor = open_tiny()
    ids = processor.process("word <image> word", [png()]).input_ids.tolist()
    assert len(processor.process(ids, [png()], expanded=True).mm_items) == 1
    with pytest.raises(PlaceholderError) as caught:
        processor.process([*ids[:place], IMAGE, *ids[place:]], [png()], expanded=True)
    assert caught.value.path == "prompt"
    with pytest.raises(PlaceholderError, match="expected 0 <image> for the images that were given, got 6"):
        processor.process(ids, expanded=True)


# ------------------------------------------------------------------ options at load


def test_load_wins_over_checkpoint_over_default_and_call_over_all(open_tiny: Open) -> None:
    settings = {"tone": 2, "edge": 3, "depth": 4, "image_processor_type": "Tiny"}
    assert msgspec.structs.asdict(open_tiny(checkpoint=settings, tone=9).options) == {
        "background": (255, 255, 255),
        "tone": 9,
        "pitch": 0,
        "edge": 3,
        "depth": 4,
    }
    processor = open_tiny(checkpoint=settings)
    base = img().astype(np.int16)
    for arguments, tone in (({}, 2), ({"tone": 30}, 30)):
        (item,) = processor.process("<image>", [img()], **arguments).mm_items
        assert np.array_equal(item.feature, base + tone)


def test_an_author_may_say_where_settings_are_read(open_tiny: Open) -> None:
    class Elsewhere(Options, frozen=True, kw_only=True):
        @classmethod
        def read_settings(cls, checkpoint: Any, modality: Modality) -> dict[str, Any]:
            if checkpoint.config.get("broken"):
                raise UsageError("settings.json: tone is missing", argument="checkpoint")
            return {"tone": 7, "depth": len(checkpoint.config), "unknown": 1}

    class Model(Tiny):
        Options = Elsewhere

    options = open_tiny(Model, config={"a": 1, "b": 2}).options
    assert (options.tone, options.depth, options.edge) == (7, 2, 4)
    assert (
        open_tiny(Model, checkpoint={"tone": 9}, config={"a": 1}).options.tone == 7
    )  # the usual files are not looked into
    with pytest.raises(UsageError, match=r"settings\.json: tone is missing"):
        open_tiny(Model, config={"broken": True})
    with pytest.raises(UsageError, match="read_settings"):
        open_tiny(Model, read_settings=1)


@pytest.mark.parametrize("options", [{"tune": 1}, {"depth": 1}, {"tone": "1"}, {"tone": 256}, {"edge": None}], ids=str)
def test_options_that_loading_may_not_give(open_tiny: Open, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        open_tiny(**options)


# ------------------------------------------------------------------ async and threads


def test_async_equals_sync_and_runs_nothing_heavy_on_the_loops_thread(open_tiny: Open, executor: Threads) -> None:
    ran: list[str] = []

    class Watched(Tiny):
        def context(self, counts: Mapping[Modality, int]) -> bool:
            ran.append(threading.current_thread().name)
            return super().context(counts)

        def layout(self, *arguments: Any) -> Any:
            ran.append(threading.current_thread().name)
            return super().layout(*arguments)

        def prepare(self, *arguments: Any) -> Any:
            ran.append(threading.current_thread().name)
            return super().prepare(*arguments)

        def replacement(self, *arguments: Any) -> Any:
            ran.append(threading.current_thread().name)
            return super().replacement(*arguments)

    media = [png(0), png(1)]
    expected = open_tiny().process("word <image> <image>", media, tone=3, salt="s")
    before = executor.submitted
    processor = open_tiny(Watched)
    for arguments in (((media,), {}), ((), {"images": media})):
        positional, named = arguments
        found = asyncio.run(processor.process_async("word <image> <image>", *positional, tone=3, salt="s", **named))
        assert same(found, expected)
    assert len(ran) == 1 + 2 * 3 + 1  # the second request only needs the context
    assert all(name.startswith("item-stage") for name in ran)
    assert executor.submitted - before >= 2 * (1 + 2 + 2 + 1)


def test_many_async_requests_at_once_are_each_their_own(open_tiny: Open) -> None:
    processor = open_tiny()

    async def run() -> list[MultimodalProcessorOutput]:
        return await asyncio.gather(
            *(processor.process_async("<image> <image>", [png(seed), png(seed + 1)]) for seed in range(20))
        )

    fresh = open_tiny(cache_bytes=0)
    for seed, output in enumerate(asyncio.run(run())):
        assert same(output, fresh.process("<image> <image>", [png(seed), png(seed + 1)]))


@pytest.mark.case("3.11")
@pytest.mark.parametrize("cache_bytes", [0, 2000, 1 << 24])
def test_sixteen_threads_get_what_one_gets(open_tiny: Open, cache_bytes: int) -> None:
    random = np.random.default_rng(5)
    maze = img(0, 8, 8)
    mazes = []
    for index in range(8):  # images that differ in one level
        other = maze.copy()
        other[index % 8, 3, 1] ^= 1
        mazes.append(other)
    plans = [random.integers(0, 8, int(random.integers(1, 5))).tolist() for _ in range(96)]
    alone = open_tiny(cache_bytes=0)
    expected = [alone.process([WORD] + [IMAGE] * len(plan), [mazes[index] for index in plan]) for plan in plans]
    processor = open_tiny(cache_bytes=cache_bytes)

    def run(plan: Sequence[int]) -> MultimodalProcessorOutput:
        return processor.process([WORD] + [IMAGE] * len(plan), [mazes[index] for index in plan])

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(run, plans))
    assert all(same(left, right) for left, right in zip(found, expected, strict=True))


def test_positions_of_a_plugin_are_asked_with_the_items(open_tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, Any]] = []

    def positions(
        items: Sequence[Any], *, seq: int, config: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, int]:
        asked.append((len(items), seq, config["vocab_size"]))
        return np.zeros((3, seq), dtype=np.int64), -4

    def failing(items: Sequence[Any], *, seq: int, config: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        raise LookupError("lost")

    original = ModelSpec.load
    for function in (positions, failing):
        monkeypatch.setattr(
            ModelSpec, "load", lambda self, name, f=function: f if name == "positions" else original(self, name)
        )
        processor = open_tiny(spec=msgspec.structs.replace(SPEC, positions="tiny:positions"))
        if function is positions:
            output = processor.process("word <image>", [png()])
            assert output.mrope_positions is not None
            assert (output.mrope_positions.shape, output.mrope_position_delta) == ((3, 9), -4)
            assert asked == [(1, 9, 12)]
        else:
            with pytest.raises(ProcessorError, match="positions failed: LookupError"):
                processor.process("word <image>", [png()])


def test_a_request_inside_the_executors_own_threads_ends(open_tiny: Open, executor: Threads) -> None:
    processor = open_tiny()

    def inside(seed: int) -> MultimodalProcessorOutput:
        return processor.process("<image> <image>", [png(seed), png(seed + 1)])

    # As many requests as the executor has threads, so that nobody is left to do what they wait for.
    futures = [executor.submit(inside, 10 * index) for index in range(8)]
    assert all(len(future.result(timeout=30).mm_items) == 2 for future in futures)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        np.zeros((3, 8), dtype=np.int64),
        (np.zeros((3, 6), dtype=np.int64), 0),
        (np.zeros((3, 8), dtype=np.int32), 0),
        (np.zeros((3, 8), dtype=np.int64), 0.5),
        ([[0] * 8] * 3, 0),
    ],
    ids=range(6),
)
def test_positions_that_no_model_can_read_are_the_plugins_fault(
    open_tiny: Open, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    def positions(items: Sequence[Any], *, seq: int, config: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        assert seq == 8
        return wrong

    original = ModelSpec.load
    monkeypatch.setattr(
        ModelSpec, "load", lambda self, name: positions if name == "positions" else original(self, name)
    )
    processor = open_tiny(spec=msgspec.structs.replace(SPEC, positions="tiny:positions"))
    with pytest.raises(ProcessorError, match="must return positions"):
        processor.process("<image>", [png()])
