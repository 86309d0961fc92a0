"""`ModelProcessor`: four methods that an author writes, and what a server calls."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from mm_plugin.inputs import MultimodalProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media.sources import is_remote
from mm_plugin.media.types import AudioSize, SampledVideo, Size, VideoSize
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.arguments import Arguments, HashScope, Overflow
from mm_plugin.processor.mixins import Fields
from mm_plugin.processor.options import BaseOptions
from mm_plugin.processor.pipeline import Item, Pipeline, PreparedItem, Runtime

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.spec import ModelSpec


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
        self._pipeline = Pipeline(self, spec, checkpoint, runtime, options)
        self.special_tokens = self._pipeline.special_tokens
        self.options: Any = self._pipeline.table.loaded

    # ---------------------------------------------------------------- what an author writes

    @abstractmethod
    def context(self, counts: Mapping[Modality, int]) -> Any:
        """Request-level facts that an item depends on, such as whether there are more than two images; None where there are none.

        Args:
            counts: media in the request, by modality.
        """

    @abstractmethod
    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> Fields:
        """The model fields of one media input, from its size alone: exactly the names that the spec declares for the modality.

        Args:
            modality: what it is.
            size: of an image a `Size`; of a video a `SampledVideo`, the frames that `sample` chose; of audio an `AudioSize` at
                the rate that `sampling_rate` gave.
            options: an `Options`, all resolved.
            context: what `context` returned.
        """

    @abstractmethod
    def prepare(self, decoded: Any, layout: Fields, options: Any) -> Any:
        """The feature that the encoder reads, a numpy array or torch tensor of its own.

        Args:
            decoded: a `DecodedImage`, a `DecodedVideo` whose frames are decoded while they are iterated, or a `DecodedAudio`.
            layout: what `layout` returned.
            options: an `Options`, all resolved.
        """

    @abstractmethod
    def replacement(self, layout: Fields) -> Replacement:
        """The tokens that stand for one media input in the expanded prompt.

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
        mm_hashes: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None,
        mm_hash_scope: HashScope = "fingerprinted",
        salt: str | bytes | None = None,
        max_prompt_tokens: int | None = None,
        on_overflow: Overflow = "error",
        expanded: bool = False,
        **options: Any,
    ) -> MultimodalProcessorOutput:
        """Everything about one request, or one error that says whose fault it is.

        Args:
            prompt: text, token ids, or chat messages in the OpenAI content-part shape, media inside the parts or beside them.
            images: anything that `mm_plugin.media.open_image` takes, in prompt order.
            videos: anything that `mm_plugin.media.open_video` takes; refused unless the plugin takes videos.
            audios: anything that `mm_plugin.media.open_audio` takes; refused unless the plugin takes audio.
            mm_hashes: hashes by which the caller knows its media: `{"images": [...], "videos": [...], "audios": [...]}`
                aligned with the media, or one list in this order; hexadecimal text or whole numbers, None for "compute
                this one". A wrong count ignores all of them, a malformed one itself; each is told as an event.
            mm_hash_scope: `fingerprinted` makes an identity of the hash and of all that could change what becomes of the
                media input; `raw` takes its low 64 bits alone, as SGLang does. Reuse of a hash for other media is an error as
                long as it is remembered.
            salt: separates tenants; enters every identity.
            max_prompt_tokens: most tokens of the expanded prompt, decided before anything is decoded.
            on_overflow: what to do with a longer one: `error`; `drop_oldest` or `drop_newest` leave out whole media with
                their start and end tokens; `trim_text` leaves out the first tokens of text that are not special. What is still too
                long is an error.
            expanded: the ids hold each media input's replacement already; a mismatch is an error.
            **options: options of the plugin's `Options` that may be given per call.

        Raises:
            RequestError: the prompt or a media input is at fault; `MediaError`, `PlaceholderError` and `LimitError` say how.
            UsageError: the server called wrongly: an unknown option, an argument of a wrong type.
            ProcessorError: the plugin is at fault.
        """
        media = {Modality.IMAGE: images, Modality.VIDEO: videos, Modality.AUDIO: audios}
        arguments = Arguments(
            mm_hashes=mm_hashes,
            mm_hash_scope=mm_hash_scope,
            salt=salt,
            max_prompt_tokens=max_prompt_tokens,
            on_overflow=on_overflow,
            expanded=expanded,
        )
        with self._pipeline.guard():
            request = self._pipeline.begin(prompt, media, arguments, options)
            try:
                self._pipeline.run(request.items, lambda item: self._pipeline.lay_out(request, item))
                self._pipeline.fit(request)
                self._pipeline.run(request.items, lambda item: self._pipeline.prepare(request, item))
                return self._pipeline.finish(request)
            finally:
                self._pipeline.end(request)

    @final
    async def process_async(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **arguments: Any,
    ) -> MultimodalProcessorOutput:
        """As `process`, with nothing heavy on the event loop's thread: each stage runs on the registry's executor."""
        loop, executor = asyncio.get_running_loop(), self._pipeline.executor
        media = {Modality.IMAGE: images, Modality.VIDEO: videos, Modality.AUDIO: audios}
        named = {name: arguments.pop(name) for name in Arguments.__struct_fields__ if name in arguments}

        async def each(items: Sequence[Item], step: Callable[[Item], None]) -> None:
            work = (loop.run_in_executor(executor, step, item) for item in items)
            # Wait for all, so that the error raised is the first in order, as in `process`.
            found = await asyncio.gather(*work, return_exceptions=True)
            error = next((error for error in found if error is not None), None)
            try:
                if error is not None:
                    raise error
            finally:
                del found, error  # an error that holds the frame that holds it would keep every media input alive

        with self._pipeline.guard():
            request = await loop.run_in_executor(
                executor, self._pipeline.begin, prompt, media, Arguments(**named), arguments
            )
            try:
                remote = [item for item in request.items if is_remote(item.value)]
                if remote:
                    await self._pipeline.fetch(remote)
                await each(request.items, lambda item: self._pipeline.lay_out(request, item))
                await loop.run_in_executor(executor, self._pipeline.fit, request)
                await each(request.items, lambda item: self._pipeline.prepare(request, item))
                return await loop.run_in_executor(executor, self._pipeline.finish, request)
            finally:
                self._pipeline.end(request)

    @final
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
        modality = self._pipeline.served(Modality.parse(modality))
        self._pipeline.by_itself("the count")
        path = f"{modality.argument}[0]"
        with self._pipeline.guard():
            resolved = self._pipeline.table.call(options)
            known = self._pipeline.known_size(modality, size, resolved, path)
            context = self._pipeline.authored("context", lambda: self.context(counts or {modality: 1}))
            replacement = self._pipeline.measure(modality, known, resolved, context, path)[1]
        return replacement.num_rows, len(replacement.ids) + self._pipeline.reader.affix_tokens(modality)

    @final
    def prepare_item(
        self,
        modality: Modality | str,
        media_input: Any,
        *,
        counts: Mapping[Modality, int] | None = None,
        salt: str | bytes | None = None,
        **options: Any,
    ) -> PreparedItem:
        """One media input by itself: for routers that want its source key, and to fill the cache ahead of a request.

        Args:
            modality: what it is.
            media_input: as for `process`.
            counts: media in the whole request, where the plugin depends on them; one of this kind where None.
            salt: as for `process`.
            **options: as for `process`.

        Raises:
            RequestError, UsageError, ProcessorError: as for `process`.
        """
        modality = self._pipeline.served(Modality.parse(modality))
        self._pipeline.by_itself("the source key")
        with self._pipeline.guard():
            item = Item(modality, f"{modality.argument}[0]", media_input)
            request = self._pipeline.request_of([item], counts or {modality: 1}, Arguments(salt=salt), options)
            try:
                self._pipeline.lay_out(request, item)
                self._pipeline.prepare(request, item)
            finally:
                self._pipeline.end(request)
            found = item.prepared
            assert found is not None
            return PreparedItem(
                item.key or None, found.identity, found.fields, found.replacement, found.feature, item.cached
            )

    @property
    @final
    def cache_stats(self) -> Any:
        """What the preprocess cache did so far; see `mm_plugin.cache.store.Stats`."""
        return self._pipeline.stats()
