"""What a plugin offers to `mm-plugin demo`: a tiny checkpoint, a prompt, a reference and views of its embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import msgspec.inspect
import numpy as np

from mm_plugin.items import MultimodalDataItem
from mm_plugin.media.types import SampledVideo

if TYPE_CHECKING:
    import torch

    from mm_plugin.inputs.processed import MultimodalProcessorOutput
    from mm_plugin.processor.processor import Processor


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
        height: of the resized image, pixels.
        width: of the resized image, pixels.
        boxes: (left, top, right, bottom) of each row, pixels.
    """

    height: int
    width: int
    boxes: tuple[tuple[int, int, int, int], ...]


class View(msgspec.Struct, frozen=True, eq=False):
    """One image of what a model sees of an image, for drawing.

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
    def row_boxes(self, processor: Processor, item: MultimodalDataItem) -> RowBoxes:
        """Which part of the resized image each row of an image stands for; rows that stand for no part have no box."""


class DrawsViews(ABC):
    """For demos of models that see more of an image than one resized image."""

    @abstractmethod
    def views(self, processor: Processor, item: MultimodalDataItem, name: str, data: bytes) -> Sequence[View]:
        """What the model sees of an image, drawn one below the other in place of the image with its rows.

        Args:
            processor: which prepared it.
            item: the processed image.
            name: of the file.
            data: the encoded file.
        """


class ShownVideo(msgspec.Struct, frozen=True, eq=False):
    """One video that the demo shows.

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
        videos: Sequence[ShownVideo],
    ) -> Reference:
        """The model's own forward on a prompt with videos, on pixels that are decoded and prepared without this package.

        Args:
            model: what `open_model` returned.
            checkpoint: the folder.
            output: the processed prompt; its ids and positions are what the language model gets.
            images: encoded files, in prompt order.
            videos: in prompt order, after the images.
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


def sample_images() -> list[tuple[str, bytes]]:
    """The two images that come with the package: name and JPEG file. Both are in the public domain."""
    folder = resources.files("mm_plugin") / "data"
    return [(name, (folder / name).read_bytes()) for name in ("astronaut.jpg", "cat.jpg")]
