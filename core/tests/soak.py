"""A busy server in one process: every call at once, with faults, cancellations, forks and closings. Run by `test_soak.py`.

`python soak.py SEED REQUESTS` prints as JSON what went wrong, and the memory after each tenth of the requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy import PlainToy, ToyCheckpoint, img, owner_of, png, toy_spec, word_tokenizer

from mm_plugin.cache import EmbeddingCache
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.errors import MMPluginError, ProcessorError, UsageError
from mm_plugin.inputs import ForwardBatch, MultimodalInputs
from mm_plugin.items import Modality
from mm_plugin.processor import Processor
from mm_plugin.runtime import Runtime
from mm_plugin.scheduler import Lifecycle
from mm_plugin.settings import Settings

THREADS, LOOPS, TASKS = 62, 2, 6  # a loop has a thread of its own
IMAGES, HEIGHT, WIDTH, HIDDEN = 24, 6, 5, 4
FAULTY = 0.03  # of the calls of a plugin
SPEC = toy_spec(name="soaked")
TABLE = torch.nn.Embedding.from_pretrained(torch.full((16, HIDDEN), -1.0))


class Panic(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


FAULTS: list[Callable[[], BaseException]] = [
    lambda: ValueError("at random"),
    lambda: SystemExit(1),
    Panic,
    Mute,
    asyncio.CancelledError,
    GeneratorExit,
]


class Flaky(PlainToy):
    """Fails at random, in every way."""

    is_reliable = False

    def _maybe(self) -> None:
        if not self.is_reliable and random.random() < FAULTY:
            fault = random.choice(FAULTS)
            raise fault()

    def layout(self, *arguments: Any) -> Any:
        self._maybe()
        return super().layout(*arguments)

    def prepare(self, *arguments: Any) -> Any:
        self._maybe()
        return super().prepare(*arguments)


class Reliable(Flaky):
    is_reliable = True


def encode(items: Any) -> list[torch.Tensor]:
    if random.random() < FAULTY:
        fault = random.choice(FAULTS)
        raise fault()
    return [torch.full((item.num_tokens, HIDDEN), float(np.sum(item.feature))) for item in items]


def open_model(runtime: Runtime, cls: type[PlainToy] = Flaky) -> Processor:
    checkpoint: Any = ToyCheckpoint(word_tokenizer(SPEC.placeholders.values()))
    return Processor(cls, SPEC, checkpoint, runtime, {}, owner=owner_of(SPEC))


class World:
    """What all threads share, and what they found wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.arrays = [img(index, HEIGHT, WIDTH) for index in range(IMAGES)]
        self.files = [png(index, HEIGHT, WIDTH) for index in range(IMAGES)]
        with Runtime(Settings()) as runtime:
            reliable = open_model(runtime, Reliable)
            self.identities = [
                [reliable.process("<image>", [given]).mm_items[0].identity for given in kind]
                for kind in (self.arrays, self.files)
            ]
        self.faults: list[str] = []
        self.counts: dict[str, int] = {}
        self.done, self.wanted = 0, 0
        self.lock = threading.Lock()
        self.embeddings = EmbeddingCache(40 * HEIGHT * HIDDEN)
        self.lifecycle = Lifecycle()
        self.renew()

    def renew(self) -> None:
        """Another registry in place of this one, which other threads still use."""
        # Space for six images: entries are evicted all the time.
        self.runtime = Runtime(Settings(threads=3, preprocess_cache_bytes=6 * 600))
        self.model = open_model(self.runtime)

    def next(self) -> bool:
        with self.lock:
            self.done += 1
            return self.done <= self.wanted

    def note(self, what: str) -> None:
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def wrong(self, what: str) -> None:
        with self.lock:
            self.faults.append(what)

    # ---------------------------------------------------------------- checks

    def media(self, chance: random.Random) -> tuple[list[Any], list[bytes], list[int]]:
        kind = chance.randrange(2)
        chosen = [chance.randrange(IMAGES) for _ in range(chance.randrange(1, 5))]
        given = (self.arrays, self.files)[kind]
        return [given[index] for index in chosen], [self.identities[kind][index] for index in chosen], chosen

    def check(self, output: Any, identities: list[bytes], chosen: list[int]) -> None:
        self.note("served")
        for item, identity, index in zip(output.mm_items, identities, chosen, strict=True):
            if item.identity != identity or not np.array_equal(item.feature, self.arrays[index]):
                self.wrong(f"an item of image {index} is another's")

    def expected(self, error: BaseException) -> None:
        """An error that these calls may end with: a plugin's fault, or a registry or an executor that is gone."""
        gone = isinstance(error, UsageError) and error.argument in ("registry", "executor", "request")
        self.note(f"{type(error).__name__} {getattr(error, 'argument', '')}".strip())
        if not gone and not isinstance(error, ProcessorError):
            self.wrong(f"{type(error).__name__}: {getattr(error, 'message', '')}")

    # ---------------------------------------------------------------- calls

    def process(self, chance: random.Random) -> None:
        given, identities, chosen = self.media(chance)
        try:
            output = self.model.process("<image> " * len(given), given)
        except MMPluginError as error:
            self.expected(error)
            return
        self.check(output, identities, chosen)
        self.embed(output, chance, chosen)

    def embed(self, output: Any, chance: random.Random, chosen: list[int]) -> None:
        """The request in a worker, in chunks; another thread may abort it meanwhile."""
        media = self.lifecycle.admit(MultimodalInputs.from_processor_output(output))
        ids = torch.from_numpy(output.padded_input_ids)
        size, start = chance.randrange(1, 10), 0
        abort = threading.Timer(chance.random() / 500, media.abort) if chance.random() < 0.1 else None
        if abort is not None:
            abort.start()
        sums = [float(self.arrays[index].astype(np.int64).sum()) for index in chosen]
        owner = {
            at: index for index, item in enumerate(output.mm_items) for a, b in item.offsets for at in range(a, b + 1)
        }
        while start < len(ids) and not media.ended:
            end = min(len(ids), start + size)
            batch = ForwardBatch([media], [start], [end - start])
            step = embed_mm_inputs(ids[start:end], batch, TABLE, {Modality.IMAGE: encode}, self.embeddings)
            failed = {entry.item for entry in step.failed}
            for at, row in enumerate(step.input_embeds[:, 0].tolist(), start):
                wanted = -1.0 if at not in owner else 0.0 if owner[at] in failed else sums[owner[at]]
                if row != wanted:
                    self.wrong(f"row {at} is {row}, expected {wanted}")
            start = end
        media.finish()
        if abort is not None:
            abort.join()

    def prepare_item(self, chance: random.Random) -> None:
        given, identities, chosen = self.media(chance)
        try:
            found = self.model.prepare_item("image", given[0])
            if found.identity != identities[0]:
                self.wrong(f"an item of image {chosen[0]} is another's")
            self.model.count("image", (HEIGHT, WIDTH))
        except MMPluginError as error:
            self.expected(error)

    def clear(self, chance: random.Random) -> None:
        try:
            self.runtime.preprocess_store.clear()
            self.embeddings.invalidate()
            self.runtime.preprocess_cache.stats()
        except UsageError as error:
            self.expected(error)

    def close(self, chance: random.Random) -> None:
        with self.lock:
            old = self.runtime
            self.renew()
        old.close()

    def dead_executor(self, chance: random.Random) -> None:
        pool = ThreadPoolExecutor(2)
        model = open_model(Runtime(Settings(), executor=pool))
        given, identities, chosen = self.media(chance)
        stop = threading.Timer(chance.random() / 200, lambda: pool.shutdown(wait=False, cancel_futures=True))
        stop.start()
        for _ in range(3):
            try:
                self.check(model.process("<image> " * len(given), given), identities, chosen)
            except MMPluginError as error:
                self.expected(error)
        stop.join()
        pool.shutdown()

    def fork(self, chance: random.Random) -> None:
        """A child serves a request with the model of its parent, which 64 threads use."""
        given, identities, _ = self.media(chance)
        child = os.fork()
        if child == 0:
            code = 3
            try:
                Flaky.is_reliable = True
                output = self.model.process("<image> " * len(given), given)
                again = asyncio.run(self.model.process_async("<image> " * len(given), given))
                good = [[item.identity for item in each.mm_items] == identities for each in (output, again)]
                code = 0 if all(good) else 2
            except UsageError as error:
                code = 0 if error.argument == "registry" else 4  # closed meanwhile
            finally:
                os._exit(code)
        end = time.monotonic() + 20
        while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self.wrong("a forked child hangs")
                return
            time.sleep(0.002)
        self.note("forked")
        if found[1]:
            self.wrong(f"a forked child ended with {os.waitstatus_to_exitcode(found[1])}")

    async def cancelled(self, chance: random.Random) -> None:
        given, identities, chosen = self.media(chance)
        task = asyncio.ensure_future(self.model.process_async("<image> " * len(given), given))
        if chance.random() < 0.5:
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(chance.choice([0, 0, 0.0005]))
            task.cancel()
        try:
            self.check(await task, identities, chosen)
        except asyncio.CancelledError:
            self.note("cancelled")
        except MMPluginError as error:
            self.expected(error)

    # ---------------------------------------------------------------- threads

    def run_thread(self, seed: int) -> None:
        chance = random.Random(seed)
        self.start.wait()
        calls = [self.process, self.prepare_item, self.clear, self.close, self.dead_executor, self.fork]
        try:
            while self.next():
                chance.choices(calls, [60, 20, 4, 1, 4, 1.5])[0](chance)
        except BaseException as error:
            self.wrong(f"a thread ended with {type(error).__name__}")

    def run_loop(self, seed: int) -> None:
        async def one(number: int) -> None:
            chance = random.Random(seed * 100 + number)
            while self.next():
                await self.cancelled(chance)

        async def main() -> None:
            self.start.wait()
            await asyncio.gather(*(one(number) for number in range(TASKS)))

        try:
            asyncio.run(main())
        except BaseException as error:
            self.wrong(f"a loop ended with {type(error).__name__}")

    def serve(self, count: int) -> None:
        """So many more calls, from all threads and loops at once; every one of them ends."""
        self.wanted += count
        self.done = self.wanted - count
        threads = [threading.Thread(target=self.run_loop, args=(self.random.randrange(1 << 30),)) for _ in range(LOOPS)]
        threads += [threading.Thread(target=self.run_thread, args=(self.random.random(),)) for _ in range(THREADS)]
        self.start = threading.Barrier(len(threads))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.settle()

    def settle(self) -> None:
        """What must hold once nothing runs: no pin, no live request, and bytes that are those of the entries."""
        pool = self.runtime._own_pool
        if pool is not None:
            pool.shutdown()  # steps of cancelled requests may still run
        for name, store in (("preprocess", self.runtime.preprocess_store), ("embedding", self.embeddings.store)):
            stats, entries = store.stats(), store._entries  # type: ignore[attr-defined]
            sizes = sum(size for _, size in entries.values())
            if (stats.pinned, stats.bytes, stats.entries) != (0, sizes, len(entries)):
                self.wrong(f"the {name} store says {stats}, and holds {len(entries)} entries of {sizes} bytes")
            if stats.bytes > store.capacity_bytes:  # type: ignore[attr-defined]
                self.wrong(f"the {name} store holds {stats.bytes} bytes")
            if store._pins:  # type: ignore[attr-defined]
                self.wrong(f"the {name} store has pins of {len(store._pins)} keys")  # type: ignore[attr-defined]
        live = self.lifecycle.live()
        if (live.requests, live.feature_bytes, live.held_bytes) != (0, 0, 0):
            self.wrong(f"{live}")
        if self.runtime.preprocess_cache._flights:
            self.wrong("a computation is still under way")
        self.renew()


def resident() -> int:
    """Bytes of this process in memory, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(seed: int, requests: int, limit: float) -> None:
    faulthandler.dump_traceback_later(limit, exit=True)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    world, memory = World(seed), []
    for _ in range(10):
        world.serve(requests // 10)
        memory.append(resident())
    print(json.dumps({"faults": world.faults[:20], "counts": world.counts, "memory": memory}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
