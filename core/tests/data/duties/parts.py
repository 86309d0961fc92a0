"""The plugin's processor, encoder, embed routine, digest and store."""

from typing import Annotated, Literal

import numpy as np
import torch
from blake3 import blake3

from mm_plugin import BaseOptions, Encoder, EncodesImages, Modality, ModelProcessor, OptionScope, Replacement
from mm_plugin.cache import MemoryStore

hashed = []
shelves = []


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on another device, which this machine need not have."""

    @property
    def device(self):
        return torch.device("xpu:0")

    def cpu(self, *arguments, **named):
        return self.as_subclass(torch.Tensor)


def digest_elsewhere(tensors):
    hashed.append([len(tensor) for tensor in tensors])
    return [blake3(bytes(tensor.cpu().tolist())).digest() for tensor in tensors]


class Shelf(MemoryStore):
    """A store of the plugin's own, which records what it keeps."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.kept = []
        shelves.append(self)

    def put(self, key, value, num_bytes):
        self.kept.append(num_bytes)
        return super().put(key, value, num_bytes)


class Options(BaseOptions, frozen=True, kw_only=True):
    rule: Annotated[Literal["forwards", "backwards"], OptionScope.load()] = "forwards"
    brightness: Annotated[int, OptionScope.request("image")] = 0


class Processor(ModelProcessor):
    Options = Options

    def context(self, counts):
        return None

    def layout(self, modality, size, options, context):
        return {}

    def prepare(self, decoded, layout, options):
        mean = decoded.pixels.mean(axis=(0, 1)) + options.brightness
        return torch.from_numpy(np.stack([mean, 2 * mean]).astype(np.float32)).as_subclass(Elsewhere)

    def replacement(self, layout):
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], 2)


class Model(Encoder, EncodesImages):
    @classmethod
    def load(cls, checkpoint, device, dtype):
        return cls()

    def get_image_feature(self, items):
        return [item.feature.cpu() for item in items]


def embed(text_embeds, plan, embeddings, input_ids):
    """Rows are added to the placeholder's embedding; which tokens belong to an image is returned beside."""
    types = torch.zeros(plan.total, dtype=torch.int64)
    for piece, encoded in zip(plan.pieces, embeddings, strict=True):
        text_embeds[piece.out_start : piece.out_end] += encoded.embeddings
        types[piece.out_start : piece.out_end] = int(piece.modality)
    return text_embeds, types
