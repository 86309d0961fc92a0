"""The author's kit: each sweep passes a correct plugin, and each of its rules is broken by one plugin that it alone catches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mm_plugin import (
    BaseOptions,
    DecodedMedia,
    Modality,
    ModelProcessor,
    ModelSpec,
    OptionScope,
    Replacement,
    Settings,
    Size,
)
from mm_plugin.cache import ComputeCache, MemoryStore
from mm_plugin.demo import sample_images
from mm_plugin.events import Observers
from mm_plugin.processor import Runtime
from mm_plugin.testing import chunks, sweep_options, sweep_provenance

TEMPLATE = (
    "{% for message in messages %}[start]{{ message['role'] }} "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}[end]{% endfor %}"
)
SPEC = ModelSpec(
    name="kit",
    output_version=1,
    modalities=(Modality.IMAGE,),
    placeholders={Modality.IMAGE: "<image>"},
    fields={Modality.IMAGE: ("size",)},
    padding="runs",
    processor="kit:Right",
    encoder="kit:Encoder",
)


class Checkpoint:
    folder = Path("nowhere")
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in ("[start]", "[end]", "<image>")]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)

    def preprocessor(self, modality: Modality) -> Mapping[str, Any]:
        return {}


class Options(BaseOptions, frozen=True, kw_only=True):
    size: Annotated[int, OptionScope.request("image")] = 4
    tone: Annotated[Literal["plain", "dark"], OptionScope.load("image")] = "plain"
    rate: Annotated[int, OptionScope.request("video")] = 3
    fixed: Annotated[int, OptionScope.checkpoint("image")] = 1


class Right(ModelProcessor):
    Options = Options

    def context(self, counts: Mapping[Modality, int]) -> None:
        return None

    def layout(self, modality: Modality, size: Size, options: Any, context: None) -> dict[str, Any]:
        return {"size": options.size}

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> np.ndarray:
        flat = decoded.pixels[: layout["size"], 0].astype(np.int16)
        return -flat if options.tone == "dark" else flat

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], layout["size"])


class ReadsAnothersOption(Right):
    """An image depends on what is declared to be about videos."""

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> np.ndarray:
        return super().prepare(decoded, layout, options) + options.rate


class OptionsOfVideo(Options, frozen=True, kw_only=True):
    size: Annotated[int, OptionScope.request("video")] = 4


class DeclaresWrongly(Right):
    """What changes images is declared to be about videos."""

    Options = OptionsOfVideo


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with ThreadPoolExecutor(2) as pool:
        yield Runtime(
            settings=Settings(),
            executor=pool,
            cache=ComputeCache(MemoryStore(1 << 20)),
            observers=Observers(),
            owner={"plugin": "kit", "distribution": "kit", "version": "1"},
        )


def opener(cls: type[ModelProcessor], runtime: Runtime) -> Any:
    checkpoint: Any = Checkpoint()
    return lambda **options: cls(SPEC, checkpoint, runtime, options)


MEDIA = {Modality.IMAGE: np.arange(40 * 3 * 3, dtype=np.uint8).reshape(40, 3, 3)}


def test_a_correct_plugin_passes_and_reports_what_changed(runtime: Runtime) -> None:
    trials = sweep_options(opener(Right, runtime), MEDIA)
    assert {trial.option for trial in trials} == {"background", "size", "tone", "rate"}
    assert {trial.option for trial in trials if trial.changed} == {"size", "tone"}
    assert not any(trial.new_key for trial in trials if trial.option == "rate")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ReadsAnothersOption, "rate=12 on images changes the item, although its OptionScope does not name them"),
        (DeclaresWrongly, "size=16 on images changes the item"),
    ],
)
def test_a_wrong_plugin_is_caught(runtime: Runtime, cls: type[ModelProcessor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        sweep_options(opener(cls, runtime), MEDIA)


def test_a_source_key_that_misses_an_option_is_caught(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.processor.options import OptionTable

    monkeypatch.setattr(OptionTable, "effective", lambda self, options, modality: bytes(32))
    with pytest.raises(AssertionError, match="size=16 on images changes the item but not the source key"):
        sweep_options(opener(Right, runtime), MEDIA)


def test_an_option_that_enters_every_key_is_caught(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.identity import digest, frame
    from mm_plugin.processor.options import OptionTable

    monkeypatch.setattr(OptionTable, "effective", lambda self, options, modality: digest(frame(options)))
    with pytest.raises(AssertionError, match="rate=12 on images changes the source key"):
        sweep_options(opener(Right, runtime), MEDIA)


def test_an_option_of_which_no_value_is_accepted_is_reported(runtime: Runtime) -> None:
    with pytest.raises(AssertionError, match="size: none of the values tried was accepted"):
        sweep_options(opener(Right, runtime), MEDIA, values={"size": ["wide"]})


def test_provenance_holds_for_a_correct_reader(runtime: Runtime) -> None:
    assert sweep_provenance(opener(Right, runtime)(), media=MEDIA[Modality.IMAGE], rounds=60) == 0


@pytest.mark.case("2.1")
def test_a_reader_that_encodes_messages_as_they_are_is_caught(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mm_plugin.prompt import PromptReader

    monkeypatch.setattr(
        PromptReader, "_encode_messages", lambda self, messages: self._encode(self._render(messages), rendered=True)
    )
    with pytest.raises(AssertionError, match="became a token of the model"):
        sweep_provenance(opener(Right, runtime)())


def test_a_reader_that_changes_ordinary_text_is_caught(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.prompt import PromptReader

    original = PromptReader._encode_messages

    def careless(self: PromptReader, messages: Any) -> np.ndarray:
        ids = original(self, messages)
        return np.insert(ids, 1, 5)  # a stray token of text

    monkeypatch.setattr(PromptReader, "_encode_messages", careless)
    with pytest.raises(AssertionError, match="got other ids than the tokenizer's own"):
        sweep_provenance(opener(Right, runtime)())


def test_a_refusal_is_counted_only_where_it_is_allowed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.errors import RequestError
    from mm_plugin.prompt import PromptReader

    original = PromptReader._encode_messages

    def strict(self: PromptReader, messages: Any) -> np.ndarray:
        if "[end]" in str(messages):
            raise RequestError("no")
        return original(self, messages)

    monkeypatch.setattr(PromptReader, "_encode_messages", strict)
    with pytest.raises(AssertionError, match="was refused"):
        sweep_provenance(opener(Right, runtime)())
    assert sweep_provenance(opener(Right, runtime)(), may_refuse=True) > 0


def test_chunks_cover_a_prompt_once() -> None:
    assert list(chunks(7, 3)) == [(0, 3), (3, 3), (6, 1)]
    assert list(chunks(0, 3)) == []


def test_the_images_are_two_different_jpegs() -> None:
    (left, first), (right, second) = sample_images()
    assert left != right
    assert first[:3] == second[:3] == b"\xff\xd8\xff"
    assert first != second
