"""Rows over bytes: what a repeated image costs, and what an identity costs."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.harness import Bar, Row
from benchmarks.pixel_rows import img
from mm_plugin import Registry
from mm_plugin.identity import feature_digest
from mm_plugin.media import open_image

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>What is this?"


def rows(registry: Registry, checkpoint: Path) -> Iterator[Row]:
    """A repeated JPEG, and the digest of a feature in both formats."""
    yield from _repeated(registry, checkpoint)
    yield _digest()


def _repeated(registry: Registry, checkpoint: Path) -> Iterator[Row]:
    buffer = io.BytesIO()
    Image.fromarray(img(2048, 2048)).save(buffer, "JPEG", quality=90)
    data = buffer.getvalue()
    processor = registry.load_processor(checkpoint)
    first = processor.process(PROMPT, images=[data])
    key = blake3(data).digest()
    size = f"{len(data) / 1e6:.2f} MB"

    def same_item(ours: Any, _reference: Any, _floor: Any) -> None:
        # The very object: nothing was decoded, resized or digested again.
        assert ours.mm_items[0].feature is first.mm_items[0].feature
        assert np.array_equal(ours.padded_input_ids, first.padded_input_ids)

    def same_key(ours: Any, _reference: Any, floor: Any) -> None:
        assert floor == key
        framed = b"l" + _count(2) + b"s" + _count(5) + b"bytes" + b"b" + _count(32) + key
        assert ours == blake3(framed).digest()

    floor = ("blake3 of the file, 1 thread", lambda: blake3(data).digest())
    yield Row(
        f"source digest of a repeated 2,048 x 2,048 JPEG ({size})",
        lambda: open_image(data, path="images[0]", settings=processor.settings).digest(),
        same_key,
        Bar(0.3, "ms"),
        floor=floor,
    )
    reference = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12_845_056})
    yield Row(
        "the same through process(), 5,329 tokens laid out",
        lambda: processor.process(PROMPT, images=[data]),
        same_item,
        Bar(0.3, "ms"),
        ("transformers: decode and prepare", lambda: reference(Image.open(io.BytesIO(data)), return_tensors="np")),
        floor,
    )


def _count(value: int) -> bytes:
    return struct.pack(">Q", value)


def _int(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return b"i+" + _count(len(data)) + data


def _digest() -> Row:
    """16,384 patches: 77 MB of float32 pixel values, 9.6 MB of compact ones."""
    compact = np.random.default_rng(0).integers(0, 256, (16_384, 3, 196), dtype=np.uint8)
    floats = np.repeat(compact[:, :, None].astype(np.float32), 2, axis=2).reshape(len(compact), -1)

    def check(ours: Any, reference: Any, floor: Any) -> None:
        for found, name, array in ((ours, b"uint8", compact), (reference, b"float32", floats)):
            shape = b"l" + _count(array.ndim) + b"".join(map(_int, array.shape))
            raw = b"b" + _count(32) + blake3(array.tobytes()).digest()
            assert found == blake3(b"l" + _count(3) + b"s" + _count(len(name)) + name + shape + raw).digest()
        assert floor == blake3(compact.tobytes()).digest()

    return Row(
        "digest of 16,384 compact patches (9.6 MB)",
        lambda: feature_digest(compact),
        check,
        Bar(3, "ms"),
        ("the same as float32 (77 MB)", lambda: feature_digest(floats)),
        ("blake3, all threads", lambda: blake3(compact.data.cast("B"), max_threads=blake3.AUTO).digest()),
    )
