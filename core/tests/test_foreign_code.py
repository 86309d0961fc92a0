"""Code that is not the core's may raise anything, and its exceptions may say anything: the fault is named, and nothing escapes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from toy import PlainToy, audio, img, toy_spec

from mm_plugin import EncoderError, PluginError, PluginLoadError, ProcessorError, RequestError, UsageError
from mm_plugin.cache import ComputeCache, EmbeddingCache, GuardedStore, MemoryStore
from mm_plugin.embed import embed_mm_inputs
from mm_plugin.events import ItemDropped, Observers
from mm_plugin.foreign import BareExceptionError, contain, is_interruption, let_go, shown, words
from mm_plugin.inputs import ForwardBatch, MultimodalInputs, RequestMedia
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.runtime import Runtime
from mm_plugin.settings import Settings

SPEC = toy_spec(name="foreign")
SOON = 20  # seconds


# ------------------------------------------------------------------ everything that foreign code may raise


class PanicException(BaseException):
    """As extensions written in Rust raise them: not an `Exception`."""


class Subtext(str):
    """A text whose every use runs foreign code."""

    def __format__(self, spec: str) -> str:
        raise SystemExit(3)

    __str__ = __getitem__ = encode = __format__  # type: ignore[assignment]


def mute(base: type[BaseException], raised: Any) -> type[BaseException]:
    """A class of exceptions whose text raises, or is, something else."""

    def text(self: BaseException) -> Any:
        if isinstance(raised, BaseException | type):
            raise raised
        return raised

    return type(f"Mute{base.__name__}", (base,), {"__str__": text, "__repr__": text})


class Meta(type):
    @property
    def __name__(cls) -> str:
        raise SystemExit(4)


class Nameless(Exception, metaclass=Meta):
    pass


class Stubborn(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise SystemExit(5)


class Unreadable(RequestError):
    """One of our own, whose words a plugin has changed."""

    def __init__(self) -> None:
        Exception.__init__(self)

    @property
    def message(self) -> str:  # type: ignore[override]
        raise SystemExit(6)

    def __str__(self) -> str:
        raise SystemExit(6)


FAULTS: dict[str, Callable[[], BaseException]] = {
    "an exception": lambda: ValueError("oh"),
    "an exception without text": ValueError,
    "an exit": lambda: SystemExit(1),
    "a panic": lambda: PanicException("called `Option::unwrap()` on a `None` value"),
    "a bare exception": lambda: BaseException("bare"),
    "the end of a generator": GeneratorExit,
    "a cancellation": asyncio.CancelledError,
    "a cancelled future": CancelledError,
    "a group": lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("x")]),
    "a text that exits": mute(Exception, SystemExit(2)),
    "a text that panics": mute(Exception, PanicException("x")),
    "a text that fails": mute(Exception, ValueError("x")),
    "a text that is cancelled": mute(Exception, asyncio.CancelledError()),
    "a text that recurses": mute(Exception, RecursionError()),
    "a text that is a number": mute(Exception, 5),
    "a text that is a hostile text": mute(Exception, Subtext("sub")),
    "a text of 100 MB": lambda: ValueError("x" * 100_000_000),
    "a text of surrogates": lambda: ValueError("\ud800\udfff"),
    "a panic that cannot be read": mute(PanicException, SystemExit(2)),
    "an exit that cannot be read": mute(SystemExit, SystemExit(2)),
    "a class without a name": Nameless,
    "one that cannot be changed": Stubborn,
    "one of ours that cannot be read": Unreadable,
}
faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


def is_safe(error: BaseException, named: str) -> bool:
    """Whether an error of ours can be shown, is short, and names who is at fault."""
    text = str(error)
    text.encode()
    return type(text) is str and len(text) < 4_000 and named in text


@faults
def test_an_exception_is_put_into_words_whatever_it_is(fault: Callable[[], BaseException]) -> None:
    text = words(fault())
    assert type(text) is str
    assert 0 < len(text) < 2_200
    text.encode()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("oh"), "ValueError: oh"),
        (KeyError("oh"), "KeyError: 'oh'"),
        (OSError(2, "no such file"), "FileNotFoundError: [Errno 2] no such file"),
        (ValueError(), "ValueError"),
        (mute(Exception, SystemExit(2))(), "MuteException"),
        (mute(Exception, Subtext("sub"))(), "MuteException: sub"),
        (Nameless("x"), "Nameless: x"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ValueError("é" * 2_001), "ValueError: " + "é" * 2_000 + "..."),
    ],
    ids=range(9),
)
def test_the_words_are_the_class_and_the_text(error: BaseException, expected: str) -> None:
    assert words(error) == expected


def test_a_keyboard_interrupt_passes_even_from_a_text() -> None:
    with pytest.raises(KeyboardInterrupt):
        words(mute(Exception, KeyboardInterrupt())())
    with pytest.raises(KeyboardInterrupt):
        shown(mute(Exception, KeyboardInterrupt())())


@faults
def test_a_value_is_shown_whatever_its_repr_is(fault: Callable[[], BaseException]) -> None:
    assert len(shown(fault())) <= 80
    let_go(fault())


@faults
def test_what_is_contained_is_an_exception(fault: Callable[[], BaseException]) -> None:
    error = fault()

    def work() -> None:
        raise error

    with pytest.raises(Exception) as caught:
        contain(work)
    assert caught.value is error or (type(caught.value) is BareExceptionError and caught.value.__cause__ is error)
    assert words(caught.value) == words(error)


# ------------------------------------------------------------------ a processor's methods


METHODS = ("context", "layout", "prepare", "replacement")


def broken(method: str, fault: Callable[[], BaseException]) -> type[PlainToy]:
    def fail(self: Any, *arguments: Any, **named: Any) -> Any:
        raise fault()

    return type("Broken", (PlainToy,), {method: fail})


@faults
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_fails_is_the_plugins_fault(
    method: str, fault: Callable[[], BaseException], open_words: Any
) -> None:
    processor = open_words(broken(method, fault), SPEC)
    for call in (
        lambda: processor.process("<image> <image>", [img(0), img(1)]),
        lambda: asyncio.run(processor.process_async("<image> <image>", [img(0), img(1)])),
        lambda: processor.prepare_item("image", img(0)),
    ):
        with pytest.raises(ProcessorError) as caught:
            call()
        assert is_safe(caught.value, f"Broken.{method} failed")
        assert caught.value.plugin == "foreign"
    assert processor.cache_stats.pinned == 0


@pytest.mark.parametrize(
    "value", [mute(Exception, SystemExit(1))(), Subtext("x"), "x" * 10_000_000], ids=["mute", "text", "long"]
)
def test_a_value_that_cannot_be_shown_is_the_plugins_fault(value: Any, open_words: Any) -> None:
    class Odd(PlainToy):
        def sampling_rate(self, options: Any) -> Any:
            return value

    spec = toy_spec(Modality.AUDIO, name="foreign")
    processor = open_words(Odd, spec)
    with pytest.raises(ProcessorError, match="must return samples per second") as caught:
        processor.process("<audio>", audios=[audio()])
    assert is_safe(caught.value, "sampling_rate")


@faults
def test_a_tokenizer_that_fails_is_no_accident_of_the_server(
    fault: Callable[[], BaseException], open_words: Any
) -> None:
    processor = open_words(PlainToy, SPEC)

    def fail(*arguments: Any, **named: Any) -> Any:
        raise fault()

    tokenizer = processor._opened.reader._tokenizer
    broken_tokenizer = type("Broken", (), {"__getattr__": lambda self, name: getattr(tokenizer, name)})()
    broken_tokenizer.encode = broken_tokenizer.__class__.__call__ = fail
    processor._opened.reader._tokenizer = broken_tokenizer
    for call in (partial(processor.process, "word"), lambda: asyncio.run(processor.process_async("word"))):
        with pytest.raises((ProcessorError, RequestError)) as caught:
            call()
        assert is_safe(caught.value, "")


@faults
def test_a_loop_goes_on_after_a_fault_of_a_plugin(fault: Callable[[], BaseException], open_words: Any) -> None:
    bad, good = open_words(broken("layout", fault), SPEC), open_words(PlainToy, SPEC)

    async def both() -> Any:
        return await asyncio.gather(
            bad.process_async("<image> <image>", [img(0), img(1)]),
            good.process_async("<image> <image>", [img(0), img(1)]),
            return_exceptions=True,
        )

    failed, output = asyncio.run(both())
    assert isinstance(failed, ProcessorError)
    assert len(output.mm_items) == 2


# ------------------------------------------------------------------ who meant it


class Owner:
    def handle(self, number: int, frame: Any) -> None:
        raise SystemExit(7)

    def __call__(self, number: int, frame: Any) -> None:
        sub_exit()


def sub_exit() -> None:
    raise SystemExit(7)


def take_off(number: int, frame: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    sub_exit()


def bound(extra: int, number: int, frame: Any) -> None:
    raise SystemExit(7)


class Timeout(Exception):
    pass


def time_out(number: int, frame: Any) -> None:
    raise Timeout


HANDLERS: dict[str, tuple[Any, type[BaseException]]] = {
    "a function": (lambda number, frame: sub_exit(), SystemExit),
    "any arguments": (lambda *_: sub_exit(), SystemExit),
    "a method": (Owner().handle, SystemExit),
    "an object": (Owner(), SystemExit),
    "one that takes itself off": (take_off, SystemExit),
    "one with an argument bound": (partial(bound, 1), SystemExit),
    "an exception of the server's own": (time_out, Timeout),
    "the interpreter's own": (signal.default_int_handler, KeyboardInterrupt),
}


@pytest.fixture
def signaled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)  # type: ignore[return-value]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("handler", "kind"), HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("where", ["prepare", "layout", "observer", "digest", "text"])
def test_what_a_signal_handler_raises_passes_the_outer_border(
    handler: Any, kind: type[BaseException], where: str, signaled: Any, open_words: Any
) -> None:
    signaled(handler)

    def strike(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("the handler raised")

    if where == "observer":
        with pytest.raises(kind):
            Observers([strike]).emit(ItemDropped(path="images[0]", why="x"))
        return
    if where == "text":
        with pytest.raises(kind):
            words(type("Struck", (Exception,), {"__str__": strike})())
        return
    if where == "digest":
        from mm_plugin.identity.digests import _asked

        with pytest.raises(kind):
            _asked(strike, [], torch.device("cpu"))
        return
    processor = open_words(type("Struck", (PlainToy,), {where: strike}), SPEC)
    with pytest.raises(kind):
        processor.process("<image>", [img(0)])
    assert processor.cache_stats.pinned == 0


def test_the_same_exception_from_the_plugin_itself_is_its_fault(signaled: Any, open_words: Any) -> None:
    signaled(lambda number, frame: sub_exit())
    with pytest.raises(ProcessorError, match="SystemExit: 7"):
        open_words(broken("prepare", lambda: SystemExit(7)), SPEC).process("<image>", [img(0)])


def test_a_cancelled_task_is_cancelled_and_not_the_plugins_fault(open_words: Any) -> None:
    started, goes_on = threading.Event(), threading.Event()

    class Slow(PlainToy):
        def prepare(self, *arguments: Any) -> Any:
            started.set()
            goes_on.wait(SOON)
            return super().prepare(*arguments)

    processor = open_words(Slow, SPEC)

    async def main() -> None:
        task = asyncio.ensure_future(processor.process_async("<image>", [img(0)]))
        while not started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    asyncio.run(main())
    assert not is_interruption(asyncio.CancelledError())


def test_a_coroutine_that_is_closed_ends(open_words: Any) -> None:
    async def main() -> None:
        call = open_words(PlainToy, SPEC).process_async("<image>", [img(0)])
        call.send(None)
        call.close()

    asyncio.run(main())


# ------------------------------------------------------------------ plugins that are loaded


HOSTILE = """
import asyncio
class Panic(BaseException):
    pass
class Mute(Exception):
    def __str__(self):
        raise SystemExit(2)
class MutePanic(Panic):
    def __str__(self):
        raise Panic
"""
RAISED = [
    "SystemExit(2)",
    "Mute()",
    "Panic('x')",
    "MutePanic()",
    "GeneratorExit()",
    "asyncio.CancelledError()",
    "BaseException()",
]


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_plugin_leaves_the_resolution_of_another(
    raised: str, strict: bool, site: Any, open_registry: Any
) -> None:
    site.install("broken-one", f"{HOSTILE}\nraise {raised}", architectures=["Shared", "BrokenOne"])
    site.install("working", architectures=["Fine"])
    registry = open_registry(strict=strict)
    if strict:
        with pytest.raises(PluginLoadError) as caught:
            registry.load_plugin("broken_one")
        assert is_safe(caught.value, "broken_one")
    else:
        record = registry.load_plugin("broken_one")
        assert (record.state, record.stage, type(record.error)) == ("failed", "import", str)
    assert registry.resolve({"architectures": ["Fine"]}).name == "working"


@pytest.mark.parametrize("raised", RAISED)
def test_a_specialization_that_fails_names_the_plugin(
    raised: str, site: Any, open_registry: Any, tmp_path: Any
) -> None:
    learn = f"{HOSTILE}\ndef specialize(spec, checkpoint):\n    raise {raised}\n"
    source = site.hooks({"name": "base", "architectures": ("Odd",), "specialize": "learned.learn:specialize"})
    site.install("learned", source, architectures=["Odd"], files={"learned/learn.py": learn})
    (tmp_path / "config.json").write_text('{"architectures": ["Odd"]}')
    with pytest.raises(PluginLoadError) as caught:
        open_registry().load_processor(tmp_path)
    assert is_safe(caught.value, "learned")


# ------------------------------------------------------------------ observers, stores, digests, preparers, executors


@faults
def test_an_observer_that_fails_is_removed_and_the_others_hear(fault: Callable[[], BaseException]) -> None:
    class Bad:
        def __call__(self, event: Any) -> None:
            raise fault()

        def __repr__(self) -> str:
            raise SystemExit(1)

    heard: list[Any] = []
    observers = Observers([Bad(), heard.append])
    for _ in range(2):
        observers.emit(ItemDropped(path="images[0]", why="x"))
    assert len(heard) == 2


@faults
def test_a_store_that_fails_is_a_miss(fault: Callable[[], BaseException], open_words: Any) -> None:
    class Bad(MemoryStore):
        def _fail(self, *arguments: Any) -> Any:
            raise fault()

        get = get_many = put = delete = pin = unpin = clear = stats = close = _fail  # type: ignore[assignment]

    cache = ComputeCache(GuardedStore(Bad(100)))
    assert cache.get_or_compute(b"key", lambda: "value", len) == ("value", False)
    assert cache.stats().errors > 0
    embeddings = EmbeddingCache(0, store=Bad(100))
    media, table = step_media(2), torch.nn.Embedding(8, 3)
    assert step(media, table, good_encoder, embeddings).failed == ()
    embeddings.invalidate()


@faults
def test_a_preparer_that_fails_is_the_servers_fault(fault: Callable[[], BaseException], open_words: Any) -> None:
    class Bad:
        def prepare(self, tasks: Any) -> Any:
            raise fault()

    processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), preparer=Bad()))
    for call in (
        lambda: processor.process("<image>", [img(0)]),
        lambda: asyncio.run(processor.process_async("<image>", [img(0)])),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert is_safe(caught.value, "preparer")


class Bad(Executor):
    """An executor whose `submit` fails, or returns anything."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def submit(self, *arguments: Any, **named: Any) -> Any:
        return self.answer()


def raise_(error: BaseException) -> Any:
    raise error


ANSWERS: dict[str, Callable[[], Any]] = {
    name: partial(lambda make: raise_(make()), make) for name, make in FAULTS.items()
} | {
    "None": lambda: None,
    "something else": lambda: "future",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_executor_that_fails_is_the_servers_fault(answer: Callable[[], Any], open_words: Any) -> None:
    processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=Bad(answer)))
    for call in (
        lambda: processor.process("<image> <image>", [img(0), img(1)]),
        lambda: asyncio.run(processor.process_async("<image> <image>", [img(0), img(1)])),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.argument == "executor"
        assert is_safe(caught.value, "executor: expected one that takes work")


def test_work_that_an_executor_dropped_is_done_by_the_caller_or_the_servers_fault(open_words: Any) -> None:
    def dropped() -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        return future

    processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=Bad(dropped)))
    assert len(processor.process("<image> <image>", [img(0), img(1)]).mm_items) == 2
    with pytest.raises(UsageError, match="executor: expected one that takes work, got CancelledError") as caught:
        asyncio.run(processor.process_async("<image> <image>", [img(0), img(1)]))
    assert caught.value.argument == "executor"


@pytest.mark.parametrize("cancel", [False, True])
def test_an_executor_that_was_shut_down_is_the_servers_fault(cancel: bool, open_words: Any) -> None:
    pool = ThreadPoolExecutor(2)
    processor = open_words(PlainToy, SPEC, runtime=Runtime(Settings(), executor=pool))
    assert len(processor.process("<image> <image>", [img(0), img(1)]).mm_items) == 2
    pool.shutdown(wait=False, cancel_futures=cancel)
    for call in (
        lambda: processor.process("<image> <image>", [img(2), img(3)]),
        lambda: asyncio.run(processor.process_async("<image>", [img(2)])),
    ):
        with pytest.raises(UsageError, match="executor: expected one that takes work, got RuntimeError") as caught:
            call()
        assert caught.value.argument == "executor"


# ------------------------------------------------------------------ encoders and routines


def step_media(count: int) -> RequestMedia:
    items = []
    for index in range(count):
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2 * index, 2 * index)], feature=np.array([index]))
        item.set_identity(index.to_bytes(32, "big"))
        items.append(item)
    ids = np.zeros(2 * count, np.int64)
    return RequestMedia(MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids))


def good_encoder(items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
    return [torch.full((item.num_tokens, 3), float(item.feature[0])) for item in items]


def step(media: RequestMedia, table: Any, encode: Any, cache: Any = None, **options: Any) -> Any:
    ids = torch.from_numpy(media.inputs.input_ids)
    return embed_mm_inputs(
        ids, ForwardBatch([media], [0], [len(ids)]), table, {Modality.IMAGE: encode}, cache, **options
    )


@faults
def test_an_item_that_an_encoder_fails_on_fails_alone(fault: Callable[[], BaseException]) -> None:
    def encode(items: Sequence[MultimodalDataItem]) -> Any:
        if any(item.feature[0] == 1 for item in items):
            raise fault()
        return good_encoder(items)

    out = step(step_media(3), torch.nn.Embedding(8, 3), encode)
    assert [entry.item for entry in out.failed] == [1]
    assert isinstance(out.failed[0].error, EncoderError | PluginError)
    assert is_safe(out.failed[0].error, "the encoder failed")
    assert out.input_embeds[4].tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [SystemExit, Timeout, KeyboardInterrupt])
def test_what_is_meant_for_the_server_passes_an_encoder(kind: type[BaseException], signaled: Any) -> None:
    def handler(number: int, frame: Any) -> None:
        raise kind

    signaled(handler)

    def encode(items: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(kind):
        step(step_media(2), torch.nn.Embedding(8, 3), encode)
