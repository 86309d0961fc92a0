"""The vision part of DeepSeek-VL2's config.json, read as plain JSON because transformers does not have the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from mm_plugin import Checkpoint, UsageError

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1)]


class VisionConfig(msgspec.Struct, frozen=True):
    """The SigLIP tower. Numbers that released files leave out have the defaults of the model's own code; the others are required.

    Attributes:
        width: channels.
        layers: transformer blocks.
        patch_size: pixels along a side of a patch.
        mlp_ratio: hidden channels of a block's MLP, divided by `width`.
        image_size: pixels along a side of a tile.
        heads: attention heads.
        class_token: whether a class token precedes the patches; True is not supported.
    """

    width: Positive
    layers: Positive
    patch_size: Positive
    mlp_ratio: Annotated[float, msgspec.Meta(gt=0)]
    image_size: Positive = 384
    heads: Positive = 16
    class_token: Literal[False] = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")
        if self.image_size < self.patch_size:
            raise ValueError(
                f"image_size must be at least patch_size, got image_size {self.image_size} and patch_size {self.patch_size}"
            )

    @property
    def grid(self) -> int:
        """Patches along a side of a tile; pixels beyond the last whole patch are ignored."""
        return self.image_size // self.patch_size


class ProjectorConfig(msgspec.Struct, frozen=True):
    """The projector from patches to embeddings of the language model. Every number has the default of the model's own code.

    Attributes:
        projector_type: its kind.
        input_dim: channels of the tower.
        n_embed: channels of an embedding.
        depth: linear layers of an MLP.
        mlp_ratio: hidden channels of `downsample_mlp_gelu`, divided by `n_embed`.
        downsample_ratio: patches along a side of the square that `downsample_mlp_gelu` joins into one embedding.
        token_pooling: another way to join patches, which the model's own token count ignores; True is not supported.
    """

    projector_type: Literal["downsample_mlp_gelu", "mlp_gelu", "linear", "identity"] = "downsample_mlp_gelu"
    input_dim: Positive = 1152
    n_embed: Positive = 2048
    depth: Positive = 2
    mlp_ratio: Positive = 1
    downsample_ratio: Positive = 2
    token_pooling: Literal[False] = False

    def __post_init__(self) -> None:
        if self.projector_type == "identity" and self.input_dim != self.n_embed:
            raise ValueError(
                f"an identity projector needs n_embed equal to input_dim, got {self.n_embed} and {self.input_dim}"
            )
        if self.projector_type == "downsample_mlp_gelu" and self.depth < 2:
            raise ValueError(f"depth must be at least 2 for downsample_mlp_gelu, got {self.depth}")

    @property
    def joined(self) -> int:
        """Patches along a side of the square that becomes one embedding."""
        return self.downsample_ratio if self.projector_type == "downsample_mlp_gelu" else 1


class DeepseekVL2Config(msgspec.Struct, frozen=True):
    """The parts of config.json that the processor and the encoder need.

    Attributes:
        vision_config: the tower.
        projector_config: the projector.
        tile_tag: how the place of a tile is expressed; only `2D`, a learned newline after each row of the grid, is supported.
        global_view_pos: whether the thumbnail comes before (`head`) or after (`tail`) the tiles.
    """

    vision_config: VisionConfig
    projector_config: ProjectorConfig = ProjectorConfig()
    tile_tag: Literal["2D"] = "2D"
    global_view_pos: Literal["head", "tail"] = "head"

    def __post_init__(self) -> None:
        if self.projector_config.input_dim != self.vision_config.width:
            raise ValueError(
                f"projector_config.input_dim must equal vision_config.width, got {self.projector_config.input_dim} and "
                f"{self.vision_config.width}"
            )


def read_config(checkpoint: Checkpoint) -> DeepseekVL2Config:
    """The vision part of config.json.

    Raises:
        UsageError: a key is missing or has an unsupported value; the message names file and key.
    """
    return read_struct(checkpoint.config, DeepseekVL2Config, f"{checkpoint.folder}/config.json")


def read_struct(value: Any, kind: type[T], file: str) -> T:
    """Convert parsed JSON to a struct.

    Args:
        value: parsed JSON.
        kind: the struct.
        file: that it was read from, for the message.

    Raises:
        UsageError: it does not fit; the message names file and key.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {error}", argument="checkpoint") from error
