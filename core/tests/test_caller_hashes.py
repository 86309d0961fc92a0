"""Hashes by which a caller knows its media: how they are read, what they become, and that one stands for one media input."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from toy import TOKENS, Toy, audio, img, png, toy_spec, word_tokenizer

from mm_plugin.cache import MemoryStore
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.events import Event, HashIgnored
from mm_plugin.identity import caller_identity, parse_caller_hash, parse_caller_name
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.media import VideoFrames
from mm_plugin.processor import ModelProcessor

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sglang_sentinels.json").read_text())
SPEC = toy_spec(*Modality)
Open = Callable[..., ModelProcessor]


@pytest.fixture
def open_three(open_words: Open) -> Open:
    def make(runtime: Any = None, **limits: Any) -> ModelProcessor:
        return open_words(Toy, SPEC, runtime=runtime, **limits)

    return make


def video(seed: int = 0) -> VideoFrames:
    return VideoFrames([img(seed), img(seed + 1)], fps=2.0)


def one(processor: ModelProcessor, image: Any, entry: Any, **arguments: Any) -> MultimodalDataItem:
    """The item of one image whose caller gives one hash."""
    (item,) = processor.process("word <image>", [image], mm_hashes=[entry], **arguments).mm_items
    return item


def natural(image: Any, open_three: Open, **arguments: Any) -> bytes | None:
    """What its identity is where the caller gives no hash."""
    (item,) = open_three().process("word <image>", [image], **arguments).mm_items
    return item.identity


def fallbacks(events: list[Event]) -> list[HashIgnored]:
    return [event for event in events if isinstance(event, HashIgnored)]


# ------------------------------------------------------------------ how entries are read

READ: list[tuple[Any, int | None]] = [
    ("0", 0),
    ("ff", 255),
    ("FF", 255),
    ("0xff", 255),
    ("0XFf", 255),
    ("00ff", 255),
    ("f" * 16, 2**64 - 1),
    ("1" + "0" * 16, 2**64),
    ("f" * 1024, 16**1024 - 1),
    (0, 0),
    (255, 255),
    (2**200, 2**200),
    (16**1024 - 1, 16**1024 - 1),
    ("f" * 1025, None),
    (16**1024, None),
    (-1, None),
    ("-1", None),
    ("+1", None),
    ("f_f", None),
    ("1_000", None),
    (" ff", None),
    ("ff ", None),
    ("ff\n", None),
    ("f f", None),
    ("", None),
    ("0x", None),
    ("x1", None),
    ("0xx1", None),
    ("fg", None),
    ("0b1", 0xB1),
    ("\uff11", None),
    ("\u0663", None),
    (True, None),
    (False, None),
    (1.0, None),
    (float("nan"), None),
    (b"ff", None),
    ([1], None),
    ({}, None),
    (None, None),
]


@pytest.mark.parametrize(("entry", "value"), READ, ids=lambda part: repr(part)[:24])
def test_an_entry_is_a_whole_number_or_hexadecimal_digits(entry: Any, value: int | None) -> None:
    assert parse_caller_hash(entry) == value


NAMES = ["request-7/image 1", " ff", "ff\n", "-1", "1_000", "\uff11", "e\u0301", "\u00e9", "\0", "f" * 1025, "x" * 1024]
NO_NAMES = ["", "x" * 1025, "\ud800", -1, 16**1024, True, 1.0, b"ff", [1], {}, None]


@pytest.mark.parametrize("entry", NAMES[:-2] + NAMES[-1:], ids=repr)
def test_text_that_is_no_number_is_a_name(entry: str) -> None:
    assert parse_caller_name(entry) == entry


@pytest.mark.parametrize("entry", NO_NAMES, ids=lambda part: repr(part)[:24])
def test_what_cannot_be_a_name(entry: Any) -> None:
    assert parse_caller_name(entry) is None


@pytest.mark.parametrize(
    ("entry", "value"), [pair for pair in READ if pair[1] is not None], ids=lambda part: repr(part)[:24]
)
def test_a_number_is_one_as_a_name_too(entry: Any, value: int) -> None:
    assert parse_caller_name(entry) == value


def test_each_name_is_an_identity_of_its_own(open_three: Open, events: list[Event]) -> None:
    names = ["a-1", "A-1", "a-1 ", "e\u0301", "\u00e9", "g", "0xg", "255 ", "ff"]
    found = [one(open_three(), img(), entry).identity for entry in names]
    assert len(set(found)) == len(names)
    assert found == [one(open_three(), img(1), entry).identity for entry in names]  # of the name, not of the pixels
    assert found[-1] == one(open_three(), img(), 255).identity
    assert fallbacks(events) == []
    item = one(open_three(), img(), "a-1")
    assert item.identity is not None
    assert (item.identity, bytes.fromhex(item.identity_hex or "")) == (found[0], found[0])


def test_a_name_stands_for_one_media_input(open_three: Open) -> None:
    processor = open_three()
    one(processor, img(), "request-7/image 1")
    with pytest.raises(RequestError, match="stood for another media input"):
        one(processor, img(1), "request-7/image 1")


@pytest.mark.parametrize("entry", [" ff", "request-7", "x" * 1024], ids=lambda part: repr(part)[:24])
def test_a_raw_hash_is_a_number(open_three: Open, events: list[Event], entry: str) -> None:
    assert one(open_three(), img(), entry, mm_hash_scope="raw").identity == natural(img(), open_three)
    (event,) = fallbacks(events)
    assert event.why == "it is not a hexadecimal number"


@pytest.mark.parametrize("entry", [entry for entry in NO_NAMES if entry is not None], ids=lambda part: repr(part)[:24])
def test_a_malformed_entry_ignores_itself_alone(open_three: Open, events: list[Event], entry: Any) -> None:
    processor = open_three()
    output = processor.process("<image> <image>", [img(0), img(1)], mm_hashes=[entry, "a1"])
    wanted = open_three().process("<image> <image>", [img(0), img(1)], mm_hashes=[None, "a1"]).mm_items
    assert [item.identity for item in output.mm_items] == [item.identity for item in wanted]
    assert output.mm_items[0].identity == natural(img(0), open_three)
    assert output.mm_items[1].identity != natural(img(1), open_three)
    (event,) = fallbacks(events)
    assert event.path == "mm_hashes[images][0]"


def test_nothing_is_reported_of_an_entry_that_is_to_be_computed(open_three: Open, events: list[Event]) -> None:
    assert one(open_three(), img(), None).identity == natural(img(), open_three)
    assert fallbacks(events) == []


@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_all_spellings_of_one_number_are_one_hash(open_three: Open, scope: str) -> None:
    found = [one(open_three(), img(), entry, mm_hash_scope=scope) for entry in ("00aBc", "0xABC", "0Xabc", 2748)]
    assert len({(item.identity, item.hash, item.pad_values) for item in found}) == 1


# ------------------------------------------------------------------ alignment

MEDIA = {
    "images": [img(1), img(2)],
    "videos": [video(3)],
    "audios": [audio(4), audio(5)],
}
PROMPT = "<audio> <image> word <video> <audio> <image>"  # not the order of the arguments


def hashes(processor: ModelProcessor, given: Any) -> dict[str, list[int | None]]:
    """The 64-bit hashes that media got in raw scope, by argument; None where the caller gave none."""
    output = processor.process(PROMPT, **MEDIA, mm_hashes=given, mm_hash_scope="raw")
    found: dict[str, list[int | None]] = {"images": [], "videos": [], "audios": []}
    for item in output.mm_items:
        found[item.modality.argument].append(item.hash if item.identity is None else None)
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, 3, 4, 5], {"images": [1, 2], "videos": [3], "audios": [4, 5]}),
        ((1, "2", 3, None, "0x5"), {"images": [1, 2], "videos": [3], "audios": [None, 5]}),
        (
            {"audios": [4, 5], "videos": [3], "images": [1, 2]},
            {"images": [1, 2], "videos": [3], "audios": [4, 5]},
        ),
        ({"videos": ["f"]}, {"images": [None, None], "videos": [15], "audios": [None, None]}),
        (
            {"images": None, "videos": [], "audios": [None, 7]},
            {"images": [None] * 2, "videos": [None], "audios": [None, 7]},
        ),
        ({}, {"images": [None, None], "videos": [None], "audios": [None, None]}),
        (None, {"images": [None, None], "videos": [None], "audios": [None, None]}),
    ],
    ids=["flat", "tuple", "mapping", "one kind", "empty kinds", "empty", "none"],
)
def test_hashes_are_aligned_with_the_arguments_whatever_the_prompts_order(
    open_three: Open, events: list[Event], given: Any, expected: dict[str, list[int | None]]
) -> None:
    assert hashes(open_three(), given) == expected
    assert fallbacks(events) == []


@pytest.mark.parametrize(
    "given",
    [
        [],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
        "12345",
        b"12345",
        7,
        {1, 2, 3, 4, 5},
        {"images": [1]},
        {"images": [1, 2, 3]},
        {"images": [1, 2], "videos": [3, 4]},
        {"images": [1, 2], "audios": [3]},
        {"images": "12"},
        {"images": 12},
        {"images": np.array([1, 2])},
        np.arange(5),
    ],
    ids=repr,
)
def test_hashes_that_are_not_aligned_are_all_ignored_with_one_warning(
    open_three: Open, events: list[Event], caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    processor = open_three()
    nothing = {"images": [None, None], "videos": [None], "audios": [None, None]}
    with caplog.at_level(logging.WARNING, "mm_plugin"):
        for _ in range(3):
            assert hashes(processor, given) == nothing
    assert len([record for record in caplog.records if "mm_hashes" in record.getMessage()]) == 1
    assert [event.path for event in fallbacks(events)] == ["mm_hashes"] * 3


def test_hashes_for_media_that_are_not_there_are_ignored(open_three: Open, events: list[Event]) -> None:
    output = open_three().process("<image>", [img()], mm_hashes={"images": [1], "audios": [2]})
    assert output.mm_items[0].identity == natural(img(), open_three)
    assert len(fallbacks(events)) == 1


# ------------------------------------------------------------------ what they become


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN["hashes"] if int(case["hash_in"]) >= 0], ids=lambda c: c["id"]
)
def test_in_raw_scope_sentinels_are_those_of_the_published_scheme(open_three: Open, case: dict[str, Any]) -> None:
    for entry in (int(case["hash_in"]), f"{int(case['hash_in']):x}", f"0x{int(case['hash_in']):X}"):
        processor = open_three()
        output = processor.process("<image>", [img(0, 6)], mm_hashes=[entry], mm_hash_scope="raw")
        (item,) = output.mm_items
        values = [int(value) for value in case["pad_values"]]
        assert (item.identity, item.hash, item.pad_value) == (None, int(case["hash_kept"]), values[0])
        assert list(item.pad_values or ()) == values
        assert output.padded_input_ids.tolist() == [*values, *values[:2]]


@pytest.mark.parametrize("more", [2**64, 2**64 + 2**100, 5 << 4000], ids=["65 bits", "101 bits", "4003 bits"])
def test_bits_above_64_count_where_fingerprinted_and_are_dropped_where_raw(open_three: Open, more: int) -> None:
    assert one(open_three(), img(), 7).identity != one(open_three(), img(), 7 + more).identity
    short, long = (one(open_three(), img(), entry, mm_hash_scope="raw") for entry in (7, 7 + more))
    assert (short.hash, short.pad_values) == (long.hash, long.pad_values)
    assert short.hash == 7


def test_a_fingerprinted_identity_does_not_depend_on_the_media_but_on_all_that_could_change_it(
    open_three: Open,
) -> None:
    base = one(open_three(), img(0), 7)
    assert base.identity == one(open_three(), img(1), 7).identity  # another server, where nothing is bound
    assert base.hash == int.from_bytes((base.identity or b"")[:8], "big")
    assert base.identity == one(open_three(), img(0), 7, pitch=3).identity  # an option of audio
    others = [
        one(open_three(), img(0), 8),
        one(open_three(), img(0), 7, tone=1),
        one(open_three(), img(0), 7, background=(0, 0, 0)),
        one(open_three(), img(0), 7, salt="tenant"),
        one(open_three(), img(0), 7, salt=b"tenant"),
        open_three().process("<video>", videos=[video(0)], mm_hashes=[7]).mm_items[0],
        open_three().process("<image> " * 3, [img(0)] * 3, mm_hashes=[7, None, None]).mm_items[0],
    ]
    assert len({base.identity, *(item.identity for item in others)}) == 1 + len(others)


def test_everything_is_in_a_callers_identity() -> None:
    base: dict[str, Any] = {
        "spec_name": "m",
        "output_version": 1,
        "modality": 1,
        "value": 5,
        "options": b"o" * 32,
        "context": None,
        "salt": None,
    }
    changes = [
        ("spec_name", "n"),
        ("output_version", 2),
        ("modality", 2),
        ("value", 6),
        ("value", 5 + 2**64),
        ("options", b"p" * 32),
        ("context", False),
        ("context", True),
        ("salt", ""),
        ("salt", b""),
        ("salt", "t"),
    ]
    made = [caller_identity(**base), *(caller_identity(**(base | {name: value})) for name, value in changes)]
    assert len(set(made)) == len(made)
    assert {len(identity) for identity in made} == {32}


def test_a_salt_is_refused_where_it_could_not_separate_tenants(open_three: Open) -> None:
    with pytest.raises(UsageError, match="salt") as caught:
        one(open_three(), img(), 7, mm_hash_scope="raw", salt="tenant")
    assert caught.value.argument == "salt"


@pytest.mark.parametrize("scope", ["", "RAW", None, 1])
def test_a_scope_that_there_is_not_is_a_usage_error(open_three: Open, scope: Any) -> None:
    with pytest.raises(UsageError) as caught:
        one(open_three(), img(), 7, mm_hash_scope=scope)
    assert caught.value.argument == "mm_hash_scope"


# ------------------------------------------------------------------ one hash, one media input


@pytest.mark.case("3.10")
@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_reuse_for_another_media_is_the_clients_fault(open_three: Open, scope: str) -> None:
    processor = open_three()
    one(processor, img(0, 3), "abc", mm_hash_scope=scope)
    for other in (img(1, 3), img(0, 5)):  # of the same size, and of another one
        for _ in range(2):
            with pytest.raises(RequestError, match=r"images\[0\].*another media input") as caught:
                one(processor, other, 0xABC, mm_hash_scope=scope)
            assert caught.value.path == "images[0]"
    assert one(processor, img(0, 3), "abc", mm_hash_scope=scope).num_tokens == 3


@pytest.mark.case("3.10")
@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_one_hash_for_two_media_of_one_request_is_refused(open_three: Open, scope: str) -> None:
    with pytest.raises(RequestError, match=r"images\[1\]"):
        open_three().process("<image> <image>", [img(0), img(1)], mm_hashes=[7, 7], mm_hash_scope=scope)
    output = open_three().process("<image> <image>", [img(0)] * 2, mm_hashes=[7, 7], mm_hash_scope=scope)
    first, second = output.mm_items
    assert first.pad_values == second.pad_values


@pytest.mark.case("3.10")
def test_tenants_may_use_one_hash_for_what_they_like(open_three: Open) -> None:
    processor = open_three()
    found = [one(processor, img(seed), 7, salt=salt) for seed, salt in enumerate([None, "a", "b", b"a"])]
    assert len({item.identity for item in found}) == 4
    with pytest.raises(RequestError):
        one(processor, img(0), 7, salt="a")


@pytest.mark.case("3.10")
def test_in_raw_scope_other_options_make_another_media(open_three: Open) -> None:
    processor = open_three()
    one(processor, img(), 7, mm_hash_scope="raw")
    with pytest.raises(RequestError):
        one(processor, img(), 7, mm_hash_scope="raw", tone=1)
    with pytest.raises(RequestError):  # equal in the bits that count
        one(processor, img(1), 7 + 2**64, mm_hash_scope="raw")
    assert one(processor, img(), 7, tone=1).num_tokens == 3  # the scopes are apart


@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_one_media_by_several_entry_paths_is_no_conflict(open_three: Open, scope: str) -> None:
    processor = open_three()
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    ways = [png(), bytearray(png()), img(), Image.fromarray(img()), url, np.asfortranarray(img())]
    found = [one(processor, way, 7, mm_hash_scope=scope) for way in ways]
    assert len({item.pad_values for item in found}) == 1


@pytest.mark.case("3.10")
@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_bindings_are_bounded_and_the_least_recently_used_is_forgotten(open_three: Open, scope: str) -> None:
    processor = open_three(max_caller_hashes=2)
    one(processor, img(1), 1, mm_hash_scope=scope)
    one(processor, img(2), 2, mm_hash_scope=scope)
    one(processor, img(1), 1, mm_hash_scope=scope)  # used, so that 2 is the older one
    one(processor, img(3), 3, mm_hash_scope=scope)
    with pytest.raises(RequestError):
        one(processor, img(9), 1, mm_hash_scope=scope)
    with pytest.raises(RequestError):
        one(processor, img(9), 3, mm_hash_scope=scope)
    assert one(processor, img(9), 2, mm_hash_scope=scope).num_tokens == 3


@pytest.mark.case("3.10")
def test_a_binding_is_remembered_by_every_processor_that_shares_the_runtime(
    open_three: Open, make_runtime: Any
) -> None:
    shared = make_runtime()
    one(open_three(shared), img(0), 7)
    with pytest.raises(RequestError):
        one(open_three(shared), img(1), 7)
    assert one(open_three(), img(1), 7).num_tokens == 3


class SlowStore(MemoryStore):
    """A store between whose answer and whose caller there is time for others."""

    def get(self, key: Any) -> Any:
        found = super().get(key)
        time.sleep(0.01)
        return found


@pytest.mark.case("3.10")
@pytest.mark.parametrize("scope", ["fingerprinted", "raw"])
def test_of_requests_that_bring_one_hash_with_several_media_at_once_one_wins(
    open_three: Open, make_runtime: Any, scope: str
) -> None:
    shared = make_runtime()
    shared.caller_hashes.store = SlowStore(10)
    processors = [open_three(shared) for _ in range(2)]
    meeting = threading.Barrier(6)

    def ask(seed: int) -> bool:
        meeting.wait(10)
        try:
            one(processors[seed % 2], img(seed), 7, mm_hash_scope=scope)
        except RequestError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(ask, range(6))) == 1


# ------------------------------------------------------------------ through a registry

HOOKS = """
import json
from mm_plugin import Modality, ModelSpec, hookimpl

@hookimpl
def mm_register_models():
    return ModelSpec(
        name="shown", output_version=1, architectures=("Shown",), modalities=(Modality.IMAGE,),
        placeholders={Modality.IMAGE: "<image>"}, fields={Modality.IMAGE: ()}, padding="runs",
        processor="shown.processor:Processor", encoder="shown.processor:Processor",
    )
"""
CODE = """
from mm_plugin import BaseOptions, Modality, ModelProcessor, Replacement

class Processor(ModelProcessor):
    Options = BaseOptions
    def context(self, counts):
        return None
    def layout(self, modality, size, options, context):
        return {}
    def prepare(self, decoded, layout, options):
        return decoded.pixels.copy()
    def replacement(self, layout):
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], 2)
"""


@pytest.mark.case("3.10")
def test_a_binding_survives_across_the_processors_of_one_registry(
    site: Any, open_registry: Callable[..., Any], tmp_path: Path
) -> None:
    site.install("shown", HOOKS, architectures=["Shown"], files={"shown/processor.py": CODE})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Shown"], "vocab_size": 9}))
    (folder / "preprocessor_config.json").write_text("{}")
    word_tokenizer(TOKENS.values()).save_pretrained(str(folder))
    registry = open_registry()
    one(registry.load_processor(folder), img(0), "beef")
    with pytest.raises(RequestError, match="another media input"):
        one(registry.load_processor(folder), img(1), "beef")
    assert one(open_registry().load_processor(folder), img(1), "beef").num_tokens == 2
