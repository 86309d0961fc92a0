"""`mm-plugin demo` of DeepSeek-VL2: a tiny checkpoint, and a second implementation of its vision part in plain Pillow and torch.

No library has the model, so the reference is implemented here from the model's description, as directly as possible, and shares
nothing with this plugin's processor and encoder. The language model of the tiny checkpoint is a Llama, which transformers runs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaForCausalLM

from mm_plugin import MultimodalDataItem, Processor
from mm_plugin.demo import Demo, DrawsViews, EmbeddingBoxes, ReferenceOutput, View
from mm_plugin_deepseekvl2.testing import language_config, make_checkpoint

Box = tuple[int, int, int, int]

_CELL = 6  # pixels of a token in the drawing of a layout
_GAP = (255, 255, 255)
_THUMBNAIL, _TILES, _NEWLINE, _SEPARATOR = (120, 160, 200), (170, 200, 225), (60, 60, 66), (213, 94, 0)


class _Model(NamedTuple):
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    language: Any


class DeepseekVL2Demo(Demo, DrawsViews):
    """DeepSeek-VL2 with the released tiles, a tower of two layers, and seeded weights."""

    reference_name: ClassVar[str] = "plain torch"

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`."""
        make_checkpoint(folder)

    def prompt(self, num_images: int) -> str:
        """See `Demo`."""
        images = "".join(f"This is image_{n + 1}: <image>\n" for n in range(num_images))
        return f"<|User|>: {images}What is in the images?\n\n<|Assistant|>:"

    def open_model(self, checkpoint: Path) -> _Model:
        """See `Demo`."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        settings = json.loads((checkpoint / "processor_config.json").read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = {}
        for file in checkpoint.glob("*.safetensors"):
            tensors |= load_file(file)
        language = LlamaForCausalLM(language_config(config))
        prefix = "language."
        language.load_state_dict({name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)})
        return _Model(config, settings, tensors, language.eval().requires_grad_(False))

    def input_embedding(self, model: _Model) -> Any:
        """See `Demo`."""
        return model.language.get_input_embeddings()

    def reference(
        self, model: _Model, checkpoint: Path, input_ids: np.ndarray, images: Sequence[bytes]
    ) -> ReferenceOutput:
        """See `Demo`."""
        ids = torch.from_numpy(input_ids)
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
        image_token = len(tokenizer["model"]["vocab"])  # the first of the tokens that are added to the vocabulary
        with torch.inference_mode():
            rows = [_rows(model, Image.open(io.BytesIO(data)), cropping=len(images) <= 2) for data in images]
            embeds = model.language.get_input_embeddings()(ids).clone()
            embeds[ids == image_token] = torch.cat(rows)
            logits = model.language(inputs_embeds=embeds[None]).logits[0]
        return ReferenceOutput(embeds, logits)

    def logits(self, model: _Model, input_embeds: torch.Tensor, position_ids: np.ndarray | None) -> torch.Tensor:
        """See `Demo`."""
        with torch.inference_mode():
            logits: torch.Tensor = model.language(inputs_embeds=input_embeds[None]).logits[0]
        return logits

    def embedding_boxes(self, processor: Processor, item: MultimodalDataItem) -> EmbeddingBoxes:
        """See `Demo`: boxes of the tiles put together; embeddings of the thumbnail, newlines and the separator have none."""
        columns, rows = item.images_spatial_crop[0].tolist()
        side = processor.options.image_size
        boxes = tuple(
            (column * side + left, row * side + top, column * side + right, row * side + bottom)
            for row in range(rows)
            for column in range(columns)
            for left, top, right, bottom in _tile_boxes(processor)
        )
        return EmbeddingBoxes(rows * side, columns * side, boxes)

    def views(self, processor: Processor, item: MultimodalDataItem, name: str, data: bytes) -> Sequence[View]:
        """See `DrawsViews`: the thumbnail, the image with its tiles, and the order of the tokens."""
        columns, rows = item.images_spatial_crop[0].tolist()
        side, tokens = processor.options.image_size, processor.options.tile_side
        tiles = np.asarray(item.feature)
        local = tiles[-rows * columns :].reshape(rows, columns, side, side, 3).swapaxes(1, 2)
        whole = self.embedding_boxes(processor, item)
        frames = tuple(
            (column * side, row * side, (column + 1) * side, (row + 1) * side)
            for row in range(rows)
            for column in range(columns)
        )
        order = "a newline after each row (dark), a separator (orange)"
        return [
            View(
                f"{name}: thumbnail",
                f"{side} x {side} pixels, {tokens} x {tokens} embeddings and {tokens} newlines",
                tiles[0],
                _tile_boxes(processor),
            ),
            View(
                f"tiles, {rows} x {columns}",
                f"{whole.height} x {whole.width} pixels, {len(whole.boxes)} embeddings and {rows * tokens} newlines",
                local.reshape(rows * side, columns * side, 3),
                whole.boxes,
                frames,
            ),
            View(f"layout of {item.num_tokens} tokens", order, _layout(tokens, rows, columns)),
        ]


def _tile_boxes(processor: Processor) -> tuple[Box, ...]:
    """The part of a tile that each of its embeddings stands for; the last ones of a line are cut off by the tile's edge."""
    options = processor.options
    step, side = options.patch_size * options.downsample_ratio, options.image_size
    starts = [index * step for index in range(options.tile_side)]
    return tuple((left, top, min(left + step, side), min(top + step, side)) for top in starts for left in starts)


def _layout(side: int, rows: int, columns: int) -> np.ndarray:
    """Every token as a square, in lines that end with a newline token: [height, width, 3] uint8."""
    lines = [[_THUMBNAIL] * side + [_NEWLINE]] * side + [[_SEPARATOR]]
    lines += [[_TILES] * (side * columns) + [_NEWLINE]] * (side * rows)
    longest = max(map(len, lines))
    cells = np.array([line + [_GAP] * (longest - len(line)) for line in lines], dtype=np.uint8)
    large = cells.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    large[_CELL - 1 :: _CELL], large[:, _CELL - 1 :: _CELL] = _GAP, _GAP
    return large


# ---------------------------------------------------------------- the reference


def _rows(model: _Model, image: Image.Image, *, cropping: bool) -> torch.Tensor:
    """Embeddings of one image, in the order of its tokens."""
    candidates = [tuple(candidate) for candidate in model.settings["candidate_resolutions"]]
    side = candidates[0][0]
    best = _best(image.size, candidates) if cropping else (side, side)
    gray = tuple(int(level * 255) for level in model.settings["image_mean"])
    view = ImageOps.pad(image, best, color=gray)
    crops = [
        view.crop((left, top, left + side, top + side))
        for top in range(0, best[1], side)
        for left in range(0, best[0], side)
    ]
    imgs = [ImageOps.pad(image, (side, side), color=gray), *crops]
    mean, std = (torch.tensor(model.settings[f"image_{name}"]) for name in ("mean", "std"))
    pixels = torch.stack([(torch.tensor(np.array(img)) / 255 - mean) / std for img in imgs])
    tiles = _project(model, _see(model, pixels.permute(0, 3, 1, 2)))  # [n_tiles, h, h, hidden]
    height = tiles.shape[1]
    # All tiles in one large grid.
    grid = tiles.new_empty(best[1] // side * height, best[0] // side * height, tiles.shape[-1])
    for index, tile in enumerate(tiles[1:]):
        top, left = (height * part for part in divmod(index, best[0] // side))
        grid[top : top + height, left : left + height] = tile
    rows: list[torch.Tensor] = []
    for square in (tiles[0], grid):
        for line in square:
            rows += [*line, model.tensors["image_newline"]]
        rows.append(model.tensors["view_seperator"])
    return torch.stack(rows[:-1])


def _best(size: tuple[int, int], candidates: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """The (width, height) that keeps most of an image's pixels, and among those the one with the least padding."""
    best, kept, wasted = candidates[0], -1, 0
    for width, height in candidates:
        scale = min(width / size[0], height / size[1])
        area = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        if area > kept or (area == kept and width * height - area < wasted):
            best, kept, wasted = (width, height), area, width * height - area
    return best[0], best[1]


def _see(model: _Model, pixels: torch.Tensor) -> torch.Tensor:
    """The vision tower: [n_tiles, 3, side, side] -> [n_tiles, n_patches, width]."""
    config = model.config["vision_config"]
    heads: int = config.get("heads", 16)
    w = {name[len("vision.") :]: t for name, t in model.tensors.items() if name.startswith("vision.")}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        spread, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) / torch.sqrt(spread + 1e-6) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    patch = config["patch_size"]
    x = functional.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch)
    x = x.flatten(2).transpose(1, 2) + w["pos_embed"]
    for block in range(config["layers"]):
        here = f"blocks.{block}"
        query, key, value = linear(norm(x, f"{here}.norm1"), f"{here}.attn.qkv").chunk(3, dim=-1)
        heard = []
        for q, k, v in zip(*(part.chunk(heads, dim=-1) for part in (query, key, value)), strict=True):
            heard.append(torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ v)
        x = x + linear(torch.cat(heard, dim=-1), f"{here}.attn.proj")
        inner = functional.gelu(linear(norm(x, f"{here}.norm2"), f"{here}.mlp.fc1"), approximate="tanh")
        x = x + linear(inner, f"{here}.mlp.fc2")
    return norm(x, "norm")


def _project(model: _Model, features: torch.Tensor) -> torch.Tensor:
    """The projector: [n_tiles, n_patches, width] -> [n_tiles, h, h, hidden], squares of patches joined."""
    ratio = model.settings["downsample_ratio"]
    grid = round(features.shape[1] ** 0.5)
    square = features.transpose(1, 2).reshape(*features.shape[::2], grid, grid)
    more = -grid % ratio
    joined = functional.unfold(functional.pad(square, (0, more, 0, more)), ratio, stride=ratio).transpose(1, 2)
    first, last = (
        [model.tensors[f"projector.layers.{layer}.{part}"] for part in ("weight", "bias")] for layer in (0, 2)
    )
    out: torch.Tensor = functional.linear(functional.gelu(functional.linear(joined, *first)), *last)
    side = (grid + more) // ratio
    return out.reshape(len(out), side, side, -1)
