"""From prompt and media to logits, whole and in chunks, compared with the model's own implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from mm_plugin.cache.embedding import EmbeddingCache
from mm_plugin.embed.routine import embed_mm_inputs
from mm_plugin.inputs.batch import ForwardBatch
from mm_plugin.inputs.processed import MultimodalInputs, MultimodalProcessorOutput
from mm_plugin.inputs.request_media import RequestMedia
from mm_plugin.testing.embedding import CallCounter, embed_in_chunks
from mm_plugin.testing.plugin_tests.base import PluginTests

# More than any prompt of these tests has tokens.
_WHOLE = 10_000


class Request(msgspec.Struct, frozen=True, eq=False):
    """What is passed to `process`.

    Attributes:
        prompt: text.
        media: by argument, such as `images`.
        options: of the request.

    >>> Request("a <image>", {"images": [b"a PNG file"]}, {"max_pixels": 784}).options
    {'max_pixels': 784}
    """

    prompt: str
    media: Mapping[str, list[Any]] = {}
    options: Mapping[str, Any] = {}

    def process(self, processor: Any) -> Any:
        """The processed request."""
        return processor.process(self.prompt, **self.media, **self.options)


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What the model's own implementation makes of a request.

    Attributes:
        logits: [N, vocabulary] float32.
        input_embeds: [N, hidden] float32; not compared where None.
        input_ids: [N], expanded by the reference itself; not compared where None.
    """

    logits: torch.Tensor
    input_embeds: torch.Tensor | None = None
    input_ids: list[int] | None = None


class EndToEndTests(PluginTests):
    """Ids, embeddings and logits of whole requests equal the reference's. Needs `processor`, `encoder` and `model`.

    Attributes:
        CASES: by id, whatever `request_of` makes a request of; requests with and without media.
        TOLERANCE: between logits.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"case": "CASES"}
    CASES: ClassVar[Mapping[str, Any]]
    TOLERANCE: ClassVar[float] = 1e-4

    def request_of(self, case: Any) -> Request:
        """The request of a case."""
        raise NotImplementedError

    def expected(
        self, model: Any, request: Request, output: MultimodalProcessorOutput, fixtures: pytest.FixtureRequest
    ) -> Expected:
        """What the reference makes of a request, as far as possible without this package."""
        raise NotImplementedError

    def text_embedding(self, model: Any) -> Any:
        """The model's text embedding."""
        return model.get_input_embeddings()

    def logits(self, model: Any, output: MultimodalProcessorOutput, embeds: torch.Tensor) -> torch.Tensor:
        """The model's logits [N, vocabulary] on embeddings that were made here, at the positions of the output."""
        found = output.mrope_positions
        positions = None if found is None else torch.from_numpy(found)[:, None]  # [3, 1, N]
        with torch.no_grad():
            logits: torch.Tensor = model(inputs_embeds=embeds[None], position_ids=positions).logits[0]
        return logits

    def test_ids_embeddings_and_logits_equal_the_reference(
        self, case: Any, processor: Any, encoder: Any, model: Any, request: pytest.FixtureRequest
    ) -> None:
        made = self.request_of(case)
        output = made.process(processor)
        counter = CallCounter(encoder)
        embeds = embed_in_chunks(output, self.text_embedding(model), counter.as_mapping(), size=_WHOLE)
        assert sorted(counter.calls) == sorted(len(part) for part in made.media.values() if part)  # one per modality
        expected = self.expected(model, made, output, request)
        if expected.input_ids is not None:
            assert output.input_ids.tolist() == expected.input_ids
        if expected.input_embeds is not None:
            assert torch.allclose(embeds, expected.input_embeds, rtol=0, atol=1e-5)
        found = self.logits(model, output, embeds)
        assert torch.allclose(found, expected.logits, rtol=0, atol=self.TOLERANCE)
        # The comparison can fail: logits are not all alike, and those without the media are far away.
        assert float(expected.logits.std()) > 0.05
        if output.mm_items:
            without = embeds.clone()
            without[torch.from_numpy(output.token_modalities > 0)] = 0
            assert not torch.allclose(self.logits(model, output, without), expected.logits, rtol=0, atol=1e-2)


class ChunkTests(PluginTests):
    """However a request is cut, its embeddings are the same and each item is encoded once. Needs `processor`, `encoder`.

    Attributes:
        SEVERAL: by id, whatever `request_of` makes a request with several items of.
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"several": "SEVERAL"}
    SEVERAL: ClassVar[Mapping[str, Any]]

    def request_of(self, case: Any) -> Request:
        """The request of a case."""
        raise NotImplementedError

    def single(self) -> Request:
        """A request with one item."""
        raise NotImplementedError

    def sharing(self) -> tuple[Request, Request]:
        """Two requests: one with one item only, the other with that item last and another one first."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls) -> torch.nn.Embedding:
        """A text embedding of the model's width."""
        raise NotImplementedError

    def test_every_chunk_size_gives_the_same_bits_from_one_call_kept_by_the_cache(
        self, several: Any, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        made = self.request_of(several)
        output = made.process(processor)
        cache, counter = EmbeddingCache(1 << 24), CallCounter(encoder)
        calls = sorted(len(part) for part in made.media.values() if part)
        whole = embed_in_chunks(output, table, counter.as_mapping(), size=_WHOLE, cache=cache)
        assert sorted(counter.calls) == calls
        for size in range(1, len(output.input_ids) + 1):
            chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size, cache=cache)
            assert torch.equal(chunked, whole), size
        assert sorted(counter.calls) == calls

    def test_every_chunk_size_of_one_item_gives_the_same_bits_without_a_cache(
        self, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        output = self.single().process(processor)
        whole = embed_in_chunks(output, table, encoder, size=_WHOLE)
        for size in range(1, len(output.input_ids) + 1):
            counter = CallCounter(encoder)
            chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size)
            assert counter.calls == [1], size
            assert torch.equal(chunked, whole), size

    def test_every_chunk_size_encodes_each_item_once_without_a_cache(
        self, several: Any, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        output = self.request_of(several).process(processor)
        whole = embed_in_chunks(output, table, encoder, size=_WHOLE)
        for size in range(1, len(output.input_ids)):
            counter = CallCounter(encoder)
            chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size)
            assert sum(counter.calls) == len(output.mm_items), size
            assert torch.allclose(chunked, whole, rtol=0, atol=1e-5), size

    @pytest.mark.parametrize("size", [1, 3, 7, 20])
    def test_an_item_larger_than_the_cache_is_encoded_once(
        self, size: int, several: Any, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        output = self.request_of(several).process(processor)
        whole = embed_in_chunks(output, table, encoder, size=_WHOLE)
        counter, cache = CallCounter(encoder), EmbeddingCache(100)
        chunked = embed_in_chunks(output, table, counter.as_mapping(), size=size, cache=cache)
        assert torch.allclose(chunked, whole, rtol=0, atol=1e-5)
        assert sorted(counter.seen) == sorted((item.identity, item.num_tokens) for item in output.mm_items)
        assert cache.stats().entries == 0

    def test_model_ids_and_cache_ids_embed_alike(
        self, several: Any, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        output, cache = self.request_of(several).process(processor), EmbeddingCache(1 << 24)
        results = []
        for ids in (output.padded_input_ids, output.input_ids, output.input_ids.astype(np.int32)):
            batch = ForwardBatch([RequestMedia(MultimodalInputs.from_processor_output(output))], [0], [len(ids)])
            results.append(embed_mm_inputs(torch.from_numpy(ids.copy()), batch, table, encoder, cache).input_embeds)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_two_requests_share_one_call_and_one_item(
        self, processor: Any, encoder: Any, table: torch.nn.Embedding
    ) -> None:
        outputs = [made.process(processor) for made in self.sharing()]
        ids = torch.from_numpy(np.concatenate([output.padded_input_ids for output in outputs]))
        counter = CallCounter(encoder)
        inputs = [RequestMedia(MultimodalInputs.from_processor_output(output)) for output in outputs]
        batch = ForwardBatch(inputs, [0, 0], [len(output.padded_input_ids) for output in outputs])
        result = embed_mm_inputs(ids, batch, table, counter.as_mapping())
        assert result.failed == ()
        assert counter.calls == [2]
        left, right = result.input_embeds.split(batch.extend_seq_lens)
        (first,) = outputs[0].mm_items[0].offsets
        (second,) = outputs[1].mm_items[1].offsets
        assert torch.equal(left[first[0] : first[1] + 1], right[second[0] : second[1] + 1])
