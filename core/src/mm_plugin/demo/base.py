"""What a plugin offers to `mm-plugin demo`: a tiny checkpoint, a prompt, a reference to compare with, views of its embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from mm_plugin.items import MultimodalDataItem
from mm_plugin.media.types import SampledVideo

if TYPE_CHECKING:
    import torch

    from mm_plugin.inputs.processed import MultimodalProcessorOutput
    from mm_plugin.processor.processor import Processor

# Left, top, right and bottom of a rectangle, pixels.
Box = tuple[int, int, int, int]


class ReferenceOutput(msgspec.Struct, frozen=True, eq=False):
    """What the model's own implementation computes for a prompt, without using this package.

    Attributes:
        input_embeds: [N, hidden] float32, on the CPU.
        logits: [N, vocabulary] float32, on the CPU.
        position_ids: [3, N] int64, or None for a model with ordinary positions.
    """

    input_embeds: Any
    logits: Any
    position_ids: Any = None


class EmbeddingBoxes(msgspec.Struct, frozen=True):
    """Which part of an image each of its embeddings stands for, for drawing.

    Attributes:
        height: of the resized image, pixels.
        width: of the resized image, pixels.
        boxes: one for each embedding that stands for a part of the image.
    """

    height: int
    width: int
    boxes: tuple[Box, ...]


class View(msgspec.Struct, frozen=True, eq=False):
    """One image of what a model sees of an image, for drawing.

    Attributes:
        title: shown above the caption.
        caption: one line of facts.
        pixels: [height, width, 3] uint8 RGB.
        boxes: drawn with thin lines; one for each embedding.
        frames: drawn with thick lines, around parts with many embeddings, such as tiles.
    """

    title: str
    caption: str
    pixels: np.ndarray
    boxes: tuple[Box, ...] = ()
    frames: tuple[Box, ...] = ()


class Demo(ABC):
    """What a plugin offers to `mm-plugin demo`. Abstract; a spec names it in `ModelSpec.demo`.

    A demo of videos adds `ShowsVideos`, one that draws its own images adds `DrawsViews`.

    Attributes:
        options: load options under which the plugin prepares images exactly as `reference` does.
        reference_name: what computes the reference, as the demo prints it.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    reference_name: ClassVar[str] = "transformers"

    @abstractmethod
    def make_checkpoint(self, folder: Path) -> None:
        """Write a tiny checkpoint with seeded weights, laid out as the released ones are.

        Args:
            folder: empty.
        """

    @abstractmethod
    def prompt(self, num_images: int) -> str:
        """A prompt in the model's own format.

        Args:
            num_images: images in it.
        """

    @abstractmethod
    def open_model(self, checkpoint: Path) -> Any:
        """The whole model in float32 on the CPU, opened by its own library.

        Args:
            checkpoint: the folder.
        """

    @abstractmethod
    def input_embedding(self, model: Any) -> Any:
        """The model's text embedding.

        Args:
            model: what `open_model` returned.
        """

    @abstractmethod
    def reference(
        self, model: Any, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]
    ) -> ReferenceOutput:
        """The model's own forward on an expanded prompt, and on images that its own library prepares.

        Args:
            model: what `open_model` returned.
            checkpoint: the folder.
            input_ids: [N] int64, model ids of the expanded prompt.
            images: encoded files, in prompt order.
        """

    @abstractmethod
    def logits(self, model: Any, input_embeds: torch.Tensor, position_ids: np.ndarray | None) -> torch.Tensor:
        """The model's logits on embeddings that were made elsewhere.

        Args:
            model: what `open_model` returned.
            input_embeds: of the whole prompt.
            position_ids: of M-RoPE; None for a model with ordinary positions.

        Shape:
            `input_embeds` is [N, hidden] float32, `position_ids` [3, N] int64; returns [N, vocabulary] float32.
        """

    @abstractmethod
    def embedding_boxes(self, processor: Processor, item: MultimodalDataItem) -> EmbeddingBoxes:
        """Which part of the resized image each embedding stands for; embeddings that stand for none have no box.

        Args:
            processor: that prepared the item.
            item: an image, or the frames of a video.
        """


class DrawsViews(ABC):
    """Mixin for demos of models that see more of an image than one resized image, such as tiles."""

    @abstractmethod
    def views(self, processor: Processor, item: MultimodalDataItem, name: str, data: bytes) -> Sequence[View]:
        """What the model sees of an image, drawn one below the other instead of the resized image.

        Args:
            processor: that prepared the item.
            item: the processed image.
            name: of the file.
            data: the encoded file.
        """


class DemoVideo(msgspec.Struct, frozen=True, eq=False):
    """One video of a demo.

    Attributes:
        name: of the file.
        data: the encoded file.
        size: of its frames, with the indices and times of those that were sampled.
        item: the processed video.
    """

    name: str
    data: bytes
    size: SampledVideo
    item: MultimodalDataItem


class ShowsVideos(ABC):
    """Mixin for demos of models that take videos."""

    @abstractmethod
    def video_prompt(self, num_images: int, num_videos: int) -> str:
        """A prompt in the model's own format, images first.

        Args:
            num_images: images in it.
            num_videos: videos in it.
        """

    @abstractmethod
    def video_reference(
        self,
        model: Any,
        checkpoint: Path,
        output: MultimodalProcessorOutput,
        images: Sequence[bytes],
        videos: Sequence[DemoVideo],
    ) -> ReferenceOutput:
        """The model's own forward on a prompt with videos, on pixels that are decoded and prepared without this package.

        Args:
            model: what `open_model` returned.
            checkpoint: the folder.
            output: the processed prompt; its ids and positions are what the language model gets.
            images: encoded files, in prompt order.
            videos: in prompt order, after the images.
        """


class TransformersDemo(Demo):
    """A demo whose model transformers opens whole. Abstract.

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


def sample_images() -> list[tuple[str, bytes]]:
    """Name and JPEG file of the two images that come with the package. Both are in the public domain.

    >>> [name for name, data in sample_images()]
    ['astronaut.jpg', 'cat.jpg']
    """
    folder = resources.files("mm_plugin") / "data"
    return [(name, (folder / name).read_bytes()) for name in ("astronaut.jpg", "cat.jpg")]
