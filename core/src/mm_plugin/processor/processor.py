"""`Processor`: what `Registry.load_processor` returns and a server calls. Final; the author's object is its `.model`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from mm_plugin.cache.pins import Pins
from mm_plugin.cache.store import Stats
from mm_plugin.errors import MMPluginError, UsageError
from mm_plugin.events import RequestFailed, RequestProcessed
from mm_plugin.foreign import shown
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.media.types import AudioSize, SampledVideo, Size, VideoSize
from mm_plugin.processor.arguments import Arguments, HashScope, Overflow, Prepare
from mm_plugin.processor.author import translate_errors
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.flow import Flow, itemwise, jointly, prepared_items, run, run_async
from mm_plugin.processor.largest import DummyRequest, LargestMedia, dummy_request, find_largest
from mm_plugin.processor.opened import OpenModel
from mm_plugin.processor.parallel import run_each
from mm_plugin.processor.prepared_item import PreparedItem, prepared_item
from mm_plugin.processor.preparer import ThreadPreparer, check_tasks
from mm_plugin.processor.received import received
from mm_plugin.processor.stages.measure import AuthorRules
from mm_plugin.processor.stages.read import read_one
from mm_plugin.tasks import JointTask, ModelRef, Preparer, PrepareTask

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.processor.model import ModelProcessor
    from mm_plugin.runtime import Runtime
    from mm_plugin.spec import ModelSpec


@final
class Processor:
    """One open model: prompt and media inputs to everything that a scheduler and a GPU worker need.

    Stateless between requests, so any number of threads may call it. Opened by `Registry.load_processor`.

    Args:
        cls: the author's class.
        spec: the plugin's declaration.
        checkpoint: the opened checkpoint.
        runtime: what the registry lends.
        options: options given at load.
        owner: plugin, distribution and version, for errors.
        ref: names this model to workers in other processes.

    Attributes:
        model: the author's object.
        spec: the plugin's declaration.
        checkpoint: the opened checkpoint.
        config: its config.json.
        settings: limits and switches.
        special_tokens: ids of placeholders and pairs.
        options: the options that are in force where a request gives none.

    Example:
        >>> import json, pathlib, tempfile
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> from mm_plugin import BaseOptions, Modality, ModelProcessor, ModelSpec, Replacement
        >>> from mm_plugin.runtime import Runtime
        >>> from mm_plugin.settings import Settings
        >>> from mm_plugin.testing import byte_level_tokenizer
        >>> class Rows(ModelProcessor):
        ...     Options = BaseOptions
        ...
        ...     def context(self, counts):
        ...         return None
        ...
        ...     def layout(self, modality, size, options, context):
        ...         return {"rows": size.height}
        ...
        ...     def prepare(self, decoded, layout, options):
        ...         return decoded.pixels.mean(axis=1)
        ...
        ...     def replacement(self, layout):
        ...         return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], layout["rows"])
        >>> spec = ModelSpec(
        ...     name="rows",
        ...     output_version=1,
        ...     modalities=(Modality.IMAGE,),
        ...     placeholders={Modality.IMAGE: "<image>"},
        ...     fields={Modality.IMAGE: ("rows",)},
        ...     padding="runs",
        ...     processor="rows:Rows",
        ...     encoder="rows:Encoder",
        ... )
        >>> checkpoint = SimpleNamespace(
        ...     folder=pathlib.Path(tempfile.gettempdir()),
        ...     config={},
        ...     preprocessor=lambda modality: {},
        ...     tokenizer=byte_level_tokenizer(["<image>"]),
        ... )
        >>> owner = {"plugin": "rows", "distribution": "rows", "version": "1"}
        >>> with Runtime(Settings()) as runtime:
        ...     processor = Processor(Rows, spec, checkpoint, runtime, {}, owner=owner)
        ...     output = processor.process("look: <image>", [np.zeros((3, 8, 3), np.uint8)])
        >>> output.mm_items[0].num_tokens, output.mm_items[0].feature.shape
        (3, (3, 3))
    """

    def __init__(
        self,
        cls: type[ModelProcessor],
        spec: ModelSpec,
        checkpoint: Checkpoint,
        runtime: Runtime,
        options: Mapping[str, Any],
        *,
        owner: Mapping[str, str],
        ref: ModelRef | None = None,
    ) -> None:
        self.spec, self.checkpoint, self.config, self.settings = spec, checkpoint, checkpoint.config, runtime.settings
        ref = ref or ModelRef(str(checkpoint.folder), owner["plugin"], options=dict(options))
        self._opened = OpenModel(cls, spec, checkpoint, runtime, options, owner, ref)
        self.model = self._opened.author.model
        self.special_tokens = self._opened.special_tokens
        self.options: Any = self._opened.table.loaded
        self._runtime, self._observers = runtime, runtime.observers  # loaded here, not on an event loop
        self._threads = ThreadPreparer(self._opened)
        self._preparer: Preparer = runtime.preparer or self._threads
        self._joint = self._opened.author.is_joint()

    def process(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        *,
        mm_hashes: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None,
        mm_hash_scope: HashScope = "fingerprinted",
        salt: str | bytes | None = None,
        max_prompt_tokens: int | None = None,
        on_overflow: Overflow = "error",
        expanded: bool = False,
        prepare: Prepare = "here",
        deadline: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool | None = None,
        **options: Any,
    ) -> MultimodalProcessorOutput:
        """Everything about one request, or one error that says whose fault it is.

        Args:
            prompt: text, token ids, or chat messages in the OpenAI content-part shape, media inside the parts or beside them.
            images: anything that `mm_plugin.media.open_image` takes, in prompt order; one with options of its own as
                `WithOptions(image, ...)`, and so for videos and audios.
            videos: anything that `mm_plugin.media.open_video` takes; refused unless the plugin takes videos.
            audios: anything that `mm_plugin.media.open_audio` takes; refused unless the plugin takes audio.
            mm_hashes: hashes by which the caller knows its media: `{"images": [...], "videos": [...], "audios": [...]}`
                aligned with the media, or one list in this order; whole numbers, in hexadecimal where they are text, or any
                other text of up to 1,024 characters (not in scope `raw`); None for "compute this one". A wrong count ignores all
                of them, a malformed one itself; each is emitted as an event.
            mm_hash_scope: `fingerprinted` makes an identity of the hash and of all that could change what becomes of the
                media input; `raw` takes its low 64 bits alone, as SGLang does. Reuse of a hash for other media is an error as
                long as it is remembered.
            salt: separates tenants; enters every identity.
            max_prompt_tokens: most tokens of the expanded prompt, decided before anything is decoded.
            on_overflow: what to do with a longer one: `error`; `drop_oldest` or `drop_newest` leave out whole media with
                their start and end tokens; `trim_text` leaves out the first tokens of text that are not special. What is still too
                long is an error.
            expanded: the ids hold each media input's replacement already; a mismatch is an error.
            prepare: `worker` leaves decoding and preparation to whoever encodes: ids, spans, positions and identities come from
                sizes alone, and each item has a `task` in place of a feature; see `encode_items`. The identity is that of the
                source, so it is not the one that the item would get here. What only decoding shows, such as a broken image, fails
                the item there.
            deadline: when the request must be done, in seconds of `time.monotonic()`. Nothing of it is begun after that: no media
                input is fetched, opened, decoded or prepared; what runs then may end. A `preparer` of your own is called before
                it or not at all.
            tools: for chat messages: descriptions of the tools that the model may call, as in the OpenAI API.
            documents: for chat messages: texts that the model may refer to, as objects with `title` and `text`.
            chat_template: for chat messages: name of the template, where the checkpoint has several. By default `tool_use` if there
                are tools, otherwise `default`.
            continue_final_message: for chat messages: whether the model continues the last message; None continues an
                assistant's text, and begins a new answer after any other message.
            **options: options of the plugin's `Options` that may be given per call, for all media inputs of the request.

        Raises:
            RequestError: the prompt or a media input is at fault; `MediaError`, `PlaceholderError` and `LimitError` say how. A
                `DeadlineError` says what was running at the deadline.
            UsageError: the server called wrongly: an unknown option, an argument of a wrong type.
            ProcessorError: the plugin is at fault.
        """
        arguments = Arguments(
            mm_hashes=mm_hashes,
            mm_hash_scope=mm_hash_scope,
            salt=salt,
            max_prompt_tokens=max_prompt_tokens,
            on_overflow=on_overflow,
            expanded=expanded,
            prepare=prepare,
            deadline=deadline,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
        )
        with self._reported() as report, translate_errors(self._opened.author, self._runtime.check_open):
            until = Deadline(arguments.deadline)
            flow = self._flow(prompt, (images, videos, audios), arguments, options, until)
            return report(run(flow, self._runtime.executor, self.settings, until))

    async def process_async(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **arguments: Any,
    ) -> MultimodalProcessorOutput:
        """As `process`, with nothing heavy on the event loop's thread: each stage runs on the registry's executor."""
        named = {name: arguments.pop(name) for name in Arguments.__struct_fields__ if name in arguments}
        with self._reported() as report, translate_errors(self._opened.author, self._runtime.check_open):
            checked = Arguments(**named)
            until = Deadline(checked.deadline)
            flow = self._flow(prompt, (images, videos, audios), checked, arguments, until)
            return report(await run_async(flow, self._runtime.executor, self.settings, until))

    @contextlib.contextmanager
    def _reported(self) -> Iterator[Callable[[MultimodalProcessorOutput], MultimodalProcessorOutput]]:
        """Emit what became of a request: its output, which is passed to what this yields, or its error."""
        began, plugin, emit = time.perf_counter(), self.spec.name, self._observers.emit

        def elapsed() -> float:
            return round((time.perf_counter() - began) * 1e3, 3)

        def report(output: MultimodalProcessorOutput) -> MultimodalProcessorOutput:
            tokens, items = len(output.input_ids), len(output.mm_items)
            emit(RequestProcessed(plugin=plugin, num_prompt_tokens=tokens, num_items=items, elapsed_ms=elapsed()))
            return output

        try:
            yield report
        except MMPluginError as error:
            path = getattr(error, "path", None)
            emit(RequestFailed(plugin=plugin, code=error.code, path=path, error=error.message, elapsed_ms=elapsed()))
            raise

    def _flow(
        self,
        prompt: Any,
        media: Sequence[Sequence[Any]],
        arguments: Arguments,
        options: Mapping[str, Any],
        deadline: Deadline,
    ) -> Flow:
        by_modality = dict(zip(Modality, media, strict=True))
        begin = jointly if self._joint else itemwise
        return begin(self._opened, self._until(deadline), prompt, by_modality, arguments, options)

    def _until(self, deadline: Deadline) -> Preparer:
        """The preparer for one request; the core's own begins nothing after its deadline."""
        return self._preparer.until(deadline) if isinstance(self._preparer, ThreadPreparer) else self._preparer

    def count(
        self,
        modality: Modality | str,
        size: Size | VideoSize | SampledVideo | AudioSize | tuple[int, int],
        *,
        counts: Mapping[Modality, int] | None = None,
        **options: Any,
    ) -> tuple[int, int]:
        """How many rows and prompt tokens a media input of this size takes; `mm_plugin.media.probe` gives sizes.

        Args:
            modality: what it is.
            size: of an image (height, width), pixels, after orientation; of a video a `VideoSize`, or a `SampledVideo` where its
                frames are chosen already; of audio an `AudioSize` at any rate.
            counts: media in the whole request, where the plugin's counts depend on them; one of this kind where None.
            **options: as for `process`.

        Returns:
            (num_rows, num_prompt_tokens).

        Raises:
            RequestError: no media input can have this size.
            UsageError: unknown modality or option, or a size of another modality.
        """
        opened, modality = self._opened, self._opened.serves(Modality.parse(modality))
        self._require_itemwise("the count")
        path = f"{modality.argument}[0]"
        with translate_errors(opened.author, self._runtime.check_open):
            resolved = opened.table.call(options)
            known = MEDIA_KINDS[modality].known_size(size, AuthorRules(opened, resolved, path), path, self.settings)
            context = opened.author.context(_counts(counts, modality))
            replacement = opened.measure(modality, known, resolved, context, path)[1]
        return replacement.num_embeddings, len(replacement.ids) + opened.reader.affix_tokens(modality)

    def largest(
        self, modality: Modality | str, *, counts: Mapping[Modality, int] | None = None, **options: Any
    ) -> LargestMedia:
        """The most embeddings that one media input can take, and a media input that takes them: for budgets and buffers.

        It is exact for models that say which sizes are largest (`KnowsLargest`), and otherwise the most of some that are tried.

        Args:
            modality: what it is.
            counts: as for `count`.
            **options: as for `process`.

        Raises:
            RequestError, UsageError: as for `count`; or the limits leave no size.
        """
        opened, modality = self._opened, self._opened.serves(Modality.parse(modality))
        self._require_itemwise("the largest")
        with translate_errors(opened.author, self._runtime.check_open):
            count = partial(self.count, modality, counts=counts, **options)
            return find_largest(opened, modality, opened.table.call(options), count)

    def dummy_request(self, counts: Mapping[Modality | str, int], **options: Any) -> DummyRequest:
        """A request with the largest media inputs, to measure what a server needs before the first request comes.

        Args:
            counts: how many media inputs of each modality it has.
            **options: as for `process`, which must be called with the same.

        Raises:
            RequestError, UsageError: as for `largest`.
        """
        if not isinstance(counts, Mapping) or any(type(count) is not int or count < 0 for count in counts.values()):
            raise UsageError(f"counts: expected whole numbers by modality, got {shown(counts)}", argument="counts")
        known = {Modality.parse(modality): count for modality, count in counts.items() if count}
        largest = [(self.largest(modality, counts=known, **options), known[modality]) for modality in sorted(known)]
        return dummy_request(self._opened, largest)

    def prepare_item(
        self,
        modality: Modality | str,
        media: Any,
        *,
        counts: Mapping[Modality, int] | None = None,
        salt: str | bytes | None = None,
        deadline: float | None = None,
        **options: Any,
    ) -> PreparedItem:
        """One media input by itself: for routers that want its source key, and to fill the cache ahead of a request.

        Args:
            modality: what it is.
            media: as for `process`.
            counts: media in the whole request, where the plugin depends on them; one of this kind where None.
            salt: as for `process`.
            deadline: as for `process`.
            **options: as for `process`.

        Raises:
            RequestError, UsageError, ProcessorError: as for `process`.
        """
        modality = self._opened.serves(Modality.parse(modality))
        self._require_itemwise("the source key")
        with translate_errors(self._opened.author, self._runtime.check_open):
            arguments = Arguments(salt=salt, deadline=deadline)
            until = Deadline(arguments.deadline)
            flow = self._one(modality, media, _counts(counts, modality), arguments, options, until)
            found: PreparedItem = run(flow, self._runtime.executor, self.settings, until)
            return found

    def _one(
        self,
        modality: Modality,
        media: Any,
        counts: Mapping[Modality, int],
        arguments: Arguments,
        options: Mapping[str, Any],
        deadline: Deadline,
    ) -> Generator[Any, Any, PreparedItem]:
        pins = Pins(lambda: self._runtime.preprocess_cache.store)
        try:
            request = read_one(self._opened, modality, media, counts, arguments, options)
            prepared = yield from prepared_items(self._opened, self._until(deadline), pins, request)
            (entry,) = prepared.items
            return prepared_item(self._opened, entry)
        finally:
            pins.release()

    def prepare_tasks(self, tasks: Sequence[PrepareTask | JointTask]) -> list[Any]:
        """Prepare tasks of this model here, in threads: what a worker process calls for tasks that reached it.

        Media inputs that came over `mm_plugin.wire` are opened with this process's settings.

        Args:
            tasks: made by a `Processor` of the same `ModelRef`.

        Returns:
            A `Prepared` (a `JointPrepared` for a `JointTask`) or the error of each task, in order.

        Raises:
            UsageError: an entry is not a task, or is one of another model; its checkpoint may lie in another folder here.
        """
        check_tasks(self._opened.ref, tasks)
        with translate_errors(self._opened.author, self._runtime.check_open):
            found = run_each(self._runtime.executor, lambda task: received(self._opened, task), tasks)
            good = [index for index, task in enumerate(found) if not isinstance(task, Exception)]
            made = self._threads.prepare([found[index] for index in good])
            try:
                for index in reversed(good):
                    found[index] = made.pop()
                return found
            finally:
                del found, made  # as in `run_each`

    def _require_itemwise(self, what: str) -> None:
        """Refuse what only a model can answer that prepares media inputs one by one."""
        if self._joint:
            raise UsageError(
                f"{self.spec.name} prepares the media inputs of a request together, so {what} of one alone is unknown",
                argument="medium",
            )

    @property
    def cache_stats(self) -> Stats:
        """What the preprocess cache did so far; see `mm_plugin.cache.Stats`."""
        return self._runtime.preprocess_cache.stats()


def _counts(given: Any, modality: Modality) -> Mapping[Modality, int]:
    """Media in the whole request, one of this kind among them; that one alone where nothing is given."""
    if given is None or given == {}:
        return {modality: 1}
    good = isinstance(given, Mapping) and all(type(count) is int and count >= 0 for count in given.values())
    counts = {Modality.parse(kind): count for kind, count in given.items() if count} if good else {}
    if modality not in counts:
        raise UsageError(
            f"counts: expected the number of media inputs by modality, at least one of {modality.argument}, "
            f"got {shown(given)}",
            argument="counts",
        )
    return counts
