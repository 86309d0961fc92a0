"""DeepSeek-VL2's vision tower and projector in plain torch, loaded alone from a checkpoint. Takes compact tiles as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mm_plugin import Checkpoint, Encoder, EncodesImages, Modality, MultimodalDataItem
from mm_plugin.encoder import fill_tower
from mm_plugin_deepseekvl2.config import DeepseekVL2Config, ProjectorConfig, VisionConfig, read_config
from mm_plugin_deepseekvl2.processor import DeepseekVL2Options

# Names of the tensors that are needed, and of others under the same prefixes: the head that pools an image into one vector.
PREFIXES = ("vision.", "projector.", "image_newline", "view_seperator")
UNREAD = ("vision.attn_pool.",)
# Tiles in one pass of the tower. The largest activation of a released model, 729 patches x 4,304 channels, takes 6 MB per tile
# in bfloat16, and two of them are alive at a time: a pass takes less than a gigabyte.
TILES_AT_ONCE = 64
_EPS = 1e-6


class DeepseekVL2Encoder(Encoder, EncodesImages):
    """Tiles in; embeddings of the thumbnail and the tiles, with newlines and the separator, out.

    Args:
        tower: on its device, in inference mode.
        config: of the checkpoint.
        options: the checkpoint's numbers for normalization.
    """

    def __init__(self, tower: DeepseekVL2Tower, config: DeepseekVL2Config, options: DeepseekVL2Options) -> None:
        self._tower = tower
        self._thumbnail_first = config.global_view_pos == "head"
        self._side = options.tile_side
        mean_and_std = torch.tensor(options.mean_and_std, dtype=torch.float32, device=tower.image_newline.device)
        self._mean, self._std = mean_and_std[:, :, None, None]  # each [3, 1, 1]

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: Any, dtype: Any) -> DeepseekVL2Encoder:
        """Build the tower from the checkpoint's vision tensors; the language model is never read.

        Raises:
            UsageError: the config lacks a key, or a tensor is missing, unexpected or of another shape.
        """
        config = read_config(checkpoint)
        options = DeepseekVL2Options.from_checkpoint(checkpoint, (Modality.IMAGE,))
        names = [
            name for name in checkpoint.tensor_names() if name.startswith(PREFIXES) and not name.startswith(UNREAD)
        ]
        what = f"{checkpoint.folder}: its vision and projector tensors are not those of its config.json"
        tower = fill_tower(
            lambda: DeepseekVL2Tower(config),
            lambda: checkpoint.read_tensors(names, device=device, dtype=dtype),
            what=what,
        )
        return cls(tower, config, options)

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> list[torch.Tensor]:
        """Embeddings [num_tokens, hidden] of each image; the tiles of all images pass the tower together."""
        tiles = [torch.as_tensor(item.feature) for item in items]
        with torch.inference_mode():
            passes = [self._tower(self._normalized(part)) for part in _parts(tiles, TILES_AT_ONCE)]
            rows = torch.split(torch.cat(passes), [len(part) for part in tiles])  # each [n_tiles, side * side, hidden]
            return [
                self._laid_out(found, *item.images_spatial_crop[0].tolist())
                for found, item in zip(rows, items, strict=True)
            ]

    def _normalized(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tiles [n_tiles, 3, side, side] in the tower's dtype; levels are normalized in the reference's own float32 arithmetic."""
        newline = self._tower.image_newline
        floats = []
        for part in parts:
            moved = part.to(newline.device, non_blocking=True)
            if moved.dtype == torch.uint8:
                levels = moved.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
                moved = levels.div_(255).sub_(self._mean).div_(self._std)
            floats.append(moved.to(newline.dtype))
        return torch.cat(floats)

    def _laid_out(self, tiles: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        """Embeddings of one image in the order of its tokens.

        Args:
            tiles: [n_tiles, side * side, hidden], the thumbnail first; only the thumbnail where it equals the only tile.
            columns: tiles along the width.
            rows: tiles along the height.
        """
        side, hidden = self._side, tiles.shape[-1]
        thumbnail = tiles[0].reshape(side, side, hidden)
        local = tiles[-rows * columns :].reshape(rows, columns, side, side, hidden)
        grid = local.transpose(1, 2).reshape(rows * side, columns * side, hidden)
        separator = self._tower.view_seperator[None]  # [1, hidden]
        first, last = (thumbnail, grid) if self._thumbnail_first else (grid, thumbnail)
        return torch.cat([self._with_newlines(first), separator, self._with_newlines(last)])

    def _with_newlines(self, grid: torch.Tensor) -> torch.Tensor:
        """[rows, columns, hidden] as [rows * (columns + 1), hidden]."""
        newlines = self._tower.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, newlines], dim=1).flatten(0, 1)


def _parts(tiles: Sequence[torch.Tensor], budget: int) -> Iterator[list[torch.Tensor]]:
    """The tiles of all images in order, in lists of at most `budget` tiles."""
    part: list[torch.Tensor] = []
    package = budget
    for image in tiles:
        rest = image
        while len(rest):
            part.append(rest[:package])
            rest, package = rest[package:], package - len(part[-1])
            if not package:
                yield part
                part, package = [], budget
    if part:
        yield part


class DeepseekVL2Tower(nn.Module):
    """Tower, projector and the two learned embeddings, named as in released checkpoints.

    Shape:
        tiles [n_tiles, 3, image_size, image_size]; returns [n_tiles, embeddings per tile, n_embed].
    """

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__()
        self.vision = _Siglip(config.vision_config)
        self.projector = _Projector(config.projector_config)
        self.image_newline = nn.Parameter(torch.empty(config.projector_config.n_embed))
        self.view_seperator = nn.Parameter(torch.empty(config.projector_config.n_embed))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """See the class."""
        rows: torch.Tensor = self.projector(self.vision(tiles))
        return rows


class _Siglip(nn.Module):
    """SigLIP's ViT up to and including its last norm.

    Source: SigLIP, arXiv:2303.15343; names and numbers of timm's `siglip_so400m_patch14_384`.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(config)
        self.pos_embed = nn.Parameter(torch.empty(1, config.grid**2, config.width))
        self.blocks = nn.Sequential(*(_Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, eps=_EPS)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.norm(self.blocks(self.patch_embed(tiles) + self.pos_embed))
        return features  # [n_tiles, n_patches, width]


class _PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.proj(tiles)  # [n_tiles, width, grid, grid]
        return patches.flatten(2).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=_EPS)
        self.attn = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=_EPS)
        self.mlp = _Mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [3, n_tiles, heads, n_patches, head_dim]
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden = int(config.width * config.mlp_ratio)
        self.fc1 = nn.Linear(config.width, hidden)
        self.fc2 = nn.Linear(hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class _Projector(nn.Module):
    """Patches to embeddings. `downsample_mlp_gelu` first joins squares of patches, zero-padded at the right and lower edges."""

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.joined = config.joined
        widths = [config.input_dim * config.joined**2] + [config.n_embed] * config.depth
        if config.projector_type == "downsample_mlp_gelu":
            widths[1:-1] = [config.n_embed * config.mlp_ratio] * (config.depth - 1)
        linears = [nn.Linear(before, after) for before, after in pairwise(widths)]
        # A GELU between two linear layers, so the linear ones have even indices.
        layers = [layer for linear in linears for layer in (nn.GELU(), linear)][1:]
        self.layers: nn.Module
        if config.projector_type == "identity":
            self.layers = nn.Identity()
        elif config.projector_type == "linear":
            self.layers = linears[0]
        else:
            self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joined > 1:
            x = _join(x, self.joined)
        out: torch.Tensor = self.layers(x)
        return out


def _join(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """Join squares of neighboring patches: [n, grid * grid, width] -> [n, side * side, width * ratio * ratio], channel first."""
    n_tiles, n_patches, width = x.shape
    grid = round(n_patches**0.5)
    side = -(-grid // ratio)
    padding = side * ratio - grid
    square = functional.pad(x.reshape(n_tiles, grid, grid, width), (0, 0, 0, padding, 0, padding))
    cut = square.reshape(n_tiles, side, ratio, side, ratio, width)
    return cut.permute(0, 1, 3, 5, 2, 4).reshape(n_tiles, side * side, width * ratio * ratio)
