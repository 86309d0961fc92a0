"""A plugin's code that never ends: those alone wait who need it, and closing ends in time."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mm_plugin import NoModelError, Settings, UsageError
from mm_plugin.cache import MemoryStore
from mm_plugin.runtime import Runtime

# Much longer than anything here takes, and shorter than a test may take.
SOON = 10.0


class Gate:
    """Where a plugin's import stops until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.module: Any = types.ModuleType("gate_of_the_tests")
        self.module.stop = self.stop

    def stop(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setitem(sys.modules, "gate_of_the_tests", made.module)
    yield made
    made.open.set()


@pytest.fixture
def background(gate: Gate) -> Iterator[Callable[..., list[Any]]]:
    """Runs a function in a thread; what it returns or raises is appended to the list that comes back."""
    threads: list[threading.Thread] = []

    def begin(function: Callable[[], Any]) -> list[Any]:
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                results.append(error)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return results

    yield begin
    gate.open.set()
    for thread in threads:
        thread.join(SOON)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STOP = "import gate_of_the_tests\ngate_of_the_tests.stop()\n"
STORES = "@hookimpl\ndef mm_register_{kind}():\n    return {{'{name}': {value}}}\n"


def stopping(site: Any, **claims: Any) -> None:
    """A plugin whose import stops at the gate, and one that works."""
    kinds = {kind: tuple(claims[kind]) for kind in ("architectures",) if kind in claims}
    services = ""
    if "observers" in claims:
        services = STORES.format(kind="observers", name="watch", value="print")
    if "stores" in claims:
        services = STORES.format(kind="stores", name="disk", value="dict")
    specs = [{"name": "stops", **kinds}] if kinds else []
    site.install("stops", STOP + site.hooks(*specs, services=services), **claims)
    site.install("good-dist", architectures=["Good"], model_types=["good"])


def refused(registry: Any) -> None:
    """A model that no plugin claims."""
    with pytest.raises(NoModelError):
        registry.resolve({"architectures": ["Nobody"]})


EVERYTHING_ELSE: dict[str, Callable[[Any], Any]] = {
    "plugins": lambda registry: registry.plugins,
    "architectures": lambda registry: registry.architectures,
    "notices": lambda registry: registry.notices,
    "fingerprint": lambda registry: registry.fingerprint(),
    "another model": lambda registry: registry.resolve({"architectures": ["Good"]}),
    "another model by its type": lambda registry: registry.resolve({"model_type": "good"}),
    "another plugin": lambda registry: registry.load_plugin("good_dist"),
    "no model": refused,
    "the executor": lambda registry: registry.executor.submit(int).result(),
    "a store": lambda registry: registry.preprocess_store,
    "a cache": lambda registry: registry.embedding_cache,
    "digests": lambda registry: registry.digests,
    "close": lambda registry: registry.close(),
}


@pytest.mark.parametrize("claim", ["architectures", "observers", "stores"])
@pytest.mark.parametrize("what", EVERYTHING_ELSE)
def test_nothing_else_waits_for_an_import_that_hangs(
    what: str, claim: str, site: Any, open_registry: Any, gate: Gate, background: Any
) -> None:
    stopping(site, **{claim: {"architectures": ["Stops"], "observers": ["watch"], "stores": ["disk"]}[claim]})
    registry = open_registry()
    use = {
        "architectures": lambda: registry.resolve({"architectures": ["Stops"]}).name,
        "observers": lambda: registry.observers,
        "stores": lambda: registry.make_store("disk", 1),
    }
    hanging = background(use[claim])
    assert gate.reached.wait(SOON)
    done = background(lambda: (EVERYTHING_ELSE[what](registry), "done"))
    until(lambda: done)
    assert done[0][1] == "done"
    assert hanging == []
    gate.open.set()
    until(lambda: hanging)
    if claim == "architectures":
        assert hanging == ["stops"]


@pytest.mark.parametrize("claim", ["architectures", "observers"])
def test_who_waits_for_an_import_that_hangs_is_let_go_when_all_is_closed(
    claim: str, site: Any, open_registry: Any, gate: Gate, background: Any
) -> None:
    stopping(site, **{claim: ["Stops"] if claim == "architectures" else ["watch"]})
    registry = open_registry()

    def use() -> Any:
        return registry.observers if claim == "observers" else registry.load_plugin("stops")

    first = background(use)
    assert gate.reached.wait(SOON)
    waiting = [background(use) for _ in range(3)]
    time.sleep(0.1)
    assert [first, *waiting] == [[]] * 4
    began = time.monotonic()
    registry.close()
    until(lambda: all(waiting))
    assert time.monotonic() - began < SOON
    for (error,) in waiting:
        assert isinstance(error, UsageError)
        assert "closed" in error.message
    assert first == []


def test_a_plugin_that_hangs_is_imported_once_for_all_who_wait(
    site: Any, open_registry: Any, gate: Gate, background: Any
) -> None:
    stopping(site, architectures=["Stops"])
    registry = open_registry()
    found = [background(lambda: registry.resolve({"architectures": ["Stops"]}).name) for _ in range(4)]
    assert gate.reached.wait(SOON)
    gate.open.set()
    until(lambda: all(found))
    assert found == [["stops"]] * 4
    assert site.imports("stops") == 1


def test_plugins_of_one_package_are_imported_one_after_the_other(
    site: Any, open_registry: Any, gate: Gate, background: Any
) -> None:
    """A failed import removes what it left of the package, which must not be what another one is using."""
    good = site.hooks({"name": "good", "architectures": ("Good",)})
    lines = "[mm_plugin]\nfirst = shared.hooks\nsecond = shared.other\n"
    claims = "[mm_plugin.architectures]\nGood = shared.hooks\nBad = shared.other\n"
    files = {"shared/other.py": "import shared.part\nraise ValueError\n", "shared/part.py": ""}
    site.install(
        "shared", STOP + "import shared.part\n" + good, files=files, package="shared", entry_points=lines + claims
    )
    registry = open_registry()
    first = background(lambda: registry.load_plugin("first").state)
    assert gate.reached.wait(SOON)
    second = background(lambda: registry.load_plugin("second").state)
    time.sleep(0.1)
    assert second == []
    gate.open.set()
    until(lambda: first and second)
    assert (first, second) == (["loaded"], ["failed"])
    assert "shared.part" in sys.modules


# ---------------------------------------------------------------- closing


class Slow(MemoryStore):
    """A store that is closed when the test says so."""

    def __init__(self, capacity: int, open_: threading.Event) -> None:
        super().__init__(capacity)
        self.open, self.closing = open_, False

    def close(self) -> None:
        self.closing = True
        self.open.wait(60)


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


@pytest.mark.parametrize("timeout", [0.0, 0.3])
@pytest.mark.parametrize("busy", ["thread", "store", "thread and store", "nothing"])
def test_closing_takes_no_longer_than_it_may(busy: str, timeout: float, never: threading.Event, log: Any) -> None:
    stores: list[Slow] = []
    released: list[str] = []
    gate = threading.Event() if "store" in busy else never
    if "store" not in busy:
        gate = threading.Event()
        gate.set()

    def make_store(name: str, capacity: int) -> Any:
        stores.append(Slow(capacity, never if "store" in busy else gate))
        return stores[-1]

    runtime = Runtime(Settings(threads=2), make_store=make_store)
    assert runtime.preprocess_store is stores[0]
    runtime.own(lambda: released.append("the last"))
    if "thread" in busy:
        runtime.executor.submit(never.wait, 60)
        pending = [runtime.executor.submit(never.wait, 60) for _ in range(4)]
    began = time.monotonic()
    runtime.close(timeout)
    assert time.monotonic() - began < timeout + SOON / 2
    until(lambda: stores[0].closing and released)
    left = [line for line in log("WARNING") if "left running" in line]
    if busy == "nothing":
        assert left == [] or timeout == 0
    else:
        assert len(left) >= (2 if " and " in busy else 1)
    if "thread" in busy:
        assert sum(future.cancelled() for future in pending) >= 3
    with pytest.raises(UsageError, match="closed"):
        _ = runtime.executor
    runtime.close()


def test_closing_waits_for_what_ends_in_time() -> None:
    done: list[int] = []
    runtime = Runtime(Settings(threads=1))
    started = threading.Event()

    def work() -> None:
        started.set()
        time.sleep(0.3)
        done.append(1)

    runtime.executor.submit(work)
    assert started.wait(SOON)
    runtime.own(lambda: done.append(2))
    runtime.close()
    assert done == [1, 2]


def test_a_runtime_that_one_of_its_threads_closes_does_not_wait_for_it(log: Any) -> None:
    runtime = Runtime(Settings(threads=2))
    began = time.monotonic()
    runtime.executor.submit(runtime.close).result(SOON)
    assert time.monotonic() - began < SOON
    assert any("by one of its own threads" in line for line in log("WARNING"))


def test_what_fails_or_exits_while_closing_does_not_keep_the_others_open(log: Any) -> None:
    released: list[str] = []
    runtime = Runtime(Settings(threads=1))
    for wrong in (lambda: 1 / 0, lambda: sys.exit(3)):
        runtime.own(wrong)
    runtime.own(lambda: released.append("the last"))
    runtime.close()
    assert released == ["the last"]
    assert sum("closing failed" in line for line in log("WARNING")) == 2


def test_a_store_that_is_made_while_all_is_closed_is_closed_too(never: threading.Event) -> None:
    made: list[MemoryStore] = []
    entered = threading.Event()

    class Watched(MemoryStore):
        was_closed = False

        def close(self) -> None:
            self.was_closed = True
            super().close()

    def make_store(name: str, capacity: int) -> Any:
        entered.set()
        assert proceed.wait(SOON)
        made.append(Watched(capacity))
        return made[-1]

    proceed = threading.Event()
    runtime = Runtime(Settings(threads=1), make_store=make_store)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: runtime.preprocess_store)
        assert entered.wait(SOON)
        runtime.close()
        proceed.set()
        with pytest.raises(UsageError, match="closed"):
            future.result(SOON)
    assert [store.was_closed for store in made] == [True]  # type: ignore[attr-defined]
