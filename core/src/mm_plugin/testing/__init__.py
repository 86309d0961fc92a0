"""The author's kit: what a plugin's own tests and `mm-plugin demo` build on. Knows no model."""

from __future__ import annotations

import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import msgspec.inspect
import numpy as np

from mm_plugin.embed import EmbedOutput, embed_mm_inputs
from mm_plugin.encoder import Encoder
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.identity import digest, frame
from mm_plugin.media import SampledVideo
from mm_plugin.processor.options import option_scopes
from mm_plugin.structs import ForwardBatch, Modality, MultimodalDataItem, MultimodalInputs

if TYPE_CHECKING:
    import torch

    from mm_plugin.cache import EmbeddingCache
    from mm_plugin.processor import ModelProcessor
    from mm_plugin.structs import MultimodalProcessorOutput


class Reference(msgspec.Struct, frozen=True, eq=False):
    """What the model's own implementation makes of a prompt, without anything of this package.

    Attributes:
        input_embeds: [N, hidden] float32.
        logits: [N, vocabulary] float32.
        position_ids: [3, N] int64, or None for a model with ordinary positions.
    """

    input_embeds: Any
    logits: Any
    position_ids: Any = None


class RowBoxes(msgspec.Struct, frozen=True):
    """Where the rows of one image lie, for drawing.

    Attributes:
        height: of the resized picture, pixels.
        width: of the resized picture, pixels.
        boxes: (left, top, right, bottom) of each row, pixels.
    """

    height: int
    width: int
    boxes: tuple[tuple[int, int, int, int], ...]


class View(msgspec.Struct, frozen=True, eq=False):
    """One picture of what a model sees of an image, for drawing.

    Attributes:
        title: what it is.
        caption: what there is to know of it.
        pixels: [height, width, 3] uint8.
        boxes: (left, top, right, bottom) of each row of the encoder, pixels; drawn lightly.
        frames: the same of what holds many rows, such as tiles; drawn heavily.
    """

    title: str
    caption: str
    pixels: np.ndarray
    boxes: tuple[tuple[int, int, int, int], ...] = ()
    frames: tuple[tuple[int, int, int, int], ...] = ()


class Demo(ABC):
    """What a plugin offers to `mm-plugin demo`: a tiny checkpoint, a prompt, and the model's own forward to compare with.

    Attributes:
        options: load options under which the plugin prepares images exactly as `reference` does.
        reference_name: what the reference is made with, as the demo names it.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    reference_name: ClassVar[str] = "transformers"

    @abstractmethod
    def make_checkpoint(self, folder: Path) -> None:
        """Write a tiny checkpoint with seeded weights, laid out as released ones are, into an empty folder."""

    @abstractmethod
    def prompt(self, num_images: int) -> str:
        """A prompt in the model's own format with so many images."""

    @abstractmethod
    def open_model(self, checkpoint: Path) -> Any:
        """The whole model in float32 on the CPU, opened by its own library."""

    @abstractmethod
    def input_embedding(self, model: Any) -> Any:
        """The model's text embedding."""

    @abstractmethod
    def reference(self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]) -> Reference:
        """The model's own forward on an expanded prompt and on images that its own library prepares.

        Args:
            model: what `open_model` returned.
            checkpoint: the folder.
            input_ids: [N] int64, model ids of the expanded prompt.
            images: encoded files, in prompt order.
        """

    @abstractmethod
    def logits(self, model: Any, input_embeds: torch.Tensor, position_ids: np.ndarray | None) -> torch.Tensor:
        """The model's logits [N, vocabulary] on embeddings that were made elsewhere."""

    @abstractmethod
    def row_boxes(self, processor: ModelProcessor, item: MultimodalDataItem) -> RowBoxes:
        """Which part of the resized picture each row of an image stands for; rows that stand for no part have no box."""


class DrawsViews(ABC):
    """For demos of models that see more of an image than one resized picture."""

    @abstractmethod
    def views(self, processor: ModelProcessor, item: MultimodalDataItem, name: str, data: bytes) -> Sequence[View]:
        """What the model sees of an image, drawn one below the other in place of the photograph with its rows.

        Args:
            processor: which prepared it.
            item: the processed image.
            name: of the file.
            data: the encoded file.
        """


class ShownClip(msgspec.Struct, frozen=True, eq=False):
    """One clip that the demo shows.

    Attributes:
        name: of the file.
        data: the encoded file.
        size: of its frames, with those that were chosen and their times.
        item: what the plugin made of it.
    """

    name: str
    data: bytes
    size: SampledVideo
    item: MultimodalDataItem


class ShowsVideos(ABC):
    """For demos of models that take videos."""

    @abstractmethod
    def video_prompt(self, num_images: int, num_videos: int) -> str:
        """A prompt in the model's own format with so many images, and after them so many videos."""

    @abstractmethod
    def video_reference(
        self,
        model: Any,
        checkpoint: Path,
        output: MultimodalProcessorOutput,
        images: Sequence[bytes],
        clips: Sequence[ShownClip],
    ) -> Reference:
        """The model's own forward on a prompt with videos, on pixels that are decoded and prepared without this package.

        Args:
            model: what `open_model` returned.
            checkpoint: the folder.
            output: the processed prompt; its ids and positions are what the language model gets.
            images: encoded files, in prompt order.
            clips: in prompt order, after the images.
        """


class TransformersDemo(Demo):
    """A demo whose model transformers opens whole.

    Attributes:
        model_class: the model with its language head.
    """

    model_class: ClassVar[Any] = None

    def open_model(self, checkpoint: Path) -> Any:
        """See `Demo`."""
        import torch
        from transformers.utils import logging

        logging.disable_progress_bar()
        return self.model_class.from_pretrained(str(checkpoint), dtype=torch.float32).eval()

    def input_embedding(self, model: Any) -> Any:
        """See `Demo`."""
        return model.get_input_embeddings()

    def logits(self, model: Any, input_embeds: torch.Tensor, position_ids: np.ndarray | None) -> torch.Tensor:
        """See `Demo`."""
        import torch

        positions = None if position_ids is None else torch.from_numpy(position_ids)[:, None]  # [3, 1, N]
        with torch.inference_mode():
            logits: torch.Tensor = model(inputs_embeds=input_embeds[None], position_ids=positions).logits[0]
        return logits


def photographs() -> list[tuple[str, bytes]]:
    """The two photographs that come with the package: name and JPEG file. Both are in the public domain."""
    folder = resources.files("mm_plugin") / "data"
    return [(name, (folder / name).read_bytes()) for name in ("astronaut.jpg", "cat.jpg")]


class CallCounter:
    """Counts the calls of an encoder; pass `as_mapping()` wherever an encoder is taken.

    Attributes:
        calls: for each call, the number of items.
        seen: (identity, rows) of every item, in order.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.calls: list[int] = []
        self.seen: list[tuple[bytes | None, int]] = []

    def as_mapping(self) -> dict[Modality, Any]:
        """The encoder by modality, each call counted."""
        return {modality: partial(self._encode, modality) for modality in Modality}

    def _encode(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> Sequence[Any]:
        self.calls.append(len(items))
        self.seen += [(item.identity, item.num_tokens) for item in items]
        return self._encoder.encode(modality, items)


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(prefix length, extend length) of each chunk of a prompt."""
    for start in range(0, total, size):
        yield start, min(size, total - start)


def embed_in_chunks(
    output: MultimodalProcessorOutput,
    input_embedding: Any,
    encoder: Any,
    *,
    size: int,
    cache: EmbeddingCache | None = None,
) -> torch.Tensor:
    """Embed one request chunk by chunk, as a server with chunked prefill does, and put the chunks together.

    Args:
        output: the processed request.
        input_embedding: the text embedding.
        encoder: as for `embed_mm_inputs`.
        size: tokens in a chunk; the last may be shorter.
        cache: keeps rows across requests.

    Shape:
        returns [N, hidden].

    Raises:
        MMPluginError: an item failed.
    """
    import torch

    inputs = MultimodalInputs.from_processor_output(output)
    ids = torch.from_numpy(output.padded_input_ids)
    parts = []
    for prefix, extend in chunks(len(ids), size):
        batch = ForwardBatch([inputs], [prefix], [extend])
        step: EmbedOutput = embed_mm_inputs(ids[prefix : prefix + extend], batch, input_embedding, encoder, cache)
        if step.failed:
            raise step.failed[0].error
        parts.append(step.input_embeds)
    return torch.cat(parts)


class OptionTrial(msgspec.Struct, frozen=True):
    """One value of one option, tried on one medium.

    Attributes:
        option: its name.
        value: what it was set to.
        modality: of the medium.
        changed: whether fields, replacement or feature became others.
        new_key: whether the source key became another.
    """

    option: str
    value: Any
    modality: Modality
    changed: bool
    new_key: bool


def sweep_options(
    open_processor: Callable[..., ModelProcessor],
    media: Mapping[Modality, Any],
    *,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> list[OptionTrial]:
    """Try every option of a plugin: what changes a medium's output changes its source key, and no option of another modality does.

    Options that only the checkpoint's files may set are left out.

    Args:
        open_processor: opens the plugin's processor with the load options that it is given.
        media: a medium of each modality that the plugin takes.
        values: by option, the values to try; made from its type and default where there are none.

    Returns:
        What was tried; look into it for the options that must have changed something.

    Raises:
        AssertionError: an option breaks the rule, or no value of it was accepted; the message says which.
    """
    usual = open_processor()
    before = {modality: _try(usual, modality, medium, {}) for modality, medium in media.items()}
    kinds = {field.name: field.type for field in _struct_info(type(usual).Options).fields}
    trials: list[OptionTrial] = []
    for option, scope in option_scopes(type(usual).Options).items():
        if scope.at == "checkpoint":
            continue
        current = getattr(usual.options, option)
        tried = 0
        for value in (values or {}).get(option) or _other_values(kinds[option], current):
            try:
                loaded, called = (
                    (open_processor(**{option: value}), {}) if scope.at == "load" else (usual, {option: value})
                )
                after = {m: _try(loaded, m, medium, called) for m, medium in media.items()}
            except (RequestError, UsageError):
                continue
            tried += 1
            for modality in media:
                (old_key, old_content), (key, content) = before[modality], after[modality]
                changed, new_key = old_content != content, old_key != key
                about = not scope.modalities or modality.name.lower() in scope.modalities
                trials.append(OptionTrial(option, value, modality, changed, new_key))
                told = f"{option}={value!r} on {modality.argument}"
                assert about or not changed, f"{told} changes the output, and For says that it is not about them"
                assert about or not new_key, f"{told} changes the source key, and For says that it is not about them"
                assert new_key or not changed, f"{told} changes the output and not the source key"
        assert tried, f"no other value of {option} was accepted; pass some in `values`"
    return trials


def _struct_info(declared: type[msgspec.Struct]) -> msgspec.inspect.StructType:
    info = msgspec.inspect.type_info(declared)
    assert isinstance(info, msgspec.inspect.StructType)
    return info


def _other_values(kind: msgspec.inspect.Type, current: Any) -> list[Any]:
    """Values near the current one that its type may allow."""
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.LiteralType):
        return [value for value in kind.values if value != current]
    if isinstance(current, bool):
        return [not current]
    if isinstance(current, int):
        return [current * 4, current * 2, current + 1, current - 1, current // 2, current // 4]
    if isinstance(current, float):
        return [current * 2, current / 2]
    if isinstance(current, tuple) and all(isinstance(level, int) for level in current):
        return [tuple(255 - level for level in current)]
    return []


def _try(
    processor: ModelProcessor, modality: Modality, medium: Any, options: Mapping[str, Any]
) -> tuple[bytes | None, bytes]:
    """Source key, and a digest of all that the plugin makes of a medium.

    It is made under a salt of its own: a cache that answers by a wrong key would hide what the option does.
    """
    key = processor.prepare_item(modality, medium, **options).source_key
    made = processor.prepare_item(modality, medium, salt=secrets.token_bytes(16), **options)
    return key, digest(frame([made.fields, made.replacement.ids, made.replacement.takes_row, made.feature]))


def sweep_provenance(
    processor: ModelProcessor, *, medium: Any = None, rounds: int = 100, seed: int = 0, may_refuse: bool = False
) -> int:
    """Chat messages full of special and added tokens, whole and in parts: all of them stay text, and ordinary text is untouched.

    Args:
        processor: an open processor whose tokenizer has a chat template.
        medium: an image that goes with every other message; none where None.
        rounds: messages to try beside one for every protected token.
        seed: of the messages.
        may_refuse: whether a message may end in a `RequestError`, for tokenizers that cannot encode a token as text.

    Returns:
        How many messages were refused.

    Raises:
        AssertionError: text became a token of the model, or ordinary text got other ids than the tokenizer's own.
    """
    tokenizer = processor.checkpoint.tokenizer
    added = tokenizer.get_added_vocab()
    protected = np.array(sorted(set(added.values()) | set(processor.special_tokens.placeholders.values())))
    chooser = random.Random(seed)  # noqa: S311 - texts to try, no secret
    halves = [part for token in added for part in (token[: len(token) // 2], token[len(token) // 2 :])]
    pieces = [*added, *halves, "\n", "\n\n", " ", "word", "  two", "é", "\u2028", "\uff11", "<", "|", ">"]
    texts = [[token] for token in added]
    texts += [chooser.choices(pieces, k=chooser.randint(1, 6)) for _ in range(rounds)]
    refused = 0
    for index, parts in enumerate(texts):
        media = [medium] if medium is not None and index % 2 else []
        messages, plain = _messages(parts, bool(media)), _messages(["x"] * len(parts), bool(media))
        own = processor.process(plain, media)
        try:
            found = processor.process(messages, media)
        except RequestError:
            assert may_refuse, f"message {index} was refused: {parts!r}"
            refused += 1
            continue
        told = f"message {index}: {parts!r}"
        left, right = (ids[np.isin(ids, protected)] for ids in (found.input_ids, own.input_ids))
        assert np.array_equal(left, right), f"{told} became a token of the model"
        assert len(found.mm_items) == len(media), f"{told} became a place for a medium"
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = np.asarray(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if not media and np.array_equal(ids[np.isin(ids, protected)], right):
            assert np.array_equal(found.input_ids, ids), f"{told} got other ids than the tokenizer's own"
    return refused


def _messages(texts: Sequence[str], with_image: bool) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if with_image:
        content.insert(len(content) // 2, {"type": "image"})
    return [{"role": "user", "content": content}]
