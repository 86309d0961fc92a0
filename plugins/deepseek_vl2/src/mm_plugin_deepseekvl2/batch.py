"""Pads processed prompts to one batch, as the model's own processor does, for code that runs the released model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mm_plugin import ModelProcessor, MultimodalProcessorOutput, UsageError
from mm_plugin_deepseekvl2.processor import normalize_tiles


def batchify(
    processor: ModelProcessor,
    outputs: Sequence[MultimodalProcessorOutput],
    *,
    padding: Literal["left", "right"] = "left",
) -> dict[str, np.ndarray]:
    """Pad ids to one length and put all tiles into one array. A server with continuous batching does not need it.

    Args:
        processor: that processed the prompts.
        outputs: at least one.
        padding: the side on which ids are padded.

    Shape:
        `input_ids` [batch, seq] int64, `attention_mask` [batch, seq] int64, `images_seq_mask` [batch, seq] bool, `images`
        [batch, n_tiles, 3, side, side] float32, `images_spatial_crop` [batch, n_images, 2] int64, `seq_lens` [batch] int64. A
        prompt with fewer tiles or images than another is filled with zeros; a batch without images has one tile of zeros.

    Raises:
        UsageError: `outputs` is empty, or an image came as embeddings.
    """
    if not outputs:
        raise UsageError("outputs must hold at least one prompt", argument="outputs")
    options = processor.options
    lengths = [len(output.input_ids) for output in outputs]
    seq = max(lengths)
    tiles = [[_floats(item, options.table) for item in output.mm_items] for output in outputs]
    n_tiles = max(1, *(sum(map(len, parts)) for parts in tiles))
    n_images = max(1, *map(len, tiles))
    batch = len(outputs)
    ids = np.full((batch, seq), processor.checkpoint.tokenizer.pad_token_id, dtype=np.int64)
    attention = np.zeros((batch, seq), dtype=np.int64)
    is_image = np.zeros((batch, seq), dtype=bool)
    images = np.zeros((batch, n_tiles, 3, options.image_size, options.image_size), dtype=np.float32)
    crops = np.zeros((batch, n_images, 2), dtype=np.int64)
    for index, (output, length, parts) in enumerate(zip(outputs, lengths, tiles, strict=True)):
        place = slice(seq - length, seq) if padding == "left" else slice(0, length)
        ids[index, place] = output.input_ids
        attention[index, place] = 1
        is_image[index, place] = output.token_modalities != 0
        if parts:
            found = np.concatenate(parts)
            images[index, : len(found)] = found
            crops[index, : len(parts)] = np.concatenate([item.images_spatial_crop for item in output.mm_items])
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "images_seq_mask": is_image,
        "images": images,
        "images_spatial_crop": crops,
        "seq_lens": np.array(lengths, dtype=np.int64),
    }


def _floats(item: Any, table: np.ndarray) -> np.ndarray:
    """All tiles of an item; the compact form leaves out the tile of an image whose only tile equals its thumbnail."""
    if item.feature is None:
        raise UsageError("an image that came as embeddings has no tiles for a batch", argument="outputs")
    feature = np.asarray(item.feature)
    if feature.dtype != np.uint8:
        return feature
    return normalize_tiles(feature.repeat(2, axis=0) if len(feature) == 1 else feature, table)
