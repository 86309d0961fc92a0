"""`Runtime`: the executor, the caches and the listeners that the models of one registry share. Knows no plugin."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mm_plugin.errors import UsageError
from mm_plugin.executors import GuardedExecutor
from mm_plugin.foreign import shown, trace_of
from mm_plugin.forking import new_lock, new_rlock, on_fork

if TYPE_CHECKING:
    from types import TracebackType

    from mm_plugin.cache.embedding import EmbeddingCache
    from mm_plugin.cache.single_flight import ComputeCache
    from mm_plugin.cache.store import Store
    from mm_plugin.events import Observers
    from mm_plugin.identity.digests import Digests
    from mm_plugin.settings import Settings
    from mm_plugin.tasks import Preparer

logger = logging.getLogger("mm_plugin")
T = TypeVar("T")

Services = Callable[[str], Mapping[str, Any]]
MakeStore = Callable[[str, int], "Store"]


# Most seconds that closing takes.
CLOSE_SECONDS = 30.0
# How often whoever waits for a plugin's code looks whether there is still something to wait for, seconds.
_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def waiting(lock: threading.RLock, closed: threading.Event) -> Iterator[None]:
    """Hold a lock under which a plugin's code runs, which may never end: once all is closed, nobody waits for it.

    Raises:
        UsageError: it was closed while another thread held the lock.
    """
    while not lock.acquire(timeout=_LOOK_SECONDS):
        check_open(closed)
    try:
        yield
    finally:
        lock.release()


def check_open(closed: threading.Event) -> None:
    """Refuse to go on once a registry is closed.

    Raises:
        UsageError: it is closed.
    """
    if closed.is_set():
        raise UsageError("the registry is closed", argument="registry")


class CallerHashes:
    """What each hash given by a caller stood for, shared by every processor of a runtime. Final.

    Attributes:
        store: content by hash; every entry counts one byte, so the capacity is the number of entries.
        lock: held while the hashes of a request are compared and stored, since two requests may bring one hash with different
            media at the same time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lock = new_lock()

    def bind(self, claims: Sequence[tuple[bytes, bytes, str]]) -> str | None:
        """Remember what each name stands for, all of a request's or none.

        Args:
            claims: a name, the 32 bytes of content that it stands for, and the path that an error would show.

        Returns:
            The path of the first name that stood for other content before; None where all are bound.
        """
        with self.lock:
            bound: dict[bytes, bytes] = {}
            for name, content, path in claims:
                if bound.setdefault(name, self.store.get(name) or content) != content:
                    return path
            for name, content in bound.items():
                self.store.put(name, content, 1)
        return None


class _Lazy(Generic[T]):
    """A value that is made when it is first asked for, by one thread while others that ask wait; nothing else waits for it.

    Args:
        closed: set once nobody may wait any longer.
        value: where it was given and is never made.
    """

    def __init__(self, closed: threading.Event, value: T | None = None) -> None:
        self._closed, self._value, self._lock = closed, value, new_rlock()

    def get(self, make: Callable[[], T]) -> T:
        """The value; `make` may run a plugin's code.

        Raises:
            UsageError: it was closed while another thread was making the value.
        """
        if self._value is None:
            with waiting(self._lock, self._closed):
                if self._value is None:
                    self._value = make()
        return self._value


class Runtime:
    """What a registry lends to the processors and encoders that it opens. Final; safe to use from several threads.

    Everything is made when it is first read. A context manager; leaving it closes what it made, not what it was given.

    Example:
        >>> from mm_plugin.settings import Settings
        >>> with Runtime(Settings(threads=2)) as runtime:
        ...     runtime.executor.submit(sum, [1, 2]).result()
        3

    Args:
        settings: limits and switches.
        executor: runs the per-item stages; must run them in this process. Where None, a thread pool of `settings.threads`.
        preprocess_store: keeps prepared items; where None, made by `make_store`.
        embedding_cache: keeps encoder output; where None, made over a store of `make_store`.
        services: returns the services of a kind (`observers`, `digests`) by name; called once, while others that want
            the same wait. It may import plugins.
        make_store: makes a store from its kind and its capacity in bytes, called likewise; knows `memory` alone where None.
        preparer: prepares media inputs, in other processes for example; threads of `executor` where None. It is not closed.

    Attributes:
        settings: limits and switches.
        preparer: prepares media inputs in place of this process's threads, or None.
        closed: set when the runtime is closed.

    Raises:
        UsageError: the executor runs its work in other processes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        executor: Executor | None = None,
        preprocess_store: Store | None = None,
        embedding_cache: EmbeddingCache | None = None,
        services: Services | None = None,
        make_store: MakeStore | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        if isinstance(executor, ProcessPoolExecutor):
            raise UsageError(
                "executor: expected one that runs in this process, got a ProcessPoolExecutor; use threads",
                argument="executor",
            )
        self.settings = settings
        self.preparer = preparer
        self.closed = threading.Event()
        self._services: Services = services or _no_services
        self._make_store: MakeStore = make_store or _memory_alone
        self._executor = None if executor is None else GuardedExecutor(executor)
        self._preprocess_store: _Lazy[Store] = _Lazy(self.closed, preprocess_store)
        self._preprocess_cache: _Lazy[ComputeCache] = _Lazy(self.closed)
        self._embedding_cache: _Lazy[EmbeddingCache] = _Lazy(self.closed, embedding_cache)
        self._observers: _Lazy[Observers] = _Lazy(self.closed)
        self._digests: _Lazy[Digests] = _Lazy(self.closed)
        self._caller_hashes: CallerHashes | None = None
        self._own_pool: ThreadPoolExecutor | None = None
        self._owned: list[Callable[[], None]] = []
        self._lock = new_rlock()
        self._thread = threading.local()  # whether the current thread is one of the runtime's own
        on_fork(self)

    @property
    def executor(self) -> Executor:
        """Runs the per-item stages.

        Raises:
            UsageError: the runtime is closed.
        """
        with self._lock:
            self.check_open()
            if self._executor is None:
                mark = partial(setattr, self._thread, "is_own", True)
                pool = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="mm-plugin", initializer=mark)
                self._executor, self._own_pool = GuardedExecutor(pool), pool
            return self._executor

    @property
    def preprocess_store(self) -> Store:
        """Keeps prepared items by source key.

        Raises:
            UsageError: the runtime is closed, or the settings name an unknown store.
            PluginLoadError: the plugin that offers the store is broken.
        """
        self.check_open()
        settings = self.settings
        return self._preprocess_store.get(
            lambda: self._new_store(settings.preprocess_store, settings.preprocess_cache_bytes)
        )

    @property
    def preprocess_cache(self) -> ComputeCache:
        """Prepares each item once, over `preprocess_store`; shared, so that models that prepare the same share the result.

        Raises:
            UsageError, PluginLoadError: as for `preprocess_store`.
        """
        from mm_plugin.cache.single_flight import ComputeCache
        from mm_plugin.tasks import is_prepared

        return self._preprocess_cache.get(lambda: ComputeCache(self.preprocess_store, is_prepared))

    @property
    def embedding_cache(self) -> EmbeddingCache:
        """Keeps encoder output; pass it to `embed_mm_inputs`.

        Raises:
            UsageError, PluginLoadError: as for `preprocess_store`.
        """
        from mm_plugin.cache.embedding import EmbeddingCache

        self.check_open()
        name, capacity = self.settings.embedding_store, self.settings.embedding_cache_bytes
        return self._embedding_cache.get(lambda: EmbeddingCache(capacity, store=self._new_store(name, capacity)))

    @property
    def caller_hashes(self) -> CallerHashes:
        """What each hash given by a caller stood for: the last `max_caller_hashes` of the settings."""
        from mm_plugin.cache.memory import MemoryStore

        with self._lock:
            if self._caller_hashes is None:
                self._caller_hashes = CallerHashes(MemoryStore(self.settings.max_caller_hashes))
            return self._caller_hashes

    @property
    def observers(self) -> Observers:
        """Receive every event."""
        from mm_plugin.events import Observers

        return self._observers.get(lambda: Observers(self._services("observers").values()))

    @property
    def digests(self) -> Digests:
        """Hash on each kind of device."""
        from mm_plugin.identity.digests import Digests

        return self._digests.get(lambda: Digests(self._services("digests")))

    def after_fork(self) -> None:
        """Start threads again in a forked child; those of an executor that was lent are the server's."""
        self._thread = threading.local()
        if self._own_pool is not None:
            self._executor = self._own_pool = None

    def check_open(self) -> None:
        """Refuse to go on once the runtime is closed.

        Raises:
            UsageError: it is closed.
        """
        check_open(self.closed)

    def own(self, release: Callable[[], None]) -> None:
        """Call `release` when the runtime is closed, after its own threads have ended and what was owned before is released.

        Args:
            release: takes nothing; what it raises is logged.

        Raises:
            UsageError: the runtime is closed.
        """
        with self._lock:
            self.check_open()
            self._owned.append(release)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Stop the threads and close the caches that the runtime made itself. Calling it twice is harmless.

        Args:
            timeout: most seconds that it takes; what has not ended by then is left running, and logged.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self.closed.set()
            pool, self._own_pool = self._own_pool, None
            owned, self._owned = self._owned, []
        if pool is not None:
            # The threads first, so that no item is still being prepared when the stores close.
            if getattr(self._thread, "is_own", False):
                pool.shutdown(wait=False, cancel_futures=True)
                logger.warning("mm-plugin: closed by one of its own threads, which cannot wait for itself")
            else:
                _bounded(partial(pool.shutdown, wait=True, cancel_futures=True), "the threads", deadline)
        for release in owned:
            # A plugin's store may fail, or never end; the others must be closed all the same.
            _bounded(release, shown(release), deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_store(self, name: str, capacity_bytes: int) -> Store:
        store = self._make_store(name, capacity_bytes)
        try:
            self.own(store.close)
        except UsageError:
            store.close()  # all was closed while it was made
            raise
        return store


def _bounded(function: Callable[[], Any], what: str, deadline: float) -> None:
    """Call a function in a thread of its own, which is left alone once the deadline has passed; what goes wrong is logged."""

    def run() -> None:
        try:
            function()
        except BaseException as error:  # nobody is interrupted here: the thread is this function's own
            logger.warning("mm-plugin: closing failed in %s; the others are closed\n%s", what, trace_of(error))

    thread = threading.Thread(target=run, name="mm-plugin-close", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        logger.warning("mm-plugin: closing: %s did not end in time and is left running", what)


def _no_services(_kind: str) -> Mapping[str, Any]:
    return {}


def _memory_alone(name: str, capacity_bytes: int) -> Store:
    from mm_plugin.cache.memory import MemoryStore

    if name != "memory":
        raise UsageError(f"store: expected 'memory', got {name!r}", argument="store")
    return MemoryStore(capacity_bytes)
