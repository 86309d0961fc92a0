"""The author's kit: each sweep passes a right plugin, and each rule of it is broken by one plugin that it alone catches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from toy import PlainToy, ToyCheckpoint, owner_of, toy_spec
from transformers import PreTrainedTokenizerFast

from mm_plugin import (
    BaseOptions,
    DecodedMedia,
    Modality,
    ModelProcessor,
    MultimodalDataItem,
    MultimodalInputs,
    OptionScope,
    Processor,
    Settings,
)
from mm_plugin.demo import sample_images
from mm_plugin.runtime import Runtime
from mm_plugin.testing import chunks, sweep_options, sweep_provenance

TEMPLATE = (
    "{% for message in messages %}[start]{{ message['role'] }} "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}[end]{% endfor %}"
)
SPEC = toy_spec(Modality.IMAGE, Modality.VIDEO, name="kit")


def byte_tokenizer() -> Any:
    """Every byte is a token, so that any text can be read back."""
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("[start]", "[end]", "<image>", "<video>")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


class Options(BaseOptions, frozen=True, kw_only=True):
    size: Annotated[int, OptionScope.request("image")] = 4
    tone: Annotated[Literal["plain", "dark"], OptionScope.load("image")] = "plain"
    rate: Annotated[int, OptionScope.request("video")] = 3
    fixed: Annotated[int, OptionScope.checkpoint("image")] = 1


class Right(PlainToy):
    """As many rows as the option `size` says."""

    Options = Options

    def rows(self, modality: Modality, size: Any, options: Any, context: Any) -> int:
        return options.size

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> np.ndarray:
        flat = decoded.pixels[: layout["rows"], 0].astype(np.int16)
        return -flat if options.tone == "dark" else flat


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
    with Runtime(Settings(threads=2, preprocess_cache_bytes=1 << 20)) as made:
        yield made


def opener(cls: type[ModelProcessor], runtime: Runtime) -> Any:
    checkpoint: Any = ToyCheckpoint(byte_tokenizer(), config={})
    return lambda **options: Processor(cls, SPEC, checkpoint, runtime, options, owner=owner_of(SPEC))


MEDIA = {Modality.IMAGE: np.arange(40 * 3 * 3, dtype=np.uint8).reshape(40, 3, 3)}


def test_a_right_plugin_passes_and_shows_what_changed(runtime: Runtime) -> None:
    trials = sweep_options(opener(Right, runtime), MEDIA)
    assert {trial.option for trial in trials} == {"background", "size", "tone", "rate"}
    assert {trial.option for trial in trials if trial.changed} == {"size", "tone"}
    assert not any(trial.new_key for trial in trials if trial.option == "rate")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            ReadsAnothersOption,
            "rate=12 on images changes the item, although its OptionScope does not name them",
        ),
        (DeclaresWrongly, "size=16 on images changes the item, although its OptionScope does not name them"),
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


def test_provenance_holds_for_a_right_reader(runtime: Runtime) -> None:
    assert sweep_provenance(opener(Right, runtime)(), media=MEDIA[Modality.IMAGE], rounds=60) == 0


@pytest.mark.case("2.1")
def test_a_reader_that_encodes_messages_as_they_are_is_caught(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mm_plugin.prompt import PromptReader, encode_rendered

    monkeypatch.setattr(PromptReader, "_encode", lambda self, text: encode_rendered(self._tokenizer, text.plain))
    with pytest.raises(AssertionError, match="became a token of the model"):
        sweep_provenance(opener(Right, runtime)())


def test_a_reader_that_changes_ordinary_text_is_caught(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.prompt import PromptReader

    original = PromptReader._encode

    def careless(self: PromptReader, text: Any) -> np.ndarray:
        ids = original(self, text)
        return np.insert(ids, 1, 5)  # a stray token of text

    monkeypatch.setattr(PromptReader, "_encode", careless)
    with pytest.raises(AssertionError, match="got other ids than the tokenizer's own"):
        sweep_provenance(opener(Right, runtime)())


def test_a_refusal_is_counted_only_where_it_is_allowed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_plugin.errors import RequestError
    from mm_plugin.prompt import PromptReader

    original = PromptReader._encode

    def strict(self: PromptReader, text: Any) -> np.ndarray:
        if text.plain.count("[end]") > 1:  # a client's beside the template's own
            raise RequestError("no")
        return original(self, text)

    monkeypatch.setattr(PromptReader, "_encode", strict)
    with pytest.raises(AssertionError, match="was refused"):
        sweep_provenance(opener(Right, runtime)())
    assert sweep_provenance(opener(Right, runtime)(), may_refuse=True) > 0


def test_chunks_cover_a_prompt_once() -> None:
    def of(length: int, *whole: tuple[int, int]) -> MultimodalInputs:
        items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=[span], attention="whole") for span in whole]
        ids = np.arange(length)
        return MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids)

    assert list(chunks(of(7), 3)) == [(0, 3), (3, 3), (6, 1)]
    assert list(chunks(of(0), 3)) == []
    assert list(chunks(of(12, (1, 2), (4, 9)), 3)) == [(0, 3), (3, 1), (4, 6), (10, 2)]


def test_the_images_are_two_different_jpegs() -> None:
    (left, first), (right, second) = sample_images()
    assert left != right
    assert first[:3] == second[:3] == b"\xff\xd8\xff"
    assert first != second
