"""The author's kit: what a plugin's own tests and `mm-plugin demo` build on. Knows no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from mm_plugin.embed import EmbedOutput, embed_mm_inputs
from mm_plugin.encoder import Encoder
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


class Demo(ABC):
    """What a plugin offers to `mm-plugin demo`: a tiny checkpoint, a prompt, and the model's own forward to compare with.

    Attributes:
        options: load options under which the plugin prepares images exactly as `reference` does.
    """

    options: ClassVar[Mapping[str, Any]] = {}

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
        """Which part of the resized picture each row of an image stands for."""


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
