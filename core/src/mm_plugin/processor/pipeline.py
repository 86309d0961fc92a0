"""The stages of a request, in order, over the four methods that an author wrote.

One item: digest -> source key -> preprocess cache; where it is not there: size from the header -> `layout` -> replacement -> every
limit -> decode -> `prepare` -> identity. Counts and limits need the first steps alone, so a prompt that is too long is refused, or
shortened, before anything is decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mm_plugin.arrays import detached, frozen, is_dense, is_floating, storage_bytes, writable
from mm_plugin.cache.memory import MemoryStore
from mm_plugin.cache.single_flight import ComputeCache
from mm_plugin.cache.store import Store
from mm_plugin.errors import (
    LimitError,
    MediaError,
    MMPluginError,
    PlaceholderError,
    PluginError,
    ProcessorError,
    RequestError,
    SizeError,
    UnattributedError,
    UsageError,
)
from mm_plugin.events import HashIgnored, ItemDropped, ItemKeyed, Observers
from mm_plugin.identity.digests import Digests, digest
from mm_plugin.identity.framing import feature_digest, frame
from mm_plugin.identity.keys import caller_identity, item_identity, source_key
from mm_plugin.inputs.precomputed import PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.inputs.processed import MultimodalProcessorOutput, SpecialTokens
from mm_plugin.items import Modality, MultimodalDataItem, MultimodalInputFormat
from mm_plugin.media.audio import AudioSource, open_audio
from mm_plugin.media.images import ImageSource, open_image, raw_pixels
from mm_plugin.media.limits import check_frames, check_pixels, check_request_pixels, check_video_seconds
from mm_plugin.media.types import (
    AudioSize,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    SampledVideo,
    Sampling,
    Size,
    VideoSize,
)
from mm_plugin.media.video import VideoSource, open_video, whole
from mm_plugin.placeholders import (
    Expansion,
    Replacement,
    Slot,
    expand,
    match_expanded,
    order_expanded,
    pad_by_offsets,
    token_modalities_of,
)
from mm_plugin.processor.arguments import Arguments, align_hashes, in_order, is_list
from mm_plugin.processor.joint_output import check_joint_output
from mm_plugin.processor.mixins import AcceptsAudio, AcceptsPrecomputed, AcceptsVideos, Fields, ProcessesJointly
from mm_plugin.processor.options import OptionTable
from mm_plugin.prompt.reader import PromptReader
from mm_plugin.sentinels import check_vocabulary
from mm_plugin.settings import Settings

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.processor.model import ModelProcessor
    from mm_plugin.spec import ModelSpec

logger = logging.getLogger("mm_plugin")
_ABILITIES = {Modality.VIDEO: AcceptsVideos, Modality.AUDIO: AcceptsAudio}
# A field says how a media input is laid out; more numbers than this say something else.
_MOST_FIELD_VALUES = 65_536
# Processors of one registry share their bindings, and two requests may bring one hash with two media at the same time.
_BINDING = threading.Lock()


class Runtime(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a registry lends to its processors.

    Attributes:
        settings: limits and switches.
        executor: runs the item stage.
        cache: prepared items by source key.
        observers: those who hear events.
        owner: plugin, distribution and version, for errors.
        digests: what hashes on other devices; the core's own where None.
        bindings: what each caller's hash stood for, an entry a hash; a memory of its own where None.
        closed: set when the registry is closed.
    """

    settings: Settings
    executor: Executor
    cache: ComputeCache
    observers: Observers
    owner: Mapping[str, str]
    digests: Digests | None = None
    bindings: Store | None = None
    closed: threading.Event = msgspec.field(default_factory=threading.Event)


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """One media input after the item stage, as the preprocess cache keeps it; shared by every request that repeats it.

    Attributes:
        fields: the model fields.
        replacement: the tokens that stand for it.
        feature: what the encoder reads.
        identity: 32 bytes.
        format: in which form it came.
        rows: encoder rows that came with it, in place of the feature.
    """

    fields: Fields
    replacement: Replacement
    feature: Any
    identity: bytes
    format: MultimodalInputFormat = MultimodalInputFormat.NORMAL
    rows: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps alive, by the storage that is really held."""
        parts = (self.feature, self.rows, self.replacement.ids, self.replacement.is_embed, *self.fields.values())
        return sum(map(storage_bytes, parts))


class PreparedItem(msgspec.Struct, frozen=True, eq=False):
    """One media input by itself, as a request would get it.

    Attributes:
        source_key: 32 bytes, the key of the preprocess cache; None for a media input that came prepared.
        identity: 32 bytes.
        fields: the model fields.
        replacement: the tokens that stand for it.
        feature: what the encoder reads.
        cached: whether it was prepared before.
    """

    source_key: bytes | None
    identity: bytes
    fields: Fields
    replacement: Replacement
    feature: Any
    cached: bool


class Item(msgspec.Struct, eq=False):
    """One media input on its way through a request."""

    modality: Modality
    path: str
    value: Any
    source: ImageSource | VideoSource | AudioSource | None = None
    size: Any = None
    key: bytes = b""
    fields: Fields | None = None
    replacement: Replacement | None = None
    prepared: Prepared | None = None
    cached: bool = False
    seconds: float = 0.0
    caller_hash: int | None = None
    claim: tuple[Any, bytes, str] | None = None  # what the caller's identity of rows must stand for
    pinned: bool = False
    decoded: DecodedMedia | None = None  # of a request that is prepared as a whole


class Request(msgspec.Struct, eq=False):
    """One request between its stages."""

    ids: np.ndarray
    slots: list[Slot]
    items: list[Item]
    options: Any
    effective: Mapping[Modality, bytes]
    context: Any
    arguments: Arguments
    dropped: list[str] = msgspec.field(default_factory=list)
    ended: bool = False
    lock: Any = msgspec.field(default_factory=threading.Lock)
    text: tuple[str, bool] | None = None  # prompt, and whether it is rendered, of one that is prepared as a whole


class Pipeline:
    """Runs the stages for one open model. Final, stateless between requests.

    It is an object of its own, so that no name that an author chooses in a `ModelProcessor` can meet one of its.

    Args:
        model: the author's processor, of which the four methods are called.
        spec: the model's declaration.
        checkpoint: the opened checkpoint.
        runtime: what the registry lends.
        options: options given at load.
    """

    def __init__(
        self,
        model: ModelProcessor,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        runtime: Runtime,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._author = model, type(model).__name__
        self.spec, self._checkpoint, self.config = spec, checkpoint, checkpoint.config
        self.settings, self.executor, self._closed = runtime.settings, runtime.executor, runtime.closed
        self._cache, self._observers, self._owner, self._digests = (
            runtime.cache, runtime.observers, runtime.owner, runtime.digests,
        )  # fmt: skip
        declared = getattr(type(model), "Options", None)
        self.table = OptionTable(declared, self._author, spec, checkpoint, options, runtime.owner)
        self.special_tokens = self._special_tokens()
        known = max(checkpoint.tokenizer.get_vocab().values(), default=-1) + 1
        vocabulary = max(known, _vocabulary_size(self.config))
        check_vocabulary(vocabulary)
        self.reader = PromptReader(
            checkpoint.tokenizer,
            self.special_tokens.placeholders,
            vocabulary=vocabulary,
            placeholder_affixes=spec.placeholder_affixes,
        )
        # Fields and replacements depend on these too, and every model of a registry keeps its items in one cache.
        self._model_digest = digest(
            frame(
                [
                    dict(self.config),
                    {int(modality): token for modality, token in self.special_tokens.placeholders.items()},
                    self.special_tokens.pairs,
                ]
            )
        )
        self._positions = spec.load("positions")
        self._position_options = {
            name: getattr(self.table.loaded, name) for name, scope in self.table.scopes.items() if scope.at == "load"
        }
        for modality, ability in _ABILITIES.items():
            if modality in spec.modalities and not isinstance(model, ability):
                raise ProcessorError(
                    f"{spec.name} declares {modality.argument}, so {self._author} must subclass {ability.__name__}",
                    **runtime.owner,
                )
        bindings = runtime.bindings
        self._bindings = MemoryStore(self.settings.max_caller_hashes) if bindings is None else bindings
        self._told: set[str] = set()
        self._whole = (
            model if isinstance(model, ProcessesJointly) and self.authored("as_a_whole", model.is_joint) else None
        )

    def stats(self) -> Any:
        """What the preprocess cache did so far."""
        return self._cache.stats()

    def begin(
        self, prompt: Any, media: Mapping[Modality, Sequence[Any]], arguments: Arguments, options: Mapping[str, Any]
    ) -> Request:
        """Ids with slots, and an item for each media input in prompt order; no media input is touched yet."""
        if self._whole is not None:
            return self._begin_jointly(prompt, media, arguments, options)
        read = self.reader.read(prompt, expanded=arguments.expanded)
        values = {modality: in_order(modality, read.media[modality], media[modality]) for modality in Modality}
        counts = {modality: len(found) for modality, found in values.items() if found}
        self._check_counts(counts)
        if arguments.expanded:
            order = [modality for modality, count in counts.items() for _ in range(count)]
        else:
            order = [modality for _, modality in read.slots]
            for modality in Modality:
                self._check_slots(modality, order.count(modality), len(values[modality]))
        hashes = align_hashes(arguments.mm_hashes, counts, self._ignore)
        taken = dict.fromkeys(Modality, 0)
        items = []
        for modality in order:
            index = taken[modality]
            taken[modality] += 1
            item = Item(modality, f"{modality.argument}[{index}]", values[modality][index])
            item.caller_hash = hashes[modality][index] if hashes else None
            items.append(item)
        request = self.request_of(items, counts, arguments, options)
        request.ids, request.slots = read.ids, [slot for slot, _ in read.slots]
        return request

    def _check_counts(self, counts: Mapping[Modality, int]) -> None:
        for modality in counts:
            self.served(modality)
        self._check_count(sum(counts.values()), "media", "max_items")
        for modality, count in counts.items():
            self._check_count(count, modality.argument, f"max_{modality.argument}")

    def _begin_jointly(
        self, prompt: Any, media: Mapping[Modality, Sequence[Any]], arguments: Arguments, options: Mapping[str, Any]
    ) -> Request:
        """The text and an item for each media input: where the media go, the model itself decides."""
        for name, usual in (("expanded", False), ("on_overflow", "error")):
            if getattr(arguments, name) != usual:
                raise UsageError(
                    f"{self.spec.name} prepares a request as a whole, so {name} must be {usual!r}", argument=name
                )
        if all(is_list(given) and not given for given in media.values()):
            read = self.reader.read(prompt)
            if not any(read.media.values()):
                for modality in Modality:
                    self._check_slots(modality, sum(kind is modality for _, kind in read.slots), 0)
                request = self.request_of([], {}, arguments, options)
                request.ids = read.ids
                return request
        text, rendered, inside = self.reader.read_text(prompt)
        values = {modality: in_order(modality, inside[modality], media[modality]) for modality in Modality}
        counts = {modality: len(found) for modality, found in values.items() if found}
        self._check_counts(counts)
        if arguments.mm_hashes is not None:
            self._ignore("mm_hashes", "the request is prepared as a whole")
        items = [
            Item(modality, f"{modality.argument}[{index}]", value)
            for modality in counts
            for index, value in enumerate(values[modality])
        ]
        request = self.request_of(items, counts, arguments, options)
        request.text = text, rendered
        return request

    def by_itself(self, what: str) -> None:
        """Refuse what only a model can answer that lays its media out one by one.

        Raises:
            UsageError: this one prepares requests as a whole.
        """
        if self._whole is not None:
            raise UsageError(
                f"{self.spec.name} prepares a request as a whole, so {what} of one media input is not known",
                argument="medium",
            )

    def request_of(
        self, items: list[Item], counts: Mapping[Modality, int], arguments: Arguments, options: Mapping[str, Any]
    ) -> Request:
        """Items with the options and the context that they share; pixels that came as objects are counted before any is touched."""
        pixels = 0
        for item in items:
            pixels += raw_pixels(item.value)
            check_request_pixels(item.path, pixels, self.settings)
        resolved = self.table.call(options)
        return Request(
            ids=np.zeros(0, dtype=np.int64),
            slots=[],
            items=items,
            options=resolved,
            effective={modality: self.table.effective(resolved, modality) for modality in counts},
            context=self.authored("context", lambda: self._model.context(counts)),
            arguments=arguments,
        )

    def _ignore(self, what: str, why: str) -> None:
        """Tell that a caller's hash is not used; the log has the first of its kind alone."""
        self._observers.emit(HashIgnored(path=what, why=why))
        if why not in self._told:
            self._told.add(why)
            logger.warning("mm-plugin: %s: %s ignored: %s", self.spec.name, what, why)

    def _check_count(self, count: int, what: str, setting: str) -> None:
        limit = getattr(self.settings, setting)
        if count > limit:
            raise LimitError(
                f"{count} {what} in one request, at most {limit} are accepted",
                path=None if what == "media" else what,
                setting=setting,
                limit=limit,
                value=count,
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

    async def fetch(self, items: Sequence[Item]) -> None:
        """Replace URLs by the bytes behind them, all at the same time; the first error in order is raised, once all have ended."""
        from mm_plugin.media.http import fetch_async

        found = await asyncio.gather(
            *(fetch_async(item.value, item.path, self.settings) for item in items), return_exceptions=True
        )
        try:
            for item, data in zip(items, found, strict=True):
                if isinstance(data, BaseException):
                    raise data
                item.value = data
        finally:
            found, data = [], b""  # an error that holds the frame that holds it would keep every media input alive

    def lay_out(self, request: Request, item: Item) -> None:
        """Digest, look into the cache, and where it is not there: fields and replacement from the size."""
        began = time.perf_counter()
        ready = isinstance(item.value, ProcessorOutput | PrecomputedEmbeddings)
        if ready and self._whole is not None:
            raise RequestError(
                f"{item.path}: {self.spec.name} takes no prepared {item.modality.argument}", path=item.path
            )
        if ready:
            item.prepared = self._take_ready(request, item, item.value)
            item.replacement, item.seconds = item.prepared.replacement, time.perf_counter() - began
            return
        open_media: Any = _DOORS[item.modality]
        item.source = source = open_media(item.value, path=item.path, settings=self.settings)
        if self._whole is not None:
            item.size = self._probe(source, request.options, item.path)  # for the limits, and to decode it
            return
        content = source.digest()
        with self._identified("context has"):
            item.key = source_key(
                self.spec.name, self.spec.output_version, item.modality, content,
                request.effective[item.modality], request.context,
                model=self._model_digest, salt=request.arguments.salt,
            )  # fmt: skip
        # Pinned first: what is found stays until the request has ended.
        self._pin(request, item)
        item.prepared = self._cache.get(item.key)
        if item.prepared is not None:
            item.replacement, item.cached = item.prepared.replacement, True
        else:
            item.size = self._probe(source, request.options, item.path)
            item.fields, item.replacement = self.measure(
                item.modality, item.size, request.options, request.context, item.path
            )
        item.seconds = time.perf_counter() - began

    def _probe(self, source: Any, options: Any, path: str) -> Size | SampledVideo | AudioSize:
        """The size that `layout` gets: of a video with its frames chosen, of audio at the rate that the author asks for."""
        if isinstance(source, ImageSource):
            return source.probe()
        if isinstance(source, AudioSource):
            return source.probe(self.sampling_rate(options))
        footage: VideoSize = source.probe()
        return _sampled(footage, whole(footage)) if source.sampled else self.sample(footage, options, path)

    def known_size(self, modality: Modality, size: Any, options: Any, path: str) -> Size | SampledVideo | AudioSize:
        """A size that a caller gave, as `layout` gets it.

        Raises:
            UsageError: it is no size of such a media input.
        """
        if modality is Modality.VIDEO:
            if not isinstance(size, VideoSize | SampledVideo):
                raise UsageError("size of a video must be a VideoSize or a SampledVideo", argument="size")
            return self._known_video(size, options, path)
        if modality is Modality.AUDIO:
            if not isinstance(size, AudioSize):
                raise UsageError("size of audio must be an AudioSize", argument="size")
            if min(size.num_samples, size.sampling_rate) < 1:
                raise MediaError(f"{path}: an audio input without samples", path=path, reason="empty")
            return size.at(self.sampling_rate(options))
        try:
            image = Size(*map(operator.index, (size.height, size.width) if isinstance(size, Size) else size))
        except TypeError:
            raise UsageError("size must be (height, width), two whole numbers of pixels", argument="size") from None
        check_pixels(path, image.height, image.width, self.settings)
        return image

    def _known_video(self, size: VideoSize | SampledVideo, options: Any, path: str) -> SampledVideo:
        whole_numbers = all(type(side) is int for side in (size.height, size.width))
        if isinstance(size, SampledVideo):
            chosen = Sampling(size.indices, size.timestamps, size.fps)
            if whole_numbers and isinstance(size.indices, np.ndarray) and not size.indices.size:
                raise MediaError(f"{path}: no frame was chosen", path=path, reason="empty")
            if not whole_numbers or not _is_sampling(chosen, 1 << 62):
                raise UsageError(
                    "a SampledVideo has whole sides, int64 indices that ascend, a finite float64 timestamp for each, and a "
                    "rate above 0",
                    argument="size",
                )
            check_pixels(path, size.height, size.width, self.settings)
            return size
        number = isinstance(size.fps, int | float)
        times = size.timestamps is None or np.shape(size.timestamps) == (size.frames,)
        if not whole_numbers or type(size.frames) is not int or not number or not times:
            raise UsageError(
                "a VideoSize has whole sides and frames, a rate, and a timestamp for each frame or none",
                argument="size",
            )
        check_pixels(path, size.height, size.width, self.settings)
        if size.frames < 1 or not 0 < size.fps < math.inf:
            raise MediaError(
                f"{path}: {size.frames} frames at {size.fps} a second are no video", path=path, reason="empty"
            )
        check_frames(path, size.frames, self.settings)
        check_video_seconds(path, size.duration, self.settings)
        return self.sample(size, options, path)

    def sampling_rate(self, options: Any) -> int:
        """The rate that the author asks for, checked."""
        model = self._model
        assert isinstance(model, AcceptsAudio)
        rate = self.authored("sampling_rate", lambda: model.sampling_rate(options))
        if type(rate) is not int or rate < 1:
            raise ProcessorError(
                f"{self._author}.sampling_rate must return samples per second, got {rate!r}", **self._owner
            )
        return rate

    def sample(self, size: VideoSize, options: Any, path: str) -> SampledVideo:
        """The frames that the author chooses, checked."""
        model = self._model
        assert isinstance(model, AcceptsVideos)
        found = self.authored("sample", lambda: model.sample(size, options), path)
        if not _is_sampling(found, size.frames):
            raise ProcessorError(
                f"{self._author}.sample must return a Sampling of int64 indices that ascend from 0 to {size.frames - 1}, "
                "a finite float64 timestamp for each, and a rate above 0",
                **self._owner,
            )
        return _sampled(size, found)

    def measure(
        self, modality: Modality, size: Size | SampledVideo | AudioSize, options: Any, context: Any, path: str
    ) -> tuple[Fields, Replacement]:
        """Fields and replacement of a media input of one size, checked."""
        fields = self.authored("layout", lambda: self._model.layout(modality, size, options, context), path)
        declared = set(self.spec.fields[modality])
        if not isinstance(fields, Mapping) or set(fields) != declared:
            found = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
            raise ProcessorError(
                f"{self._author}.layout returned {found}, the spec declares {sorted(declared)} for {modality.argument}",
                **self._owner,
            )
        fields = {name: frozen(value) for name, value in fields.items()}
        return fields, self._replacement(fields, path)

    def _replacement(self, fields: Fields, path: str) -> Replacement:
        """The tokens that stand for a media input, checked."""
        replacement = self.authored("replacement", lambda: self._model.replacement(fields), path)
        if not isinstance(replacement, Replacement):
            raise ProcessorError(
                f"{self._author}.replacement returned a {type(replacement).__name__}; it must return Replacement",
                **self._owner,
            )
        self._check_replacement(replacement)
        self._check_item_tokens(len(replacement.ids), "tokens", path)
        return replacement

    def _check_item_tokens(self, count: int, what: str, path: str) -> None:
        limit = self.settings.max_item_tokens
        if count > limit:
            raise LimitError(
                f"{path}: takes {count} {what}, at most {limit} are accepted",
                path=path,
                setting="max_item_tokens",
                limit=limit,
                value=count,
            )

    def _take_ready(self, request: Request, item: Item, value: ProcessorOutput | PrecomputedEmbeddings) -> Prepared:
        """A media input that a processor or an encoder made already: everything about it is checked, nothing is decoded."""
        model, modality, path = self._model, item.modality, item.path
        if not isinstance(model, AcceptsPrecomputed):
            raise RequestError(f"{path}: {self.spec.name} takes no prepared {modality.argument}", path=path)
        given = dict(value.fields) if isinstance(value.fields, Mapping) else {}
        feature = rows = None
        expected = set(self.spec.fields[modality])
        if isinstance(value, ProcessorOutput):
            name = self.authored("feature_name", lambda: model.feature_name(modality), path)
            feature = given.pop(name, None)
            if not is_dense(feature):
                raise MediaError(
                    f"{path}: {name} must be a dense numpy array or torch tensor", path=path, reason="fields"
                )
        if set(given) != expected:
            raise MediaError(
                f"{path}: the fields are {sorted(map(str, given))}, {self.spec.name} takes {sorted(expected)}",
                path=path,
                reason="fields",
            )
        fields = {name: frozen(_as_field(part, f"{path}.{name}", path)) for name, part in given.items()}
        count = self.authored("check_fields", lambda: model.check_fields(modality, fields), path)
        self._check_item_tokens(count, "rows", path)
        if isinstance(value, PrecomputedEmbeddings):
            rows = value.embeddings
            if not is_dense(rows) or rows.ndim != 2 or not is_floating(rows) or len(rows) != count:
                found = f"{list(rows.shape)} {rows.dtype}" if is_dense(rows) else type(rows).__name__
                raise MediaError(
                    f"{path}: the rows are {found}, the fields stand for [{count}, hidden] floating point",
                    path=path,
                    reason="rows",
                )
        else:
            self.authored("check_feature", lambda: model.check_feature(modality, feature, fields), path)
        replacement = self._replacement(fields, path)
        if replacement.num_embeddings != count:
            raise ProcessorError(
                f"{self._author}.check_fields gives {count} rows, its replacement takes {replacement.num_embeddings}",
                **self._owner,
            )
        feature, rows = writable(feature), writable(rows)
        kind = MultimodalInputFormat.PROCESSOR_OUTPUT if rows is None else MultimodalInputFormat.PRECOMPUTED_EMBEDDING
        identity = item_identity(
            self.spec.name, self.spec.output_version, modality, kind.value,
            self._ready_content(request, item, value, feature if rows is None else rows), fields,
            salt=request.arguments.salt,
        )  # fmt: skip
        return Prepared(fields, replacement, feature, identity, kind, rows)

    def _ready_content(
        self, request: Request, item: Item, value: ProcessorOutput | PrecomputedEmbeddings, ready: Any
    ) -> bytes:
        """The content of a media input that came prepared: the digest of its feature or rows, or the caller's own for rows."""
        own = value.identity if isinstance(value, PrecomputedEmbeddings) else None
        if own is not None and (not isinstance(own, bytes) or len(own) != 32):
            raise UsageError(f"{item.path}: an identity of rows has 32 bytes", argument="identity")
        try:
            content = feature_digest(ready, self._digests)
        except UsageError as error:
            raise MediaError(f"{item.path}: {error.message}", path=item.path, reason="fields") from error
        if own is None:
            return content
        # Its own kind of digest, so that it can meet no computed one; what it stands for is remembered like a caller's hash.
        named = digest(frame(["caller-rows", own, request.arguments.salt]))
        item.claim = (("rows", self.spec.name, self._model_digest, named), content, item.path)
        return named

    def _check_replacement(self, replacement: Replacement) -> None:
        """What a scheduler relies on: a one-dimensional run of ids of which at least one takes a row."""
        ids, is_embed = replacement.ids, replacement.is_embed
        good = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"
        if good and is_embed is not None:
            good = isinstance(is_embed, np.ndarray) and is_embed.dtype == np.bool_ and is_embed.shape == ids.shape
        if not good or not replacement.num_embeddings:
            raise ProcessorError(
                f"{self._author}.replacement must give ids [n] of integers and is_embed [n] of bool, "
                "at least one of them true",
                **self._owner,
            )

    def fit(self, request: Request) -> None:
        """Hold the expanded prompt, by the caller's policy, and the pixels to their limits; no image or frame is decoded yet."""
        self._shorten(request)
        limit, pixels = self.settings.max_request_pixels, sum(_pixels(item.size) for item in request.items)
        if pixels > limit:
            raise LimitError(
                f"the request's images and sampled frames have {pixels} pixels, at most {limit} are accepted",
                setting="max_request_pixels",
                limit=limit,
                value=pixels,
            )

    def _shorten(self, request: Request) -> None:
        limit = request.arguments.max_prompt_tokens
        if limit is None or request.text is not None:
            return
        policy = request.arguments.on_overflow
        length = self._length(request)
        while length > limit and policy in ("drop_oldest", "drop_newest") and request.items:
            self._drop(request, 0 if policy == "drop_oldest" else len(request.items) - 1)
            length = self._length(request)
        if length > limit and policy == "trim_text":
            self._trim(request, length - limit)
            length = self._length(request)
        self._check_length(length, limit)

    def _check_length(self, length: int, limit: int) -> None:
        if length > limit:
            raise LimitError(
                f"the expanded prompt has {length} tokens, at most {limit} are accepted",
                path="prompt",
                setting="max_prompt_tokens",
                limit=limit,
                value=length,
            )

    def _length(self, request: Request) -> int:
        """Tokens of the expanded prompt."""
        length = len(request.ids)
        for slot, item in zip(request.slots, request.items, strict=not request.arguments.expanded):
            assert item.replacement is not None
            length += len(item.replacement.ids) - (slot.end - slot.start)
        return length

    def _drop(self, request: Request, index: int) -> None:
        """Leave out one media input with its slot and wrapper tokens; count the others again where they depend on it."""
        dropped, slot = request.items.pop(index), self._wrapped(request, request.slots.pop(index))
        width = slot.end - slot.start
        request.ids = np.delete(request.ids, np.arange(slot.start, slot.end))
        request.slots = [
            Slot(other.start - width, other.end - width) if other.start >= slot.end else other
            for other in request.slots
        ]
        request.dropped.append(dropped.path)
        self._unpin(request, [dropped])
        why = f"more than {request.arguments.max_prompt_tokens} tokens"
        self._observers.emit(ItemDropped(path=dropped.path, why=why))
        counts = {modality: sum(item.modality is modality for item in request.items) for modality in Modality}
        context = self.authored("context", lambda: self._model.context({m: n for m, n in counts.items() if n}))
        if frame(context) != frame(request.context):
            request.context = context
            self._unpin(request, request.items)
            self.run(request.items, lambda item: self.lay_out(request, item))

    def _wrapped(self, request: Request, slot: Slot) -> Slot:
        """The slot with the start and end token that stand around it, if they do."""
        ids = request.ids
        if slot.start > 0 and slot.end < len(ids):
            around = (int(ids[slot.start - 1]), int(ids[slot.end]))
            if around in self.special_tokens.pairs:
                return Slot(slot.start - 1, slot.end + 1)
        return slot

    def _trim(self, request: Request, excess: int) -> None:
        """Leave out the first tokens of text; media, their wrappers and special tokens stay."""
        text = ~self.reader.is_protected(request.ids)
        for slot in request.slots:
            text[slot.start : slot.end] = False
        gone = np.flatnonzero(text)[:excess]
        request.ids = np.delete(request.ids, gone)
        shift = [int(np.searchsorted(gone, slot.start)) for slot in request.slots]
        request.slots = [Slot(s.start - n, s.end - n) for s, n in zip(request.slots, shift, strict=True)]

    def end(self, request: Request) -> None:
        """Let the cache evict again what the request used.

        A step may still run then, after an error or a cancellation; it pins nothing any more.
        """
        with request.lock:
            request.ended = True
        self._unpin(request, request.items)

    def _pin(self, request: Request, item: Item) -> None:
        with request.lock:
            if not request.ended and not item.pinned:
                item.pinned = self._cache.store.pin(item.key)

    def _unpin(self, request: Request, items: Sequence[Item]) -> None:
        with request.lock:
            for item in items:
                if item.pinned:
                    self._cache.store.unpin(item.key)
                    item.pinned = False

    def prepare(self, request: Request, item: Item) -> None:
        """Decode, prepare and identify a media input, once however many requests bring it at the same time."""
        began = time.perf_counter()
        if request.text is not None:
            assert item.source is not None
            item.decoded = _decoded(item.source, item.size, request.options)
        elif item.prepared is None:
            try:
                item.prepared, item.cached = self._cache.get_or_compute(
                    item.key, lambda: self._compute(request, item), lambda prepared: prepared.num_bytes
                )
            except MediaError as error:
                if error.path in (None, item.path):
                    raise
                # Another place or request was computing this media input; its error names where it stands there.
                message = error.message.replace(str(error.path), item.path, 1)
                raise MediaError(message, path=item.path, reason=error.reason) from error
            self._pin(request, item)
        item.source = None  # the file's bytes are not needed any more
        item.seconds += time.perf_counter() - began

    def _compute(self, request: Request, item: Item) -> Prepared:
        assert item.source is not None
        assert item.fields is not None
        assert item.replacement is not None
        fields, options = item.fields, request.options
        decoded = _decoded(item.source, item.size, options)
        feature = self.authored("prepare", lambda: self._model.prepare(decoded, fields, options), item.path)
        with self._identified("prepare returned"):
            content = feature_digest(feature, self._digests)
        with self._identified("layout returned"):
            identity = item_identity(
                self.spec.name, self.spec.output_version, item.modality, MultimodalInputFormat.NORMAL.value,
                content, fields, salt=request.arguments.salt,
            )  # fmt: skip
        for source in _arrays(decoded):
            feature = detached(feature, source)
        return Prepared(fields, item.replacement, feature, identity)

    def finish(self, request: Request) -> MultimodalProcessorOutput:
        """Expansion with recorded spans, sentinels, marks and positions."""
        if request.text is not None:
            return self._finish_jointly(request, *request.text)
        try:
            if request.arguments.expanded:
                self._sort_expanded(request)
            prepared = [item.prepared for item in request.items if item.prepared is not None]
            replacements = [part.replacement for part in prepared]
            if request.arguments.expanded:
                expansion = match_expanded(request.ids, replacements)
                self._check_surplus(expansion)
            else:
                expansion = expand(request.ids, request.slots, replacements)
        except UnattributedError as error:
            raise PlaceholderError(f"prompt: {error.message}", path="prompt") from error
        items = []
        for entry, part, offsets in zip(request.items, prepared, expansion.offsets, strict=True):
            item = MultimodalDataItem(
                modality=entry.modality,
                offsets=offsets,
                format=part.format,
                feature=part.feature,
                precomputed_embeddings=part.rows,
                model_specific_data=dict(part.fields),
            )
            items.append(item)
        claims = [self._identify(request, *entry) for entry in zip(request.items, prepared, items, strict=True)]
        claims += [entry.claim for entry in request.items]
        self._bind([claim for claim in claims if claim is not None])
        for entry, item in zip(request.items, items, strict=True):
            self._tell(entry, item)
        return self._output(expansion.ids, items, tuple(request.dropped))

    def _output(
        self, ids: np.ndarray, items: list[MultimodalDataItem], dropped: tuple[str, ...] = ()
    ) -> MultimodalProcessorOutput:
        positions = delta = None
        if self._positions is not None:
            positions, delta = self._checked_positions(items, len(ids))
        return MultimodalProcessorOutput(
            input_ids=ids,
            padded_input_ids=pad_by_offsets(ids, items),
            token_modalities=token_modalities_of(items, len(ids)),
            mm_items=items,
            special_tokens=self.special_tokens,
            mrope_positions=positions,
            mrope_position_delta=delta,
            position_options=dict(self._position_options),
            dropped=dropped,
        )

    def _finish_jointly(self, request: Request, text: str, rendered: bool) -> MultimodalProcessorOutput:
        """One item for each modality, from all of its media together."""
        model, began = self._whole, time.perf_counter()
        assert model is not None
        media: dict[Modality, list[DecodedMedia]] = {}
        for entry in request.items:
            assert entry.decoded is not None
            media.setdefault(entry.modality, []).append(entry.decoded)
        found = self.authored(
            "prepare_whole", lambda: model.prepare_jointly(text, media, request.options, rendered=rendered), "prompt"
        )
        ids, items = check_joint_output(found, self.spec, list(media))
        limit = request.arguments.max_prompt_tokens
        if limit is not None:
            self._check_length(len(ids), limit)
        for item in items:
            path = item.modality.argument
            self._check_item_tokens(item.num_tokens, "tokens", path)
            for decoded in media[item.modality]:
                for source in _arrays(decoded):
                    item.feature = detached(item.feature, source)
            with self._identified("prepare_jointly returned"):
                content = feature_digest(item.feature, self._digests)
                item.set_identity(
                    item_identity(
                        self.spec.name, self.spec.output_version, item.modality, item.format.value,
                        content, item.model_specific_data, salt=request.arguments.salt,
                    )
                )  # fmt: skip
            self._tell(Item(item.modality, path, None, seconds=time.perf_counter() - began), item)
        return self._output(ids, items)

    def _sort_expanded(self, request: Request) -> None:
        """Bring media of several kinds into the order in which they stand in expanded ids."""
        kinds: dict[Modality, list[Item]] = {}
        for item in request.items:
            kinds.setdefault(item.modality, []).append(item)
        if len(kinds) > 1:
            groups = [[item.prepared.replacement for item in items if item.prepared] for items in kinds.values()]
            queues = [iter(items) for items in kinds.values()]
            request.items = [next(queues[group]) for group in order_expanded(request.ids, groups)]

    def _check_surplus(self, expansion: Expansion) -> None:
        """Expanded ids hold no placeholder but those that stand for the media that came."""
        for modality, token in self.special_tokens.placeholders.items():
            inside = sum(int(np.count_nonzero(expansion.ids[start:end] == token)) for start, end in expansion.spans)
            found = int(np.count_nonzero(expansion.ids == token))
            if found != inside:
                raise PlaceholderError(
                    f"the expanded prompt holds {found} {self.spec.placeholders[modality]}, its {modality.argument} stand "
                    f"for {inside}",
                    path="prompt",
                    expected=inside,
                    found=found,
                )

    def _identify(
        self, request: Request, entry: Item, part: Prepared, item: MultimodalDataItem
    ) -> tuple[Any, bytes, str] | None:
        """Give an item its identity: the natural one, or that of the caller's hash, with what that must stand for."""
        value, arguments = entry.caller_hash, request.arguments
        if value is None:
            item.set_identity(part.identity)
            return None
        # Two models may know one media input by one hash.
        who = (self.spec.name, self.spec.output_version, self._model_digest)
        if arguments.mm_hash_scope == "raw":
            item.set_hash(value)
            return ("raw", *who, item.hash), part.identity, entry.path
        identity = caller_identity(
            self.spec.name, self.spec.output_version, item.modality, value,
            request.effective[item.modality], request.context, salt=arguments.salt,
        )  # fmt: skip
        item.set_identity(identity)
        return ("fingerprinted", *who, identity), part.identity, entry.path

    def _bind(self, bindings: Sequence[tuple[Any, bytes, str]]) -> None:
        """Remember what each of a caller's names stands for, all of a request's or none."""
        with _BINDING:
            said: dict[Any, bytes] = {}
            for name, content, path in bindings:
                if said.setdefault(name, self._bindings.get(name) or content) != content:
                    raise RequestError(
                        f"{path}: the hash or identity given for it stood for another media input before, or for this one "
                        "prepared in another way; it must stand for one",
                        path=path,
                    )
            for name, content in said.items():
                self._bindings.put(name, content, 1)

    def _tell(self, entry: Item, item: MultimodalDataItem) -> None:
        known = item.identity.hex() if item.identity is not None else f"{item.hash:016x}"
        self._observers.emit(
            ItemKeyed(
                plugin=self.spec.name,
                path=entry.path,
                modality=item.modality.name.lower(),
                identity=known,
                num_tokens=item.num_tokens,
                cached=entry.cached,
                elapsed_ms=round(entry.seconds * 1e3, 3),
            )
        )

    def _checked_positions(self, items: Sequence[MultimodalDataItem], seq: int) -> tuple[np.ndarray, int]:
        """What the spec's function gives, if it is what a language model can read."""
        given = {"seq": seq, "config": self.config, "options": dict(self._position_options)}
        found = self.authored("positions", lambda: self._positions(items, **given))
        positions, delta = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        good = isinstance(positions, np.ndarray) and positions.shape == (3, seq) and positions.dtype == np.int64
        if not good or type(delta) is not int:
            raise ProcessorError(
                f"{self.spec.positions} must return positions [3, {seq}] int64 and a delta, a Python int",
                **self._owner,
            )
        return positions, delta

    def run(self, items: Sequence[Item], step: Callable[[Item], None]) -> None:
        """One step over all items, on the executor where there are several; the first error in order is raised.

        What no thread has begun when its turn comes is done here: so a request ends even where every thread of the executor
        waits for one.
        """
        if len(items) <= 1:
            for item in items:
                step(item)
            return
        futures = [self.executor.submit(step, item) for item in items]
        try:
            for item, future in zip(items, futures, strict=True):
                if future.cancel():
                    step(item)
                else:
                    future.result()
        finally:
            while futures:
                future = futures.pop()
                future.cancel()
            del future  # its error holds this frame, and a frame that held it too would keep every media input alive

    # ---------------------------------------------------------------- blame

    def authored(self, method: str, call: Callable[[], Any], path: str | None = None) -> Any:
        """Call an author's method: what is wrong with the media input is the request's fault, everything else the plugin's."""
        try:
            return call()
        except (RequestError, PluginError, MemoryError):
            raise
        except SizeError as error:
            raise MediaError(f"{path or 'media'}: {error.message}", path=path, reason="size") from error
        except (Exception, SystemExit) as error:
            where = f" on {path}" if path else ""
            raise ProcessorError(
                f"{self._author}.{method} failed{where}: {type(error).__name__}: {error}", **self._owner
            ) from error

    @contextlib.contextmanager
    def _identified(self, what: str) -> Iterator[None]:
        """An author's value that no digest can be made of is the plugin's fault."""
        try:
            yield
        except UsageError as error:
            raise ProcessorError(
                f"{self._author}.{what} what has no identity: {error.message}", **self._owner
            ) from error

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Nothing but our own errors leaves a request, and none is begun once the registry is closed."""
        self._check_open()
        try:
            yield
        except (CancelledError, asyncio.CancelledError):
            self._check_open()  # the executor was closed under it
            raise
        except UnattributedError as error:
            raise ProcessorError(f"{self.spec.name}: {error.message}", **self._owner) from error
        except MMPluginError:
            raise
        except MemoryError as error:
            raise LimitError("the request needs more memory than there is", setting="memory") from error
        except Exception as error:
            self._check_open()
            raise ProcessorError(f"{self.spec.name}: {type(error).__name__}: {error}", **self._owner) from error

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UsageError("the registry is closed", argument="registry")

    def served(self, modality: Modality) -> Modality:
        """The modality, if the model takes it."""
        if modality not in self.spec.modalities:
            raise RequestError(
                f"{self.spec.name} takes {', '.join(m.argument for m in self.spec.modalities)}, not {modality.argument}",
                path=modality.argument,
            )
        return modality

    def _special_tokens(self) -> SpecialTokens:
        tokenizer = self._checkpoint.tokenizer
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


_DOORS = {Modality.IMAGE: open_image, Modality.VIDEO: open_video, Modality.AUDIO: open_audio}


def _decoded(source: ImageSource | VideoSource | AudioSource, size: Any, options: Any) -> DecodedMedia:
    if isinstance(source, ImageSource):
        return source.decode(background=options.background)
    if isinstance(source, AudioSource):
        return source.decode(size)
    return source.decode(size, background=options.background)


def _arrays(decoded: DecodedMedia) -> list[np.ndarray]:
    """Arrays of the decoded media that may be the caller's own."""
    if isinstance(decoded, DecodedImage):
        return [decoded.pixels]
    return [decoded.samples] if isinstance(decoded, DecodedAudio) else []


def _is_sampling(found: Any, frames: int) -> bool:
    """Whether it names frames that a video of so many has."""
    if not isinstance(found, Sampling) or not isinstance(found.fps, int | float) or not 0 < found.fps < math.inf:
        return False
    for part, dtype in ((found.indices, np.int64), (found.timestamps, np.float64)):
        if not isinstance(part, np.ndarray) or part.dtype != dtype or part.ndim != 1 or not len(part):
            return False
    indices, times = found.indices, found.timestamps
    inside = indices[0] >= 0 and indices[-1] < frames and not (np.diff(indices) < 0).any()
    return bool(inside and len(times) == len(indices) and np.isfinite(times).all())


def _sampled(size: VideoSize, chosen: Sampling) -> SampledVideo:
    return SampledVideo(size.height, size.width, chosen.indices, chosen.timestamps, float(chosen.fps))


def _pixels(size: Any) -> int:
    """Pixels that are decoded of a media input of this size; none where it is known already, and none of an audio input."""
    if isinstance(size, SampledVideo):
        return size.height * size.width * size.frames
    return size.height * size.width if isinstance(size, Size) else 0


def _vocabulary_size(config: Any) -> int:
    """Rows of the largest embedding table that a config tells of, padding included, however deep it stands."""
    if isinstance(config, list | tuple):
        return max(map(_vocabulary_size, config), default=0)
    if not isinstance(config, Mapping):
        return 0
    own = [config.get(name) for name in ("vocab_size", "padded_vocab_size")]
    return max([0, *(size for size in own if isinstance(size, int)), *map(_vocabulary_size, config.values())])


def _as_field(value: Any, name: str, path: str) -> Any:
    """A client's field as the plugin's own `layout` would give it: small, plain, whole numbers as int64."""
    if isinstance(value, str | bool | int | float | None):
        return value
    try:
        if is_dense(value) and not isinstance(value, np.ndarray):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except Exception as error:
        raise MediaError(
            f"{name} cannot be read as an array ({type(error).__name__})", path=path, reason="fields"
        ) from error
    if array.dtype.kind not in "biuf" or array.size > _MOST_FIELD_VALUES:
        raise MediaError(
            f"{name} must be at most {_MOST_FIELD_VALUES} numbers, got {array.dtype} {list(array.shape)}",
            path=path,
            reason="fields",
        )
    return array.astype(np.int64) if array.dtype.kind in "iu" else array
