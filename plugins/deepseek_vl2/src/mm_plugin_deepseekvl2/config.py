"""What DeepSeek-VL2's config.json says of its vision part, read as plain JSON: transformers does not know the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from mm_plugin import Checkpoint, UsageError

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1)]


class VisionConfig(msgspec.Struct, frozen=True):
    """The SigLIP tower. Numbers that released files leave out have the model code's defaults; the others must be there.

    Attributes:
        width: channels.
        layers: transformer blocks.
        patch_size: pixels along a side of a patch.
        mlp_ratio: hidden channels of a block's MLP over `width`.
        image_size: pixels along a side of a tile.
        heads: attention heads.
        class_token: whether a class token stands before the patches; none is served.
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
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is less than patch_size {self.patch_size}")

    @property
    def grid(self) -> int:
        """Patches along a side of a tile; pixels beyond the last whole patch are not seen."""
        return self.image_size // self.patch_size


class ProjectorConfig(msgspec.Struct, frozen=True):
    """What turns patches into rows as wide as the language model. Every number has the model code's default.

    Attributes:
        projector_type: its kind.
        input_dim: channels of the tower.
        n_embed: channels of a row.
        depth: linear layers of an MLP.
        mlp_ratio: hidden channels over `n_embed`, of `downsample_mlp_gelu`.
        downsample_ratio: patches along a side of the square that `downsample_mlp_gelu` joins into one row.
        token_pooling: another way to join patches, which the model's own token count does not know; not served.
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
            raise ValueError(f"an identity projector cannot turn {self.input_dim} channels into {self.n_embed}")
        if self.projector_type == "downsample_mlp_gelu" and self.depth < 2:
            raise ValueError("a downsample_mlp_gelu projector has a depth of at least 2")

    @property
    def joined(self) -> int:
        """Patches along a side of the square that becomes one row."""
        return self.downsample_ratio if self.projector_type == "downsample_mlp_gelu" else 1


class DeepseekVL2Config(msgspec.Struct, frozen=True):
    """The parts of config.json that processor and encoder need.

    Attributes:
        vision_config: the tower.
        projector_config: the projector.
        tile_tag: how rows tell where tiles lie; `2D`, by a learned row after each row of the grid, is what is served.
        global_view_pos: whether the thumbnail's rows come before (`head`) or after (`tail`) the tiles'.
    """

    vision_config: VisionConfig
    projector_config: ProjectorConfig = ProjectorConfig()
    tile_tag: Literal["2D"] = "2D"
    global_view_pos: Literal["head", "tail"] = "head"

    def __post_init__(self) -> None:
        if self.projector_config.input_dim != self.vision_config.width:
            raise ValueError(
                f"projector_config.input_dim {self.projector_config.input_dim} is not vision_config.width "
                f"{self.vision_config.width}"
            )


def read_config(checkpoint: Checkpoint) -> DeepseekVL2Config:
    """The vision part of config.json.

    Raises:
        UsageError: a key is missing, or has a value that is not served; the message names file and key.
    """
    return read_struct(checkpoint.config, DeepseekVL2Config, f"{checkpoint.folder}/config.json")


def read_struct(value: Any, kind: type[T], file: str) -> T:
    """JSON as a struct.

    Raises:
        UsageError: it does not fit; the message names file and key.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {error}", argument="checkpoint") from error
