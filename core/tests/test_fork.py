"""A forked child serves like its parent: threads and locks are made again, and an executor without threads is named."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from toy import PlainToy, img, png, toy_spec

from mm_plugin import UsageError
from mm_plugin.cache import ComputeCache, EmbeddingCache, EncodedStore, MemoryStore, TieredStore
from mm_plugin.events import ItemDropped, Observers
from mm_plugin.forking import new_lock, new_rlock, on_fork
from mm_plugin.inputs import Encoded
from mm_plugin.runtime import Runtime
from mm_plugin.scheduler import Lifecycle
from mm_plugin.settings import Settings

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SPEC = toy_spec(name="forked")
SOON = 20.0  # seconds


def in_child(work: Callable[[], Any]) -> Any:
    """What a function returns, or the text of what it raises, in a forked child; one that hangs fails the test."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = pickle.dumps((True, work()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    end = time.monotonic() + SOON
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            pytest.fail("the child hangs")
        time.sleep(0.005)
    with os.fdopen(read, "rb") as pipe:
        good, answer = pickle.loads(pipe.read())
    assert good, answer
    return answer


@pytest.fixture
def held() -> Iterator[Callable[[Any], None]]:
    """Holds a lock in another thread until the test ends."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def hold(lock: Any) -> None:
        taken = threading.Event()

        def run() -> None:
            with lock:
                taken.set()
                done.wait(SOON)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        assert taken.wait(SOON)

    yield hold
    done.set()
    for thread in threads:
        thread.join()


def facts(output: Any) -> Any:
    return [(item.identity, item.offsets) for item in output.mm_items], output.input_ids.tolist()


def both_ways(processor: Any, *images: Any) -> Any:
    """A request served from a thread, and from an event loop; their answers are one."""
    prompt = "<image> " * len(images)
    answer = facts(processor.process(prompt, images))
    assert facts(asyncio.run(processor.process_async(prompt, images))) == answer
    return answer


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_the_registrys_own_executor_is_made_again(used: bool, open_words: Any) -> None:
    with Runtime(Settings(threads=2)) as runtime:
        processor = open_words(PlainToy, SPEC, runtime=runtime)
        images = [img(seed) for seed in range(4)]
        if used:
            both_ways(processor, *images)
        found = in_child(lambda: both_ways(processor, *images, png(7)))
        assert found == both_ways(processor, *images, png(7))

        def grandchild() -> Any:
            return in_child(lambda: both_ways(processor, *images))

        assert in_child(grandchild) == both_ways(processor, *images)
        in_child(runtime.close)
        both_ways(processor, img(9), img(8))


def test_a_fork_from_a_thread_of_the_executor_itself(open_words: Any) -> None:
    with Runtime(Settings(threads=2)) as runtime:
        processor = open_words(PlainToy, SPEC, runtime=runtime)
        expected = both_ways(processor, img(0), img(1))
        assert runtime.executor.submit(in_child, lambda: both_ways(processor, img(0), img(1))).result(SOON) == expected


def test_a_fork_inside_a_plugin(open_words: Any) -> None:
    """A plugin that forks to work elsewhere, as some tokenizers and decoders do."""
    with Runtime(Settings(threads=2)) as runtime:

        class Forking(PlainToy):
            def prepare(self, *arguments: Any) -> Any:
                assert in_child(lambda: both_ways(other, img(5), img(6)))
                return super().prepare(*arguments)

        other = open_words(PlainToy, toy_spec(name="other"), runtime=runtime)
        both_ways(open_words(Forking, SPEC, runtime=runtime), img(0), img(1))


# ------------------------------------------------------------------ executors that are lent


def test_a_lent_executor_whose_threads_are_gone_is_the_servers_fault(open_words: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=pool))
        both_ways(processor, img(0), img(1))

        def refused() -> list[str]:
            said = []
            calls = (
                lambda: processor.process("<image> <image>", [img(2), img(3)]),
                lambda: asyncio.run(processor.process_async("<image>", [img(2)])),
                lambda: asyncio.run(processor.process_async("word")),
            )
            for call in calls:
                with pytest.raises(UsageError, match="threads stayed in the parent of a fork") as caught:
                    call()
                said.append(caught.value.argument)
            # What needs no thread is served.
            processor.process("word")
            processor.process("<image>", [img(2)])
            return said

        assert in_child(refused) == ["executor"] * 3
        both_ways(processor, img(2), img(3))


def test_a_lent_executor_that_had_no_thread_yet_serves_the_child(open_words: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=pool))
        assert in_child(lambda: both_ways(processor, img(0), img(1))) == both_ways(processor, img(0), img(1))


def test_a_lent_executor_without_threads_serves_the_child(open_words: Any) -> None:
    class Direct(Executor):
        def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(function(*arguments, **named))
            except BaseException as error:
                future.set_exception(error)
            return future

    processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=Direct()))
    expected = both_ways(processor, img(0), img(1))
    assert in_child(lambda: both_ways(processor, img(0), img(1))) == expected


# ------------------------------------------------------------------ locks, and what was half done


@pytest.mark.parametrize("make", [new_lock, new_rlock])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(make: Any, held: Any) -> None:
    lock = make()
    held(lock)

    def take() -> bool:
        with lock:
            return True

    assert in_child(take)


def test_what_is_announced_is_called_once_in_each_child_and_not_kept_alive() -> None:
    class Owner:
        calls = 0

        def after_fork(self) -> None:
            self.calls += 1

    owner, gone = Owner(), Owner()
    on_fork(owner)
    on_fork(owner)
    on_fork(gone)
    del gone
    assert in_child(lambda: owner.calls) == 1
    assert owner.calls == 0


class Remote:
    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def get_many(self, keys: Any) -> Any:
        return [None if (data := self.entries.get(key)) is None else memoryview(data) for key in keys]

    def put_many(self, entries: Any, ttl: Any) -> None:
        self.entries.update((key, b"".join(parts)) for key, parts in entries.items())

    def delete_many(self, keys: Any) -> None:
        for key in keys:
            self.entries.pop(key, None)

    def close(self) -> None:
        self.entries.clear()


class Text:
    def encode(self, value: Any) -> Any:
        return [memoryview(value.encode())]

    def decode(self, data: Any) -> Any:
        return str(data, "utf-8")


def encoded_store() -> EncodedStore:
    return EncodedStore(Remote(), Text())  # type: ignore[arg-type]


def use_store(store: Any) -> None:
    store.put(b"a", "value", 5)
    assert store.get(b"a") == "value"
    store.stats()
    store.clear()


def use_cache(cache: Any) -> None:
    assert cache.get_or_compute(b"a", lambda: "value", len)[0] == "value"
    cache.stats()


def use_embeddings(cache: Any) -> None:
    rows = torch.zeros(1, 2)
    cache.put(b"a", Encoded(rows))
    assert cache.get(b"a", num_tokens=1, hidden=2, dtype=rows.dtype, device=rows.device) is not None
    cache.get(b"b", num_tokens=1, hidden=2, dtype=rows.dtype, device=rows.device)
    cache.stats()
    cache.invalidate()


def use_observers(observers: Any) -> None:
    observers.add(lambda event: None)
    observers.emit(ItemDropped(path="images[0]", why="x"))


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a store": (lambda: MemoryStore(100), use_store),
    "a tiered store": (lambda: TieredStore(MemoryStore(10), encoded_store(), num_bytes=len), use_store),
    "an encoded store": (encoded_store, use_store),
    "a cache": (lambda: ComputeCache(MemoryStore(100)), use_cache),
    "embeddings": (lambda: EmbeddingCache(1000), use_embeddings),
    "observers": (Observers, use_observers),
    "a runtime": (
        lambda: Runtime(Settings()),
        lambda runtime: [runtime.observers, runtime.preprocess_cache, runtime.digests],
    ),
    "a lifecycle": (Lifecycle, lambda lifecycle: lifecycle.live()),
}


def locks_of(value: Any, seen: set[int]) -> list[Any]:
    """Every lock that an object of the package leads to."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if type(value) in (type(threading.Lock()), type(threading.RLock())):
        return [value]
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif type(value).__module__.startswith("mm_plugin"):
        parts = list(getattr(value, "__dict__", {}).values())
    return [lock for part in parts for lock in locks_of(part, seen)]


@pytest.mark.parametrize(("make", "use"), OBJECTS.values(), ids=OBJECTS)
def test_every_lock_of_the_package_is_free_in_the_child(make: Any, use: Any, held: Any) -> None:
    thing = make()
    use(make())
    locks = locks_of(thing, set())
    assert locks
    for lock in locks:
        held(lock)
    in_child(lambda: str(use(thing)))


def test_every_lock_of_the_package_is_made_where_a_child_renews_it() -> None:
    from pathlib import Path

    import mm_plugin

    folder = Path(str(mm_plugin.__file__)).parent
    made = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if "threading.Lock()" in path.read_text() or "threading.RLock()" in path.read_text()
    ]
    assert made == ["forking.py"]


def test_a_computation_of_another_thread_is_begun_again_in_the_child(open_words: Any) -> None:
    started, goes_on = threading.Event(), threading.Event()
    parent = os.getpid()

    class Slow(PlainToy):
        def prepare(self, *arguments: Any) -> Any:
            if os.getpid() == parent:
                started.set()
                goes_on.wait(SOON)
            return super().prepare(*arguments)

    with Runtime(Settings(threads=2)) as runtime:
        processor = open_words(Slow, SPEC, runtime=runtime)
        thread = threading.Thread(target=processor.process, args=("<image>", [img(0)]))
        thread.start()
        assert started.wait(SOON)
        found = in_child(lambda: both_ways(processor, img(0)))
        goes_on.set()
        thread.join(SOON)
        assert found == both_ways(processor, img(0))


def test_a_store_accounts_for_its_bytes_in_a_child_of_a_busy_parent() -> None:
    store, stop = MemoryStore(400), threading.Event()

    def churn(seed: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            key = bytes([seed, turn % 7])
            store.put(key, "value", 10 + turn % 23)
            store.pin(key)
            store.get(key)
            store.unpin(key)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()

    def counted() -> tuple[int, int, int, int]:
        whole = sum(size for _, size in store._entries.values())
        before = store.stats()
        for turn in range(50):
            store.put(bytes([9, turn]), "value", 20)
        after = store.stats()
        return (
            before.bytes - whole,
            before.pinned,
            after.bytes - sum(s for _, s in store._entries.values()),
            after.bytes,
        )

    try:
        for _ in range(20):
            difference, pinned, later, total = in_child(counted)
            assert (difference, pinned, later) == (0, 0, 0)
            assert total <= 400
    finally:
        stop.set()
        for thread in threads:
            thread.join()
