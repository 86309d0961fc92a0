"""`ModelProcessor`, what an author subclasses, and the pipeline from prompt + media to `MultimodalProcessorOutput`, written once.

The order of one item: digest -> source key -> preprocess cache; where it is not there: size from the header -> `layout` ->
replacement -> every limit -> decode -> `prepare` -> identity. Counts and limits need the first steps alone, so a prompt that
is too long is refused before anything is decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import sys
import threading
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import msgspec
import numpy as np

from mm_plugin.errors import (
    LimitError,
    MediaError,
    MMPluginError,
    NeutralError,
    PlaceholderError,
    PluginError,
    ProcessorError,
    RequestError,
    SizeError,
    UsageError,
)
from mm_plugin.events import ItemKeyed, Observers
from mm_plugin.identity import digest, feature_digest, frame, item_identity, source_key
from mm_plugin.media import WHITE, Color, Medium, Size, Source, open_image
from mm_plugin.placeholders import Replacement, Slot, expand, mark_modalities, match_expanded, pad_by_offsets
from mm_plugin.prompt import PromptReader
from mm_plugin.sentinels import check_vocabulary
from mm_plugin.settings import Settings
from mm_plugin.structs import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
    SpecialTokens,
)

if TYPE_CHECKING:
    from mm_plugin.cache import ComputeCache
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.spec import ModelSpec

Fields = Mapping[str, Any]


_worker = threading.local()


def mark_worker() -> None:
    """Say that this thread belongs to the executor of the item stage; the registry's pool starts its threads with it."""
    _worker.marked = True


class For(msgspec.Struct, frozen=True):
    """Says in an `Options` annotation which media an option is about, and when it may be given.

    `max_pixels: Annotated[int, For("image")] = 1003520`. An option without it is about every medium and may be given per call.

    Attributes:
        modalities: names of the modalities whose outputs it changes; none means all.
        at: the latest moment at which it may be given: `call`, `load` for a switch that is fixed when the model is opened,
            or `checkpoint` for a number that only the checkpoint's own files may set.
    """

    modalities: tuple[str, ...] = ()
    at: Literal["call", "load", "checkpoint"] = "call"

    @classmethod
    def checkpoint(cls, *modalities: str) -> For:
        """A number that belongs to the weights: encoder and processor must agree on it, so nobody may change it."""
        return cls(modalities, "checkpoint")

    @classmethod
    def load(cls, *modalities: str) -> For:
        """A switch that is fixed when the model is opened."""
        return cls(modalities, "load")

    @classmethod
    def call(cls, *modalities: str) -> For:
        """An option that a request may give."""
        return cls(modalities, "call")


class BaseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the core itself reads; an author's `Options` subclasses it.

    Attributes:
        background: RGB levels behind transparent pixels.
    """

    background: typing.Annotated[Color, For(("image",))] = WHITE

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, modalities: Sequence[Modality], given: Mapping[str, Any] | None = None
    ) -> Self:
        """The options that are in force when a model is opened: load over checkpoint over default.

        Args:
            checkpoint: its preprocessor settings are taken by name; names that are no option are left alone.
            modalities: whose settings; where two disagree, the first counts.
            given: options given at load.

        Raises:
            UsageError: a value does not fit its option.
        """
        names = set(cls.__struct_fields__)
        settings: dict[str, Any] = {}
        for modality in reversed(modalities):
            found = checkpoint.preprocessor(modality)
            settings |= {name: value for name, value in found.items() if name in names and value is not None}
        try:
            return msgspec.convert(settings | dict(given or {}), cls, strict=True)
        except msgspec.ValidationError as error:
            raise UsageError(f"options for {checkpoint.folder}: {error}", argument="options") from error


class Runtime(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a registry lends to its processors.

    Attributes:
        settings: limits and switches.
        executor: runs the item stage.
        cache: prepared items by source key.
        observers: those who hear events.
        blame: plugin, distribution and version, for errors.
    """

    settings: Settings
    executor: Executor
    cache: ComputeCache
    observers: Observers
    blame: Mapping[str, str]


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """One medium after the item stage, as the preprocess cache keeps it; shared by every request that repeats it.

    Attributes:
        fields: the model fields.
        replacement: the tokens that stand for it.
        feature: what the encoder reads.
        identity: 32 bytes.
    """

    fields: Fields
    replacement: Replacement
    feature: Any
    identity: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps alive."""
        held = [self.feature, self.replacement.ids, self.replacement.takes_row, *self.fields.values()]
        return sum(int(getattr(part, "nbytes", 64)) for part in held if part is not None)


class _Item(msgspec.Struct, eq=False):
    """One medium on its way through a request."""

    modality: Modality
    path: str
    value: Any
    source: Source | None = None
    key: bytes = b""
    fields: Fields | None = None
    replacement: Replacement | None = None
    prepared: Prepared | None = None
    cached: bool = False
    seconds: float = 0.0


class _Request(msgspec.Struct, eq=False):
    """One request between its stages."""

    ids: np.ndarray
    slots: list[Slot]
    items: list[_Item]
    options: Any
    effective: Mapping[Modality, bytes]
    context: Any
    salt: str | bytes | None
    expanded: bool
    max_prompt_tokens: int | None


class ModelProcessor(ABC):
    """Prompt + media -> everything that a scheduler and a GPU worker need. Abstract: an author writes four small methods.

    Opened by `Registry.load_processor`. Stateless between requests, so any number of threads may call it.

    An author overrides `Options`, `context`, `layout`, `prepare` and `replacement`, and nothing else. What is needed once per
    checkpoint (tables, token ids) is a `functools.cached_property`.

    Attributes:
        spec: the plugin's declaration.
        checkpoint: the opened checkpoint.
        config: its config.json.
        settings: limits and switches.
        special_tokens: ids of placeholders and pairs.
        options: the options that are in force where a call gives none.
    """

    Options: ClassVar[type[BaseOptions]]

    @final
    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, runtime: Runtime, options: Mapping[str, Any]) -> None:
        self.spec, self.checkpoint, self.config = spec, checkpoint, checkpoint.config
        self.settings = runtime.settings
        self._runtime = runtime
        self._scopes = _scopes(type(self), runtime.blame)
        self.options = self._load_options(options)
        self._default_effective = {
            modality: self._digest_options(self.options, modality) for modality in spec.modalities
        }
        self.special_tokens = self._special_tokens()
        self._reader = PromptReader(checkpoint.tokenizer, self.special_tokens.placeholders)
        self._positions = spec.load("positions")
        check_vocabulary(max(len(checkpoint.tokenizer), _vocabulary_size(self.config)))

    # ---------------------------------------------------------------- what an author writes

    @abstractmethod
    def context(self, counts: Mapping[Modality, int]) -> Any:
        """Request-level facts that an item depends on, such as whether there are more than two images; None where there are none.

        Args:
            counts: media in the request, by modality.
        """

    @abstractmethod
    def layout(self, modality: Modality, size: Size, options: Any, context: Any) -> Fields:
        """The model fields of one medium, from its size alone: exactly the names that the spec declares for the modality.

        Args:
            modality: what it is.
            size: pixels, after orientation.
            options: an `Options`, all resolved.
            context: what `context` returned.
        """

    @abstractmethod
    def prepare(self, medium: Medium, layout: Fields, options: Any) -> Any:
        """The feature that the encoder reads, a numpy array or torch tensor of its own.

        Args:
            medium: decoded and normalised.
            layout: what `layout` returned.
            options: an `Options`, all resolved.
        """

    @abstractmethod
    def replacement(self, layout: Fields) -> Replacement:
        """The tokens that stand for one medium in the expanded prompt.

        Args:
            layout: what `layout` returned.
        """

    # ---------------------------------------------------------------- what a server calls

    @final
    def process(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        *,
        salt: str | bytes | None = None,
        max_prompt_tokens: int | None = None,
        expanded: bool = False,
        **options: Any,
    ) -> MultimodalProcessorOutput:
        """Everything about one request, or one error that says whose fault it is.

        Args:
            prompt: text, token ids, or chat messages in the OpenAI content-part shape, media inside the parts or beside them.
            images: anything that `mm_plugin.media.open_image` takes, in prompt order.
            videos: refused unless the plugin takes videos.
            audios: refused unless the plugin takes audio.
            salt: separates tenants; enters every identity.
            max_prompt_tokens: most tokens of the expanded prompt; more is an error, raised before anything is decoded.
            expanded: the ids hold each medium's replacement already; a mismatch is an error.
            **options: options of the plugin's `Options` that may be given per call.

        Raises:
            RequestError: the prompt or a medium is at fault; `MediaError`, `PlaceholderError` and `LimitError` say how.
            UsageError: the server called wrongly: an unknown option, a wrong type.
            ProcessorError: the plugin is at fault.
        """
        with self._guard():
            request = self._begin(
                prompt, {Modality.IMAGE: images, Modality.VIDEO: videos, Modality.AUDIO: audios},
                salt, max_prompt_tokens, expanded, options,
            )  # fmt: skip
            self._run(request.items, lambda item: self._lay_out(request, item))
            self._check_length(request)
            self._run(request.items, lambda item: self._prepare(request, item))
            return self._finish(request)

    @final
    async def process_async(self, prompt: Any, *media: Sequence[Any], **arguments: Any) -> MultimodalProcessorOutput:
        """As `process`, with nothing heavy on the event loop's thread: each stage runs on the registry's executor."""
        loop, executor = asyncio.get_running_loop(), self._runtime.executor
        bound = _bind_process(media, arguments)

        async def each(items: Sequence[_Item], step: Callable[[_Item], None]) -> None:
            work = (loop.run_in_executor(executor, step, item) for item in items)
            # Wait for all, so that the error raised is the first in order, as in `process`.
            for error in await asyncio.gather(*work, return_exceptions=True):
                if error is not None:
                    raise error

        with self._guard():
            request = await loop.run_in_executor(executor, lambda: self._begin(prompt, *bound))
            await each(request.items, lambda item: self._lay_out(request, item))
            self._check_length(request)
            await each(request.items, lambda item: self._prepare(request, item))
            return await loop.run_in_executor(executor, self._finish, request)

    @final
    def count(
        self,
        modality: Modality | str,
        size: Size | tuple[int, int],
        *,
        counts: Mapping[Modality, int] | None = None,
        **options: Any,
    ) -> tuple[int, int]:
        """How many rows and prompt tokens a medium of this size takes, without its pixels.

        Args:
            modality: what it is.
            size: (height, width), pixels, after orientation.
            counts: media in the whole request, where the plugin's counts depend on them; one of this kind where None.
            **options: as for `process`.

        Returns:
            (num_rows, num_prompt_tokens).

        Raises:
            RequestError: no medium can have this size.
            UsageError: unknown modality or option.
        """
        modality = self._served(Modality.parse(modality))
        try:
            size = Size(*map(operator.index, (size.height, size.width) if isinstance(size, Size) else size))
        except TypeError:
            raise UsageError("size must be (height, width), two whole numbers of pixels", argument="size") from None
        path = f"{modality.argument}[0]"
        with self._guard():
            resolved = self._call_options(options)
            context = self._authored("context", lambda: self.context(counts or {modality: 1}))
            replacement = self._measure(modality, size, resolved, context, path)[1]
        return replacement.num_rows, len(replacement.ids)

    @property
    @final
    def cache_stats(self) -> Any:
        """What the preprocess cache did so far; see `mm_plugin.cache.Stats`."""
        return self._runtime.cache.stats()

    # ---------------------------------------------------------------- stages

    def _begin(
        self,
        prompt: Any,
        media: Mapping[Modality, Sequence[Any]],
        salt: str | bytes | None,
        max_prompt_tokens: int | None,
        expanded: bool,
        options: Mapping[str, Any],
    ) -> _Request:
        resolved = self._call_options(options)
        if salt is not None and not isinstance(salt, str | bytes):
            raise UsageError(f"salt must be text or bytes, not {type(salt).__name__}", argument="salt")
        if max_prompt_tokens is not None and type(max_prompt_tokens) is not int:
            raise UsageError(
                f"max_prompt_tokens must be a whole number, not {type(max_prompt_tokens).__name__}",
                argument="max_prompt_tokens",
            )
        read = self._reader.read(prompt, expanded=expanded)
        values = {modality: _in_order(modality, read.media[modality], media[modality]) for modality in Modality}
        counts = {modality: len(found) for modality, found in values.items() if found}
        for modality in counts:
            self._served(modality)
        total = sum(counts.values())
        if total > self.settings.max_items:
            raise LimitError(
                f"{total} media in one request, at most {self.settings.max_items} are accepted",
                setting="max_items",
                limit=self.settings.max_items,
                value=total,
            )
        if expanded:
            order = [modality for modality in Modality for _ in values[modality]]
            if len(counts) > 1:
                raise UsageError("expanded=True with media of several kinds is ambiguous", argument="expanded")
        else:
            order = [modality for _, modality in read.slots]
            for modality in Modality:
                self._check_slots(modality, order.count(modality), len(values[modality]))
        taken = dict.fromkeys(Modality, 0)
        items = []
        for modality in order:
            index = taken[modality]
            taken[modality] += 1
            items.append(_Item(modality, f"{modality.argument}[{index}]", values[modality][index]))
        return _Request(
            ids=read.ids,
            slots=[slot for slot, _ in read.slots],
            items=items,
            options=resolved,
            effective={modality: self._effective(resolved, modality) for modality in counts},
            context=self._authored("context", lambda: self.context(counts)),
            salt=salt,
            expanded=expanded,
            max_prompt_tokens=max_prompt_tokens,
        )

    def _check_slots(self, modality: Modality, slots: int, given: int) -> None:
        if slots != given:
            token = self.spec.placeholders.get(modality, "")
            raise PlaceholderError(
                f"the prompt holds {slots} {modality.name.lower()} placeholders {token}, "
                f"{given} {modality.argument} were given",
                path=modality.argument,
                expected=slots,
                found=given,
            )

    def _lay_out(self, request: _Request, item: _Item) -> None:
        """Digest, look into the cache, and where it is not there: fields and replacement from the size."""
        began = time.perf_counter()
        source = open_image(item.value, path=item.path, settings=self.settings)
        item.source = source
        content = source.digest()
        with self._identified("context has"):
            item.key = source_key(
                self.spec.name, self.spec.output_version, item.modality, content,
                request.effective[item.modality], request.context, salt=request.salt,
            )  # fmt: skip
        item.prepared = self._runtime.cache.get(item.key)
        if item.prepared is not None:
            item.replacement, item.cached = item.prepared.replacement, True
        else:
            size = source.probe()
            item.fields, item.replacement = self._measure(
                item.modality, size, request.options, request.context, item.path
            )
        item.seconds = time.perf_counter() - began

    def _measure(
        self, modality: Modality, size: Size, options: Any, context: Any, path: str
    ) -> tuple[Fields, Replacement]:
        """Fields and replacement of a medium of one size, checked."""
        fields = self._authored("layout", lambda: self.layout(modality, size, options, context), path)
        declared = set(self.spec.fields[modality])
        if not isinstance(fields, Mapping) or set(fields) != declared:
            found = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
            raise ProcessorError(
                f"{type(self).__name__}.layout returned {found}, the spec declares {sorted(declared)} for "
                f"{modality.argument}",
                **self._runtime.blame,
            )
        fields = {name: _frozen(value) for name, value in fields.items()}
        replacement = self._authored("replacement", lambda: self.replacement(fields), path)
        if not isinstance(replacement, Replacement):
            raise ProcessorError(
                f"{type(self).__name__}.replacement returned a {type(replacement).__name__}; it must return Replacement",
                **self._runtime.blame,
            )
        self._check_replacement(replacement)
        limit = self.settings.max_item_tokens
        if len(replacement.ids) > limit:
            raise LimitError(
                f"{path}: takes {len(replacement.ids)} tokens, at most {limit} are accepted",
                path=path,
                setting="max_item_tokens",
                limit=limit,
                value=len(replacement.ids),
            )
        return fields, replacement

    def _check_replacement(self, replacement: Replacement) -> None:
        """What a scheduler relies on: a one-dimensional run of ids of which at least one takes a row."""
        ids, takes_row = replacement.ids, replacement.takes_row
        good = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"
        if good and takes_row is not None:
            good = isinstance(takes_row, np.ndarray) and takes_row.dtype == np.bool_ and takes_row.shape == ids.shape
        if not good or not replacement.num_rows:
            raise ProcessorError(
                f"{type(self).__name__}.replacement must give ids [n] of integers and takes_row [n] of bool, "
                "at least one of them true",
                **self._runtime.blame,
            )

    def _check_length(self, request: _Request) -> None:
        limit = request.max_prompt_tokens
        if limit is None:
            return
        length = len(request.ids)
        if not request.expanded:
            for slot, item in zip(request.slots, request.items, strict=True):
                assert item.replacement is not None
                length += len(item.replacement.ids) - (slot.end - slot.start)
        if length > limit:
            raise LimitError(
                f"the expanded prompt has {length} tokens, at most {limit} are accepted",
                path="prompt",
                setting="max_prompt_tokens",
                limit=limit,
                value=length,
            )

    def _prepare(self, request: _Request, item: _Item) -> None:
        """Decode, prepare and identify a medium, once however many requests bring it at the same time."""
        began = time.perf_counter()
        if item.prepared is None:
            try:
                item.prepared, item.cached = self._runtime.cache.get_or_compute(
                    item.key, lambda: self._compute(request, item), lambda prepared: prepared.num_bytes
                )
            except MediaError as error:
                if error.path in (None, item.path):
                    raise
                # Another place or request was computing this medium; its error names where it stands there.
                message = error.message.replace(str(error.path), item.path, 1)
                raise MediaError(message, path=item.path, reason=error.reason) from error
        item.source = None  # the file's bytes are not needed any more
        item.seconds += time.perf_counter() - began
        self._runtime.observers.emit(
            ItemKeyed(
                plugin=self.spec.name,
                path=item.path,
                modality=item.modality.name.lower(),
                identity=item.prepared.identity.hex(),
                num_tokens=item.prepared.replacement.num_rows,
                cached=item.cached,
                elapsed_ms=round(item.seconds * 1e3, 3),
            )
        )

    def _compute(self, request: _Request, item: _Item) -> Prepared:
        assert item.source is not None
        assert item.fields is not None
        assert item.replacement is not None
        fields, options = item.fields, request.options
        medium = item.source.decode(background=options.background)
        feature = self._authored("prepare", lambda: self.prepare(medium, fields, options), item.path)
        with self._identified("prepare returned"):
            content = feature_digest(feature)
        with self._identified("layout returned"):
            identity = item_identity(
                self.spec.name, self.spec.output_version, item.modality, MultimodalInputFormat.NORMAL.value,
                content, fields, salt=request.salt,
            )  # fmt: skip
        feature = _detached(feature, medium.pixels)
        return Prepared(fields, item.replacement, feature, identity)

    def _finish(self, request: _Request) -> MultimodalProcessorOutput:
        """Expansion with recorded spans, sentinels, marks and positions."""
        prepared = [item.prepared for item in request.items if item.prepared is not None]
        replacements = [part.replacement for part in prepared]
        try:
            if request.expanded:
                expansion = match_expanded(request.ids, replacements)
            else:
                expansion = expand(request.ids, request.slots, replacements)
        except NeutralError as error:
            raise PlaceholderError(f"prompt: {error.message}", path="prompt") from error
        items = []
        for entry, part, offsets in zip(request.items, prepared, expansion.offsets, strict=True):
            item = MultimodalDataItem(
                modality=entry.modality,
                offsets=offsets,
                feature=part.feature,
                model_specific_data=dict(part.fields),
            )
            item.set_identity(part.identity)
            items.append(item)
        seq = len(expansion.ids)
        positions = delta = None
        if self._positions is not None:
            positions, delta = self._checked_positions(items, seq)
        return MultimodalProcessorOutput(
            input_ids=expansion.ids,
            padded_input_ids=pad_by_offsets(expansion.ids, items),
            token_modalities=mark_modalities(items, seq),
            mm_items=items,
            special_tokens=self.special_tokens,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    def _checked_positions(self, items: Sequence[MultimodalDataItem], seq: int) -> tuple[np.ndarray, int]:
        """What the spec's function gives, if it is what a language model can read."""
        found = self._authored("positions", lambda: self._positions(items, seq=seq, config=self.config))
        positions, delta = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        good = isinstance(positions, np.ndarray) and positions.shape == (3, seq) and positions.dtype == np.int64
        if not good or type(delta) is not int:
            raise ProcessorError(
                f"{self.spec.positions} must return positions [3, {seq}] int64 and a delta, a Python int",
                **self._runtime.blame,
            )
        return positions, delta

    def _run(self, items: Sequence[_Item], step: Callable[[_Item], None]) -> None:
        """One step over all items, on the executor where there are several; the first error in order is raised.

        A thread of the executor that waited for others of it could wait for ever, so there the step runs where it is.
        """
        if len(items) <= 1 or getattr(_worker, "marked", False):
            for item in items:
                step(item)
            return
        futures = [self._runtime.executor.submit(step, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()

    # ---------------------------------------------------------------- options

    def _load_options(self, given: Mapping[str, Any]) -> Any:
        """Load over checkpoint over default."""
        self._refuse_unknown(given, at="load")
        return self.Options.from_checkpoint(self.checkpoint, self.spec.modalities, given)

    def _call_options(self, given: Mapping[str, Any]) -> Any:
        """Call over load over checkpoint over default."""
        if not given:
            return self.options
        self._refuse_unknown(given, at="call")
        try:
            return msgspec.convert(msgspec.structs.asdict(self.options) | dict(given), self.Options, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"options: {error}", path="options") from error

    def _refuse_unknown(self, given: Mapping[str, Any], *, at: str) -> None:
        moments = ("call", "load") if at == "load" else ("call",)
        allowed = sorted(name for name, scope in self._scopes if scope.at in moments)
        fixed = {name: scope.at for name, scope in self._scopes}
        for name in given:
            if name not in allowed:
                why = {"load": "is fixed when the model is opened", "checkpoint": "is the checkpoint's alone"}.get(
                    fixed.get(name, ""), "is unknown"
                )
                raise UsageError(
                    f"option {name!r} of {self.spec.name} {why}; options here: {', '.join(allowed)}", argument=name
                )

    def _effective(self, options: Any, modality: Modality) -> bytes:
        """Digest of the options that can change this modality's output: these, and no others, enter its source key."""
        if options is self.options:
            return self._default_effective[modality]
        return self._digest_options(options, modality)

    def _digest_options(self, options: Any, modality: Modality) -> bytes:
        name = modality.name.lower()
        effective = {
            option: getattr(options, option)
            for option, scope in self._scopes
            if not scope.modalities or name in scope.modalities
        }
        with self._identified("options have"):
            return digest(frame(effective))

    # ---------------------------------------------------------------- blame

    def _authored(self, method: str, call: Callable[[], Any], path: str | None = None) -> Any:
        """Call an author's method: what is wrong with the medium is the request's fault, everything else the plugin's."""
        try:
            return call()
        except (RequestError, PluginError):
            raise
        except SizeError as error:
            raise MediaError(f"{path or 'media'}: {error.message}", path=path, reason="size") from error
        except (Exception, SystemExit) as error:
            where = f" on {path}" if path else ""
            raise ProcessorError(
                f"{type(self).__name__}.{method} failed{where}: {type(error).__name__}: {error}", **self._runtime.blame
            ) from error

    @contextlib.contextmanager
    def _identified(self, what: str) -> Iterator[None]:
        """An author's value that no digest can be made of is the plugin's fault."""
        try:
            yield
        except UsageError as error:
            raise ProcessorError(
                f"{type(self).__name__}.{what} what has no identity: {error.message}", **self._runtime.blame
            ) from error

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Nothing but our own errors leaves a request."""
        try:
            yield
        except NeutralError as error:
            raise ProcessorError(f"{self.spec.name}: {error.message}", **self._runtime.blame) from error
        except MMPluginError:
            raise
        except MemoryError as error:
            raise LimitError("the request needs more memory than there is", setting="memory") from error
        except Exception as error:
            raise ProcessorError(f"{self.spec.name}: {type(error).__name__}: {error}", **self._runtime.blame) from error

    def _served(self, modality: Modality) -> Modality:
        if modality not in self.spec.modalities:
            raise RequestError(
                f"{self.spec.name} takes {', '.join(m.argument for m in self.spec.modalities)}, not {modality.argument}",
                path=modality.argument,
            )
        return modality

    def _special_tokens(self) -> SpecialTokens:
        tokenizer = self.checkpoint.tokenizer
        vocabulary = tokenizer.get_vocab()

        def token_id(token: str) -> int:
            if token not in vocabulary:
                raise UsageError(
                    f"the checkpoint's tokenizer has no token {token!r}, which {self.spec.name} needs",
                    argument="checkpoint",
                )
            return int(vocabulary[token])

        return SpecialTokens(
            placeholders={modality: token_id(token) for modality, token in self.spec.placeholders.items()},
            pairs=tuple((token_id(start), token_id(end)) for start, end in self.spec.token_pairs),
        )


def _bind_process(
    media: tuple[Sequence[Any], ...], arguments: dict[str, Any]
) -> tuple[dict[Modality, Sequence[Any]], Any, Any, bool, dict[str, Any]]:
    """`process_async`'s arguments as `_begin` takes them."""
    if len(media) > len(Modality):
        raise UsageError(f"process_async takes {len(Modality)} lists of media, not {len(media)}", argument="media")
    given: dict[Modality, Sequence[Any]] = dict(zip(Modality, media, strict=False))
    for modality in Modality:
        if modality.argument in arguments:
            if modality in given:
                raise UsageError(f"{modality.argument} were given twice", argument=modality.argument)
            given[modality] = arguments.pop(modality.argument)
        given.setdefault(modality, ())
    return (
        given,
        arguments.pop("salt", None),
        arguments.pop("max_prompt_tokens", None),
        arguments.pop("expanded", False),
        arguments,
    )


def _in_order(modality: Modality, parts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Media from message parts, those that only mark a place filled from the argument in order."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise UsageError(
            f"{modality.argument} must be a list of media, not {type(given).__name__}", argument=modality.argument
        )
    if not parts:
        return list(given)
    rest = iter(given)
    marks = sum(part is None for part in parts)
    if marks != len(given):
        raise PlaceholderError(
            f"the messages leave {marks} {modality.name.lower()} places open, {len(given)} {modality.argument} were given",
            path=modality.argument,
            expected=marks,
            found=len(given),
        )
    return [next(rest) if part is None else part for part in parts]


def _scopes(cls: type[ModelProcessor], blame: Mapping[str, str]) -> tuple[tuple[str, For], ...]:
    """Every option of an author's struct, and what it is about."""
    options = getattr(cls, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseOptions)):
        raise ProcessorError(f"{cls.__name__}.Options must be a struct that subclasses BaseOptions", **blame)
    scopes = []
    for name, hint in typing.get_type_hints(options, include_extras=True).items():
        found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, For)]
        scopes.append((name, found[0] if found else For()))
    return tuple(scopes)


def _vocabulary_size(config: Mapping[str, Any]) -> int:
    """Rows of the embedding table, padding included, as far as the config says."""
    text = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, text) if isinstance(part, Mapping)]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _detached(feature: Any, pixels: np.ndarray) -> Any:
    """The feature in memory of its own: the pixels may be the caller's array, which can change afterwards."""
    if isinstance(feature, np.ndarray):
        return feature.copy() if np.may_share_memory(feature, pixels) else feature
    torch = sys.modules.get("torch")  # who returned a tensor has imported torch
    if torch is not None and isinstance(feature, torch.Tensor) and feature.device.type == "cpu":
        storage, (first, end) = feature.untyped_storage(), np.lib.array_utils.byte_bounds(pixels)
        if storage.data_ptr() < end and first < storage.data_ptr() + storage.nbytes():
            return feature.clone()
    return feature


def _frozen(value: Any) -> Any:
    """An array that nobody can change: fields are shared by every request that repeats a medium."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value
