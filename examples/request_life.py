"""The life of requests in one worker: prefix hits, chunks, a failure, a retract, an abort, and a session's next turn.

    python examples/request_life.py CHECKPOINT IMAGE

A worker here stands for scheduler and GPU worker. Its language model is an embedding alone, and its KV cache the rows that it
embedded, so that `Running.rows` shows whether every row is right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefix_tree import PrefixTree, usable

from mm_plugin import Encoder, ForwardBatch, MultimodalInputs, Registry, RequestMedia, discover, embed_mm_inputs
from mm_plugin.scheduler import Lifecycle, encode_work, limit_chunk, merge

CHUNK = 24  # tokens of a request in one step


class Running:
    """A request under way.

    Attributes:
        media: what the worker keeps of its media inputs.
        computed: tokens whose rows are in the KV cache.
        rows: the KV cache, a row for each of them.
    """

    def __init__(self, media: RequestMedia) -> None:
        self.media, self.computed, self.rows = media, 0, torch.zeros(0)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.media.inputs.input_ids)


class Worker:
    """Embeds requests in steps, with a prefix tree in front.

    Args:
        registry: has the embedding cache.
        encoder: of the model.
        embedding: of its text.
        capacity: tokens of the prefix tree.
        budget: embeddings that the encoder makes in one step.
    """

    def __init__(self, registry: Registry, encoder: Encoder, embedding: Any, capacity: int, budget: int) -> None:
        self._registry, self._encoder, self._embedding, self._budget = registry, encoder, embedding, budget
        self._tree, self._cached = PrefixTree(capacity), dict[bytes, torch.Tensor]()
        self.lifecycle = Lifecycle(retain="feature")

    def admit(self, inputs: MultimodalInputs) -> Running:
        """Begin a request with what the prefix tree has of it."""
        request = Running(self.lifecycle.admit(inputs))
        self._resume(request)
        return request

    def _resume(self, request: Running) -> None:
        ids = request.media.inputs.padded_input_ids
        hit = usable(request.media.inputs, self._tree.match(ids))
        request.media.resume(hit)
        request.computed, request.rows = hit, self._rows_of(ids[:hit])

    def step(self, requests: Sequence[Running]) -> list[Running]:
        """Compute a chunk of each request; returns those that failed, which are over."""
        left, chunks = self._budget, []
        known = self._registry.embedding_cache.items(self._encoder.version, self._embedding.weight.dtype)
        for request in requests:
            media, at, rest = request.media, request.computed, request.length - request.computed
            # A span that must stay whole and is longer than a chunk gets a step with more space.
            space = media.inputs.clip_chunk(at, min(CHUNK, rest)) or media.inputs.clip_chunk(at, rest)
            chunk = limit_chunk(media, at, space, max_encode_tokens=left, cache=known)
            left -= encode_work(ForwardBatch([media], [at], [chunk]), known).num_tokens
            chunks.append(chunk)
        prefixes = [request.computed for request in requests]
        batch = ForwardBatch([request.media for request in requests], prefixes, chunks)
        ids = [
            request.media.inputs.input_ids[request.computed : request.computed + chunk]
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        out = embed_mm_inputs(
            torch.from_numpy(np.concatenate(ids)), batch, self._embedding, self._encoder, self._registry.embedding_cache
        )
        parts = torch.split(out.input_embeds.detach(), chunks)
        for index, (request, rows) in enumerate(zip(requests, parts, strict=True)):
            if index in out.failed_requests:
                request.media.abort()
            else:
                request.rows = torch.cat([request.rows, rows]) if request.computed else rows
                request.computed += chunks[index]
                request.media.advance(request.computed)
                self._remember(request)
        return [requests[index] for index in sorted(out.failed_requests)]

    def _remember(self, request: Running) -> None:
        """Rows that were computed go into the prefix tree, those of a request that failed never; a server would keep pages."""
        ids = request.media.inputs.padded_input_ids[: request.computed]
        self._tree.insert(ids)
        self._cached[ids.tobytes()] = request.rows

    def _rows_of(self, ids: np.ndarray) -> torch.Tensor:
        whole = (
            next(rows for known, rows in self._cached.items() if known.startswith(ids.tobytes())) if len(ids) else None
        )
        return torch.zeros(0) if whole is None else whole[: len(ids)]

    def run(self, requests: Sequence[Running]) -> list[Running]:
        """Steps until every prompt is computed; returns the requests that failed."""
        failed: list[Running] = []
        while running := [one for one in requests if one not in failed and one.computed < one.length]:
            failed += self.step(running)
        return failed

    def retract(self, request: Running) -> None:
        """Take a request's KV cache away; it begins again with what the prefix tree has by then."""
        self._resume(request)

    def next_turn(self, request: Running, turn: MultimodalInputs, generated: Sequence[int]) -> None:
        """Go on with a session: what was generated and the new turn are computed like the rest of a prompt."""
        request.media.next_turn(merge(request.media.inputs, turn, generated=list(generated)))


def text_embedding(checkpoint: str) -> torch.nn.Embedding:
    """The text embedding of a checkpoint, of random weights."""
    from three_processes import text_embedding as of_checkpoint

    found: torch.nn.Embedding = of_checkpoint(checkpoint)
    return found


def main(checkpoint: str, image: bytes) -> None:
    """Two requests with one image: the second computes what the first has not, then is retracted, then goes on."""
    with discover() as registry:
        processor = registry.load_processor(checkpoint)
        encoder = registry.load_encoder(checkpoint, dtype=torch.float32)
        worker = Worker(
            registry, encoder, text_embedding(checkpoint), 100_000, processor.largest("image").num_embeddings
        )
        prompt = "<|vision_start|><|image_pad|><|vision_end|>"
        first, request = (
            worker.admit(MultimodalInputs.from_processor_output(processor.process(prompt + text, [image])))
            for text in ("What is this?", "Who is this?")
        )
        print("failed:", worker.run([first]))
        first.media.finish()
        worker.retract(request)  # nothing of it is computed yet, and the tree has its image by now
        print("begins at", request.computed, "of", request.length, "tokens; failed:", worker.run([request]))
        worker.retract(request)
        print("after a retract it begins at", request.computed)
        worker.run([request])
        turn = MultimodalInputs.from_processor_output(processor.process(f"And this? {prompt}", [image]))
        worker.next_turn(request, turn, generated=[5, 6, 7])
        worker.run([request])
        print("after the next turn", request.computed, "tokens are computed")
        request.media.finish()
        print("kept alive:", worker.lifecycle.live())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_bytes())
