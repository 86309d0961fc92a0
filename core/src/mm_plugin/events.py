"""Events, which say what happened, and the observers that receive them. Knows no causes; an observer cannot break a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from mm_plugin.foreign import is_interruption, shown, trace_of
from mm_plugin.forking import new_lock

logger = logging.getLogger("mm_plugin")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all events. Written as JSON or msgpack, an event has its class name as `type`.

    Example:
        >>> import msgspec
        >>> from mm_plugin.events import ItemDropped
        >>> msgspec.json.encode(ItemDropped(path="images[0]", why="more than 4096 tokens"))
        b'{"type":"ItemDropped","path":"images[0]","why":"more than 4096 tokens"}'
    """


class RequestProcessed(Event, frozen=True, kw_only=True):
    """A request's prompt and media inputs were processed.

    Attributes:
        plugin: name of the model spec.
        num_prompt_tokens: tokens of the expanded prompt.
        num_items: items of all modalities.
        elapsed_ms: from the call to its output, milliseconds.
    """

    plugin: str
    num_prompt_tokens: int
    num_items: int
    elapsed_ms: float


class RequestFailed(Event, frozen=True, kw_only=True):
    """A request was not processed; a cancelled one is not reported.

    Attributes:
        plugin: name of the model spec.
        code: code of the error, such as `media`.
        path: what it was about, such as `images[0]`; None where it has none.
        error: message of the error.
        elapsed_ms: from the call to the error, milliseconds.
    """

    plugin: str
    code: str
    path: str | None
    error: str
    elapsed_ms: float


class ItemKeyed(Event, frozen=True, kw_only=True):
    """A media input became an item with an identity.

    Attributes:
        plugin: name of the model spec.
        path: where the media input stands in the request, such as `images[0]`.
        modality: `image`, `video` or `audio`.
        identity: hexadecimal digits of the identity, or of the 64-bit hash where the caller gave one in place of it.
        num_tokens: embeddings that the item takes.
        cached: whether it was found in the cache, so that nothing was decoded.
        elapsed_ms: time spent on this media input, milliseconds.
    """

    plugin: str
    path: str
    modality: str
    identity: str
    num_tokens: int
    cached: bool
    elapsed_ms: float


class MediaNote(Event, frozen=True, kw_only=True):
    """A media input was served otherwise than asked or expected; one event for each note of each item, cached or not.

    Attributes:
        path: where the media input stands in the request, such as `images[0]`.
        modality: `image`, `video` or `audio`.
        note: what is different, as in `MultimodalDataItem.notes`.
    """

    path: str
    modality: str
    note: str


class EncodeBatch(Event, frozen=True, kw_only=True):
    """An encoder was called once.

    Attributes:
        modality: `image`, `video` or `audio`.
        num_items: items of the call.
        num_tokens: embeddings of all items of the call.
        elapsed_ms: time on the host, milliseconds; a GPU may still be at work afterwards.
    """

    modality: str
    num_items: int
    num_tokens: int
    elapsed_ms: float


class BatchRefused(Event, frozen=True, kw_only=True):
    """A plugin refused items together that it took one by one, so a batch is not to it what its items are.

    Attributes:
        plugin: name of the plugin.
        call: what was called: `image`, `video` or `audio` for an encoder, `prepare_batch` for a processor.
        num_items: items of the call.
        error: why it was refused.
    """

    plugin: str
    call: str
    num_items: int
    error: str


class ItemFailed(Event, frozen=True, kw_only=True):
    """An item could not be embedded; its request fails, and the others of the step go on.

    Attributes:
        request: index of the request in the batch.
        item: index of the item in the request; None where it has none.
        code: code of the error, such as `encoder`.
        error: message of the error.
    """

    request: int
    item: int | None
    code: str
    error: str


class HashIgnored(Event, frozen=True, kw_only=True):
    """A caller's hash was not used; the identity was computed instead.

    Attributes:
        path: which hash, such as `mm_hashes[images][0]`.
        why: the reason.
    """

    path: str
    why: str


class ItemDropped(Event, frozen=True, kw_only=True):
    """A media input was left out of a prompt that was too long.

    Attributes:
        path: where it stood in the request, such as `images[0]`.
        why: the reason.
    """

    path: str
    why: str


class FallbackUsed(Event, frozen=True, kw_only=True):
    """A fallback plugin serves a model for which no other plugin works.

    Attributes:
        asked: the architectures or the model type of the checkpoint.
        plugin: name of the fallback plugin.
        why: the reason.
    """

    asked: str
    plugin: str
    why: str


class DeviceSync(Event, frozen=True, kw_only=True):
    """The host waited for the device to read a value from it.

    Attributes:
        what: the value.
    """

    what: str


Observer = Callable[[Event], None]


class Observers:
    """The observers of one registry, called in the order in which they were added. Final; safe to use from several threads.

    An observer that raises is removed and logged once; neither the other observers nor the request are affected.

    Args:
        observers: callables that take one event each.

    Example:
        >>> from mm_plugin.events import ItemDropped, Observers
        >>> received = []
        >>> observers = Observers([received.append])
        >>> observers.emit(ItemDropped(path="images[0]", why="more than 4096 tokens"))
        >>> received[0].path
        'images[0]'
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._lock = new_lock()
        self._observers: tuple[Observer, ...] = tuple(observers)

    def add(self, observer: Observer) -> None:
        """Call an observer for every event from now on."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def emit(self, event: Event) -> None:
        """Pass an event to every observer."""
        for observer in self._observers:
            try:
                observer(event)
            except BaseException as error:
                if is_interruption(error):
                    raise
                with self._lock:
                    left = tuple(other for other in self._observers if other is not observer)
                    dropped, self._observers = len(left) < len(self._observers), left
                if dropped:
                    logger.warning(
                        "mm-plugin: observer %s failed on %s and was removed\n%s",
                        shown(observer),
                        type(event).__name__,
                        trace_of(error),
                    )
