"""Media that a processor or an encoder prepared already: accepted as they are, checked in every respect, equal to raw ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mm_plugin.errors import LimitError, MediaError, RequestError, UsageError
from mm_plugin.identity.framing import feature_digest
from mm_plugin.inputs import MultimodalProcessorOutput, PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.items import Modality, MultimodalDataItem, MultimodalInputFormat
from mm_plugin.testing.embedding import embed_in_chunks
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.end_to_end import Request

_VOCABULARY = 320


def random_table(width: int) -> torch.nn.Embedding:
    """A text embedding of a tiny checkpoint's vocabulary.

    Args:
        width: channels.
    """
    weight = torch.randn(_VOCABULARY, width, generator=torch.Generator().manual_seed(3))
    table = torch.nn.Embedding(*weight.shape)
    table.weight.data.copy_(weight)
    return table.requires_grad_(False)


class PreparedMediaTests(PluginTests):
    """Raw, prepared and encoded media give one result. Needs `processor`, `encoder`, and the processors that `FORMS` names.

    Attributes:
        FORMS: fixtures of processors, one for each form of a feature.
        FEATURE_NAMES: by modality, the name under which the reference's processor gives the feature.
        HIDDEN: channels of an embedding.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"form": "FORMS"}
    FORMS: ClassVar[Sequence[str]] = ("processor", "exact")
    FEATURE_NAMES: ClassVar[Mapping[Modality, str]]
    HIDDEN: ClassVar[int]

    def raw(self) -> Request:
        """A request with raw media, one of each modality, and text around them."""
        raise NotImplementedError

    def prepared(self, item: MultimodalDataItem, feature: Any) -> ProcessorOutput:
        """An item as the output of the model's own processor."""
        fields = {name: torch.from_numpy(np.array(value)) for name, value in item.model_specific_data.items()}
        return ProcessorOutput(fields | {self.FEATURE_NAMES[item.modality]: feature})

    def encoded(self, item: MultimodalDataItem, encoder: Any) -> PrecomputedEmbeddings:
        """An item as embeddings that were made elsewhere."""
        (embeddings,) = encoder.encode(item.modality, [item])
        return PrecomputedEmbeddings(embeddings, dict(item.model_specific_data))

    def again(self, processor: Any, items: Sequence[MultimodalDataItem], media: Sequence[Any]) -> Any:
        """The raw request with other media instead of its own."""
        given: dict[str, list[Any]] = {}
        for item, value in zip(items, media, strict=True):
            given.setdefault(item.modality.argument, []).append(value)
        return processor.process(self.raw().prompt, **given)

    @pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
    def test_prepared_media_give_the_ids_and_embeddings_of_raw_ones(
        self, form: str, kind: Any, encoder: Any, request: pytest.FixtureRequest
    ) -> None:
        processor, table = request.getfixturevalue(form), random_table(self.HIDDEN)
        raw = self.raw().process(processor)
        found = self.again(processor, raw.mm_items, [self.prepared(item, kind(item.feature)) for item in raw.mm_items])
        assert {item.format for item in found.mm_items} == {MultimodalInputFormat.PROCESSOR_OUTPUT}
        self._same_ids(raw, found)
        expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
        assert torch.equal(embed_in_chunks(found, table, encoder, size=len(raw.input_ids)), expected)
        assert torch.allclose(embed_in_chunks(found, table, encoder, size=7), expected, rtol=0, atol=1e-5)

    def test_embeddings_that_were_made_elsewhere_are_written_as_they_are(self, processor: Any, encoder: Any) -> None:
        table = random_table(self.HIDDEN)
        raw = self.raw().process(processor)
        found = self.again(processor, raw.mm_items, [self.encoded(item, encoder) for item in raw.mm_items])
        assert {item.format for item in found.mm_items} == {MultimodalInputFormat.PRECOMPUTED_EMBEDDING}
        self._same_ids(raw, found)
        expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
        for size in (1, 5, 7, len(raw.input_ids)):
            assert torch.equal(embed_in_chunks(found, table, {}, size=size), expected)

    def test_all_three_forms_of_an_item_stand_side_by_side(self, processor: Any, encoder: Any) -> None:
        table, made = random_table(self.HIDDEN), self.raw()
        raw = made.process(processor)
        seen: dict[Modality, int] = {}
        for item in raw.mm_items:
            argument, index = item.modality.argument, seen.setdefault(item.modality, 0)
            seen[item.modality] += 1
            media = [
                made.media[argument][index], self.prepared(item, item.feature), self.encoded(item, encoder)
            ]  # fmt: skip
            prompt = self.placeholder(item.modality) * 3
            output = processor.process(prompt, **{argument: media}, **made.options)
            found = embed_in_chunks(output, table, encoder, size=11)
            (embeddings,) = encoder.encode(item.modality, [item])
            for each in output.mm_items:
                ((start, end),) = each.offsets
                torch.testing.assert_close(found[start : end + 1], embeddings, rtol=0, atol=1e-5)
            assert len({each.identity for each in output.mm_items}) == 3  # the form is part of an identity

    def placeholder(self, modality: Modality) -> str:
        """What stands for one media input in a prompt."""
        raise NotImplementedError

    def _same_ids(self, left: MultimodalProcessorOutput, right: MultimodalProcessorOutput) -> None:
        for name in ("input_ids", "token_modalities", "mrope_positions"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name


class PreparedFieldsTests(PluginTests):
    """Prepared media of one modality: what does not fit is the client's fault. Needs `processor` and `encoder`.

    Attributes:
        MODALITY: of the media.
        PLACEHOLDER: what stands for one of them in a prompt.
        GOOD: fields and feature of a media input, by name.
        FEATURE: name of the feature among them.
        ACCEPTED: by id, changes of `GOOD` that leave it valid.
        TOKENS: that it stands for.
        HIDDEN: channels of an embedding.
        WRONG: by id, changes of `GOOD` (`...` takes a name away), and a pattern of what must be said.
        TOO_LARGE: changes of `GOOD` that stand for more tokens than an item may have.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"accepted": "ACCEPTED", "wrong": "WRONG", "large": "TOO_LARGE"}
    MODALITY: ClassVar[Modality]
    PLACEHOLDER: ClassVar[str]
    GOOD: ClassVar[Mapping[str, Any]]
    FEATURE: ClassVar[str]
    ACCEPTED: ClassVar[Sequence[Mapping[str, Any]]]
    TOKENS: ClassVar[int]
    HIDDEN: ClassVar[int]
    WRONG: ClassVar[Sequence[tuple[Mapping[str, Any], str]]]
    TOO_LARGE: ClassVar[Sequence[Mapping[str, Any]]]

    def changed(self, changes: Mapping[str, Any], *, without_feature: bool = False) -> dict[str, Any]:
        """The good fields, changed."""
        fields = {**self.GOOD, **changes}
        return {
            name: value
            for name, value in fields.items()
            if value is not ... and not (without_feature and name == self.FEATURE)
        }

    def take(self, processor: Any, *media: Any) -> Any:
        """The items of a request with these media."""
        return processor.process(self.PLACEHOLDER * len(media), **{self.MODALITY.argument: list(media)}).mm_items

    def embeddings(self, value: float = 0, *, tokens: int | None = None, **arguments: Any) -> PrecomputedEmbeddings:
        """Embeddings of the good fields, all of one value."""
        rows = np.full((self.TOKENS if tokens is None else tokens, self.HIDDEN), value, np.float32)
        return PrecomputedEmbeddings(rows, self.changed({}, without_feature=True), **arguments)

    def test_every_valid_form_is_taken(self, processor: Any, encoder: Any, accepted: Mapping[str, Any]) -> None:
        output = processor.process(
            self.PLACEHOLDER, **{self.MODALITY.argument: [ProcessorOutput(self.changed(accepted))]}
        )
        assert output.mm_items[0].num_tokens == self.TOKENS
        embeds = embed_in_chunks(output, random_table(self.HIDDEN), encoder, size=3)
        assert embeds.shape == (len(output.input_ids), self.HIDDEN)
        assert torch.isfinite(embeds).all()

    def test_a_feature_that_cannot_be_written_is_taken(self, processor: Any, encoder: Any) -> None:
        frozen = np.array(self.GOOD[self.FEATURE])
        frozen.flags.writeable = False
        (item,) = self.take(processor, ProcessorOutput(self.changed({self.FEATURE: frozen})))
        (embeddings,) = encoder.encode(self.MODALITY, [item])
        assert embeddings.shape == (self.TOKENS, self.HIDDEN)

    def test_fields_that_do_not_fit_are_the_clients_fault(
        self, processor: Any, wrong: tuple[Mapping[str, Any], str]
    ) -> None:
        changes, said = wrong
        with pytest.raises(MediaError, match=said) as caught:
            self.take(processor, ProcessorOutput(self.changed({})), ProcessorOutput(self.changed(changes)))
        assert caught.value.path == f"{self.MODALITY.argument}[1]"
        # The next request is not affected.
        assert self.take(processor, ProcessorOutput(self.changed({})))[0].num_tokens == self.TOKENS

    def test_fields_that_promise_too_much_are_refused_by_the_limit(
        self, processor: Any, large: Mapping[str, Any]
    ) -> None:
        rows = np.zeros((2, self.HIDDEN), np.float32)
        for media in (
            ProcessorOutput(self.changed(large)),
            PrecomputedEmbeddings(rows, self.changed(large, without_feature=True)),
        ):
            with pytest.raises(LimitError) as caught:
                self.take(processor, media)
            assert caught.value.setting == "max_item_tokens"

    @pytest.mark.parametrize("kind", ["too few", "too many", "none", "flat", "integers", "missing", "list"])
    def test_embeddings_that_do_not_fit_are_the_clients_fault(self, processor: Any, kind: str) -> None:
        rows: Any = {
            "too few": np.zeros((self.TOKENS - 1, self.HIDDEN), np.float32),
            "too many": np.zeros((self.TOKENS + 1, self.HIDDEN), np.float32),
            "none": np.zeros((0, self.HIDDEN), np.float32),
            "flat": np.zeros(self.TOKENS, np.float32),
            "integers": np.zeros((self.TOKENS, self.HIDDEN), np.int32),
            "missing": None,
            "list": [[0.0] * self.HIDDEN] * self.TOKENS,
        }[kind]
        with pytest.raises(MediaError, match=rf"{self.MODALITY.argument}\[0\]: .*{self.TOKENS}"):
            self.take(processor, PrecomputedEmbeddings(rows, self.changed({}, without_feature=True)))

    def test_an_identity_of_the_callers_own_stands_for_embeddings(self, processor: Any) -> None:
        name = self.MODALITY.argument.encode().ljust(32, b"i")
        made = [self.embeddings(value, identity=name) for value in (0, 0, 1)]
        first, second = (self.take(processor, each)[0].identity for each in made[:2])
        assert first == second
        with pytest.raises(RequestError, match="give each content and preparation a name of its own"):
            self.take(processor, made[2])
        # A name that equals the digest of other embeddings still gives another identity than theirs.
        victim = np.ones((self.TOKENS, self.HIDDEN), np.float32)
        forged = self.embeddings(0, identity=feature_digest(victim))
        honest = self.take(processor, self.embeddings(1))[0].identity
        assert self.take(processor, forged)[0].identity != honest
        assert self.take(processor, self.embeddings(0))[0].identity != first
        with pytest.raises(UsageError, match="32 bytes"):
            self.take(processor, self.embeddings(0, identity=b"short"))

    def test_a_request_that_fails_binds_no_identity(self, processor: Any) -> None:
        name = self.MODALITY.argument.encode().ljust(32, b"f")
        first, second = (self.embeddings(level, identity=name) for level in (0, 1))
        with pytest.raises(MediaError):
            self.take(processor, first, b"neither an image nor a video")
        assert len(self.take(processor, second)) == 1
        with pytest.raises(RequestError, match="give each content and preparation a name of its own"):
            self.take(processor, first)
