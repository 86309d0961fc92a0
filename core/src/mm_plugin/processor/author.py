"""Calls the author's methods, checks what they return, and says whose fault an error is, as no other module does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

from mm_plugin.arrays import detached, frozen, unshared
from mm_plugin.errors import (
    LimitError,
    MediaError,
    MMPluginError,
    PluginError,
    ProcessorError,
    RequestError,
    SizeError,
    UnattributedError,
    UsageError,
    is_readable,
)
from mm_plugin.executors import executor_fault
from mm_plugin.foreign import is_interruption, is_task_cancelled, shown, words
from mm_plugin.identity.framing import frame
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.media.types import DecodedMedia, Sampling, VideoSize, is_sampling
from mm_plugin.metadata import in_words
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.mixins import (
    AcceptsAudio,
    AcceptsPrecomputed,
    AcceptsVideos,
    Fields,
    PreparesBatches,
    ProcessesJointly,
    required_mixins,
)
from mm_plugin.processor.notes import NotedFields
from mm_plugin.sentinels import MM_PAD_SHIFT_VALUE

if TYPE_CHECKING:
    from mm_plugin.processor.model import ModelProcessor
    from mm_plugin.spec import ModelSpec

_MAX_RATE = 1_000_000  # Hz; far above any audio, and small enough for every formula


class Author:
    """One open model as the core sees it. Final; safe to use from several threads.

    A fault of a media input that an author's method reports is the request's; everything else that it raises, and every
    value that breaks the contract, is the plugin's and names it.

    Args:
        model: the author's processor.
        spec: the model's declaration.
        owner: plugin, distribution and version, for errors.

    Raises:
        ProcessorError: a modality that the spec declares needs a mixin that the class does not have.
    """

    def __init__(self, model: ModelProcessor, spec: ModelSpec, owner: Mapping[str, str]) -> None:
        self.model, self.spec, self.owner = model, spec, owner
        self.name = type(model).__name__
        for mixin in required_mixins(spec.modalities):
            if not isinstance(model, mixin):
                served = ", ".join(modality.argument for modality in spec.modalities)
                raise self.fault(f"{spec.name} declares {served}, so {self.name} must subclass {mixin.__name__}")
        self._positions = spec.load("positions")

    def fault(self, message: str) -> ProcessorError:
        """The plugin's error with this message."""
        return ProcessorError(message, **self.owner)

    def call(self, method: str, function: Callable[[], Any], path: str | None = None) -> Any:
        """Call an author's method: what is wrong with the media input is the request's fault, everything else the plugin's."""
        try:
            return function()
        except MemoryError:
            raise
        except (RequestError, PluginError) as error:
            if is_readable(error):
                raise
            raise self.fault(f"{self.name}.{method} failed: {words(error)}") from error
        except SizeError as error:
            raise MediaError(f"{path or 'media'}: {error.message}", path=path, reason="size") from error
        except BaseException as error:
            if is_interruption(error):
                raise
            where = f" on {path}" if path else ""
            raise self.fault(f"{self.name}.{method} failed{where}: {words(error)}{in_words(error)}") from error

    @contextlib.contextmanager
    def identified(self, what: str) -> Iterator[None]:
        """An author's value that has no digest is the plugin's fault."""
        try:
            yield
        except UsageError as error:
            raise self.fault(f"{self.name}.{what} a value that has no identity: {error.message}") from error

    def is_joint(self) -> bool:
        """Whether requests must be prepared together; asked once, when the model is opened."""
        model = self.model
        return isinstance(model, ProcessesJointly) and bool(self.call("is_joint", model.is_joint))

    def context(self, counts: Mapping[Modality, int]) -> Any:
        """Request-level facts that an item depends on."""
        found = self.call("context", lambda: self.model.context(counts))
        with self.identified("context returned"):
            frame(found)
        return found

    # ---------------------------------------------------------------- sizes

    def sampling_rate(self, options: Any) -> int:
        """The rate at which the author wants audio, Hz."""
        model = self.model
        assert isinstance(model, AcceptsAudio)
        rate = self.call("sampling_rate", lambda: model.sampling_rate(options))
        if type(rate) is not int or not 1 <= rate <= _MAX_RATE:
            raise self.fault(
                f"{self.name}.sampling_rate must return samples per second from 1 to {_MAX_RATE}, got {shown(rate)}"
            )
        return rate

    def sample(self, size: VideoSize, options: Any, path: str) -> Sampling:
        """The frames that the author chooses of a video."""
        model = self.model
        assert isinstance(model, AcceptsVideos)
        found = self.call("sample", lambda: model.sample(size, options), path)
        if not is_sampling(found, size.frames):
            raise self.fault(
                f"{self.name}.sample must return a Sampling of int64 indices that ascend from 0 to {size.frames - 1}, "
                "a finite float64 timestamp for each, a rate above 0, and notes that are texts"
            )
        sampling: Sampling = found
        return sampling

    # ---------------------------------------------------------------- one item

    def layout(
        self, modality: Modality, size: Any, options: Any, context: Any, path: str
    ) -> tuple[Fields, tuple[str, ...]]:
        """The model fields of a media input of this size, read-only, and notes on them."""
        fields = self.call("layout", lambda: self.model.layout(modality, size, options, context), path)
        declared = set(self.spec.fields[modality])
        if not isinstance(fields, Mapping) or set(fields) != declared:
            found = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
            raise self.fault(
                f"{self.name}.layout returned {found}, the spec declares {sorted(declared)} for {modality.argument}"
            )
        notes = fields.notes if isinstance(fields, NotedFields) else ()
        return {name: frozen(value) for name, value in fields.items()}, notes

    def replacement(self, fields: Fields, path: str) -> Replacement:
        """The tokens that stand for an item: a one-dimensional run of ids of which at least one takes an embedding."""
        found = self.call("replacement", lambda: self.model.replacement(fields), path)
        if not isinstance(found, Replacement):
            raise self.fault(f"{self.name}.replacement returned a {type(found).__name__}; it must return Replacement")
        ids, is_embed = found.ids, found.is_embed
        good = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
        good = good and ids.min() >= 0 and ids.max() < MM_PAD_SHIFT_VALUE
        if good and is_embed is not None:
            good = isinstance(is_embed, np.ndarray) and is_embed.dtype == np.bool_ and is_embed.shape == ids.shape
        if not good or not found.num_embeddings:
            raise self.fault(
                f"{self.name}.replacement must give ids [n] of tokens and is_embed [n] of bool, at least one of them true"
            )
        return found

    def prepare(
        self, decoded: DecodedMedia, arrays: Sequence[np.ndarray], fields: Fields, options: Any, path: str
    ) -> Any:
        """The feature of one item, in memory of its own.

        Args:
            decoded: the media input.
            arrays: its arrays that may be the caller's own.
            fields: what `layout` returned.
            options: an `Options`, all resolved.
            path: where it stands in the request.
        """
        feature = self.call("prepare", lambda: self.model.prepare(decoded, fields, options), path)
        return detached(feature, *arrays)

    def prepare_batch(
        self,
        decoded: Sequence[DecodedMedia],
        arrays: Sequence[Sequence[np.ndarray]],
        fields: Sequence[Fields],
        options: Any,
    ) -> list[Any]:
        """The features of several items from one call, each in memory of its own.

        Args:
            decoded: the media inputs.
            arrays: of each, the arrays that may be the caller's own.
            fields: what `layout` returned for each.
            options: an `Options`, all resolved; it is that of all of them.
        """
        model = self.model
        assert isinstance(model, PreparesBatches)
        found = self.call("prepare_batch", lambda: model.prepare_batch(decoded, fields, options))
        if not isinstance(found, list | tuple) or len(found) != len(decoded):
            raise self.fault(f"{self.name}.prepare_batch must return a feature for each of {len(decoded)} media inputs")
        features = []
        for feature, own in zip(found, arrays, strict=True):
            features.append(unshared(detached(feature, *own)))
        return features

    # ---------------------------------------------------------------- items that came prepared

    def accepts_precomputed(self, modality: Modality, path: str) -> AcceptsPrecomputed:
        """The author's object, if it takes media inputs that came prepared.

        Raises:
            RequestError: it does not.
        """
        if not isinstance(self.model, AcceptsPrecomputed):
            raise RequestError(f"{path}: {self.spec.name} takes no prepared {modality.argument}", path=path)
        return self.model

    # ---------------------------------------------------------------- the whole prompt

    def positions(
        self, items: Sequence[MultimodalDataItem], seq: int, options: Mapping[str, Any]
    ) -> tuple[np.ndarray | None, int | None]:
        """M-RoPE positions [3, seq] int64 and their delta, or None twice for a model with ordinary positions."""
        rule = self._positions
        if rule is None:
            return None, None
        model = self.model
        found = self.call("positions", lambda: rule(items, seq=seq, config=model.config, options=dict(options)))
        positions, delta = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        good = isinstance(positions, np.ndarray) and positions.shape == (3, seq) and positions.dtype == np.int64
        if not good or type(delta) is not int:
            raise self.fault(f"{self.spec.positions} must return positions [3, {seq}] int64 and a delta, a Python int")
        return positions, delta


@contextlib.contextmanager
def translate_errors(author: Author, check_open: Callable[[], None]) -> Iterator[None]:
    """Nothing but our own errors leaves a request, and none begins once the registry is closed."""
    check_open()
    try:
        yield
    except (CancelledError, asyncio.CancelledError) as error:
        if is_task_cancelled():
            raise
        check_open()
        raise executor_fault(error) from error
    except UsageError as error:
        if error.argument == "executor":
            check_open()
        raise
    except UnattributedError as error:
        raise author.fault(f"{author.spec.name}: {error.message}") from error
    except MMPluginError as error:
        if is_readable(error):
            raise
        raise author.fault(f"{author.spec.name}: {words(error)}") from error
    except MemoryError as error:
        raise LimitError("the request needs more memory than there is", setting="memory") from error
    except BaseException as error:
        if isinstance(error, GeneratorExit) or is_interruption(error):  # a coroutine is closed by GeneratorExit
            raise
        check_open()
        raise author.fault(f"{author.spec.name}: {words(error)}") from error
