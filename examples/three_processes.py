"""A server in three processes that send one another bytes: tokenizer, scheduler, GPU worker.

    python examples/three_processes.py CHECKPOINT IMAGE

processes the prompt twice. The second time the scheduler finds all but the last token in its prefix tree.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefix_tree import PrefixTree, usable

from mm_plugin import MultimodalProcessorOutput, RequestError, discover, wire

CHUNK = 32  # tokens of a step


def send(connection: Connection, value: Any) -> None:
    """A value as one message; a transport of several frames would send those of `wire.encode`."""
    connection.send_bytes(b"".join(wire.pack(value)))


def receive(connection: Connection) -> Any:
    """The value of the next message; None at the end."""
    return wire.unpack(connection.recv_bytes())


def tokenize(checkpoint: str, requests: Connection, scheduler: Connection) -> None:
    """The tokenizer process: a processor and the preprocess cache. It decodes what strangers send."""
    with discover() as registry:
        processor = registry.load_processor(checkpoint)
        while (request := receive(requests)) is not None:
            try:
                send(scheduler, processor.process(request["prompt"], request["images"]))
            except RequestError as error:
                send(scheduler, error)
    send(scheduler, None)


def schedule(tokenizer: Connection, worker: Connection, results: Connection) -> None:
    """The scheduler process: ids, spans and the prefix tree; neither torch nor transformers."""
    tree = PrefixTree(capacity=100_000)
    while (output := receive(tokenizer)) is not None:
        if not isinstance(output, MultimodalProcessorOutput):
            send(results, output)
            continue
        inputs, contents = output.split()  # features pass through, and are not kept
        length, hit = len(inputs.input_ids), usable(inputs, tree.match(inputs.padded_input_ids))
        chunks, at = [], hit
        while at < length:
            taken = inputs.clip_chunk(at, min(CHUNK, length - at)) or inputs.clip_chunk(at, length - at)
            chunks.append((at, taken))
            at += taken
        send(worker, [inputs, contents, chunks])
        answer = receive(worker)
        if not isinstance(answer, Exception):
            tree.insert(inputs.padded_input_ids)
            answer |= {"hit": hit, "chunks": chunks, "torch": "torch" in sys.modules}
        send(results, answer)
    send(worker, None)


def work(checkpoint: str, scheduler: Connection) -> None:
    """The worker process: encoder, embedding cache, language model."""
    import torch

    from mm_plugin import ForwardBatch, RequestMedia, embed_mm_inputs

    with discover() as registry:
        encoder = registry.load_encoder(checkpoint, device="cpu", dtype=torch.float32)
        embedding = text_embedding(checkpoint)
        while (message := receive(scheduler)) is not None:
            inputs, contents, chunks = message
            inputs.attach(contents)
            media, rows = RequestMedia(inputs), []
            error: Exception | None = None
            for start, taken in chunks:
                ids = torch.from_numpy(inputs.input_ids[start : start + taken].copy())
                batch = ForwardBatch([media], [start], [taken])
                step = embed_mm_inputs(ids, batch, embedding, encoder, registry.embedding_cache)
                error = error or next((failed.error for failed in step.failed), None)
                rows.append(step.input_embeds.detach())  # a language model would go on from here
                media.advance(start + taken)
            media.finish()
            send(
                scheduler, error or {"rows": torch.cat(rows).numpy()}
            )  # a tensor would make the scheduler import torch


def text_embedding(checkpoint: str) -> Any:
    """The language model's embedding; of random weights here, since the example has no language model."""
    import torch

    from mm_plugin import Checkpoint

    config = Checkpoint.open(checkpoint).config
    text = {**config, **config.get("text_config", {})}
    torch.manual_seed(0)
    return torch.nn.Embedding(text["vocab_size"], text["hidden_size"])


def serve(checkpoint: str, requests: Sequence[dict[str, Any]]) -> list[Any]:
    """What becomes of requests, one after another: a mapping with the rows that were embedded, or the request's error."""
    context = multiprocessing.get_context("spawn")
    (here, to_tokenizer), (to_scheduler, from_tokenizer) = context.Pipe(), context.Pipe()
    (to_worker, in_worker), (to_caller, results) = context.Pipe(), context.Pipe()
    processes = [
        context.Process(target=tokenize, args=(checkpoint, to_tokenizer, to_scheduler)),
        context.Process(target=schedule, args=(from_tokenizer, to_worker, to_caller)),
        context.Process(target=work, args=(checkpoint, in_worker)),
    ]
    for process in processes:
        process.start()
    found = []
    for request in requests:
        send(here, request)
        found.append(receive(results))
    send(here, None)
    for process in processes:
        process.join(60)
    return found


if __name__ == "__main__":
    folder, file = sys.argv[1:]
    prompt = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
    request = {"prompt": prompt, "images": [Path(file).read_bytes()]}
    for answer in serve(folder, [request, request]):
        print(
            answer
            if isinstance(answer, Exception)
            else f"{answer['hit']} tokens cached, {len(answer['rows'])} computed"
        )
