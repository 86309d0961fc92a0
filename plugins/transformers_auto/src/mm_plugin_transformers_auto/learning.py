"""What a checkpoint's processor does with one media input and with several, learned by running it, when a checkpoint is opened.

A processor turns a whole prompt into ids and tensors. Here it is seen whether it does so one by one: what one
placeholder becomes, which of its ids take rows, which text it writes around it, and along which axis the tensors of several
media lie. The answer is believed only if prompts of one, two and three media of different sizes, put together from what each
media input gave alone, equal what the processor gives for the whole prompt. If not, requests are prepared as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image

from mm_plugin import Checkpoint, Modality, ModelSpec, Replacement, UsageError
from mm_plugin.cache import ComputeCache, MemoryStore
from mm_plugin.errors import SizeError
from mm_plugin.identity import digest, frame
from mm_plugin.placeholders import expand
from mm_plugin.prompt import PromptReader
from mm_plugin_transformers_auto.loading import Opened, open_checkpoint

# The field that holds the ids of one media input's replacement.
IDS = "prompt_ids"
# Sizes (height, width) that a processor is tried with: several shapes, none of them round, one above every usual tile.
IMAGES = ((161, 184), (90, 337), (700, 520))
# Seconds of audio.
AUDIOS = (0.9, 0.3, 1.7)
# Layouts that are remembered, bytes.
LAYOUT_BYTES = 64 * 1024 * 1024
# Keyword arguments of a processor's parts that say how it is called, not what it makes.
_RESERVED = frozenset(
    (
        *("return_tensors", "device", "data_format", "input_data_format", "disable_grouping", "do_convert_rgb"),
        *("return_row_col_info", "raw_speech", "sampling_rate", "return_attention_mask", "load_audio_backend"),
        *("image_seq_length", "return_metadata"),
    )
)
_PARTS = {Modality.IMAGE: ("image_processor",), Modality.AUDIO: ("audio_processor", "feature_extractor")}
_CALL = {Modality.IMAGE: ("images", "images_kwargs"), Modality.AUDIO: ("audio", "audio_kwargs")}
_METHODS = {Modality.IMAGE: "get_image_features", Modality.AUDIO: "get_audio_features"}

Kwargs = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


class ProcessorRaised(Exception):
    """The checkpoint's processor raised; the message names its class. The pipeline blames the plugin for it."""


class Unlike(Exception):
    """What a processor gives for a prompt is not what its media give alone; the message is the reason that records show."""


class Kind(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """How a processor takes media of one modality.

    Attributes:
        modality: what they are.
        placeholder: the token that stands for one media input in a prompt.
        row_token: id of the tokens that take rows.
        features: names of the tensors that it gives, the one that the encoder reads first.
        placeholder_affixes: text that it writes before and behind the tokens of a media input.
        axes: by name, the axis along which the tensors of several media lie.
        example: a prompt for one media input.
    """

    modality: Modality
    placeholder: str
    row_token: int
    features: tuple[str, ...]
    placeholder_affixes: tuple[str, str] = ("", "")
    axes: Mapping[str, int] = {}
    example: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the tensors beside the feature."""
        return self.features[1:]


class Alone(msgspec.Struct, frozen=True, eq=False):
    """What a processor gives for one media input.

    Attributes:
        ids: [n] int64, the tokens that stand for it, without the text around them.
        tensors: by name.
        placeholder_affixes: text that stood around the tokens.
    """

    ids: np.ndarray
    tensors: Tensors
    placeholder_affixes: tuple[str, str]


class Model:
    """An opened checkpoint with what was learned about it. Safe to use from several threads.

    Args:
        opened: what transformers opened.
        checkpoint: where it lies.

    Attributes:
        kinds: by modality.
        unlike: why requests are prepared as a whole; None where media are prepared one by one.
    """

    def __init__(self, opened: Opened, checkpoint: Checkpoint) -> None:
        self.opened, self.config, self.model_class = opened, opened.config, opened.model_class
        self._processors = _Pool(opened.processor)
        # The reader's own: a fast tokenizer may not be used by two threads while one of them changes its settings.
        self.tokenizer = copy.deepcopy(opened.processor.tokenizer)
        if getattr(opened.processor, "chat_template", None):
            self.tokenizer.chat_template = opened.processor.chat_template
        self._layouts = ComputeCache(MemoryStore(LAYOUT_BYTES))
        self._tried = ComputeCache(MemoryStore(1024))  # entries of one byte each, so that the capacity is their number
        self.unlike: str | None = None
        self.kinds = self._learn_kinds()
        if not self.kinds:
            raise UsageError(
                f"{checkpoint.folder}: {opened.author} prepares no images and no audio for {self.model_class.__name__}",
                argument="checkpoint",
            )
        if self.unlike is None:
            self._learn_axes()

    # ---------------------------------------------------------------- running the processor

    def run(
        self,
        text: str,
        media: Mapping[Modality, Sequence[Any]],
        kwargs: Mapping[Modality, Kwargs],
        *,
        special: bool = True,
    ) -> dict[str, Any]:
        """The processor on one prompt.

        Args:
            text: the prompt.
            media: PIL images and float32 samples, in order, by modality.
            kwargs: arguments for the processor's parts, by modality.
            special: whether the tokenizer adds its special tokens.

        Raises:
            ProcessorRaised: whatever it raised.
        """
        arguments: dict[str, Any] = {"text_kwargs": {"add_special_tokens": special}}
        for modality, given in media.items():
            if given:
                name, part = _CALL[modality]
                arguments[name] = list(given)
                arguments[part] = dict(kwargs.get(modality, {}))
                if modality is Modality.AUDIO:
                    arguments[part]["sampling_rate"] = self.sampling_rate
        try:
            with self._processors.take() as processor:
                return dict(processor(text=[text], return_tensors="pt", **arguments))
        except MemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:400]
            raise ProcessorRaised(f"{self.opened.author} raised {type(error).__name__}: {said}") from error

    def alone(self, kind: Kind, media_input: Any, kwargs: Kwargs) -> Alone:
        """One media input with its placeholder alone: the difference to the placeholder's surroundings is its replacement.

        Raises:
            ProcessorRaised: whatever the processor raised.
            Unlike: the processor changes the prompt elsewhere too.
            SizeError: no token stands for the media input.
        """
        edge, _ = self._edge
        before, behind = self._plain
        out = self.run(edge + kind.placeholder + edge, {kind.modality: [media_input]}, {kind.modality: kwargs})
        ids = _ids_of(out)
        inside = ids[len(before) : len(ids) - len(behind)]
        stays = np.array_equal(ids[: len(before)], before) and np.array_equal(ids[len(ids) - len(behind) :], behind)
        if not stays or len(ids) < len(before) + len(behind):
            raise Unlike(f"it writes the prompt again around its {kind.modality.argument}")
        if not np.any(inside == kind.row_token):
            raise SizeError("no token stands for a media input of this size")
        known = np.flatnonzero(np.isin(inside, self._added_ids))
        if not len(known):
            raise Unlike(f"no special token begins what stands for its {kind.modality.argument}")
        core = inside[known[0] : known[-1] + 1]
        texts = (self._text_of(inside[: known[0]]), self._text_of(inside[known[-1] + 1 :]))
        self._check_edges(kind.placeholder, core)
        tensors = {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}
        return Alone(core, tensors, texts)

    def _text_of(self, ids: np.ndarray) -> str:
        """The text of ids, if the tokenizer makes these ids of it again."""
        if not len(ids):
            return ""
        edge, edge_id = self._edge
        text = str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        again = self.tokenizer(edge + text + edge, add_special_tokens=False)["input_ids"]
        if again != [edge_id, *ids.tolist(), edge_id]:
            raise Unlike("the text around a media input cannot be told from its tokens")
        return text

    def _check_edges(self, placeholder: str, core: np.ndarray) -> None:
        """A token that takes up spaces beside it must do so before and after it is replaced."""
        given = self._added.get(self.tokenizer.convert_tokens_to_ids(placeholder))
        left, right = self._added.get(int(core[0])), self._added.get(int(core[-1]))
        if given is None or left is None or right is None:
            raise Unlike("its placeholder is no added token")
        if given.lstrip != left.lstrip or given.rstrip != right.rstrip or given.single_word or given.normalized:
            raise Unlike("its placeholder takes up other spaces than what replaces it")

    @cached_property
    def _edge(self) -> tuple[str, int]:
        """A special token that stands for no media input, with its id: what is beside it cannot join text across it."""
        own = {str(getattr(self.opened.processor, f"{name}_token", "")) for name in ("image", "video", "audio", "boi")}
        named = [self.tokenizer.eos_token, self.tokenizer.bos_token, self.tokenizer.pad_token]
        for token in [*named, *self.tokenizer.all_special_tokens]:
            if token and str(token) not in own:
                found = self.tokenizer(str(token) * 2, add_special_tokens=False)["input_ids"]
                index = self.tokenizer.convert_tokens_to_ids(str(token))
                if found == [index, index]:
                    return str(token), int(index)
        raise Unlike("its tokenizer has no special token beside those of media")

    @cached_property
    def _plain(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of two edges with nothing between them: up to the first, and from the second on."""
        edge, edge_id = self._edge
        ids = np.asarray(self.tokenizer(edge + edge)["input_ids"], dtype=np.int64)
        first = int(np.flatnonzero(ids == edge_id)[0])
        return ids[: first + 1], ids[first + 1 :]

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        return dict(self.tokenizer.added_tokens_decoder)

    @cached_property
    def _added_ids(self) -> np.ndarray:
        return np.array(sorted(self._added), dtype=np.int64)

    @property
    def sampling_rate(self) -> int:
        """Samples a second that its feature extractor takes."""
        return int(self.part(Modality.AUDIO).sampling_rate)

    def part(self, modality: Modality) -> Any:
        """The part of the processor that prepares a modality, or None."""
        return next(
            (found for name in _PARTS[modality] if (found := getattr(self.opened.processor, name, None)) is not None),
            None,
        )

    def known_kwargs(self, modality: Modality) -> list[str]:
        """Arguments of that part that change what it makes, sorted."""
        declared = getattr(self.part(modality), "valid_kwargs", None)
        if declared is None:
            declared = transformers.processing_utils.AudioKwargs
        return sorted(set(declared.__annotations__) - _RESERVED)

    # ---------------------------------------------------------------- learning

    def _learn_kinds(self) -> dict[Modality, Kind]:
        kinds = {}
        for modality in _PARTS:
            if self.part(modality) is None:
                continue
            self._refuse_cross_attention(modality)
            row_token = self._row_token(modality)
            if row_token is not None:
                kinds[modality] = self._learn_kind(modality, row_token)
        return kinds

    def _refuse_cross_attention(self, modality: Modality) -> None:
        """Where no token takes a row, there is nothing that this interface could give a language model."""
        configs = [self.config, getattr(self.config, "text_config", None)]
        crossing = any(getattr(config, "cross_attention_layers", None) for config in configs)
        if crossing or "cross_attention_mask" in self.opened.processor.model_input_names:
            raise UsageError(
                f"{self.model_class.__name__} reads its {modality.argument} by cross-attention: no token of a prompt takes a "
                "row of theirs, so there are no rows to write into its text embeddings; it needs a plugin of its own",
                argument="checkpoint",
            )

    def _row_token(self, modality: Modality) -> int | None:
        """The id at whose places the model itself writes rows."""
        name = modality.name.lower()
        for owner in (self.config, self.opened.processor):
            for attribute in (f"{name}_token_id", f"{name}_token_index"):
                found = getattr(owner, attribute, None)
                if isinstance(found, int):
                    return found
        return None

    def _placeholders(self, modality: Modality) -> list[str]:
        """Tokens that may stand for a media input in a prompt, the likeliest first."""
        name, vocabulary = modality.name.lower(), self.tokenizer.get_vocab()
        owners = (self.opened.processor, self.tokenizer)
        named = [getattr(owner, attribute, None) for owner in owners for attribute in (f"{name}_token", "boi_token")]
        return list(dict.fromkeys(str(token) for token in named if token is not None and str(token) in vocabulary))

    def _learn_kind(self, modality: Modality, row_token: int) -> Kind:
        """Placeholder, tensors and surrounding text, from the first media input that it is tried with."""
        media_input = probe_media(modality, 0, self)
        faults: list[Exception] = []
        for placeholder in self._placeholders(modality):
            kind = Kind(
                modality=modality, placeholder=placeholder, row_token=row_token, features=(), example=placeholder
            )
            try:
                tried = self.alone(kind, media_input, {})
            except (ProcessorRaised, SizeError) as error:
                faults.append(error)
            except Unlike as error:
                faults.append(error)
                # In another place than its own, but it is there; with or without a placeholder.
                for text in ("a", placeholder):
                    out = self._ids_with(text, modality, media_input, row_token)
                    if out is not None:
                        self.unlike = self.unlike or str(error)
                        return msgspec.structs.replace(kind, features=self._features(modality, out), example=text)
            else:
                features = self._features(modality, tried.tensors)
                return msgspec.structs.replace(kind, features=features, placeholder_affixes=tried.placeholder_affixes)
        token = str(self.tokenizer.convert_ids_to_tokens(row_token))
        out = self._ids_with("a", modality, media_input, row_token)
        if out is not None:
            self.unlike = self.unlike or f"it finds the places of {modality.argument} itself"
            features = self._features(modality, out)
            return Kind(modality=modality, placeholder=token, row_token=row_token, features=features, example="a")
        why = str(faults[0]) if faults else "its tokenizer has no token that stands for one"
        raise UsageError(
            f"{self.opened.author} cannot prepare {modality.argument}: {why} (the model's config says that their rows take the "
            f"places of {token!r})",
            argument="checkpoint",
        )

    def _ids_with(self, text: str, modality: Modality, media_input: Any, row_token: int) -> dict[str, Any] | None:
        """What the processor gives for a media input beside a text; None where it raises or no token takes a row."""
        try:
            out = self.run(text, {modality: [media_input]}, {})
        except ProcessorRaised:
            return None
        return out if np.any(_ids_of(out) == row_token) else None

    def _features(self, modality: Modality, out: Mapping[str, Any]) -> tuple[str, ...]:
        """The tensors that the processor declares for a modality and gives, the one that its part names first in front."""
        text = {*self.tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids", "labels", "attention_mask"}
        first = list(self.part(modality).model_input_names)
        declared = dict.fromkeys([*first, *self.opened.processor.model_input_names])
        found = [name for name in declared if name not in text and isinstance(out.get(name), torch.Tensor)]
        if not found:
            raise UsageError(
                f"{self.opened.author} gives none of the tensors that it declares for {modality.argument}: {first}",
                argument="checkpoint",
            )
        return tuple(found)

    def _learn_axes(self) -> None:
        """Along which axis tensors of several media lie; where that cannot be told, requests are prepared as a whole."""
        try:
            for modality, kind in self.kinds.items():
                self.kinds[modality] = msgspec.structs.replace(kind, axes=self._axes_of(kind))
            self._try_together({})
        except (Unlike, ProcessorRaised, SizeError) as error:
            self.unlike = str(error)

    def _axes_of(self, kind: Kind) -> dict[str, int]:
        media = [probe_media(kind.modality, index, self) for index in range(3)]
        parts = [self.alone(kind, media_input, {}).tensors for media_input in media]
        whole = self.run(self._prompt([kind] * 3), {kind.modality: media}, {})
        axes = {}
        for name in kind.features:
            given = [part[name] for part in parts]
            fits = [axis for axis in range(min(2, given[0].ndim)) if _same(join(given, axis), whole.get(name))]
            if not fits:
                raise Unlike(f"{name} of several {kind.modality.argument} is not what each of them gives alone")
            axes[name] = fits[0]
        return axes

    def check_kwargs(self, kwargs: Mapping[Modality, Kwargs]) -> str | None:
        """Why media cannot be prepared one by one with these arguments, tried once for each; None where they can."""

        def attempt() -> tuple[str | None]:
            try:
                self._try_together(kwargs)
            except (Unlike, SizeError) as error:
                return (str(error),)
            return (None,)

        key = digest(frame([[int(modality), dict(given)] for modality, given in sorted(kwargs.items())]))
        found: tuple[tuple[str | None], bool] = self._tried.get_or_compute(key, attempt, lambda _: 1)
        return found[0][0]

    def _try_together(self, kwargs: Mapping[Modality, Kwargs]) -> None:
        """Compare prompts of one, two and three media with what is put together from each alone, and images with blank ones.

        Raises:
            Unlike: something differs.
            ProcessorRaised: the processor raised.
        """
        known: dict[tuple[Modality, int], Alone] = {}
        for modality, kind in self.kinds.items():
            for index in range(3):
                given = kwargs.get(modality, {})
                known[modality, index] = found = self.alone(kind, probe_media(modality, index, self), given)
                blank = self.alone(kind, blank_of(probe_media(modality, index, self)), given)
                same = [_same(found.tensors[name], blank.tensors[name]) for name in kind.fields]
                if not np.array_equal(found.ids, blank.ids) or not all(same):
                    raise Unlike(f"tokens or fields of {modality.argument} depend on more than their size")
                if found.placeholder_affixes != kind.placeholder_affixes:
                    raise Unlike(f"the text around {modality.argument} depends on their size or on the arguments")
        orders: list[list[tuple[Modality, int]]] = []
        for modality in self.kinds:
            orders += [[(modality, index) for index in order] for order in ((1,), (2, 1), (1, 1), (0, 2, 1), (2, 0, 0))]
        if len(self.kinds) > 1:
            orders.append([(modality, index) for index in range(2) for modality in self.kinds])
        for order in orders:
            self._compare(order, known, kwargs)

    def _compare(
        self, order: Sequence[tuple[Modality, int]], known: Mapping[Any, Alone], kwargs: Mapping[Modality, Kwargs]
    ) -> None:
        prompt = self._prompt([self.kinds[modality] for modality, _ in order])
        media: dict[Modality, list[Any]] = {}
        for modality, index in order:
            media.setdefault(modality, []).append(probe_media(modality, index, self))
        whole = self.run(prompt, media, kwargs)
        read = self.reader.read(prompt)
        parts = [known[entry] for entry in order]
        expanded = expand(read.ids, [slot for slot, _ in read.slots], [Replacement(part.ids) for part in parts]).ids
        told = " and ".join(f"{len(given)} {modality.argument}" for modality, given in media.items())
        if not np.array_equal(expanded, _ids_of(whole)):
            raise Unlike(f"the tokens of {told} are not what each of them gives alone")
        for modality in media:
            own = [part for part, (kind, _) in zip(parts, order, strict=True) if kind is modality]
            for name, axis in self.kinds[modality].axes.items():
                if not _same(join([part.tensors[name] for part in own], axis), whole.get(name)):
                    raise Unlike(f"{name} of {told} is not what each of them gives alone")

    def _prompt(self, kinds: Sequence[Kind]) -> str:
        """A prompt in which media touch text, line ends and one another."""
        texts = ("a ", "", "\n", " b\n\n", "c", "")
        return "".join(text + kind.placeholder for text, kind in zip(texts, kinds, strict=False)) + " d\n"

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Start and end tokens that the chat template writes around media, and not around text in their place."""
        found = []
        for kind in self.kinds.values():
            media_input = {"type": kind.modality.name.lower()}
            beside = [
                self._beside(part, word)
                for part, word in (({"type": "text", "text": "x"}, "x"), (media_input, kind.placeholder))
            ]
            (start, end), (other_start, other_end) = beside[1], beside[0]
            if start and end and start != other_start and end != other_end:
                found.append((start, end))
        return tuple(found)

    def _beside(self, part: Mapping[str, str], word: str) -> tuple[str, str]:
        """The added tokens directly before and behind a word that a template makes of a part; empty where there are none."""
        try:
            messages = [{"role": "user", "content": [part]}]
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception:  # whatever a template refuses by; without one there are no pairs
            return "", ""
        before, found, behind = text.partition(word)
        added = sorted(map(str, self.tokenizer.added_tokens_decoder.values()), key=len, reverse=True) if found else []
        start = next((token for token in added if before.endswith(token)), "")
        return start, next((token for token in added if behind.startswith(token)), "")

    @cached_property
    def reader(self) -> PromptReader:
        """Reads prompts as an open processor will."""
        ids = {m: int(self.tokenizer.convert_tokens_to_ids(kind.placeholder)) for m, kind in self.kinds.items()}
        return PromptReader(
            self.tokenizer, ids, placeholder_affixes={m: kind.placeholder_affixes for m, kind in self.kinds.items()}
        )

    # ---------------------------------------------------------------- what an open processor asks

    def layout(self, kind: Kind, size: tuple[int, ...], kwargs: Kwargs) -> dict[str, np.ndarray]:
        """Ids and fields of a media input from its size alone: what a blank one gives.

        Args:
            kind: how media of its modality are taken.
            size: (height, width) of an image, (samples,) of an audio input.
            kwargs: arguments for the processor's part.
        """

        def make() -> dict[str, np.ndarray]:
            found = self.alone(kind, blank(kind.modality, size), kwargs)
            if found.placeholder_affixes != kind.placeholder_affixes:
                raise Unlike(f"the text around {kind.modality.argument} depends on their size")
            return fields_of(kind, found)

        key = digest(frame([int(kind.modality), size, dict(kwargs)]))
        made: dict[str, np.ndarray]
        made, _ = self._layouts.get_or_compute(key, make, lambda fields: sum(value.nbytes for value in fields.values()))
        return made

    def probe(self, kind: Kind) -> tuple[np.ndarray, Tensors]:
        """Ids and tensors of a prompt with one made-up media input, in the order of the kind's features.

        Shape:
            returns ids [n] int64.
        """
        out = self.run(kind.example, {kind.modality: [probe_media(kind.modality, 0, self)]}, {})
        return _ids_of(out), {name: out[name] for name in kind.features}

    @cached_property
    def digest(self) -> str:
        """Tells one processor's settings, vocabulary and version from another's."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        processor = self.opened.processor
        return digest(
            frame([transformers.__version__, type(processor).__name__, processor.to_json_string(), words])
        ).hex()


class _Pool:
    """Copies of a processor, each used by one thread at a time: its tokenizer cannot be shared. One for each CPU, at most eight.

    Args:
        processor: what is copied; never used itself, so that no copy is made of one that is at work.
    """

    def __init__(self, processor: Any) -> None:
        self._original, self._made, self._most = processor, 0, max(1, min(8, os.cpu_count() or 1))
        self._free: queue.LifoQueue[Any] = queue.LifoQueue()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self) -> Iterator[Any]:
        processor = self._next()
        try:
            yield processor
        finally:
            self._free.put(processor)

    def _next(self) -> Any:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        with self._lock:
            if self._made < self._most:
                made = copy.deepcopy(self._original)
                self._made += 1
                return made
        return self._free.get()


def probe_media(modality: Modality, index: int, model: Model) -> Any:
    """An image or audio to try a processor with, the same every time and with no two parts alike."""
    random = np.random.Generator(np.random.PCG64(index))
    if modality is Modality.AUDIO:
        samples = random.standard_normal(int(AUDIOS[index] * model.sampling_rate)) * 0.1
        return samples.astype(np.float32)
    return Image.fromarray(random.integers(0, 256, (*IMAGES[index], 3), dtype=np.uint8))


def blank(modality: Modality, size: tuple[int, ...]) -> Any:
    """A media input of a size in which nothing is to be seen or heard."""
    if modality is Modality.AUDIO:
        return np.zeros(size, dtype=np.float32)
    return Image.new("RGB", (size[1], size[0]), (127, 127, 127))


def blank_of(media_input: Any) -> Any:
    """A blank media input of another's size."""
    if isinstance(media_input, np.ndarray):
        return blank(Modality.AUDIO, media_input.shape)
    return blank(Modality.IMAGE, (media_input.height, media_input.width))


def fields_of(kind: Kind, found: Alone) -> dict[str, np.ndarray]:
    """Ids and the tensors beside the feature, as the fields of an item."""
    return {IDS: found.ids, **{name: found.tensors[name].numpy() for name in kind.fields}}


def join(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Tensors of several media as one: along an axis, the other dimensions padded with zeros to the largest.

    Args:
        parts: of one dtype and one number of dimensions.
        axis: along which they lie.
    """
    if len(parts) == 1:
        return parts[0]
    largest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if n == axis else most - part.shape[n] for n, most in enumerate(largest)]
        pad = [amount for most in reversed(missing) for amount in (0, most)]
        padded.append(torch.nn.functional.pad(part, pad) if any(missing) else part)
    return torch.cat(padded, dim=axis)


def _same(left: torch.Tensor, right: Any) -> bool:
    return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)


def _ids_of(out: Mapping[str, Any]) -> np.ndarray:
    ids: np.ndarray = np.asarray(out["input_ids"], dtype=np.int64).reshape(-1)
    return ids


# ---------------------------------------------------------------- the door

_MODELS: weakref.WeakKeyDictionary[Checkpoint, Model] = weakref.WeakKeyDictionary()
_CLASSES = {
    (Modality.IMAGE,): "ImagesProcessor",
    (Modality.AUDIO,): "AudioProcessor",
    (Modality.IMAGE, Modality.AUDIO): "ImagesAndAudioProcessor",
}


def model_of(checkpoint: Checkpoint) -> Model:
    """What was learned about a checkpoint that `specialize` returned."""
    return _MODELS[checkpoint]


def specialize(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """The spec for one checkpoint, and the checkpoint with its processor's own tokenizer.

    Raises:
        UsageError: transformers cannot open it, or what it makes of media cannot be served.
    """
    model = _MODELS.get(checkpoint)
    known = checkpoint
    if model is None:
        model = Model(open_checkpoint(checkpoint), checkpoint)
        tokenizer = model.tokenizer
        known = checkpoint.with_tokenizer(lambda _: tokenizer)
        _MODELS[known] = model
    whole = model.unlike is not None
    extra = () if whole else (IDS,)
    kinds = model.kinds
    made = msgspec.structs.replace(
        spec,
        name=f"{spec.name}.{model.model_class.__name__}",
        modalities=tuple(kinds),
        placeholders={modality: kind.placeholder for modality, kind in kinds.items()},
        fields={modality: (*extra, *kind.fields) for modality, kind in kinds.items()},
        token_pairs=model.pairs(),
        placeholder_affixes={
            modality: kind.placeholder_affixes for modality, kind in kinds.items() if any(kind.placeholder_affixes)
        },
        processor=f"mm_plugin_transformers_auto.processor:{_CLASSES[tuple(kinds)]}",
        positions="mm_plugin_transformers_auto.positions:positions" if has_mrope(model.config) else None,
        specialize=None,
        notes={
            "processor": type(model.opened.processor).__name__,
            "transformers": transformers.__version__,
            "trust_remote_code": "off",
            "media": f"as a whole: {model.unlike}" if whole else "one by one",
        },
    )
    return made, known


def has_mrope(config: Any) -> bool:
    """Whether positions have three axes, by any part of a config."""
    if isinstance(config, Mapping):
        return "mrope_section" in config or any(map(has_mrope, config.values()))
    if isinstance(config, list | tuple):
        return any(map(has_mrope, config))
    return hasattr(config, "to_dict") and has_mrope(config.to_dict())
